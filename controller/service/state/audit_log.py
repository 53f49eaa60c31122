"""Audits what is done to engines beside overrides.

    measure          an engine was forced to run what a client asked for
    install_profile  costs of the engines named were replaced
    push_profile     a profile was given to the fleet
    replace_session  an engine id went from one process to another
    policy           what the policy file says has changed

These actions do not wait for the store.  A record that the store does not take is logged in full.

Whoever may introduce an engine can make ids change hands as fast as the sidecar answers.  Beyond
a rate these records are therefore counted, and one record tells the count: a record each would keep
overrides waiting for the disk, and push the older records out of the audit.
"""

import asyncio
from dataclasses import asdict
from typing import Final

import structlog

from controller.service.net import limits
from controller.service.net.callers import Caller
from controller.service.sessions.session import EngineSession
from controller.store.interface import Actor, Store, StoreError
from controller.util.tasks import BackgroundTasks

# Records that are being written when the sidecar stops may take so long.
_LAST_WORDS_SECONDS = 1.0
# Replaced sessions that have a record each: a fleet that starts again, and one a minute beyond it.
_REPLACED_AT_ONCE: Final = 64
_REPLACED_A_SECOND: Final = 1 / 60
# Those beyond that share a record once in so many seconds.
_COUNTED_SECONDS: Final = 60.0

_log = structlog.get_logger(__name__)


class AuditLog:
    """Writes in the background.  counted_seconds: between two records of a count."""

    def __init__(self, store: Store, counted_seconds: float = _COUNTED_SECONDS) -> None:
        self._store = store
        self._writing = BackgroundTasks()
        self._replaced = limits.Bucket(_REPLACED_A_SECOND, _REPLACED_AT_ONCE)
        self._counted_seconds = counted_seconds
        # Replaced sessions without a record of their own, and the last one of them.
        self._count = 0
        self._last: tuple[str, str] = ("", "")
        self._counting = asyncio.Event()

    def record(self, action: str, subject: str, caller: Caller, reason: str) -> None:
        """Adds a record.  subject: what it was done to.  reason: what was done, in words."""
        self._begin(action, subject, Actor(caller.name, reason, caller.origin))

    def policy(self, path: str, reason: str) -> None:
        """The policy file has changed.  reason: what changed, in words."""
        self._begin("policy", "policy", Actor("policy file", reason, path))

    def replaced(self, session: EngineSession, before: EngineSession) -> None:
        """An engine introduced itself under the id of another one."""
        origin = session.identity.origin
        if not self._counting.is_set() and self._replaced.take():
            reason = f"the session before was silent for {before.seconds_since_steered:.0f} s"
            self._begin("replace_session", session.engine_id, Actor(origin, reason, origin))
            return
        self._count += 1
        self._last = session.engine_id, origin
        self._counting.set()

    async def tell_counts(self) -> None:
        """Records a count some time after it began, until cancelled."""
        while True:
            await self._counting.wait()
            await asyncio.sleep(self._counted_seconds)
            self._begin_counted()

    def _begin_counted(self) -> None:
        engine_id, origin = self._last
        reason = f"{self._count} engine ids changed hands since the record before, this one last"
        self._count = 0
        self._counting.clear()
        self._begin("replace_session", engine_id, Actor(origin, reason, origin))

    def _begin(self, action: str, subject: str, who: Actor) -> None:
        self._writing.start("write an audit record", self._write(action, subject, who))

    async def _write(self, action: str, subject: str, who: Actor) -> None:
        try:
            await self._store.record(action, subject, who)
        except StoreError as error:
            _log.error(
                "audit_not_written", action=action, subject=subject, **asdict(who), error=str(error)
            )

    async def close(self) -> None:
        """Waits for what is being written, briefly."""
        if self._counting.is_set():
            self._begin_counted()
        await self._writing.close(_LAST_WORDS_SECONDS)
