"""How often to look while nothing is seen: the interval that loses least."""

import math

import numpy as np
import pytest

from controller.core.acceptance.shifts import ShiftProbabilities
from controller.core.cost.catch_up_cost import CatchUpPrice
from controller.core.engine_spec import Arm
from controller.core.planning.observation_schedule import ObservationScheduler, probing_share
from controller.core.settings import PlannerSettings

ARMS = [Arm("mtp", g) for g in (0, 1, 3)]
SETTINGS = PlannerSettings()
FREE = CatchUpPrice(0.0, 0.0)
CALM = ShiftProbabilities(1e-3, 1e-3)


def schedule(
    penalty=0.02, hazard=CALM, catch_up=FREE, settings=SETTINGS, batch_size=1.0, feasible=None
):
    """Drafting costs `penalty` of a plain step's value; a better day would gain much."""
    seconds = [0.01, 0.011, 0.013]
    value = [batch_size / 0.01 * share for share in (1.0, 1 - penalty, 1 - 2 * penalty)]
    return ObservationScheduler(ARMS, settings).schedule(
        value, seconds, batch_size, catch_up, hazard, feasible
    )


def test_the_interval_loses_least_among_all_intervals():
    hazard = CALM._replace(unobserved_better_shift=1e-3, unobserved_better_count=5.0)
    plan = schedule(penalty=0.45, hazard=hazard, settings=PlannerSettings(probe_share=0.9))
    hopeful = (1 - 0.8**4) / (1 - 0.8)
    gain = hopeful / 1.3 - 1
    lost = np.array([0.45 * 1.1, 2 * 0.45 * 1.3])
    cost = min(lost * np.ceil(4 / (np.array([0.8, hopeful - 1]) * 1)))
    intervals = np.arange(8, 20_000)
    losses = cost / intervals + gain * hazard.any_shift * intervals / 2
    chosen = cost / plan.interval_steps + gain * hazard.any_shift * plan.interval_steps / 2
    assert chosen == pytest.approx(losses.min(), rel=0.02)


def test_shifts_that_come_more_often_are_looked_for_more_often():
    intervals = [
        schedule(hazard=ShiftProbabilities(h, h)).interval_steps for h in (1e-5, 1e-4, 1e-3, 1e-2)
    ]
    assert intervals == sorted(intervals, reverse=True)
    assert intervals[0] > 3 * intervals[-1]


@pytest.mark.parametrize("batch_size", [1.0, 16.0])
def test_looking_keeps_to_its_share_of_the_steps(batch_size):
    plan = schedule(penalty=0.5, hazard=ShiftProbabilities(0.1, 0.1), batch_size=batch_size)
    ((_, steps),) = plan.probes
    assert 0.5 * 1.1 * steps / plan.interval_steps <= SETTINGS.probe_share * 1.001


def test_cheap_looks_take_few_steps_too_until_they_have_found_something():
    plan = schedule(penalty=0.0001)
    ((_, steps),) = plan.probes
    assert steps / plan.interval_steps <= 0.015 * 1.001
    busy = schedule(penalty=0.0001, hazard=ShiftProbabilities(0.1, 0.1))
    assert busy.interval_steps == pytest.approx(plan.interval_steps / 10)
    rewarded = schedule(penalty=0.0001, hazard=CALM._replace(unobserved_better_count=2.0))
    assert rewarded.interval_steps == pytest.approx(plan.interval_steps / 3)
    assert rewarded.budget_share == pytest.approx(3 * SETTINGS.probe_share)


def test_where_a_good_day_would_not_pay_nothing_looks():
    plan = ObservationScheduler(ARMS, SETTINGS).schedule(
        [100.0, 20.0, 11.0], [0.01, 0.05, 0.09], 1.0, FREE, CALM
    )
    assert plan is not None
    assert math.isinf(plan.interval_steps)


def test_waking_that_costs_is_done_less_often():
    dear = CatchUpPrice(cheapest_seconds=0.05, seconds_per_token=1e-5)
    assert schedule(catch_up=dear).interval_steps > schedule().interval_steps


def test_only_an_arm_that_may_run_looks():
    (cheapest, _), (allowed, _) = (
        schedule(feasible=feasible).probes[0] for feasible in (None, [True, False, True])
    )
    assert (cheapest, allowed) == (1, 2)
    assert schedule(feasible=[True, False, False]) is None


def test_drafters_take_turns_and_share_the_price():
    arms = [*ARMS, Arm("lookup", 2)]
    values, seconds = [100.0, 98.0, 96.0, 90.0], [0.01, 0.011, 0.013, 0.01]
    both = ObservationScheduler(arms, SETTINGS).schedule(values, seconds, 1.0, FREE, CALM)
    assert both is not None
    assert [arm for arm, _ in both.probes] == [1, 3]


def test_nothing_to_watch_without_an_off_or_without_a_drafter():
    for arms in ([Arm("mtp", 3)], [Arm("mtp", 0)]):
        scheduler = ObservationScheduler(arms, SETTINGS)
        assert scheduler.schedule([100.0], [0.01], 1.0, FREE, CALM) is None


def test_with_probing_off_plain_decoding_is_taken_as_final():
    assert schedule(settings=PlannerSettings(probe_share=0.0)) is None


def test_calm_traffic_earns_less_than_its_whole_share():
    busy, calm = (probing_share(SETTINGS, h) for h in (1e-2, 1e-7))
    assert busy == SETTINGS.probe_share
    assert 0 < calm < busy
