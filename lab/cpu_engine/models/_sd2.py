"""Trains the SD2 draft: first a language model, then its steering with it.

`distil` without steering is the paper's other baseline: the same loss, drafter and time.
"""

import copy
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from engine_shim.training.qwen3 import Qwen3Target
from engine_shim.training.sd2 import Sd2Draft, Sd2Shape, divergence, offsets
from lab.cpu_engine.models.batches import training_sampler
from lab.cpu_engine.models.corpus import Split
from lab.cpu_engine.models.recipe import Sd2Recipe
from lab.cpu_engine.models.schedule import LearningRate, StepBudget, fit

_WINDOWS: Final = 12
_LENGTH: Final = 128
# Drafts a round that steering is made for, the paper's k.
_DRAFTS: Final = 8


def train_sd2(
    recipe: Sd2Recipe, shape: Sd2Shape, target: Qwen3Target, splits: Mapping[str, Split]
) -> Sd2Draft:
    """Trains an SD2 draft for ``target``, whose weights must be those served."""
    pretrained = pretrain(recipe, shape, splits)
    return distil(recipe, pretrained, target, splits, recipe.budget, steered=True)


def pretrain(recipe: Sd2Recipe, shape: Sd2Shape, splits: Mapping[str, Split]) -> Sd2Draft:
    """Trains a language model that has never seen the target; its steering does nothing."""
    torch.manual_seed(2)
    draft = Sd2Draft(shape)
    sampler = training_sampler(splits, recipe.mixture, seed=5)

    def loss_of_step() -> Tensor:
        tokens = sampler.draw(_WINDOWS, _LENGTH + 1)
        logits = draft.decoder(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    rate = LearningRate(peak=3e-3, warmup_steps=30)
    name = f"pretrained on {dict(recipe.mixture)}"
    fit(name, draft.decoder, loss_of_step, recipe.pretraining, rate)
    return draft


def distil(
    recipe: Sd2Recipe,
    pretrained: Sd2Draft,
    target: Qwen3Target,
    splits: Mapping[str, Split],
    budget: StepBudget,
    *,
    steered: bool,
    seed: int = 6,
) -> Sd2Draft:
    """Trains a copy on the target's distributions, with its steering or without."""
    draft = copy.deepcopy(pretrained)
    sampler = training_sampler(splits, recipe.mixture, seed)
    generator = torch.Generator().manual_seed(seed)
    layers = draft.shape.feature_layers

    def loss_of_step() -> Tensor:
        tokens = sampler.draw(_WINDOWS, _LENGTH)
        with torch.no_grad():
            logits, features = target.logits_and_features(tokens, layers)
        back = offsets(_LENGTH - 1, _WINDOWS, _DRAFTS, generator)
        known = torch.cat(features, dim=-1) if steered else None
        return divergence(draft, tokens, logits, known, back)

    rate = LearningRate(peak=1e-3, warmup_steps=30)
    new = list(draft.steer.parameters()) if steered else []
    module = draft if steered else draft.decoder
    name = "steered" if steered else "distilled"
    fit(name, module, loss_of_step, budget, rate, weight_decay=0.01, faster=new)
    return draft
