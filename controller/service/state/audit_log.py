"""Records actions on engines, other than overrides, in the audit.

    measure          a client forced an engine to run an arm
    install_profile  the costs of the named engines were replaced
    push_profile     a profile was shared with the fleet
    replace_session  an engine id moved from one process to another
    policy           the content of the policy file changed

These actions do not wait for the store.  If the store refuses a record, it is logged in full.

A client that may introduce engines can replace sessions as fast as the sidecar answers.  Beyond a
rate these replacements are therefore counted, and one record has the count.  Separate records would
delay overrides at the disk, and displace older records of the audit.
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

# Time limit for unfinished records when the sidecar stops.
_LAST_WORDS_SECONDS = 1.0
# Replaced sessions with a record each: a burst for a restarted fleet, then one a minute.
_REPLACED_AT_ONCE: Final = 64
_REPLACED_A_SECOND: Final = 1 / 60
# Further ones share one record per this time.
_COUNTED_SECONDS: Final = 60.0

_log = structlog.get_logger(__name__)


class AuditLog:
    """Writes audit records in the background.  counted_seconds: between two records of counts."""

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
        """Adds a record.  subject: the object of the action.  reason: a description for people."""
        self._begin(action, subject, Actor(caller.name, reason, caller.origin))

    def policy(self, path: str, reason: str) -> None:
        """Records a change of the policy file.  reason: a description for people."""
        self._begin("policy", "policy", Actor("policy file", reason, path))

    def replaced(self, session: EngineSession, before: EngineSession) -> None:
        """Records or counts that an engine introduced itself under the id of another one."""
        origin = session.identity.origin
        if not self._counting.is_set() and self._replaced.take():
            reason = f"the previous session was silent for {before.seconds_since_steered:.0f} s"
            self._begin("replace_session", session.engine_id, Actor(origin, reason, origin))
            return
        self._count += 1
        self._last = session.engine_id, origin
        self._counting.set()

    async def tell_counts(self) -> None:
        """Records each count once its time is over, until cancelled."""
        while True:
            await self._counting.wait()
            await asyncio.sleep(self._counted_seconds)
            self._begin_counted()

    def _begin_counted(self) -> None:
        engine_id, origin = self._last
        reason = f"{self._count} sessions were replaced since the last record, this one last"
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
        """Waits briefly for unfinished records."""
        if self._counting.is_set():
            self._begin_counted()
        await self._writing.close(_LAST_WORDS_SECONDS)
