"""How often to look while nothing is seen: the interval that loses least."""

import numpy as np
import pytest

from controller.core.acceptance.shifts import ShiftProbabilities
from controller.core.cost.catch_up_cost import CatchUpPrice
from controller.core.engine_spec import Arm
from controller.core.planning.observation_cost import ObservationPricer, probing_share
from controller.core.settings import PlannerSettings

GAMMAS = (0, 1, 3)
ARMS = [Arm("mtp", g) for g in GAMMAS]
SIZES = np.array([1.0, 16.0])
SETTINGS = PlannerSettings()
FREE = CatchUpPrice(0.0, 0.0, 0.0)


def observation(penalty=0.02, hazard=None, catch_up=FREE, settings=SETTINGS, off=0.01):
    """Drafting costs `penalty` of a plain step's value; a better day would gain much."""
    seconds = np.array([[off, off], [off * 1.1, off * 1.1], [off * 1.3, off * 1.3]])
    value = np.array([[1.0], [1 - penalty], [1 - 2 * penalty]]) * SIZES / off
    plan = ObservationPricer(ARMS, SIZES, settings).price_observation(
        value, seconds, catch_up, hazard or ShiftProbabilities(1e-3, 1e-3)
    )
    assert plan is not None
    return plan


def test_the_interval_loses_least_among_all_intervals():
    hazard = ShiftProbabilities(
        1e-3, 1e-3, unobserved_better_shift=1e-3, unobserved_better_count=5.0
    )
    generous = PlannerSettings(probe_share=0.9)
    plan = observation(penalty=0.45, hazard=hazard, settings=generous)
    hopeful = (1 - 0.8**4) / (1 - 0.8)
    gain = hopeful / 1.3 - 1
    lost = np.array([0.45 * 1.1, 2 * 0.45 * 1.3])
    cost = min(lost * np.ceil(4 / (np.array([0.8, hopeful - 1]) * 1)))
    intervals = np.arange(8, 20_000)
    losses = cost / intervals + gain * hazard.any_shift * intervals / 2
    at_least = losses.min()
    chosen = cost / plan.interval_steps[0] + gain * hazard.any_shift * plan.interval_steps[0] / 2
    assert chosen == pytest.approx(at_least, rel=0.02)


def test_shifts_that_come_more_often_are_looked_for_more_often():
    intervals = [
        observation(hazard=ShiftProbabilities(h, h)).interval_steps[0]
        for h in (1e-5, 1e-4, 1e-3, 1e-2)
    ]
    assert intervals == sorted(intervals, reverse=True)
    assert intervals[0] > 3 * intervals[-1]


def test_looking_keeps_to_its_share_of_the_steps():
    plan = observation(penalty=0.5, hazard=ShiftProbabilities(0.1, 0.1))
    lost = 0.5 * 1.1 * plan.probe_steps
    assert np.all(lost / plan.interval_steps <= SETTINGS.probe_share * 1.001)


def test_cheap_looks_take_few_steps_too_until_they_have_found_something():
    free, calm = 0.0001, ShiftProbabilities(1e-3, 1e-3)
    plan = observation(penalty=free, hazard=calm)
    assert np.all(plan.probe_steps.mean(axis=0) / plan.interval_steps <= 0.015 * 1.001)
    busy = observation(penalty=free, hazard=ShiftProbabilities(0.1, 0.1))
    assert busy.interval_steps[0] == pytest.approx(plan.interval_steps[0] / 10)
    seen = observation(penalty=free, hazard=calm._replace(unobserved_better_count=2.0))
    assert seen.interval_steps[0] == pytest.approx(plan.interval_steps[0] / 3)


def test_where_a_good_day_would_not_pay_nothing_looks():
    seconds = np.array([[0.01], [0.05], [0.09]])
    value = np.array([[100.0], [20.0], [11.0]])
    plan = ObservationPricer(ARMS, SIZES[:1], SETTINGS).price_observation(
        value, seconds, FREE, ShiftProbabilities(1e-3, 1e-3)
    )
    assert plan is not None
    assert np.isinf(plan.interval_steps[0])
    assert plan.loss_share[0] == 0


def test_blindness_has_a_price_only_where_shifts_were_seen():
    assert np.all(observation(hazard=ShiftProbabilities(1e-3, 0.0)).loss_share == 0)
    losses = [
        observation(hazard=ShiftProbabilities(h, h)).loss_share[0] for h in (1e-4, 1e-3, 1e-2)
    ]
    assert losses == sorted(losses)
    assert 0 < losses[0] < losses[-1] <= 0.9


def test_waking_that_costs_is_done_less_often():
    dear = CatchUpPrice(cheapest_seconds=0.05, fixed_seconds=0.0, seconds_per_token=1e-5)
    assert observation(catch_up=dear).interval_steps[0] > observation().interval_steps[0]


def test_a_pass_of_the_drafter_is_paid_by_each_look_and_not_by_each_step():
    busy = ShiftProbabilities(1e-3, 1e-3)
    free = observation(hazard=busy).loss_share[1]
    # The same 4 ms for a look after 25 steps of 16 tokens, either way.
    once = CatchUpPrice(cheapest_seconds=0.004, fixed_seconds=0.004, seconds_per_token=0.0)
    each = CatchUpPrice(cheapest_seconds=0.004, fixed_seconds=0.0, seconds_per_token=1e-5)
    assert free < observation(hazard=busy, catch_up=once).loss_share[1]
    assert (
        observation(hazard=busy, catch_up=once).loss_share[1]
        < observation(hazard=busy, catch_up=each).loss_share[1]
    )


def test_nothing_to_watch_without_an_off_or_without_a_drafter():
    seconds, value = np.array([[0.01]]), np.array([[100.0]])
    for arms in ([Arm("mtp", 3)], [Arm("mtp", 0)]):
        observation_planner = ObservationPricer(arms, SIZES[:1], SETTINGS)
        assert (
            observation_planner.price_observation(
                value, seconds, FREE, ShiftProbabilities(1e-3, 0.0)
            )
            is None
        )


def test_with_probing_off_plain_decoding_is_taken_as_final():
    plan = observation(settings=PlannerSettings(probe_share=0.0))
    assert np.all(np.isinf(plan.interval_steps))
    assert np.all(plan.loss_share == 0)


def test_calm_traffic_earns_less_than_its_whole_share():
    busy, calm = (probing_share(SETTINGS, h) for h in (1e-2, 1e-7))
    assert busy == SETTINGS.probe_share
    assert 0 < calm < busy
