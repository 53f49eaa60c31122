"""Measures how far the controller falls below plain decoding in 500 steps of random scenarios.

    python -m tools.bench.safety_bench --scenarios 100000 --processes 2
    python -m tools.bench.safety_bench --file build/safety/scenario-17.yaml

Every scenario has a number and depends on no other (`tests/support/random_scenarios.py`); it is
scored by expected tokens (`tests/support/against_off.py`).  Results are kept in `--folder`, so that
a run that was stopped can be continued, and further scenarios can be added with `--first`; a
change of the controller or of the scenarios begins again.  Scenarios below 0.98 are listed and
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
from tests.support.dealing import draw_number
from tests.support.random_scenarios import has_memory, scenarios
from tools.bench.measurement import RATIO, Measurement, command_line, run

_CODE = ("controller/core", "simulator")
_TESTS = ("against_off.py", "dealing.py", "random_costs.py", "random_scenarios.py")
_SHOW_EVERY_SECONDS = 30.0
_WORST_SHOWN = 20


def _play(number: int, folder: Path) -> dict[str, Any]:
    """One scenario's result; without a ratio if there is none of the number or it is too short."""
    drawn_scenario = draw_number(scenarios(), number)
    if drawn_scenario is None:
        return {"number": number}
    with tempfile.TemporaryDirectory() as place:
        result = against_off(
            drawn_scenario.make_scenario(Path(place)), by_request=drawn_scenario.has_memory
        )
    if result is None:
        return {"number": number}
    if result.worst < BAR:
        drawn_scenario.write(
            folder, f"scenario-{number}", _describe_window(result.worst, result.begins)
        )
    return {"number": number, **asdict(result)}


def _describe_window(worst: float, begins: int) -> str:
    return f"{worst:.4f} of plain decoding in the {WINDOW} steps from step {begins}"


def _version() -> str:
    """A name for the code that results depend on."""
    root = Path(__file__).parents[2]
    files = [file for part in _CODE for file in sorted((root / part).rglob("*.py"))]
    files += [root / "tests/support" / name for name in _TESTS]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def _results(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the results of the wanted numbers, the known ones first."""
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    results_file = folder / f"results-{_version()}.jsonl"
    remaining = set(range(options.first, options.first + options.scenarios))
    if results_file.exists():
        # A run that was killed may have left half a line.
        lines = results_file.read_text().splitlines(keepends=True)
        complete_lines = [line for line in lines if line.endswith("\n")]
        results_file.write_text("".join(complete_lines))
        for result in map(json.loads, complete_lines):
            if result["number"] in remaining:
                remaining.remove(result["number"])
                yield result
    with results_file.open("a") as file:
        for result in _play_all(sorted(remaining), folder, options.processes):
            file.write(json.dumps(result) + "\n")
            file.flush()
            yield result


def _play_all(
    numbers: Sequence[int], folder: Path, processes: int | None
) -> Iterator[dict[str, Any]]:
    if processes == 1:
        for number in numbers:
            yield _play(number, folder)
        return
    with make_process_pool(processes) as pool:
        yield from pool.map(_play, numbers, [folder] * len(numbers), chunksize=8)


def _with_progress(results: Iterable[dict[str, Any]], scenarios: int) -> Iterator[dict[str, Any]]:
    """The same, and a line at intervals."""
    start = last_shown = time.monotonic()
    below_bar = 0
    lowest = np.inf
    for done, result in enumerate(results, 1):
        if "worst" in result:
            lowest = min(lowest, result["worst"])
            below_bar += result["worst"] < BAR
        now = time.monotonic()
        if now - last_shown > _SHOW_EVERY_SECONDS:
            last_shown = now
            remaining_seconds = (scenarios - done) * (now - start) / done
            print(
                f"{done}/{scenarios}, {below_bar} below {BAR}, lowest {lowest:.4f}, "
                f"{remaining_seconds:.0f} s left",
                flush=True,
            )
        yield result


def _measure_files(files: Sequence[Path]) -> Iterable[Measurement]:
    for file in files:
        by_request = has_memory(yaml.safe_load(file.read_text()))
        result = against_off(load_scenario(file), by_request=by_request)
        if result is None:
            raise SystemExit(f"{file} has fewer than {WINDOW} steps")
        print(f"{file}: {_describe_window(result.worst, result.begins)}")
        yield Measurement(f"{file.stem}, worst window", RATIO, [result.worst], at_least=BAR)
        yield Measurement(f"{file.stem}, whole run", RATIO, [result.overall])


def measure(options: argparse.Namespace) -> Iterable[Measurement]:
    """The distribution of the worst windows, and the scenarios below the bar."""
    if options.file:
        yield from _measure_files(options.file)
        return
    played = list(_with_progress(_results(options), options.scenarios))
    results = sorted(
        (result for result in played if "worst" in result), key=lambda result: result["worst"]
    )
    if not results:
        raise SystemExit(f"none of these scenarios has {WINDOW} steps")
    below_bar = [result for result in results if result["worst"] < BAR]
    for result in below_bar[:_WORST_SHOWN]:
        print(
            f"scenario-{result['number']}.yaml: "
            f"{_describe_window(result['worst'], result['begins'])}"
        )
    if below_bar:
        listed = options.folder / "below.json"
        listed.write_text(json.dumps(below_bar, indent=1) + "\n")
        print(f"{len(below_bar)} of {len(results)} scenarios are below {BAR}: {listed}")
    worst = [result["worst"] for result in results]
    yield Measurement("scenarios", "count", [len(worst)])
    yield Measurement("lowest worst window", RATIO, worst[:1], at_least=FLOOR)
    for share in (0.001, 0.01, 0.5):
        quantile_value = float(np.quantile(worst, share, method="lower"))
        bar = BAR if share == SHARE_BELOW_BAR else None
        yield Measurement(
            f"worst window, quantile {share:g}", RATIO, [quantile_value], at_least=bar
        )
    yield Measurement(
        f"scenarios below {BAR}", "share", [len(below_bar) / len(worst)], at_most=SHARE_BELOW_BAR
    )
    best_off = [result["worst"] for result in results if result["overall"] <= 1]
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
