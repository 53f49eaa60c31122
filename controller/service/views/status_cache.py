"""Caches the status of the engines for all viewers, at most one computation per second.

    every second    a point of every engine's history, from its counters
    on request      estimates, one `explain` of the core per engine; cached for a second, or longer
                    if that would take more than `_READ_SHARE_MAX` of the time with many engines

Everything runs on the event loop and yields between engines, so that steering continues.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog

import controller
from controller.core.clock import Clock
from controller.core.engine_spec import Arm
from controller.service.sessions.counters import POINT_FIELDS
from controller.service.sessions.registry import SessionRegistry
from controller.service.sessions.session import EngineSession
from controller.service.state.override_registry import OverrideRegistry
from controller.service.views.engine_status import (
    EngineLine,
    EngineSnapshot,
    engine_detail,
    engine_line,
    override_line,
    unavailable_line,
)
from controller.service.views.paging import unavailable_reason
from controller.service.views.readiness import Readiness
from controller.wire.explanations import ValueTable
from controller.wire.override_text import PRECEDENCE

# Seconds of history that are compared.
COMPARED_SECONDS: Final = 300.0

Point = Sequence[float | None]
_REFRESH_SECONDS = 1.0
# The largest share of the event loop's time for views.
_SHARE_MAX = 0.05
# Engines between two yields of the background task, a few microseconds each.
_CHUNK_ENGINES = 32

_log = structlog.get_logger(__name__)


def compare_alternatives(
    table: ValueTable, arms: Sequence[Arm], drafters: Sequence[str], points: Iterable[Point]
) -> dict[str, Any] | None:
    """Compares the plan with every arm held fixed, ready for JSON; None if nothing was reported.

    The batch sizes of the last minutes are evaluated with the present estimates, for each arm as if
    it had run all the time.  It is for people; no decision uses it.

    arms: of the table.  drafters: names, in the order of the points' indices.  points: of the
    history (`FIELDS`), all with the same weight; points without a report are skipped.  In the
    result, measured and planned are tokens per second of step time under the plan, as measured and
    by the estimates used for the arms.  For an arm, share is the share of seconds in which it was
    planned, and allowed the share in which overrides and the engine allowed it.
    """
    seconds: Counter[tuple[int, int]] = Counter()
    measured: list[float] = []
    for _, batch_size, gamma, drafter, _, tokens_per_second, _ in points:
        if batch_size is None or tokens_per_second is None or gamma is None or drafter is None:
            continue
        arm = Arm(drafters[int(drafter)], int(gamma))
        # A mixture that was dropped is in the history but no longer in the table.
        if arm in arms:
            seconds[arms.index(arm), _row(table.batch_sizes, batch_size)] += 1
            measured.append(tokens_per_second)
    count = len(measured)
    if not count:
        return None
    rows = Counter[int]()
    for (_, row), weight in seconds.items():
        rows[row] += weight
    planned = sum(table.tokens_per_second[arm][row] * n for (arm, row), n in seconds.items())
    return {
        "seconds": count,
        "measured": sum(measured) / count,
        "planned": planned / count,
        "arms": [
            {
                "drafter": arm.drafter,
                "gamma": arm.gamma,
                "tokens_per_second": sum(
                    table.tokens_per_second[i][row] * n for row, n in rows.items()
                )
                / count,
                "share": sum(n for (planned_arm, _), n in seconds.items() if planned_arm == i)
                / count,
                "allowed": sum(n for row, n in rows.items() if table.feasible[i][row]) / count,
            }
            for i, arm in enumerate(arms)
        ],
    }


def _row(batch_sizes: Sequence[int], batch_size: float) -> int:
    fitting = (row for row, size in enumerate(batch_sizes) if batch_size <= size)
    return next(fitting, len(batch_sizes) - 1)


@dataclass(eq=False, repr=False)
class StatusCache:
    """Caches lines and snapshots of the engines; there is one per sidecar."""

    registry: SessionRegistry
    override_registry: OverrideRegistry
    readiness: Readiness
    clock: Clock

    def __post_init__(self) -> None:
        # Fresh snapshots, each with its expiry; `run` drops the others, so that the cache keeps no
        # ended session in memory.
        self._snapshots: dict[EngineSession, tuple[float, EngineSnapshot]] = {}
        self._lines: tuple[EngineLine, ...] = ()
        self._lines_until = -math.inf
        # The event loop's time for making the newest lines.
        self.lines_seconds = 0.0
        self._lines_lock = asyncio.Lock()

    async def lines(self) -> tuple[EngineLine, ...]:
        """Returns the lines of all engines, ordered by id."""
        async with self._lines_lock:
            if self.clock.now() < self._lines_until:
                return self._lines
            lines, busy_seconds = [], 0.0
            for session in sorted(self.registry, key=lambda session: session.engine_id):
                began = time.monotonic()
                lines.append(self._line(session))
                busy_seconds += time.monotonic() - began
                await asyncio.sleep(0)
            self._lines, self.lines_seconds = tuple(lines), busy_seconds
            self._lines_until = self.clock.now() + max(_REFRESH_SECONDS, busy_seconds / _SHARE_MAX)
            return self._lines

    async def state(self) -> dict[str, Any]:
        """Returns the sidecar, its overrides and every engine's line, for JSON."""
        lines = await self.lines()
        store = self.override_registry.health
        return {
            "version": controller.__version__,
            "engines": lines,
            "overrides": list(map(override_line, self.override_registry.list_active())),
            "precedence": PRECEDENCE,
            "store": {"ok": store.ok, "detail": store.detail},
            "troubles": [
                f"{health.service or 'the sidecar'} is NOT_SERVING: {health.detail}"
                for health in self.readiness.services()
                if not health.serving
            ],
        }

    async def engine(self, engine_id: str, start_seconds: float) -> dict[str, Any]:
        """Returns an engine's details and its history after `start_seconds`, for JSON.

        Raises UnknownEngineError.
        """
        session = self.registry.find_by_engine(engine_id)
        view, history = self._snapshot(session), session.history
        return engine_detail(view) | {
            "fields": POINT_FIELDS,
            "points": history.points_since(start_seconds),
            "alternatives": compare_alternatives(
                view.explanation.table,
                [value.arm for value in view.explanation.arms],
                history.drafters,
                history.points_since(time.time() - COMPARED_SECONDS),
            ),
        }

    def _line(self, session: EngineSession) -> EngineLine:
        try:
            return engine_line(self._snapshot(session))
        except Exception as error:  # noqa: BLE001  # whatever is wrong with one, others are shown
            _log.exception("engine_not_shown", engine=session.engine_id)
            return unavailable_line(session, unavailable_reason(error))

    def _snapshot(self, session: EngineSession) -> EngineSnapshot:
        now = self.clock.now()
        fresh_until, snapshot = self._snapshots.get(session, (-math.inf, None))
        if snapshot is None or now >= fresh_until:
            snapshot = EngineSnapshot.from_session(session)
            self._snapshots[session] = (now + _REFRESH_SECONDS, snapshot)
        return snapshot

    async def run(self) -> None:
        """Records the engines' histories, until cancelled."""
        while True:
            now = time.time()
            for number, session in enumerate(self.registry, 1):
                try:
                    session.add_history_point(now)
                except Exception:  # noqa: BLE001  # as above
                    _log.exception("history_not_kept", engine=session.engine_id)
                if number % _CHUNK_ENGINES == 0:
                    await asyncio.sleep(0)
            self._drop_stale_snapshots()
            await asyncio.sleep(_REFRESH_SECONDS)

    def _drop_stale_snapshots(self) -> None:
        now = self.clock.now()
        self._snapshots = {
            session: (fresh_until, snapshot)
            for session, (fresh_until, snapshot) in self._snapshots.items()
            if now < fresh_until and not session.has_ended
        }
