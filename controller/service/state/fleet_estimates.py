"""Shares acceptance estimates in the fleet: a new session starts from what other engines learnt.

The blob store keeps them under (target model, drafter), one text per engine, which includes the
request classes.  An engine's estimates are published about once a minute if it has learnt enough
since then, and when its session ends.

Engines of one sidecar that were admitted by the same access entry (or by none) form a group.  A
group uses at most _PLACES entries in the blob store.  A new session starts from its own group's
estimates.  Without any, it starts from the other groups, all with the same weight, no matter how
many engines or reports they have published.
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
# Hexadecimal digits of a source that identify its group; one more digit is its place.
_GROUP_DIGITS = 15
# Entries of one group under one name; one hexadecimal digit.
_PLACES = 4
# Reports since the last publication after which an engine's estimates are published again.
_NEWS_REPORTS = 100
# Time limit for publications when the sidecar stops.
_LAST_WORDS_SECONDS = 1.0

_log = structlog.get_logger(__name__)


@dataclass(eq=False, repr=False)
class FleetEstimates:
    """Publishes and finds estimates in the background.

    tell_seconds: about the time between two publications of an engine.
    """

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
        """Waits briefly for publications under way."""
        await self._publishing.close(_LAST_WORDS_SECONDS)

    def look_for(self, session: EngineSession) -> None:
        """Searches for estimates in the background, and warm-starts the session from them."""
        spec = session.spec
        self.searches.ask(session, _digest(*(_name(spec, drafter) for drafter in spec.drafters)))

    def tell(self, session: EngineSession) -> None:
        """Publishes a session's estimates in the background, if it has enough new reports."""
        reports = session.core.reports
        if reports - self._told.get(session, 0) < _NEWS_REPORTS:
            return
        self._told[session] = reports
        work = self._put(session.spec, _group(session), session.core.beliefs())
        self._publishing.start("publish estimates", work)

    async def tell_all(self) -> None:
        """Publishes the estimates of every engine periodically, until cancelled."""
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
    """Holds pooled estimates of the same drafters, by group and for all groups together.

    sources: number of engines.  youngest: the age in seconds of the newest estimate.
    """

    of_group: Mapping[str, Sequence[Belief]]
    of_all: Sequence[Belief]
    sources: int
    youngest: float


def _pooled(stored: Mapping[str, Sequence[Blob]]) -> _Found:
    """Reads and pools estimates by drafter.  It takes milliseconds and must run in a thread.

    Entries that cannot be read are logged and skipped.
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
    """Warm-starts sessions from their own group's estimates, or else from those of all groups.

    began: the start of the search, on the monotonic clock.
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
    """Returns the part of a source that identifies its group."""
    return _digest(socket.gethostname(), session.identity.identity)[:_GROUP_DIGITS]


def _name(spec: EngineSpec, drafter: DrafterSpec) -> str:
    target = spec.fingerprint
    return _digest(
        target.target_model, target.target_revision, drafter.name, drafter.model, drafter.revision
    )


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
