"""What is kept of the last verified positions of each request."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from engine_shim.sglang.learning.verified_step import Verification
from engine_shim.sglang.learning.windows import LEAST, Readback, WeightChanges, Windows
from engine_shim.sglang.training.exchange import RingShape, SharedTensors, read_round
from engine_shim.sglang.training.online import Round

VOCABULARY, WIDTH, LENGTH, TOP, MOST, CANVAS = 50, 6, 12, 5, 4, 9


class Steps:
    """Verified steps of requests whose tokens are their positions plus 1000 times their number."""

    def __init__(self, shape: RingShape | None = None) -> None:
        shape = shape or shape_of(LENGTH)
        self.lengths: dict[str, int] = {}
        self._readback = Readback(shape, CANVAS, None)

    def step(
        self,
        windows: Windows,
        gamma: int,
        accepted: dict[str, int],
        undrafted: tuple[int, ...] = (),
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
        verified = Verification(batch, result, features, undrafted=undrafted)
        kept = windows.reserve(verified.request_ids, undrafted)
        self._readback.put(verified, kept, WeightChanges())
        [found] = self._readback.taken()
        ready = windows.add(found)
        for rid, count in accepted.items():
            self.lengths[rid] += count
        return ready, logits


def shape_of(length: int) -> RingShape:
    return RingShape(MOST, length + CANVAS, WIDTH, TOP)


class Copy:
    """The trainer's copy of the rings."""

    def __init__(self, shape: RingShape) -> None:
        self.tensors = {
            # What nobody has written is no number.
            name: torch.full(layout.shape, float("nan")).to(getattr(torch, layout.dtype))
            for name, layout in shape.layouts().items()
        }

    def round(self, windows: Windows, gamma: int) -> Round | None:
        requests = windows.write(self.tensors, gamma)
        return read_round(self.tensors, requests) if requests else None


@pytest.fixture
def windows() -> Windows:
    return Windows(shape_of(LENGTH), LENGTH)


@pytest.fixture
def copy() -> Copy:
    return Copy(shape_of(LENGTH))


def test_a_round_is_the_window_and_behind_it_the_whole_canvas(windows: Windows, copy: Copy) -> None:
    engine = Steps()
    for count in (2, 4, 1, 3):
        # Fewer than LEAST positions lie before each of these.
        assert not engine.step(windows, 3, {"7": count})[0]
    ready, logits = engine.step(windows, 3, {"7": 1})
    assert ready
    found = copy.round(windows, 3)
    assert found is not None
    # 10 positions were gained before, and 4 are verified now, of which 1 counts.
    expected = torch.arange(100, 114)
    assert torch.equal(found.positions[0], expected)
    assert torch.equal(found.tokens[0], expected + 7000)
    assert torch.equal(found.features[0], expected[:, None].expand(-1, WIDTH).float())
    assert found.valid.all()
    assert found.taught.all()
    logs = functional.log_softmax(logits, dim=-1).topk(TOP, dim=-1)
    torch.testing.assert_close(found.top_logs[0, -4:], logs.values)
    assert torch.equal(found.top_tokens[0, -4:], logs.indices)


def test_rejected_positions_are_taught_once_and_then_gone(windows: Windows, copy: Copy) -> None:
    engine = Steps()
    for _ in range(LEAST + 2):
        engine.step(windows, 3, {"7": 1})
    found = copy.round(windows, 3)
    assert found is not None
    # Of each earlier canvas of 4 only the first token is left.
    assert torch.equal(found.positions[0], torch.arange(100, 100 + LEAST + 1 + 4))
    # Their place is taken by what was verified there later, in the trainer's copy as well.
    _, logits = engine.step(windows, 3, {"7": 1})
    found = copy.round(windows, 3)
    assert found is not None
    logs = functional.log_softmax(logits, dim=-1).topk(TOP, dim=-1)
    torch.testing.assert_close(found.top_logs[0, -4:], logs.values)


