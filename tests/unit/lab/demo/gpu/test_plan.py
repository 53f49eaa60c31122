"""The plan: what a run does, in which order, and how long the day may be."""

from dataclasses import replace

import pytest

from lab.demo.gpu.plan import (
    ORDER,
    RESERVE,
    SETTINGS,
    SHARES,
    STATIC_BEST,
    Forecast,
    graphs,
    largest_share,
    pieces,
    planned_share,
    play_seconds,
    start_seconds,
    total,
)
from lab.demo.gpu.run import GpuDemoOptions, plan
from lab.gpu_check.shapes import QWEN3_8B, SMALL
from lab.harness.errors import HarnessError
from lab.paced.engines import ADAPTIVE, OFF, STEERED

GPU = SETTINGS[QWEN3_8B.name]
PROFILE = 45.0


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=lambda s: s.shape.name)
@pytest.mark.parametrize("minutes", [8.0, 9.0, 15.0])
def test_the_plan_fits_the_minutes_by_count(setting, minutes, tmp_path):
    share, planned = plan(GpuDemoOptions(setting, 60 * minutes, PROFILE, tmp_path))
    assert total(planned) <= 60 * minutes * (1 - RESERVE)
    plays = [piece for piece in planned if piece.name == "play"]
    stream = setting.stream(share)
    assert [piece.policy for piece in plays] == list(ORDER)
    assert {p.counts for p in plays} == {f"{stream.requests} requests, {stream.tokens} tokens"}


def test_nine_minutes_are_enough_for_half_of_the_day_on_the_gpu():
    whole = planned_share(GPU, 900.0, PROFILE)
    short = planned_share(GPU, 540.0, PROFILE)
    assert whole == 1.0
    assert short is not None
    assert 0.5 <= short < whole


def test_too_few_minutes_are_refused_with_how_many_it_takes(tmp_path):
    least = total(pieces(GPU, SHARES[-1], PROFILE))
    with pytest.raises(HarnessError, match=f"the shortest day takes about {least / 60 + 0.5:.1f}"):
        plan(GpuDemoOptions(GPU, 120.0, PROFILE, tmp_path))


def test_the_steered_engine_is_profiled_before_it_plays_and_the_rest_follow_by_worth():
    planned = [(piece.name, piece.policy) for piece in pieces(GPU, 1.0, PROFILE)]
    assert planned[:6] == [
        ("sidecar", ""),
        *((name, STEERED) for name in ("start", "warm up", "profile", "play", "stop")),
    ]
    assert [policy for name, policy in planned if name == "start"] == [
        STEERED, STATIC_BEST, ADAPTIVE, OFF,
    ]  # fmt: skip


def test_every_draft_length_has_three_graphs_a_size_and_plain_decoding_one():
    sizes = len(GPU.graph_sizes)
    assert graphs(OFF, GPU) == sizes
    assert graphs(STATIC_BEST, GPU) == 3 * sizes
    assert graphs(STEERED, GPU) == sizes * (1 + 3 * (len(GPU.gammas) - 1))
    more = replace(GPU, gammas=(*GPU.gammas, 8))
    added = start_seconds(STEERED, more) - start_seconds(STEERED, GPU)
    assert added == pytest.approx(3 * sizes * GPU.prices.graph)


def test_shorter_answers_keep_the_requests_and_take_less_time():
    whole, half = GPU.stream(1.0), GPU.stream(0.5)
    assert half.requests == whole.requests
    assert half.tokens == pytest.approx(whole.tokens / 2, rel=0.02)
    assert play_seconds(half, GPU.prices) < play_seconds(whole, GPU.prices)


def test_the_largest_share_that_fits_is_taken():
    assert largest_share(100.0, 56.0, 40.0) == 1.0
    assert largest_share(100.0, 57.0, 40.0) == 0.8
    assert largest_share(100.0, 86.0, 40.0) == 0.25
    assert largest_share(100.0, 87.0, 40.0) is None


def test_what_a_start_took_here_shortens_the_day():
    quick, slow = Forecast(GPU), Forecast(GPU)
    slow.record_start(STEERED, 1.4 * start_seconds(STEERED, GPU))
    # What the other three starts take longer now.
    more = 0.4 * sum(start_seconds(policy, GPU) for policy in ORDER[1:])
    fixed = sum(start_seconds(policy, GPU) for policy in ORDER[1:])
    fixed += 3 * play_seconds(GPU.warm_up(), GPU.prices) + 4 * GPU.prices.stop
    enough = (fixed + 4 * 40.0) / (1 - RESERVE) + 0.01
    assert quick.choose_share(enough, 40.0) == 1.0
    assert quick.choose_share(enough - 1.0, 40.0) == 0.8
    assert slow.choose_share(enough, 40.0) < 0.8
    assert slow.choose_share(enough + more / (1 - RESERVE), 40.0) == 1.0
    assert quick.choose_share(1.0, 40.0) == SHARES[-1]


def test_a_first_start_that_compiled_kernels_says_little_of_the_others():
    forecast = Forecast(GPU)
    forecast.record_start(STEERED, 20 * start_seconds(STEERED, GPU))
    assert forecast.slowness == 1.5
    # Whether an engine still has time is asked with a quick start.
    warm_up = play_seconds(GPU.warm_up(), GPU.prices)
    assert forecast.min_seconds(OFF, 30.0) == start_seconds(OFF, GPU) + warm_up + 30.0
    forecast.record_start(STEERED, 0.5 * start_seconds(STEERED, GPU))
    quick = 0.5 * start_seconds(OFF, GPU)
    assert forecast.min_seconds(OFF, 30.0) == pytest.approx(quick + warm_up + 30.0)


def test_all_sequences_of_the_day_fit_into_the_caches():
    for setting in SETTINGS.values():
        stream = setting.stream(1.0)
        for phase in stream.phases:
            lengths = sorted(len(r.prompt) + r.new_tokens for r in phase.requests)
            # Room for the drafts of two steps beside what each sequence may become.
            spare = 2 * (max(setting.gammas) + 1)
            most = sum(length + spare for length in lengths[-phase.concurrency :])
            assert most <= setting.kv_tokens
    assert SETTINGS[SMALL.name].max_batch_size <= max(SETTINGS[SMALL.name].graph_sizes)
