"""Shares acceptance estimates in the fleet: a new session starts from what other engines learnt.

The blob store keeps them under (target model, drafter), one text per engine, which includes the
request classes.  An engine's estimates are published about once a minute if it has learnt enough
since then, and when its session ends.

Engines of one sidecar that were admitted by the same access entry (or by none) form a group.  A
group uses at most _SLOTS_PER_GROUP entries in the blob store.  A new session starts from its own
group's estimates.  Without any, it starts from the other groups, all with the same weight, no
matter how many engines or reports they have published.
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
from controller.core.acceptance.warm_start import AcceptanceSnapshot
from controller.core.engine_spec import DrafterSpec, EngineSpec
from controller.core.errors import InvalidBeliefError
from controller.service.sessions.registry import SessionRegistry
from controller.service.sessions.session import EngineSession
from controller.service.state.session_searches import DeliverResult, SessionSearches
from controller.store.interface import ACCEPTANCE, Blob, BlobStore, StoreUnavailableError
from controller.util import tasks
from controller.util.tasks import BackgroundTasks

_PUBLISH_SECONDS = 60.0
# Hexadecimal digits of a source that identify its group; one more digit is its slot.
_GROUP_DIGITS = 15
# Entries of one group under one name; one hexadecimal digit.
_SLOTS_PER_GROUP = 4
# Reports since the last publication after which an engine's estimates are published again.
_NEW_REPORTS_MIN = 100
# Time limit for publications when the sidecar stops.
_CLOSE_TIMEOUT_SECONDS = 1.0

_log = structlog.get_logger(__name__)


@dataclass(eq=False, repr=False)
class FleetEstimates:
    """Publishes and finds estimates in the background.

    publish_seconds: about the time between two publications of an engine.
    """

    blobs: BlobStore
    registry: SessionRegistry
    publish_seconds: float = _PUBLISH_SECONDS

    def __post_init__(self) -> None:
        self._published_reports: WeakKeyDictionary[EngineSession, int] = WeakKeyDictionary()
        # Publications under way; they are awaited before a search, because an engine that returns
        # starts from its last estimates.
        self._publications = BackgroundTasks()
        self.searches = SessionSearches("estimates", self._search)

    async def close(self) -> None:
        """Waits briefly for publications under way."""
        await self._publications.close(_CLOSE_TIMEOUT_SECONDS)

    def search_for(self, session: EngineSession) -> None:
        """Searches for estimates in the background, and warm-starts the session from them."""
        spec = session.spec
        self.searches.request(
            session, _digest(*(_store_key(spec, drafter) for drafter in spec.drafters))
        )

    def publish(self, session: EngineSession) -> None:
        """Publishes a session's estimates in the background, if it has enough new reports."""
        reports = session.core.reports
        if reports - self._published_reports.get(session, 0) < _NEW_REPORTS_MIN:
            return
        self._published_reports[session] = reports
        work = self._publish(session.spec, _group(session), session.core.acceptance_snapshots())
        self._publications.start("publish estimates", work)

    async def publish_all(self) -> None:
        """Publishes the estimates of every engine periodically, until cancelled."""
        while True:
            await asyncio.sleep(self.publish_seconds * random.uniform(0.8, 1.2))
            for session in self.registry:
                self.publish(session)

    async def _publish(
        self, spec: EngineSpec, group: str, snapshots: list[AcceptanceSnapshot]
    ) -> None:
        slot = int(_digest(spec.engine_id), 16) % _SLOTS_PER_GROUP
        source = f"{group}{slot:x}"
        try:
            for drafter in spec.drafters:
                drafter_snapshots = [
                    snapshot for snapshot in snapshots if snapshot.drafter == drafter.name
                ]
                if drafter_snapshots:
                    text = warm_start.to_json(drafter_snapshots)
                    await self.blobs.put(ACCEPTANCE, _store_key(spec, drafter), source, text)
        except StoreUnavailableError as error:
            _log.debug("estimates_not_published", engine=spec.engine_id, error=str(error))

    async def _search(self, session: EngineSession) -> DeliverResult | None:
        began = time.monotonic()
        await self._publications.join()
        stored = {
            drafter.name: await self.blobs.items(ACCEPTANCE, _store_key(session.spec, drafter))
            for drafter in session.spec.drafters
        }
        estimates = await tasks.run_to_completion(asyncio.to_thread(_pool_stored, stored))
        return partial(_warm_start_sessions, estimates, began) if estimates.source_count else None


@dataclass(frozen=True, slots=True)
class _PooledEstimates:
    """Holds pooled estimates of the same drafters, by group and for all groups together.

    source_count: number of engines.  youngest_seconds: the age in seconds of the newest estimate.
    """

    by_group: Mapping[str, Sequence[AcceptanceSnapshot]]
    all_groups: Sequence[AcceptanceSnapshot]
    source_count: int
    youngest_seconds: float


def _pool_stored(stored: Mapping[str, Sequence[Blob]]) -> _PooledEstimates:
    """Reads and pools estimates by drafter.  It takes milliseconds and must run in a thread.

    Entries that cannot be read are logged and skipped.
    """
    snapshots_by_group: dict[str, list[tuple[AcceptanceSnapshot, float]]] = {}
    ages: dict[str, float] = {}
    for name, items in stored.items():
        for item in items:
            try:
                snapshots = warm_start.from_json(item.text)
            except InvalidBeliefError as error:
                _log.warning("estimates_refused", source=item.source, error=str(error))
                continue
            ages[item.source] = min(item.age_seconds, ages.get(item.source, math.inf))
            snapshots_by_group.setdefault(item.source[:_GROUP_DIGITS], []).extend(
                (snapshot, item.age_seconds) for snapshot in snapshots if snapshot.drafter == name
            )
    return _PooledEstimates(
        {
            group: warm_start.pool_groups([snapshots])
            for group, snapshots in snapshots_by_group.items()
        },
        warm_start.pool_groups(snapshots_by_group.values()),
        len(ages),
        min(ages.values(), default=0.0),
    )


def _warm_start_sessions(
    estimates: _PooledEstimates, began: float, sessions: Sequence[EngineSession]
) -> Generator[None, None, None]:
    """Warm-starts sessions from their own group's estimates, or else from those of all groups.

    began: the start of the search, on the monotonic clock.
    """
    source_text = (
        f"{estimates.source_count} engines' estimates, the youngest "
        f"{estimates.youngest_seconds / 60:.0f} minutes old"
    )
    for session in sessions:
        pooled = estimates.by_group.get(_group(session), estimates.all_groups)
        if pooled and not session.has_ended:
            session.warm_start_from(pooled, source_text)
            _log.info(
                "estimates_found",
                engine=session.engine_id,
                sources=estimates.source_count,
                youngest_seconds=round(estimates.youngest_seconds),
                waited_seconds=round(time.monotonic() - began, 3),
            )
        yield


def _group(session: EngineSession) -> str:
    """Returns the part of a source that identifies its group."""
    return _digest(socket.gethostname(), session.identity.access_key)[:_GROUP_DIGITS]


def _store_key(spec: EngineSpec, drafter: DrafterSpec) -> str:
    target = spec.fingerprint
    return _digest(
        target.target_model, target.target_revision, drafter.name, drafter.model, drafter.revision
    )


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
