"""A bound on the time per output token in the whole loop: choices, probes, reasons, previews."""

from collections import Counter

import pytest

from controller.core.engine_spec import Arm
from controller.core.plan import Reason
from controller.core.planning.overrides import Override, Rule, Scope, ScopeKind
from controller.core.settings import PlannerSettings
from controller.core.training.selective_training import TrainingSettings
from controller.wire.explanations import explain
from controller.wire.override_effects import preview_plan
from tests.support.virtual_engine import VirtualEngine, make_engine

FLEET = Scope(ScopeKind.FLEET)
# At B = 64 drafts of 2 and 3 take about 6 ms a token, 1 and 5 somewhat more, 0 and 7 much more.
BATCH, CURVE = 64, [0.8] * 7


def bound_by(seconds: float, name: str = "slow", low: int = 0, high: int = 0) -> Override:
    return Override(name, FLEET, Rule(tpot_max_seconds=seconds), "ann", "because", low, high)


def bounded(seconds: float, **constants: object) -> VirtualEngine:
    return make_engine(settings=PlannerSettings(tpot_ceiling_seconds=seconds, **constants))  # type: ignore[arg-type]


def probed(engine: VirtualEngine, steps: int) -> list[tuple[int, float]]:
    """The probes that begin: draft lengths, and the time per token that was expected of them.

    Those that begin while nothing keeps the bound are left out.
    """
    controller, probe_arms, last = engine.core, [], 0
    for _ in range(steps):
        engine.run(1, BATCH, CURVE)
        if controller.explorer.running_probe is None:
            continue
        probe = controller.explorer.running_probe[1]
        if probe.probe_id > last:
            last, shown = probe.probe_id, explain(controller, BATCH)
            if shown.bound is not None and not shown.bound.attainable:
                continue
            arm = next(a for a in shown.arms if a.arm == probe.arm)
            probe_arms.append((probe.arm.gamma, arm.seconds_per_token))
    return probe_arms


def test_what_breaks_the_bound_by_the_estimates_is_not_probed():
    bound = 0.0062
    free = probed(make_engine(), 1500)
    assert any(gamma > 0 and seconds > bound for gamma, seconds in free)
    engine = bounded(bound)
    kept = probed(engine, 1500)
    assert kept
    assert all(gamma == 0 or seconds <= bound for gamma, seconds in kept)
    assert engine.elapsed * BATCH / engine.tokens < bound


def test_plain_decoding_under_a_bound_still_notices_better_traffic():
    # Drafting breaks the bound until its drafts are accepted, which only drafting shows.
    engine = bounded(0.009)
    engine.run(400, 32, [0.03] * 7)
    arms = {value.arm.gamma: value for value in explain(engine.core, 32).arms}
    assert arms[0].chosen
    assert all(arms[gamma].seconds_per_token > 0.009 for gamma in arms if gamma)
    before = engine.core.explorer.probe_count
    engine.run(1000, 32, [0.03] * 7)
    assert engine.core.explorer.probe_count > before
    engine.run(400, 32, [0.95] * 7)
    assert Counter(arm.gamma for arm in engine.arms_run[-100:])[0] < 10


def test_plain_decoding_without_room_for_looking_keeps_the_bound_and_does_not_look():
    # A step of plain decoding takes 8.4 ms at B = 32, and probing may cost 5 % more.
    engine = bounded(0.0086, probe_share=0.05)
    engine.run(400, 32, [0.03] * 7)
    before = len(engine.arms_run)
    engine.run(600, 32, [0.03] * 7)
    assert {arm.gamma for arm in engine.arms_run[before:]} == {0}


def test_a_bound_that_changes_nothing_is_shown_and_no_reason():
    engine = bounded(0.0075)
    engine.run(400, BATCH, CURVE)
    shown = explain(engine.core, BATCH)
    assert shown.bound is not None
    assert (shown.bound.bound.seconds, shown.bound.bound.override_id) == (0.0075, "")
    assert shown.bound.is_kept
    assert not shown.bound.is_binding
    assert shown.bound.attainable
    assert shown.bound.kept_up_to == 64
    assert "bound" not in shown.plan.reason_detail
    for arm in shown.arms:
        expected = arm.step_seconds / (1 + arm.expected_accepted)
        assert arm.seconds_per_token == pytest.approx(expected)
        assert arm.seconds_per_token == pytest.approx(BATCH / arm.tokens_per_second)


