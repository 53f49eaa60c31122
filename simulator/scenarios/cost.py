"""The sections `cost` and `profile`: the true step costs, and the costs that are measured."""

import math
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from controller.core.cost.profile import Profile
from controller.core.engine_spec import MAX_ARMS, MAX_DRAFTERS, DrafterSpec
from controller.core.errors import InvalidEngineError
from controller.core.model_shapes import DrafterKind
from controller.core.step_report import MAX_STEP_SECONDS
from simulator import published
from simulator.controller_policy import FINGERPRINT
from simulator.errors import InvalidInputError
from simulator.scenarios import fields
from simulator.step_costs import read_profile
from simulator.surface import (
    DRAFTER_KINDS_BY_NAME,
    CostSurface,
    MixtureCost,
    add_mixtures,
    csv_surface,
    profile_sizes,
    profile_surface,
)

# Largest batch of a cost formula unless the engine's limit is given.
_FORMULA_MAX_BATCH = 64
# What a change of arm costs on an engine unless the file states it.
SWITCH_SECONDS = 2e-4


class StepFormula(fields.Section):
    """Seconds of the target's pass and of everything else that runs once in a step.

    base_seconds + seconds_per_sequence B + seconds_per_token B (gamma + 1)
    + seconds_per_kv_token kv
    """

    base_seconds: Annotated[fields.Seconds, Field(gt=0)]
    seconds_per_sequence: fields.Seconds = 0.0
    seconds_per_token: fields.Seconds = 0.0
    seconds_per_kv_token: fields.Seconds = 0.0


class DraftFormula(fields.Section):
    """Seconds that drafting adds to a step at gamma > 0.

        once_seconds + seconds_per_pass gamma + seconds_per_token B gamma
        + seconds_per_kv_token kv + share_of_step (the rest of the step)

    kind: "mtp" (also EAGLE), "dflash", "standalone" or "ngram".  gammas: draft lengths; 0 is added.
    """

    kind: DrafterKind = DrafterKind.MTP
    gammas: Annotated[tuple[fields.Gamma, ...], Field(min_length=1)]
    once_seconds: fields.Seconds = 0.0
    seconds_per_pass: fields.Seconds = 0.0
    seconds_per_token: fields.Seconds = 0.0
    seconds_per_kv_token: fields.Seconds = 0.0
    share_of_step: fields.Share = 0.0


class CostFormula(fields.Section):
    """A step of the target, and what each drafter adds to it."""

    step: StepFormula
    drafters: Annotated[dict[fields.DrafterName, DraftFormula], Field(min_length=1)]


class MixtureSection(fields.Section):
    """Describes a mixture: in each row of its steps one of two drafters, main and free, is used.

    free: a lookup.  once_seconds, share_of_step: what looking up adds to a step of the main one.
    """

    main: fields.DrafterName
    free: fields.DrafterName
    once_seconds: fields.Seconds = 0.0
    share_of_step: fields.Share = 0.0

    def cost(self) -> MixtureCost:
        """Returns what the surface is given."""
        return MixtureCost(self.main, self.free, self.once_seconds, self.share_of_step)


