"""Fine-tunes a drafter on captured signals, and computes its acceptance rate on signals.

Paper: TIDE, arXiv:2602.05145, sections 3.3 and 4.2; the loss is that of online updates (online.py),
over whole signals and with the chain of drafts unrolled from every position (training-time test).
A block drafter is trained on all of the block.

The positions of a prompt are context: a draft attends to them, as it does in service, but by
default they are not trained on.  Their text is the user's and not the target's, and the target's
distribution is not known there.  With `teach_prompts` the next token is used as the distribution.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from engine_shim.sglang.training.online import OnlineSettings, OnlineStudent, Round
from engine_shim.sglang.training.signals import Signal
from engine_shim.sglang.training.students import DraftStudent

# Positions at a signal's beginning that are only context in the evaluation of a drafter: in service
# the drafter saw the positions before them.
_CONTEXT: Final = 16


@dataclass(frozen=True, slots=True)
class AdaptSettings:
    """The settings of a round of training.  Raises ValueError.

    passes: over the training split.  batch: signals per step.  depth: number of unrolled drafts,
    and of drafts per verification in the evaluation (at most the length of a block).
    held_out: one of this many signals is kept for evaluation.  teach_prompts: also train on the
    positions of prompts, with the next token as label.
    """

    passes: int = 4
    batch: int = 8
    depth: int = 3
    learning_rate: float = 1e-3
    held_out: int = 5
    seed: int = 0
    teach_prompts: bool = False

    def __post_init__(self) -> None:
        if min(self.passes, self.batch, self.depth) < 1 or self.held_out < 2:
            raise ValueError(
                f"passes {self.passes}, batch {self.batch} and depth {self.depth} must be 1 or "
                f"more, held_out {self.held_out} must be 2 or more"
            )
        if not 0 < self.learning_rate < 1:
            raise ValueError(f"learning rate {self.learning_rate} must be in (0, 1)")


def split(signals: Sequence[Signal], every: int) -> tuple[list[Signal], list[Signal]]:
    """Splits signals into (train, eval); one of `every` signals is held out, at least one.

    Raises ValueError for fewer than two signals.
    """
    if len(signals) < 2:
        raise ValueError(f"{len(signals)} signals cannot be split: two or more are needed")
    held = set(range(min(every, len(signals)) - 1, len(signals), every))
    train = [signal for index, signal in enumerate(signals) if index not in held]
    return train, [signals[index] for index in sorted(held)]


def served_acceptance(signals: Sequence[Signal]) -> float | None:
    """Returns the acceptance rate of the signals in service; None if nothing was drafted."""
    tried = sum(signal.tried for signal in signals)
    return sum(signal.accepted for signal in signals) / tried if tried else None


@torch.no_grad()
def acceptance(student: DraftStudent, signals: Sequence[Signal], depth: int) -> float:
    """Computes the acceptance rate that the drafter would have had on these tokens; 0 without any.

    It steps like an engine: `depth` greedy drafts, then it continues after the accepted drafts and
    one more token.  A draft counts as accepted if it equals the token that was served.
    """
    depth = min(depth, student.most_drafts or depth)
    runs = _runs(student, signals, depth)
    tried = sum(min(run + 1, depth) for run in runs)
    return sum(runs) / tried if tried else 0.0


@torch.no_grad()
def acceptance_length(student: DraftStudent, signals: Sequence[Signal], depth: int) -> float:
    """Computes the mean tokens per verification in the steps of `acceptance`; 1 without any."""
    runs = _runs(student, signals, min(depth, student.most_drafts or depth))
    return 1 + sum(runs) / max(len(runs), 1)


def _runs(student: DraftStudent, signals: Sequence[Signal], depth: int) -> list[int]:
    """Counts the accepted drafts of each step."""
    runs: list[int] = []
    for signal in signals:
        matches = _matches(student, signal, depth)
        at = 0
        while at < len(matches):
            runs.append(matches[at])
            at += matches[at] + 1
    return runs


def _matches(student: DraftStudent, signal: Signal, depth: int) -> list[int]:
    """Counts for each anchor how many of its first drafts equal the served tokens."""
    # The chain from row t drafts the tokens t + 2 .. t + 1 + depth.
    rows = len(signal.tokens) - depth - 1
    if rows < 1:
        return []
    first = min(_first_anchor(signal), rows - 1)
    device = student.embedding.device
    tokens = signal.tokens[None].to(device)
    positions = torch.arange(signal.start, signal.start + rows, device=device)
    features = signal.features[None, :rows].to(device, torch.float32)
    unrolled = student.unroll(features, tokens, depth, first_anchor=first, positions=positions)
    right = torch.stack(
        [
            student.drafted(logits)[0] == tokens[0, first + 2 + step : rows + 2 + step]
            for step, logits in enumerate(unrolled)
        ]
    )
    matches: list[int] = right.long().cumprod(0).sum(0).tolist()
    return matches


def _first_anchor(signal: Signal) -> int:
    """Returns the first position from which a drafter is evaluated.

    In service the first draft begins from the prompt's last position.  If the signal has less
    context than the drafter had in service, the first positions are skipped.
    """
    after_prompt = max(signal.context - 1, 0)
    has_all = signal.context and not signal.start
    return after_prompt if has_all else max(after_prompt, _CONTEXT)


def fine_tuned(
    student: DraftStudent,
    signals: Sequence[Signal],
    settings: AdaptSettings,
    progress: Callable[[float, float], None] | None = None,
) -> DraftStudent:
    """Trains a copy.  progress: called with the completed share of the work and the loss in nats.

    Raises NotFiniteError.
    """
    made = copy.deepcopy(student)
    longest = max(len(signal.tokens) for signal in signals)
    learner = OnlineStudent(
        made,
        OnlineSettings(
            learning_rate=settings.learning_rate,
            anchors=longest,
            window=longest + 1,
            top=signals[0].top_tokens.shape[1],
        ),
    )
    order = random.Random(settings.seed)
    depth = made.most_drafts or settings.depth
    steps = settings.passes * -(-len(signals) // settings.batch)
    for step, batch in enumerate(_batches(signals, settings, order), start=1):
        found = _round(batch, made.embedding.device, teach_prompts=settings.teach_prompts)
        update = learner.learn(found, depth)
        if progress is not None:
            progress(step / steps, update.loss)
    return made


def _batches(
    signals: Sequence[Signal], settings: AdaptSettings, order: random.Random
) -> Iterator[list[Signal]]:
    for _ in range(settings.passes):
        shuffled = list(signals)
        order.shuffle(shuffled)
        for start in range(0, len(shuffled), settings.batch):
            yield shuffled[start : start + settings.batch]


def _round(signals: Sequence[Signal], device: torch.device, *, teach_prompts: bool) -> Round:
    """Makes a round of signals: right-aligned, the shorter ones padded."""
    longest = max(len(signal.tokens) for signal in signals)
    top = min(signal.top_tokens.shape[1] for signal in signals)

    def aligned(parts: Sequence[Tensor]) -> Tensor:
        padded = [
            functional.pad(part, (0, 0) * (part.dim() - 1) + (longest - len(part), 0))
            for part in parts
        ]
        return torch.stack(padded).to(device)

    ones = [torch.ones(len(signal.tokens), dtype=torch.bool) for signal in signals]
    taught = [
        ones[index] if teach_prompts else _behind(signal, torch.ones(len(signal.top_logs))).bool()
        for index, signal in enumerate(signals)
    ]
    following = [_following(signal, top) for signal in signals]
    return Round(
        tokens=aligned([signal.tokens for signal in signals]),
        features=aligned([signal.features.float() for signal in signals]),
        top_tokens=aligned([tokens for tokens, _ in following]),
        top_logs=aligned([logs for _, logs in following]),
        taught=aligned(taught),
        valid=aligned(ones),
        positions=aligned(
            [torch.arange(signal.start, signal.start + len(signal.tokens)) for signal in signals]
        ),
    )


def _following(signal: Signal, top: int) -> tuple[Tensor, Tensor]:
    """Returns the likeliest next tokens and their log-probabilities, [n, top], of all positions.

    A prompt's position has the next token with probability 1, and no other.
    """
    tokens = _behind(signal, signal.top_tokens[:, :top].long())
    logs = _behind(signal, signal.top_logs[:, :top])
    before = signal.context
    tokens[:before, 0] = signal.tokens[1 : before + 1]
    logs[:before, 1:] = -torch.inf
    return tokens, logs


def _behind(signal: Signal, rows: Tensor) -> Tensor:
    """Prepends zeros for the prompt's positions to the rows of the other positions."""
    return torch.cat([rows.new_zeros(signal.context, *rows.shape[1:]), rows])
