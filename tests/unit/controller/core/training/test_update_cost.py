"""What an update costs the steps beside it."""

import pytest

from controller.core.step_report import StepFlags, StepReport
from controller.core.training.stride_planner import UpdatePrice


def step(
    seconds: float,
    *,
    batch: int = 4,
    landed: float = 0.0,
    has_neighbour: bool = True,
    gap: bool = False,
) -> StepReport:
    flags = StepFlags(updating=has_neighbour, after_gap=gap)
    counts = (batch, 0)
    return StepReport(1, batch, 10, "eagle3", 1, counts, seconds, flags, update_seconds=landed)


def test_an_update_costs_what_all_steps_beside_it_took_longer():
    price = UpdatePrice()
    for seconds, landed in ((0.03, 0.0), (0.024, 0.0), (0.021, 0.05)):
        price.observe(step(seconds, landed=landed), 0.02)
    assert price.lost_seconds_per_update(4, 0.02) == pytest.approx(0.015)
    assert price.last_update_seconds == 0.05


def test_steps_without_an_update_beside_them_cost_nothing():
    price = UpdatePrice()
    price.observe(step(0.1, has_neighbour=False), 0.02)
    price.observe(step(0.03, landed=0.05), 0.02)
    assert price.lost_seconds_per_update(4, 0.02) == pytest.approx(0.01)


def test_a_step_after_a_prefill_says_nothing_of_the_update():
    price = UpdatePrice()
    price.observe(step(0.9, gap=True), 0.02)
    price.observe(step(0.03, landed=0.05), 0.02)
    assert price.lost_seconds_per_update(4, 0.02) == pytest.approx(0.01)


def test_a_step_that_hangs_counts_as_a_slow_one_only():
    price = UpdatePrice()
    price.observe(step(9.0, landed=0.05), 0.02)
    assert price.lost_seconds_per_update(4, 0.02) == pytest.approx(0.06)


def test_an_update_that_seems_to_speed_steps_up_is_free():
    price = UpdatePrice()
    price.observe(step(0.01, landed=0.05), 0.02)
    assert price.lost_seconds_per_update(4, 0.02) == 0.0


def test_before_any_update_half_a_step_is_assumed():
    assert UpdatePrice().lost_seconds_per_update(4, 0.02) == pytest.approx(0.01)


def test_batches_are_priced_apart_and_the_nearest_known_one_speaks_for_others():
    price = UpdatePrice()
    price.observe(step(0.03, batch=1, landed=0.05), 0.02)
    price.observe(step(0.06, batch=64, landed=0.05), 0.02)
    assert price.lost_seconds_per_update(1, 0.02) == pytest.approx(0.01)
    assert price.lost_seconds_per_update(2, 0.02) == pytest.approx(0.01)
    assert price.lost_seconds_per_update(100, 0.02) == pytest.approx(0.04)


def test_updates_come_one_after_the_other_whatever_the_stride():
    price = UpdatePrice()
    for landed in (0.0, 0.0, 0.0, 0.05):
        price.observe(step(0.03, landed=landed), 0.02)
    assert price.updates_per_round(4, 1) == pytest.approx(1 / 4)
    assert price.updates_per_round(4, 2) == pytest.approx(1 / 4)
    assert price.updates_per_round(4, 20) == pytest.approx(1 / 20)
