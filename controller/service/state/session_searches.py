"""Searches a store in the background for what new sessions need.

There is one search at a time, and sessions with the same need share one.  The search for a session
is cancelled when the session ends.  Engines that introduce themselves repeatedly therefore cost at
most one search at a time, and their ended sessions use no memory.
"""

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence

import structlog

from controller.service.net.limits import Turns
from controller.service.sessions.session import EngineSession
from controller.store.interface import StoreUnavailableError

# Applies the result to sessions, and yields after each one.
Give = Callable[[Sequence[EngineSession]], Generator[None, None, None]]

_log = structlog.get_logger(__name__)


class SessionSearches:
    """Searches for one kind of data.

    goods: its name, for the log.  search: finds what a session needs.  It returns a function that
    applies the result to all sessions with the same need, or None if nothing was found.  If the
    store is unavailable, the sessions get nothing.
    """

    def __init__(
        self, goods: str, search: Callable[[EngineSession], Awaitable[Give | None]]
    ) -> None:
        self._goods = goods
        self._search = search
        # What each waiting session needs; the one that has waited the longest first.
        self._waiting: dict[EngineSession, str] = {}
        # The sessions of the present search.
        self._sought: dict[EngineSession, str] = {}
        self._turns = Turns(1)
        self._asked = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._sought)

    def ask(self, session: EngineSession, need: str) -> None:
        """Requests a search for a session; sessions with an equal `need` share a search."""
        self._waiting[session] = need
        self._asked.set()

    def withdraw(self, session: EngineSession) -> None:
        """Cancels the search for a session that has ended."""
        self._waiting.pop(session, None)
        self._sought.pop(session, None)

    async def keep(self) -> None:
        """Runs the requested searches, until cancelled."""
        # An interrupted search starts again.
        self._waiting, self._sought = self._sought | self._waiting, {}
        while True:
            await self._asked.wait()
            while self._waiting:
                await self._search_for_first()
            self._asked.clear()

    async def _search_for_first(self) -> None:
        session, need = next(iter(self._waiting.items()))
        self._sought = self._take(need)
        try:
            async with self._turns.turn():
                give = await self._search(session)
            if give is not None:
                # The result is also for sessions that were added meanwhile.  Without a result they
                # wait for another search: the store may have got the data after this one.
                self._sought |= self._take(need)
                await self._turns.take_pieces(give(list(self._sought)))
        except StoreUnavailableError as error:
            _log.warning(
                "search_failed", goods=self._goods, engine=session.engine_id, error=str(error)
            )
        except Exception:  # noqa: BLE001  # a failure for one need must not block the others
            _log.exception("search_failed", goods=self._goods, engine=session.engine_id)
        self._sought = {}

    def _take(self, need: str) -> dict[EngineSession, str]:
        """Removes the sessions with this need from those that wait, and returns them."""
        taken = {session: its for session, its in self._waiting.items() if its == need}
        for session in taken:
            del self._waiting[session]
        return taken
