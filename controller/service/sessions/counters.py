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
_WINDOW_SECONDS = 60
# Points of a history, one per second.
POINTS_MAX = 600
# The columns of a point.
POINT_FIELDS = (
    "time", "batch_size", "gamma", "drafter", "accept_length", "tokens_per_second", "unsteered",
)  # fmt: skip


@dataclass(slots=True)
class ReceivedCounts:
    """Counts the reports of a stream.

    reports: used or refused.  dropped_reports: reported as lost.
    """

    reports: int = 0
    dropped_reports: int = 0


@dataclass(slots=True)
class StepCounters:
    """Counts what an engine's session has reported since its start; no counter ever decreases.

    A sequence counts once in every step in which it decodes.  messages: those with reports.
    drafts: sequences with a draft; drafted_tokens: their draft tokens.  sequences_by_length: entry
    k = sequences that accepted exactly k draft tokens, with or without a draft, those in
    `ended_sequences` included.  ended_sequences: sequences whose requests had ended before the
    step.  delivered_tokens: tokens added to answers, None if no report has them.  unsteered_steps,
    eager_steps, switched_steps, probe_steps: steps. lease_losses: changes from steered to unsteered
    steps.  drafter_resets: times that the drafter returned to earlier weights or received other
    ones; version_swaps: changes of its version.  last_step_unsteered: whether the last step was
    unsteered (None before the first).
    """

    reports: int = 0
    messages: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    dropped_reports: int = 0
    plans: Counter[Reason] = field(default_factory=Counter)
    step_seconds: float = 0.0
    drafts: int = 0
    drafted_tokens: int = 0
    sequences_by_length: list[int] = field(default_factory=lambda: [0])
    ended_sequences: int = 0
    delivered_tokens: int | None = None
    unsteered_steps: int = 0
    lease_losses: int = 0
    last_step_unsteered: bool | None = None
    eager_steps: int = 0
    switched_steps: int = 0
    probe_steps: int = 0
    drafter_changes: int = 0
    drafter_updates: int = 0
    drafter_resets: int = 0
    version_swaps: int = 0
    training_rounds: Counter[str] = field(default_factory=Counter)

    def add_report(self, report: StepReport, previous_report: StepReport | None) -> None:
        """Adds an accepted report.  previous_report: the accepted report before it."""
        self.reports += 1
        self.step_seconds += report.step_seconds
        sequences_by_length, counts = self.sequences_by_length, report.accepted_counts
        if len(counts) > len(sequences_by_length):
            sequences_by_length += [0] * (len(counts) - len(sequences_by_length))
        for k, sequences in enumerate(counts):
            sequences_by_length[k] += sequences
        if report.groups:
            self._count_groups(report.groups)
        elif report.gamma:
            self.drafts += report.batch_size
            self.drafted_tokens += report.gamma * report.batch_size
        if report.delivered_tokens is not None:
            self.delivered_tokens = (self.delivered_tokens or 0) + report.delivered_tokens
        if report.probe_id:
            self.probe_steps += 1
        self.drafter_updates += report.update_seconds > 0
        if previous_report is not None:
            self.drafter_changes += report.drafter != previous_report.drafter
            self.version_swaps += report.draft_version != previous_report.draft_version
        unsteered = False
        if (flags := report.flags) is not NO_FLAGS:
            unsteered = flags.unsteered
            self.unsteered_steps += unsteered
            self.eager_steps += flags.eager_fallback
            self.switched_steps += flags.switched
            self.drafter_resets += flags.drafter_reset
        if unsteered is not self.last_step_unsteered:
            self.lease_losses += unsteered and self.last_step_unsteered is not None
            self.last_step_unsteered = unsteered

    def _count_groups(self, groups: Sequence[RowGroup]) -> None:
        for group in groups:
            rows = sum(group.accepted_counts)
            if group.gamma:
                self.drafts += rows
                self.drafted_tokens += group.gamma * rows
            elif group.ended:
                self.ended_sequences += rows

    @property
    def sequence_steps(self) -> int:
        """Returns the sequences that decoded, summed over steps; each gained at least one token."""
        return sum(self.sequences_by_length) - self.ended_sequences

    @property
    def drafts_by_length(self) -> list[int]:
        """Returns the numbers of drafts of which exactly k tokens were accepted, from k = 0."""
        undrafted = sum(self.sequences_by_length) - self.drafts
        return [self.sequences_by_length[0] - undrafted, *self.sequences_by_length[1:]]

    @property
    def accepted_by_position(self) -> list[int]:
        """Returns the accepted draft tokens by position, from the first."""
        accepted, total = [], 0
        for sequences in reversed(self.sequences_by_length[1:]):
            total += sequences
            accepted.append(total)
        return accepted[::-1]

    @property
    def accepted_tokens(self) -> int:
        """Returns the accepted draft tokens."""
        return sum(k * sequences for k, sequences in enumerate(self.sequences_by_length))

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
        self._samples = deque([self._current_sums()], maxlen=_WINDOW_SECONDS + 1)

    def sample(self) -> None:
        """Takes a sample of the sums; it must be called once a second."""
        self._samples.append(self._current_sums())

    @property
    def acceptance_length(self) -> float | None:
        """Returns the mean tokens per draft, bonus token included."""
        sums = self._window_sums
        return _ratio(sums.accepted_tokens + sums.drafts, sums.drafts)

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Returns the share of draft tokens that were accepted."""
        sums = self._window_sums
        return _ratio(sums.accepted_tokens, sums.draft_tokens)

    @property
    def accepted_per_verified(self) -> float | None:
        """Returns the share of verified tokens that were kept, bonus tokens included in both."""
        sums = self._window_sums
        accepted, verified = sums.accepted_tokens, sums.draft_tokens
        return _ratio(accepted + sums.drafts, verified + sums.drafts)

    @property
    def acceptance_length_error(self) -> float | None:
        """Returns expected minus actual acceptance length, in tokens."""
        sums = self._window_sums
        return _ratio(sums.expected_tokens - sums.accepted_tokens, sums.drafts)

    @property
    def step_time_error(self) -> float | None:
        """Returns the mean absolute error of predicted step times, relative to the steps' time."""
        sums = self._window_sums
        return _ratio(sums.error_seconds, sums.plain_seconds)

    @property
    def step_time_bias(self) -> float | None:
        """Returns predicted minus reported step time, relative to the reported one."""
        sums = self._window_sums
        return _ratio(sums.predicted_seconds - sums.plain_seconds, sums.plain_seconds)

    @property
    def _window_sums(self) -> _Sums:
        oldest, newest = self._samples[0], self._samples[-1]
        return _Sums(*(end - start for end, start in zip(newest, oldest, strict=True)))

    def _current_sums(self) -> _Sums:
        counters, audit = self._counters, self._audit
        return _Sums(
            counters.drafts, counters.drafted_tokens, counters.accepted_tokens,
            audit.expected_tokens, audit.plain_seconds, audit.predicted_seconds,
            audit.error_seconds,
        )  # fmt: skip


