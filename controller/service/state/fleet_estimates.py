"""Acceptance estimates as the fleet's goods: a fresh session begins from what others have learnt.

Kept under (target model, drafter), a text for every engine that told; request classes inside.  An
engine tells every minute or so, when it has learnt something since, and when its session ends.

Engines of one sidecar that were let in by the same access entry (or by none) are a group.  A group
takes at most _PLACES places in the blob store.  A fresh session starts from its own group's
estimates.  Without any, it starts from the other groups, each of which counts the same, whatever
number of engines or reports it has published.
"""

import asyncio
import hashlib
import math
import random
import socket
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import structlog

from controller.core.acceptance import warm_start
from controller.core.acceptance.warm_start import Belief
from controller.core.engine_spec import DrafterSpec, EngineSpec
from controller.core.errors import InvalidBeliefError
from controller.service.sessions.registry import SessionRegistry
from controller.service.sessions.session import EngineSession
from controller.service.state.session_searches import Give, SessionSearches
from controller.store.interface import ACCEPTANCE, Blob, BlobStore, StoreUnavailableError
from controller.util import tasks
from controller.util.tasks import BackgroundTasks

_TELL_SECONDS = 60.0
# Hexadecimal digits of a source that name its group; the last one is its place.
_GROUP_DIGITS = 15
# Of one group, under one name; as a hexadecimal digit.
_PLACES = 4
# Reports since it last told that make an engine worth hearing again.
_NEWS_REPORTS = 100
# Publishing at the end of a sidecar may take so long.
_LAST_WORDS_SECONDS = 1.0

_log = structlog.get_logger(__name__)


@dataclass(eq=False, repr=False)
class FleetEstimates:
    """Never in the way of an engine.  tell_seconds: between two tellings, about."""

    blobs: BlobStore
    registry: SessionRegistry
    tell_seconds: float = _TELL_SECONDS

    def __post_init__(self) -> None:
        self._told: WeakKeyDictionary[EngineSession, int] = WeakKeyDictionary()
        # Publications under way; they are awaited before a search, because an engine that returns
        # starts from its last estimates.
        self._publishing = BackgroundTasks()
        self.searches = SessionSearches("estimates", self._search)

    async def close(self) -> None:
        """Waits briefly for what is being published."""
        await self._publishing.close(_LAST_WORDS_SECONDS)

    def look_for(self, session: EngineSession) -> None:
        """Asks in the background, and warms the session when the answer comes."""
        spec = session.spec
        self.searches.ask(session, _digest(*(_name(spec, drafter) for drafter in spec.drafters)))

    def tell(self, session: EngineSession) -> None:
        """Tells in the background what the session has learnt, if it is news."""
        reports = session.core.reports
        if reports - self._told.get(session, 0) < _NEWS_REPORTS:
            return
        self._told[session] = reports
        work = self._put(session.spec, _group(session), session.core.beliefs())
        self._publishing.start("publish estimates", work)

    async def tell_all(self) -> None:
        """Tells about every engine from time to time, until cancelled."""
        while True:
            await asyncio.sleep(self.tell_seconds * random.uniform(0.8, 1.2))
            for session in self.registry:
                self.tell(session)

    async def _put(self, spec: EngineSpec, group: str, beliefs: list[Belief]) -> None:
        place = int(_digest(spec.engine_id), 16) % _PLACES
        source = f"{group}{place:x}"
        try:
            for drafter in spec.drafters:
                mine = [b for b in beliefs if b.drafter == drafter.name]
                if mine:
                    text = warm_start.to_json(mine)
                    await self.blobs.put(ACCEPTANCE, _name(spec, drafter), source, text)
        except StoreUnavailableError as error:
            _log.debug("estimates_not_told", engine=spec.engine_id, error=str(error))

    async def _search(self, session: EngineSession) -> Give | None:
        began = time.monotonic()
        await self._publishing.join()
        stored = {
            drafter.name: await self.blobs.items(ACCEPTANCE, _name(session.spec, drafter))
            for drafter in session.spec.drafters
        }
        found = await tasks.finish(asyncio.to_thread(_pooled, stored))
        return partial(_begin_from, found, began) if found.sources else None


@dataclass(frozen=True, slots=True)
class _Found:
    """Holds what engines have reported of the same drafters, by group and of all together.

    youngest: the age in seconds of the newest estimate.
    """

    of_group: Mapping[str, Sequence[Belief]]
    of_all: Sequence[Belief]
    sources: int
    youngest: float


def _pooled(stored: Mapping[str, Sequence[Blob]]) -> _Found:
    """Reads and pools estimates by drafter, which takes milliseconds: for a thread.

    What cannot be read is logged and left out.
    """
    told: dict[str, list[tuple[Belief, float]]] = {}
    ages: dict[str, float] = {}
    for name, items in stored.items():
        for item in items:
            try:
                beliefs = warm_start.from_json(item.text)
            except InvalidBeliefError as error:
                _log.warning("estimates_refused", source=item.source, error=str(error))
                continue
            ages[item.source] = min(item.age_seconds, ages.get(item.source, math.inf))
            told.setdefault(item.source[:_GROUP_DIGITS], []).extend(
                (belief, item.age_seconds) for belief in beliefs if belief.drafter == name
            )
    return _Found(
        {group: warm_start.pool_groups([beliefs]) for group, beliefs in told.items()},
        warm_start.pool_groups(told.values()),
        len(ages),
        min(ages.values(), default=0.0),
    )


def _begin_from(
    found: _Found, began: float, sessions: Sequence[EngineSession]
) -> Generator[None, None, None]:
    """Warms sessions by what their own group knows, or else by what all others do.

    began: when the search did, on the monotonic clock.
    """
    where = (
        f"{found.sources} engines' estimates, the youngest {found.youngest / 60:.0f} minutes old"
    )
    for session in sessions:
        pooled = found.of_group.get(_group(session), found.of_all)
        if pooled and not session.is_over:
            session.begin_from(pooled, where)
            _log.info(
                "estimates_found",
                engine=session.engine_id,
                sources=found.sources,
                youngest_seconds=round(found.youngest),
                waited_seconds=round(time.monotonic() - began, 3),
            )
        yield


def _group(session: EngineSession) -> str:
    """Returns a source without its place."""
    return _digest(socket.gethostname(), session.identity.identity)[:_GROUP_DIGITS]


def _name(spec: EngineSpec, drafter: DrafterSpec) -> str:
    target = spec.fingerprint
    return _digest(
        target.target_model, target.target_revision, drafter.name, drafter.model, drafter.revision
    )


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
