"""The table from batch sizes to arms, and the best one in hindsight."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.errors import InvalidInputError
from simulator.peers.common import octave
from simulator.peers.static import StaticPolicy
from simulator.peers.vllm import BatchSchedule, best_table
from tests.unit.simulator.peers.loop import ARMS, Loop

TABLE = ((1, 4, 4), (5, 16, 2), (33, 64, 0))


@pytest.mark.parametrize(
    ("batch_size", "arm"),
    [(1, 4), (4, 4), (5, 2), (16, 2), (17, 2), (32, 2), (33, 0), (64, 0), (65, 0), (65_536, 0)],
)
def test_a_batch_size_gets_its_range_and_gaps_the_range_below(batch_size, arm):
    assert BatchSchedule(ARMS, TABLE).choose(batch_size, 0.0).arm == arm


@pytest.mark.parametrize(
    ("table", "fault"),
    [
        ((), "no range"),
        (((2, 4, 0),), "starts at 2"),
        (((1, 4, 0), (4, 8, 1)), "overlaps"),
        (((1, 8, 0), (2, 3, 1)), "overlaps"),
        (((1, 1, 0), (5, 3, 1)), "ends before it starts"),
        (((1, 4, 6),), "arm 6 does not exist"),
    ],
)
def test_a_table_that_contradicts_itself_is_refused(table, fault):
    with pytest.raises(InvalidInputError, match=fault):
        BatchSchedule(ARMS, table)


def test_the_order_of_the_ranges_does_not_matter():
    assert BatchSchedule(ARMS, TABLE[::-1]).table == TABLE


SUMS = st.lists(
    st.dictionaries(
        st.integers(0, 8),
        st.tuples(st.floats(0, 1e6), st.floats(0, 1e3)),
        max_size=6,
    ),
    min_size=1,
    max_size=5,
)


@given(SUMS)
def test_each_octave_gets_the_arm_with_the_most_tokens_per_second(sums):
    rates = [{o: t / s for o, (t, s) in arm.items() if s > 0 and t > 0} for arm in sums]
    met = sorted({o for arm in rates for o in arm if arm[o] > 0})
    if not met:
        with pytest.raises(InvalidInputError, match="no arm was measured"):
            best_table(sums)
        return
    table = best_table(sums)
    for o in met:
        arm = next(a for first, last, a in table if first <= 2**o <= last)
        assert rates[arm][o] == max(r.get(o, 0.0) for r in rates)
    policy = BatchSchedule([ARMS[0]] * len(sums), table)
    for batch_size in (1, 2, 3, 7, 100, 65_536):
        policy.choose(batch_size, 0.0)


def test_octaves_that_nobody_met_take_the_nearest_the_lower_of_two():
    table = best_table([{1: (10.0, 1.0), 5: (1.0, 1.0)}, {1: (1.0, 1.0), 5: (10.0, 1.0)}])
    assert [arm for _, _, arm in table] == [0, 0, 0, 0, 1, 1]


def test_the_best_table_runs_every_batch_size_as_fast_as_the_best_static_arm():
    sizes = (1, 4, 16, 64, 256)
    sums = []
    for i in range(len(ARMS)):
        by_octave = {}
        for size in sizes:
            loop = Loop(StaticPolicy(ARMS, i), seed=size)
            loop.run(40, size, 0.7)
            by_octave[octave(size)] = (loop.tokens, loop.now)
        sums.append(by_octave)
    policy = BatchSchedule(ARMS, best_table(sums))
    for size in sizes:
        loop = Loop(policy)
        # One short run a cell: two arms within its scatter may swap.
        assert loop.share_of_best(loop.run(5, size, 0.7), size, 0.7) > 0.94
    assert ARMS[policy.choose(1, 0.0).arm].gamma > ARMS[policy.choose(256, 0.0).arm].gamma
