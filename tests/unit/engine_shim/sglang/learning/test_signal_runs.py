"""Which positions become which signals, against a plain account of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from engine_shim.sglang.learning.signal_runs import (
    MIN_POSITIONS,
    PROMPT_POSITIONS,
    SEGMENT_POSITIONS,
    PromptCopy,
    SignalRuns,
    VerifiedStepCopy,
)
from engine_shim.sglang.training.signals import Signal

GAMMA, TOP, WIDTH, VOCABULARY = 3, 4, 6, 12


def canvases(
    rounds: Sequence[Mapping[str, tuple[int, int]]], drafted: int = GAMMA
) -> list[VerifiedStepCopy]:
    """Of rounds that give (start, accepted) by request; what they hold is random."""
    torch.manual_seed(0)
    return [
        VerifiedStepCopy(
            list(spans),
            drafted,
            torch.tensor([accepted for _, accepted in spans.values()], dtype=torch.int32),
            torch.tensor([start for start, _ in spans.values()]),
            torch.randint(VOCABULARY, (len(spans) * (GAMMA + 1),)),
            torch.randn(len(spans) * (GAMMA + 1), WIDTH).bfloat16(),
            torch.randint(VOCABULARY, (len(spans) * (GAMMA + 1), TOP), dtype=torch.int32),
            torch.randn(len(spans) * (GAMMA + 1), TOP),
            torch.randn(len(spans) * (GAMMA + 1), WIDTH).bfloat16(),
        )
        for spans in rounds
    ]


def going_on(rounds: int, accepted: int, start: int = 0) -> Iterator[tuple[int, int]]:
    for step in range(rounds):
        yield start + step * accepted, accepted


def row_of(
    position: int, request: str, verified_canvases: Sequence[VerifiedStepCopy]
) -> tuple[VerifiedStepCopy, int]:
    """The canvas and its row that hold a request's position, the newest one."""
    for canvas in reversed(verified_canvases):
        if request in canvas.request_ids:
            index = canvas.request_ids.index(request)
            into = position - int(canvas.starts[index])
            if 0 <= into < int(canvas.accepted[index]):
                return canvas, index * (GAMMA + 1) + into
    raise AssertionError(f"{position} of {request} was not given")


def check(signal: Signal, request: str, verified_canvases: Sequence[VerifiedStepCopy]) -> None:
    assert signal.final is not None
    for index in range(len(signal.tokens)):
        canvas, row = row_of(signal.start + index, request, verified_canvases)
        assert signal.tokens[index] == canvas.tokens[row]
        assert torch.equal(signal.features[index], canvas.features[row])
        assert canvas.final is not None
        assert torch.equal(signal.final[index], canvas.final[row])
        assert torch.equal(signal.top_logs[index], canvas.top_logs[row])
        assert torch.equal(signal.top_tokens[index], canvas.top_tokens[row])


@pytest.mark.parametrize("at_once", [1, 3, 40])
def test_positions_are_kept_one_by_one_however_many_rounds_are_read_at_once(at_once: int) -> None:
    one, two = going_on(40, 2, start=7), going_on(40, 3, start=100)
    verified_canvases = canvases([{"one": a, "two": b} for a, b in zip(one, two, strict=True)])
    runs = SignalRuns()
    for first in range(0, len(verified_canvases), at_once):
        assert runs.read(verified_canvases[first : first + at_once]) == []
    signals_by_start = {signal.start: signal for signal in runs.end_runs()}
    assert {start: len(signal.tokens) for start, signal in signals_by_start.items()} == {
        7: 80,
        100: 120,
    }
    check(signals_by_start[7], "one", verified_canvases)
    check(signals_by_start[100], "two", verified_canvases)
    assert runs.end_runs() == []


def test_a_run_is_over_at_its_length_and_the_next_begins_behind_it() -> None:
    verified_canvases = canvases([{"one": step} for step in going_on(180, 3)])
    runs = SignalRuns()
    signals = [*runs.read(verified_canvases), *runs.end_runs()]
    # 86 rounds of 3 are the first that come to a segment; the 8 after two of those are too few.
    assert [(s.start, len(s.tokens)) for s in signals] == [(0, 258), (258, 258)]
    assert SEGMENT_POSITIONS == 256
    for signal in signals:
        check(signal, "one", verified_canvases)


def test_a_request_that_leaves_or_comes_back_elsewhere_ends_its_run() -> None:
    steps = [{"one": step} for step in going_on(20, 2)]
    away = [{"two": step} for step in going_on(20, 2)]
    # Back where it was, and then four positions further on than it should be.
    back = [{"one": step} for step in going_on(20, 2, start=40)]
    jumped = [{"one": step} for step in going_on(20, 2, start=84)]
    verified_canvases = canvases([*steps, *away, *back, *jumped])
    runs = SignalRuns()
    finished_signals = runs.read(verified_canvases)
    assert [(s.start, len(s.tokens)) for s in finished_signals] == [(0, 40), (0, 40), (40, 40)]
    (last,) = runs.end_runs()
    assert (last.start, len(last.tokens)) == (84, 40)
    for signal, request in zip(
        [*finished_signals, last], ["one", "two", "one", "one"], strict=True
    ):
        check(signal, request, verified_canvases)


def test_what_is_too_short_is_no_signal() -> None:
    runs = SignalRuns()
    runs.read(canvases([{"one": step} for step in going_on(MIN_POSITIONS - 1, 1)]))
    assert runs.end_runs() == []
    runs.read(canvases([{"one": step} for step in going_on(MIN_POSITIONS, 1)]))
    assert len(runs.end_runs()) == 1


