"""Acceptance drawn from curves: P(position k accepted | k-1 were), independently step by step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.core.types import MAX_GAMMA
from controller.simulation.errors import InvalidInputError
from controller.simulation.reading import shown
from controller.simulation.sources import lengths
from controller.simulation.workload import RequestPool


@dataclass(frozen=True, slots=True)
class Curves:
    """An AcceptanceSource.  curves: drafter -> conditional acceptance a_1, a_2, ...

    At every output position of a request a chain of drafts is drawn that ends at its first
    rejection; positions deeper than the curve reject.  Requests that are given no lengths have
    lognormal ones (sigma 0.5, at least 8 tokens) of the given means.

    Raises InvalidInputError: no drafter, no position, more of them than a draft can have, a value
    outside of 0..1, a mean below 1.
    """

    name: str
    curves: Mapping[str, Sequence[float]]
    output_tokens_mean: float = 256.0
    context_tokens_mean: float = 384.0

    def __post_init__(self) -> None:
        if not self.curves:
            raise InvalidInputError(self.name, 0, "no drafter is named")
        for drafter, curve in self.curves.items():
            _require_curve(f"{self.name}, {drafter or 'a drafter without name'}", curve)
        for mean in (self.output_tokens_mean, self.context_tokens_mean):
            if not 1 <= mean <= 1e9:
                raise InvalidInputError(self.name, 0, f"{mean} is no mean number of tokens")

    @property
    def drafters(self) -> tuple[str, ...]:
        """Drafters that have a curve."""
        return tuple(self.curves)

    def pool(
        self,
        rng: np.random.Generator,
        requests: int,
        output_tokens: NDArray[np.int64] | None = None,
        context_tokens: NDArray[np.int64] | None = None,
    ) -> RequestPool:
        """See `AcceptanceSource.pool`.  Drafters draw apart from each other."""
        if output_tokens is None:
            output_tokens = lengths(rng, requests, self.output_tokens_mean)
        if context_tokens is None:
            context_tokens = lengths(rng, requests, self.context_tokens_mean)
        ends = np.cumsum(output_tokens)
        positions = int(ends[-1]) if requests else 0
        return RequestPool(
            context_tokens,
            output_tokens,
            ends - output_tokens,
            np.zeros(requests, dtype=np.int64),
            {drafter: _draw(rng, curve, positions) for drafter, curve in self.curves.items()},
        )


def geometric(alpha: float) -> list[float]:
    """a_k = alpha at every position that a draft can have."""
    return [alpha] * MAX_GAMMA


def conditional(survival: Sequence[float]) -> list[float]:
    """a_k = s_k / s_(k-1), s_0 = 1; 0 behind a position that is never reached.

    Raises InvalidInputError for a survival curve that rises or leaves 0..1.
    """
    _require_curve("survival", survival)
    curve = []
    before = 1.0
    for k, s in enumerate(survival, 1):
        if s > before:
            raise InvalidInputError(
                "survival", 0, f"position {k}: {s} is more than {before}, and survival cannot rise"
            )
        curve.append(s / before if before > 0 else 0.0)
        before = s
    return curve


def _draw(rng: np.random.Generator, curve: Sequence[float], positions: int) -> NDArray[np.uint8]:
    """[positions] accepted drafts: as many as there are k with u < s_k."""
    rising = np.cumprod(np.array(curve, dtype=np.float64))[::-1]
    below = np.searchsorted(rising, rng.random(positions), side="right")
    return (len(curve) - below).astype(np.uint8)


def _require_curve(where: str, values: Sequence[float]) -> None:
    if not 1 <= len(values) <= MAX_GAMMA:
        raise InvalidInputError(
            where, 0, f"{len(values)} positions are given, 1 to {MAX_GAMMA} are needed"
        )
    for k, value in enumerate(values, 1):
        if not 0 <= value <= 1:
            raise InvalidInputError(where, 0, f"position {k}: {shown(value)} leaves 0..1")
