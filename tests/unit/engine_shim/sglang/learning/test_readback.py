"""Steps on their way to the host, at once and late."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_shim.sglang.api import transfer
from engine_shim.sglang.learning.verified_step import Verification
from engine_shim.sglang.learning.windows import HostRound, Readback, WeightChanges
from engine_shim.sglang.training.exchange import RingShape
from tests.support import late_copies

WIDTH, TOP, VOCABULARY, GAMMA, ASKS = 6, 5, 50, 3, 3
SHAPE = RingShape(4, 40, WIDTH, TOP)
CPU = torch.device("cpu")


def step(number: int, requests: int = 3, *, by_learner: bool = True) -> Verification:
    """Everything in it says which step it is."""
    rows = requests * (GAMMA + 1)
    batch: Any = SimpleNamespace(
        reqs=[SimpleNamespace(rid=str(row)) for row in range(requests)],
        seq_lens=torch.arange(requests, dtype=torch.int32) + 100 * number,
        spec_info=SimpleNamespace(draft_token=torch.arange(rows) + 1000 * number),
    )
    logits = torch.arange(VOCABULARY).float().expand(rows, -1) * (0.1 / number)
    result: Any = SimpleNamespace(
        logits_output=SimpleNamespace(next_token_logits=logits),
        accept_lens=torch.full((requests,), number, dtype=torch.int32),
    )
    return Verification(batch, result, torch.full((rows, WIDTH), float(number)), by_learner)


def overwrite(verification: Verification) -> None:
    """What SGLang does with its buffers in the steps that follow, and with its lists."""
    for part in (
        verification.tokens,
        verification.logits,
        verification.result.accept_lens,
        verification.batch.seq_lens,
    ):
        part.fill_(0)
    verification.features.fill_(0)
    verification.batch.reqs.clear()


def check(host_round: HostRound, number: int, kept: list[int]) -> None:
    assert host_round.facts.request_ids == ["0", "1", "2"]
    assert host_round.facts.weight_changes == WeightChanges(updates=number)
    assert host_round.facts.gamma == GAMMA
    assert host_round.accepted == [number] * 3
    assert host_round.starts == [100 * number + row for row in range(3)]
    assert host_round.rows is not None
    tokens, features, top_tokens, top_logs = host_round.rows
    expected = torch.arange(3 * (GAMMA + 1)).view(3, -1)[kept] + 1000 * number
    assert torch.equal(tokens, expected)
    assert features.eq(number).all()
    assert features.shape == (len(kept), GAMMA + 1, WIDTH)
    assert top_tokens[..., 0].eq(VOCABULARY - 1).all()
    assert top_logs[..., 0].lt(0).all()


@pytest.fixture(params=[0, ASKS], ids=["at once", "late"])
def asks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    extra_asks: int = request.param
    if extra_asks:
        late_copies.install(extra_asks, monkeypatch.setattr)
    return extra_asks


@pytest.fixture
def readback(asks: int) -> Readback:
    return Readback(SHAPE, GAMMA + 1, transfer.make_side_stream(CPU))


@pytest.mark.parametrize("kept", [[0, 1, 2], [2, 0]], ids=["all", "some"])
def test_a_step_arrives_as_it_was_verified(readback: Readback, asks: int, kept: list[int]) -> None:
    arrived: list[int] = []
    for number in range(1, 9):
        step_verification = step(number)
        readback.put(step_verification, kept, WeightChanges(updates=number))
        for one in readback.arrived_rounds():
            check(one, one.facts.weight_changes.updates, kept)
            arrived.append(one.facts.weight_changes.updates)
        if asks:
            # On a CPU nothing is left of the step by now.
            overwrite(step_verification)
    # The event is asked for once with the step itself.
    late_step_count = max(0, asks - 1)
    assert arrived == list(range(1, 9 - late_step_count))
    assert readback.dropped == 0


def test_without_rows_it_tells_the_lengths(readback: Readback) -> None:
    readback.put(step(4), [], WeightChanges())
    host_rounds = [one for _ in range(ASKS) for one in readback.arrived_rounds()]
    assert [(one.accepted, one.rows) for one in host_rounds] == [([4, 4, 4], None)]


@pytest.mark.parametrize(
    ("gamma", "by_learner", "drafted"),
    [(GAMMA, True, True), (GAMMA, False, False)],
)
def test_it_says_whether_the_learner_drafted(
    readback: Readback, gamma: int, by_learner: bool, drafted: bool
) -> None:
    readback.put(step(1, by_learner=by_learner), [], WeightChanges())
    (host_round,) = (one for _ in range(ASKS) for one in readback.arrived_rounds())
    assert host_round.facts.is_by_learner is drafted


def test_a_step_that_finds_no_room_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    late_copies.install(1000, monkeypatch.setattr)
    readback = Readback(SHAPE, GAMMA + 1, transfer.make_side_stream(CPU))
    for number in range(1, 8):
        readback.put(step(number), [0], WeightChanges())
    assert readback.dropped == 3
    assert list(readback.arrived_rounds()) == []


def test_room_that_was_read_is_used_again(readback: Readback, asks: int) -> None:
    def put(number: int) -> None:
        readback.put(step(number), [1], WeightChanges(updates=number))

    seen = drain(readback, put, 40)
    assert seen == list(range(1, len(seen) + 1))
    assert len(seen) > 40 - max(1, asks)
    assert readback.dropped == 0


def drain(readback: Readback, put: Callable[[int], None], count: int) -> list[int]:
    seen: list[int] = []
    for number in range(1, count + 1):
        put(number)
        for one in readback.arrived_rounds():
            check(one, number=one.facts.weight_changes.updates, kept=[1])
            seen.append(one.facts.weight_changes.updates)
    return seen


@pytest.mark.parametrize("kept", [[0, 1, 2], [2, 0], []], ids=["all", "some", "none"])
def test_nothing_goes_by_way_of_pageable_memory(
    monkeypatch: pytest.MonkeyPatch, kept: list[int]
) -> None:
    """A CUDA device would make torch do that for parts that are not contiguous, and wait."""
    late_copies.install(ASKS, monkeypatch.setattr)
    seen: list[torch.Tensor] = []
    original = transfer.SideStream.copy

    def copy(side: transfer.SideStream, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        seen.extend(part for pair in pairs for part in pair)
        return original(side, pairs)

    monkeypatch.setattr(transfer.SideStream, "copy", copy)
    readback = Readback(SHAPE, GAMMA + 1, transfer.make_side_stream(CPU))
    readback.put(step(1), kept, WeightChanges())
    assert len(seen) == (10 if kept else 2)
    assert all(part.is_contiguous() for part in seen)
