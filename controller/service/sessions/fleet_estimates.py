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
import random
import socket
import time
from weakref import WeakKeyDictionary

import structlog

from controller.core.acceptance import warm_start
from controller.core.acceptance.warm_start import Belief
from controller.core.engine_spec import DrafterSpec, EngineSpec
from controller.core.errors import InvalidBeliefError
from controller.service.sessions.registry import SessionRegistry
from controller.service.sessions.session import EngineSession
from controller.store.interface import ACCEPTANCE, BlobStore, StoreUnavailableError
from controller.util import cancellation

_TELL_SECONDS = 60.0
# Of one group, under one name; as a hexadecimal digit.
_PLACES = 4
# Reports since it last told that make an engine worth hearing again.
_NEWS_REPORTS = 100
# Publishing at the end of a sidecar may take so long.
_LAST_WORDS_SECONDS = 1.0

_log = structlog.get_logger(__name__)


class FleetEstimates:
    """Never in the way of an engine.  tell_seconds: between two tellings, about."""

    def __init__(
        self, blobs: BlobStore, registry: SessionRegistry, tell_seconds: float = _TELL_SECONDS
    ) -> None:
        self._blobs = blobs
        self._registry = registry
        self._tell_seconds = tell_seconds
        self._told: WeakKeyDictionary[EngineSession, int] = WeakKeyDictionary()
        self._under_way: set[asyncio.Task[None]] = set()
        # Of these, those that publish: an engine that returns starts from its last estimates.
        self._telling_now: set[asyncio.Task[None]] = set()
        self._telling: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Begins to tell."""
        self._telling = asyncio.get_running_loop().create_task(self._tell_all())

    async def close(self) -> None:
        """Ends, and waits briefly for what is being published."""
        if self._telling is not None:
            await cancellation.end({self._telling})
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=_LAST_WORDS_SECONDS)
        await cancellation.end(self._under_way)

    def look_for(self, session: EngineSession) -> None:
        """Asks in the background, and warms the session when the answer comes."""
        self._start(self._find(session))

    def tell(self, session: EngineSession) -> None:
        """Tells in the background what the session has learnt, if it is news."""
        reports = session.core.reports
        if reports - self._told.get(session, 0) < _NEWS_REPORTS:
            return
        self._told[session] = reports
        work = self._put(session.spec, _group(session), session.core.beliefs())
        self._telling_now = {task for task in self._telling_now if not task.done()}
        self._telling_now.add(self._start(work))

    def _start(self, work: "asyncio._CoroutineLike[None]") -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    async def _tell_all(self) -> None:
        while True:
            await asyncio.sleep(self._tell_seconds * random.uniform(0.8, 1.2))
            for session in self._registry:
                self.tell(session)

    async def _put(self, spec: EngineSpec, group: str, beliefs: list[Belief]) -> None:
        place = int(_digest(spec.engine_id), 16) % _PLACES
        source = f"{group}{place:x}"
        try:
            for drafter in spec.drafters:
                mine = [b for b in beliefs if b.drafter == drafter.name]
                if mine:
                    text = warm_start.to_json(mine)
                    await self._blobs.put(ACCEPTANCE, _name(spec, drafter), source, text)
        except StoreUnavailableError as error:
            _log.debug("estimates_not_told", engine=spec.engine_id, error=str(error))

    async def _find(self, session: EngineSession) -> None:
        spec, own, sources, youngest = session.spec, _group(session), set(), float("inf")
        told: dict[str, list[tuple[Belief, float]]] = {}
        began = time.monotonic()
        if self._telling_now:
            await asyncio.wait(self._telling_now)
        try:
            for drafter in spec.drafters:
                for item in await self._blobs.items(ACCEPTANCE, _name(spec, drafter)):
                    try:
                        beliefs = warm_start.from_json(item.text)
                    except InvalidBeliefError as error:
                        _log.warning("estimates_refused", source=item.source, error=str(error))
                        continue
                    told.setdefault(item.source[: len(own)], []).extend(
                        (b, item.age_seconds) for b in beliefs if b.drafter == drafter.name
                    )
                    sources.add(item.source)
                    youngest = min(youngest, item.age_seconds)
        except StoreUnavailableError as error:
            _log.warning("estimates_not_found", engine=spec.engine_id, error=str(error))
            return
        groups = [told[own]] if own in told else told.values()
        pooled = warm_start.pool_groups(groups)
        if not pooled or session.ended is not None:
            return
        where = f"{len(sources)} engines' estimates, the youngest {youngest / 60:.0f} minutes old"
        session.begin_from(pooled, where)
        _log.info(
            "estimates_found",
            engine=spec.engine_id,
            sources=len(sources),
            youngest_seconds=round(youngest),
            waited_seconds=round(time.monotonic() - began, 3),
        )


def _group(session: EngineSession) -> str:
    """Fifteen hexadecimal digits: a source without its place."""
    return _digest(socket.gethostname(), session.identity.identity)[:15]


def _name(spec: EngineSpec, drafter: DrafterSpec) -> str:
    target = spec.fingerprint
    return _digest(
        target.target_model, target.target_revision, drafter.name, drafter.model, drafter.revision
    )


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
