"""How far below plain decoding the controller falls in any 500 steps of random scenarios.

    python -m tools.bench.safety_bench --scenarios 100000 --processes 2
    python -m tools.bench.safety_bench --file build/safety/scenario-17.yaml

Every scenario has a number and depends on no other (`tests/support/random_scenarios.py`); it is
scored by expected tokens (`tests/support/against_off.py`).  Results are kept in `--folder`, so that
a run that was stopped can be continued, and further scenarios can be added with `--first`; a
change of the controller or of the scenarios begins anew.  Scenarios below 0.98 are listed and
written as files there, which `controller simulate --scenario` runs as well.
"""

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from simulator.process_pool import make_process_pool
from simulator.scenarios.scenario_file import load_scenario
from tests.support.against_off import BAR, FLOOR, SHARE_BELOW_BAR, WINDOW, against_off
from tests.support.dealing import dealt
from tests.support.random_scenarios import has_memory, scenarios
from tools.bench.measurement import RATIO, Measurement, command_line, run

_CODE = ("controller/core", "simulator")
_TESTS = ("against_off.py", "dealing.py", "random_costs.py", "random_scenarios.py")
_SHOW_EVERY_SECONDS = 30.0
_WORST_SHOWN = 20


def _play(number: int, folder: Path) -> dict[str, Any]:
    """One scenario's result; without a ratio if there is none of the number or it is too short."""
    drawn = dealt(scenarios(), number)
    if drawn is None:
        return {"number": number}
    with tempfile.TemporaryDirectory() as place:
        found = against_off(drawn.scenario(Path(place)), by_request=drawn.has_memory)
    if found is None:
        return {"number": number}
    if found.worst < BAR:
        drawn.write(folder, f"scenario-{number}", _said(found.worst, found.begins))
    return {"number": number, **asdict(found)}


def _said(worst: float, begins: int) -> str:
    return f"{worst:.4f} of plain decoding in the {WINDOW} steps from step {begins}"


def _version() -> str:
    """A name for the code that results depend on."""
    root = Path(__file__).parents[2]
    files = [file for part in _CODE for file in sorted((root / part).rglob("*.py"))]
    files += [root / "tests/support" / name for name in _TESTS]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def _results(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Those of the wanted numbers, the known ones first."""
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"results-{_version()}.jsonl"
    wanted = set(range(options.first, options.first + options.scenarios))
    if kept.exists():
        # A run that was killed may have left half a line.
        lines = kept.read_text().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        kept.write_text("".join(whole))
        for found in map(json.loads, whole):
            if found["number"] in wanted:
                wanted.remove(found["number"])
                yield found
    with kept.open("a") as out:
        for found in _played(sorted(wanted), folder, options.processes):
            out.write(json.dumps(found) + "\n")
            out.flush()
            yield found


def _played(
    numbers: Sequence[int], folder: Path, processes: int | None
) -> Iterator[dict[str, Any]]:
    if processes == 1:
        for number in numbers:
            yield _play(number, folder)
        return
    with make_process_pool(processes) as pool:
        yield from pool.map(_play, numbers, [folder] * len(numbers), chunksize=8)


def _with_progress(results: Iterable[dict[str, Any]], scenarios: int) -> Iterator[dict[str, Any]]:
    """The same, and a line now and then."""
    began = shown = time.monotonic()
    below = 0
    lowest = np.inf
    for done, found in enumerate(results, 1):
        if "worst" in found:
            lowest = min(lowest, found["worst"])
            below += found["worst"] < BAR
        now = time.monotonic()
        if now - shown > _SHOW_EVERY_SECONDS:
            shown = now
            left = (scenarios - done) * (now - began) / done
            print(
                f"{done}/{scenarios}, {below} below {BAR}, lowest {lowest:.4f}, {left:.0f} s left",
                flush=True,
            )
        yield found


def _measure_files(files: Sequence[Path]) -> Iterable[Measurement]:
    for file in files:
        by_request = has_memory(yaml.safe_load(file.read_text()))
        found = against_off(load_scenario(file), by_request=by_request)
        if found is None:
            raise SystemExit(f"{file} has fewer than {WINDOW} steps")
        print(f"{file}: {_said(found.worst, found.begins)}")
        yield Measurement(f"{file.stem}, worst window", RATIO, [found.worst], at_least=BAR)
        yield Measurement(f"{file.stem}, whole run", RATIO, [found.overall])


def measure(options: argparse.Namespace) -> Iterable[Measurement]:
    """The distribution of the worst windows, and the scenarios below the bar."""
    if options.file:
        yield from _measure_files(options.file)
        return
    played = list(_with_progress(_results(options), options.scenarios))
    results = sorted((one for one in played if "worst" in one), key=lambda one: one["worst"])
    if not results:
        raise SystemExit(f"none of these scenarios has {WINDOW} steps")
    below = [one for one in results if one["worst"] < BAR]
    for one in below[:_WORST_SHOWN]:
        print(f"scenario-{one['number']}.yaml: {_said(one['worst'], one['begins'])}")
    if below:
        listed = options.folder / "below.json"
        listed.write_text(json.dumps(below, indent=1) + "\n")
        print(f"{len(below)} of {len(results)} scenarios are below {BAR}: {listed}")
    worst = [one["worst"] for one in results]
    yield Measurement("scenarios", "count", [len(worst)])
    yield Measurement("lowest worst window", RATIO, worst[:1], at_least=FLOOR)
    for share in (0.001, 0.01, 0.5):
        at = float(np.quantile(worst, share, method="lower"))
        bar = BAR if share == SHARE_BELOW_BAR else None
        yield Measurement(f"worst window, quantile {share:g}", RATIO, [at], at_least=bar)
    yield Measurement(
        f"scenarios below {BAR}", "share", [len(below) / len(worst)], at_most=SHARE_BELOW_BAR
    )
    best_off = [one["worst"] for one in results if one["overall"] <= 1]
    yield Measurement("scenarios in which plain decoding is best", "share",
                      [len(best_off) / len(worst)])  # fmt: skip


PARSER = command_line(__doc__)
PARSER.add_argument("--scenarios", type=int, default=1000, help="how many")
PARSER.add_argument("--first", type=int, default=0, help="number of the first one")
PARSER.add_argument("--processes", type=int, help="one a processor by default")
PARSER.add_argument("--folder", type=Path, default=Path("build/safety"))
PARSER.add_argument("--file", type=Path, nargs="+", help="these scenario files instead")

if __name__ == "__main__":
    run(PARSER, measure)
