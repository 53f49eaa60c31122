"""Defines the section `profile`: what the controller and its peers believe about the costs."""

import math
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from controller.core.cost.profile import Profile
from simulator.controller_policy import FINGERPRINT
from simulator.scenarios.fields import (
    BatchSizeKey,
    DrafterName,
    Factor,
    GammaKey,
    LogSpread,
    MeanLength,
    Section,
    SeedNumber,
)
from simulator.scenarios.place import Place
from simulator.surface import CostSurface, profile_sizes


class NoiseShape(Enum):
    """Names how the error of a measured cell is distributed."""

    LOGNORMAL = "lognormal"
    UNIFORM = "uniform"


class ProfileSection(Section):
    """Describes how the profile differs from the truth; by default as a careful measurement does.

    factor: on all costs.  drafting: on all cells at gamma > 0.  by_arm: drafter -> gamma -> factor.
    by_batch_size: batch size -> factor, linear in log B in between and constant beyond.
    noise: error of each cell, drawn once: the standard deviation of its logarithm (lognormal), or
    the largest relative error (uniform).  noise_seed: of the draw.
    context_term: whether the profile knows the price of context.  kv_tokens_per_sequence: context
    at which it was measured, tokens; by default that at which the costs are given.

    Cells are measured at batch sizes 1, 2, 4, ... and the engine's limit, gamma = 0 included.
    """

    factor: Factor = 1.0
    drafting: Factor = 1.0
    by_arm: dict[DrafterName, dict[GammaKey, Factor]] = Field(default_factory=dict)
    by_batch_size: dict[BatchSizeKey, Factor] = Field(default_factory=dict)
    noise: LogSpread = 0.01
    noise_shape: NoiseShape = NoiseShape.LOGNORMAL
    noise_seed: SeedNumber = 0
    context_term: bool = True
    kv_tokens_per_sequence: MeanLength | None = None

    @model_validator(mode="after")
    def _costs_stay_above_zero(self) -> Self:
        if self.noise_shape is NoiseShape.UNIFORM and self.noise >= 1:
            raise ValueError(f"a uniform noise of {self.noise:g} would make costs negative")
        return self

    def measured(self, surface: CostSurface, place: Place) -> Profile:
        """Makes what `controller profile` would have written.  Raises InvalidInputError."""
        for drafter, factors in self.by_arm.items():
            known = {arm.gamma for arm in surface.arms if arm.drafter == drafter}
            for gamma in factors:
                if gamma not in known:
                    fault = f"there is no arm of {drafter!r} with draft length {gamma}"
                    raise place.fault(("profile", "by_arm", drafter), fault)
        sizes = profile_sizes(surface.max_batch_size)
        exact = surface.profile(
            FINGERPRINT,
            sizes,
            self._factors(surface, sizes),
            self.kv_tokens_per_sequence,
            self.context_term,
        )
        if self.factor == 1:
            return exact
        return replace(
            exact,
            seconds_per_kv_token=self.factor * exact.seconds_per_kv_token,
            catch_up_seconds_per_token=self.factor * exact.catch_up_seconds_per_token,
        )

    def _factors(self, surface: CostSurface, sizes: list[int]) -> NDArray[np.float64]:
        """Returns [arms, sizes] what the profile says over what is true."""
        rng = np.random.default_rng(self.noise_seed)
        shape = (len(surface.arms), len(sizes))
        if self.noise_shape is NoiseShape.UNIFORM:
            factors = rng.uniform(1 - self.noise, 1 + self.noise, shape)
        else:
            factors = rng.lognormal(0.0, self.noise, shape)
        for i, arm in enumerate(surface.arms):
            drafting = self.drafting if arm.gamma else 1.0
            factors[i] *= (
                self.factor * drafting * self.by_arm.get(arm.drafter, {}).get(arm.gamma, 1.0)
            )
        return factors * _over_batch(self.by_batch_size, sizes)


def _over_batch(factors: Mapping[int, float], sizes: list[int]) -> NDArray[np.float64]:
    """[sizes] factors between those that are given."""
    if not factors:
        return np.ones(len(sizes))
    known = sorted(factors)
    at = [math.log(size) for size in sizes]
    found: NDArray[np.float64] = np.interp(
        at, [math.log(size) for size in known], [factors[size] for size in known]
    )
    return found
