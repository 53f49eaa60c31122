"""Numbers of `controller simulate --suite standard` that only a wanted change of decisions moves.

python -m tests.support.golden            compares the whole suite (six minutes)
python -m tests.support.golden --write    takes today's numbers as the golden ones

Decisions are compared exactly, step by step.  Figures are compared to 1e-9: the last bits of exp,
log and sums depend on the processor and its libraries, and so do those of every time that is
calculated with them.
"""

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from simulator.comparison.run import SeedRun, run_all
from simulator.comparison.summary import summarise
from simulator.results import ScenarioReport, SimulationReport, to_values
from simulator.scenarios.scenario_file import standard_scenarios

GOLDEN = Path(__file__).with_name("golden.json")
RELATIVE: Final = 1e-9
# Measured on the machine that runs the simulation, so that it differs from run to run.
_MEASURED = "decision_microseconds"
# Twenty times finer than what is compared.
_DIGITS = 10

Numbers: TypeAlias = dict[str, Any]


def is_close(figure: float, reference: float) -> bool:
    """Whether two figures are the same but for what another processor would calculate."""
    return math.isclose(figure, reference, rel_tol=RELATIVE, abs_tol=0.0)


def simulate_suite(part: str = "", processes: int | None = None) -> Numbers:
    """Runs the scenarios of the suite whose name has `part`; the numbers of each by its name.

    processes: side by side; None for as many as there are processors.
    """
    scenarios = standard_scenarios(part)
    reports = {}
    for scenario, seeds in zip(scenarios, run_all(scenarios, 0, processes=processes), strict=True):
        reports[scenario.name] = _numbers(summarise(scenario, seeds), seeds)
    return reports


def _numbers(report: ScenarioReport, seeds: Sequence[SeedRun]) -> Numbers:
    """What was decided, and every figure of the report.

    decisions, tokens_per_second and figures are by policy; a figure is null where there is none.
    timeline: the sum of each of its series.
    """
    values = to_values(SimulationReport("", "", 0, 0.0, (report,)))["scenarios"][0]
    policies = {policy.pop("name"): policy for policy in values["policies"]}
    for policy in policies.values():
        del policy[_MEASURED]
    timeline = values["timeline"] or {}
    return {
        "steps": report.steps,
        "best_static": report.best_static,
        "decisions": {name: _decisions(name, seeds) for name in policies},
        "tokens_per_second": {
            name: policy.pop("tokens_per_second") for name, policy in policies.items()
        },
        "figures": {name: list(_figures(policy)) for name, policy in policies.items()},
        "timeline": [_short(math.fsum(series)) for series in timeline.values()],
    }


def _decisions(policy: str, seeds: Sequence[SeedRun]) -> str:
    digests = "".join(seed.run(policy).decisions for seed in seeds)
    return hashlib.sha256(digests.encode()).hexdigest()[:16]


def _figures(value: Any) -> Iterator[float | None]:
    """The numbers in a report, however deep, in its order."""
    if value is None or isinstance(value, (int, float)):
        yield value if value is None else _short(value)
    elif isinstance(value, (list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _figures(part)


def _short(figure: float) -> float:
    return float(f"{figure:.{_DIGITS}g}")


def golden() -> Numbers:
    """The numbers that are checked in."""
    numbers: Numbers = json.loads(GOLDEN.read_text())
    return numbers


def differences(expected: Numbers, actual: Numbers) -> Iterator[str]:
    """One line for every scenario whose numbers are not the golden ones."""
    for name, numbers in actual.items():
        if name not in expected:
            yield f"{name}: is not in {GOLDEN.name}"
        elif parts := list(_scenario_differences(expected[name], numbers)):
            yield f"{name}: {'; '.join(parts)}"


def _scenario_differences(expected: Numbers, actual: Numbers) -> Iterator[str]:
    for part in ("steps", "best_static"):
        if actual[part] != expected[part]:
            yield f"{part} {expected[part]} -> {actual[part]}"
    for policy, speed in actual["tokens_per_second"].items():
        expected_speed = expected["tokens_per_second"].get(policy)
        if expected_speed is None:
            yield f"{policy} is new"
        elif not is_close(expected_speed, speed):
            yield f"{policy} {expected_speed} -> {speed} tokens/s"
        elif actual["decisions"][policy] != expected["decisions"][policy]:
            yield f"{policy} decides otherwise"
        elif not _all_close(expected["figures"][policy], actual["figures"][policy]):
            yield f"{policy} has other figures"
    if missing := expected["tokens_per_second"].keys() - actual["tokens_per_second"].keys():
        yield f"without {', '.join(sorted(missing))}"
    if not _all_close(expected["timeline"], actual["timeline"]):
        yield "another timeline"


def _all_close(expected: Sequence[float | None], actual: Sequence[float | None]) -> bool:
    return len(expected) == len(actual) and all(
        expected_value is actual_value
        if expected_value is None or actual_value is None
        else is_close(expected_value, actual_value)
        for expected_value, actual_value in zip(expected, actual, strict=True)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if the suite's numbers differ from the golden ones."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="replace the golden numbers")
    parser.add_argument("--part", default="", help="only scenarios whose name has this")
    options = parser.parse_args(arguments)
    numbers = simulate_suite(options.part)
    if options.write:
        GOLDEN.write_text(_text(numbers if not options.part else golden() | numbers))
        return 0
    lines = list(differences(golden(), numbers))
    print("\n".join([*lines, f"golden: {len(numbers)} scenarios, {len(lines)} differ"]))
    return int(bool(lines))


def _text(numbers: Mapping[str, Numbers]) -> str:
    rows = (
        f"{json.dumps(name)}: {json.dumps(row, separators=(',', ':'))}"
        for name, row in numbers.items()
    )
    return "{\n" + ",\n".join(rows) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
