"""Streams that answer to update strides as the paper's tables say, and the core on them."""

from dataclasses import replace

import pytest

from controller.core.training.stride_planner import STRIDES
from lab.papers import stride_simulation
from lab.papers.stride_simulation import (
    BLOCK,
    TABLE_3,
    TABLE_7,
    TABLE_8,
    Stream,
    aligned_stream,
    alpha_of,
    compute_bound_stream,
    play,
    play_fixed_stride,
    streams_of_table_3,
    streams_of_table_7,
)

LARGE, SMALL = streams_of_table_3(), streams_of_table_7()


def short(stream: Stream, sequences: int = 4) -> Stream:
    return replace(stream, sequences=sequences)


def test_the_tables_say_what_the_paper_says_of_them():
    # Table 3's last row: mean of the ratios over its benchmarks.
    for stride, (length, speed) in {20: (1.16, 1.39), 5: (1.30, 1.54), 1: (1.43, 1.15)}.items():
        lengths = [cells[stride][0] / cells[0][0] for cells in TABLE_3.values()]
        speeds = [cells[stride][1] / cells[0][1] for cells in TABLE_3.values()]
        assert sum(lengths) / 8 == pytest.approx(length, abs=0.03)
        assert sum(speeds) / 8 == pytest.approx(speed, abs=0.03)
    # Table 8's acceptance lengths are those of Table 7's LiveCodeBench.
    code = TABLE_7["LiveCodeBench"]
    for stride in (5, 15, 30, 50):
        assert TABLE_8[stride][0] == pytest.approx(code[stride] / code[1], abs=0.02)


def test_how_much_less_there_is_to_gain_than_in_the_paper_is_stated():
    # Plain DFlash's step takes longer than one with rare updates, which the streams do not follow.
    slower = [cells[0][0] / cells[0][1] > cells[20][0] / cells[20][1] for cells in TABLE_3.values()]
    assert sum(slower) == 7
    table = sum(cells[5][1] / cells[0][1] for cells in TABLE_3.values()) / 8
    ours = 0.0
    for stream in LARGE:
        gain = stream.lengths[5] / stream.lengths[0]
        ours += gain * stream.step_seconds[0] / stream.step_seconds[5] / 8
    stated = f"mean speed-up is {table:.2f} by the table, and {ours:.2f} here"
    assert stated in " ".join((stride_simulation.__doc__ or "").split())


@pytest.mark.parametrize("length", [1.0, 2.4, 4.8, 9.0])
def test_alpha_gives_the_length_back(length: float):
    alpha = alpha_of(length)
    assert sum(alpha**k for k in range(BLOCK + 1)) == pytest.approx(length, abs=0.01)


@pytest.mark.parametrize("stream", [*LARGE, *SMALL], ids=lambda stream: stream.name)
def test_an_update_costs_the_same_at_every_stride(stream: Stream):
    costs = {s: s * (stream.step_seconds[s] - stream.step_seconds[0]) for s in STRIDES if s}
    assert min(costs.values()) > 0
    assert max(costs.values()) == pytest.approx(min(costs.values()))


@pytest.mark.parametrize("stride", [0, 20, 5, 1])
def test_a_fixed_stride_earns_what_the_table_says(stride: int):
    (earned,) = play_fixed_stride([LARGE[0]], stride, seed=1)
    length = earned.tokens / LARGE[0].rounds
    assert length == pytest.approx(LARGE[0].lengths[stride], rel=0.04)
    seconds = earned.seconds / LARGE[0].rounds
    assert seconds == pytest.approx(LARGE[0].step_seconds[stride], rel=0.02)


def test_where_nothing_is_gained_off_is_the_best_stride():
    for stream in (aligned_stream(LARGE[0]), compute_bound_stream(SMALL[0])):
        earned = {s: play_fixed_stride([short(stream)], s, 1)[0].tokens_per_second for s in STRIDES}
        assert max(earned, key=lambda stride: earned[stride]) == 0


def test_the_core_finds_out_that_updates_pay():
    stream = short(LARGE[1], 6)
    (ours,), (off,) = play([stream], 1), play_fixed_stride([stream], 0, 1)
    assert ours.tokens_per_second > 1.15 * off.tokens_per_second
    assert sum(ours.rounds.values()) == stream.rounds


def test_the_core_leaves_an_aligned_drafter_alone():
    stream = short(aligned_stream(SMALL[0]))
    (ours,), (off,) = play([stream], 1), play_fixed_stride([stream], 0, 1)
    assert ours.tokens_per_second > 0.97 * off.tokens_per_second