class CostSection(fields.Section):
    """Costs of a step: exactly one of `published`, `table`, `profile` and `formula`.

    published: name of a published table; drafters: those of it that the engine has (all);
    gammas: their draft lengths (as published); extrapolate: batches may exceed what was measured.
    table: drafter -> step-cost CSV; kinds: drafter -> kind, where its name does not give it away.
    profile: a profile of this project.  Files are relative to the scenario file.
    seconds_per_kv_token, kv_reference: price of a token of context, and the tokens a sequence at
    which the costs hold; they replace those of the source, and a formula has its own.
    catch_up_seconds_per_token, catch_up_pass_seconds: what a drafter pays for every token that it
    missed, and once for all of them; they replace those of the source.
    mixtures: name -> mixture of two of the drafters, with the draft lengths of the main one.
    switch_seconds: paid by a step whose arm is not that of the last one.
    scale: multiplies all costs, switching and catching up included.
    """

    published: str | None = None
    table: Annotated[dict[fields.DrafterName, fields.FileName], Field(min_length=1)] | None = None
    profile: fields.FileName | None = None
    formula: CostFormula | None = None
    drafters: Annotated[tuple[fields.DrafterName, ...], Field(min_length=1)] | None = None
    gammas: Annotated[tuple[fields.Gamma, ...], Field(min_length=1)] | None = None
    extrapolate: bool = False
    kinds: dict[fields.DrafterName, DrafterKind] = Field(default_factory=dict)
    mixtures: dict[fields.DrafterName, MixtureSection] = Field(default_factory=dict)
    seconds_per_kv_token: fields.Seconds | None = None
    kv_reference: fields.MeanLength | None = None
    catch_up_seconds_per_token: fields.Seconds | None = None
    catch_up_pass_seconds: fields.Seconds | None = None
    switch_seconds: fields.Seconds = SWITCH_SECONDS
    scale: fields.Factor = 1.0

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        source = self.require_exactly_one("published", "table", "profile", "formula")
        allowed_sources = {
            "gammas": {"published"},
            "extrapolate": {"published"},
            "kinds": {"table", "profile"},
            "drafters": {"published", "profile"},
            "seconds_per_kv_token": {"published", "table", "profile"},
            "kv_reference": {"published", "table", "profile"},
        }
        misplaced = [name for name, sources in allowed_sources.items() if source not in sources]
        self.refuse_combination(source, *misplaced)
        return self

    def make_surface(
        self, max_batch_size: int | None, folder: Path, locations: fields.FieldLocations
    ) -> CostSurface:
        """Makes the true costs.  max_batch_size: the engine's limit; None: what is known.

        folder: where relative files are.  Raises InvalidInputError, which names the field.
        """
        surface = self._make_source_surface(max_batch_size, folder, locations)
        if self.drafters is not None:
            drafter_names = [d.name for d in surface.drafters]
            for i, name in enumerate(self.drafters):
                if name not in drafter_names:
                    fault = f"{name!r} is not one of {drafter_names}"
                    raise locations.make_error(("cost", "drafters", i), fault)
            surface = surface.with_drafters(*self.drafters)
        if self.mixtures:
            with locations.errors_at("cost", "mixtures"):
                mixtures = {name: section.cost() for name, section in self.mixtures.items()}
                surface = add_mixtures(surface, mixtures)
        return self._with_prices(surface)

    def _make_source_surface(
        self, max_batch_size: int | None, folder: Path, locations: fields.FieldLocations
    ) -> CostSurface:
        if self.published is not None:
            with locations.errors_at("cost", "published"):
                return _published_surface(
                    self.published, self.gammas, max_batch_size, self.extrapolate
                )
        kinds = {**DRAFTER_KINDS_BY_NAME, **self.kinds}
        if self.table is not None:
            with locations.errors_at("cost", "table"):
                files = {drafter: folder / name for drafter, name in self.table.items()}
                return csv_surface(files, kinds, max_batch_size)
        if self.profile is not None:
            with locations.errors_at("cost", "profile"):
                profile = read_profile(folder / self.profile)
                return profile_surface(self.profile, profile, kinds, max_batch_size)
        assert self.formula is not None
        with locations.errors_at("cost", "formula"):
            return formula_surface("formula", self.formula, max_batch_size or _FORMULA_MAX_BATCH)

    def _with_prices(self, surface: CostSurface) -> CostSurface:
        def scaled(override: float | None, source_value: float) -> float:
            return self.scale * (source_value if override is None else override)

        kv_seconds = surface.kv_seconds
        if self.seconds_per_kv_token is not None:
            kv_seconds = np.full(len(surface.arms), self.seconds_per_kv_token)
        return replace(
            surface,
            seconds=self.scale * surface.seconds,
            kv_seconds=self.scale * kv_seconds,
            kv_reference=surface.kv_reference if self.kv_reference is None else self.kv_reference,
            prefill_seconds_per_token=self.scale * surface.prefill_seconds_per_token,
            prefill_pass_seconds=self.scale * surface.prefill_pass_seconds,
            catch_up_seconds_per_token=scaled(
                self.catch_up_seconds_per_token, surface.catch_up_seconds_per_token
            ),
            catch_up_pass_seconds=scaled(self.catch_up_pass_seconds, surface.catch_up_pass_seconds),
        )


# The suite has a hundred scenarios on six tables.
@lru_cache(maxsize=64)
def _published_surface(
    name: str, gammas: tuple[int, ...] | None, max_batch_size: int | None, extrapolate: bool
) -> CostSurface:
    return published.published_surface(name, gammas, max_batch_size, extrapolate=extrapolate)


