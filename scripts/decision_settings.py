"""Writes docs/decision-settings.md from the declared settings; with --check, only compares."""

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from controller.core.constants.setting import setting_text
from controller.core.settings import POLICIES, PlannerSettings

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "decision-settings.md"

_HEAD = """# Settings of the decision

The constants of the decision are settings of the sidecar: keys below `planner:` in its file, and
environment variables with the prefix `CONTROLLER_PLANNER__` ([settings](lifecycle.md#settings)).
SIGHUP applies changes at once; a value for the start of a session applies to new sessions.
`controller config` prints the values in force. The defaults
need no tuning to start; [tuning](tuning.md) says which ones to leave alone, and
[decisions](decisions.md) says what they are for.

This page is written from the code by `scripts/decision_settings.py`, and `make check` compares the
two. A value out of its range is refused; a parenthesis excludes the bound itself. The last column
says what is on record about the default. "No tuning on record" means that neither a figure nor a
reason was kept. The standard suite is that of `controller simulate` ([simulation](simulation.md)).
"""

_COLUMNS = ("name", "default", "unit", "range", "what it trades", "how the default was found")


def reference() -> str:
    """Returns the whole page."""
    lines = [_HEAD]
    for group in _groups():
        introduction = (inspect.getdoc(group) or "").partition("\n\n")[0].replace("\n", " ")
        lines += [f"## {_title(group)}", "", introduction, "", *_table(group), ""]
    return "\n".join(lines)


def _groups() -> Iterator[type[Any]]:
    """Yields the classes that declare settings, the general one first."""
    for group in PlannerSettings.__mro__:
        if dataclasses.is_dataclass(group):
            yield group


def _title(group: type[Any]) -> str:
    """Returns the name of a group without its last word, for example "Exploration"."""
    return " ".join(re.findall(r"[A-Z][a-z]+", group.__name__)[:-1]).capitalize()


def _table(group: type[Any]) -> Iterator[str]:
    yield f"| {' | '.join(_COLUMNS)} |"
    yield len(_COLUMNS) * "|---" + "|"
    own_names = inspect.get_annotations(group)
    for declared in dataclasses.fields(group):
        if declared.name in own_names:
            yield f"| {' | '.join(_cells(declared))} |"


def _cells(declared: "dataclasses.Field[Any]") -> tuple[str, ...]:
    name, text = f"`planner.{declared.name}`", setting_text(declared)
    if text is None:
        # Only the rule is not a number.
        policies = ", ".join(f"`{policy}`" for policy in POLICIES)
        trades = "expected throughput, TIDE's threshold or SGLang's average decides"
        return name, f"`{declared.default}`", "–", policies, trades, "the project's own rule"
    return name, f"`{declared.default:g}`", text.unit, text.range_text, text.trades, text.tuned


def main() -> int:
    """Writes or compares the page; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument(
        "--file", type=Path, default=REFERENCE, help="by default docs/decision-settings.md"
    )
    arguments = parser.parse_args()
    path: Path = arguments.file
    if not arguments.check:
        path.write_text(reference(), encoding="utf-8")
        return 0
    if not path.is_file() or path.read_text(encoding="utf-8") != reference():
        print(f"{path.name} is not what the code says; run python scripts/decision_settings.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
