"""The decisions on the standard suite are those that the golden file has, step by step."""

import copy
from typing import Any

import pytest

from tests.support.golden import differences, golden, simulate_suite


@pytest.mark.slow
@pytest.mark.parametrize("part", ["stationary/h100-llama3.1-8b/json/B=16", "mixed-classes"])
def test_a_scenarios_numbers_are_the_golden_ones(part: str):
    # In this process, which has imported what another one would first import for seconds.
    current_numbers = simulate_suite(part, processes=1)
    assert current_numbers
    assert list(differences(golden(), current_numbers)) == []


def moved(**changes: Any) -> tuple[dict[str, Any], dict[str, Any], str]:
    """The golden numbers, one scenario's with some of the controller's changed, and its name."""
    numbers = golden()
    name = next(iter(numbers))
    changed_numbers = {name: copy.deepcopy(numbers[name])}
    for part, change in changes.items():
        changed_numbers[name][part]["controller"] = change(
            changed_numbers[name][part]["controller"]
        )
    return numbers, changed_numbers, name


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("tokens_per_second", lambda speed: speed * (1 + 2e-9), "tokens/s"),
        ("decisions", lambda _: "0" * 16, "decides otherwise"),
        ("figures", lambda row: [row[0] * (1 + 2e-9), *row[1:]], "has other figures"),
        ("figures", lambda row: [None, *row[1:]], "has other figures"),
        ("figures", lambda row: row[:-1], "has other figures"),
    ],
)
def test_what_no_processor_explains_is_found(part: str, change: Any, words: str):
    numbers, changed_numbers, name = moved(**{part: change})
    [line] = differences(numbers, changed_numbers)
    assert line.startswith(f"{name}: controller ")
    assert line.endswith(words)


def test_another_last_digit_is_another_processor():
    numbers, changed_numbers, _ = moved(
        tokens_per_second=lambda speed: speed * (1 + 1e-15),
        figures=lambda row: [figure and figure * (1 - 1e-13) for figure in row],
    )
    assert list(differences(numbers, changed_numbers)) == []


def test_a_policy_that_is_missing_or_new_is_found():
    numbers, changed_numbers, name = moved()
    del changed_numbers[name]["tokens_per_second"]["tide"]
    changed_numbers[name]["tokens_per_second"]["other"] = 1.0
    [line] = differences(numbers, changed_numbers)
    assert line == f"{name}: other is new; without tide"
