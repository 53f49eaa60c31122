"""The envelope of two drafters on a B200, from a roofline, beside the published one.

After "Adaptive speculative decoding" (F. Finn, Doubleword).

At each concurrency B the draft length of a drafter is the one of the largest goodput

    B (1 + E[accepted | gamma]) / C(B, gamma, 512 B)

and the drafter the one whose goodput is larger.  Acceptance is theirs (measured, averaged to a
survival curve), the cost is ours.  Theirs is a simulated run, start and end included, that draws
acceptance round by round; ours is one closed formula.

Nothing is fitted.  Beside the roofline that they use (a pass overlaps as a whole, the engine adds
nothing) stand the two ways in which a real engine differs: kernels that run one after the other,
and the overheads that were published for other engines.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from controller.core.cost.devices import Device, device
from controller.core.cost.roofline import Overlap, step_seconds
from controller.simulation import published_qwen
from controller.simulation.published_grid import read_grid

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class EnvelopePoint:
    """Holds one concurrency.

    best_gamma: drafter -> its best draft length.  goodput: tokens/s of the winner.  published_*: of
    the same drafter and draft length, and of the best that there was; None without the grid.
    """

    concurrency: int
    drafter: str
    best_gamma: Mapping[str, int]
    goodput: float
    published_goodput: float | None
    published_best: float | None

    @property
    def gamma(self) -> int:
        """Returns the winner's draft length."""
        return self.best_gamma[self.drafter]

    @property
    def kept(self) -> float | None:
        """Share of the published best goodput that this choice would have had."""
        if self.published_goodput is None or self.published_best is None:
            return None
        return self.published_goodput / self.published_best


@dataclass(frozen=True, slots=True)
class GridErrors:
    """|ours / published - 1| of goodput, over every drafter, draft length and concurrency."""

    median: float
    largest: float
    cells: int


@dataclass(frozen=True, slots=True)
class Envelope:
    """One way to price a step.  errors: None without the grid."""

    overlap: Overlap
    overheads: bool
    points: tuple[EnvelopePoint, ...]
    errors: GridErrors | None

    @property
    def winners_agreeing(self) -> int:
        """Concurrencies at which the published drafter wins here, too."""
        return sum(
            point.drafter == winner
            for point, winner in zip(self.points, published_qwen.BEST_DRAFTER, strict=True)
        )

    def gammas_agreeing(self, drafter: str) -> int:
        """Concurrencies at which the drafter's best draft length is the published one."""
        return sum(
            point.best_gamma[drafter] == gamma
            for point, gamma in zip(self.points, published_qwen.BEST_GAMMA[drafter], strict=True)
        )

    @property
    def crossover(self) -> tuple[int, int] | None:
        """The last concurrency that DFlash wins and the first after it that MTP wins."""
        return crossover(tuple(point.drafter for point in self.points))


@dataclass(frozen=True, slots=True)
class DrafterReport:
    """Holds the envelopes: their way first, then what a real engine changes."""

    envelopes: tuple[Envelope, ...]


def reproduce_drafters(grid: Path | None = None) -> DrafterReport:
    """The envelope, priced three ways; `grid`: file of the published sweep, to compare goodput.

    Raises InvalidInputError for a file that is not one.
    """
    published = None if grid is None else read_grid(grid)
    ways = ((Overlap.STEP, False), (Overlap.KERNELS, False), (Overlap.STEP, True))
    return DrafterReport(tuple(_envelope(*way, published) for way in ways))


def crossover(winners: tuple[str, ...]) -> tuple[int, int] | None:
    """The two neighbouring concurrencies between which DFlash last gives way to MTP, or None."""
    for i in range(len(winners) - 1, 0, -1):
        if (winners[i - 1], winners[i]) == ("dflash", "mtp"):
            return published_qwen.CONCURRENCIES[i - 1], published_qwen.CONCURRENCIES[i]
    return None


def goodput(drafter: str, gpu: Device, overlap: Overlap) -> Floats:
    """[gamma_max + 1, concurrencies] tokens per second."""
    batch = np.array(published_qwen.CONCURRENCIES, dtype=np.float64)
    gammas = range(published_qwen.GAMMA_MAX[drafter] + 1)
    seconds = step_seconds(
        published_qwen.TARGET,
        published_qwen.DRAFTERS[drafter],
        gpu,
        batch,
        gammas,
        published_qwen.MEAN_CONTEXT * batch,
        overlap,
    )
    gained = np.array(
        [[1.0 + published_qwen.expected_accepted(drafter, gamma)] for gamma in gammas]
    )
    rate: Floats = batch * gained / seconds
    return rate


def _envelope(
    overlap: Overlap, overheads: bool, published: Mapping[str, Floats] | None
) -> Envelope:
    gpu = device("B200")
    if overheads:
        gpu = gpu.with_typical_overheads()
    ours = {name: goodput(name, gpu, overlap) for name in published_qwen.DRAFTERS}
    points = []
    for j, concurrency in enumerate(published_qwen.CONCURRENCIES):
        best = {name: int(table[:, j].argmax()) for name, table in ours.items()}
        reached = {name: float(table[:, j].max()) for name, table in ours.items()}
        drafter = max(reached, key=lambda name: reached[name])
        points.append(
            EnvelopePoint(
                concurrency,
                drafter,
                best,
                reached[drafter],
                None if published is None else float(published[drafter][best[drafter], j]),
                None
                if published is None
                else max(float(t[:, j].max()) for t in published.values()),
            )
        )
    errors = None if published is None else _errors(ours, published)
    return Envelope(overlap, overheads, tuple(points), errors)


def _errors(ours: Mapping[str, Floats], published: Mapping[str, Floats]) -> GridErrors:
    off = np.concatenate(
        [np.abs(table / published[name] - 1).ravel() for name, table in ours.items()]
    )
    return GridErrors(float(np.median(off)), float(off.max()), off.size)
