"""Searches a store for what new sessions need, in the background of everything else.

There is one search at a time, and one for all sessions that need the same.  A session that ends is
no longer searched for.  Sessions that introduce themselves again and again therefore cost no more
than one search at a time, and hold no memory once they are over.
"""

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence

import structlog

from controller.service.net.limits import Turns
from controller.service.sessions.session import EngineSession
from controller.store.interface import StoreUnavailableError

# Gives what was found to sessions, and yields after each one.
Give = Callable[[Sequence[EngineSession]], Generator[None, None, None]]

_log = structlog.get_logger(__name__)


class SessionSearches:
    """Searches for one sort of goods.

    goods: their name, for the log.  search: looks for what a session needs; it returns how all
    sessions that need the same are given what was found, or None.  Where the store is unavailable
    they get nothing.
    """

    def __init__(
        self, goods: str, search: Callable[[EngineSession], Awaitable[Give | None]]
    ) -> None:
        self._goods = goods
        self._search = search
        # By session, what it needs; the one that has waited the longest first.
        self._waiting: dict[EngineSession, str] = {}
        # Those that the present search is for.
        self._sought: dict[EngineSession, str] = {}
        self._turns = Turns(1)
        self._asked = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._sought)

    def ask(self, session: EngineSession, need: str) -> None:
        """Searches for what a session needs; `need` is equal where sessions need the same."""
        self._waiting[session] = need
        self._asked.set()

    def withdraw(self, session: EngineSession) -> None:
        """The session is over, and needs nothing more."""
        self._waiting.pop(session, None)
        self._sought.pop(session, None)

    async def keep(self) -> None:
        """Searches whenever it is asked to, until cancelled."""
        # A search that was interrupted begins again.
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
                # What was found is also for those who have asked meanwhile.  If nothing was, they
                # wait for another search: what they need may have come after this one had looked.
                self._sought |= self._take(need)
                await self._turns.take_pieces(give(list(self._sought)))
        except StoreUnavailableError as error:
            _log.warning(
                "search_failed", goods=self._goods, engine=session.engine_id, error=str(error)
            )
        except Exception:  # noqa: BLE001  # what fails for one need keeps no other one waiting
            _log.exception("search_failed", goods=self._goods, engine=session.engine_id)
        self._sought = {}

    def _take(self, need: str) -> dict[EngineSession, str]:
        """Removes those from the waiting who need the same, and returns them."""
        taken = {session: its for session, its in self._waiting.items() if its == need}
        for session in taken:
            del self._waiting[session]
        return taken
