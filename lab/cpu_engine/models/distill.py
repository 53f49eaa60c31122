"""Distils a draft: each draft step learns the target's own distribution of its token."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine_shim.sglang.training.chain import Eagle3Student, MtpStudent
from lab.cpu_engine.models.targets import Qwen3Target

STEP_DISCOUNT = 0.8
"""Draft step j weighs this to the power j: it counts only once the earlier ones were accepted."""


@dataclass(frozen=True)
class Lesson:
    """Windows of tokens, and what the target says of them.

    ``tokens`` [batch, L + steps]; ``features`` [batch, L, feature layers * hidden];
    ``log_probabilities`` [batch, L + steps, vocabulary]: row ``t`` is the target's distribution of
    token ``t + 1``.
    """

    tokens: Tensor
    features: Tensor
    log_probabilities: Tensor


@torch.no_grad()
def teach(
    target: Qwen3Target, student: Eagle3Student | MtpStudent, tokens: Tensor, steps: int
) -> Lesson:
    """Runs the target over ``tokens`` [batch, L + steps]; keeps what ``steps`` draft steps need."""
    layers = student.shape.feature_layers if isinstance(student, Eagle3Student) else ()
    last, features = target.hidden_and_features(tokens, layers)
    read = torch.cat(features, dim=-1) if layers else last
    logits = functional.linear(last, target.model.embed_tokens.weight)
    length = tokens.shape[1] - steps
    return Lesson(tokens, read[:, :length], functional.log_softmax(logits, dim=-1))


def step_divergences(
    student: Eagle3Student | MtpStudent, lesson: Lesson, steps: int
) -> list[Tensor]:
    """Computes KL(target || draft) of each draft step, in nats, averaged over rows."""
    return [
        functional.kl_div(
            functional.log_softmax(logits, dim=-1), aims, log_target=True, reduction="none"
        )
        .sum(dim=-1)
        .mean()
        for logits, aims in _unrolled(student, lesson, steps)
    ]


def discounted(divergences: list[Tensor]) -> Tensor:
    """Averages over draft steps under the weights of ``STEP_DISCOUNT``."""
    weights = [STEP_DISCOUNT**step for step in range(len(divergences))]
    return torch.stack([w * d for w, d in zip(weights, divergences, strict=True)]).sum() / sum(
        weights
    )


@torch.no_grad()
def agreement(student: Eagle3Student | MtpStudent, lesson: Lesson, steps: int) -> list[float]:
    """Computes by step the share of rows where both name the same likeliest token."""
    return [
        float((logits.argmax(dim=-1) == aims.argmax(dim=-1)).float().mean())
        for logits, aims in _unrolled(student, lesson, steps)
    ]


def _unrolled(
    student: Eagle3Student | MtpStudent, lesson: Lesson, steps: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the student's logits of each draft step, and the target's log-probabilities."""
    length = lesson.features.shape[1]
    for step, logits in enumerate(student.unroll(lesson.features, lesson.tokens, steps)):
        yield logits, lesson.log_probabilities[:, 1 + step : 1 + step + length]
