"""Training of the shipped target: a shallow model, grown to full depth and trained on.

Depth is what makes the target useful on a CPU, where a step costs what its layers cost to dispatch;
the shallow start buys most of the quality for a third of the time.
"""

import logging
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from engine_shim.sglang.training.blocks import DecoderLayer
from lab.cpu_engine.models.corpus import Split
from lab.cpu_engine.models.prompts import DOMAINS
from lab.cpu_engine.models.recipe import MIXTURE, Recipe
from lab.cpu_engine.models.schedule import (
    LearningRate,
    StepBudget,
    fit,
    held_out_sampler,
    training_sampler,
)
from lab.cpu_engine.models.targets import Qwen2Target, Qwen3Target, grow

_WINDOWS: Final = 10
_LENGTH: Final = 192

_log = logging.getLogger(__name__)


def train_target(recipe: Recipe, splits: Mapping[str, Split]) -> Qwen3Target:
    """Trains the shallow target, grows it, and trains it on.

    Raises:
        RuntimeError: some layer of the result does next to nothing (see
            ``Recipe.least_branch_share``).
    """
    torch.manual_seed(0)
    target = (Qwen3Target if recipe.predictor is None else Qwen2Target)(recipe.shallow_shape)
    _train(target, splits, recipe.shallow_budget, LearningRate(peak=4e-3, warmup_steps=40), seed=0)
    if recipe.full_budget.steps:
        target = grow(target, recipe.shape.layers)
        _train(target, splits, recipe.full_budget, LearningRate(peak=3e-3, warmup_steps=20), seed=1)

    shares = branch_shares(target, _mixed_windows(splits))
    _log.info(
        "each layer's share of the residual stream: %s", [round(share, 3) for share in shares]
    )
    if min(shares) < recipe.least_branch_share:
        raise RuntimeError(
            f"layer {shares.index(min(shares))} adds only {min(shares):.2%} to the residual "
            "stream: train longer"
        )
    return target


def cross_entropy(target: Qwen3Target, splits: Mapping[str, Split]) -> dict[str, float]:
    """Computes the held-out loss by domain, nats a token, over 16 windows of 256 tokens."""
    losses = {}
    for domain in DOMAINS:
        tokens = held_out_sampler(splits, domain).draw(16, 257)
        with torch.inference_mode():
            losses[domain] = round(float(_loss(target, tokens)), 3)
    return losses


@torch.inference_mode()
def branch_shares(target: Qwen3Target, tokens: Tensor) -> list[float]:
    """Measures what each layer adds on ``tokens`` [batch, length], relative to its input's norm.

    Norms are averaged over rows before the division.
    """
    rotation = target.rotary.compute_rotation(torch.arange(tokens.shape[1]))
    residual = target.model.embed_tokens(tokens)
    shares = []
    for layer in target.model.layers:
        assert isinstance(layer, DecoderLayer)
        output = layer(residual, rotation)
        shares.append(float((output - residual).norm(dim=-1).mean() / residual.norm(dim=-1).mean()))
        residual = output
    return shares


def _mixed_windows(splits: Mapping[str, Split]) -> Tensor:
    return torch.cat([held_out_sampler(splits, domain).draw(4, 128) for domain in DOMAINS])


def _train(
    target: Qwen3Target,
    splits: Mapping[str, Split],
    budget: StepBudget,
    rate: LearningRate,
    *,
    seed: int,
) -> None:
    sampler = training_sampler(splits, MIXTURE, seed)
    # Without instructions for it, bfloat16 takes ten times as long as float32.
    fast: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()

    def loss_of_step() -> Tensor:
        tokens = sampler.draw(_WINDOWS, _LENGTH + 1)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=fast):
            return _loss(target, tokens)

    layers = target.shape.layers
    _log.info("%d layers: cross entropy %s before training", layers, cross_entropy(target, splits))
    fit(f"{layers} layers", target, loss_of_step, budget, rate)
    _log.info("%d layers: cross entropy %s", layers, cross_entropy(target, splits))


def _loss(target: Qwen3Target, tokens: Tensor) -> Tensor:
    logits = target(tokens[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
