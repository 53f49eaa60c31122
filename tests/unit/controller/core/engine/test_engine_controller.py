"""The whole loop in virtual time: good choices, never stuck, never out of bounds, replayable."""

import dataclasses
import math
import pickle
from collections import Counter

import pytest

from controller.core.clock import VirtualClock
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import Arm, Capabilities
from controller.core.errors import ProfileMismatchError, StaleReportError, UnknownArmError
from controller.core.plan import Reason, Regime, RegimeMode
from controller.core.planning.overrides import Override, Rule, Scope, ScopeKind
from controller.core.settings import PlannerSettings
from controller.core.step_report import StepReport
from controller.wire.explanations import explain
from controller.wire.override_effects import preview_plan
from tests.support.virtual_engine import (
    GAMMAS,
    best_arm_rate,
    engine_spec,
    gpu_step_seconds,
    make_engine,
    profile_of,
)


def steady_ratio(profile_error, acceptance, batch_size):
    engine = make_engine(profile_error)
    curve = [acceptance] * 7
    engine.run(300, batch_size, curve)
    seconds, tokens = engine.elapsed, engine.tokens
    engine.run(1200, batch_size, curve)
    rate = (engine.tokens - tokens) / (engine.elapsed - seconds)
    return rate / best_arm_rate(gpu_step_seconds, curve, batch_size)


@pytest.mark.parametrize("profile_error", [1.0, 0.7, 1.3, None])
@pytest.mark.parametrize("acceptance", [0.9, 0.5, 0.2])
@pytest.mark.parametrize("batch_size", [4, 64])
def test_it_comes_close_to_the_best_arm_in_hindsight(profile_error, acceptance, batch_size):
    assert steady_ratio(profile_error, acceptance, batch_size) > 0.965


def test_no_draft_is_chosen_when_drafting_loses_and_left_again_when_it_wins():
    engine = make_engine()
    engine.run(400, 32, [0.03] * 7)
    assert Counter(arm.gamma for arm in engine.arms_run[-100:])[0] > 85
    engine.run(400, 32, [0.95] * 7)
    assert Counter(arm.gamma for arm in engine.arms_run[-100:])[0] < 10


def test_plain_decoding_is_left_from_time_to_time_to_look():
    engine = make_engine()
    engine.run(300, 32, [0.03] * 7)
    before = len(engine.arms_run)
    engine.run(3000, 32, [0.03] * 7)
    assert any(arm.gamma for arm in engine.arms_run[before:])


def test_looking_costs_no_more_than_its_share():
    settings = PlannerSettings(probe_share=0.01)
    for acceptance in (0.03, 0.5, 0.9):
        engine = make_engine(settings=settings)
        engine.run(4000, 16, [acceptance] * 7)
        allowed = 0.01 * engine.elapsed + settings.probe_credit_start_seconds
        # One probe may overdraw the account by what it cost more than expected.
        assert engine.core.explorer.lost_seconds <= 1.3 * allowed


def charged_for_a_stall(stall_seconds):
    """What a probe's step that stalls adds to the explorer's seconds, in all, lost and of credit.

    The first in units of what such a step usually takes.
    """
    engine = make_engine()
    explorer = engine.core.explorer
    while explorer.running_probe is None:
        engine.run(1, 16, [0.5] * 7)
    _, probe = explorer.running_probe
    gamma = probe.arm.gamma
    before = explorer.total_seconds, explorer.lost_seconds, explorer.credit_seconds
    counts = (16, *[0] * gamma)
    engine.core.observe(
        StepReport(
            engine.step + 1, 16, 8192, "mtp", gamma, counts, stall_seconds, probe_id=probe.probe_id
        )
    )
    after = explorer.total_seconds, explorer.lost_seconds, explorer.credit_seconds
    total, lost, credit = (new - old for new, old in zip(after, before, strict=True))
    return total / gpu_step_seconds(gamma, 16), lost, credit


def test_a_step_that_stalls_is_charged_to_exploration_as_a_usual_one():
    total, lost, credit = charged_for_a_stall(1.0)
    assert charged_for_a_stall(3600.0) == (total, lost, credit)
    assert total == pytest.approx(1.0, rel=0.05)
    assert 0 < lost < gpu_step_seconds(7, 16)
    assert -lost < credit < 0


