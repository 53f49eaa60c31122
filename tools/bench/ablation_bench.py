"""Measures what each mechanism of the decision core earns, by switching it off alone.

    python -m tools.bench.ablation_bench --markdown build/ablation/table.md
    python -m tools.bench.ablation_bench --quick --processes 1 --mechanism "traffic memory"

A mechanism that is off runs in every scenario of the standard suite, and in random scenarios
against plain decoding (`safety_bench`).  Only the controller runs, on the workload and the seed of
the controller as it is, so the ratio of both scores is what the mechanism earns: below 1, it earns
something; above 1, it costs something.  A family's ratio is the geometric mean over scenarios and
seeds.  The mechanisms are in `ablation_mechanisms`.

Results are kept in `--folder`, so that a run that was stopped can be continued, and mechanisms,
scenarios and seeds can be added.  A change of the controller, of the simulator or of the scenarios
begins again, and a change of a mechanism repeats it.  The whole table takes hours.
"""

import argparse
import hashlib
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from simulator.comparison.contestants import make_controller
from simulator.engine import simulate
from simulator.process_pool import run_in_parallel
from simulator.scenarios.scenario_file import Scenario, standard_scenarios
from simulator.workload import Workload
from tests.support.against_off import BAR, against_off
from tests.support.dealing import draw_number
from tests.support.random_scenarios import scenarios as random_scenarios
from tools.bench.ablation_mechanisms import AS_IS, MECHANISMS, Mechanism
from tools.bench.measurement import RATIO, Measurement, command_line, run

_CODE = ("controller/core", "simulator")
_TESTS = ("against_off.py", "dealing.py", "random_costs.py", "random_scenarios.py")
_SHOW_EVERY_SECONDS = 30.0
# Scenarios of these names are a family of their own; the others' family is their group.
_FAMILIES = {
    "recurring/drafters": "recurring drafters",
    "recurring/traffic": "recurring traffic",
    "drafters": "shifting drafters",
    "wrong-profile/none": "no profile",
    "stationary/h100": "stationary, measured",
}
# `--quick` runs one seed, one in this number of the stationary scenarios, none of the longest ones,
# and this number of random ones.
_QUICK_STATIONARY = 7
_QUICK_WITHOUT = ("hours/", "arrivals/")
_QUICK_RANDOM = 100
# Random scenarios in each turn of the families.
_RANDOM_PER_TURN = 6
_SAFETY = "safety"
# Of random scenarios: the change, the mean over plain decoding, and the worst windows.
_RANDOM_COLUMNS = ("random", "mean", f"below {BAR}", "lowest")
# By mechanism; then by case, which is a scenario and a seed.
Results: TypeAlias = dict[str, dict[tuple[str, int], dict[str, Any]]]


@dataclass(frozen=True)
class Case:
    """Names what all mechanisms run: a scenario of the suite, or a random one (without one)."""

    name: str
    seed: int
    scenario: Scenario | None = None


def family_of(scenario: Scenario) -> str:
    """The column of the table."""
    for beginning, family in _FAMILIES.items():
        if scenario.name.startswith(beginning):
            return family
    return scenario.group


def play(case: Case, names: Sequence[str]) -> list[dict[str, Any]]:
    """The results of a case with each mechanism off.  names: the mechanisms'."""
    mechanisms = [one for one in (AS_IS, *MECHANISMS) if one.name in names]
    results = _play_standard(case, mechanisms) if case.scenario else _play_random(case, mechanisms)
    return [
        {"case": case.name, "seed": case.seed, "mechanism": one.name, "version": one.version} | row
        for one, row in zip(mechanisms, results, strict=True)
    ]


def _play_standard(case: Case, mechanisms: Iterable[Mechanism]) -> Iterator[dict[str, Any]]:
    scenario, seed = case.scenario, case.seed
    assert scenario is not None
    workload = scenario.workload(seed)
    for mechanism in mechanisms:
        with mechanism.switched_off() as settings:
            policy = make_controller(scenario, settings)
            result = simulate(workload, scenario.surface, policy, scenario.options, seed)
        yield {"score": result.score, "seconds": result.seconds, "steps": result.steps}


