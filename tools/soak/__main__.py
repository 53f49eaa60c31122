"""Runs the soak: `python -m tools.soak --minutes 30` (`make soak`).

The real SGLang on the CPU, a real sidecar that records, serves its page and its metrics and has a
real Redis, under changing load.  Every few seconds what each process holds is sampled, and at the
end every step that the engine ran is looked up on record.  Exit code 1: there are findings.
"""

import argparse
from pathlib import Path

from lab.harness.terminal import Terminal
from tools.soak import report
from tools.soak.run import Options, soak


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="of load")
    parser.add_argument("--output", type=Path, default=Path("build/soak"))
    parser.add_argument("--seed", type=int, default=1, help="of the load")
    parsed_arguments = parser.parse_args()
    options = Options(
        parsed_arguments.minutes, parsed_arguments.output.resolve(), parsed_arguments.seed
    )
    terminal = Terminal()
    result = soak(options, terminal.say)
    report.show(result, terminal)
    report.write(result, options)
    return int(any(result.findings.values()))


if __name__ == "__main__":
    raise SystemExit(main())