def _ratio(value: float, total: float) -> float | None:
    return value / total if total > 0 else None


class History:
    """Holds the last `POINTS_MAX` points of one session.

    A point has these values.  time: Unix seconds.  batch_size: as last reported.  gamma, drafter
    (an index): as planned for that batch size.  accept_length: tokens per sequence and step since
    the previous point, bonus token included.  tokens_per_second: of the steps since then.
    unsteered: their share without a valid lease.  All but time, gamma and drafter are None if
    nothing was reported since then.
    """

    def __init__(self, drafters: Iterable[str], counters: StepCounters) -> None:
        """Starts without points.

        drafters: names, in the engine's order.  counters: the session's, as they are now.
        """
        self.drafters = tuple(drafters)
        self._points = np.full((POINTS_MAX, len(POINT_FIELDS)), np.nan)
        self._count = 0
        self._newest_at = -math.inf
        # Tokens per second since the previous point; None without one.
        self.generated_per_second: float | None = None
        self._last_counters = _counter_values(counters)

    def add_point(
        self, now: float, plan: Plan, last_report: StepReport | None, counters: StepCounters
    ) -> None:
        """Adds a point at `now` (Unix seconds).  last_report: the newest accepted report."""
        arm = plan.row_for(last_report.batch_size if last_report else 1).arm
        previous_counters, self._last_counters = self._last_counters, _counter_values(counters)
        steps, sequences, tokens, seconds, unsteered = (
            current - previous
            for current, previous in zip(self._last_counters, previous_counters, strict=True)
        )
        elapsed = now - self._newest_at
        self.generated_per_second = tokens / elapsed if 0 < elapsed < math.inf else None
        self._newest_at = now
        self._points[self._count % POINTS_MAX] = (
            now,
            last_report.batch_size if last_report and steps else math.nan,
            arm.gamma,
            self.drafters.index(arm.drafter),
            tokens / sequences if sequences else math.nan,
            tokens / seconds if seconds else math.nan,
            unsteered / steps if steps else math.nan,
        )
        self._count += 1

    def points_since(self, time: float) -> list[list[float | None]]:
        """Returns the points after that time, oldest first, each in the order of `POINT_FIELDS`."""
        oldest_index = self._count % POINTS_MAX if self._count > POINTS_MAX else 0
        rows = np.roll(self._points, -oldest_index, axis=0)[: min(self._count, POINTS_MAX)]
        return [list(map(_none_if_nan, row)) for row in rows[rows[:, 0] > time].tolist()]

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
        return _none_if_nan(
            float(self._points[(self._count - 1) % POINTS_MAX, POINT_FIELDS.index(field)])
        )


def _counter_values(counters: StepCounters) -> Sequence[float]:
    sequences, tokens = counters.sequence_steps, counters.generated_tokens
    return counters.reports, sequences, tokens, counters.step_seconds, counters.unsteered_steps


def _none_if_nan(value: float) -> float | None:
    return None if math.isnan(value) else value
