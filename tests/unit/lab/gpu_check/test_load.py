from itertools import chain

from lab.gpu_check.load import build_stream, moving_stream, steady_stream
from lab.gpu_check.shapes import QWEN3_8B, SMALL


def test_a_phase_for_each_load_and_no_prompt_twice():
    stream = build_stream(SMALL, SMALL.loads, seed=1)
    assert [phase.concurrency for phase in stream] == [load.concurrency for load in SMALL.loads]
    requests = list(chain.from_iterable(phase.requests for phase in stream))
    assert [request.index for request in requests] == list(range(len(requests)))
    assert len({request.prompt for request in requests}) == len(requests)
    for phase, load in zip(stream, SMALL.loads, strict=True):
        assert {len(request.prompt) for request in phase.requests} == {load.prompt_tokens}
    assert max(chain.from_iterable(r.prompt for r in requests)) < SMALL.vocabulary


def test_the_same_seed_gives_the_same_stream():
    assert build_stream(SMALL, SMALL.loads, 1) == build_stream(SMALL, SMALL.loads, 1)
    assert build_stream(SMALL, SMALL.loads, 1) != build_stream(SMALL, SMALL.loads, 2)


def test_a_steady_stream_is_one_batch_and_fits_the_context():
    (phase,) = steady_stream(QWEN3_8B, 1, seed=1, share=100)
    (request,) = phase.requests
    assert request.new_tokens > 5000
    assert len(request.prompt) + request.new_tokens < QWEN3_8B.context_length
    (phase,) = steady_stream(QWEN3_8B, 64, seed=1)
    assert phase.concurrency == len(phase.requests) == 64


def test_a_shorter_moving_load_has_the_same_prompts():
    whole, half = moving_stream(QWEN3_8B, 1.0), moving_stream(QWEN3_8B, 0.5)
    for long, short in zip(whole, half, strict=True):
        assert [r.prompt for r in long.requests] == [r.prompt for r in short.requests]
        assert short.new_tokens == long.new_tokens / 2
    least = min(
        request.new_tokens for phase in moving_stream(QWEN3_8B, 0.0) for request in phase.requests
    )
    assert least == 12


def test_a_batch_size_that_no_load_has_is_played_with_the_next_smaller_ones_prompts():
    (phase,) = steady_stream(QWEN3_8B, 32, seed=1)
    assert (phase.concurrency, len(phase.requests)) == (32, 32)
    assert {len(request.prompt) for request in phase.requests} == {1024}  # as at 8
    (phase,) = steady_stream(QWEN3_8B, 1, seed=1)
    assert len(phase.requests[0].prompt) == 512  # the short one of two loads of one client
