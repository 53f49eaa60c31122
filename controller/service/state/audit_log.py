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
_CLOSE_TIMEOUT_SECONDS = 1.0
# Replaced sessions with a record each: a burst for a restarted fleet, then one a minute.
_REPLACED_BURST: Final = 64
_REPLACED_PER_SECOND: Final = 1 / 60
# Further ones share one record per this time.
_COUNT_SECONDS: Final = 60.0

_log = structlog.get_logger(__name__)


class AuditLog:
    """Writes audit records in the background.  count_seconds: between two records of counts."""

    def __init__(self, store: Store, count_seconds: float = _COUNT_SECONDS) -> None:
        self._store = store
        self._pending_records = BackgroundTasks()
        self._replaced_bucket = limits.TokenBucket(_REPLACED_PER_SECOND, _REPLACED_BURST)
        self._count_seconds = count_seconds
        # Replaced sessions without a record of their own, and the last one of them.
        self._replaced_count = 0
        self._last_replaced: tuple[str, str] = ("", "")
        self._count_pending = asyncio.Event()

    def record(self, action: str, subject: str, caller: Caller, reason: str) -> None:
        """Adds a record.  subject: the object of the action.  reason: a description for people."""
        self._start_record(action, subject, Actor(caller.name, reason, caller.origin))

    def record_policy_change(self, path: str, reason: str) -> None:
        """Records a change of the policy file.  reason: a description for people."""
        self._start_record("policy", "policy", Actor("policy file", reason, path))

    def record_replaced_session(
        self, session: EngineSession, previous_session: EngineSession
    ) -> None:
        """Records or counts that an engine introduced itself under the id of another one."""
        origin = session.identity.origin
        if not self._count_pending.is_set() and self._replaced_bucket.try_consume():
            silent_seconds = previous_session.seconds_since_steered
            reason = f"the previous session was silent for {silent_seconds:.0f} s"
            self._start_record("replace_session", session.engine_id, Actor(origin, reason, origin))
            return
        self._replaced_count += 1
        self._last_replaced = session.engine_id, origin
        self._count_pending.set()

    async def record_counts(self) -> None:
        """Records each count once its time is over, until cancelled."""
        while True:
            await self._count_pending.wait()
            await asyncio.sleep(self._count_seconds)
            self._start_count_record()

    def _start_count_record(self) -> None:
        engine_id, origin = self._last_replaced
        reason = (
            f"{self._replaced_count} sessions were replaced since the last record, this one last"
        )
        self._replaced_count = 0
        self._count_pending.clear()
        self._start_record("replace_session", engine_id, Actor(origin, reason, origin))

    def _start_record(self, action: str, subject: str, actor: Actor) -> None:
        self._pending_records.start("write an audit record", self._write(action, subject, actor))

    async def _write(self, action: str, subject: str, actor: Actor) -> None:
        try:
            await self._store.record(action, subject, actor)
        except StoreError as error:
            _log.error(
                "audit_not_written",
                action=action,
                subject=subject,
                **asdict(actor),
                error=str(error),
            )

    async def close(self) -> None:
        """Waits briefly for unfinished records."""
        if self._count_pending.is_set():
            self._start_count_record()
        await self._pending_records.close(_CLOSE_TIMEOUT_SECONDS)
