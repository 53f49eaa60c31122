"""Names the parts of the check, and reads a choice of them."""

from collections.abc import Mapping

from lab.gpu_check.parts.arms import ArmsPart, AsleepPart
from lab.gpu_check.parts.costs import CostsPart
from lab.gpu_check.parts.exact import ExactPart, RoundingPart
from lab.gpu_check.parts.graphs import GraphsPart
from lab.gpu_check.parts.learning import LearningPart
from lab.gpu_check.parts.outage import OutagePart
from lab.gpu_check.parts.overhead import OverheadPart
from lab.gpu_check.parts.part import Part
from lab.gpu_check.parts.switches import SwitchesPart
from lab.harness.errors import HarnessError

ALL = "all"
DEFAULT_PARTS = ("exact", "costs", "graphs", "rounding")


# In the order of their worth, in which they run by default.
_ALL_PARTS: tuple[Part, ...] = (
    ExactPart(), CostsPart(), GraphsPart(), RoundingPart(), ArmsPart(), AsleepPart(),
    SwitchesPart(), OverheadPart(), OutagePart(), LearningPart(),
)  # fmt: skip
PARTS: Mapping[str, Part] = {part.KEY: part for part in _ALL_PARTS}


class UnknownPartError(HarnessError):
    """A requested part does not exist."""


def parse_parts(text: str) -> tuple[str, ...]:
    """Reads names separated by commas, in the order in which they are to run; "all" is every part.

    Raises UnknownPartError, also when no part is named.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if ALL in names:
        names = [*(name for name in names if name != ALL), *PARTS]
    unknown = [name for name in names if name not in PARTS]
    if unknown or not names:
        unknown_text = ", ".join(unknown) or repr(text)
        raise UnknownPartError(
            f"--parts {unknown_text} is unknown: choose from {', '.join(PARTS)}, or {ALL}"
        )
    return tuple(dict.fromkeys(names))
