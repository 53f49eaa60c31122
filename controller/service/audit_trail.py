"""What is done to engines beside overrides, for the same audit.

    measure          an engine was forced to run what a client asked for
    install_profile  costs of the engines named were replaced
    push_profile     a profile was given to the fleet
    replace_session  an engine id went from one process to another

These actions do not wait for the store.  A record that the store does not take is logged in full.
"""

import asyncio
from dataclasses import asdict

import structlog

from controller import tasks
from controller.service.callers import Caller
from controller.service.session import Session
from controller.store.port import Store, StoreError, Who

# Records that are being written when the sidecar stops may take so long.
_LAST_WORDS_SECONDS = 1.0

_log = structlog.get_logger(__name__)


class AuditTrail:
    """Writes in the background."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._writing: set[asyncio.Task[None]] = set()

    def record(self, action: str, subject: str, caller: Caller, reason: str) -> None:
        """subject: what it was done to.  reason: what was done, in words."""
        self._begin(action, subject, Who(caller.name, reason, caller.origin))

    def replaced(self, session: Session, before: Session) -> None:
        """An engine introduced itself under the id of another one."""
        reason = f"the session before was silent for {before.seconds_since_steered:.0f} s"
        origin = session.holder.origin
        self._begin("replace_session", session.engine_id, Who(origin, reason, origin))

    def _begin(self, action: str, subject: str, who: Who) -> None:
        task = asyncio.get_running_loop().create_task(self._write(action, subject, who))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _write(self, action: str, subject: str, who: Who) -> None:
        try:
            await self._store.record(action, subject, who)
        except StoreError as error:
            _log.error(
                "audit_not_written", action=action, subject=subject, **asdict(who), error=str(error)
            )

    async def close(self) -> None:
        """Waits for what is being written, briefly."""
        if self._writing:
            await asyncio.wait(self._writing, timeout=_LAST_WORDS_SECONDS)
        await tasks.end(self._writing)
