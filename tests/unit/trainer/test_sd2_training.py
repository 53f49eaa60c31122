"""How SD2 drafters are trained: rates, offsets, what learns, and what ends a training."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from engine_shim.sglang.training.blocks import LLAMA
from tests.support.training_rounds import LAYERS, SHAPE, make_target
from trainer.sd2 import (
    DivergedError,
    OffsetMode,
    Sd2Draft,
    Sd2Shape,
    Sd2Training,
    draw_blocked_offsets,
    train_sd2,
)

NARROW = replace(SHAPE, layers=2, hidden=16, mlp=24, head_dim=8)


@pytest.fixture
def draft() -> Sd2Draft:
    torch.manual_seed(3)
    return Sd2Draft(Sd2Shape(NARROW, SHAPE.hidden, LAYERS, LLAMA, tied=False))


def batches() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randint(SHAPE.vocabulary, (4, 16), generator=generator)


def trained(draft: Sd2Draft, training: Sd2Training) -> tuple[dict[str, bool], list[float]]:
    """Returns which parts moved, and the losses."""
    before = {name: part.detach().clone() for name, part in draft.named_parameters()}
    losses: list[float] = []
    train_sd2(draft, make_target(), batches(), training, lambda _, loss: losses.append(loss))
    after = draft.named_parameters()
    return {name: not torch.equal(part, before[name]) for name, part in after}, losses


def test_a_narrow_drafter_comes_nearer(draft: Sd2Draft) -> None:
    moved, losses = trained(draft, Sd2Training(60, batch=4, learning_rate=1e-2))
    assert all(moved.values())
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_the_frozen_one_learns_to_steer_and_nothing_else(draft: Sd2Draft) -> None:
    moved, _ = trained(draft, Sd2Training(3, batch=4, frozen=True))
    assert {name for name, has in moved.items() if has} == {
        "mix.weight",
        "steer.0.weight",
        "steer.1.weight",
    }


def test_distillation_leaves_the_steering_alone(draft: Sd2Draft) -> None:
    moved, _ = trained(draft, Sd2Training(3, batch=4, steered=False))
    still = {name for name, has in moved.items() if not has}
    assert still == {"mix.weight", "steer.0.weight", "steer.1.weight"}


def test_texts_that_go_through_one_after_the_other_teach_the_same(draft: Sd2Draft) -> None:
    def losses(together: int) -> list[float]:
        torch.manual_seed(3)
        again = Sd2Draft(draft.shape)
        return trained(again, Sd2Training(5, batch=4, together=together, learning_rate=1e-2))[1]

    assert losses(3) == pytest.approx(losses(4), rel=1e-4)


def test_the_rate_rises_and_falls_as_in_the_paper() -> None:
    training = Sd2Training(50_000)
    assert training.learning_rate_at(0) == pytest.approx(2e-6)
    assert training.learning_rate_at(1000) == pytest.approx(2e-5)
    assert training.learning_rate_at(25_500) == pytest.approx(2e-5 * 0.55)
    assert training.learning_rate_at(49_999) == pytest.approx(2e-6, rel=1e-3)
    # A short training does not only warm up.
    assert Sd2Training(400).learning_rate_at(100) == pytest.approx(2e-5)


def test_blocks_share_the_row_that_steers_them() -> None:
    back = draw_blocked_offsets(20, 64, 4, torch.Generator().manual_seed(2))
    row_offsets = torch.arange(20) - back
    assert row_offsets.min() == 0
    assert row_offsets.max() == 3
    for row in back.tolist():
        starts = sorted(set(row))[1:]
        assert {b - a for a, b in pairwise(starts)} == {4}
    assert set(row_offsets[:, 10].tolist()) == {0, 1, 2, 3}


def test_training_in_blocks_differs(draft: Sd2Draft) -> None:
    def losses(which: OffsetMode) -> list[float]:
        torch.manual_seed(3)
        again = Sd2Draft(draft.shape)
        training = Sd2Training(8, batch=4, learning_rate=1e-2, offsets=which)
        return trained(again, training)[1]

    assert losses(OffsetMode.BLOCKED) != losses(OffsetMode.RANDOM)


def test_a_loss_that_is_none_ends_it(draft: Sd2Draft) -> None:
    with torch.no_grad():
        draft.decoder.model.norm.weight.fill_(torch.inf)
    with pytest.raises(DivergedError, match="step 1 is nan"):
        trained(draft, Sd2Training(2, batch=4))


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (Sd2Shape(replace(NARROW, vocabulary=39), SHAPE.hidden, LAYERS), "vocabulary of 39"),
        (Sd2Shape(NARROW, SHAPE.hidden + 1, LAYERS), "hidden states of 33 numbers"),
        (Sd2Shape(NARROW, SHAPE.hidden, (1, 3)), r"reads layers \(1, 3\)"),
    ],
)
def test_another_targets_drafter_is_refused(shape: Sd2Shape, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        trained(Sd2Draft(shape), Sd2Training(1, batch=4))


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 0},
        {"steps": 1, "batch": 0},
        {"steps": 1, "learning_rate": float("nan")},
        {"steps": 1, "warmup_steps": -1},
        {"steps": 1, "frozen": True, "steered": False},
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"must be|no parameters to train"):
        Sd2Training(**options)  # type: ignore[arg-type]
