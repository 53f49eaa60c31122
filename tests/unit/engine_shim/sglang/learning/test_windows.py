"""What is kept of the last verified positions of each request."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from engine_shim.sglang.learning.verified_step import Verification
from engine_shim.sglang.learning.windows import LEAST, Windows

VOCABULARY, WIDTH, LENGTH, TOP, MOST = 50, 6, 12, 5, 4


class Engine:
    """Verified steps of requests whose tokens are their positions plus 1000 times their number."""

    def __init__(self) -> None:
        self.lengths: dict[str, int] = {}

    def step(
        self, windows: Windows, gamma: int, accepted: dict[str, int]
    ) -> tuple[bool, torch.Tensor]:
        """accepted: tokens that each running request gains.  Returns the logits as well."""
        width = gamma + 1
        starts = [self.lengths.setdefault(rid, 100) for rid in accepted]
        positions = torch.tensor(starts)[:, None] + torch.arange(width)
        numbers = torch.tensor([int(rid) for rid in accepted])[:, None]
        logits = torch.randn(len(accepted) * width, VOCABULARY)
        batch: Any = SimpleNamespace(
            reqs=[SimpleNamespace(rid=rid) for rid in accepted],
            seq_lens=torch.tensor(starts),
            spec_info=SimpleNamespace(draft_token=(positions + 1000 * numbers).flatten()),
        )
        features = positions.flatten()[:, None].expand(-1, WIDTH).float()
        result: Any = SimpleNamespace(
            logits_output=SimpleNamespace(next_token_logits=logits),
            accept_lens=torch.tensor(list(accepted.values())),
        )
        ready = windows.add(Verification(batch, result, features), starts, list(accepted.values()))
        for rid, count in accepted.items():
            self.lengths[rid] += count
        return ready, logits


def room() -> dict[str, torch.Tensor]:
    size = (MOST, LENGTH + 9)
    tensors = {
        "tokens": torch.empty(size, dtype=torch.int64),
        "features": torch.empty(*size, WIDTH),
        "top_tokens": torch.empty(*size, TOP, dtype=torch.int64),
        "top_logs": torch.empty(*size, TOP),
        "taught": torch.empty(size, dtype=torch.bool),
        "valid": torch.empty(size, dtype=torch.bool),
        "positions": torch.empty(size, dtype=torch.int64),
    }
    for tensor in tensors.values():
        tensor.fill_(1)  # what an earlier round has left
    return tensors


@pytest.fixture
def windows() -> Windows:
    return Windows(LENGTH, TOP)


def test_a_round_is_the_window_and_behind_it_the_whole_canvas(windows: Windows) -> None:
    engine = Engine()
    for count in (2, 4, 1, 3):
        # Fewer than LEAST positions lie before each of these.
        assert not engine.step(windows, 3, {"7": count})[0]
    ready, logits = engine.step(windows, 3, {"7": 1})
    assert ready
    tensors = room()
    assert windows.write(tensors, MOST, 3) == (1, 10 + 4)
    # 10 positions were gained before, and 4 are verified now, of which 1 counts.
    expected = torch.arange(100, 114)
    assert torch.equal(tensors["positions"][0, -14:], expected)
    assert torch.equal(tensors["tokens"][0, -14:], expected + 7000)
    assert torch.equal(tensors["features"][0, -14:, 2], expected.float())
    assert tensors["valid"][0, -14:].all()
    assert tensors["taught"][0, -14:].all()
    logs = functional.log_softmax(logits, dim=-1).topk(TOP, dim=-1)
    torch.testing.assert_close(tensors["top_logs"][0, -4:], logs.values)
    assert torch.equal(tensors["top_tokens"][0, -4:], logs.indices)


def test_rejected_positions_are_taught_once_and_then_gone(windows: Windows) -> None:
    engine = Engine()
    for _ in range(LEAST + 2):
        engine.step(windows, 3, {"7": 1})
    tensors = room()
    requests, positions = windows.write(tensors, MOST, 3)
    assert requests == 1
    found = tensors["positions"][0, -positions:]
    assert torch.equal(found, torch.arange(100, 100 + positions))
    # Of each earlier canvas of 4 only the first token is left.
    assert positions == LEAST + 1 + 4


def test_a_window_keeps_its_newest_positions(windows: Windows) -> None:
    engine = Engine()
    for _ in range(10):
        engine.step(windows, 3, {"7": 3})
    tensors = room()
    assert windows.write(tensors, MOST, 3) == (1, LENGTH + 4)
    start = 100 + 27 - LENGTH
    assert torch.equal(tensors["positions"][0, -16:], torch.arange(start, start + 16))


def test_requests_of_different_length_lie_right_aligned(windows: Windows) -> None:
    engine = Engine()
    for _ in range(3):
        engine.step(windows, 3, {"7": 4})
    for _ in range(4):
        engine.step(windows, 3, {"7": 4, "8": 2})
    engine.step(windows, 3, {"7": 1, "8": 1})
    tensors = room()
    assert windows.write(tensors, MOST, 3) == (2, LENGTH + 4)
    counts = tensors["valid"][:2, -16:].sum(1).tolist()
    assert sorted(counts) == [8 + 4, 16]
    short = counts.index(12)
    assert not tensors["valid"][short, -16:-12].any()
    assert not tensors["taught"][short, -16:-12].any()
    assert (tensors["tokens"][short, -16:-12] == 0).all()
    assert tensors["positions"][short, -1] == 100 + 8 + 3


def test_a_request_whose_steps_were_not_seen_begins_anew(windows: Windows) -> None:
    engine = Engine()
    ready = [engine.step(windows, 3, {"7": 1})[0] for _ in range(LEAST + 1)]
    assert ready == [False] * LEAST + [True]
    # It slept, was retracted, or was decoded without speculation for a while.
    engine.lengths["7"] += 5
    assert not engine.step(windows, 3, {"7": 1})[0]
    assert windows.write(room(), MOST, 3) == (0, 0)


def test_only_requests_of_the_newest_step_are_learnt_from(windows: Windows) -> None:
    engine = Engine()
    for _ in range(LEAST + 1):
        engine.step(windows, 3, {"7": 1, "8": 1})
    engine.step(windows, 3, {"8": 1})
    tensors = room()
    assert windows.write(tensors, MOST, 3)[0] == 1
    assert tensors["tokens"][0, -1] == 8000 + engine.lengths["8"] - 1 + 3
    # No more than there is room for.
    for _ in range(LEAST + 1):
        engine.step(windows, 3, {str(i): 1 for i in range(10, 16)})
    assert windows.write(tensors, MOST, 3)[0] == MOST


def test_steps_of_other_draft_lengths_extend_the_window_too(windows: Windows) -> None:
    engine = Engine()
    for _ in range(6):
        engine.step(windows, 0, {"7": 1})
    engine.step(windows, 5, {"7": 4})
    ready, _ = engine.step(windows, 1, {"7": 2})
    assert ready
    tensors = room()
    assert windows.write(tensors, MOST, 1) == (1, 10 + 2)
    assert torch.equal(tensors["positions"][0, -12:], torch.arange(100, 112))


def test_windows_of_requests_that_left_do_not_pile_up(windows: Windows) -> None:
    engine = Engine()
    for number in range(400):
        engine.step(windows, 1, {str(number): 1})
    assert len(windows._windows) <= 256
    windows.clear()
    assert not windows._windows
