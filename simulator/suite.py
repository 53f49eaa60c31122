"""The standard suite: published costs, drawn acceptance, and everything that is known to go wrong.

Every scenario is a file in `scenarios/standard`, small enough to be read in one sitting.
"""

import re
from functools import cache
from pathlib import Path

import yaml

from simulator.errors import InvalidInputError
from simulator.scenario import Scenario
from simulator.scenarios.read import load_scenario

FOLDER = Path(__file__).parent / "scenarios" / "standard"
_NAME = re.compile(r"^name:(.*)$", re.MULTILINE)


def standard(part: str = "") -> list[Scenario]:
    """Loads the scenarios whose name contains `part`, in the order of the report."""
    return [load_scenario(path) for name, path in _files().items() if part in name]


def names() -> tuple[str, ...]:
    """Lists the names of all scenarios of the suite, in the order of the report."""
    return tuple(_files())


def scenario_text(name: str) -> str:
    """Returns the file of a scenario.  Raises InvalidInputError, which lists the names."""
    path = _files().get(name)
    if path is None:
        fault = f"{name!r} is not in the suite; there are: {', '.join(_files())}"
        raise InvalidInputError("--dump-scenario", 0, fault)
    return path.read_text(encoding="utf-8")


@cache
def _files() -> dict[str, Path]:
    """Name -> file.  Only the line with the name is read, because most are not asked for."""
    found: dict[str, Path] = {}
    for path in sorted(FOLDER.rglob("*.yaml"), key=_order):
        match = _NAME.search(path.read_text(encoding="utf-8"))
        assert match is not None, f"{path} has no name"
        found[str(yaml.safe_load(match[1]))] = path
    return found


def _order(path: Path) -> list[tuple[int, str]]:
    """Sorts numbers in file names by their value."""
    parts = re.split(r"(\d+)", str(path.relative_to(FOLDER).with_suffix("")))
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts]
