"""One round learnt from: the paper's loss, its weights, and what must not get through."""

from __future__ import annotations

import math
from copy import deepcopy

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine_shim.sglang.training.dflash import DFlashStudent, position_weights
from engine_shim.sglang.training.online import (
    NotFiniteError,
    OnlineSettings,
    OnlineStudent,
    Round,
    divergence,
)
from engine_shim.sglang.training.students import DraftStudent
from lab.cpu_engine.models.targets import Qwen3Target
from tests.support.training_rounds import (
    SHAPE,
    concatenate_rounds,
    make_block_student,
    make_round,
    make_student,
    make_target,
)

GAMMA = 3
ALL = SHAPE.vocabulary


@pytest.fixture
def target() -> Qwen3Target:
    return make_target()


@pytest.fixture(params=[make_student, make_block_student], ids=["eagle3", "dflash"])
def student(request: pytest.FixtureRequest, target: Qwen3Target) -> DraftStudent:
    new_student: DraftStudent = request.param(target)
    return new_student


def weights(student: DraftStudent) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in student.parameters()])


def learn(student: DraftStudent, training_round: Round, **settings: float) -> float:
    asked = OnlineSettings(**{"anchors": 1, "top": ALL, **settings})  # type: ignore[arg-type]
    return OnlineStudent(student, asked).learn(training_round, GAMMA).loss


def test_the_loss_is_the_weighted_divergence_of_the_canvas(
    target: Qwen3Target, student: DraftStudent
) -> None:
    training_round = make_round(target, 20, seed=1, top=ALL)
    rows = 20 - GAMMA - 1
    logits = student.unroll(
        training_round.features[:, :rows], training_round.tokens, GAMMA, first_anchor=rows - 1
    )
    log_target = functional.log_softmax(
        target.logits_and_features(training_round.tokens, (0, 1))[0], dim=-1
    )
    parts = []
    for step, mine in enumerate(logits):
        theirs = log_target[0, rows + step]
        parts.append((theirs.exp() * (theirs - functional.log_softmax(mine[0, 0], dim=-1))).sum())
    expected = (parts[0] + 0.5 * parts[1] + 0.25 * parts[2]).detach() / 1.75
    assert learn(student, training_round, discount=0.5) == pytest.approx(float(expected), rel=1e-4)


def test_positions_weigh_what_they_weigh_in_the_drafters_own_recipe(
    target: Qwen3Target, student: DraftStudent
) -> None:
    if isinstance(student, DFlashStudent):
        weights = position_weights(student.shape.block)
        discount = float(weights[1] / weights[0])
    else:
        discount = 0.8
    training_round = make_round(target, 20, seed=1, top=ALL)
    own = learn(deepcopy(student), training_round)
    assert own == pytest.approx(
        learn(deepcopy(student), training_round, discount=discount), rel=1e-5
    )
    assert own != pytest.approx(learn(deepcopy(student), training_round, discount=0.5), rel=1e-4)


@torch.no_grad()
def test_rows_that_are_not_there_and_rows_nobody_taught_count_for_nothing(
    target: Qwen3Target, student: DraftStudent
) -> None:
    long, short = (make_round(target, n, seed=n, top=ALL) for n in (20, 9))
    online = OnlineStudent(student, OnlineSettings(anchors=6, top=ALL))
    alone = [
        float(online._loss(r, online._draft_log_probabilities(r, GAMMA), None))
        for r in (long, short)
    ]
    both = concatenate_rounds(long, short)
    together = float(online._loss(both, online._draft_log_probabilities(both, GAMMA), None))
    # The short one has no more than 5 positions to start from.
    assert together == pytest.approx((6 * alone[0] + 5 * alone[1]) / 11, rel=1e-4)
    untaught = both._replace(has_target=torch.tensor([[True], [False]]).expand(2, 20))
    loss = float(online._loss(untaught, online._draft_log_probabilities(untaught, GAMMA), None))
    assert loss == pytest.approx(alone[0], rel=1e-4)


