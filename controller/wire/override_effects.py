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
    lost_capability_of_all,
)
from controller.core.plan import Reason, Regime, RegimeMode
from controller.core.planning.constraints import RowConstraints, constrain_rows
from controller.core.planning.overrides import Limits, Override, Rule, sort_by_strength
from controller.core.planning.plan_table import batch_buckets

# The capability that a regime needs.
_REQUIRED_CAPABILITY = {
    RegimeMode.ONLINE: Capability.UPDATE_ONLINE,
    RegimeMode.COLLECT: Capability.COLLECT,
}


@dataclass(frozen=True, slots=True)
class OverrideEffect:
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
    override: Override,
    before: Sequence[Override],
    after: Sequence[Override],
    ceiling_seconds: float = 0.0,
) -> OverrideEffect:
    """Returns the effect of the override `override`, which is in `before`, in `after` or in both.

    ceiling_seconds: the setting's bound on the time per output token, 0 = none.
    """
    graphs, arms = spec.fingerprint.graph_batch_sizes, spec.arms
    buckets = batch_buckets(spec.max_batch_size, graphs, len(arms))
    old, new = (constrain_rows(o, spec, buckets, arms, ceiling_seconds) for o in (before, after))
    rows_with_override, all_overrides = (new, after) if override in after else (old, before)
    learns = spec.capabilities.can_update_online or spec.capabilities.can_collect
    regimes = (old.override_regime, new.override_regime) if learns else (None, None)
    return OverrideEffect(
        _differ_somewhere(old, new, _feasible_column),
        _differ_somewhere(old, new, lambda rows, row: rows.limits[row].can_explore),
        _differ_somewhere(old, new, lambda rows, row: _effective_bound_seconds(spec, rows, row)),
        *regimes,
        tuple(sorted(set(_shadowing_ids(spec, override, rows_with_override, all_overrides)))),
        unsupported_reason(spec, override, ceiling_seconds),
    )


def preview_plan(core: EngineController, overrides: Iterable[Override]) -> tuple[PreviewRow, ...]:
    """Returns how the last plan of an engine would change under these overrides."""
    row_constraints, values = core.values_with_overrides(overrides)
    plan, arms = core.current_plan(), core.arms
    value = (
        values.tokens_per_second
        if row_constraints.feasible is None
        else np.where(row_constraints.feasible, values.tokens_per_second, -1.0)
    )
    keeps = row_constraints.arms_within_bounds(arms, values.tpot_seconds)
    above: NDArray[np.bool_] = keeps.sum(axis=0) == 0
    value = np.where(keeps | above, value, -1.0)
    rows = []
    for j, (upper, emptied) in enumerate(
        zip(row_constraints.upper_batch_sizes, row_constraints.is_emptied, strict=True)
    ):
        row = plan.row_for(upper)
        # The running arm stays if it may run, unless it runs because an override excluded others.
        stays = value[arms.index(row.arm), j] >= 0 and row.reason is not Reason.OVERRIDE
        arm = row.arm if stays else arms[int(value[:, j].argmax())]
        rows.append(PreviewRow(upper, row.arm, arm, emptied, bool(above[j])))
    return tuple(rows)


def unsupported_reason(spec: EngineSpec, override: Override, ceiling_seconds: float = 0.0) -> str:
    """Returns why the engine cannot do what an override demands; "" if it can.

    ceiling_seconds: as in `effect_on`.
    """
    rule, names = override.rule, sorted(drafter.name for drafter in spec.drafters)
    named_drafters = {*rule.deny_drafters, *([] if rule.drafter is None else [rule.drafter])}
    if unknown := sorted(named_drafters - set(names)):
        return f"it has no drafter {', '.join(unknown)}; it has {', '.join(names)}"
    if rule.gamma_range is not None:
        low, high = rule.gamma_range
        gammas = sorted({arm.gamma for arm in spec.arms if rule.drafter in {None, arm.drafter}})
        if not any(low <= gamma <= high for gamma in gammas):
            requested = f"{low}" if low == high else f"{low} to {high}"
            return f"it has no draft length {requested}; it has {', '.join(map(str, gammas))}"
    if (lost_capability := _loss_of_pinned(spec, rule)) is not None:
        return f"it has lost {lost_capability.description}: {lost_capability.reason}"
    if rule.tpot_max_seconds is not None and 0 < ceiling_seconds <= rule.tpot_max_seconds:
        bound_text = f"{1e3 * ceiling_seconds:g} ms a token"
        return f"its setting planner.tpot_ceiling_seconds, {bound_text}, is as strict or stricter"
    return _unsupported_regime_reason(spec, rule)


