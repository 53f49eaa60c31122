"""Trains the lab's SD2 drafts: first a language model, then its steering with it.

`distil` without steering is the paper's other baseline: the same loss, drafter and steps.
"""

import copy
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from lab.cpu_engine.models.corpus import Split
from lab.cpu_engine.models.recipe import Sd2Recipe
from lab.cpu_engine.models.schedule import LearningRate, StepBudget, fit, training_sampler
from trainer.language_model import LanguageModel
from trainer.sd2 import Sd2Draft, Sd2Shape, Sd2Training, train_sd2

_WINDOWS: Final = 12
_LENGTH: Final = 128
_REPORT_STEPS: Final = 50

_log = logging.getLogger(__name__)


def make_sd2(
    recipe: Sd2Recipe, shape: Sd2Shape, target: LanguageModel, splits: Mapping[str, Split]
) -> Sd2Draft:
    """Trains an SD2 draft for ``target``, whose weights must be those served."""
    return distil(recipe, pretrain(recipe, shape, splits), target, splits)


def pretrain(
    recipe: Sd2Recipe, shape: Sd2Shape, splits: Mapping[str, Split], seed: int = 2
) -> Sd2Draft:
    """Trains a language model that has never seen the target; its steering does nothing."""
    torch.manual_seed(seed)
    draft = Sd2Draft(shape)
    sampler = training_sampler(splits, recipe.mixture, seed=seed + 3)

    def loss_of_step() -> Tensor:
        tokens = sampler.draw(_WINDOWS, _LENGTH + 1)
        logits = draft.decoder(tokens[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    rate = LearningRate(peak=3e-3, warmup_steps=30)
    name = f"pretrained on {dict(recipe.mixture)}"
    fit(name, draft.decoder, loss_of_step, StepBudget(recipe.pretraining, math.inf), rate)
    return draft


def distil(
    recipe: Sd2Recipe,
    pretrained: Sd2Draft,
    target: LanguageModel,
    splits: Mapping[str, Split],
    *,
    seed: int = 6,
    **changes: Any,
) -> Sd2Draft:
    """Trains a copy on the target's distributions.

    changes: fields of Sd2Training that differ from the recipe's, such as ``steered=False``.
    """
    draft = copy.deepcopy(pretrained)
    sampler = training_sampler(splits, recipe.mixture, seed)

    def batches() -> Iterator[Tensor]:
        while True:
            yield sampler.draw(_WINDOWS, _LENGTH)

    def report(step: int, loss: float) -> None:
        if (step + 1) % _REPORT_STEPS == 0:
            _log.info("SD2, step %d: loss %.4f", step + 1, loss)

    # The drafts here are far from trained, and their steering more so: rates are higher.
    options = {
        "steps": recipe.steps, "batch": _WINDOWS, "together": _WINDOWS, "warmup_steps": 30,
        "learning_rate": 1e-3, "steering_factor": 10.0, "seed": seed,
    }  # fmt: skip
    train_sd2(draft, target, batches(), Sd2Training(**(options | changes)), report)
    return draft
