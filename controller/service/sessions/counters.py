"""Adds up an engine's reports for metrics and people: in all, of the last minute, second by second.

Everything is read off the session's counters: no estimate is asked for, so it is always kept.  The
session owns them, and they hold no reference back to it, so that all end together.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from controller.core.engine.prediction_audit import PredictionAudit
from controller.core.plan import Plan, Reason
from controller.core.step_report import NO_FLAGS, RowGroup, StepReport

# What a uint64 holds: counters that clients feed stop there.
COUNT_MAX = 2**64 - 1
# Of the sums that are kept, one a second.
_SECONDS = 60
# Of a history, one a second.
POINTS = 600
# The columns of a point.
FIELDS = (
    "time", "batch_size", "gamma", "drafter", "accept_length", "tokens_per_second", "unsteered",
)  # fmt: skip


@dataclass(slots=True)
class Received:
    """Counts what has arrived on a stream.  reports: used or refused; dropped: reported as lost."""

    reports: int = 0
    dropped: int = 0


@dataclass(slots=True)
class StepCounters:
    """Counts what an engine's session has seen since its start; no counter ever decreases.

    messages: those with reports. drafts: sequences, step by step, for which something was drafted;
    drafted_tokens: theirs. by_length: entry k = sequences that accepted exactly k draft tokens,
    drafted for or not, with those of ended. ended: sequences, step by step, whose requests had
    ended before. delivered: tokens added to answers, None if no report says it. unsteered, eager,
    switched, probing: steps. lease_losses: times that steered steps were followed by one that was
    not. resets: times that the drafter went back to earlier weights or was given others; swaps:
    that its version changed. alone: the last step was not steered (None before the first).
    """

    reports: int = 0
    messages: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    dropped: int = 0
    plans: Counter[Reason] = field(default_factory=Counter)
    step_seconds: float = 0.0
    drafts: int = 0
    drafted_tokens: int = 0
    by_length: list[int] = field(default_factory=lambda: [0])
    ended: int = 0
    delivered: int | None = None
    unsteered: int = 0
    lease_losses: int = 0
    alone: bool | None = None
    eager: int = 0
    switched: int = 0
    probing: int = 0
    drafter_changes: int = 0
    updates: int = 0
    resets: int = 0
    swaps: int = 0
    rounds: Counter[str] = field(default_factory=Counter)

    def count(self, report: StepReport, before: StepReport | None) -> None:
        """Adds one report that was used.  before: the one that was used last."""
        self.reports += 1
        self.step_seconds += report.step_seconds
        lengths, counts = self.by_length, report.accepted_counts
        if len(counts) > len(lengths):
            lengths += [0] * (len(counts) - len(lengths))
        for k, sequences in enumerate(counts):
            lengths[k] += sequences
        if report.groups:
            self._count_groups(report.groups)
        elif report.gamma:
            self.drafts += report.batch_size
            self.drafted_tokens += report.gamma * report.batch_size
        if report.delivered_tokens is not None:
            self.delivered = (self.delivered or 0) + report.delivered_tokens
        if report.probe_id:
            self.probing += 1
        self.updates += report.update_seconds > 0
        if before is not None:
            self.drafter_changes += report.drafter != before.drafter
            self.swaps += report.draft_version != before.draft_version
        alone = False
        if (flags := report.flags) is not NO_FLAGS:
            alone = flags.unsteered
            self.unsteered += alone
            self.eager += flags.eager_fallback
            self.switched += flags.switched
            self.resets += flags.drafter_reset
        if alone is not self.alone:
            self.lease_losses += alone and self.alone is not None
            self.alone = alone

    def _count_groups(self, groups: Sequence[RowGroup]) -> None:
        for group in groups:
            rows = sum(group.accepted_counts)
            if group.gamma:
                self.drafts += rows
                self.drafted_tokens += group.gamma * rows
            elif group.ended:
                self.ended += rows

    @property
    def sequence_steps(self) -> int:
        """Sequences that decoded, step by step: each of them gained one token at least."""
        return sum(self.by_length) - self.ended

    @property
    def drafts_by_length(self) -> list[int]:
        """Drafts of which exactly k tokens were accepted, from k = 0."""
        undrafted = sum(self.by_length) - self.drafts
        return [self.by_length[0] - undrafted, *self.by_length[1:]]

    @property
    def accepted_by_position(self) -> list[int]:
        """Draft tokens accepted, by position, from the first."""
        accepted, total = [], 0
        for sequences in reversed(self.by_length[1:]):
            total += sequences
            accepted.append(total)
        return accepted[::-1]

    @property
    def accepted_tokens(self) -> int:
        """Draft tokens accepted."""
        return sum(k * sequences for k, sequences in enumerate(self.by_length))

    @property
    def generated_tokens(self) -> int:
        """Accepted draft tokens, and one bonus token per sequence and step."""
        return self.accepted_tokens + self.sequence_steps


class _Sums(NamedTuple):
    drafts: float
    draft_tokens: float
    accepted_tokens: float
    expected_tokens: float
    plain_seconds: float
    predicted_seconds: float
    error_seconds: float


class LastMinute:
    """Holds ratios over the last minute; None where it has nothing to divide by.

    The sums of the session are kept once a second, and the oldest of a minute is subtracted from
    the newest, so a scrape changes nothing.  The words are those of vLLM's log and of AIPerf.
    """

    def __init__(self, counters: StepCounters, audit: PredictionAudit) -> None:
        """Begins with the sums as they stand, and keeps references to both."""
        self._counters, self._audit = counters, audit
        self._kept = deque([self._now()], maxlen=_SECONDS + 1)

    def keep(self) -> None:
        """Keeps the sums of this second."""
        self._kept.append(self._now())

    @property
    def acceptance_length(self) -> float | None:
        """Returns the mean tokens that a draft gained, its bonus token included."""
        passed = self._passed
        return _ratio(passed.accepted_tokens + passed.drafts, passed.drafts)

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Returns the share of the draft tokens that was accepted."""
        passed = self._passed
        return _ratio(passed.accepted_tokens, passed.draft_tokens)

    @property
    def accepted_per_verified(self) -> float | None:
        """Returns the share of the verified tokens that was kept; both have the bonus token."""
        passed = self._passed
        kept, verified = passed.accepted_tokens, passed.draft_tokens
        return _ratio(kept + passed.drafts, verified + passed.drafts)

    @property
    def acceptance_length_error(self) -> float | None:
        """Returns expected minus actual acceptance length, in tokens."""
        passed = self._passed
        return _ratio(passed.expected_tokens - passed.accepted_tokens, passed.drafts)

    @property
    def step_time_error(self) -> float | None:
        """Returns the mean absolute error of predicted step times, relative to the steps' time."""
        passed = self._passed
        return _ratio(passed.error_seconds, passed.plain_seconds)

    @property
    def step_time_bias(self) -> float | None:
        """Returns predicted minus reported step time, relative to the latter."""
        passed = self._passed
        return _ratio(passed.predicted_seconds - passed.plain_seconds, passed.plain_seconds)

    @property
    def _passed(self) -> _Sums:
        first, last = self._kept[0], self._kept[-1]
        return _Sums(*(end - start for end, start in zip(last, first, strict=True)))

    def _now(self) -> _Sums:
        counters, audit = self._counters, self._audit
        return _Sums(
            counters.drafts, counters.drafted_tokens, counters.accepted_tokens,
            audit.expected_tokens, audit.plain_seconds, audit.predicted_seconds,
            audit.error_seconds,
        )  # fmt: skip


