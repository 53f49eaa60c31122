"""Trains a drafter by test-time speculation: optimiser steps on what a round has verified.

Paper: Test-Time Speculation, arXiv:2605.09329, Algorithm 1 and section 4.1.  The target is the
teacher, the drafter the student, and the verified draft the sample:

    L(q) = sum_k w_k KL(p_k || q_k) + proximal * sum_k w_k KL(q_t,k || q_k)

with p_k the target's distribution of draft token k, q_t the drafter at the start of the round, and
w_k = discount ** (k - 1), by default the discount of the drafter's own training.  In addition to
the newest step, a round here has the last positions of each request, whose target distributions are
known from earlier steps.  They provide further anchors to draft from.

The second term has no gradient at q = q_t, so it takes effect from the second of `steps` on.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from engine_shim.sglang.training.students import DraftStudent


@dataclass(frozen=True)
class OnlineSettings:
    """The settings of online learning.  Raises ValueError for values that cannot work.

    learning_rate: of AdamW.  proximal: the paper's lambda.  discount: weight of a draft position
    relative to the previous one, None for the drafter's own (`position_discount`).  steps:
    optimiser steps in a round, K.  anchors: positions of a request from which drafts start, 1 for
    the newest step alone.  window: positions kept of a request.  top: number of the target's
    likeliest tokens kept of each position; all others count as one.  clip: limit of the gradient
    norm.
    """

    learning_rate: float = 1e-3
    proximal: float = 0.0
    discount: float | None = None
    steps: int = 1
    anchors: int = 16
    window: int = 256
    top: int = 64
    clip: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < 1:
            raise ValueError(f"learning rate {self.learning_rate} must be in (0, 1)")
        if not 0 <= self.proximal < float("inf"):
            raise ValueError(f"proximal weight {self.proximal} must be 0 or more")
        if self.discount is not None and not 0 < self.discount <= 1:
            raise ValueError(f"discount {self.discount} must be in (0, 1]")
        if not 1 <= self.anchors < self.window:
            raise ValueError(
                f"anchors {self.anchors} must be 1 or more, and fewer than window {self.window}"
            )
        if min(self.steps, self.top) < 1 or not self.clip > 0:
            raise ValueError(
                f"steps {self.steps} and top {self.top} must be 1 or more, clip {self.clip} above 0"
            )


class Round(NamedTuple):
    """The tokens that a step has verified, right-aligned: B requests, T positions, gamma drafted.

    tokens: int64 [B, T].  features: [B, T, feature layers * hidden], of the target.
    top_tokens, top_logs: [B, T, top], the target's likeliest successors and their log-probability.
    has_target: bool [B, T], whether those are known.  valid: bool [B, T], whether the position
    exists. positions: int64 [B, T].
    """

    tokens: Tensor
    features: Tensor
    top_tokens: Tensor
    top_logs: Tensor
    has_target: Tensor
    valid: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True)
class DrafterUpdate:
    """Result of one round.  loss: before the round, in nats; seconds: duration of the round."""

    loss: float
    seconds: float


class NotFiniteError(ArithmeticError):
    """Loss, gradient or weights were not finite; the student is unchanged."""


class OnlineStudent:
    """A student and its optimiser."""

    def __init__(self, student: DraftStudent, settings: OnlineSettings) -> None:
        self.student = student
        self._settings = settings
        student_discount = student.position_discount
        self._discount = student_discount if settings.discount is None else settings.discount
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """Resets the optimiser's averages, because the weights were replaced."""
        self._optimizer = torch.optim.AdamW(
            self.student.parameters(),
            lr=self._settings.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=True,
        )

    def learn(self, verified_round: Round, gamma: int) -> DrafterUpdate:
        """Makes a round's optimiser steps.  Raises NotFiniteError and then changes nothing."""
        started = perf_counter()
        parameters = list(self.student.parameters())
        old_values = [parameter.detach().clone() for parameter in parameters]
        reference: list[Tensor] | None = None
        first_loss = float("nan")
        for step in range(self._settings.steps):
            logs = self._draft_log_probabilities(verified_round, gamma)
            if self._settings.proximal and reference is None:
                reference = [row.detach() for row in logs]
            loss = self._loss(verified_round, logs, reference)
            self._optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, self._settings.clip)
            if not bool(torch.isfinite(loss)) or not bool(torch.isfinite(norm)):
                self._restore(parameters, old_values)
                raise NotFiniteError(f"loss {loss.item()}, gradient norm {float(norm)}")
            if not step:
                first_loss = float(loss.detach())
            self._optimizer.step()
        if not all(bool(torch.isfinite(parameter).all()) for parameter in parameters):
            self._restore(parameters, old_values)
            raise NotFiniteError("an optimiser step made weights that are NaN or infinite")
        return DrafterUpdate(first_loss, perf_counter() - started)

    def _restore(self, parameters: list[torch.nn.Parameter], old_values: list[Tensor]) -> None:
        with torch.no_grad():
            for parameter, old in zip(parameters, old_values, strict=True):
                parameter.copy_(old)
        self.reset_optimizer()

    def _draft_log_probabilities(self, verified_round: Round, gamma: int) -> list[Tensor]:
        """Computes log-probabilities of each draft position, [B, anchors, draft vocabulary]."""
        rows = self._context_rows(verified_round, gamma)
        unrolled = self.student.unroll(
            verified_round.features[:, :rows],
            verified_round.tokens,
            gamma,
            first_anchor=max(0, rows - self._settings.anchors),
            positions=verified_round.positions[:, :rows],
            valid=verified_round.valid[:, :rows],
        )
        return [functional.log_softmax(logits, dim=-1) for logits in unrolled]

    def _context_rows(self, verified_round: Round, gamma: int) -> int:
        """Returns the number of positions before the newest draft, from which a chain can start."""
        return verified_round.tokens.shape[1] - gamma - 1

    def _loss(
        self, verified_round: Round, logs: list[Tensor], reference: list[Tensor] | None
    ) -> Tensor:
        rows = self._context_rows(verified_round, len(logs))
        first = max(0, rows - self._settings.anchors)
        columns = self.student.columns(verified_round.top_tokens)
        total = weight = torch.zeros(())
        for step, student in enumerate(logs):
            target_slice = slice(first + 1 + step, rows + 1 + step)
            is_counted = (
                verified_round.has_target[:, target_slice] & verified_round.valid[:, first:rows]
            )
            rows_loss = divergence(
                columns[:, target_slice], verified_round.top_logs[:, target_slice], student
            )
            if reference is not None:
                proximal_loss = functional.kl_div(
                    student, reference[step], log_target=True, reduction="none"
                ).sum(-1)
                rows_loss = rows_loss + self._settings.proximal * proximal_loss
            factor = self._discount**step
            total = total + factor * torch.where(is_counted, rows_loss, 0.0).sum()
            weight = weight + factor * is_counted.sum()
        return total / weight.clamp_min(1.0)


