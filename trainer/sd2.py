"""The SD2 drafter, a small pretrained model steered by the verifier's hidden states; its training.

Paper: Steering Pretrained Drafters during Speculative Decoding (SD2).  The drafter is a separate
language model of any width.  The verifier's low, middle and high hidden states at the last verified
position give a steering vector of their width

    g = W_hml [h; m; l]                                         (initially W_hml = [I I I])

Every MLP of the drafter becomes, with W_s = 0 initially,

    W_d ((W_u a + W_s g) * silu(W_g a))                         (Eq. 2)

Here g is normed before W_s, because some channels of a residual stream are much larger than the
others.  Row p takes the token at p + 1 and the hidden states at p, as SGLang passes both to a
drafter, and predicts the token at p + 2.

Drafters are distilled from the verifier, with or without steering (sections 3.3 and 4, appendices
A.3 and A.4), and stored in folders that SGLang loads.
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
from torch.nn import functional

from engine_shim.sglang.training.blocks import (
    QWEN3,
    SD2_FAMILIES,
    DecoderShape,
    Family,
    Llama3Rope,
    Rotary,
)
from engine_shim.sglang.training.drafter_config import EAGLE_LAYERS
from engine_shim.sglang.training.students import UnsupportedDrafterError
from trainer.checkpoint import save_model, split_fused
from trainer.language_model import (
    LanguageModel,
    ModelFolderError,
    language_shape,
    load_state,
    read_config,
    read_state,
)

_DECODER_PREFIX: Final = "decoder."
# Fields of Llama3Rope, and their names in a config.
_ROPE_KEYS: Final = {
    "factor": "factor",
    "low_frequency": "low_freq_factor",
    "high_frequency": "high_freq_factor",
    "original_positions": "original_max_position_embeddings",
}


@dataclass(frozen=True)
class Sd2Shape:
    """The sizes of an SD2 drafter.

    decoder: of the drafter.  target_hidden: width of the verifier's hidden states and of the
    steering vector; it may differ from the drafter's width.  feature_layers: the verifier's layers
    that are read.  family: of the drafter.  tied: whether its embedding is its head.  Raises
    ValueError.
    """

    decoder: DecoderShape
    target_hidden: int
    feature_layers: tuple[int, ...]
    family: Family = QWEN3
    tied: bool = True

    def __post_init__(self) -> None:
        if self.target_hidden < 1:
            raise ValueError("the steering vector must have a width of 1 or more")
        if len(self.feature_layers) < 2:
            raise ValueError("a steering vector needs two hidden states or more")


class Sd2Draft(nn.Module):
    """An SD2 drafter with its steering; `decoder` is the drafter's language model."""

    def __init__(self, shape: Sd2Shape) -> None:
        super().__init__()
        self.shape = shape
        width, mlp = shape.target_hidden, shape.decoder.mlp
        self.decoder = LanguageModel(shape.decoder, shape.family, tied=shape.tied)
        self.mix = nn.Linear(len(shape.feature_layers) * width, width, bias=False)
        self.steer = nn.ModuleList(
            nn.Linear(width, mlp, bias=False) for _ in range(shape.decoder.layers)
        )
        with torch.no_grad():
            self.mix.weight.copy_(torch.cat([torch.eye(width)] * len(shape.feature_layers), dim=1))
            for part in self.steer:
                assert isinstance(part, nn.Linear)
                part.weight.zero_()

    def steering(self, features: Tensor) -> Tensor:
        """Computes g, normed: [..., feature layers * target's width] to [..., target's width]."""
        return functional.layer_norm(self.mix(features), (self.shape.target_hidden,))

    def forward(self, tokens: Tensor, steering: Tensor | None = None) -> Tensor:
        """Computes the logits of each next token.

        tokens: [batch, L].  steering: g of each row, [batch, L, target's width]; None: plain.
        Returns [batch, L, vocabulary].
        """
        model = self.decoder.model
        rotation = self.decoder.rotary.compute_rotation(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        residual = model.embed_tokens(tokens)
        for layer, steer in zip(model.layers, self.steer, strict=True):
            bias = None if steering is None else steer(steering)
            residual = layer(residual, rotation, bias)
        return functional.linear(model.norm(residual), self.decoder.head)


def draw_random_offsets(rows: int, batch: int, drafts: int, generator: torch.Generator) -> Tensor:
    """Draws for each row the row whose hidden states steer it, [batch, rows].

    The distance is uniform from 0 to drafts - 1 rows (the paper's delta): the distance of the last
    verified position from each draft of a round.
    """
    rows_back = torch.randint(drafts, (batch, rows), generator=generator)
    return (torch.arange(rows) - rows_back).clamp_min(0)


def draw_blocked_offsets(rows: int, batch: int, drafts: int, generator: torch.Generator) -> Tensor:
    """Draws `draw_random_offsets` as in serving: one row steers itself and the rest of its block.

    Blocks have `drafts` rows, and begin at a random row in each text (appendix A.4).
    """
    first_row = torch.randint(drafts, (batch, 1), generator=generator)
    row = torch.arange(rows)
    return (row - (row - first_row) % drafts).clamp_min(0)


def divergence(
    draft: Sd2Draft, tokens: Tensor, logits: Tensor, features: Tensor | None, steering_rows: Tensor
) -> Tensor:
    """Computes the mean KL(verifier || draft) of each row's next token, in nats.

    tokens: [batch, L].  logits: the verifier's, [batch, L, vocabulary].  features: its hidden
    states, [batch, L, feature layers * its width], None to train without steering.  steering_rows:
    see `draw_random_offsets`, [batch, L - 1].
    """
    steering = None
    if features is not None:
        rows = torch.arange(tokens.shape[0])[:, None]
        steering = draft.steering(features[rows, steering_rows])
    draft_log_probs = functional.log_softmax(draft(tokens[:, 1:], steering), dim=-1)
    target_log_probs = functional.log_softmax(logits[:, 1:], dim=-1)
    return (
        functional.kl_div(draft_log_probs, target_log_probs, log_target=True, reduction="none")
        .sum(-1)
        .mean()
    )


@torch.no_grad()
def greedy_chain(
    draft: Sd2Draft, features: Tensor, tokens: Tensor, drafts: int, *, steered: bool = True
) -> Tensor:
    """Returns the drafts that a server would propose after `tokens`: ids [batch, drafts].

    tokens: [batch, L + 1]; the verifier has not run the last one yet.  features: of the others.
    """
    steering = draft.steering(features) if steered else None
    for _ in range(drafts):
        drafted_count = tokens.shape[1] - 1 - features.shape[1]
        g = None
        if steering is not None:
            g = torch.cat([steering, steering[:, -1:].expand(-1, drafted_count, -1)], dim=1)
        newest = draft(tokens[:, 1:], g)[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, newest], dim=1)
    return tokens[:, -drafts:]


