"""Training of the shipped drafts, and a quick measure of how far the target would follow them."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from engine_shim.training.batches import WindowSampler
from engine_shim.training.distill import agreement, discounted, step_divergences, teach
from engine_shim.training.eagle3 import Eagle3Shape, Eagle3Student
from engine_shim.training.qwen3 import Qwen3Target
from engine_shim.training.schedule import LearningRate, train
from lab.cpu_engine.models._target import held_out_sampler
from lab.cpu_engine.models.corpus import Split
from lab.cpu_engine.models.prompts import DOMAINS
from lab.cpu_engine.models.recipe import DraftRecipe

_UNROLL: Final = 6
_WINDOWS: Final = 8
_LENGTH: Final = 96
_REPORT_STEPS: Final = 50

_log = logging.getLogger(__name__)


def train_draft(
    recipe: DraftRecipe, shape: Eagle3Shape, target: Qwen3Target, splits: Mapping[str, Split]
) -> Eagle3Student:
    """A draft for ``target``, whose weights must be those served (rounded to bfloat16)."""
    torch.manual_seed(1)
    student = Eagle3Student(shape, target.model.embed_tokens.weight)
    student.start_from(target.model.embed_tokens.weight, target.model.norm.weight)
    streams = {domain: split.train for domain, split in splits.items()}
    sampler = WindowSampler(streams, recipe.mixture, torch.Generator().manual_seed(5))

    def loss_of_step(_: int) -> Tensor:
        lesson = teach(target, student, sampler.draw(_WINDOWS, _LENGTH + _UNROLL), _UNROLL)
        return discounted(step_divergences(student, lesson, _UNROLL))

    start = time.monotonic()

    def report(step: int, loss: float) -> None:
        if (step + 1) % _REPORT_STEPS == 0:
            _log.info("step %d, %.0f s, divergence %.3f", step + 1, time.monotonic() - start, loss)

    steps = train(
        student,
        loss_of_step,
        recipe.budget,
        LearningRate(peak=3e-3, warmup_steps=30),
        on_step=report,
    )
    _log.info(
        "draft on %s: %d steps, %.0f s", dict(recipe.mixture), steps, time.monotonic() - start
    )
    return student


def agreement_by_domain(
    student: Eagle3Student, target: Qwen3Target, splits: Mapping[str, Split], steps: int = _UNROLL
) -> dict[str, list[float]]:
    """Held-out share of rows where both name the same token, by domain and draft step."""
    shares = {}
    for domain in DOMAINS:
        tokens = held_out_sampler(splits, domain).draw(16, _LENGTH + steps)
        shares[domain] = [
            round(x, 3) for x in agreement(student, teach(target, student, tokens, steps), steps)
        ]
    return shares
