"""Distilling a draft: each draft step learns the target's own distribution of its token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine_shim.training.eagle3 import Eagle3Student
from engine_shim.training.qwen3 import Qwen3Target

STEP_DISCOUNT = 0.8
"""Draft step j weighs this to the power j: it counts only once the earlier ones were accepted."""


@dataclass(frozen=True)
class Lesson:
    """What a student learns from.

    ``tokens`` [batch, L + steps]; ``features`` [batch, L, feature layers * hidden];
    ``log_probabilities`` [batch, L + steps, vocabulary]: row ``t`` is the target's distribution of
    token ``t + 1``.
    """

    tokens: Tensor
    features: Tensor
    log_probabilities: Tensor


@torch.no_grad()
def teach(target: Qwen3Target, student: Eagle3Student, tokens: Tensor, steps: int) -> Lesson:
    """Run the target over ``tokens`` [batch, L + steps]; keep what ``steps`` draft steps need."""
    logits, features = target.logits_and_features(tokens, student.shape.feature_layers)
    length = tokens.shape[1] - steps
    return Lesson(
        tokens, torch.cat(features, dim=-1)[:, :length], functional.log_softmax(logits, dim=-1)
    )


def step_divergences(student: Eagle3Student, lesson: Lesson, steps: int) -> list[Tensor]:
    """KL(target || draft) of each draft step, averaged over rows: ``steps`` scalars in nats."""
    length = lesson.features.shape[1]
    divergences = []
    for step, logits in enumerate(student.unroll(lesson.features, lesson.tokens, steps)):
        aims = lesson.log_probabilities[:, 1 + step : 1 + step + length]
        rows = functional.kl_div(
            functional.log_softmax(logits, dim=-1), aims, log_target=True, reduction="none"
        ).sum(dim=-1)
        divergences.append(rows.mean())
    return divergences


def discounted(divergences: list[Tensor]) -> Tensor:
    """Mean over draft steps under the weights of ``STEP_DISCOUNT``."""
    weights = [STEP_DISCOUNT**step for step in range(len(divergences))]
    return torch.stack([w * d for w, d in zip(weights, divergences, strict=True)]).sum() / sum(
        weights
    )


@torch.no_grad()
def agreement(student: Eagle3Student, lesson: Lesson, steps: int) -> list[float]:
    """Share of rows where both name the same likeliest token, by step along the true tokens."""
    length = lesson.features.shape[1]
    shares = []
    for step, logits in enumerate(student.unroll(lesson.features, lesson.tokens, steps)):
        aims = lesson.log_probabilities[:, 1 + step : 1 + step + length]
        shares.append(float((logits.argmax(dim=-1) == aims.argmax(dim=-1)).float().mean()))
    return shares
