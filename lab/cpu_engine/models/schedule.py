"""Trains a module within a budget, on random windows of token streams that are mixed over domains.

The learning rate follows what is used of the budget.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from lab.cpu_engine.models.corpus import Split

_REPORT_STEPS: Final = 50

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepBudget:
    """Training ends after ``steps`` updates or ``seconds`` of wall time, whichever comes first."""

    steps: int
    seconds: float

    def progress(self, clock: Callable[[], float] = time.monotonic) -> Iterator[tuple[int, float]]:
        """Yields (step, share of the budget used so far, in [0, 1)) until the budget is spent."""
        start = clock()
        for step in range(self.steps):
            used = max(step / self.steps, (clock() - start) / self.seconds)
            if used >= 1:
                return
            yield step, used


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up, then linear decay to ``final_share`` of ``peak`` as the budget runs out."""

    peak: float
    warmup_steps: int
    final_share: float = 0.03

    def value_at(self, step: int, used: float) -> float:
        """Returns the rate for ``step`` (from zero) when ``used`` of the budget is gone."""
        warmth = min(1.0, (step + 1) / self.warmup_steps)
        return self.peak * warmth * (1 - used * (1 - self.final_share))


def train(
    module: nn.Module,
    loss_of_step: Callable[[int], Tensor],
    budget: StepBudget,
    rate: LearningRate,
    *,
    weight_decay: float = 0.05,
    on_step: Callable[[int, float], None] | None = None,
) -> int:
    """Minimises ``loss_of_step`` with AdamW over the trainable parameters of ``module``.

    ``on_step`` is given (step, loss).  Returns the number of updates made.
    """
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=0.0, betas=(0.9, 0.95), weight_decay=weight_decay, fused=True
    )
    update_count = 0
    module.train()
    for step, used in budget.progress():
        for group in optimizer.param_groups:
            group["lr"] = rate.value_at(step, used)
        loss = loss_of_step(step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        update_count = step + 1
        if on_step is not None:
            on_step(step, loss.item())
    module.eval()
    return update_count


def fit(
    name: str,
    module: nn.Module,
    loss_of_step: Callable[[], Tensor],
    budget: StepBudget,
    rate: LearningRate,
) -> None:
    """Trains ``module`` as `train` does, and logs the loss on the way."""
    start = time.monotonic()

    def report(step: int, loss: float) -> None:
        if (step + 1) % _REPORT_STEPS == 0:
            _log.info("step %d, %.0f s, loss %.3f", step + 1, time.monotonic() - start, loss)

    steps = train(module, lambda _: loss_of_step(), budget, rate, on_step=report)
    _log.info("%s: %d steps, %.0f s", name, steps, time.monotonic() - start)


@dataclass
class WindowSampler:
    """Draws windows of tokens, each from one domain, chosen by the weights of ``mixture``.

    ``streams`` maps a domain to its token ids [tokens].  The state of ``generator`` is all the
    state there is.
    """

    streams: Mapping[str, npt.NDArray[np.uint16]]
    mixture: Mapping[str, float]
    generator: torch.Generator = field(default_factory=torch.Generator)

    def draw(self, windows: int, length: int) -> Tensor:
        """Draws token ids [windows, length], int64."""
        domains = list(self.mixture)
        weights = torch.tensor([self.mixture[domain] for domain in domains], dtype=torch.float32)
        picks = torch.multinomial(weights, windows, replacement=True, generator=self.generator)
        return torch.stack([self._window(domains[int(pick)], length) for pick in picks])

    def _window(self, domain: str, length: int) -> Tensor:
        stream = self.streams[domain]
        start = int(torch.randint(len(stream) - length + 1, (1,), generator=self.generator))
        return torch.from_numpy(stream[start : start + length].astype(np.int64))


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
