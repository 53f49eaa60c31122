"""The price of a switch is what switched steps take beyond plain ones."""

import pytest

from controller.core.cost.switch_price import SwitchPrice


def learnt(excesses, expected=0.010):
    price = SwitchPrice()
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