@pytest.mark.parametrize(("drafted", "accepted", "tried"), [(GAMMA, 40, 60), (0, 0, 0)])
def test_only_the_learners_own_drafts_are_counted(drafted: int, accepted: int, tried: int) -> None:
    """Two of three accepted in twenty rounds; the third's turn came too, and it was refused."""
    runs = SignalRuns()
    runs.read(canvases([{"one": step} for step in going_on(20, 3)], drafted))
    (signal,) = runs.end_runs()
    assert (signal.accepted, signal.tried) == (accepted, tried)


def test_of_whole_drafts_none_was_refused() -> None:
    runs = SignalRuns()
    runs.read(canvases([{"one": step} for step in going_on(20, GAMMA + 1)]))
    (signal,) = runs.end_runs()
    assert (signal.accepted, signal.tried) == (20 * GAMMA, 20 * GAMMA)


def test_a_request_that_must_not_be_drafted_for_is_passed_over() -> None:
    rounds = [{"one": a, "two": b} for a, b in zip(going_on(40, 2), going_on(40, 1), strict=True)]
    verified_canvases = [replace(canvas, undrafted_rows=(1,)) for canvas in canvases(rounds)]
    runs = SignalRuns()
    runs.read(verified_canvases)
    (signal,) = runs.end_runs()
    check(signal, "one", verified_canvases)
    assert (signal.accepted, signal.tried) == (40, 80)


def prompts(
    spans: Mapping[str, tuple[int, int]], unfinished: str = "", *, final: bool = True
) -> PromptCopy:
    """A prefill that reads (start, length) by request; a token is its position."""
    rows = [start + index for start, length in spans.values() for index in range(length)]
    tokens = torch.tensor(rows)
    return PromptCopy(
        list(spans),
        [start for start, _ in spans.values()],
        [length for _, length in spans.values()],
        frozenset({unfinished}),
        tokens,
        tokens[:, None].expand(-1, WIDTH).bfloat16(),
        tokens[:, None].expand(-1, WIDTH).bfloat16() if final else None,
    )


def rounds_of(*requests: str, start: int, count: int = 20) -> list[VerifiedStepCopy]:
    return canvases([dict.fromkeys(requests, step) for step in going_on(count, 2, start)])


def contexts(signals: Sequence[Signal]) -> list[tuple[int, int, int]]:
    """Each signal's start, positions of the prompt, and all positions."""
    return sorted((s.start, s.context, len(s.tokens)) for s in signals)


@pytest.mark.parametrize("at_once", [1, 40])
def test_a_run_begins_with_the_prompt_that_was_read_before_it(at_once: int) -> None:
    later = rounds_of("one", "two", start=30)
    all_canvases: list[VerifiedStepCopy | PromptCopy] = [
        prompts({"one": (0, 30), "two": (28, 2)}),
        *later,
    ]
    runs = SignalRuns()
    for first in range(0, len(all_canvases), at_once):
        assert runs.read(all_canvases[first : first + at_once]) == []
    signals = runs.end_runs()
    assert contexts(signals) == [(0, 30, 70), (28, 2, 42)]
    for signal in signals:
        assert signal.tokens[: signal.context].tolist() == list(range(signal.start, 30))
        assert torch.equal(
            signal.features[: signal.context, 0].long(), torch.arange(signal.start, 30)
        )
        assert signal.final is not None
        assert len(signal.final) == len(signal.tokens)
        assert len(signal.top_logs) == 40


def test_chunks_are_one_prompt_and_others_decode_between_them() -> None:
    decoding = rounds_of("one", start=5, count=2)
    runs = SignalRuns()
    runs.read([prompts({"one": (0, 5)}), decoding[0], prompts({"two": (0, 200)}, "two")])
    runs.read([decoding[1], prompts({"two": (200, 100)}), *rounds_of("two", start=300)])
    # Of a long prompt its end is kept, whatever its chunks.
    assert contexts(runs.end_runs()) == [
        (300 - PROMPT_POSITIONS, PROMPT_POSITIONS, PROMPT_POSITIONS + 40)
    ]


def test_a_prompt_that_does_not_end_where_verifying_begins_is_left_out() -> None:
    runs = SignalRuns()
    runs.read([prompts({"one": (0, 20)}), *rounds_of("one", start=30)])
    assert contexts(runs.end_runs()) == [(30, 0, 40)]
    # A chunk that was dropped: the rest of the prompt is what follows it.
    runs.read([prompts({"one": (0, 20)}, "one"), prompts({"one": (25, 5)})])
    runs.read(rounds_of("one", start=30))
    assert contexts(runs.end_runs()) == [(25, 5, 45)]


def test_prompts_of_requests_that_leave_are_not_kept() -> None:
    runs = SignalRuns()
    # One ended with its first token, one was aborted between its chunks.
    runs.read([prompts({"gone": (0, 20), "aborted": (0, 9)}, "aborted")])
    runs.read([prompts({"one": (0, 30)}), *rounds_of("one", start=30, count=1)])
    assert not runs._prompts


def test_a_request_that_is_retracted_comes_back_with_what_it_had_as_context() -> None:
    runs = SignalRuns()
    finished_signals = runs.read(
        [
            prompts({"one": (0, 10)}),
            *rounds_of("one", start=10),
            *rounds_of("two", start=0, count=1),
        ]
    )
    assert contexts(finished_signals) == [(0, 10, 50)]
    runs.read([prompts({"one": (0, 50)}), *rounds_of("one", start=50)])
    assert contexts(runs.end_runs()) == [(0, 50, 90)]
