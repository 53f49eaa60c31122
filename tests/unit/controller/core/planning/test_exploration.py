"""Looking pays for itself, costs what it may, and goes where something could be found."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.acceptance.estimator import AcceptanceEstimator
from controller.core.acceptance.shifts import ShiftProbabilities
from controller.core.acceptance.traffic_estimator import TrafficCurves
from controller.core.cost.catch_up_cost import CatchUpPrice
from controller.core.cost.model import CostModel
from controller.core.engine_spec import Arm
from controller.core.planning.exploration import Explorer, ProbeSituation
from controller.core.planning.observation_schedule import probing_share
from controller.core.planning.planner import evaluate_arms
from controller.core.planning.value_uncertainty import expected_improvement, relative_variance
from controller.core.settings import PlannerSettings
from controller.core.step_report import RowGroup, StepReport
from controller.wire.explanations import explain
from tests.support.accepted_counts import accepted_counts
from tests.support.virtual_engine import engine_spec, gpu_step_seconds, make_engine, profile_of

GAMMAS = (0, 1, 2, 3, 5, 7)
ARMS = [Arm("mtp", g) for g in GAMMAS]
SIZES = (1, 8, 64)
SETTINGS = PlannerSettings()


@given(st.floats(-2.0, 2.0), st.floats(1e-3, 2.0))
@settings(max_examples=60, deadline=None)
def test_expected_improvement_is_the_mean_of_what_is_above_zero(mean, sd):
    x = np.random.default_rng(0).normal(mean, sd, 200_000)
    improvement = expected_improvement(mean, sd)
    assert improvement == pytest.approx(np.maximum(x, 0).mean(), abs=0.01 * sd + 1e-6)


def situation(acceptance, steps, current, bucket=0, horizon=2000.0, off_ran=True):
    """After `steps` steps at the current arm; off_ran: gamma = 0 has run, and costs as believed."""
    estimator, rng = AcceptanceEstimator(7, SETTINGS), random.Random(0)
    for _ in range(steps):
        counts = accepted_counts(rng, SIZES[bucket], GAMMAS[current], acceptance)
        estimator.observe(counts)
    costs = CostModel(ARMS, SIZES, profile_of(engine_spec(), gpu_step_seconds), SETTINGS)
    if off_ran:
        seconds = costs.predict(0, SIZES[bucket], 512 * SIZES[bucket])
        costs.observe((0, bucket), 512.0, seconds, seconds)
        costs.commit()
    curve = estimator.curve()
    values = evaluate_arms(
        ARMS, np.array(SIZES, dtype=float), TrafficCurves({"mtp": curve}, {}, {"mtp": curve}),
        costs.costs(512.0), {"mtp": np.zeros(len(SIZES))}, CatchUpPrice(0.0, 0.0),
    )  # fmt: skip
    return ProbeSituation(
        values,
        costs.uncertainty(),
        bucket,
        SIZES[bucket],
        current,
        ShiftProbabilities(1 / horizon, 0.0),
        bucket,
    )


def explorer(credit=10.0):
    return Explorer(ARMS, PlannerSettings(probe_credit_start_seconds=credit))


def report(step, probe_id=0, gamma=3, batch=1, accepted=0, seconds=0.01):
    counts = [0] * (gamma + 1)
    counts[accepted] = batch
    return StepReport(
        step, batch, 512, "mtp", gamma, tuple(counts), seconds, probe_id=probe_id
    )  # fmt: skip


def test_what_a_short_draft_cannot_see_is_looked_at():
    ours = explorer()
    ours.start_probe_if_worthwhile(situation(0.85, 30, current=1), 0.0)
    assert ours.running_probe is not None
    bucket, probe = ours.running_probe
    assert bucket == 0
    assert probe.arm.gamma > 1


def test_gamma_0_is_tried_early_whatever_the_estimates_say():
    ours = explorer(credit=0.0)
    ours.start_probe_if_worthwhile(situation(0.95, 400, current=4, off_ran=False), 0.0)
    assert ours.running_probe is not None
    assert (ours.running_probe[1].arm.gamma, ours.running_probe[1].steps) == (0, 3)


def test_probes_for_doubt_are_few_even_if_they_lose_nothing():
    ours, conditions, taken = explorer(credit=10.0), situation(0.85, 30, current=1), 0
    for step in range(4000):
        ours.start_probe_if_worthwhile(conditions, float(step))
        running = ours.running_probe
        probe_id = running[1].probe_id if running else 0
        taken += probe_id > 0
        gamma = running[1].arm.gamma if running else 1
        # A probe of nothing but luck: it gains as much as it costs.
        ours.observe(report(step + 1, probe_id, gamma, accepted=gamma), 0.001, 0.0, float(step))
    assert 20 < taken <= 0.02 * 4000
    assert ours.probe_steps == taken
    assert ours.lost_seconds < 0


def test_a_probe_pays_for_the_way_there_and_back():
    conditions = situation(0.85, 30, current=1)
    conditions = replace(conditions, values=replace(conditions.values, switch_seconds=0.02))
    ours = explorer(credit=10.0)
    ours.start_probe_if_worthwhile(conditions, 0.0)
    assert ours.running_probe is not None
    probe, baseline, lost = ours.running_probe[1], conditions.values.tokens_per_second[1, 0], 0.0
    for step in range(probe.steps):
        ours.observe(report(step, probe.probe_id, probe.arm.gamma), 0.05, 0.0, 0.1)
        lost += 0.05 - 1 / baseline
    assert ours.lost_seconds == pytest.approx(lost + 0.02)
    dear = replace(conditions, values=replace(conditions.values, switch_seconds=50.0))
    unwilling = explorer(credit=10.0)
    unwilling.start_probe_if_worthwhile(dear, 0.0)
    assert unwilling.running_probe is None


def test_nothing_is_looked_at_that_cannot_pay_before_the_traffic_shifts():
    ours = explorer()
    ours.start_probe_if_worthwhile(situation(0.5, 400, current=2, horizon=1.0), 0.0)
    assert ours.running_probe is None


def test_without_credit_nothing_is_looked_at():
    ours = explorer(credit=0.0)
    conditions = situation(0.3, 30, current=2)
    # Make every look dear: a credit of nothing pays for none of them.
    conditions.values.catch_up_seconds[:] = 1.0
    ours.start_probe_if_worthwhile(conditions, 0.0)
    assert ours.running_probe is None


def test_with_a_share_of_zero_or_one_arm_nothing_is_looked_at():
    ours = Explorer(ARMS, PlannerSettings(probe_share=0.0))
    ours.start_probe_if_worthwhile(situation(0.85, 30, current=1), 0.0)
    assert ours.running_probe is None
    alone = Explorer(ARMS[:1], SETTINGS)
    alone.start_probe_if_worthwhile(situation(0.85, 30, current=0), 0.0)
    assert alone.running_probe is None


def test_a_probe_is_charged_for_what_it_lost_and_ends_after_its_steps():
    ours = explorer(credit=0.1)
    conditions = situation(0.85, 30, current=1)
    ours.start_probe_if_worthwhile(conditions, 0.0)
    assert ours.running_probe is not None
    probe = ours.running_probe[1]
    baseline = conditions.values.tokens_per_second[1, 0]
    lost = 0.0
    for step in range(probe.steps):
        assert ours.running_probe is not None
        ours.observe(report(step, probe.probe_id, probe.arm.gamma), 0.05, 0.0, 0.1)
        lost += 0.05 - 1 / baseline
    assert ours.running_probe is None
    assert ours.probe_count == 1
    assert ours.lost_seconds == pytest.approx(lost)
    earned = probing_share(SETTINGS, 0.0) * 0.05 * probe.steps
    assert ours.credit_seconds == pytest.approx(0.1 + earned - lost)
    assert ours.spent_share == pytest.approx(lost / (0.05 * probe.steps))


def test_a_lucky_probe_earns_no_more_credit_than_any_step():
    ours = explorer(credit=0.1)
    ours.start_probe_if_worthwhile(situation(0.85, 30, current=1), 0.0)
    assert ours.running_probe is not None
    probe = ours.running_probe[1]
    gamma = probe.arm.gamma
    ours.observe(report(1, probe.probe_id, gamma, accepted=gamma), 0.001, 0.0, 0.1)
    assert ours.lost_seconds < 0
    assert ours.credit_seconds == pytest.approx(0.1 + probing_share(SETTINGS, 0.0) * 0.001)


def test_credit_is_earned_by_steps_and_bounded():
    ours = explorer(credit=0.0)
    ours.observe(report(1), 0.5, 1.0, 0.0)
    assert ours.credit_seconds == pytest.approx(0.5 * SETTINGS.probe_share)
    for step in range(2, 2000):
        ours.observe(report(step), 0.5, 1.0, 0.0)
    assert ours.credit_seconds == SETTINGS.probe_credit_max_seconds


def test_a_probe_whose_batch_never_comes_back_is_given_up():
    ours = explorer()
    ours.start_probe_if_worthwhile(situation(0.85, 30, current=1), 0.0)
    assert ours.running_probe is not None
    ours.observe(report(1), 0.01, 0.0, 1.0)
    assert ours.running_probe is not None
    ours.observe(report(2), 0.01, 0.0, 60.0)
    assert ours.running_probe is None


def test_a_probe_is_not_charged_for_rows_that_had_ended():
    conditions = situation(0.85, 30, current=1)
    ours = explorer(credit=10.0)
    ours.start_probe_if_worthwhile(conditions, 0.0)
    assert ours.running_probe is not None
    probe = ours.running_probe[1]
    gamma = probe.arm.gamma
    accepted = (0, 2, *[0] * (gamma - 1))
    live = RowGroup(probe.arm.drafter, gamma, accepted)
    ended = RowGroup(probe.arm.drafter, 0, (2,), ended=True)
    step = StepReport(
        1, 4, 400, probe.arm.drafter, gamma, (2, *accepted[1:]), 0.05,
        probe_id=probe.probe_id, groups=(live, ended),
    )  # fmt: skip
    ours.observe(step, 0.05, 0.0, 0.1)
    # Two rows gained two tokens each.
    assert ours.lost_seconds == pytest.approx(0.05 - 2 / conditions.values.tokens_per_second[1, 0])


def test_arms_that_share_their_estimates_share_their_errors():
    """Arms 5 and 7 differ from 3 only behind position 3; how sure 1 to 3 are does not matter."""
    conditions = situation(0.8, 400, current=3)
    total = relative_variance(conditions.values, conditions.uncertainty, 0, 3)
    unseen = relative_variance(
        conditions.values, conditions.uncertainty, 0, 3, only_unobserved=True
    )
    assert total[3] == 0
    assert np.all(unseen <= total + 1e-12)
    # Against a shorter draft nothing is unseen but the cost.
    assert unseen[1] == pytest.approx(conditions.uncertainty.relative_variance(0, 3)[1])
    assert unseen[5] > conditions.uncertainty.relative_variance(0, 3)[5]


@pytest.mark.parametrize("acceptance", [0.15, 0.5, 0.85])
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_over_a_long_run_probing_keeps_to_its_share(acceptance, batch):
    engine = make_engine(seed=4)
    engine.run(6000, batch, [acceptance] * 8)
    explanation = explain(engine.core)
    # What the start gave on credit, and one per cent of what ran.
    allowed = SETTINGS.probe_credit_start_seconds + SETTINGS.probe_share * engine.elapsed
    assert explanation.probe_lost_seconds <= allowed * 1.2
    assert explanation.probe_share == pytest.approx(
        max(explanation.probe_lost_seconds, 0) / engine.elapsed, rel=0.05, abs=1e-4
    )


def test_a_probe_is_given_up_when_the_batch_has_left_its_bucket():
    ours = explorer()
    ours.start_probe_if_worthwhile(situation(0.85, 30, current=1), 0.0)
    before = ours.running_probe
    assert before is not None
    for step in range(1, 3):
        ours.observe(report(step), 0.001, 0.0, 0.01)
    elsewhere = situation(0.85, 30, current=1, bucket=1)
    ours.start_probe_if_worthwhile(elsewhere, 0.01)
    assert ours.running_probe == before
    ours.observe(report(3), 0.001, 0.0, 0.01)
    ours.start_probe_if_worthwhile(elsewhere, 0.01)
    assert ours.running_probe != before


def test_a_probe_runs_for_as_many_steps_as_may_be_lost_against_gamma_0():
    conditions = situation(0.05, 200, current=0)
    steps = {}
    for budget in (0.0, 0.5, 100.0):
        ours = explorer()
        limited = replace(conditions, loss_budget_steps=budget, first_run_budget_steps=budget)
        steps[budget] = ours._affordable_steps(limited, ARMS.index(Arm("mtp", 7)), 8)
    assert steps[0.0] == 0
    assert 0 <= steps[0.5] < steps[100.0] == 8
    # gamma = 0 loses nothing against itself.
    assert explorer()._affordable_steps(replace(conditions, loss_budget_steps=0.0), 0, 3) == 3


BUSY = ShiftProbabilities(0.01, 0.01, 0.01, 3.0)


def at_gamma_0(hazard=BUSY, **changes):
    """Plain decoding is best, and drafting would be if traffic were better."""
    return replace(situation(0.05, 200, current=0), hazard=hazard, **changes)


def test_steps_at_gamma_0_earn_the_budget_of_their_schedule():
    ours = explorer(credit=0.0)
    assert ours.gamma_zero_budget_share == 0.0
    # Nothing was decided yet.
    ours.observe(report(1, gamma=0), 0.1, 0.0, 0.0)
    first = ours.credit_seconds
    assert first == pytest.approx(0.1 * probing_share(SETTINGS, 0.0))
    ours.start_probe_if_worthwhile(at_gamma_0(), 0.0)
    # Probes have found better traffic: see `test_observation_schedule`.
    assert ours.gamma_zero_budget_share == pytest.approx(4 * SETTINGS.probe_share)
    ours.observe(report(2, gamma=0), 0.1, 0.0, 0.0)
    assert ours.credit_seconds - first == pytest.approx(0.1 * 4 * SETTINGS.probe_share)
    before = ours.credit_seconds
    ours.observe(report(3, gamma=3), 0.1, 0.0, 0.0)
    assert ours.credit_seconds - before == pytest.approx(0.1 * probing_share(SETTINGS, 0.0))


def first_look(conditions, ours=None):
    """The steps at gamma = 0 before the first probe, and the probe; (200, None) without one."""
    ours = ours or explorer()
    # Probes for doubt are not the subject here.
    ours._next_review_report = 10**9
    for step in range(200):
        ours.start_probe_if_worthwhile(conditions, 0.0)
        if ours.running_probe is not None:
            return step, ours.running_probe[1]
        ours.observe(report(step, gamma=0), 0.01, 0.0, 0.0)
    return 200, None


def test_gamma_0_looks_when_its_interval_is_over():
    conditions = at_gamma_0()
    steps, probe = first_look(conditions)
    assert probe.arm.gamma > 0
    schedule = explorer()._schedule_observation(conditions)
    assert steps == np.ceil(schedule.interval_steps)
    calm_steps, _ = first_look(at_gamma_0(ShiftProbabilities(1e-4, 0.0)))
    assert calm_steps > steps


def test_gamma_0_looks_only_by_an_arm_that_may_run():
    _, probe = first_look(at_gamma_0())
    cheapest = ARMS.index(probe.arm)
    feasible = np.array([i != cheapest for i in range(len(ARMS))])
    _, other = first_look(at_gamma_0(feasible=feasible))
    assert other.arm not in (probe.arm, ARMS[0])
    assert first_look(at_gamma_0(feasible=np.arange(len(ARMS)) == 0)) == (200, None)


def test_an_arm_that_a_discount_makes_dear_does_not_look():
    _, probe = first_look(at_gamma_0())
    discounts = np.ones((len(ARMS), len(SIZES)))
    discounts[ARMS.index(probe.arm)] = 0.1
    _, other = first_look(at_gamma_0(discounts=discounts))
    assert other.arm not in (probe.arm, ARMS[0])


def test_without_credit_gamma_0_does_not_look():
    conditions = at_gamma_0()
    conditions.values.catch_up_seconds[1:] = 100.0
    assert first_look(conditions) == (200, None)