def test_with_exploration_off_nothing_is_ever_probed():
    engine = make_engine(settings=PlannerSettings(probe_share=0.0))
    engine.run(500, 16, [0.5] * 7)
    assert engine.core.explorer.probe_count == 0


def test_a_collapse_is_answered_within_a_hundred_steps():
    engine = make_engine()
    engine.run(600, 16, [0.9] * 7)
    engine.run(100, 16, [0.03] * 7)
    # Its row, whatever a probe may be looking at in this very step.
    assert engine.core.current_plan().row_for(16).arm.gamma == 0


def test_the_same_reports_at_the_same_times_make_the_same_plans():
    first = make_engine(seed=7)
    for batch, acceptance in ((1, 0.9), (16, 0.4), (4, 0.8)):
        first.run(150, batch, [acceptance] * 7)
    clock = VirtualClock()
    spec = engine_spec()
    again = EngineController(spec, PlannerSettings(), profile_of(spec, gpu_step_seconds), clock)
    for when, report in first.reports:
        clock.advance(when - clock.now())
        again.observe(report)
        again.next_plan()
    # The clocks differ in the last bit at most: advance() sums, so compare what was decided.
    assert again.current_plan() == first.core.current_plan()
    assert explain(again, 4) == explain(first.core, 4)


def report(step=1, **changes):
    good = StepReport(step, 2, 200, "mtp", 1, (1, 1), 0.01)
    return dataclasses.replace(good, **changes)


def test_a_step_that_does_not_go_forward_is_refused_and_changes_nothing():
    controller = make_engine().core
    controller.observe(report(5))
    before = pickle.dumps(controller)
    for step in (5, 4, 0):
        with pytest.raises(StaleReportError, match="must increase"):
            controller.observe(report(step))
    assert pickle.dumps(controller) == before
    controller.observe(report(6))


def test_a_draft_length_that_was_not_introduced_is_refused_and_changes_nothing():
    controller = make_engine().core
    before = pickle.dumps(controller)
    with pytest.raises(UnknownArmError):
        controller.observe(report(gamma=4, accepted_counts=(1, 1, 0, 0, 0)))
    with pytest.raises(UnknownArmError):
        controller.observe(report(drafter="nobody"))
    assert pickle.dumps(controller) == before
    controller.observe(report(1))


def test_every_plan_stays_within_what_the_engine_introduced():
    engine = make_engine(None)
    for batch in (1, 7, 40, 64):
        engine.run(60, batch, [0.6] * 7)
        for row in engine.core.current_plan().rows:
            assert row.arm.gamma in GAMMAS
            if row.probe:
                assert row.probe.arm.gamma in GAMMAS
                assert 1 <= row.probe.steps <= PlannerSettings().probe_steps_max


def test_the_lease_is_renewed_at_half_time_and_not_before():
    engine = make_engine()
    plan = engine.core.current_plan()
    engine.clock.advance(2.4)
    assert engine.core.next_plan() is None
    engine.clock.advance(0.2)
    renewed = engine.core.next_plan()
    assert renewed is not None
    assert renewed.epoch > plan.epoch
    assert renewed.reason is Reason.LEASE


def test_without_a_profile_every_plan_says_so():
    engine = make_engine(None)
    plan = engine.core.current_plan()
    assert plan.reason is Reason.PROFILE_MISSING
    assert "no profile" in plan.reason_detail
    assert engine.core.profile_id == ""


def test_a_forced_arm_rules_every_row_until_it_is_released():
    engine = make_engine()
    engine.run(100, 8, [0.8] * 7)
    forced = engine.core.force_arm(Arm("mtp", 2))
    assert {row.arm for row in forced.rows} == {Arm("mtp", 2)}
    assert forced.reason is Reason.PROFILING
    engine.run(50, 8, [0.8] * 7)
    assert {arm.gamma for arm in engine.arms_run[-50:]} == {2}
    released = engine.core.force_arm(None)
    assert len({row.arm for row in released.rows}) > 1
    with pytest.raises(UnknownArmError):
        engine.core.force_arm(Arm("mtp", 6))


