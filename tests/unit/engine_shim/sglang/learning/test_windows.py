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
from engine_shim.sglang.learning.windows import (
    MIN_WINDOW_POSITIONS,
    Readback,
    RequestWindows,
    WeightChanges,
)
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
        windows: RequestWindows,
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
        kept = windows.reserve_rings(verified.request_ids, undrafted)
        self._readback.put(verified, kept, WeightChanges())
        [host_round] = self._readback.arrived_rounds()
        ready = windows.add_round(host_round)
        for rid, count in accepted.items():
            self.lengths[rid] += count
        return ready, logits


def shape_of(length: int) -> RingShape:
    return RingShape(MOST, length + CANVAS, WIDTH, TOP)


class Copy:
    """The trainer's copy of the rings."""

    def __init__(self, shape: RingShape) -> None:
        self.tensors = {
            # Unwritten memory is NaN.
            name: torch.full(layout.shape, float("nan")).to(getattr(torch, layout.dtype))
            for name, layout in shape.layouts().items()
        }

    def round(self, windows: RequestWindows, gamma: int) -> Round | None:
        requests = windows.write_round(self.tensors, gamma)
        return read_round(self.tensors, requests) if requests else None


@pytest.fixture
def windows() -> RequestWindows:
    return RequestWindows(shape_of(LENGTH), LENGTH)


@pytest.fixture
def copy() -> Copy:
    return Copy(shape_of(LENGTH))


def test_a_round_is_the_window_and_behind_it_the_whole_canvas(
    windows: RequestWindows, copy: Copy
) -> None:
    engine = Steps()
    for count in (2, 4, 1, 3):
        # Fewer than LEAST positions lie before each of these.
        assert not engine.step(windows, 3, {"7": count})[0]
    ready, logits = engine.step(windows, 3, {"7": 1})
    assert ready
    training_round = copy.round(windows, 3)
    assert training_round is not None
    # 10 positions were gained before, and 4 are verified now, of which 1 counts.
    expected = torch.arange(100, 114)
    assert torch.equal(training_round.positions[0], expected)
    assert torch.equal(training_round.tokens[0], expected + 7000)
    assert torch.equal(training_round.features[0], expected[:, None].expand(-1, WIDTH).float())
    assert training_round.valid.all()
    assert training_round.has_target.all()
    logs = functional.log_softmax(logits, dim=-1).topk(TOP, dim=-1)
    torch.testing.assert_close(training_round.top_logs[0, -4:], logs.values)
    assert torch.equal(training_round.top_tokens[0, -4:], logs.indices)


def test_rejected_positions_are_taught_once_and_then_gone(
    windows: RequestWindows, copy: Copy
) -> None:
    engine = Steps()
    for _ in range(MIN_WINDOW_POSITIONS + 2):
        engine.step(windows, 3, {"7": 1})
    training_round = copy.round(windows, 3)
    assert training_round is not None
    # Of each earlier canvas of 4 only the first token is left.
    assert torch.equal(
        training_round.positions[0], torch.arange(100, 100 + MIN_WINDOW_POSITIONS + 1 + 4)
    )
    # Their place is taken by what was verified there later, in the trainer's copy as well.
    _, logits = engine.step(windows, 3, {"7": 1})
    training_round = copy.round(windows, 3)
    assert training_round is not None
    logs = functional.log_softmax(logits, dim=-1).topk(TOP, dim=-1)
    torch.testing.assert_close(training_round.top_logs[0, -4:], logs.values)


def test_a_window_keeps_its_newest_positions(windows: RequestWindows, copy: Copy) -> None:
    engine = Steps()
    for _ in range(10):
        engine.step(windows, 3, {"7": 3})
    training_round = copy.round(windows, 3)
    assert training_round is not None
    start = 100 + 27 - LENGTH
    assert torch.equal(training_round.positions[0], torch.arange(start, start + LENGTH + 4))