def _play_random(case: Case, mechanisms: Iterable[Mechanism]) -> Iterator[dict[str, Any]]:
    """Yields no ratios for a number without a scenario, or with one that is too short."""
    drawn = draw_number(random_scenarios(), int(case.name.partition("/")[2]))
    if drawn is None:
        yield from ({} for _ in mechanisms)
        return
    with tempfile.TemporaryDirectory() as folder:
        scenario = drawn.make_scenario(Path(folder))
        scenario = replace(scenario, workload=_remember_workload(scenario.workload(0)))
        for mechanism in mechanisms:
            with mechanism.switched_off() as settings:
                controller = make_controller(scenario, settings)
                result = against_off(scenario, controller, by_request=drawn.has_memory)
            yield {"worst": result.worst, "overall": result.overall} if result else {}


def _remember_workload(workload: Workload) -> Callable[[int], Workload]:
    return lambda _: workload


def _version() -> str:
    """A name for the code that results depend on, except the mechanisms'."""
    root = Path(__file__).parents[2]
    files = [file for part in _CODE for file in sorted((root / part).rglob("*"))]
    files += [root / "tests/support" / name for name in _TESTS]
    texts = [file.read_bytes() for file in files if file.suffix in {".py", ".yaml"}]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:12]


def _wanted_cases(options: argparse.Namespace) -> list[Case]:
    """The cases, each family's in turn: a run that is stopped has some of every family."""
    scenarios = [s for part in options.part for s in standard_scenarios(part)]
    scenarios = list({scenario.name: scenario for scenario in scenarios}.values())
    if options.quick:
        stationary = [s.name for s in scenarios if s.group == "stationary"]
        dropped = set(stationary) - set(stationary[::_QUICK_STATIONARY])
        dropped |= {s.name for s in scenarios if s.name.startswith(_QUICK_WITHOUT)}
        scenarios = [s for s in scenarios if s.name not in dropped]
    seeds = options.seeds or (1 if options.quick else 3)
    random_count = options.scenarios
    if random_count is None:
        random_count = _QUICK_RANDOM if options.quick else 3 * _QUICK_RANDOM
    by_family: dict[str, list[Case]] = defaultdict(list)
    for seed in range(seeds):
        for scenario in scenarios:
            by_family[family_of(scenario)].append(Case(scenario.name, seed, scenario))
    random_cases = [Case(f"{_SAFETY}/{number}", 0) for number in range(random_count)]
    by_turn = [random_cases[first::_RANDOM_PER_TURN] for first in range(_RANDOM_PER_TURN)]
    turns = zip_longest(*by_family.values(), *by_turn)
    return [case for turn in turns for case in turn if case is not None]


def _known_results(file: Path) -> Iterator[dict[str, Any]]:
    """Yields what earlier runs left, without half a line that a killed run wrote."""
    if not file.exists():
        return
    lines = file.read_text().splitlines(keepends=True)
    complete_lines = [line for line in lines if line.endswith("\n")]
    if len(complete_lines) < len(lines):
        file.write_text("".join(complete_lines))
    yield from map(json.loads, complete_lines)


def _play_cases(
    cases: Sequence[Case], mechanisms: Sequence[Mechanism], options: argparse.Namespace
) -> Results:
    """Runs what is not known yet; returns the results of these cases and mechanisms."""
    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / f"results-{_version()}.jsonl"
    versions = {mechanism.name: mechanism.version for mechanism in mechanisms}
    wanted = {(case.name, case.seed) for case in cases}
    results: Results = {name: {} for name in versions}

    def add(row: dict[str, Any]) -> None:
        key = row["case"], row["seed"]
        if key in wanted and versions.get(row["mechanism"]) == row["version"]:
            results[row["mechanism"]][key] = row

    for row in _known_results(file):
        add(row)
    if options.known:
        return results
    tasks = []
    for case in cases:
        missing = [name for name in versions if (case.name, case.seed) not in results[name]]
        if missing:
            tasks.append((case, missing))
    with file.open("a") as output:
        for rows in _with_progress(_play_tasks(tasks, options.processes), len(tasks)):
            for row in rows:
                output.write(json.dumps(row) + "\n")
                add(row)
            output.flush()
    return results


def _play_tasks(
    tasks: Sequence[tuple[Case, list[str]]], processes: int | None
) -> Iterator[list[dict[str, Any]]]:
    if processes == 1:
        for case, names in tasks:
            yield play(case, names)
        return
    for _, rows in run_in_parallel(play, tasks, processes):
        yield rows


