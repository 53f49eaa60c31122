"""Keeps the sums of one engine's last minute, for acceptance and the errors of predictions.

The sums of the session are kept once a second, and the oldest of a minute is subtracted from the
newest, so a scrape changes nothing.  The words are those of vLLM's log and of AIPerf.
"""

from collections import deque
from typing import NamedTuple

from controller.core.engine.prediction_audit import PredictionAudit
from controller.service.sessions.counters import StepCounters

_SECONDS = 60


class _Sums(NamedTuple):
    drafts: float
    draft_tokens: float
    accepted_tokens: float
    expected_tokens: float
    plain_seconds: float
    predicted_seconds: float
    error_seconds: float


class LastMinute:
    """Ratios over the last minute; None where it has nothing to divide by."""

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
