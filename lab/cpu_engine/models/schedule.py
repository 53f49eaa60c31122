"""Trains a module within a budget, with a learning rate that follows what is used of it."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

_FASTER: Final = 10.0
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

    def at(self, step: int, used: float) -> float:
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
    faster: Sequence[nn.Parameter] = (),
    on_step: Callable[[int, float], None] | None = None,
) -> int:
    """Minimises ``loss_of_step`` with AdamW over the trainable parameters of ``module``.

    ``faster`` learn at ten times the rate, without decay: what is new in a module that is not.
    ``on_step`` is given (step, loss).  Returns the number of updates made.
    """
    parameters = list(module.parameters())
    new = {id(parameter) for parameter in faster}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if id(p) not in new], "factor": 1.0},
        {"params": [p for p in parameters if id(p) in new], "factor": _FASTER, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=0.0, betas=(0.9, 0.95), weight_decay=weight_decay, fused=True,
    )  # fmt: skip
    made = 0
    module.train()
    for step, used in budget.progress():
        for group in optimizer.param_groups:
            group["lr"] = group["factor"] * rate.at(step, used)
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
