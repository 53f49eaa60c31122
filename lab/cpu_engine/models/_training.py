"""Runs the training of one shipped model: where its windows come from, and what is logged."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from lab.cpu_engine.models.batches import WindowSampler
from lab.cpu_engine.models.corpus import Split
from lab.cpu_engine.models.schedule import LearningRate, StepBudget, train

_REPORT_STEPS: Final = 50

_log = logging.getLogger(__name__)


def training_sampler(
    splits: Mapping[str, Split], mixture: Mapping[str, float], seed: int
) -> WindowSampler:
    """Makes a sampler of training windows of several domains."""
    streams = {domain: split.train for domain, split in splits.items()}
    return WindowSampler(streams, mixture, torch.Generator().manual_seed(seed))


def held_out_sampler(splits: Mapping[str, Split], domain: str) -> WindowSampler:
    """Makes a sampler of one domain's validation windows, the same ones for every model."""
    streams = {domain: splits[domain].validation}
    return WindowSampler(streams, {domain: 1.0}, torch.Generator().manual_seed(1))


def fit(
    name: str,
    module: nn.Module,
    loss_of_step: Callable[[], Tensor],
    budget: StepBudget,
    rate: LearningRate,
    *,
    weight_decay: float = 0.05,
    faster: Sequence[nn.Parameter] = (),
) -> None:
    """Trains ``module`` as `train` does, and logs the loss on the way."""
    start = time.monotonic()

    def report(step: int, loss: float) -> None:
        if (step + 1) % _REPORT_STEPS == 0:
            _log.info("step %d, %.0f s, loss %.3f", step + 1, time.monotonic() - start, loss)

    steps = train(
        module, lambda _: loss_of_step(), budget, rate,
        weight_decay=weight_decay, faster=faster, on_step=report,
    )  # fmt: skip
    _log.info("%s: %d steps, %.0f s", name, steps, time.monotonic() - start)
