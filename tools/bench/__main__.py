"""All benchmarks, one after the other: `python -m tools.bench` (`make bench`).

Each is a process of its own, and can be run by itself.  Everything that was measured goes to
`build/bench/result.json`, one object a figure, with the command that makes it again; where it was
measured, to `build/bench/machine.json`.  A benchmark that fails is named at the end, and the
others' figures stay.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from lab.harness.measured import machine, versions
from tools.bench.measurement import show

_FOLDER = Path("build/bench")


@dataclass(frozen=True)
class Bench:
    """The options of a benchmark.  name: its module without `_bench`.  quick: for a trial run."""

    name: str
    quick: str
    arguments: str = ""

    def command(self, *, quick: bool) -> list[str]:
        arguments = self.quick if quick else self.arguments
        return ["-m", f"tools.bench.{self.name}_bench", *arguments.split()]


# Those that need the machine most to themselves first.
BENCHES = (
    Bench("link", "--repeats 2 --steps 300"),
    Bench("shim", "--repeats 1 --tokens 150"),
    Bench("latency", "--repeats 1 --seconds 2"),
    Bench("capacity", "--repeats 1 --seconds 2 --engines 1 4"),
    Bench("fold", "--repeats 1 --reports 2560"),
    Bench("start", "--repeats 2"),
    Bench("growth", "--repeats 1 --steps 300"),
    Bench("peers", "--repeats 1 --steps 800"),
    Bench("record", "--repeats 2"),
    Bench("pod", "--repeats 1 --seconds 3"),
    Bench("fleet", "--repeats 1 --sidecars 5 --changes 5"),
    Bench("fleet", "--repeats 1 --sidecars 1 --changes 5", "--sidecars 1"),
    Bench("fleet", "--view --repeats 1 --sidecars 5 --seconds 2", "--view"),
    Bench("simulation", "--repeats 1"),
    Bench("safety", "--scenarios 20 --processes 1"),
    Bench("paced", "--repeats 1 --tokens 60"),
    Bench("steering", "--repeats 1 --tokens 50"),
)


def main() -> int:
    """The command line; 1 when a benchmark failed, 0 else: bars are shown, not enforced."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench", description=(__doc__ or "").partition("\n")[0]
    )
    names = sorted({bench.name for bench in BENCHES})
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--quick", action="store_true", help="whether they run; figures are noise")
    options = parser.parse_args()
    selected = [bench for bench in BENCHES if not options.only or bench.name in options.only]
    _FOLDER.mkdir(parents=True, exist_ok=True)
    place = {"machine": machine(), "versions": versions(), "quick": options.quick}
    (_FOLDER / "machine.json").write_text(json.dumps(place, indent=1) + "\n")
    figures, failed = [], []
    part = _FOLDER / "part.json"
    for number, bench in enumerate(selected, 1):
        command = bench.command(quick=options.quick)
        print(f"[{number}/{len(selected)}] python {' '.join(command)}", flush=True)
        part.unlink(missing_ok=True)
        start_time = time.monotonic()
        done = subprocess.run([sys.executable, *command, "--json", str(part)], check=False)

        print(f"[{number}/{len(selected)}] {time.monotonic() - start_time:.0f} s\n", flush=True)
        if done.returncode:
            failed.append(" ".join(command))
            continue
        figures += json.loads(part.read_text())
        (_FOLDER / "result.json").write_text(json.dumps(figures, indent=1) + "\n")
    part.unlink(missing_ok=True)
    show(figures)
    for failed_command in failed:
        print(f"failed: python {failed_command}", file=sys.stderr)
    print(f"{len(figures)} figures in {_FOLDER / 'result.json'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