def divergence(columns: Tensor, top_logs: Tensor, student: Tensor) -> Tensor:
    """Computes KL(target || student) [B, A] in nats, over the listed tokens and one bucket.

    columns: int64 [B, A, top], the columns of the target's likeliest tokens in ``student``, -1 for
    a token that the drafter cannot draft.  top_logs: [B, A, top], their log-probabilities.
    student: log-probabilities [B, A, draft vocabulary].

    The bucket contains everything else: for the target all tokens that are not listed or cannot be
    drafted, for the student all columns that are not listed.  So the loss is finite for every draft
    vocabulary, and it equals the divergence of the whole distributions if nothing is missing.

    The trainers of EAGLE-3 (arXiv:2503.01840, `traineagle3/cnets.py` of its repository) and
    SpecForge (arXiv:2603.18567, `_compute_target_p`) have the target's logits of all tokens.  They
    renormalise the target over the draft vocabulary, and leave out positions whose likeliest token
    is not in it.  The bucket keeps those positions; there the drafter learns that none of its
    listed tokens is likely.
    """
    listed = columns >= 0
    student_logs = student.gather(-1, columns.clamp_min(0))
    target_probabilities = torch.where(listed, top_logs.exp(), 0.0)
    # Tokens of probability 0 contribute nothing, whatever their logarithm is.
    terms = torch.where(
        target_probabilities > 0, target_probabilities * (top_logs - student_logs), 0.0
    )
    target_rest = _rest_log_probability(target_probabilities.sum(-1))
    return terms.sum(-1) + target_rest.exp() * (
        target_rest - _rest_log_probability(torch.where(listed, student_logs.exp(), 0.0).sum(-1))
    )


def _rest_log_probability(listed_probability: Tensor) -> Tensor:
    """Computes the log-probability of the bucket from the probability of the listed tokens."""
    return torch.log1p(-listed_probability.clamp_max(1 - 1e-6))