def save_sd2(draft: Sd2Draft, folder: Path) -> None:
    """Writes ``draft`` as a checkpoint that `engine_shim.sglang.drafters.sd2_model` serves."""
    shape = draft.shape
    (architecture,) = [name for name, family in SD2_FAMILIES.items() if family == shape.family]
    parts = split_fused(draft.state_dict(), shape.decoder)
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
    """Reads a folder of `save_sd2`, in float32.  Raises ModelFolderError."""
    config = read_config(folder)
    try:
        shape = sd2_shape(config)
    except ValueError as error:
        raise ModelFolderError(f"{folder}: {error}") from error
    with torch.device("meta"):
        draft = Sd2Draft(shape)
    state = read_state(folder)
    load_state(draft, {_live_name(name): part for name, part in state.items()}, folder)
    draft.decoder.rotary = Rotary(shape.decoder)
    return draft.eval()


def sd2_shape(config: Mapping[str, Any]) -> Sd2Shape:
    """Reads the sizes of an SD2 drafter from its config.  Raises ValueError.

    Without ``target_hidden_size`` the steering vector has the drafter's own width.
    """
    decoder, family, tied = language_shape(config, SD2_FAMILIES)
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
    return (
        f"model.layers.{layer[1]}.mlp.steer.weight" if layer else live.removeprefix(_DECODER_PREFIX)
    )


def _live_name(stored: str) -> str:
    layer = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.steer\.weight", stored)
    if layer:
        return f"steer.{layer[1]}.weight"
    return stored if stored == "mix.weight" else _DECODER_PREFIX + stored


class OffsetMode(StrEnum):
    """Names how the hidden states that steer a row are drawn: per row, or per block."""

    RANDOM = "random"
    BLOCKED = "blocked"


class DivergedError(ValueError):
    """The loss is NaN or infinite; the result of the training must be discarded."""