def _ratio(value: float, total: float) -> float | None:
    return value / total if total > 0 else None


class History:
    """The last `POINTS` points of one session.

    drafters: names, in the engine's order.

    time: Unix seconds.  batch_size, gamma, drafter (its index): as last reported, and as planned
    for that batch.  accept_length: tokens that a sequence gained in a step since the point before,
    its bonus token included.  tokens_per_second: of the steps since then.  unsteered: their share
    without a valid lease.  All but time, gamma and drafter are not known (None) where nothing was
    reported since the point before.
    """

    def __init__(self, drafters: Iterable[str], counters: StepCounters) -> None:
        """Starts without points.

        drafters: names, in the engine's order.  counters: as they stand now.
        """
        self.drafters = tuple(drafters)
        self._points = np.full((POINTS, len(FIELDS)), np.nan)
        self._count = 0
        self._newest_at = -math.inf
        # Tokens since the point before, by the time since then; None without one.
        self.generated_per_second: float | None = None
        self._seen = _counters(counters)

    def add(self, now: float, plan: Plan, last: StepReport | None, counters: StepCounters) -> None:
        """Adds a point at `now` (Unix seconds).  last: the newest report that was used."""
        arm = plan.row_for(last.batch_size if last else 1).arm
        before, self._seen = self._seen, _counters(counters)
        steps, sequences, tokens, seconds, unsteered = (
            now_is - was for now_is, was in zip(self._seen, before, strict=True)
        )
        elapsed = now - self._newest_at
        self.generated_per_second = tokens / elapsed if 0 < elapsed < math.inf else None
        self._newest_at = now
        self._points[self._count % POINTS] = (
            now,
            last.batch_size if last and steps else math.nan,
            arm.gamma,
            self.drafters.index(arm.drafter),
            tokens / sequences if sequences else math.nan,
            tokens / seconds if seconds else math.nan,
            unsteered / steps if steps else math.nan,
        )
        self._count += 1

    def since(self, time: float) -> list[list[float | None]]:
        """The points after that time, oldest first, each in the order of `FIELDS`."""
        first = self._count % POINTS if self._count > POINTS else 0
        rows = np.roll(self._points, -first, axis=0)[: min(self._count, POINTS)]
        return [list(map(_known, row)) for row in rows[rows[:, 0] > time].tolist()]

    @property
    def accept_length(self) -> float | None:
        """Returns the acceptance length of the newest point."""
        return self._newest("accept_length")

    @property
    def tokens_per_second(self) -> float | None:
        """Returns the tokens per second of the newest point."""
        return self._newest("tokens_per_second")

    def _newest(self, field: str) -> float | None:
        if not self._count:
            return None
        return _known(float(self._points[(self._count - 1) % POINTS, FIELDS.index(field)]))


def _counters(counters: StepCounters) -> Sequence[float]:
    sequences, tokens = counters.sequence_steps, counters.generated_tokens
    return counters.reports, sequences, tokens, counters.step_seconds, counters.unsteered


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
