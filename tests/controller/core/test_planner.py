"""The choice: the best arm, unless another one is as good."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.cost import Costs
from controller.core.planner import Planner, Values, batch_buckets
from controller.core.settings import PlannerSettings
from controller.core.types import Arm, Reason

ARMS = [Arm("mtp", g) for g in (0, 1, 2, 3)]


def values(table):
    array = np.asarray(table, dtype=float)
    costs = Costs(np.ones_like(array), np.ones_like(array), np.zeros(array.shape, dtype=bool))
    return Values(np.zeros(len(array)), costs, array, array)


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
    planner = Planner(ARMS, (1, 8), PlannerSettings(switch_margin=0.02))
    for table in tables:
        choice = planner.update(values(table))
        for j, i in enumerate(choice):
            assert table[i, j] * 1.02 >= table[:, j].max() * (1 - 1e-12)


def test_noise_at_a_pivot_does_not_switch():
    planner = Planner(ARMS, (1,), PlannerSettings(switch_margin=0.02))
    rng = np.random.default_rng(0)
    planner.update(values([[100.0], [100.5], [90.0], [80.0]]))
    for _ in range(1000):
        noisy = np.array([[100.0], [100.0], [90.0], [80.0]]) * rng.uniform(0.995, 1.005, (4, 1))
        planner.update(values(noisy))
    assert planner.switches == 0
    assert planner.reasons[0] in (Reason.HOLD, Reason.EXPLOIT)


@given(st.integers(1, 2000))
def test_buckets_ascend_and_end_at_the_largest_batch(max_batch):
    buckets = batch_buckets(max_batch)
    assert buckets[-1] == max_batch
    assert list(buckets) == sorted(set(buckets))
    assert set(range(1, min(8, max_batch) + 1)) <= set(buckets)


def test_captured_graph_sizes_are_the_buckets():
    assert batch_buckets(48, (1, 2, 4, 8, 16, 32, 64)) == (1, 2, 4, 8, 16, 32, 48)
