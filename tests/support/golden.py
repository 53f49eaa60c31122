"""Numbers of `controller simulate --suite standard` that only a wanted change of decisions moves.

python -m tests.support.golden            compares the whole suite, exactly (six minutes)
python -m tests.support.golden --write    takes today's numbers as the golden ones
"""

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from typer.testing import CliRunner

from controller.cli import app

GOLDEN = Path(__file__).with_name("golden.json")
# Measured on the machine that runs the simulation, so that it differs from run to run.
_MEASURED = "decision_microseconds"

Numbers: TypeAlias = dict[str, Any]


def numbers_of(report: Mapping[str, Any]) -> Numbers:
    """Scenario -> steps, best static arm, tokens/s of every policy, and a digest of the rest."""
    return {scenario["name"]: _scenario_numbers(scenario) for scenario in report["scenarios"]}


def _scenario_numbers(scenario: Mapping[str, Any]) -> Numbers:
    policies = [
        {name: value for name, value in policy.items() if name != _MEASURED}
        for policy in scenario["policies"]
    ]
    rest = json.dumps({**scenario, "policies": policies}, sort_keys=True)
    return {
        "steps": scenario["steps"],
        "best_static": scenario["best_static"],
        "tokens_per_second": {policy["name"]: policy["tokens_per_second"] for policy in policies},
        "digest": hashlib.sha256(rest.encode()).hexdigest()[:16],
    }


def simulated(suite: str) -> Numbers:
    """Runs a part of the suite as the command line does."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        done = CliRunner().invoke(app, ["simulate", "--suite", suite, "--json", str(path)])
        assert done.exit_code == 0, done.output
        return numbers_of(json.loads(path.read_text()))


def golden() -> Numbers:
    """The numbers that are checked in."""
    found: Numbers = json.loads(GOLDEN.read_text())
    return found


def differences(expected: Numbers, found: Numbers) -> Iterator[str]:
    """One line for every scenario whose numbers are not the golden ones, bit by bit."""
    for name, numbers in found.items():
        if name not in expected:
            yield f"{name}: is not in {GOLDEN.name}"
            continue
        wanted = expected[name]
        if numbers != wanted:
            moved = [
                f"{policy} {wanted['tokens_per_second'].get(policy)} -> {speed}"
                for policy, speed in numbers["tokens_per_second"].items()
                if speed != wanted["tokens_per_second"].get(policy)
            ]
            yield f"{name}: tokens/s {'; '.join(moved) or 'as before, other numbers differ'}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if the suite's numbers differ from the golden ones."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="replace the golden numbers")
    parser.add_argument("--suite", default="standard", help="standard, or standard/PART")
    parser.add_argument("--report", type=Path, help="compare this report instead of a new run")
    options = parser.parse_args(arguments)
    if options.report:
        found = numbers_of(json.loads(options.report.read_text()))
    else:
        found = simulated(options.suite)
    if options.write:
        rows = (f"{json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in found.items())
        GOLDEN.write_text("{\n" + ",\n".join(rows) + "\n}\n")
        return 0
    lines = list(differences(golden(), found))
    print("\n".join([*lines, f"golden: {len(found)} scenarios, {len(lines)} differ"]))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