@dataclass(frozen=True)
class Sd2Training:
    """Settings of a training; the defaults are the paper's.

    steps: optimiser steps.  batch: texts per step, of which `together` go through the models at
    once.  drafts: per round, the paper's k.  learning_rate: peak; the rate begins at a tenth of it,
    rises for `warmup_steps` (at most a quarter of all steps), and falls to a tenth by a cosine.
    steering_factor: learning rate of the steering over that of the drafter.  steered: False trains
    the drafter alone, which is distillation.  frozen: trains the steering alone.  Raises
    ValueError.
    """

    steps: int
    batch: int = 24
    together: int = 24
    drafts: int = 8
    offsets: OffsetMode = OffsetMode.RANDOM
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
            raise ValueError("a frozen drafter without steering has no parameters to train")

    def learning_rate_at(self, step: int) -> float:
        """Returns the learning rate of a step, counted from 0."""
        warmup = min(self.warmup_steps, self.steps // 4)
        if step < warmup:
            share = 0.1 + 0.9 * step / warmup
        else:
            progress = (step - warmup) / max(1, self.steps - warmup)
            share = 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2
        return self.learning_rate * share


def train_sd2(
    draft: Sd2Draft,
    target: LanguageModel,
    batches: Iterator[Tensor],
    training: Sd2Training,
    on_step: Callable[[int, float], None] | None = None,
) -> None:
    """Trains `draft` on the distributions of `target`, on the device where both are.

    batches: tokens [training.batch, L] with L >= 2, one for each step.  on_step: called with the
    step, counted from 0, and the mean loss in nats.  On a GPU matrices are multiplied in bfloat16.
    Raises DivergedError, and ValueError if drafter and target do not fit.
    """
    _require_fit(draft, target)
    drafter_parameters = [*draft.decoder.parameters()] if not training.frozen else []
    steering_parameters = (
        [*draft.mix.parameters(), *draft.steer.parameters()] if training.steered else []
    )
    for parameter in draft.parameters():
        parameter.requires_grad = False
    for parameter in (*drafter_parameters, *steering_parameters):
        parameter.requires_grad = True
    groups: list[dict[str, Any]] = [
        {"params": drafter_parameters, "factor": 1.0},
        {"params": steering_parameters, "factor": training.steering_factor},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=0.0,
        weight_decay=training.weight_decay,
    )
    draw_offsets = (
        draw_random_offsets if training.offsets is OffsetMode.RANDOM else draw_blocked_offsets
    )
    generator = torch.Generator().manual_seed(training.seed)
    draft.train()
    for step in range(training.steps):
        for group in optimizer.param_groups:
            group["lr"] = group["factor"] * training.learning_rate_at(step)
        tokens = next(batches)
        steering_rows = draw_offsets(tokens.shape[1] - 1, len(tokens), training.drafts, generator)
        optimizer.zero_grad()
        loss = _accumulate_gradients(draft, target, tokens, steering_rows, training)
        if not math.isfinite(loss):
            raise DivergedError(f"the loss of step {step + 1} is {loss}: lower the learning rate")
        nn.utils.clip_grad_norm_([*drafter_parameters, *steering_parameters], training.clip)
        optimizer.step()
        if on_step is not None:
            on_step(step, loss)
    draft.eval()


def _accumulate_gradients(
    draft: Sd2Draft,
    target: LanguageModel,
    tokens: Tensor,
    steering_rows: Tensor,
    training: Sd2Training,
) -> float:
    """Accumulates the gradients of a batch, and returns its mean loss."""
    device = target.head.device
    total = 0.0
    for chunk, rows in zip(
        tokens.split(training.together), steering_rows.split(training.together), strict=True
    ):
        texts = chunk.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            with torch.no_grad():
                logits, features = target.logits_and_features(texts, draft.shape.feature_layers)
            steering_features = torch.cat(features, dim=-1) if training.steered else None
            loss = divergence(draft, texts, logits, steering_features, rows.to(device))
        share = len(chunk) / len(tokens)
        (loss * share).backward()
        total += loss.item() * share
    return total


def _require_fit(draft: Sd2Draft, target: LanguageModel) -> None:
    draft_shape, target_shape = draft.shape, target.shape
    if draft_shape.decoder.vocabulary != target_shape.vocabulary:
        raise ValueError(
            f"the drafter has a vocabulary of {draft_shape.decoder.vocabulary} tokens, the target "
            "of "
            f"{target_shape.vocabulary}"
        )
    if draft_shape.target_hidden != target_shape.hidden:
        raise ValueError(
            f"the drafter is steered by hidden states of {draft_shape.target_hidden} numbers, "
            "those of the "
            f"target have {target_shape.hidden}"
        )
    if not all(0 <= layer < target_shape.layers for layer in draft_shape.feature_layers):
        raise ValueError(
            f"the drafter reads layers {draft_shape.feature_layers} of a target with "
            f"{target_shape.layers}"
        )
