"""Trains SD2 drafters: distillation from the verifier, with steering or without.

Paper: Steering Pretrained Drafters during Speculative Decoding (SD2), sections 3.3 and 4 and
appendices A.3 and A.4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from engine_shim.sglang.training.language_model import LanguageModel
from engine_shim.sglang.training.sd2 import Sd2Draft, blocked_offsets, divergence, offsets


class Offsets(StrEnum):
    """Says which hidden states steer a row in training: drawn for each row, or for whole blocks."""

    RANDOM = "random"
    BLOCKED = "blocked"


class DivergedError(ValueError):
    """A loss that is NaN or infinite; nothing may be kept of such a training."""


@dataclass(frozen=True)
class Sd2Training:
    """Says how a drafter is trained; the defaults are the paper's.

    steps: optimiser steps.  batch: texts in a step, of which `together` go through the models at
    once.  drafts: of a round, the paper's k.  learning_rate: begins at a tenth, rises for
    `warmup_steps`, or a quarter of all steps where that is less, and falls back to a tenth by a
    cosine.  steering_factor: how many times faster the steering learns than the drafter.  steered:
    False trains the drafter alone, which is distillation.  frozen: the steering alone learns.
    Raises ValueError.
    """

    steps: int
    batch: int = 24
    together: int = 24
    drafts: int = 8
    offsets: Offsets = Offsets.RANDOM
    learning_rate: float = 2e-5
    steering_factor: float = 1.0
    warmup_steps: int = 1000
    weight_decay: float = 0.01
    clip: float = 0.5
    steered: bool = True
    frozen: bool = False
    seed: int = 6

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "together", "drafts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more")
        for name in ("learning_rate", "steering_factor", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite")
        if self.warmup_steps < 0 or not 0 <= self.weight_decay < math.inf:
            raise ValueError("warm-up steps and weight decay must be 0 or more")
        if self.frozen and not self.steered:
            raise ValueError("a frozen drafter without steering has nothing to learn")

    def rate(self, step: int) -> float:
        """Returns the learning rate of a step, from zero."""
        warmup = min(self.warmup_steps, self.steps // 4)
        if step < warmup:
            share = 0.1 + 0.9 * step / warmup
        else:
            turned = (step - warmup) / max(1, self.steps - warmup)
            share = 0.1 + 0.9 * (1 + math.cos(math.pi * turned)) / 2
        return self.learning_rate * share


def train_sd2(
    draft: Sd2Draft,
    target: LanguageModel,
    batches: Iterator[Tensor],
    training: Sd2Training,
    on_step: Callable[[int, float], None] | None = None,
) -> None:
    """Trains `draft` on the distributions of `target`, on the device where both are.

    batches: tokens [training.batch, L] with L >= 2, one for each step.  on_step: is given (step
    from zero, mean loss in nats).  On a GPU matrices are multiplied in bfloat16.  Raises
    DivergedError, and ValueError where the two do not fit.
    """
    _require_fit(draft, target)
    learning = [*draft.decoder.parameters()] if not training.frozen else []
    steering = [*draft.mix.parameters(), *draft.steer.parameters()] if training.steered else []
    for parameter in draft.parameters():
        parameter.requires_grad = False
    for parameter in (*learning, *steering):
        parameter.requires_grad = True
    groups: list[dict[str, Any]] = [
        {"params": learning, "factor": 1.0},
        {"params": steering, "factor": training.steering_factor},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=0.0,
        weight_decay=training.weight_decay,
    )
    draw = offsets if training.offsets is Offsets.RANDOM else blocked_offsets
    generator = torch.Generator().manual_seed(training.seed)
    draft.train()
    for step in range(training.steps):
        for group in optimizer.param_groups:
            group["lr"] = group["factor"] * training.rate(step)
        tokens = next(batches)
        back = draw(tokens.shape[1] - 1, len(tokens), training.drafts, generator)
        optimizer.zero_grad()
        loss = _accumulate(draft, target, tokens, back, training)
        if not math.isfinite(loss):
            raise DivergedError(f"the loss of step {step + 1} is {loss}: lower the learning rate")
        nn.utils.clip_grad_norm_([*learning, *steering], training.clip)
        optimizer.step()
        if on_step is not None:
            on_step(step, loss)
    draft.eval()


def _accumulate(
    draft: Sd2Draft, target: LanguageModel, tokens: Tensor, back: Tensor, training: Sd2Training
) -> float:
    """Adds the gradients of a batch, and returns its mean loss."""
    device = target.head.device
    total = 0.0
    for some, rows in zip(
        tokens.split(training.together), back.split(training.together), strict=True
    ):
        texts = some.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            with torch.no_grad():
                logits, features = target.logits_and_features(texts, draft.shape.feature_layers)
            known = torch.cat(features, dim=-1) if training.steered else None
            loss = divergence(draft, texts, logits, known, rows.to(device))
        share = len(some) / len(tokens)
        (loss * share).backward()
        total += loss.item() * share
    return total


def _require_fit(draft: Sd2Draft, target: LanguageModel) -> None:
    own, theirs = draft.shape, target.shape
    if own.decoder.vocabulary != theirs.vocabulary:
        raise ValueError(
            f"the drafter has a vocabulary of {own.decoder.vocabulary} tokens, the target of "
            f"{theirs.vocabulary}"
        )
    if own.target_hidden != theirs.hidden:
        raise ValueError(
            f"the drafter is steered by hidden states of {own.target_hidden} numbers, those of the "
            f"target have {theirs.hidden}"
        )
    if not all(0 <= layer < theirs.layers for layer in own.feature_layers):
        raise ValueError(
            f"the drafter reads layers {own.feature_layers} of a target with {theirs.layers}"
        )
