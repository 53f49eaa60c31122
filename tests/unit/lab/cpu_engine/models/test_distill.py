"""Distillation: no loss for a perfect draft, less with training, most for early steps."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from engine_shim.sglang.training.blocks import DecoderShape
from engine_shim.sglang.training.chain import Eagle3Shape, Eagle3Student
from lab.cpu_engine.models._draft import Lesson, agreement, discounted, step_divergences, teach
from lab.cpu_engine.models.schedule import LearningRate, StepBudget, train
from lab.cpu_engine.models.targets import Qwen3Target

SHAPE = DecoderShape(
    hidden=32, heads=2, kv_heads=1, head_dim=16, mlp=48, layers=3, vocabulary=40, max_positions=64
)
STEPS = 3


@pytest.fixture
def target() -> Qwen3Target:
    torch.manual_seed(8)
    made = Qwen3Target(SHAPE)
    with torch.no_grad():
        made.model.embed_tokens.weight.mul_(20)
    return made.eval().requires_grad_(False)


@pytest.fixture
def student(target: Qwen3Target) -> Eagle3Student:
    torch.manual_seed(9)
    return Eagle3Student(
        Eagle3Shape(SHAPE.with_layers(1), (0, 1)), target.model.embed_tokens.weight
    )


@pytest.fixture
def lesson(target: Qwen3Target, student: Eagle3Student) -> Lesson:
    tokens = torch.randint(SHAPE.vocabulary, (4, 20), generator=torch.Generator().manual_seed(10))
    return teach(target, student, tokens, STEPS)


def test_a_lesson_holds_features_of_all_rows_but_the_looked_ahead(
    target: Qwen3Target, lesson: Lesson
) -> None:
    assert lesson.features.shape == (4, 20 - STEPS, 2 * SHAPE.hidden)
    _, features = target.logits_and_features(lesson.tokens, (0, 1))
    torch.testing.assert_close(lesson.features, torch.cat(features, dim=-1)[:, :-STEPS])


def test_a_draft_that_already_answers_like_the_target_has_no_divergence(
    student: Eagle3Student, lesson: Lesson
) -> None:
    length = lesson.features.shape[1]
    own = [
        functional.log_softmax(x, dim=-1).detach()
        for x in student.unroll(lesson.features, lesson.tokens, 1)
    ]
    echoed = lesson.log_probabilities.clone()
    echoed[:, 1 : 1 + length] = own[0]
    (divergence,) = step_divergences(student, Lesson(lesson.tokens, lesson.features, echoed), 1)
    assert divergence.item() == pytest.approx(0, abs=1e-6)
    assert agreement(student, Lesson(lesson.tokens, lesson.features, echoed), 1) == [1.0]


def test_early_steps_weigh_more() -> None:
    early = discounted([torch.tensor(1.0), torch.tensor(0.0)])
    late = discounted([torch.tensor(0.0), torch.tensor(1.0)])
    assert early > late
    assert float(early + late) == pytest.approx(1)


def test_training_brings_the_draft_towards_the_target(
    student: Eagle3Student, lesson: Lesson
) -> None:
    before = [divergence.item() for divergence in step_divergences(student, lesson, STEPS)]
    made = train(
        student,
        lambda _: discounted(step_divergences(student, lesson, STEPS)),
        StepBudget(steps=60, seconds=600),
        LearningRate(peak=3e-3, warmup_steps=5),
    )
    after = [divergence.item() for divergence in step_divergences(student, lesson, STEPS)]
    assert made == 60
    assert all(now < 0.7 * then for now, then in zip(after, before, strict=True))