def test_a_window_keeps_its_newest_positions(windows: Windows, copy: Copy) -> None:
    engine = Steps()
    for _ in range(10):
        engine.step(windows, 3, {"7": 3})
    found = copy.round(windows, 3)
    assert found is not None
    start = 100 + 27 - LENGTH
    assert torch.equal(found.positions[0], torch.arange(start, start + LENGTH + 4))


def test_a_round_after_many_steps_has_every_position_in_its_place(
    windows: Windows, copy: Copy
) -> None:
    """The rings begin anew several times, with rounds at odd moments and long pauses."""
    engine, draws = Steps(), random.Random(5)
    for step in range(300):
        gamma = draws.choice((0, 1, 3, CANVAS - 1))
        gains = {rid: draws.randint(1, gamma + 1) for rid in ("7", "8", "9")[: 1 + step // 100]}
        engine.step(windows, gamma, gains)
        if draws.random() < (0.02 if 100 < step < 200 else 0.5):
            found = copy.round(windows, gamma)
            if found is None:
                continue
            numbers = found.tokens // 1000
            positions = torch.where(found.valid, found.positions, 0)
            assert torch.equal(found.tokens, positions + 1000 * numbers)
            assert torch.equal(found.features[..., 0], positions.float())
            ends = {engine.lengths[rid] - gain + gamma for rid, gain in gains.items()}
            assert set(found.positions[:, -1].tolist()) <= ends
            # A window without a gap.
            assert (found.valid.sum(1) <= LENGTH + gamma + 1).all()


def test_requests_of_different_length_lie_right_aligned(windows: Windows, copy: Copy) -> None:
    engine = Steps()
    for _ in range(3):
        engine.step(windows, 3, {"7": 4})
    for _ in range(4):
        engine.step(windows, 3, {"7": 4, "8": 2})
    engine.step(windows, 3, {"7": 1, "8": 1})
    found = copy.round(windows, 3)
    assert found is not None
    assert found.tokens.shape == (2, LENGTH + 4)
    counts = found.valid.sum(1).tolist()
    assert sorted(counts) == [8 + 4, 16]
    short = counts.index(12)
    assert not found.valid[short, :4].any()
    assert not found.taught[short, :4].any()
    assert (found.tokens[short, :4] == 0).all()
    assert (found.features[short, :4] == 0).all()
    assert found.positions[short, -1] == 100 + 8 + 3


def test_a_request_whose_steps_were_not_seen_begins_anew(windows: Windows, copy: Copy) -> None:
    engine = Steps()
    ready = [engine.step(windows, 3, {"7": 1})[0] for _ in range(LEAST + 1)]
    assert ready == [False] * LEAST + [True]
    assert copy.round(windows, 3) is not None
    # It slept, was retracted, or was decoded without speculation for a while.
    engine.lengths["7"] += 5
    assert not engine.step(windows, 3, {"7": 1})[0]
    assert copy.round(windows, 3) is None
    for _ in range(LEAST):
        engine.step(windows, 3, {"7": 1})
    found = copy.round(windows, 3)
    assert found is not None
    first = 100 + LEAST + 1 + 5
    assert torch.equal(found.tokens[0], 7000 + torch.arange(first, first + LEAST + 4))


def test_only_requests_of_the_newest_step_are_learnt_from(windows: Windows, copy: Copy) -> None:
    engine = Steps()
    for _ in range(LEAST + 1):
        engine.step(windows, 3, {"7": 1, "8": 1})
    engine.step(windows, 3, {"8": 1})
    found = copy.round(windows, 3)
    assert found is not None
    assert found.tokens[:, -1].tolist() == [8000 + engine.lengths["8"] - 1 + 3]


def test_no_more_requests_are_kept_than_there_are_rings(windows: Windows, copy: Copy) -> None:
    engine = Steps()
    many = [str(number) for number in range(10, 16)]
    for _ in range(LEAST + 1):
        engine.step(windows, 3, dict.fromkeys(many, 1))
    found = copy.round(windows, 3)
    assert found is not None
    assert (found.tokens[:, -1] // 1000).tolist() == [10, 11, 12, 13]
    # Those that wait get the rings of those that have left, and no one else's.
    for _ in range(LEAST + 1):
        engine.step(windows, 3, dict.fromkeys(many[1:], 1))
    found = copy.round(windows, 3)
    assert found is not None
    assert sorted((found.tokens[:, -1] // 1000).tolist()) == [11, 12, 13, 14]
    for number in range(400):
        engine.step(windows, 1, {str(number): 1})
    windows.clear()
    assert copy.round(windows, 1) is None


def test_steps_of_other_draft_lengths_extend_the_window_too(windows: Windows, copy: Copy) -> None:
    engine = Steps()
    for _ in range(6):
        engine.step(windows, 0, {"7": 1})
    engine.step(windows, 5, {"7": 4})
    ready, _ = engine.step(windows, 1, {"7": 2})
    assert ready
    found = copy.round(windows, 1)
    assert found is not None
    assert torch.equal(found.positions[0], torch.arange(100, 112))


def test_hidden_states_are_kept_in_their_own_type_and_taught_in_float32() -> None:
    shape = replace(shape_of(LENGTH), dtype="bfloat16")
    windows, engine = Windows(shape, LENGTH), Steps(shape)
    shared = SharedTensors(shape.layouts())
    for _ in range(LEAST + 1):
        engine.step(windows, 3, {"7": 1})
    found = read_round(shared.tensors, windows.write(shared.tensors, 3))
    assert shared.tensors["features"].dtype is torch.bfloat16
    assert found.features.dtype is torch.float32
    positions = found.positions[0].bfloat16().float()
    assert torch.equal(found.features[0], positions[:, None].expand(-1, WIDTH))


def test_a_canvas_without_room_is_an_error_and_not_a_wrong_round(windows: Windows) -> None:
    with pytest.raises(ValueError, match="a step of 10 positions does not fit"):
        Steps().step(windows, CANVAS, {"7": 1})


class Moved(TorchDispatchMode):
    """Counts the numbers that operators write, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(
        self, operator: Any, _: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        found = operator(*arguments, **(named or {}))
        if operator in {torch.ops.aten.index_put_.default, torch.ops.aten._index_put_impl_.default}:
            self.numbers += arguments[2].numel()
        elif operator is torch.ops.aten.copy_.default:
            self.numbers += arguments[0].numel()
        elif not operator.is_view:
            made = found if isinstance(found, list | tuple) else (found,)
            self.numbers += sum(part.numel() for part in made if isinstance(part, torch.Tensor))
        return found


def moved_by(length: int) -> tuple[list[int], list[int]]:
    """Numbers that full windows of that length move, step by step and round by round."""
    windows, copy, engine = Windows(shape_of(length), length), Copy(shape_of(length)), Steps()
    gains = {"7": 3, "8": 2}
    for _ in range(length):
        engine.step(windows, 3, gains)
        copy.round(windows, 3)
    steps, rounds = [], []
    for _ in range(20):
        with Moved() as step:
            engine.step(windows, 3, gains)
        with Moved() as written:
            windows.write(copy.tensors, 3)
        steps.append(step.numbers)
        rounds.append(written.numbers)
    return steps, rounds


def test_the_work_of_a_step_and_of_a_round_does_not_grow_with_the_window() -> None:
    assert moved_by(12) == moved_by(1200)


def test_a_request_that_must_not_be_drafted_for_is_no_part_of_a_round(
    windows: Windows, copy: Copy
) -> None:
    engine = Steps()
    for _ in range(LEAST):
        assert not engine.step(windows, 3, {"7": 2}, undrafted=(0,))[0]
    for _ in range(LEAST):
        engine.step(windows, 3, {"7": 2, "8": 2}, undrafted=(0,))
    found = copy.round(windows, 3)
    assert found is not None
    assert found.tokens[:, -1].div(1000, rounding_mode="floor").tolist() == [8]
