"""Training of the models that edit code: a target that copies, and an EAGLE3 draft for it.

Models of this size learn to copy (induction heads) only from text in which nothing else helps:
random tokens that are repeated, short spans first.  After that they learn edits within minutes.
"""

import logging
from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine_shim.sglang.training.chain import Eagle3Student
from lab.cpu_engine.models._draft import agreement, discounted, step_divergences, teach
from lab.cpu_engine.models.corpus import DOCUMENT_TOKEN_ID, VOCABULARY_SIZE
from lab.cpu_engine.models.edits import KINDS, EditSampler, EditSplit, EncodedEdit
from lab.cpu_engine.models.recipe import EditRecipe
from lab.cpu_engine.models.schedule import LearningRate, StepBudget, fit, train
from lab.cpu_engine.models.targets import Qwen3Target

_UNROLL: Final = 6
_BATCH_TOKENS: Final = 6000
_DRAFT_TOKENS: Final = 2500
_COPY_TOKENS: Final = 5000
# Lengths of repeated spans: from the least to the most, as the budget is used up.
_SPAN: Final = (8, 128)
# Up to this length a span stands three times in a row, and longer ones twice.
_SHORT: Final = 40
# What a request says matters less than what the answer does with it.
_REQUEST_WEIGHT: Final = 0.3

_log = logging.getLogger(__name__)


def train_edit_target(recipe: EditRecipe, target: Qwen3Target, split: EditSplit) -> None:
    """Trains a target that knows code to copy, and then to edit."""
    torch.manual_seed(0)
    _learn_to_copy(target, recipe.copying)
    sampler = EditSampler(split.train, recipe.mixture, _BATCH_TOKENS, seed=0)

    def loss_of_step() -> Tensor:
        losses, weights = _losses(target, *sampler.draw())
        return (losses * weights).sum() / weights.sum()

    rate = LearningRate(peak=2.5e-3, warmup_steps=30)
    fit("edits", target, loss_of_step, recipe.editing, rate)
    _log.info("answers: cross entropy %s", answer_entropy(target, split.validation))


def train_edit_draft(
    recipe: EditRecipe, student: Eagle3Student, target: Qwen3Target, split: EditSplit
) -> None:
    """Trains a draft for ``target``, whose weights must be those served (rounded to bfloat16)."""
    torch.manual_seed(1)
    student.initialise_from_target(target.model.embed_tokens.weight, target.model.norm.weight)

    sampler = EditSampler(split.train, recipe.mixture, _DRAFT_TOKENS, seed=5)

    def loss_of_step() -> Tensor:
        lesson = teach(target, student, sampler.draw()[0], _UNROLL)
        return discounted(step_divergences(student, lesson, _UNROLL))

    fit("draft", student, loss_of_step, recipe.draft, LearningRate(peak=2e-3, warmup_steps=30))
    for kind in KINDS:
        tokens, _ = EditSampler(split.validation, {kind: 1.0}, _DRAFT_TOKENS, seed=1).draw()
        shares = agreement(student, teach(target, student, tokens, _UNROLL), _UNROLL)
        _log.info("draft: agreement on %s %s", kind, [round(share, 3) for share in shares])


@torch.no_grad()
def answer_entropy(target: Qwen3Target, edits: tuple[EncodedEdit, ...]) -> dict[str, float]:
    """Computes the held-out loss of answers by kind, nats a token."""
    entropies = {}
    for kind in KINDS:
        sampler = EditSampler(edits, {kind: 1.0}, _BATCH_TOKENS, seed=1)
        total = count = 0.0
        for _ in range(4):
            losses, weights = _losses(target, *sampler.draw())
            in_answer = weights == 1
            total += float(losses[in_answer].sum())
            count += int(in_answer.sum())
        entropies[kind] = round(total / count, 3)
    return entropies


def _losses(target: Qwen3Target, tokens: Tensor, aims: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the loss of every aim, and its weight: 1 in an answer, 0 for padding."""
    fast: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=fast):
        logits = target(tokens[:, :-1]).float()
    losses = functional.cross_entropy(logits.transpose(1, 2), aims, reduction="none")
    in_answer = (tokens[:, :-1] == DOCUMENT_TOKEN_ID).cumsum(dim=1) >= 2
    weights = torch.where(in_answer, 1.0, _REQUEST_WEIGHT)
    return losses, torch.where(aims >= 0, weights, 0.0)


def _learn_to_copy(target: Qwen3Target, budget: StepBudget) -> None:
    rng = np.random.default_rng(3)
    fast: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    spans = _span_lengths(budget)

    def loss_of_step(_: int) -> Tensor:
        tokens, repeated = copies(rng, next(spans), _COPY_TOKENS)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=fast):
            logits = target(tokens[:, :-1]).float()
        losses = functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
        return losses[repeated[:, 1:]].mean()

    def report(step: int, loss: float) -> None:
        if step % 50 == 49:
            _log.info("copying: step %d, loss %.3f", step + 1, loss)

    rate = LearningRate(peak=2e-3, warmup_steps=30, final_share=0.3)
    train(target, loss_of_step, budget, rate, weight_decay=0.01, on_step=report)


def _span_lengths(budget: StepBudget) -> Iterator[int]:
    """Yields how long spans may be in each step of a training."""
    shortest, longest = _SPAN
    for _, used in budget.progress():
        yield round(shortest + used * used * (longest - shortest))
    while True:
        yield longest


def copies(rng: np.random.Generator, longest: int, total: int) -> tuple[Tensor, Tensor]:
    """Draws spans of random tokens that are repeated.

    longest: of a span.  total: of tokens, about.  Returns tokens [batch, length], and which of them
    can be copied.
    """
    length = max(48, 3 * longest + 8)
    rows, marks = [], []
    for _ in range(max(1, total // length)):
        row, mark = [DOCUMENT_TOKEN_ID], [False]
        for span in _spans(rng, longest):
            for repeat in range(3 if longest < _SHORT else 2):
                row += [*span, DOCUMENT_TOKEN_ID]
                mark += [*([repeat > 0] * len(span)), False]
            if len(row) > length:
                break
        rows.append(row[: length + 1])
        marks.append(mark[: length + 1])
    return torch.tensor(rows), torch.tensor(marks)


def _spans(rng: np.random.Generator, longest: int) -> Iterator[list[int]]:
    while True:
        count = int(rng.integers(4, longest + 1))
        yield rng.integers(1, VOCABULARY_SIZE, count).tolist()
