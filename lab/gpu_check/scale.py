"""Scales a check to its budget: how many graphs, tokens and repeats the parts use."""

from collections.abc import Callable
from dataclasses import dataclass

from lab.gpu_check.device import Device
from lab.gpu_check.shapes import Shape
from lab.harness.errors import HarnessError


class UnknownScaleError(HarnessError):
    """A scale was asked for that does not exist."""


@dataclass(frozen=True, slots=True)
class ExactSizes:
    """Prompts of each domain, tokens of the longest answer, and plays of each engine."""

    prompts: int
    new_tokens: int
    plays: int


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of the parts.

    graph_every: of the shape's batch sizes every so many-th has a graph and a row in the cost
    table, and the largest.  answer_share: of the length of the shape's answers.  repeats: pairs of
    plays that are compared.  profile_seconds: for one cost table.  both_schedules: whether engines
    without the overlap schedule are compared too.
    """

    name: str
    graph_every: int
    answer_share: float
    repeats: int
    profile_seconds: float
    exact: ExactSizes
    both_schedules: bool

    def batch_sizes(self, shape: Shape) -> tuple[int, ...]:
        """Returns the batch sizes that have graphs, ascending."""
        sizes = shape.batch_sizes
        return tuple(sorted({*sizes[:: self.graph_every], sizes[-1]}))


# From what an hour allows to what fits ten minutes with an engine start of 45 s.
SCALES = (
    Scale("full", 1, 1.0, 3, 120.0, ExactSizes(4, 256, 3), both_schedules=True),
    Scale("half", 1, 0.5, 2, 75.0, ExactSizes(2, 160, 2), both_schedules=True),
    Scale("quarter", 1, 0.25, 1, 60.0, ExactSizes(2, 128, 1), both_schedules=False),
    Scale("least", 2, 0.25, 1, 40.0, ExactSizes(1, 96, 1), both_schedules=False),
)
# Where a step takes hundredths of a second, or tenths, and its time means nothing.
WITHOUT_GPU = {
    Device.CPU: Scale("cpu", 1, 1.0, 1, 8.0, ExactSizes(2, 48, 1), both_schedules=False),
    Device.EMULATED: Scale("emulated", 1, 1.0, 1, 6.0, ExactSizes(1, 24, 1), both_schedules=False),
}


def largest_that_fits(seconds: float, price: Callable[[Scale], float]) -> Scale:
    """Returns the first of SCALES whose price is within the seconds, or the last one.

    price: seconds of a whole check at a scale.
    """
    return next((scale for scale in SCALES if price(scale) <= seconds), SCALES[-1])


def parse_scale(given: str) -> Scale | None:
    """Returns the scale of that name, None for "".  Raises UnknownScaleError."""
    if not given:
        return None
    found = next((scale for scale in SCALES if scale.name == given), None)
    if found is None:
        names = ", ".join(scale.name for scale in SCALES)
        raise UnknownScaleError(f"--scale {given!r} is unknown: choose one of {names}")
    return found