def _unsupported_regime_reason(spec: EngineSpec, rule: Rule) -> str:
    mode = RegimeMode.OFF if rule.regime is None else rule.regime.mode
    if mode is RegimeMode.ONLINE and not spec.capabilities.can_update_online:
        return "it cannot update its drafter online"
    if mode is RegimeMode.COLLECT and not spec.capabilities.can_collect:
        return "it cannot collect training signals"
    return ""


def _loss_of_pinned(spec: EngineSpec, rule: Rule) -> LostCapability | None:
    """Returns the lost capability that leaves a rule nothing to pin; None if an arm remains."""
    needed = None if rule.regime is None else _REQUIRED_CAPABILITY.get(rule.regime.mode)
    for lost_capability in spec.lost:
        if lost_capability.capability is needed:
            return lost_capability
    if rule.drafter is None and rule.gamma_range is None:
        return None
    low, high = rule.gamma_range or (1, MAX_GAMMA)
    pinned_arms = (
        arm for arm in spec.arms if rule.drafter in {None, arm.drafter} and low <= arm.gamma <= high
    )
    return lost_capability_of_all(spec, pinned_arms)


def _differ_somewhere(
    old: RowConstraints, new: RowConstraints, row_value: Callable[[RowConstraints, int], object]
) -> bool:
    """Returns whether the value `row_value` of a row differs at some batch size."""
    sizes = {*old.upper_batch_sizes, *new.upper_batch_sizes}
    return any(
        row_value(old, old.row_of(size)) != row_value(new, new.row_of(size)) for size in sizes
    )


def _feasible_column(rows: RowConstraints, row: int) -> list[bool] | None:
    """Returns which arms may run in a row; None for all of them."""
    if rows.feasible is None:
        return None
    column: list[bool] = rows.feasible[:, row].tolist()
    return None if all(column) else column


def _effective_bound_seconds(spec: EngineSpec, rows: RowConstraints, row: int) -> float | None:
    """Returns the seconds per output token that a row allows; None if the bound has no effect."""
    bound = rows.bounds[row] if rows.bounds else None
    return bound.seconds if bound is not None and _has_choice(spec, rows, row) else None


def _has_choice(spec: EngineSpec, rows: RowConstraints, row: int) -> bool:
    """Returns whether more than one arm may run in a row; gamma = 0 counts once."""
    column = _feasible_column(rows, row) or [True] * len(spec.arms)
    allowed_arms = (arm for arm, is_allowed in zip(spec.arms, column, strict=True) if is_allowed)
    return len({(arm.drafter if arm.gamma else "", arm.gamma) for arm in allowed_arms}) > 1


def _shadowing_ids(
    spec: EngineSpec, override: Override, rows: RowConstraints, all_overrides: Sequence[Override]
) -> Iterator[str]:
    """Yields ids of overrides that win over `override` somewhere.  rows: with `all_overrides`."""
    other_overrides = [o for o in all_overrides if o != override and o.scope.covers(spec)]
    for row, (size, limits) in enumerate(zip(rows.upper_batch_sizes, rows.limits, strict=True)):
        if override.covers(spec, size):
            yield from _deciding_ids(
                override, limits, [o for o in other_overrides if o.covers(spec, size)]
            )
            if override.rule.tpot_max_seconds is not None and not _has_choice(spec, rows, row):
                # The overrides that pin the only remaining arm win over it.
                yield from {*limits.gamma_by, limits.drafter_by} - {"", override.override_id}
    if override.rule.regime is not None or override.rule.deny_updates:
        yield from (o.override_id for o in other_overrides if o.rule.deny_updates)
    if override.rule.regime is not None:
        pins = [o for o in all_overrides if o.scope.covers(spec) and o.rule.regime is not None]
        yield from (o.override_id for o in sort_by_strength(pins)[:1] if o != override)


def _deciding_ids(
    override: Override, limits: Limits, other_overrides: Sequence[Override]
) -> Iterator[str]:
    """Yields the ids of the other overrides that win over `override` at one batch size."""
    rule = override.rule
    if rule.deny_exploration:
        yield from (o.override_id for o in other_overrides if o.rule.deny_exploration)
    constrains_drafts = (
        rule.gamma_range is not None or rule.drafter is not None or rule.deny_drafters
    )
    if limits.off and (constrains_drafts or rule.off or rule.tpot_max_seconds is not None):
        yield from (o.override_id for o in other_overrides if o.rule.off)
        return
    if rule.gamma_range is not None and override.override_id not in limits.gamma_by:
        yield from limits.gamma_by
    if rule.tpot_max_seconds is not None and limits.tpot_by != override.override_id:
        yield limits.tpot_by
    named_drafters = {*rule.deny_drafters, *([] if rule.drafter is None else [rule.drafter])}
    yield from (
        o.override_id for o in other_overrides if named_drafters & set(o.rule.deny_drafters)
    )
    if (
        named_drafters
        and limits.drafter_by not in {"", override.override_id}
        and limits.drafter not in named_drafters
    ):
        yield limits.drafter_by
