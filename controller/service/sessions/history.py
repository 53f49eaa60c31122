"""One engine's last minutes, a point a second, in a piece of memory that does not grow.

A point is read off the session's counters: no estimate is asked for, so it is always kept.  The
session owns its history, which holds no reference back to it, so that both end together.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from controller.core.plan import Plan
from controller.core.step_report import StepReport
from controller.service.sessions.counters import StepCounters

POINTS = 600
# The columns of a point.
FIELDS = (
    "time", "batch_size", "gamma", "drafter", "accept_length", "tokens_per_second", "unsteered",
)  # fmt: skip


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
