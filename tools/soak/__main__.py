"""The soak: `python -m tools.soak --minutes 30` (`make soak`).

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
    given = parser.parse_args()
    options = Options(given.minutes, given.output.resolve(), given.seed)
    terminal = Terminal()
    found = soak(options, terminal.say)
    report.show(found, terminal)
    report.write(found, options)
    return int(any(found.findings.values()))


if __name__ == "__main__":
    raise SystemExit(main())
