"""The parts of the check, each a module with the functions that `Part` names."""

from collections.abc import Mapping
from typing import Any, Protocol

from lab.gpu_check.budget import Work
from lab.gpu_check.check import Check
from lab.gpu_check.parts import (
    arms,
    asleep,
    costs,
    exact,
    graphs,
    learning,
    outage,
    overhead,
    rounding,
    switches,
)
from lab.gpu_check.plan import Planner
from lab.harness.errors import HarnessError

Document = Mapping[str, Any]

ALL = "all"
DEFAULT_PARTS = ("exact", "costs", "graphs", "rounding")
# The name of `costs` in earlier versions.
_ALIASES = {"profile": "costs"}


class Part(Protocol):
    """One part of the check.

    What a part finds is in the result file under KEY.
    """

    KEY: str

    def plan(self, planner: Planner) -> Work:
        """Counts the work, with the functions by which `run` does it."""

    def run(self, check: Check) -> None:
        """Measures, and adds what was found to the check's document, bit by bit."""

    def summary(self, document: Document) -> tuple[str, str]:
        """Returns the verdict and the details, for a line of the page."""

    def problems(self, document: Document) -> list[str]:
        """Returns what is wrong, in sentences."""

    def sections(self, document: Document) -> list[str]:
        """Returns the tables and paragraphs of the page, as Markdown."""


# In the order of their worth, in which they run by default.
PARTS: Mapping[str, Part] = {
    "exact": exact,
    "costs": costs,
    "graphs": graphs,
    "rounding": rounding,
    "arms": arms,
    "asleep": asleep,
    "switches": switches,
    "overhead": overhead,
    "outage": outage,
    "learning": learning,
}


class UnknownPartError(HarnessError):
    """A part was asked for that does not exist."""


def parse_parts(given: str) -> tuple[str, ...]:
    """Reads names separated by commas, in the order in which they are to run; "all" is every part.

    Raises UnknownPartError, also when no part is named.
    """
    names = [name.strip() for name in given.split(",") if name.strip()]
    wanted = [_ALIASES.get(name, name) for name in names]
    if ALL in wanted:
        wanted = [*(name for name in wanted if name != ALL), *PARTS]
    unknown = [name for name in wanted if name not in PARTS]
    if unknown or not wanted:
        shown = ", ".join(unknown) or repr(given)
        raise UnknownPartError(
            f"--parts {shown} is unknown: choose from {', '.join(PARTS)}, or {ALL}"
        )
    return tuple(dict.fromkeys(wanted))
