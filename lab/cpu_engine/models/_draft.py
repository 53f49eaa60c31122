"""Trains the shipped drafts and predictors, and measures how far the target follows them.

Each draft step learns the target's own distribution of its token.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from engine_shim.sglang.training.chain import Eagle3Shape, Eagle3Student, MtpShape, MtpStudent
from engine_shim.sglang.training.dflash import DFlashShape, DFlashStudent, position_weights
from lab.cpu_engine.models.corpus import Split
from lab.cpu_engine.models.prompts import DOMAINS
from lab.cpu_engine.models.recipe import DraftRecipe
from lab.cpu_engine.models.schedule import LearningRate, fit, held_out_sampler, training_sampler
from lab.cpu_engine.models.targets import Qwen3Target

_UNROLL: Final = 6
_WINDOWS: Final = 8
_LENGTH: Final = 96
_BLOCK_WINDOWS: Final = 6
_BLOCK_LENGTH: Final = 192
# Many blocks a window: the context is shared, and a block costs little beside it.
_ANCHORS: Final = 40
# Draft step j weighs this to the power j: it counts only once the earlier ones were accepted.
STEP_DISCOUNT = 0.8


def train_draft(
    recipe: DraftRecipe, shape: Eagle3Shape, target: Qwen3Target, splits: Mapping[str, Split]
) -> Eagle3Student:
    """Trains a draft for ``target``, whose weights must be those served (rounded to bfloat16)."""
    torch.manual_seed(1)
    student = Eagle3Student(shape, target.model.embed_tokens.weight)
    student.initialise_from_target(target.model.embed_tokens.weight, target.model.norm.weight)
    _distil(student, recipe, target, splits)
    return student


def train_predictor(
    recipe: DraftRecipe, shape: MtpShape, target: Qwen3Target, splits: Mapping[str, Split]
) -> MtpStudent:
    """Trains the predictor of a target with Qwen2's layers, whose weights must be those served."""
    torch.manual_seed(1)
    student = MtpStudent(shape, target.model.embed_tokens.weight)
    _distil(student, recipe, target, splits)
    return student


def _distil(
    student: Eagle3Student | MtpStudent,
    recipe: DraftRecipe,
    target: Qwen3Target,
    splits: Mapping[str, Split],
) -> None:
    sampler = training_sampler(splits, recipe.mixture, seed=5)

    def loss_of_step() -> Tensor:
        lesson = teach(target, student, sampler.draw(_WINDOWS, _LENGTH + _UNROLL), _UNROLL)
        return discounted(step_divergences(student, lesson, _UNROLL))

    rate = LearningRate(peak=3e-3, warmup_steps=30)
    fit(f"draft on {dict(recipe.mixture)}", student, loss_of_step, recipe.budget, rate)


def agreement_by_domain(
    student: Eagle3Student | MtpStudent,
    target: Qwen3Target,
    splits: Mapping[str, Split],
    steps: int = _UNROLL,
) -> dict[str, list[float]]:
    """Computes the held-out share of rows with the same token, by domain and draft step."""
    shares = {}
    for domain in DOMAINS:
        tokens = held_out_sampler(splits, domain).draw(16, _LENGTH + steps)
        shares[domain] = [
            round(x, 3) for x in agreement(student, teach(target, student, tokens, steps), steps)
        ]
    return shares


def train_blocks(
    recipe: DraftRecipe, shape: DFlashShape, target: Qwen3Target, splits: Mapping[str, Split]
) -> DFlashStudent:
    """Trains a draft for ``target``, whose weights must be those served (rounded to bfloat16)."""
    torch.manual_seed(1)
    student = DFlashStudent(shape, target.model.embed_tokens.weight)
    sampler = training_sampler(splits, recipe.mixture, seed=7)
    weights = position_weights(shape.block)

    def loss_of_step() -> Tensor:
        tokens = sampler.draw(_BLOCK_WINDOWS, _BLOCK_LENGTH + shape.block)
        anchors = 1 + torch.randperm(_BLOCK_LENGTH - 1, generator=sampler.generator)[:_ANCHORS]
        features, aims = _features_and_aims(student, target, tokens, anchors)
        drafted = functional.log_softmax(student.block_logits(features, tokens, anchors), dim=-1)
        # KL(target || draft) of each drafted position, averaged over blocks: [D - 1] nats.
        rows = functional.kl_div(drafted, aims, log_target=True, reduction="none").sum(dim=-1)
        return (rows.mean(dim=(0, 1)) * weights).sum()

    rate = LearningRate(peak=3e-3, warmup_steps=30)
    fit(f"blocks on {dict(recipe.mixture)}", student, loss_of_step, recipe.budget, rate)
    return student


@torch.no_grad()
def _features_and_aims(
    student: DFlashStudent, target: Qwen3Target, tokens: Tensor, anchors: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns features of all but the last block, and aims [batch, A, D - 1, vocabulary]."""
    block = student.shape.block
    logits, features = target.logits_and_features(tokens, student.shape.feature_layers)
    rows = anchors[:, None] + torch.arange(block - 1)
    context = torch.cat(features, dim=-1)[:, : tokens.shape[1] - block]
    return context, functional.log_softmax(logits[:, rows], dim=-1)


@torch.no_grad()
def block_agreement_by_domain(
    student: DFlashStudent, target: Qwen3Target, splits: Mapping[str, Split]
) -> dict[str, list[float]]:
    """Computes the held-out share of rows with the same token, by domain and drafted position."""
    shares = {}
    anchors = torch.arange(8, _BLOCK_LENGTH, 5)
    for domain in DOMAINS:
        tokens = held_out_sampler(splits, domain).draw(12, _BLOCK_LENGTH + student.shape.block)
        features, aims = _features_and_aims(student, target, tokens, anchors)
        matches = student.block_logits(features, tokens, anchors).argmax(-1) == aims.argmax(-1)
        shares[domain] = [round(float(x), 3) for x in matches.float().mean(dim=(0, 1))]
    return shares


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
