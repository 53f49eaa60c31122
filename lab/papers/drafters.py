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
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError

from controller.core.cost.roofline import Device, Overlap, device_from_data_sheet, step_seconds
from simulator import published_qwen
from simulator.errors import InvalidInputError

Floats = NDArray[np.float64]


class _Row(BaseModel):
    gamma: int = 0
    goodput: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]]


class _GridDrafter(BaseModel):
    nospec: _Row
    fixed: list[_Row]


class _Grid(BaseModel):
    # {"conc": [..], "drafters": {"mtp": {"nospec": {"goodput": [..]},
    #                                     "fixed": [{"gamma": 1, "goodput": [..]}, ..]}, ..}}
    conc: list[int]
    drafters: dict[str, _GridDrafter]


def read_grid(path: Path) -> Mapping[str, Floats]:
    """Reads the published sweep: drafter -> [gamma_max + 1, concurrencies], goodput in tokens/s.

    The row is gamma, the concurrencies are those of `published_qwen.CONCURRENCIES`.  Raises
    InvalidInputError for anything but a file of this very sweep.
    """
    try:
        grid = _Grid.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InvalidInputError(path, 0, f"cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        location = ".".join(str(part) for part in first["loc"]) or "the file"
        raise InvalidInputError(path, 0, f"{location}: {first['msg']}") from error
    conc, names = published_qwen.CONCURRENCIES, published_qwen.DRAFTERS
    if tuple(grid.conc) != conc:
        raise InvalidInputError(path, 0, f"conc: {list(conc)} are needed, not {grid.conc[:16]}")
    if set(grid.drafters) != set(names):
        fault = f"drafters: {sorted(names)} are needed, not {sorted(grid.drafters)}"
        raise InvalidInputError(path, 0, fault)
    goodput = {}
    for name, drafter in grid.drafters.items():
        deepest = published_qwen.GAMMA_MAX[name]
        if [row.gamma for row in drafter.fixed] != list(range(1, deepest + 1)):
            fault = f"drafters.{name}.fixed: gamma 1 to {deepest} are needed"
            raise InvalidInputError(path, 0, fault)
        rows = [row.goodput for row in (drafter.nospec, *drafter.fixed)]
        if any(len(row) != len(conc) for row in rows):
            fault = f"drafters.{name}: {len(conc)} values of goodput a row are needed"
            raise InvalidInputError(path, 0, fault)
        goodput[name] = np.array(rows)
    return goodput


@dataclass(frozen=True, slots=True)
class EnvelopePoint:
    """Holds one concurrency.

    best_gamma: drafter -> its best draft length.  goodput: tokens/s of the winner.
    published_goodput: of the same drafter and draft length.  published_best: of the best of all.
    Both are None without the grid.
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
    def kept_share(self) -> float | None:
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


def reproduce_drafters(grid: Path | None = None) -> tuple[Envelope, ...]:
    """Prices the envelope three ways: theirs first, then what a real engine changes.

    grid: file of the published sweep, to compare goodput.  Raises InvalidInputError for a file that
    is not one.
    """
    published = None if grid is None else read_grid(grid)
    ways = ((Overlap.STEP, False), (Overlap.KERNELS, False), (Overlap.STEP, True))
    return tuple(_price_envelope(*way, published) for way in ways)


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
    kv, shape = published_qwen.MEAN_CONTEXT * batch, published_qwen.DRAFTERS[drafter]
    seconds = step_seconds(published_qwen.TARGET, shape, gpu, batch, gammas, kv, overlap)
    tokens_per_step = np.array(
        [[1.0 + published_qwen.expected_accepted(drafter, gamma)] for gamma in gammas]
    )
    rate: Floats = batch * tokens_per_step / seconds
    return rate


def _price_envelope(
    overlap: Overlap, overheads: bool, published: Mapping[str, Floats] | None
) -> Envelope:
    gpu = device_from_data_sheet("B200")
    if overheads:
        gpu = gpu.with_typical_overheads()
    computed = {name: goodput(name, gpu, overlap) for name in published_qwen.DRAFTERS}
    points = []
    for j, concurrency in enumerate(published_qwen.CONCURRENCIES):
        best = {name: int(table[:, j].argmax()) for name, table in computed.items()}
        best_goodput = {name: float(table[:, j].max()) for name, table in computed.items()}
        drafter = max(best_goodput, key=lambda name: best_goodput[name])
        points.append(
            EnvelopePoint(
                concurrency,
                drafter,
                best,
                best_goodput[drafter],
                float(published[drafter][best[drafter], j]) if published else None,
                max(float(t[:, j].max()) for t in published.values()) if published else None,
            )
        )
    errors = None
    if published is not None:
        relative_errors = np.concatenate(
            [np.abs(computed[n] / published[n] - 1).ravel() for n in computed]
        )
        errors = GridErrors(
            float(np.median(relative_errors)), float(relative_errors.max()), relative_errors.size
        )
    return Envelope(overlap, overheads, tuple(points), errors)
