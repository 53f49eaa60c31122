"""Training of the shipped drafts, and a quick measure of how far the target would follow them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from engine_shim.training.eagle3 import Eagle3Shape, Eagle3Student
from engine_shim.training.qwen3 import Qwen3Target
from lab.cpu_engine.models._training import fit, held_out_sampler, training_sampler
from lab.cpu_engine.models.corpus import Split
from lab.cpu_engine.models.distill import agreement, discounted, step_divergences, teach
from lab.cpu_engine.models.prompts import DOMAINS
from lab.cpu_engine.models.recipe import DraftRecipe
from lab.cpu_engine.models.schedule import LearningRate

_UNROLL: Final = 6
_WINDOWS: Final = 8
_LENGTH: Final = 96


def train_draft(
    recipe: DraftRecipe, shape: Eagle3Shape, target: Qwen3Target, splits: Mapping[str, Split]
) -> Eagle3Student:
    """Trains a draft for ``target``, whose weights must be those served (rounded to bfloat16)."""
    torch.manual_seed(1)
    student = Eagle3Student(shape, target.model.embed_tokens.weight)
    student.start_from(target.model.embed_tokens.weight, target.model.norm.weight)
    sampler = training_sampler(splits, recipe.mixture, seed=5)

    def loss_of_step() -> Tensor:
        lesson = teach(target, student, sampler.draw(_WINDOWS, _LENGTH + _UNROLL), _UNROLL)
        return discounted(step_divergences(student, lesson, _UNROLL))

    rate = LearningRate(peak=3e-3, warmup_steps=30)
    fit(f"draft on {dict(recipe.mixture)}", student, loss_of_step, recipe.budget, rate)
    return student


def agreement_by_domain(
    student: Eagle3Student, target: Qwen3Target, splits: Mapping[str, Split], steps: int = _UNROLL
) -> dict[str, list[float]]:
    """Computes the held-out share of rows with the same token, by domain and draft step."""
    shares = {}
    for domain in DOMAINS:
        tokens = held_out_sampler(splits, domain).draw(16, _LENGTH + steps)
        shares[domain] = [
            round(x, 3) for x in agreement(student, teach(target, student, tokens, steps), steps)
        ]
    return shares
