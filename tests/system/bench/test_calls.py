"""Counted calls of the core and the service do not grow."""

import json

from tools.bench.calls_bench import NUMBERS_PATH, Calls, count_all, find_regressions


def test_no_count_is_more_than_a_fifth_above_its_number() -> None:
    # `python -m tools.bench.calls_bench --write` replaces the numbers.
    assert find_regressions(count_all(), json.loads(NUMBERS_PATH.read_text())) == []


def test_each_count_is_held_against_its_number() -> None:
    numbers = {"fold": {"own": 10.0, "outside": 20.0}}
    assert find_regressions({"fold": Calls(12.0, 24.0)}, numbers) == []
    assert find_regressions({"fold": Calls(12.1, 24.0)}, numbers) == [
        "fold: 12.1 own calls, 10 before"
    ]
    assert find_regressions({"fold": Calls(5.0, 24.1)}, numbers) == [
        "fold: 24.1 outside calls, 20 before"
    ]
