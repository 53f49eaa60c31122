"""Finds what an override changes for one engine, and which other overrides shadow it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from controller.core.capabilities import Capability, LostCapability, loss_of_all
from controller.core.engine_spec import MAX_GAMMA, EngineSpec
from controller.core.plan import Regime, RegimeMode
from controller.core.planning.constraints import PlanRows, rows_under
from controller.core.planning.overrides import Limits, Override, Rule, by_strength
from controller.core.planning.planner import batch_buckets

# The capability that a regime needs.
_NEEDS = {
    RegimeMode.ONLINE: Capability.UPDATE_ONLINE,
    RegimeMode.COLLECT: Capability.COLLECT,
}


@dataclass(frozen=True, slots=True)
class Effect:
    """Describes the effect of setting or clearing one override on one engine.

    arms: which arms may run changes at some batch size.  probing: whether it may explore does.
    regime_before, regime_after: what overrides demand of online updates; None: nothing.
    shadowed_by: ids of the overrides that decide in its place, ascending.
    unable: why the engine cannot do what it demands; "" if the engine can.
    """

    arms: bool
    probing: bool
    regime_before: Regime | None
    regime_after: Regime | None
    shadowed_by: tuple[str, ...]
    unable: str

    @property
    def constrains(self) -> bool:
        """Tells whether anything changes that the engine may run, learn or probe."""
        return self.arms or self.probing or self.regime_before != self.regime_after


def effect_on(
    spec: EngineSpec, of: Override, before: Sequence[Override], after: Sequence[Override]
) -> Effect:
    """Returns the effect of the override `of`, which is in one of the two sets or in both."""
    graphs = spec.fingerprint.graph_batch_sizes
    buckets = batch_buckets(spec.max_batch_size, graphs, len(spec.arms))
    old, new = (rows_under(overrides, spec, buckets, spec.arms) for overrides in (before, after))
    holding, everything = (new, after) if of in after else (old, before)
    learns = spec.capabilities.can_update_online or spec.capabilities.can_collect
    regimes = (old.regime, new.regime) if learns else (None, None)
    return Effect(
        _differ(old, new, _feasible),
        _differ(old, new, lambda rows, row: rows.limits[row].explore),
        *regimes,
        tuple(sorted(set(_shadowing(spec, of, holding, everything)))),
        why_unable(spec, of),
    )


def why_unable(spec: EngineSpec, of: Override) -> str:
    """Returns why the engine cannot do what an override demands; "" if it can."""
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
    mode = RegimeMode.OFF if rule.regime is None else rule.regime.mode
    if mode is RegimeMode.ONLINE and not spec.capabilities.can_update_online:
        return "it cannot update its drafter online"
    if mode is RegimeMode.COLLECT and not spec.capabilities.can_collect:
        return "it cannot collect training signals"
    return ""


def _loss(spec: EngineSpec, rule: Rule) -> LostCapability | None:
    """Returns the loss that takes away all that a rule pins; None if something is left."""
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
    """Returns whether something about a row differs at some batch size."""
    sizes = {*old.upper, *new.upper}
    return any(of(old, old.row_of(size)) != of(new, new.row_of(size)) for size in sizes)


def _feasible(rows: PlanRows, row: int) -> list[bool] | None:
    """Returns which arms may run in a row; None for all of them."""
    if rows.feasible is None:
        return None
    column: list[bool] = rows.feasible[:, row].tolist()
    return None if all(column) else column


def _shadowing(
    spec: EngineSpec, of: Override, rows: PlanRows, everything: Sequence[Override]
) -> Iterator[str]:
    """Yields the ids of overrides that win over `of` somewhere.  rows: under `everything`."""
    others = [o for o in everything if o != of and o.scope.covers(spec)]
    for size, limits in zip(rows.upper, rows.limits, strict=True):
        if of.covers(spec, size):
            yield from _deciding(of, limits, [o for o in others if o.covers(spec, size)])
    if of.rule.regime is not None or of.rule.deny_updates:
        yield from (o.override_id for o in others if o.rule.deny_updates)
    if of.rule.regime is not None:
        pins = [o for o in everything if o.scope.covers(spec) and o.rule.regime is not None]
        yield from (o.override_id for o in by_strength(pins)[:1] if o != of)


def _deciding(of: Override, limits: Limits, others: Sequence[Override]) -> Iterator[str]:
    """Yields the ids of the others that win over `of` at one batch size."""
    rule = of.rule
    if rule.deny_exploration:
        yield from (o.override_id for o in others if o.rule.deny_exploration)
    drafts = rule.gamma_range is not None or rule.drafter is not None or rule.deny_drafters
    if limits.off and (drafts or rule.off):
        yield from (o.override_id for o in others if o.rule.off)
        return
    if rule.gamma_range is not None and of.override_id not in limits.gamma_by:
        yield from limits.gamma_by
    named = {*rule.deny_drafters, *([] if rule.drafter is None else [rule.drafter])}
    yield from (o.override_id for o in others if named & set(o.rule.deny_drafters))
    if named and limits.drafter_by not in {"", of.override_id} and limits.drafter not in named:
        yield limits.drafter_by
