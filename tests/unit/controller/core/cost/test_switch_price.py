"""The price of a switch is what switched steps take beyond plain ones."""

import pytest

from controller.core.cost.live_estimates import SwitchPrice
from controller.core.settings import PlannerSettings
from controller.core.step_report import StepFlags, StepReport


def report(seconds, *, switched):
    return StepReport(
        1, 1, 100, "mtp", 0, (1,), seconds, flags=StepFlags(switched=switched)
    )  # fmt: skip


def learnt(excesses, expected=0.010):
    price = SwitchPrice(PlannerSettings())
    for excess in excesses:
        price.observe(expected + excess, expected)
    return price.seconds


def test_it_starts_at_nothing_and_approaches_what_switches_cost():
    assert learnt([]) == 0
    assert learnt([0.0005] * 100) == pytest.approx(0.0005, rel=0.05)


def test_switches_that_cost_nothing_have_no_price():
    assert learnt([-0.0002, 0.0002] * 50) < 2e-5
    assert learnt([-0.001] * 50) == 0


def test_one_outlier_counts_as_two_steps_at_most():
    assert learnt([10.0]) <= 0.020 / 5 + 1e-12


def test_until_the_price_is_known_a_switched_step_tells_nothing_of_its_arm():
    price = SwitchPrice(PlannerSettings())
    assert price.seconds_without_switch(report(0.012, switched=True)) is None
    assert price.seconds_without_switch(report(0.010, switched=False)) == 0.010
    for _ in range(20):
        price.observe(0.012, 0.010)
    assert price.seconds_without_switch(report(0.012, switched=True)) == pytest.approx(
        0.010, rel=0.01
    )


def test_where_every_step_is_switched_the_arms_are_learnt_with_the_switch_in_them():
    price = SwitchPrice(PlannerSettings())
    prices = [price.seconds_without_switch(report(0.012, switched=True)) for _ in range(10)]
    assert prices[0] is None
    assert prices[-1] == 0.012
