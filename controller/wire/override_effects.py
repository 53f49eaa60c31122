"""Predicts what an override changes for one engine, and which other overrides shadow it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import (
    MAX_GAMMA,
    Arm,
    Capability,
    EngineSpec,
    LostCapability,
    loss_of_all,
)
from controller.core.plan import Reason, Regime, RegimeMode
from controller.core.planning.constraints import PlanRows, rows_under
from controller.core.planning.overrides import Limits, Override, Rule, by_strength
from controller.core.planning.plan_table import batch_buckets

# The capability that a regime needs.
_NEEDS = {
    RegimeMode.ONLINE: Capability.UPDATE_ONLINE,
    RegimeMode.COLLECT: Capability.COLLECT,
}


@dataclass(frozen=True, slots=True)
class Effect:
    """Describes the effect of setting or clearing one override on one engine.

    arms: the set of arms that may run changes at some batch size.  probing: whether the engine may
    probe changes.  bound: the bound on the time per output token changes where more than one choice
    may run.  regime_before, regime_after: the regime of online updates that overrides demand, None
    if they demand none.  shadowed_by: ids of the overrides that win over it, ascending.
    unable: why the engine cannot do what it demands; "" if the engine can.
    """

    arms: bool
    probing: bool
    bound: bool
    regime_before: Regime | None
    regime_after: Regime | None
    shadowed_by: tuple[str, ...]
    unable: str

    @property
    def constrains(self) -> bool:
        """Tells whether it changes what the engine may run, learn or probe."""
        changed = self.arms or self.probing or self.bound
        return changed or self.regime_before != self.regime_after


@dataclass(frozen=True, slots=True)
class PreviewRow:
    """Describes how a row would change.

    stuck: the overrides leave no arm there that the engine can run.  above_bound: none of the
    remaining arms keeps the bound on the time per output token.
    """

    max_batch_size: int
    before: Arm
    after: Arm
    stuck: bool
    above_bound: bool = False


def effect_on(
    spec: EngineSpec,
    of: Override,
    before: Sequence[Override],
    after: Sequence[Override],
    ceiling_seconds: float = 0.0,
) -> Effect:
    """Returns the effect of the override `of`, which is in `before`, in `after` or in both.

    ceiling_seconds: the setting's bound on the time per output token, 0 = none.
    """
    graphs, arms = spec.fingerprint.graph_batch_sizes, spec.arms
    buckets = batch_buckets(spec.max_batch_size, graphs, len(arms))
    old, new = (rows_under(o, spec, buckets, arms, ceiling_seconds) for o in (before, after))
    holding, everything = (new, after) if of in after else (old, before)
    learns = spec.capabilities.can_update_online or spec.capabilities.can_collect
    regimes = (old.regime, new.regime) if learns else (None, None)
    return Effect(
        _differ(old, new, _feasible),
        _differ(old, new, lambda rows, row: rows.limits[row].explore),
        _differ(old, new, lambda rows, row: _bound(spec, rows, row)),
        *regimes,
        tuple(sorted(set(_shadowing(spec, of, holding, everything)))),
        why_unable(spec, of, ceiling_seconds),
    )


def preview(core: EngineController, overrides: Iterable[Override]) -> tuple[PreviewRow, ...]:
    """Returns how the last plan of an engine would change under these overrides."""
    at, values = core.values_under(overrides)
    plan, arms = core.current_plan(), core.arms
    value = values.value if at.feasible is None else np.where(at.feasible, values.value, -1.0)
    keeps = at.keeping(arms, values.tpot)
    above: NDArray[np.bool_] = keeps.sum(axis=0) == 0
    value = np.where(keeps | above, value, -1.0)
    rows = []
    for j, (upper, emptied) in enumerate(zip(at.upper, at.emptied, strict=True)):
        row = plan.row_for(upper)
        # The running arm stays if it may run, unless it runs because an override excluded others.
        stays = value[arms.index(row.arm), j] >= 0 and row.reason is not Reason.OVERRIDE
        arm = row.arm if stays else arms[int(value[:, j].argmax())]
        rows.append(PreviewRow(upper, row.arm, arm, emptied, bool(above[j])))
    return tuple(rows)


def why_unable(spec: EngineSpec, of: Override, ceiling_seconds: float = 0.0) -> str:
    """Returns why the engine cannot do what an override demands; "" if it can.

    ceiling_seconds: as in `effect_on`.
    """
    rule, names = of.rule, sorted(drafter.name for drafter in spec.drafters)
    named = {*rule.deny_drafters, *([] if rule.drafter is None else [rule.drafter])}
    if unknown := sorted(named - set(names)):
        return f"it has no drafter {', '.join(unknown)}; it has {', '.join(names)}"
    if rule.gamma_range is not None:
        low, high = rule.gamma_range
        gammas = sorted({arm.gamma for arm in spec.arms if rule.drafter in {None, arm.drafter}})
        if not any(low <= gamma <= high for gamma in gammas):
            asked = f"{low}" if low == high else f"{low} to {high}"
            return f"it has no draft length {asked}; it has {', '.join(map(str, gammas))}"
    if (loss := _loss(spec, rule)) is not None:
        return f"it has lost {loss.what}: {loss.reason}"
    if rule.tpot_max_seconds is not None and 0 < ceiling_seconds <= rule.tpot_max_seconds:
        most = f"{1e3 * ceiling_seconds:g} ms a token"
        return f"its setting planner.tpot_ceiling_seconds, {most}, is as strict or stricter"
    return _why_no_regime(spec, rule)


def _why_no_regime(spec: EngineSpec, rule: Rule) -> str:
    mode = RegimeMode.OFF if rule.regime is None else rule.regime.mode
    if mode is RegimeMode.ONLINE and not spec.capabilities.can_update_online:
        return "it cannot update its drafter online"
    if mode is RegimeMode.COLLECT and not spec.capabilities.can_collect:
        return "it cannot collect training signals"
    return ""


def _loss(spec: EngineSpec, rule: Rule) -> LostCapability | None:
    """Returns the lost capability that leaves a rule nothing to pin; None if an arm remains."""
    needed = None if rule.regime is None else _NEEDS.get(rule.regime.mode)
    for loss in spec.lost:
        if loss.capability is needed:
            return loss
    if rule.drafter is None and rule.gamma_range is None:
        return None
    low, high = rule.gamma_range or (1, MAX_GAMMA)
    asked = (
        arm for arm in spec.arms if rule.drafter in {None, arm.drafter} and low <= arm.gamma <= high
    )
    return loss_of_all(spec, asked)


def _differ(old: PlanRows, new: PlanRows, of: Callable[[PlanRows, int], object]) -> bool:
    """Returns whether the value `of` of a row differs at some batch size."""
    sizes = {*old.upper, *new.upper}
    return any(of(old, old.row_of(size)) != of(new, new.row_of(size)) for size in sizes)


def _feasible(rows: PlanRows, row: int) -> list[bool] | None:
    """Returns which arms may run in a row; None for all of them."""
    if rows.feasible is None:
        return None
    column: list[bool] = rows.feasible[:, row].tolist()
    return None if all(column) else column


def _bound(spec: EngineSpec, rows: PlanRows, row: int) -> float | None:
    """Returns the seconds per output token that a row allows; None if the bound has no effect."""
    bound = rows.bounds[row] if rows.bounds else None
    return bound.seconds if bound is not None and _has_choice(spec, rows, row) else None


def _has_choice(spec: EngineSpec, rows: PlanRows, row: int) -> bool:
    """Returns whether more than one arm may run in a row; gamma = 0 counts once."""
    column = _feasible(rows, row) or [True] * len(spec.arms)
    left = (arm for arm, may in zip(spec.arms, column, strict=True) if may)
    return len({(arm.drafter if arm.gamma else "", arm.gamma) for arm in left}) > 1


def _shadowing(
    spec: EngineSpec, of: Override, rows: PlanRows, everything: Sequence[Override]
) -> Iterator[str]:
    """Yields the ids of overrides that win over `of` somewhere.  rows: under `everything`."""
    others = [o for o in everything if o != of and o.scope.covers(spec)]
    for row, (size, limits) in enumerate(zip(rows.upper, rows.limits, strict=True)):
        if of.covers(spec, size):
            yield from _deciding(of, limits, [o for o in others if o.covers(spec, size)])
            if of.rule.tpot_max_seconds is not None and not _has_choice(spec, rows, row):
                # The overrides that pin the only remaining arm win over it.
                yield from {*limits.gamma_by, limits.drafter_by} - {"", of.override_id}
    if of.rule.regime is not None or of.rule.deny_updates:
        yield from (o.override_id for o in others if o.rule.deny_updates)
    if of.rule.regime is not None:
        pins = [o for o in everything if o.scope.covers(spec) and o.rule.regime is not None]
        yield from (o.override_id for o in by_strength(pins)[:1] if o != of)


def _deciding(of: Override, limits: Limits, others: Sequence[Override]) -> Iterator[str]:
    """Yields the ids of the other overrides that win over `of` at one batch size."""
    rule = of.rule
    if rule.deny_exploration:
        yield from (o.override_id for o in others if o.rule.deny_exploration)
    drafts = rule.gamma_range is not None or rule.drafter is not None or rule.deny_drafters
    if limits.off and (drafts or rule.off or rule.tpot_max_seconds is not None):
        yield from (o.override_id for o in others if o.rule.off)
        return
    if rule.gamma_range is not None and of.override_id not in limits.gamma_by:
        yield from limits.gamma_by
    if rule.tpot_max_seconds is not None and limits.tpot_by != of.override_id:
        yield limits.tpot_by
    named = {*rule.deny_drafters, *([] if rule.drafter is None else [rule.drafter])}
    yield from (o.override_id for o in others if named & set(o.rule.deny_drafters))
    if named and limits.drafter_by not in {"", of.override_id} and limits.drafter not in named:
        yield limits.drafter_by
