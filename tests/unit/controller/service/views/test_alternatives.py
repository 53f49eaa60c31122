"""What each arm would have given, from a table and points that are put together here."""

from collections.abc import Sequence
from typing import Any

import pytest

from controller.core.engine_spec import Arm
from controller.service.views.status_cache import Point, compare_alternatives
from controller.wire.explanations import ValueTable

DRAFTERS = ("eagle3", "dflash")
ARMS = (Arm("eagle3", 0), Arm("eagle3", 3), Arm("dflash", 8))
ALL = ((True, True),) * 3


def table(feasible: tuple[tuple[bool, ...], ...] = ALL) -> ValueTable:
    """Rows up to batch 4 and up to batch 32; the best arm is another one in each."""
    return ValueTable(
        batch_sizes=(4, 32),
        seconds=((0.01, 0.02),) * 3,
        tokens_per_second=((100.0, 800.0), (300.0, 700.0), (400.0, 500.0)),
        extrapolated=((False, False),) * 3,
        feasible=feasible,
    )


def point(batch: float | None, gamma: int, drafter: int, rate: float | None) -> Point:
    return [0.0, batch, gamma, drafter, 2.0, rate, 0.0]


def compared(points: Sequence[Point], **table_options: Any) -> dict[str, Any]:
    comparison = compare_alternatives(table(**table_options), ARMS, DRAFTERS, points)
    assert comparison is not None
    return comparison


def test_the_plan_and_every_fixed_arm_are_valued_at_the_same_batch_sizes():
    # One second at a small batch with dflash, three at a large one without speculation.
    comparison = compared([point(3, 8, 1, 390.0), *[point(20, 0, 0, 790.0)] * 3])
    assert comparison["seconds"] == 4
    assert comparison["measured"] == pytest.approx((390 + 3 * 790) / 4)
    assert comparison["planned"] == pytest.approx((400 + 3 * 800) / 4)
    rates = [arm["tokens_per_second"] for arm in comparison["arms"]]
    assert rates == pytest.approx([(100 + 3 * 800) / 4, (300 + 3 * 700) / 4, (400 + 3 * 500) / 4])
    # A plan that takes the best arm of each row is better than any of them held fixed.
    assert comparison["planned"] > max(rates)
    assert [arm["share"] for arm in comparison["arms"]] == [0.75, 0.0, 0.25]
    assert [(arm["drafter"], arm["gamma"]) for arm in comparison["arms"]] == [
        ("eagle3", 0), ("eagle3", 3), ("dflash", 8),
    ]  # fmt: skip


def test_a_batch_above_the_table_is_valued_like_its_last_row():
    assert compared([point(500, 3, 0, 1.0)])["planned"] == 700.0


def test_it_says_how_much_of_the_time_an_arm_was_allowed():
    feasible = ((True, True), (True, False), (False, False))
    comparison = compared([point(3, 0, 0, 1.0), point(20, 0, 0, 1.0)], feasible=feasible)
    assert [arm["allowed"] for arm in comparison["arms"]] == [1.0, 0.5, 0.0]


def test_seconds_without_a_report_and_arms_that_are_gone_are_left_out():
    points = [point(None, 3, 0, None), point(3, 5, 0, 9.0), point(3, 3, 0, 300.0)]
    comparison = compared(points)
    assert (comparison["seconds"], comparison["measured"]) == (1, 300.0)
    assert compare_alternatives(table(), ARMS, DRAFTERS, points[:2]) is None
    assert compare_alternatives(table(), ARMS, DRAFTERS, []) is None
