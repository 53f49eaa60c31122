"""Runs `speculation-would-steer` where SGLang runs on a processor, in the clone's own environment.

python -m lab.cpu_engine.would_steer sglang -- --model-path MODEL --speculative-algorithm ...
"""

import sys

from lab.cpu_engine.environment import enter_cpu_environment


def main() -> int:
    """Returns the exit code of the command."""
    enter_cpu_environment()
    # It imports SGLang, which needs the stand-ins.
    from engine_shim.preflight.__main__ import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