def test_a_round_after_many_steps_has_every_position_in_its_place(
    windows: RequestWindows, copy: Copy
) -> None:
    """The rings restart several times, with rounds at odd moments and long pauses."""
    engine, draws = Steps(), random.Random(5)
    for step in range(300):
        gamma = draws.choice((0, 1, 3, CANVAS - 1))
        gains = {rid: draws.randint(1, gamma + 1) for rid in ("7", "8", "9")[: 1 + step // 100]}
        engine.step(windows, gamma, gains)
        if draws.random() < (0.02 if 100 < step < 200 else 0.5):
            training_round = copy.round(windows, gamma)
            if training_round is None:
                continue
            numbers = training_round.tokens // 1000
            positions = torch.where(training_round.valid, training_round.positions, 0)
            assert torch.equal(training_round.tokens, positions + 1000 * numbers)
            assert torch.equal(training_round.features[..., 0], positions.float())
            ends = {engine.lengths[rid] - gain + gamma for rid, gain in gains.items()}
            assert set(training_round.positions[:, -1].tolist()) <= ends
            # A window without a gap.
            assert (training_round.valid.sum(1) <= LENGTH + gamma + 1).all()


def test_requests_of_different_length_lie_right_aligned(
    windows: RequestWindows, copy: Copy
) -> None:
    engine = Steps()
    for _ in range(3):
        engine.step(windows, 3, {"7": 4})
    for _ in range(4):
        engine.step(windows, 3, {"7": 4, "8": 2})
    engine.step(windows, 3, {"7": 1, "8": 1})
    training_round = copy.round(windows, 3)
    assert training_round is not None
    assert training_round.tokens.shape == (2, LENGTH + 4)
    counts = training_round.valid.sum(1).tolist()
    assert sorted(counts) == [8 + 4, 16]
    short = counts.index(12)
    assert not training_round.valid[short, :4].any()
    assert not training_round.has_target[short, :4].any()
    assert (training_round.tokens[short, :4] == 0).all()
    assert (training_round.features[short, :4] == 0).all()
    assert training_round.positions[short, -1] == 100 + 8 + 3


def test_a_request_whose_steps_were_not_seen_begins_anew(
    windows: RequestWindows, copy: Copy
) -> None:
    engine = Steps()
    ready = [engine.step(windows, 3, {"7": 1})[0] for _ in range(MIN_WINDOW_POSITIONS + 1)]
    assert ready == [False] * MIN_WINDOW_POSITIONS + [True]
    assert copy.round(windows, 3) is not None
    # It slept, was retracted, or was decoded without speculation for a while.
    engine.lengths["7"] += 5
    assert not engine.step(windows, 3, {"7": 1})[0]
    assert copy.round(windows, 3) is None
    for _ in range(MIN_WINDOW_POSITIONS):
        engine.step(windows, 3, {"7": 1})
    training_round = copy.round(windows, 3)
    assert training_round is not None
    first = 100 + MIN_WINDOW_POSITIONS + 1 + 5
    assert torch.equal(
        training_round.tokens[0], 7000 + torch.arange(first, first + MIN_WINDOW_POSITIONS + 4)
    )


def test_only_requests_of_the_newest_step_are_learnt_from(
    windows: RequestWindows, copy: Copy
) -> None:
    engine = Steps()
    for _ in range(MIN_WINDOW_POSITIONS + 1):
        engine.step(windows, 3, {"7": 1, "8": 1})
    engine.step(windows, 3, {"8": 1})
    training_round = copy.round(windows, 3)
    assert training_round is not None
    assert training_round.tokens[:, -1].tolist() == [8000 + engine.lengths["8"] - 1 + 3]


def test_no_more_requests_are_kept_than_there_are_rings(
    windows: RequestWindows, copy: Copy
) -> None:
    engine = Steps()
    many = [str(number) for number in range(10, 16)]
    for _ in range(MIN_WINDOW_POSITIONS + 1):
        engine.step(windows, 3, dict.fromkeys(many, 1))
    training_round = copy.round(windows, 3)
    assert training_round is not None
    assert (training_round.tokens[:, -1] // 1000).tolist() == [10, 11, 12, 13]
    # Those that wait get the rings of those that have left, and no others.
    for _ in range(MIN_WINDOW_POSITIONS + 1):
        engine.step(windows, 3, dict.fromkeys(many[1:], 1))
    training_round = copy.round(windows, 3)
    assert training_round is not None
    assert sorted((training_round.tokens[:, -1] // 1000).tolist()) == [11, 12, 13, 14]
    for number in range(400):
        engine.step(windows, 1, {str(number): 1})
    windows.clear()
    assert copy.round(windows, 1) is None


def test_steps_of_other_draft_lengths_extend_the_window_too(
    windows: RequestWindows, copy: Copy
) -> None:
    engine = Steps()
    for _ in range(6):
        engine.step(windows, 0, {"7": 1})
    engine.step(windows, 5, {"7": 4})
    ready, _ = engine.step(windows, 1, {"7": 2})
    assert ready
    training_round = copy.round(windows, 1)
    assert training_round is not None
    assert torch.equal(training_round.positions[0], torch.arange(100, 112))


def test_hidden_states_are_kept_in_their_own_type_and_taught_in_float32() -> None:
    shape = replace(shape_of(LENGTH), dtype="bfloat16")
    windows, engine = RequestWindows(shape, LENGTH), Steps(shape)
    shared = SharedTensors(shape.layouts())
    for _ in range(MIN_WINDOW_POSITIONS + 1):
        engine.step(windows, 3, {"7": 1})
    training_round = read_round(shared.tensors, windows.write_round(shared.tensors, 3))
    assert shared.tensors["features"].dtype is torch.bfloat16
    assert training_round.features.dtype is torch.float32
    positions = training_round.positions[0].bfloat16().float()
    assert torch.equal(training_round.features[0], positions[:, None].expand(-1, WIDTH))


def test_a_canvas_without_room_is_an_error_and_not_a_wrong_round(windows: RequestWindows) -> None:
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
        output = operator(*arguments, **(named or {}))
        if operator in {torch.ops.aten.index_put_.default, torch.ops.aten._index_put_impl_.default}:
            self.numbers += arguments[2].numel()
        elif operator is torch.ops.aten.copy_.default:
            self.numbers += arguments[0].numel()
        elif not operator.is_view:
            outputs = output if isinstance(output, list | tuple) else (output,)
            self.numbers += sum(part.numel() for part in outputs if isinstance(part, torch.Tensor))
        return output


def moved_by(length: int) -> tuple[list[int], list[int]]:
    """Numbers that full windows of that length move, step by step and round by round."""
    windows, copy, engine = (
        RequestWindows(shape_of(length), length),
        Copy(shape_of(length)),
        Steps(),
    )
    gains = {"7": 3, "8": 2}
    for _ in range(length):
        engine.step(windows, 3, gains)
        copy.round(windows, 3)
    steps, rounds = [], []
    for _ in range(20):
        with Moved() as step:
            engine.step(windows, 3, gains)
        with Moved() as written:
            windows.write_round(copy.tensors, 3)
        steps.append(step.numbers)
        rounds.append(written.numbers)
    return steps, rounds


def test_the_work_of_a_step_and_of_a_round_does_not_grow_with_the_window() -> None:
    assert moved_by(12) == moved_by(1200)


def test_a_request_that_must_not_be_drafted_for_is_no_part_of_a_round(
    windows: RequestWindows, copy: Copy
) -> None:
    engine = Steps()
    for _ in range(MIN_WINDOW_POSITIONS):
        assert not engine.step(windows, 3, {"7": 2}, undrafted=(0,))[0]
    for _ in range(MIN_WINDOW_POSITIONS):
        engine.step(windows, 3, {"7": 2, "8": 2}, undrafted=(0,))
    training_round = copy.round(windows, 3)
    assert training_round is not None
    assert training_round.tokens[:, -1].div(1000, rounding_mode="floor").tolist() == [8]
