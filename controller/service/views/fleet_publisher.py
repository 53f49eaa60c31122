"""Publishes this sidecar's engines to the others: a short text in the store, every few seconds.

It runs beside everything else: if the store is away, a text is lost, and nothing waits for it.
"""

import asyncio
import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

import controller
from controller.service.views.engine_status import EngineLine
from controller.service.views.fleet_summary import (
    EVERY_SECONDS,
    FleetMember,
    encode_summary,
    summary_of,
)
from controller.service.views.status_cache import StatusCache
from controller.store.interface import StoreUnavailableError, SummaryBoard

PUBLISH_SECONDS = 5.0
# The most of the event loop's time that summaries take: many engines are published less often.
_SHARE_MAX = 0.01
# Taking the text away at the end of a sidecar may take so long.
_LAST_WORDS_SECONDS = 1.0

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Published:
    """Counts texts since the start.  failed: those that the store did not take."""

    written: int = 0
    failed: int = 0


class FleetPublisher:
    """One per sidecar.  board: None if no other sidecar would read it."""

    def __init__(
        self,
        board: SummaryBoard | None,
        status_cache: StatusCache,
        me: FleetMember,
    ) -> None:
        self._board = board
        self._status_cache = status_cache
        self._me = me
        self._began = False
        self.published = Published()

    async def close(self) -> None:
        """Takes the text away: a sidecar that was stopped is not silent, but gone."""
        if self._board is None or not self._began:
            return
        with contextlib.suppress(StoreUnavailableError, TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                await self._board.remove(self._me.source)

    async def publish(self) -> None:
        """Publishes from time to time, until cancelled."""
        assert self._board is not None
        board, trouble = self._board, ""
        self._began = True
        while True:
            lines = await self._status_cache.lines()
            every = self._seconds()
            # A thread's work: a thousand engines take some tens of milliseconds.
            body = await asyncio.to_thread(self._encoded, lines, every)
            try:
                await board.put(self._me.source, body)
            except StoreUnavailableError as error:
                self.published.failed += 1
                if not trouble:
                    _log.warning("fleet_not_published", error=str(error))
                trouble = str(error)
            else:
                self.published.written += 1
                if trouble:
                    _log.info("fleet_published_again")
                trouble = ""
            await asyncio.sleep(every * random.uniform(0.8, 1.2))

    def _encoded(self, lines: Sequence[EngineLine], every_seconds: float) -> bytes:
        engines = map(summary_of, lines)
        return encode_summary(self._me.name, controller.__version__, every_seconds, engines)

    def _seconds(self) -> float:
        """Seconds until the next text."""
        busy = self._status_cache.lines_seconds
        return min(max(PUBLISH_SECONDS, busy / _SHARE_MAX), EVERY_SECONDS[1])
