"""Searches a store in the background for what new sessions need.

There is one search at a time, and sessions with the same need share one.  The search for a session
is cancelled when the session ends.  Engines that introduce themselves repeatedly therefore cost at
most one search at a time, and their ended sessions use no memory.
"""

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence

import structlog

from controller.service.net.limits import FairQueue
from controller.service.sessions.session import EngineSession
from controller.store.interface import StoreUnavailableError

# Applies the result to sessions, and yields after each one.
DeliverResult = Callable[[Sequence[EngineSession]], Generator[None, None, None]]

_log = structlog.get_logger(__name__)


class SessionSearches:
    """Searches for one kind of data.

    subject: name of the data, for the log.  search: finds what a session needs.  It returns a
    function that applies the result to all sessions with the same need, or None if nothing was
    found.  If the store is unavailable, the sessions get nothing.
    """

    def __init__(
        self, subject: str, search: Callable[[EngineSession], Awaitable[DeliverResult | None]]
    ) -> None:
        self._subject = subject
        self._search = search
        # What each waiting session needs; the one that has waited the longest first.
        self._waiting: dict[EngineSession, str] = {}
        # The sessions of the present search.
        self._searching: dict[EngineSession, str] = {}
        self._search_queue = FairQueue(1)
        self._requested = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._searching)

    def request(self, session: EngineSession, need: str) -> None:
        """Requests a search for a session; sessions with an equal `need` share a search."""
        self._waiting[session] = need
        self._requested.set()

    def cancel(self, session: EngineSession) -> None:
        """Cancels the search for a session that has ended."""
        self._waiting.pop(session, None)
        self._searching.pop(session, None)

    async def run(self) -> None:
        """Runs the requested searches, until cancelled."""
        # An interrupted search starts again.
        self._waiting, self._searching = self._searching | self._waiting, {}
        while True:
            await self._requested.wait()
            while self._waiting:
                await self._search_for_first()
            self._requested.clear()

    async def _search_for_first(self) -> None:
        session, need = next(iter(self._waiting.items()))
        self._searching = self._pop_waiting(need)
        try:
            async with self._search_queue.turn():
                deliver = await self._search(session)
            if deliver is not None:
                # The result is also for sessions that were added meanwhile.  Without a result they
                # wait for another search: the store may have got the data after this one.
                self._searching |= self._pop_waiting(need)
                await self._search_queue.run_sliced(deliver(list(self._searching)))
        except StoreUnavailableError as error:
            _log.warning(
                "search_failed", goods=self._subject, engine=session.engine_id, error=str(error)
            )
        except Exception:  # noqa: BLE001  # a failure for one need must not block the others
            _log.exception("search_failed", goods=self._subject, engine=session.engine_id)
        self._searching = {}

    def _pop_waiting(self, need: str) -> dict[EngineSession, str]:
        """Removes the sessions with this need from those that wait, and returns them."""
        matching = {
            session: session_need
            for session, session_need in self._waiting.items()
            if session_need == need
        }
        for session in matching:
            del self._waiting[session]
        return matching