def test_learning_a_round_again_and_again_brings_its_loss_down(
    target: Qwen3Target, student: DraftStudent
) -> None:
    online = OnlineStudent(student, OnlineSettings(anchors=8, top=ALL, learning_rate=3e-3))
    training_round = make_round(target, 24, seed=2, top=ALL, requests=3)
    losses = [online.learn(training_round, GAMMA).loss for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]


def test_what_is_shared_with_the_target_does_not_move(
    target: Qwen3Target, student: DraftStudent
) -> None:
    before = student.embedding.clone()
    learn(student, make_round(target, 20, seed=3, top=ALL), learning_rate=0.1)
    assert torch.equal(student.embedding, before)
    assert "embedding" not in dict(student.named_parameters())


@pytest.mark.parametrize(("steps", "matters"), [(1, False), (4, True)])
def test_the_proximal_term_counts_from_the_second_step_on(
    target: Qwen3Target, *, steps: int, matters: bool
) -> None:
    training_round = make_round(target, 20, seed=4, top=ALL)
    moved = []
    for proximal in (0.0, 60.0):
        student = make_student(target)
        before = weights(student)
        learn(student, training_round, proximal=proximal, steps=steps)
        moved.append(weights(student) - before)
    if matters:
        assert moved[1].norm() < 0.9 * moved[0].norm()
    else:
        # As a whole: a weight whose gradient is all rounding moves by what the processor rounds.
        assert (moved[1] - moved[0]).norm() < 1e-3 * moved[0].norm()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_round_of_no_numbers_leaves_the_student_as_it_was(
    target: Qwen3Target, student: DraftStudent, poison: float
) -> None:
    training_round = make_round(target, 20, seed=5, top=ALL)
    bad = training_round.features.clone()
    bad[0, 3, 7] = poison
    online = OnlineStudent(student, OnlineSettings(anchors=1, top=ALL))
    before = weights(student)
    with pytest.raises(NotFiniteError):
        online.learn(training_round._replace(features=bad), GAMMA)
    assert torch.equal(weights(student), before)
    assert math.isfinite(online.learn(training_round, GAMMA).loss)
    assert not torch.equal(weights(student), before)


def test_a_later_step_of_no_numbers_takes_the_earlier_ones_back(
    target: Qwen3Target, student: DraftStudent, monkeypatch: pytest.MonkeyPatch
) -> None:
    online = OnlineStudent(student, OnlineSettings(anchors=1, top=ALL, steps=3))
    losses = iter([1.0, 1.0, float("nan")])
    original = online._loss
    monkeypatch.setattr(online, "_loss", lambda *arguments: original(*arguments) * next(losses))
    before = weights(student)
    with pytest.raises(NotFiniteError):
        online.learn(make_round(target, 20, seed=6, top=ALL), GAMMA)
    assert torch.equal(weights(student), before)


def test_the_likeliest_tokens_alone_say_a_little_less() -> None:
    torch.manual_seed(1)
    target, student = (functional.log_softmax(3 * torch.randn(2, 5, 30), dim=-1) for _ in range(2))
    full = functional.kl_div(student, target, log_target=True, reduction="none").sum(-1)
    logs, tokens = target.topk(30, dim=-1)
    torch.testing.assert_close(divergence(tokens, logs, student), full)
    logs, tokens = target.topk(6, dim=-1)
    # Lumping tokens together never raises a divergence (log-sum inequality).
    partly = divergence(tokens, logs, student)
    assert (partly < full).all()
    assert (partly > 0).all()
    rest = torch.log1p(-logs.exp().sum(-1))
    mine = student.gather(-1, tokens)
    my_rest = torch.log1p(-mine.exp().sum(-1))
    expected = (logs.exp() * (logs - mine)).sum(-1) + rest.exp() * (rest - my_rest)
    torch.testing.assert_close(partly, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"proximal": -1.0},
        {"proximal": float("inf")},
        {"discount": 1.5},
        {"discount": 0.0},
        {"anchors": 0},
        {"anchors": OnlineSettings().window},
        {"steps": 0},
        {"top": 0},
        {"clip": 0.0},
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must|anchors: 1 at|too few"):
        OnlineSettings(**settings)  # type: ignore[arg-type]
