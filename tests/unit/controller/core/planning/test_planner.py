"""The choice: the best arm, unless another one is equally good."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.acceptance.traffic_estimator import TrafficCurves
from controller.core.cost.catch_up_cost import CatchUpPrice
from controller.core.cost.table import Costs
from controller.core.engine_spec import Arm
from controller.core.plan import Reason
from controller.core.planning.plan_table import batch_buckets
from controller.core.planning.planner import LossLimits, Planner, Values
from controller.core.settings import PlannerSettings

ARMS = [Arm("mtp", g) for g in (0, 1, 2, 3)]


PLAIN = PlannerSettings(switch_margin=0.02, probe_share=0.0)


def values(table, *, seconds=None, catch_up=None, expected=None):
    array = np.asarray(table, dtype=float)
    costs = Costs(
        np.ones_like(array) if seconds is None else np.asarray(seconds, dtype=float),
        np.zeros(array.shape, dtype=bool),
    )
    each = np.zeros(len(array)) if expected is None else np.asarray(expected, dtype=float)
    return Values(
        ARMS,
        TrafficCurves({}, {}, {}),
        np.repeat(each[:, None], array.shape[1], axis=1),
        costs,
        np.repeat(np.array(catch_up or [0.0] * len(array))[:, None], array.shape[1], axis=1),
        CatchUpPrice(0.0, 0.0),
        array,
    )


@given(
    st.lists(
        st.lists(st.floats(1.0, 1000.0), min_size=8, max_size=8).map(
            lambda v: np.array(v).reshape(4, 2)
        ),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=80, deadline=None)
def test_the_choice_is_never_more_than_the_margin_below_the_best(tables):
    planner = Planner(ARMS, (1, 8), PLAIN)
    for table in tables:
        choice = planner.update(values(table))
        for j, i in enumerate(choice):
            assert table[i, j] * 1.02 >= table[:, j].max() * (1 - 1e-12)


def test_noise_at_a_pivot_does_not_switch():
    planner = Planner(ARMS, (1,), PLAIN)
    rng = np.random.default_rng(0)
    planner.update(values([[100.0], [100.5], [90.0], [80.0]]))
    for _ in range(1000):
        noisy = np.array([[100.0], [100.0], [90.0], [80.0]]) * rng.uniform(0.995, 1.005, (4, 1))
        planner.update(values(noisy))
    assert planner.switches == 0
    assert planner.reasons[0] in (Reason.HOLD, Reason.EXPLOIT)


def test_a_switch_must_pay_back_its_catch_up():
    planner = Planner(ARMS, (1,), PlannerSettings(probe_share=0.0, payback_seconds=2.0))
    planner.update(values([[100.0], [90.0], [80.0], [80.0]]))
    better = [[100.0], [110.0], [80.0], [80.0]]
    # 10 % more for two seconds is worth 0.2 s.
    planner.update(values(better, catch_up=[0, 0.25, 0.25, 0.25]))
    assert planner.choice == [0]
    assert planner.reasons == [Reason.HOLD]
    planner.update(values(better, catch_up=[0, 0.15, 0.15, 0.15]))
    assert planner.choice == [1]


def test_the_second_best_runs_while_the_best_cannot_pay_for_its_catch_up():
    planner = Planner(ARMS, (1,), PlannerSettings(probe_share=0.0, payback_seconds=2.0))
    planner.update(values([[80.0], [100.0], [80.0], [80.0]]))
    now = [[110.0], [100.0], [130.0], [80.0]]
    planner.update(values(now, catch_up=[0, 0, 5.0, 5.0]))
    assert planner.choice == [0]
    assert planner.reasons == [Reason.HOLD]


def test_a_drafter_is_woken_only_within_what_may_be_lost_and_an_override_wakes_it_anyway():
    dear = values([[100.0], [130.0], [80.0], [80.0]], catch_up=[0, 0.3, 0.3, 0.3])
    # A plain step takes 1 s in these tables.
    planner = Planner(ARMS, (1,), PLAIN)
    planner.update(dear)
    for waking, arm in ((0.2, 0), (0.4, 1)):
        planner.update(dear, None, LossLimits(waking))
        assert planner.choice == [arm]
    planner.set_rows((1,), np.array([[False], [True], [False], [False]]))
    planner.update(dear, None, LossLimits(0.0))
    assert planner.choice == [1]


def test_gamma_0_is_chosen_by_its_value_alone_once_enough_was_lost():
    planner = Planner(ARMS, (1,), PLAIN)
    planner.update(values([[90.0], [100.0], [80.0], [80.0]]))
    # gamma = 0 is 1 % better, which is less than the margin of 2 %.
    table = [[101.0], [100.0], [80.0], [80.0]]
    assert planner.update(values(table)) == [1]
    assert planner.update(values(table), None, LossLimits(prefers_off=True)) == [0]
    # The way back needs the margin.
    assert planner.update(values([[99.0], [100.0], [80.0], [80.0]])) == [0]


def test_only_gamma_0_needs_no_margin_once_enough_was_lost():
    planner = Planner(ARMS, (1,), PLAIN)
    planner.update(values([[80.0], [100.0], [90.0], [80.0]]))
    slightly_better = values([[80.0], [100.0], [101.0], [80.0]])
    assert planner.update(slightly_better, None, LossLimits(prefers_off=True)) == [1]
    assert planner.reasons == [Reason.HOLD]


@given(st.integers(1, 2000))
def test_buckets_ascend_and_end_at_the_largest_batch(max_batch):
    buckets = batch_buckets(max_batch)
    assert buckets[-1] == max_batch
    assert list(buckets) == sorted(set(buckets))
    assert set(range(1, min(8, max_batch) + 1)) <= set(buckets)


def test_captured_graph_sizes_are_the_buckets():
    assert batch_buckets(48, (1, 2, 4, 8, 16, 32, 64)) == (1, 2, 4, 8, 16, 32, 48)


@pytest.mark.parametrize(
    ("captured", "max_batch", "arms"),
    [
        (range(1, 513), 512, 16),
        (range(1, 513), 65_536, 130),
        (range(1, 4_097), 4_096, 8),
        ([1, 2, 4, *range(8, 513, 4)], 512, 6),
        (range(1, 200), 65_536, 4_000),
    ],
)
def test_buckets_are_bounded_and_lie_where_the_engine_has_captured_a_graph(
    captured: Sequence[int], max_batch: int, arms: int
):
    buckets = batch_buckets(max_batch, tuple(captured), arms)
    most = max(1, min(128, 4096 // arms))
    assert most // 2 <= len(buckets) <= most
    assert buckets[-1] == max_batch
    assert list(buckets) == sorted(set(buckets))
    assert set(buckets) - {max_batch} <= set(captured)
    inner = buckets[:-1]
    if len(inner) > 64:
        # The small ones, where a step's cost depends most on the batch, are all there.
        assert inner[:8] == tuple(captured)[:8]
        assert max(b / a for a, b in pairwise(inner[16:])) < 1.2


def test_what_sglang_captures_is_kept_as_it_is():
    captured = (1, 2, 4, *range(8, 161, 8), *range(176, 513, 16))
    assert batch_buckets(512, captured, 16) == captured
