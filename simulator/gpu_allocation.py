"""Advises which GPUs of a mixed pool train the drafter and which serve (TIDE, section 5.5).

Cards differ more in serving than in training: an old one that trains gives up little.  With
inference rates r and training rates t of a GPU, and n GPUs of each kind of which x train:

    all serve, no speculation     sum n r
    x train                       sum (n - x) r * speedup        while sum x t >= training

Training is needed for a share of the time only; for the rest all GPUs serve.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import isfinite, prod

from controller.core.errors import SpeculationError

# Evaluating more would take over a second.
_MAX_ALLOCATIONS = 200_000


class InvalidPoolError(SpeculationError):
    """Invalid GPU pools or an invalid demand."""


@dataclass(frozen=True, slots=True)
class GpuPool:
    """Cards of one kind.  inference, training: rates of one card, in any unit common to all.

    Raises InvalidPoolError.
    """

    name: str
    gpus: int
    inference: float
    training: float

    def __post_init__(self) -> None:
        if not self.name or self.gpus < 1:
            raise InvalidPoolError(f"pool {self.name!r} of {self.gpus} GPUs: at least 1 is needed")
        for rate_name, rate in (("inference", self.inference), ("training", self.training)):
            if not (isfinite(rate) and rate > 0):
                raise InvalidPoolError(f"{self.name}: {rate_name} rate {rate} must be above 0")


@dataclass(frozen=True, slots=True)
class Demand:
    """Describes what training gains and needs.  Raises InvalidPoolError.

    speedup: of speculation with the trained drafter; untrained: with the untrained drafter, 1 for
    no speculation.  training: required rate, 0 for one card of any kind.  share: of the time in
    which training runs.
    """

    speedup: float
    untrained: float = 1.0
    training: float = 0.0
    share: float = 1.0

    def __post_init__(self) -> None:
        for name in ("speedup", "untrained"):
            if not (isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise InvalidPoolError(f"{name} {getattr(self, name)} must be above 0")
        if not (isfinite(self.training) and self.training >= 0):
            raise InvalidPoolError(f"training rate {self.training} must be 0 or more")
        if not 0 < self.share <= 1:
            raise InvalidPoolError(f"share {self.share} must be in (0, 1]")


@dataclass(frozen=True, slots=True)
class Allocation:
    """Holds how many GPUs of each pool train, in the pools' order, and what that gains.

    relative_throughput: throughput over all GPUs serving with `untrained`.  break_even_speedup: the
    speedup at which training pays, inf when no card is left to serve.
    """

    training_gpus: tuple[int, ...]
    relative_throughput: float
    break_even_speedup: float

    @property
    def is_worthwhile(self) -> bool:
        """Whether training is better than not training."""
        return self.relative_throughput > 1


def allocate(pools: Sequence[GpuPool], demand: Demand) -> Allocation:
    """Finds the best GPUs to train on, of equals those that lose least.  Raises InvalidPoolError.

    One is always found, whether it pays or not.
    """
    if not pools:
        raise InvalidPoolError("no pool of GPUs is given")
    if len({pool.name for pool in pools}) < len(pools):
        raise InvalidPoolError("a pool is named twice")
    if prod(pool.gpus + 1 for pool in pools) > _MAX_ALLOCATIONS:
        raise InvalidPoolError(
            f"more than {_MAX_ALLOCATIONS} allocations: count nodes instead of GPUs"
        )
    feasible = list(_feasible_allocations(pools, demand))
    if not feasible:
        total_training_rate = sum(pool.gpus * pool.training for pool in pools)
        raise InvalidPoolError(
            f"a training rate of {demand.training} is needed; all GPUs together have "
            f"{total_training_rate}"
        )
    return max(
        (evaluate_allocation(pools, demand, training_gpus) for training_gpus in feasible),
        key=lambda allocation: (
            allocation.relative_throughput,
            [-x for x in allocation.training_gpus],
        ),
    )


def evaluate_allocation(
    pools: Sequence[GpuPool], demand: Demand, training_gpus: Sequence[int]
) -> Allocation:
    """Evaluates an allocation, without checking that it trains enough."""
    all_serving_rate = sum(pool.gpus * pool.inference for pool in pools)
    remaining_rate = sum(
        (pool.gpus - count) * pool.inference
        for pool, count in zip(pools, training_gpus, strict=True)
    )
    mean_serving_rate = (1 - demand.share) * all_serving_rate + demand.share * remaining_rate
    untrained_rate = demand.untrained * all_serving_rate
    break_even = untrained_rate / mean_serving_rate if mean_serving_rate else float("inf")
    return Allocation(
        tuple(training_gpus), demand.speedup * mean_serving_rate / untrained_rate, break_even
    )


def _feasible_allocations(pools: Sequence[GpuPool], demand: Demand) -> Iterator[tuple[int, ...]]:
    for training_gpus in product(*(range(pool.gpus + 1) for pool in pools)):
        rate = sum(pool.training * count for pool, count in zip(pools, training_gpus, strict=True))
        if any(training_gpus) and rate >= demand.training * (1 - 1e-9):
            yield training_gpus