def _with_progress(
    played: Iterable[list[dict[str, Any]]], tasks: int
) -> Iterator[list[dict[str, Any]]]:
    """The same, and a line at intervals."""
    start = last_shown = time.monotonic()
    for done, rows in enumerate(played, 1):
        now = time.monotonic()
        if now - last_shown > _SHOW_EVERY_SECONDS:
            last_shown = now
            remaining_seconds = (tasks - done) * (now - start) / done
            print(f"{done}/{tasks} scenarios, {remaining_seconds:.0f} s left", flush=True)
        yield rows


@dataclass(frozen=True)
class Outcome:
    """Holds the effects of switching a mechanism off.

    ratios: by family and scenario, one for each seed, of the score without the mechanism to the
    score with it.  same_runs, runs: those with the same time and score, and all.  worst, overall:
    of the random scenarios, without the mechanism; random_ratios: of overall to that with it.
    """

    mechanism: Mechanism
    ratios: dict[str, dict[str, list[float]]]
    same_runs: int
    runs: int
    worst: list[float]
    overall: list[float]
    random_ratios: list[float]

    @property
    def changed_random(self) -> int:
        """The number of random scenarios that differ."""
        return sum(ratio != 1 for ratio in self.random_ratios)

    def log_ratios(self, family: str) -> list[float]:
        """All of a family; of the whole suite with ""."""
        families = [family] if family else list(self.ratios)
        return [
            float(np.log(ratio))
            for name in families
            for ratios in self.ratios.get(name, {}).values()
            for ratio in ratios
        ]

    def percent(self, family: str) -> float:
        """The family's mean change, in per cent."""
        return 100 * float(np.expm1(np.mean(self.log_ratios(family))))

    def standard_error(self, family: str) -> float:
        """Returns that of `percent`, over scenarios and seeds; NaN if there is only one."""
        values = self.log_ratios(family)
        return 100 * float(np.std(values, ddof=1) / np.sqrt(len(values))) if values[1:] else np.nan

    def scenario_percents(self) -> list[tuple[float, str]]:
        """(change in per cent, name) of each scenario, the lowest first."""
        return sorted(
            (100 * float(np.expm1(np.mean(np.log(ratios)))), name)
            for by_scenario in self.ratios.values()
            for name, ratios in by_scenario.items()
        )


def compare(mechanism: Mechanism, results: Results, families: dict[str, str]) -> Outcome:
    """Compares a mechanism's results with those of the controller as it is.

    families: by the scenario's name.
    """
    ratios: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    same_runs = runs = 0
    worst, overall, random_ratios = [], [], []
    for (name, seed), row in sorted(results[mechanism.name].items()):
        base = results[AS_IS.name].get((name, seed))
        if base is None:
            continue
        if name in families:
            ratios[families[name]][name].append(row["score"] / base["score"])
            runs += 1
            same_runs += (row["score"], row["seconds"]) == (base["score"], base["seconds"])
        elif "worst" in row:
            worst.append(row["worst"])
            overall.append(row["overall"])
            random_ratios.append(row["overall"] / base["overall"])
    return Outcome(mechanism, ratios, same_runs, runs, worst, overall, random_ratios)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _percent_text(value: float) -> str:
    return "0" if value == 0 else f"{value:+.2f}".replace("-", "−")


def _family_text(outcome: Outcome, family: str) -> str:
    """The family's mean change; "=" if no run differs, "" if there is none."""
    values = outcome.log_ratios(family)
    if not values:
        return ""
    return _percent_text(outcome.percent(family)) if any(values) else "="


def _safety_texts(outcome: Outcome) -> list[str]:
    if not outcome.worst:
        return [""] * len(_RANDOM_COLUMNS)
    below = sum(worst < BAR for worst in outcome.worst)
    change = 100 * float(np.expm1(np.mean(np.log(outcome.random_ratios))))
    return [
        _percent_text(change) if outcome.changed_random else "=",
        f"{np.mean(outcome.overall):.4f}",
        str(below),
        f"{min(outcome.worst):.3f}",
    ]