def test_a_bound_that_nothing_keeps_says_by_how_much_and_where_it_can_be_kept():
    engine = bounded(0.005)
    engine.run(400, BATCH, CURVE)
    shown = explain(engine.core, BATCH)
    fastest = min(shown.arms, key=lambda arm: arm.seconds_per_token)
    assert shown.bound is not None
    assert not shown.bound.is_kept
    assert not shown.bound.attainable
    assert shown.bound.is_binding
    assert shown.bound.expected_seconds <= fastest.seconds_per_token * 1.01
    upto = shown.bound.kept_up_to
    assert 8 <= upto < BATCH
    there = explain(engine.core, upto).bound
    above = explain(engine.core, upto + 1).bound
    assert there is not None
    assert there.attainable
    assert above is not None
    assert not above.attainable
    detail = engine.core.force_arm(None).reason_detail
    assert "ms a token expected, " in detail
    assert "above the bound of 5 ms a token, which no choice keeps here; batches up to" in detail


def test_a_bound_out_of_all_reach_is_told_in_few_words():
    engine = make_engine()
    engine.core.set_overrides([bound_by(1e-6)])
    detail = engine.core.force_arm(None).reason_detail
    assert "times the bound of 0.001 ms a token (override slow)" in detail
    assert detail.endswith("no batch keeps it")


@pytest.mark.parametrize("bounding_rule", ["setting", "override"])
def test_a_bound_that_excludes_what_a_rule_wants_is_named(bounding_rule: str):
    # TIDE's rule drafts 7 or not at all; of the others 3 is the fastest.
    rule = PlannerSettings(policy="tide", tide_gamma=7)
    engine = make_engine(settings=rule)
    engine.run(300, BATCH, CURVE)
    assert engine.core.current_plan().row_for(BATCH).arm == Arm("mtp", 7)
    if bounding_rule == "override":
        engine.core.set_overrides([bound_by(0.0062)])
        whose = " (override slow)"
    else:
        changed = PlannerSettings(policy="tide", tide_gamma=7, tpot_ceiling_seconds=0.0062)
        engine.core.use_settings(changed, TrainingSettings())
        whose = ""
    plan = engine.core.next_plan()
    assert plan is not None
    row = plan.row_for(BATCH)
    assert row.arm.gamma in {2, 3}
    assert f"bound of 6.2 ms a token{whose} excludes mtp gamma 7" in plan.reason_detail
    assert row.reason is (Reason.OVERRIDE if bounding_rule == "override" else Reason.EXPLOIT)
    state = explain(engine.core, BATCH).bound
    assert state is not None
    assert state.is_binding
    assert state.excluded == Arm("mtp", 7)
    # At B = 1 longer drafts keep it, and the bound is no reason.
    assert plan.row_for(1).arm.gamma == 7
    assert plan.row_for(1).reason is Reason.EXPLOIT
    engine.core.set_overrides([])
    if bounding_rule == "override":
        assert engine.core.next_plan() is not None
        assert engine.core.current_plan().row_for(BATCH).arm.gamma == 7
        assert explain(engine.core, BATCH).bound is None


def test_an_override_bounds_the_batches_that_it_is_for():
    engine = make_engine()
    engine.run(300, BATCH, CURVE)
    engine.core.set_overrides([bound_by(0.0062, low=33)])
    engine.core.next_plan()
    assert explain(engine.core, 32).bound is None
    state = explain(engine.core, 33).bound
    assert state is not None
    assert state.bound.override_id == "slow"
    # Batches without a bound cannot break one.
    assert state.kept_up_to == 64


def test_a_preview_shows_what_a_bound_would_change_and_where_nothing_keeps_it():
    rule = PlannerSettings(policy="tide", tide_gamma=7)
    engine = make_engine(settings=rule)
    engine.run(300, BATCH, CURVE)
    before = engine.core.current_plan()
    rows = preview_plan(engine.core, [bound_by(0.0062)])
    assert engine.core.current_plan() is before
    last = rows[-1]
    assert (last.before.gamma, last.max_batch_size) == (7, 64)
    assert last.after.gamma in {2, 3}
    assert not any(row.above_bound for row in rows)
    tight = preview_plan(engine.core, [bound_by(0.005)])
    assert [row.above_bound for row in tight] == sorted(row.above_bound for row in tight)
    assert tight[-1].above_bound
    assert not tight[0].above_bound
    # It says what happens to the plan.
    engine.core.set_overrides([bound_by(0.0062)])
    plan = engine.core.next_plan()
    assert plan is not None
    assert {row.max_batch_size: row.arm for row in plan.rows} == {
        row.max_batch_size: row.after for row in rows
    }


def test_a_pinned_arm_that_breaks_the_bound_runs_and_says_that_it_does():
    engine = make_engine()
    engine.run(300, BATCH, CURVE)
    pin = Override("pin", FLEET, Rule(gamma=7), "ann", "because")
    engine.core.set_overrides([bound_by(0.0062), pin])
    plan = engine.core.next_plan()
    assert plan is not None
    assert plan.row_for(BATCH).arm.gamma == 7
    assert (
        "above the bound of 6.2 ms a token (override slow), which no choice" in plan.reason_detail
    )
    state = explain(engine.core, BATCH).bound
    assert state is not None
    assert not state.attainable
