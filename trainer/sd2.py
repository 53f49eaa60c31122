"""Trains SD2 drafters, and keeps them in folders that SGLang loads.

They are distilled from the verifier, with steering or without.  Paper: Steering Pretrained
Drafters during Speculative Decoding (SD2), sections 3.3 and 4 and appendices A.3 and A.4.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from engine_shim.sglang.training.blocks import Llama3Rope, Rotary
from engine_shim.sglang.training.drafter_config import EAGLE_LAYERS
from engine_shim.sglang.training.language_model import LanguageModel
from engine_shim.sglang.training.sd2 import (
    STEERED,
    Sd2Draft,
    Sd2Shape,
    blocked_offsets,
    divergence,
    offsets,
)
from engine_shim.sglang.training.students import UnsupportedDrafterError
from trainer.checkpoint import save_model, split
from trainer.language_checkpoint import (
    ModelFolderError,
    language_shape,
    put_state,
    read_config,
    read_state,
)

_DECODER: Final = "decoder."
# Fields of Llama3Rope, and their names in a config.
_ROPE_KEYS: Final = {
    "factor": "factor",
    "low_frequency": "low_freq_factor",
    "high_frequency": "high_freq_factor",
    "original_positions": "original_max_position_embeddings",
}


def save_sd2(draft: Sd2Draft, folder: Path) -> None:
    """Writes ``draft`` as a checkpoint that `engine_shim.sglang.drafters.sd2_model` serves."""
    shape = draft.shape
    (architecture,) = [name for name, family in STEERED.items() if family == shape.family]
    parts = split(draft.state_dict(), shape.decoder)
    save_model(
        folder,
        shape.decoder,
        {_stored_name(name): part for name, part in parts},
        architecture,
        model_type=shape.family.model_type,
        tie_word_embeddings=shape.tied,
        target_hidden_size=shape.target_hidden,
        eagle_config={EAGLE_LAYERS: list(shape.feature_layers)},
        **_rope_fields(shape.decoder.rope),
    )


def load_sd2(folder: Path) -> Sd2Draft:
    """Reads back :func:`save_sd2`, in float32.  Raises ModelFolderError."""
    config = read_config(folder)
    try:
        shape = sd2_shape(config)
    except ValueError as error:
        raise ModelFolderError(f"{folder}: {error}") from error
    with torch.device("meta"):
        draft = Sd2Draft(shape)
    state = read_state(folder)
    put_state(draft, {_live_name(name): part for name, part in state.items()}, folder)
    draft.decoder.rotary = Rotary(shape.decoder)
    return draft.eval()


def sd2_shape(config: Mapping[str, Any]) -> Sd2Shape:
    """Takes the sizes of an SD2 drafter.  Raises ValueError.

    A config without ``target_hidden_size`` has the drafter's own width.
    """
    decoder, family, tied = language_shape(config, STEERED)
    layers = (config.get("eagle_config") or {}).get(EAGLE_LAYERS)
    if not isinstance(layers, list) or not all(isinstance(layer, int) for layer in layers):
        raise UnsupportedDrafterError(f"its eagle_config names no {EAGLE_LAYERS}")
    width = config.get("target_hidden_size") or decoder.hidden
    return Sd2Shape(decoder, width, tuple(layers), family, tied)


def _rope_fields(rope: Llama3Rope | None) -> dict[str, Any]:
    if rope is None:
        return {}
    numbers = {_ROPE_KEYS[field]: value for field, value in asdict(rope).items()}
    return {"rope_scaling": {"rope_type": "llama3", **numbers}}


def _stored_name(live: str) -> str:
    layer = re.fullmatch(r"steer\.(\d+)\.weight", live)
    return f"model.layers.{layer[1]}.mlp.steer.weight" if layer else live.removeprefix(_DECODER)


def _live_name(stored: str) -> str:
    layer = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.steer\.weight", stored)
    if layer:
        return f"steer.{layer[1]}.weight"
    return stored if stored == "mix.weight" else _DECODER + stored


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
