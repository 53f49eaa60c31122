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
_MIN_CONTEXT_POSITIONS: Final = 16


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


def split_signals(
    signals: Sequence[Signal], holdout_interval: int
) -> tuple[list[Signal], list[Signal]]:
    """Splits signals into (train, eval): one of each `holdout_interval` is held out.

    Raises ValueError for fewer than two signals.
    """
    if len(signals) < 2:
        raise ValueError(f"{len(signals)} signals cannot be split: two or more are needed")
    held_out_indices = set(
        range(min(holdout_interval, len(signals)) - 1, len(signals), holdout_interval)
    )
    train = [signal for index, signal in enumerate(signals) if index not in held_out_indices]
    return train, [signals[index] for index in sorted(held_out_indices)]


def served_acceptance(signals: Sequence[Signal]) -> float | None:
    """Returns the acceptance rate of the signals in service; None if nothing was drafted."""
    tried = sum(signal.tried for signal in signals)
    return sum(signal.accepted for signal in signals) / tried if tried else None


@torch.no_grad()
def acceptance_rate(student: DraftStudent, signals: Sequence[Signal], depth: int) -> float:
    """Computes the acceptance rate that the drafter would have had on these tokens; 0 without any.

    It steps like an engine: `depth` greedy drafts, then it continues after the accepted drafts and
    one more token.  A draft counts as accepted if it equals the token that was served.
    """
    depth = min(depth, student.max_drafts or depth)
    runs = _accepted_runs(student, signals, depth)
    tried = sum(min(run + 1, depth) for run in runs)
    return sum(runs) / tried if tried else 0.0


@torch.no_grad()
def acceptance_length(student: DraftStudent, signals: Sequence[Signal], depth: int) -> float:
    """Computes the mean tokens per verification in the steps of `acceptance_rate`, at least 1."""
    runs = _accepted_runs(student, signals, min(depth, student.max_drafts or depth))
    return 1 + sum(runs) / max(len(runs), 1)


def _accepted_runs(student: DraftStudent, signals: Sequence[Signal], depth: int) -> list[int]:
    """Counts the accepted drafts of each step."""
    runs: list[int] = []
    for signal in signals:
        matches = _accepted_per_anchor(student, signal, depth)
        position = 0
        while position < len(matches):
            runs.append(matches[position])
            position += matches[position] + 1
    return runs


def _accepted_per_anchor(student: DraftStudent, signal: Signal, depth: int) -> list[int]:
    """Counts for each anchor how many of its first drafts equal the served tokens."""
    # The chain from row t drafts the tokens t + 2 .. t + 1 + depth.
    rows = len(signal.tokens) - depth - 1
    if rows < 1:
        return []
    first_anchor = min(_first_anchor(signal), rows - 1)
    device = student.embedding.device
    tokens = signal.tokens[None].to(device)
    positions = torch.arange(signal.start, signal.start + rows, device=device)
    features = signal.features[None, :rows].to(device, torch.float32)
    unrolled = student.unroll(
        features, tokens, depth, first_anchor=first_anchor, positions=positions
    )
    is_match = torch.stack(
        [
            student.drafted_tokens(logits)[0]
            == tokens[0, first_anchor + 2 + step : rows + 2 + step]
            for step, logits in enumerate(unrolled)
        ]
    )
    matches: list[int] = is_match.long().cumprod(0).sum(0).tolist()
    return matches


def _first_anchor(signal: Signal) -> int:
    """Returns the first position from which a drafter is evaluated.

    In service the first draft begins from the prompt's last position.  If the signal has less
    context than the drafter had in service, the first positions are skipped.
    """
    after_prompt = max(signal.context - 1, 0)
    has_full_context = signal.context and not signal.start
    return after_prompt if has_full_context else max(after_prompt, _MIN_CONTEXT_POSITIONS)


def fine_tune(
    student: DraftStudent,
    signals: Sequence[Signal],
    settings: AdaptSettings,
    on_progress: Callable[[float, float], None] | None = None,
) -> DraftStudent:
    """Trains a copy.  on_progress: called with the completed share and the loss in nats.

    Raises NotFiniteError.
    """
    trained = copy.deepcopy(student)
    longest_signal = max(len(signal.tokens) for signal in signals)
    learner = OnlineStudent(
        trained,
        OnlineSettings(
            learning_rate=settings.learning_rate,
            anchors=longest_signal,
            window=longest_signal + 1,
            top=signals[0].top_tokens.shape[1],
        ),
    )
    rng = random.Random(settings.seed)
    depth = trained.max_drafts or settings.depth
    steps = settings.passes * -(-len(signals) // settings.batch)
    for step, batch in enumerate(_batches(signals, settings, rng), start=1):
        training_round = _make_round(
            batch, trained.embedding.device, teach_prompts=settings.teach_prompts
        )
        update = learner.learn(training_round, depth)
        if on_progress is not None:
            on_progress(step / steps, update.loss)
    return trained


def _batches(
    signals: Sequence[Signal], settings: AdaptSettings, rng: random.Random
) -> Iterator[list[Signal]]:
    for _ in range(settings.passes):
        shuffled = list(signals)
        rng.shuffle(shuffled)
        for start in range(0, len(shuffled), settings.batch):
            yield shuffled[start : start + settings.batch]


def _make_round(signals: Sequence[Signal], device: torch.device, *, teach_prompts: bool) -> Round:
    """Makes a round of signals: right-aligned, the shorter ones padded."""
    longest = max(len(signal.tokens) for signal in signals)
    top = min(signal.top_tokens.shape[1] for signal in signals)

    def right_align(parts: Sequence[Tensor]) -> Tensor:
        padded = [
            functional.pad(part, (0, 0) * (part.dim() - 1) + (longest - len(part), 0))
            for part in parts
        ]
        return torch.stack(padded).to(device)

    valid_masks = [torch.ones(len(signal.tokens), dtype=torch.bool) for signal in signals]
    taught_masks = [
        valid_masks[index]
        if teach_prompts
        else _pad_prompt(signal, torch.ones(len(signal.top_logs))).bool()
        for index, signal in enumerate(signals)
    ]
    successors = [_successor_targets(signal, top) for signal in signals]
    return Round(
        tokens=right_align([signal.tokens for signal in signals]),
        features=right_align([signal.features.float() for signal in signals]),
        top_tokens=right_align([tokens for tokens, _ in successors]),
        top_logs=right_align([logs for _, logs in successors]),
        has_target=right_align(taught_masks),
        valid=right_align(valid_masks),
        positions=right_align(
            [torch.arange(signal.start, signal.start + len(signal.tokens)) for signal in signals]
        ),
    )


def _successor_targets(signal: Signal, top: int) -> tuple[Tensor, Tensor]:
    """Returns the likeliest next tokens and their log-probabilities, [n, top], of all positions.

    A prompt's position has the next token with probability 1, and no other.
    """
    tokens = _pad_prompt(signal, signal.top_tokens[:, :top].long())
    logs = _pad_prompt(signal, signal.top_logs[:, :top])
    prompt_positions = signal.context
    tokens[:prompt_positions, 0] = signal.tokens[1 : prompt_positions + 1]
    logs[:prompt_positions, 1:] = -torch.inf
    return tokens, logs


def _pad_prompt(signal: Signal, rows: Tensor) -> Tensor:
    """Prepends zeros for the prompt's positions to the rows of the other positions."""
    return torch.cat([rows.new_zeros(signal.context, *rows.shape[1:]), rows])
