"""How long to train, and the learning rate on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Budget:
    """Training ends after ``steps`` updates or ``seconds`` of wall time, whichever comes first."""

    steps: int
    seconds: float

    def progress(self, clock: Callable[[], float] = time.monotonic) -> Iterator[tuple[int, float]]:
        """Yield (step, share of the budget used so far, in [0, 1)) until the budget is spent."""
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

    def at(self, step: int, used: float) -> float:
        """The rate for ``step`` (from zero) when ``used`` of the budget is gone."""
        warmth = min(1.0, (step + 1) / self.warmup_steps)
        return self.peak * warmth * (1 - used * (1 - self.final_share))


def train(
    module: nn.Module,
    loss_of_step: Callable[[int], Tensor],
    budget: Budget,
    rate: LearningRate,
    *,
    weight_decay: float = 0.05,
    on_step: Callable[[int, float], None] | None = None,
) -> int:
    """Minimise ``loss_of_step`` with AdamW over the trainable parameters of ``module``.

    ``on_step`` is given (step, loss).  Returns the number of updates made.
    """
    parameters = list(module.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=0.0, betas=(0.9, 0.95), weight_decay=weight_decay, fused=True
    )
    made = 0
    module.train()
    for step, used in budget.progress():
        for group in optimizer.param_groups:
            group["lr"] = rate.at(step, used)
        loss = loss_of_step(step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        made = step + 1
        if on_step is not None:
            on_step(step, loss.item())
    module.eval()
    return made