def formula_surface(name: str, formula: CostFormula, max_batch_size: int) -> CostSurface:
    """Makes the surface of a formula, for batches of 1 to `max_batch_size`.

    A token of a prompt costs what a token of a step does.  Catching up costs a pass of the drafter
    and a token of its draft for every token missed; of several drafters, the most expensive counts.

    Raises InvalidInputError: too many drafters, a batch or a step that is
    too large.
    """
    arms = sum(len({0, *draft.gammas}) for draft in formula.drafters.values())
    if arms > MAX_ARMS or len(formula.drafters) > MAX_DRAFTERS:
        fault = f"at most {MAX_DRAFTERS} drafters with {MAX_ARMS} draft lengths can be simulated"
        raise InvalidInputError(name, 0, fault)
    step, reference = formula.step, published.KV_REFERENCE
    batch = np.maximum(np.arange(max_batch_size + 1, dtype=np.float64), 1.0)
    rows: list[NDArray[np.float64]] = []
    kv_seconds: list[float] = []
    specs = []
    for drafter, draft in formula.drafters.items():
        gammas = tuple(sorted({0, *draft.gammas}))
        try:
            specs.append(DrafterSpec(drafter, draft.kind, gammas))
        except InvalidEngineError as error:
            raise InvalidInputError(name, 0, str(error)) from error
        for gamma in gammas:
            share = draft.share_of_step if gamma else 0.0
            kv = (1 + share) * step.seconds_per_kv_token
            seconds = (1 + share) * (
                step.base_seconds
                + step.seconds_per_sequence * batch
                + step.seconds_per_token * batch * (gamma + 1)
            )
            if gamma:
                seconds += draft.once_seconds + draft.seconds_per_pass * gamma
                seconds += draft.seconds_per_token * batch * gamma
                kv += draft.seconds_per_kv_token
            rows.append(seconds + kv * batch * reference)
            kv_seconds.append(kv)
    seconds = np.vstack(rows)
    if seconds.max() > MAX_STEP_SECONDS:
        raise InvalidInputError(name, 0, f"a step takes more than {MAX_STEP_SECONDS:g} s")
    return CostSurface(
        name,
        tuple(specs),
        seconds,
        np.array(kv_seconds),
        reference,
        prefill_seconds_per_token=step.seconds_per_token,
        catch_up_seconds_per_token=max(d.seconds_per_token for d in formula.drafters.values()),
        catch_up_pass_seconds=max(d.seconds_per_pass for d in formula.drafters.values()),
    )


class NoiseShape(Enum):
    """Names how the error of a measured cell is distributed."""

    LOGNORMAL = "lognormal"
    UNIFORM = "uniform"


class ProfileSection(fields.Section):
    """Describes how the profile differs from the true costs; by default like a careful measurement.

    factor: on all costs.  drafting: on all cells at gamma > 0.  by_arm: drafter -> gamma -> factor.
    by_batch_size: batch size -> factor, linear in log B in between and constant beyond.
    noise: error of each cell, drawn once: the standard deviation of its logarithm (lognormal), or
    the largest relative error (uniform).  noise_seed: of the draw.
    context_term: whether the profile knows the price of context.  kv_tokens_per_sequence: context
    at which it was measured, tokens; by default that at which the costs are given.

    Cells are measured at batch sizes 1, 2, 4, ... and the engine's limit, gamma = 0 included.
    """

    factor: fields.Factor = 1.0
    drafting: fields.Factor = 1.0
    by_arm: dict[fields.DrafterName, dict[fields.GammaKey, fields.Factor]] = Field(
        default_factory=dict
    )
    by_batch_size: dict[fields.BatchSizeKey, fields.Factor] = Field(default_factory=dict)
    noise: fields.LogSpread = 0.01
    noise_shape: NoiseShape = NoiseShape.LOGNORMAL
    noise_seed: fields.SeedNumber = 0
    context_term: bool = True
    kv_tokens_per_sequence: fields.MeanLength | None = None

    @model_validator(mode="after")
    def _costs_stay_above_zero(self) -> Self:
        if self.noise_shape is NoiseShape.UNIFORM and self.noise >= 1:
            raise ValueError(f"a uniform noise of {self.noise:g} would make costs negative")
        return self

    def make_profile(self, surface: CostSurface, locations: fields.FieldLocations) -> Profile:
        """Makes the profile that `controller profile` would write.  Raises InvalidInputError."""
        for drafter, factors in self.by_arm.items():
            known_gammas = {arm.gamma for arm in surface.arms if arm.drafter == drafter}
            for gamma in factors:
                if gamma not in known_gammas:
                    fault = f"there is no arm of {drafter!r} with draft length {gamma}"
                    raise locations.make_error(("profile", "by_arm", drafter), fault)
        sizes = profile_sizes(surface.max_batch_size)
        profile = surface.make_profile(
            FINGERPRINT,
            sizes,
            self._factors(surface, sizes),
            self.kv_tokens_per_sequence,
            self.context_term,
        )
        if self.factor == 1:
            return profile
        return replace(
            profile,
            seconds_per_kv_token=self.factor * profile.seconds_per_kv_token,
            catch_up_seconds_per_token=self.factor * profile.catch_up_seconds_per_token,
        )

    def _factors(self, surface: CostSurface, sizes: list[int]) -> NDArray[np.float64]:
        """Returns [arms, sizes] factors of the profile's costs over the true costs."""
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
        return factors * _interpolate_factors(self.by_batch_size, sizes)


def _interpolate_factors(factors: Mapping[int, float], sizes: list[int]) -> NDArray[np.float64]:
    """Returns [sizes] factors, interpolated between the given ones."""
    if not factors:
        return np.ones(len(sizes))
    known_sizes = sorted(factors)
    log_sizes = [math.log(size) for size in sizes]
    interpolated: NDArray[np.float64] = np.interp(
        log_sizes, [math.log(size) for size in known_sizes], [factors[size] for size in known_sizes]
    )
    return interpolated
