"""The decisions on the standard suite are those that the golden file has, bit by bit."""

import copy

import pytest

from tests.support.golden import differences, golden, simulated


@pytest.mark.slow
@pytest.mark.parametrize("part", ["stationary/h100-llama3.1-8b/json/B=16", "mixed-classes"])
def test_a_scenarios_numbers_are_the_golden_ones(part: str):
    found = simulated(f"standard/{part}")
    assert found
    assert list(differences(golden(), found)) == []


def test_another_last_digit_is_found():
    numbers = golden()
    moved = copy.deepcopy(numbers)
    name = next(iter(moved))
    moved[name]["tokens_per_second"]["controller"] *= 1 + 1e-15
    [line] = differences(numbers, moved)
    assert name in line
    assert "controller" in line
