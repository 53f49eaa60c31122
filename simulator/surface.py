"""The true step costs of the simulated engine, and the profile that a measurement would give.

This module makes a surface from measured tables, and `published` from published figures.  Mixtures
of its drafters are added to a surface.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from controller.core.cost.profile import DrafterIdentity, Profile, ProfileCell
from controller.core.engine_spec import MAX_BATCH_SIZE, Arm, DrafterSpec, Fingerprint, Mixture
from controller.core.errors import InvalidEngineError
from controller.core.model_shapes import DrafterKind
from simulator.errors import InvalidInputError
from simulator.step_costs import CostTable, profile_table, read_step_costs

# For a table without a context length; context has no cost then.
_KV_REFERENCE = 512.0
# What drafters of these names are; others are MTP, serial passes.
DRAFTER_KINDS_BY_NAME: Mapping[str, DrafterKind] = {
    "ngram": DrafterKind.NGRAM,
    "dflash": DrafterKind.DFLASH,
}
# An EAGLE drafter is one layer; current targets have thirty and more.
_DRAFTER_SHARE_OF_TOKEN = 1 / 32
# A context below the reference makes no step cheaper than this share of its price there.
MIN_COST_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class CostSurface:
    """Seconds of a step by arm, batch size and context.

        C = seconds[arm, B] + kv_seconds[arm] * (kv - B * kv_reference), at least a tenth of seconds

    arms: one (drafter, gamma) a row, in the order of `drafters` and their gammas (gamma = 0 is
    listed for each).  seconds: [arms, max_batch_size + 1], column B (column 0 repeats column 1).
    kv_seconds: [arms], seconds per KV token.  kv_reference: context tokens per sequence for which
    `seconds` holds.  prefill_seconds_per_token: of a prompt; prefill_pass_seconds: once per pass
    that reads prompts.  catch_up_seconds_per_token: cost per token that a drafter missed while it
    slept or another one ran; catch_up_pass_seconds: added once for all missed tokens.
    """

    name: str
    drafters: tuple[DrafterSpec, ...]
    seconds: NDArray[np.float64]
    kv_seconds: NDArray[np.float64]
    kv_reference: float
    prefill_seconds_per_token: float = 0.0
    catch_up_seconds_per_token: float = 0.0
    prefill_pass_seconds: float = 0.0
    catch_up_pass_seconds: float = 0.0

    @property
    def arms(self) -> tuple[Arm, ...]:
        """Rows of `seconds`."""
        return tuple(Arm(d.name, gamma) for d in self.drafters for gamma in d.gammas)

    @property
    def max_batch_size(self) -> int:
        """Largest batch that the surface prices."""
        return int(self.seconds.shape[1]) - 1

    def step_seconds(self, batch_size: int, kv_tokens: float) -> NDArray[np.float64]:
        """[arms] seconds of a step at this context, as the engine charges them."""
        reference_seconds = self.seconds[:, min(batch_size, self.max_batch_size)]
        context_seconds = self.kv_seconds * (kv_tokens - batch_size * self.kv_reference)
        # Less context never makes a step free.
        seconds: NDArray[np.float64] = np.maximum(
            reference_seconds + context_seconds, MIN_COST_SHARE * reference_seconds
        )
        return seconds

    def catch_up_seconds(self, tokens: float) -> float:
        """Returns the seconds in which a drafter reads the tokens that it missed; 0 for none."""
        if tokens == 0:
            return 0.0
        return self.catch_up_pass_seconds + self.catch_up_seconds_per_token * tokens

    def with_drafters(self, *drafters: str) -> "CostSurface":
        """Returns the surface with these drafters alone."""
        kept_rows = [i for i, arm in enumerate(self.arms) if arm.drafter in drafters]
        return replace(
            self,
            drafters=tuple(d for d in self.drafters if d.name in drafters),
            seconds=self.seconds[kept_rows],
            kv_seconds=self.kv_seconds[kept_rows],
        )

    @property
    def without_mixtures(self) -> "CostSurface":
        """Returns the surface without mixtures, which are the last of its drafters."""
        if all(d.mixture is None for d in self.drafters):
            return self
        return self.with_drafters(*(d.name for d in self.drafters if d.mixture is None))

    def make_profile(
        self,
        fingerprint: Fingerprint,
        batch_sizes: Sequence[int],
        factors: NDArray[np.float64] | None = None,
        kv_tokens_per_sequence: float | None = None,
        with_context: bool = True,
    ) -> Profile:
        """Makes the profile that a measurement would give; `factors` [arms, sizes] make it wrong.

        with_context: False leaves the context term out, as a profile at one context does.
        """
        kv = self.kv_reference if kv_tokens_per_sequence is None else kv_tokens_per_sequence
        cells = []
        for i, arm in enumerate(self.arms):
            for j, size in enumerate(batch_sizes):
                shift = self.kv_seconds[i] * size * (kv - self.kv_reference)
                seconds = float(self.seconds[i, size] + shift)
                if factors is not None:
                    seconds *= float(factors[i, j])
                cells.append(ProfileCell(arm.drafter, arm.gamma, size, seconds, 0.0, 20))
        return Profile(
            fingerprint,
            tuple(DrafterIdentity(d.name, d.model, d.revision) for d in self.drafters),
            kv,
            float(np.median(self.kv_seconds)) if with_context else 0.0,
            tuple(cells),
            catch_up_seconds_per_token=self.catch_up_seconds_per_token,
        )


def profile_sizes(max_batch_size: int) -> list[int]:
    """Lists the batch sizes of a profile: 1, 2, 4, ... and the limit itself."""
    sizes = [1]
    while sizes[-1] * 2 < max_batch_size:
        sizes.append(sizes[-1] * 2)
    return sizes if sizes[-1] == max_batch_size else [*sizes, max_batch_size]


def csv_surface(
    paths: Mapping[str, str | Path],
    kinds: Mapping[str, DrafterKind] | None = None,
    max_batch_size: int | None = None,
    *,
    kv_reference: float = _KV_REFERENCE,
    seconds_per_kv_token: float = 0.0,
) -> CostSurface:
    """Drafter -> step-cost CSV of the same engine; see `table_surface` and `read_step_costs`.

    kv_reference, seconds_per_kv_token: context tokens per sequence of the measurement, and the cost
    of one more; the files do not contain them.  They do not contain the costs of prompts and of
    catching up either, which are derived: see `_add_derived_prices`.
    """
    if not paths:
        raise InvalidInputError("step costs", 0, "no file is named")
    for value in (kv_reference, seconds_per_kv_token):
        if not 0 <= value <= 1e9:
            raise InvalidInputError("step costs", 0, f"context term: {value} is out of range")
    tables = {drafter: read_step_costs(path) for drafter, path in paths.items()}
    name = "+".join(dict.fromkeys(Path(path).stem for path in paths.values()))
    surface = table_surface(name, tables, kinds, max_batch_size)
    return replace(
        _add_derived_prices(surface, tables),
        kv_seconds=np.full(len(surface.arms), seconds_per_kv_token),
        kv_reference=kv_reference,
    )


def _add_derived_prices(surface: CostSurface, tables: Mapping[str, CostTable]) -> CostSurface:
    """Returns the surface with the costs that a step-cost table does not contain.

    A token of a prompt costs what one more token adds to the largest pass of the first table, which
    is compute-bound.  A token that a drafter missed costs the drafter's share of that.  Catching up
    also costs one pass of the drafter: what drafting adds to a step of the smallest batch.
    """
    first_table = next(iter(tables.values()))
    width = first_table.gammas[-1] + 1
    if len(first_table.batch_sizes) > 1:
        sizes, seconds = first_table.batch_sizes[-2:], first_table.seconds[-1, -2:]
        token_seconds = (seconds[1] - seconds[0]) / ((sizes[1] - sizes[0]) * width)
    else:
        token_seconds = (first_table.seconds[-1, 0] - first_table.seconds[0, 0]) / (
            first_table.batch_sizes[0] * width
        )
    token_seconds = max(0.0, float(token_seconds))
    pass_seconds = [
        (table.seconds[1, 0] - table.seconds[0, 0]) / table.gammas[1]
        for table in tables.values()
        if len(table.gammas) > 1
    ]
    return replace(
        surface,
        prefill_seconds_per_token=token_seconds,
        catch_up_seconds_per_token=_DRAFTER_SHARE_OF_TOKEN * token_seconds,
        catch_up_pass_seconds=max([0.0, *map(float, pass_seconds)]),
    )


def profile_surface(
    name: str,
    profile: Profile,
    kinds: Mapping[str, DrafterKind] | None = None,
    max_batch_size: int | None = None,
) -> CostSurface:
    """All drafters of a profile, with its context term; see `table_surface`.

    Raises InvalidInputError as well for what `profile_table` refuses.
    """
    tables = {d.name: profile_table(profile, d.name, name) for d in profile.drafters}
    surface = table_surface(name, tables, kinds, max_batch_size)
    return replace(
        surface,
        drafters=tuple(
            replace(spec, model=d.model, revision=d.revision)
            for spec, d in zip(surface.drafters, profile.drafters, strict=True)
        ),
        kv_seconds=np.full(len(surface.arms), profile.seconds_per_kv_token),
        kv_reference=profile.kv_tokens_per_sequence,
        catch_up_seconds_per_token=profile.catch_up_seconds_per_token,
    )


def table_surface(
    name: str,
    tables: Mapping[str, CostTable],
    kinds: Mapping[str, DrafterKind] | None = None,
    max_batch_size: int | None = None,
) -> CostSurface:
    """Drafter -> table of the same engine; context has no price.

    Linear in B between the measured sizes, constant below the first one.  Above the last one the
    last slope continues, but never falls (a single size gives a constant).  Plain decoding runs the
    target alone: the first drafter's costs are used for all.

    kinds: by drafter; one that is not in it is MTP, serial passes.  max_batch_size: by default the
    largest that all tables reach; above it costs are extrapolated.

    Raises InvalidInputError: no drafter, an invalid name, a max_batch_size out of range.
    """
    if not tables:
        raise InvalidInputError(name, 0, "no drafter is named")
    kinds = kinds or {}
    largest = min(table.batch_sizes[-1] for table in tables.values())
    largest = largest if max_batch_size is None else max_batch_size
    if not 1 <= largest <= MAX_BATCH_SIZE:
        raise InvalidInputError(
            name, 0, f"max_batch_size {largest} must be in [1, {MAX_BATCH_SIZE}]"
        )
    try:
        specs = tuple(
            DrafterSpec(drafter, kinds.get(drafter, DrafterKind.MTP), table.gammas)
            for drafter, table in tables.items()
        )
    except InvalidEngineError as error:
        raise InvalidInputError(name, 0, str(error)) from error
    batch = np.maximum(np.arange(largest + 1, dtype=np.float64), 1.0)
    plain = _interpolate_batch(next(iter(tables.values())), 0, batch)
    rows = [
        plain if gamma == 0 else _interpolate_batch(table, i, batch)
        for table in tables.values()
        for i, gamma in enumerate(table.gammas)
    ]
    return CostSurface(name, specs, np.vstack(rows), np.zeros(len(rows)), _KV_REFERENCE)


def _interpolate_batch(
    table: CostTable, row: int, batch: NDArray[np.float64]
) -> NDArray[np.float64]:
    sizes, seconds = np.array(table.batch_sizes, dtype=np.float64), table.seconds[row]
    inside: NDArray[np.float64] = np.interp(batch, sizes, seconds)
    if len(sizes) < 2:
        return inside
    slope = max(0.0, float((seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])))
    beyond: NDArray[np.float64] = slope * np.maximum(batch - sizes[-1], 0.0)
    return inside + beyond


@dataclass(frozen=True, slots=True)
class MixtureCost:
    """Costs of a mixture: a step of its main drafter, and a lookup in addition.

    once_seconds, share_of_step: what the lookup adds to the main drafter's step.
    """

    main: str
    free: str
    once_seconds: float = 0.0
    share_of_step: float = 0.0


def add_mixtures(surface: CostSurface, mixtures: Mapping[str, MixtureCost]) -> CostSurface:
    """Returns the surface with these mixtures behind its drafters, by name.

    They have the draft lengths of their main drafter but 0.

    Raises InvalidInputError for drafters that the surface lacks, and for one that has a model in
    the place of the lookup.
    """
    specs, seconds, kv_seconds = [*surface.drafters], [surface.seconds], [surface.kv_seconds]
    drafters_by_name = {d.name: d for d in surface.drafters}
    for name, cost in mixtures.items():
        _require_mixture_parts(surface, name, cost)
        rows = [i for i, arm in enumerate(surface.arms) if arm.drafter == cost.main and arm.gamma]
        gammas = tuple(gamma for gamma in drafters_by_name[cost.main].gammas if gamma)
        mixture = Mixture(cost.main, cost.free)
        try:
            specs.append(DrafterSpec(name, DrafterKind.MIXTURE, gammas, mixture=mixture))
        except InvalidEngineError as error:
            raise InvalidInputError(name[:64], 0, str(error)) from error
        share = 1 + cost.share_of_step
        seconds.append(share * surface.seconds[rows] + cost.once_seconds)
        kv_seconds.append(share * surface.kv_seconds[rows])
    return replace(
        surface,
        drafters=tuple(specs),
        seconds=np.vstack(seconds),
        kv_seconds=np.concatenate(kv_seconds),
    )


def _require_mixture_parts(surface: CostSurface, name: str, cost: MixtureCost) -> None:
    drafters_by_name = {d.name: d for d in surface.drafters}
    if name in drafters_by_name:
        raise InvalidInputError(surface.name, 0, f"{name!r} is already a drafter")
    for part in (cost.main, cost.free):
        if part not in drafters_by_name:
            raise InvalidInputError(
                surface.name, 0, f"{part!r} is not one of {list(drafters_by_name)}"
            )
    if cost.main == cost.free or drafters_by_name[cost.free].kind is not DrafterKind.NGRAM:
        fault = f"{cost.free!r} is not a lookup (kind ngram) beside {cost.main!r}"
        raise InvalidInputError(surface.name, 0, fault)
