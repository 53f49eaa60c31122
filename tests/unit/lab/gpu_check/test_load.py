from itertools import chain

from lab.gpu_check.load import build_stream, steady_stream
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
    (phase,) = steady_stream(QWEN3_8B, 1, seed=1, times=100)
    (request,) = phase.requests
    assert request.new_tokens > 5000
    assert len(request.prompt) + request.new_tokens < QWEN3_8B.context_length
    (phase,) = steady_stream(QWEN3_8B, 64, seed=1)
    assert phase.concurrency == len(phase.requests) == 64
