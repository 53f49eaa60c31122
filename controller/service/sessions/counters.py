"""Adds up an engine's reports for metrics and people: totals, the last minute, and each second.

Everything comes from the session's counters, without estimates, so it is cheap enough to be always
on.  The session owns these objects, and they hold no reference to it, so their lifetimes are equal.
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

# The largest uint64: counters that add numbers sent by clients stop there.
COUNT_MAX = 2**64 - 1
# The window of `LastMinute`: its sums are kept once per second.
_SECONDS = 60
# Points of a history, one per second.
POINTS = 600
# The columns of a point.
FIELDS = (
    "time", "batch_size", "gamma", "drafter", "accept_length", "tokens_per_second", "unsteered",
)  # fmt: skip


@dataclass(slots=True)
class Received:
    """Counts the reports of a stream.  reports: used or refused; dropped: reported as lost."""

    reports: int = 0
    dropped: int = 0


@dataclass(slots=True)
class StepCounters:
    """Counts what an engine's session has reported since its start; no counter ever decreases.

    A sequence counts once in every step in which it decodes.  messages: those with reports.
    drafts: sequences with a draft; drafted_tokens: their draft tokens.  by_length: entry k =
    sequences that accepted exactly k draft tokens, with or without a draft, those in `ended`
    included.  ended: sequences whose requests had ended before the step.  delivered: tokens added
    to answers, None if no report has them.  unsteered, eager, switched, probing: steps.
    lease_losses: changes from steered to unsteered steps.  resets: times that the drafter returned
    to earlier weights or received other ones; swaps: changes of its version.  alone: whether the
    last step was unsteered (None before the first).
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
        """Adds an accepted report.  before: the accepted report before it."""
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
        """Returns the sequences that decoded, summed over steps; each gained at least one token."""
        return sum(self.by_length) - self.ended

    @property
    def drafts_by_length(self) -> list[int]:
        """Returns the numbers of drafts of which exactly k tokens were accepted, from k = 0."""
        undrafted = sum(self.by_length) - self.drafts
        return [self.by_length[0] - undrafted, *self.by_length[1:]]

    @property
    def accepted_by_position(self) -> list[int]:
        """Returns the accepted draft tokens by position, from the first."""
        accepted, total = [], 0
        for sequences in reversed(self.by_length[1:]):
            total += sequences
            accepted.append(total)
        return accepted[::-1]

    @property
    def accepted_tokens(self) -> int:
        """Returns the accepted draft tokens."""
        return sum(k * sequences for k, sequences in enumerate(self.by_length))

    @property
    def generated_tokens(self) -> int:
        """Returns the accepted draft tokens and one bonus token per sequence and step."""
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
    """Computes ratios over the last minute; None if the divisor is 0.

    The session's sums are sampled once a second, and a ratio uses the newest sample less the one
    of a minute ago, so a scrape changes nothing.  The terms are those of vLLM's log and of AIPerf.
    """

    def __init__(self, counters: StepCounters, audit: PredictionAudit) -> None:
        """Takes the first sample, and keeps references to both."""
        self._counters, self._audit = counters, audit
        self._kept = deque([self._now()], maxlen=_SECONDS + 1)

    def keep(self) -> None:
        """Takes a sample of the sums; it must be called once a second."""
        self._kept.append(self._now())

    @property
    def acceptance_length(self) -> float | None:
        """Returns the mean tokens per draft, bonus token included."""
        passed = self._passed
        return _ratio(passed.accepted_tokens + passed.drafts, passed.drafts)

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Returns the share of draft tokens that were accepted."""
        passed = self._passed
        return _ratio(passed.accepted_tokens, passed.draft_tokens)

    @property
    def accepted_per_verified(self) -> float | None:
        """Returns the share of verified tokens that were kept, bonus tokens included in both."""
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
        """Returns predicted minus reported step time, relative to the reported one."""
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
    """Holds the last `POINTS` points of one session.

    time: Unix seconds.  batch_size: as last reported.  gamma, drafter (an index): as planned for
    that batch size.  accept_length: tokens per sequence and step since the previous point, bonus
    token included.  tokens_per_second: of the steps since then.  unsteered: their share without a
    valid lease.  All but time, gamma and drafter are None if nothing was reported since then.
    """

    def __init__(self, drafters: Iterable[str], counters: StepCounters) -> None:
        """Starts without points.

        drafters: names, in the engine's order.  counters: the session's, as they are now.
        """
        self.drafters = tuple(drafters)
        self._points = np.full((POINTS, len(FIELDS)), np.nan)
        self._count = 0
        self._newest_at = -math.inf
        # Tokens per second since the previous point; None without one.
        self.generated_per_second: float | None = None
        self._seen = _counters(counters)

    def add(self, now: float, plan: Plan, last: StepReport | None, counters: StepCounters) -> None:
        """Adds a point at `now` (Unix seconds).  last: the newest accepted report."""
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
        """Returns the points after that time, oldest first, each in the order of `FIELDS`."""
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
