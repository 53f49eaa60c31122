"""Names the parts of the check, and reads a choice of them."""

from collections.abc import Mapping

from lab.gpu_check.parts.arms import ArmsPart
from lab.gpu_check.parts.asleep import AsleepPart
from lab.gpu_check.parts.costs import CostsPart
from lab.gpu_check.parts.exact import ExactPart
from lab.gpu_check.parts.graphs import GraphsPart
from lab.gpu_check.parts.learning import LearningPart
from lab.gpu_check.parts.outage import OutagePart
from lab.gpu_check.parts.overhead import OverheadPart
from lab.gpu_check.parts.part import Part
from lab.gpu_check.parts.rounding import RoundingPart
from lab.gpu_check.parts.switches import SwitchesPart
from lab.harness.errors import HarnessError

ALL = "all"
DEFAULT_PARTS = ("exact", "costs", "graphs", "rounding")


# In the order of their worth, in which they run by default.
PARTS: Mapping[str, Part] = {
    "exact": ExactPart(),
    "costs": CostsPart(),
    "graphs": GraphsPart(),
    "rounding": RoundingPart(),
    "arms": ArmsPart(),
    "asleep": AsleepPart(),
    "switches": SwitchesPart(),
    "overhead": OverheadPart(),
    "outage": OutagePart(),
    "learning": LearningPart(),
}


class UnknownPartError(HarnessError):
    """A part was asked for that does not exist."""


def parse_parts(given: str) -> tuple[str, ...]:
    """Reads names separated by commas, in the order in which they are to run; "all" is every part.

    Raises UnknownPartError, also when no part is named.
    """
    names = [name.strip() for name in given.split(",") if name.strip()]
    if ALL in names:
        names = [*(name for name in names if name != ALL), *PARTS]
    unknown = [name for name in names if name not in PARTS]
    if unknown or not names:
        shown = ", ".join(unknown) or repr(given)
        raise UnknownPartError(
            f"--parts {shown} is unknown: choose from {', '.join(PARTS)}, or {ALL}"
        )
    return tuple(dict.fromkeys(names))