def test_a_measurement_teaches_costs_and_no_acceptance():
    engine = make_engine()
    engine.run(100, 8, [0.8] * 7)
    engine.core.force_arm(Arm("mtp", 3))
    before = explain(engine.core, 8).positions
    engine.run(50, 8, [0.1] * 7)
    assert explain(engine.core, 8).positions == before
    engine.core.force_arm(None)
    assert explain(engine.core, 8).positions == before
    engine.run(10, 8, [0.1] * 7)
    assert explain(engine.core, 8).positions != before


def test_costs_are_learnt_while_a_choice_is_forced():
    """A long measurement on a machine of changing speed must not come in one piece at its end."""
    engine = make_engine()
    pace = {"now": 0.0}

    def wandering(gamma, batch):
        pace["now"] = 0.98 * pace["now"] + engine.rng.gauss(0, 0.025)
        return math.exp(pace["now"]) * gpu_step_seconds(gamma, batch)

    engine.seconds = wandering
    for gamma in (1, 2, 3, 5, 7, 3, 2):
        engine.core.force_arm(Arm("mtp", gamma))
        for batch in (1, 2, 4, 8, 16) * 6:
            engine.run(20, batch, [0.6] * 8)
        engine.core.force_arm(None)
        drift = engine.core.cost_model.drift()[:, engine.core.cost_model.bucket_of(8)]
        # The machine moves all arms; between them nothing has changed.
        assert drift.max() / drift.min() < 1.2


def test_a_profile_can_come_later_but_only_the_right_one():
    engine = make_engine(None)
    spec = engine.core.spec
    profile = profile_of(spec, gpu_step_seconds)
    engine.core.use_profile(profile)
    assert engine.core.profile_id == profile.profile_id
    other = dataclasses.replace(
        profile, fingerprint=dataclasses.replace(spec.fingerprint, dtype="x")
    )
    with pytest.raises(ProfileMismatchError, match="dtype"):
        engine.core.use_profile(other)


def test_an_engine_that_can_sleep_sleeps_at_gamma_zero_only():
    spec = dataclasses.replace(engine_spec(), capabilities=Capabilities(can_sleep=True))
    controller = EngineController(spec, PlannerSettings(), None, VirtualClock())
    assert all(row.drafter_asleep for row in controller.force_arm(Arm("mtp", 0)).rows)
    assert not any(row.drafter_asleep for row in controller.force_arm(Arm("mtp", 1)).rows)


def test_explain_shows_every_arm_with_one_chosen():
    engine = make_engine()
    engine.run(200, 8, [0.7] * 7)
    shown = explain(engine.core, 8)
    assert [v.arm.gamma for v in shown.arms] == list(GAMMAS)
    assert sum(v.chosen for v in shown.arms) == 1
    assert shown.margin >= 0
    assert shown.kv_tokens_per_sequence == pytest.approx(512)
    assert len(shown.positions) == 7


FLEET = Scope(ScopeKind.FLEET)


def command(name="o", low=0, high=0, **rule):
    return Override(name, FLEET, Rule(**rule), "ann", "because", low, high)


def gammas_of(plan):
    return {row.max_batch_size: row.arm.gamma for row in plan.rows}


@pytest.mark.parametrize("policy", ["goodput", "tide", "sglang-ema"])
@pytest.mark.parametrize("rule", [{"gamma": 2}, {"gamma_max": 1}, {"off": True}, {"gamma_min": 5}])
def test_whatever_runs_and_is_probed_keeps_the_overrides(policy, rule):
    engine = make_engine(settings=PlannerSettings(policy=policy))
    engine.run(100, 8, [0.8] * 7)
    assert engine.core.set_overrides([command(**rule)])
    # One step of lag, as ever.
    engine.core.next_plan()
    before = len(engine.arms_run)
    engine.run(600, 8, [0.8] * 7)
    low, high = rule.get("gamma_min", 0), rule.get("gamma_max", 64)
    if "off" in rule:
        low = high = 0
    if "gamma" in rule:
        low = high = rule["gamma"]
    assert {arm.gamma for arm in engine.arms_run[before:]} <= set(range(low, high + 1))
    assert engine.core.current_plan().overrides == ("o",)
    assert engine.core.set_overrides([])
    assert not engine.core.set_overrides([])
    engine.run(400, 8, [0.8] * 7)
    assert not engine.core.current_plan().overrides