def markdown(outcomes: Sequence[Outcome], families: Sequence[str]) -> str:
    """Returns two tables: each mechanism by family, and what each does and where it counts most."""
    as_is = outcomes[0]
    counts = [len(as_is.ratios.get(family, {})) for family in families]
    lines = [
        _row(["switched off", *families, *_RANDOM_COLUMNS]),
        _row(["---", *["---:"] * (len(families) + len(_RANDOM_COLUMNS))]),
        _row(["(scenarios)", *map(str, counts), str(len(as_is.worst)), "", "", ""]),
    ]
    for outcome in outcomes:
        cells = [_family_text(outcome, family) for family in families]
        lines.append(_row([outcome.mechanism.name, *cells, *_safety_texts(outcome)]))
    lines += [
        "",
        _row(["switched off", "what it does", "runs that differ", "suite", "lowest", "highest"]),
        _row(["---", "---", "---:", "---:", "---", "---"]),
    ]
    for outcome in outcomes[1:]:
        different = f"{outcome.runs - outcome.same_runs} of {outcome.runs}"
        if outcome.worst:
            different += f", {outcome.changed_random} of {len(outcome.worst)}"
        percents = outcome.scenario_percents()
        extremes = [f"{_percent_text(p)} {name}" for p, name in (percents[:1] + percents[-1:])]
        error = outcome.standard_error("") if percents else np.nan
        mean = f"{_percent_text(outcome.percent(''))} ± {error:.2f}" if percents else ""
        lines.append(
            _row([
                outcome.mechanism.name, outcome.mechanism.effect, different, mean,
                *(extremes or ["", ""]),
            ])
        )  # fmt: skip
    return "\n".join(lines) + "\n"


def _measurements(outcome: Outcome, families: Sequence[str]) -> Iterator[Measurement]:
    """Yields the ratio by seed of each family in which a run differs, and the random scenarios."""
    name = AS_IS.name if outcome.mechanism is AS_IS else f"without {outcome.mechanism.name}"
    for family in families:
        if not any(outcome.log_ratios(family)):
            continue
        by_seed = zip(*outcome.ratios[family].values(), strict=False)
        ratios = [float(np.exp(np.mean(np.log(seed_ratios)))) for seed_ratios in by_seed]
        yield Measurement(f"{name}, {family}", RATIO, ratios)
    if outcome.worst:
        below = sum(worst < BAR for worst in outcome.worst)
        yield Measurement(f"{name}, random scenarios below {BAR}", "count", [below])
        yield Measurement(f"{name}, lowest worst window", RATIO, [min(outcome.worst)])
        mean = float(np.mean(outcome.overall))
        yield Measurement(f"{name}, random scenarios over plain decoding", RATIO, [mean])


def measure(options: argparse.Namespace) -> Iterable[Measurement]:
    """Yields what each mechanism changes, by family and in random scenarios."""
    mechanisms = [one for one in MECHANISMS if one.name in (options.mechanism or _names())]
    cases = _wanted_cases(options)
    results = _play_cases(cases, [AS_IS, *mechanisms], options)
    families = {case.name: family_of(case.scenario) for case in cases if case.scenario}
    outcomes = [compare(one, results, families) for one in (AS_IS, *mechanisms)]
    columns = list(dict.fromkeys(families.values()))
    text = markdown(outcomes, columns)
    print(text)
    if options.markdown:
        options.markdown.parent.mkdir(parents=True, exist_ok=True)
        options.markdown.write_text(text)
    for outcome in outcomes:
        yield from _measurements(outcome, columns)


def _names() -> list[str]:
    return [mechanism.name for mechanism in MECHANISMS]


PARSER = command_line(__doc__)
PARSER.add_argument(
    "--mechanism", nargs="+", choices=_names(), metavar="NAME", help=", ".join(_names())
)
PARSER.add_argument(
    "--part", nargs="+", default=[""], metavar="NAME", help="scenarios with this in their name"
)
PARSER.add_argument("--seeds", type=int, help="of each of them; 3, or 1 with --quick")
PARSER.add_argument(
    "--scenarios", type=int, help="how many random ones; 300, or 100 with --quick; 0: none"
)
PARSER.add_argument("--quick", action="store_true", help="a seventh of the stationary scenarios")
PARSER.add_argument("--processes", type=int, help="one a processor by default")
PARSER.add_argument("--known", action="store_true", help="run nothing: show earlier results")
PARSER.add_argument("--folder", type=Path, default=Path("build/ablation"))
PARSER.add_argument("--markdown", type=Path, help="also write the tables to this file")

if __name__ == "__main__":
    run(PARSER, measure)