def test_overrides_that_do_not_change_the_choice_are_not_its_reason():
    engine = make_engine()
    engine.run(400, 8, [0.9] * 7)
    best = engine.core.row_for_batch(8).arm.gamma
    engine.core.set_overrides([command(gamma_max=7)])
    # Named at once all the same.
    plan = engine.core.next_plan()
    assert plan is not None
    assert plan.overrides == ("o",)
    engine.core.set_overrides([command(gamma_max=best)])
    engine.run(50, 8, [0.9] * 7)
    row = engine.core.current_plan().row_for(8)
    assert row.reason is not Reason.OVERRIDE
    assert engine.core.current_plan().overrides == ("o",)
    engine.core.set_overrides([command("p", gamma_max=1)])
    engine.run(50, 8, [0.9] * 7)
    assert engine.core.current_plan().row_for(8).reason is Reason.OVERRIDE


@pytest.mark.parametrize("rule", [{"gamma": 2}, {"gamma_max": 7}])
def test_an_override_ends_the_probe_under_way(rule):
    engine = make_engine(settings=PlannerSettings())
    while engine.core.explorer.running_probe is None:
        assert engine.core.reports < 2000
        engine.run(1, 64, [0.15] * 7)
    probe = engine.core.explorer.running_probe[1]
    assert engine.core.set_overrides([command(**rule)])
    plan = engine.core.next_plan()
    assert plan is not None
    assert all(row.probe is None or row.probe.probe_id != probe.probe_id for row in plan.rows)


def test_forbidden_exploration_is_none():
    engine = make_engine(settings=PlannerSettings())
    engine.core.set_overrides([command(deny_exploration=True)])
    engine.run(2000, 64, [0.15] * 7)
    assert engine.core.explorer.probe_count == 0


def test_a_preview_is_what_becomes_and_changes_nothing():
    engine = make_engine()
    engine.run(300, 8, [0.8] * 7)
    before = engine.core.current_plan()
    wanted = [command(gamma=1, low=5, high=9), command("q", off=True, low=40)]
    rows = preview_plan(engine.core, wanted)
    assert engine.core.current_plan() is before
    assert all((row.after.gamma == 1) == (5 <= row.max_batch_size <= 9) for row in rows
               if row.max_batch_size < 40 and row.before.gamma != 1)  # fmt: skip
    assert all(row.after.gamma == 0 for row in rows if row.max_batch_size >= 40)
    engine.core.set_overrides(wanted)
    plan = engine.core.next_plan()
    assert plan is not None
    gammas = gammas_of(plan)
    assert {4, 9, 39} <= set(gammas)
    assert {gammas[r.max_batch_size] for r in rows if r.max_batch_size >= 40} == {0}


def test_a_measurement_goes_before_overrides_and_gives_way_to_them():
    engine = make_engine()
    engine.run(50, 8, [0.8] * 7)
    engine.core.set_overrides([command(off=True)])
    plan = engine.core.force_arm(Arm("mtp", 3))
    assert set(gammas_of(plan).values()) == {3}
    assert set(gammas_of(engine.core.force_arm(None)).values()) == {0}


def test_a_regime_is_pinned_only_where_the_engine_can_run_it():
    online = Regime(RegimeMode.ONLINE, 10)
    for able in (False, True):
        spec = dataclasses.replace(engine_spec(), capabilities=Capabilities(can_update_online=able))
        controller = EngineController(spec, PlannerSettings(), None, VirtualClock())
        controller.set_overrides([command(regime=online)])
        plan = controller.next_plan() or controller.current_plan()
        assert plan.regime == (online if able else Regime())
        refusal = "online:10 is asked for, which this engine cannot do: no online updates"
        assert (refusal in plan.reason_detail) is not able
