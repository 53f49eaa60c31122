"""Watches the policy file, and keeps the last valid policy in force while the file is invalid.

    file --WatchedFile--> bytes --parse_policy--> Policy --use_policy--> registry --> engines
    bytes --> copy in the state directory, for a start with an invalid file

A change counts once two successive reads return the same bytes, because the file may be half
written.  A change that only removes entries must last for longer: a missing file, or a file with
fewer entries and no new one, as of a file that is being written.  An empty file is invalid;
`policies: []` is an empty policy.
"""

import asyncio
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

import structlog

from controller.service.state.audit_log import AuditLog
from controller.service.state.override_registry import OverrideRegistry
from controller.settings.policy_file import (
    MAX_BYTES,
    Policy,
    PolicyFileError,
    parse_policy,
    read_policy,
)
from controller.util.files import AGREEING_LOOKS, LOOK_SECONDS, Found, WatchedFile, write_whole

# Successive reads with fewer entries and no new one, 2 s: longer than a writer pauses.
_SHORTER_LOOKS: Final = 1 + math.ceil(2.0 / LOOK_SECONDS)
# Successive reads without a file, 10 s: longer than an editor or a mount takes to replace it.
_GONE_LOOKS: Final = 1 + math.ceil(10.0 / LOOK_SECONDS)
_KEPT: Final = "policy.yaml"
_KEPT_MODE: Final = 0o640

_log = structlog.get_logger(__name__)


class PolicyWatch:
    """Watches one file.  path: None for no policy.  state: directory of the copy."""

    def __init__(
        self, path: Path | None, state: Path, override_registry: OverrideRegistry, audit: AuditLog
    ) -> None:
        self._file = None if path is None else WatchedFile(path, MAX_BYTES)
        self._kept = state / _KEPT
        self._override_registry = override_registry
        self._audit = audit
        # The content that was last processed: put into force, or refused.
        self._judged: Found | None = None

    async def open(self) -> None:
        """Puts the policy into force.

        Raises PolicyFileError if the file cannot be used and no earlier policy is known.
        """
        if self._file is None:
            return
        policy = await asyncio.to_thread(self._first, self._file)
        await self._override_registry.use_policy(policy)
        _log_policy(policy)

    def _first(self, file: WatchedFile) -> Policy:
        if not file.path.parent.is_dir():
            raise PolicyFileError(f"{file.path}: there is no directory {file.path.parent}")
        found = file.look()
        try:
            policy = _policy_of(file.path, found)
        except PolicyFileError as error:
            before = self._kept_policy(file.path)
            if found.is_missing:
                # The watch ends the policy of the copy, unless the file returns.
                return before or Policy(file.path)
            if before is None:
                raise
            self._judged = found
            return replace(before, error=str(error))
        self._judged = found
        self._keep(found.content)
        return policy

    def _kept_policy(self, path: Path) -> Policy | None:
        """Returns the policy of an earlier run of the sidecar; None if there is no valid copy."""
        try:
            return Policy(path, read_policy(self._kept)[0], self._kept.stat().st_mtime)
        except (PolicyFileError, OSError):
            return None

    async def watch(self) -> None:
        """Puts every change of the file into force, until cancelled."""
        file = self._file
        assert file is not None
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            policy = await asyncio.to_thread(self._look, file)
            if policy is None:
                continue
            before = self._override_registry.policy.overrides
            await self._override_registry.use_policy(policy)
            # Only now: a change that could not be put into force is not forgotten.
            self._judged = file.found
            _log_policy(policy)
            if policy.overrides != before:
                self._audit.policy(
                    str(file.path), f"{len(policy.overrides)} entries, {len(before)} before"
                )

    def _look(self, file: WatchedFile) -> Policy | None:
        """Returns the new policy; None without a change, or if the change is too recent."""
        found = file.look()
        if found == self._judged or file.agreeing < AGREEING_LOOKS:
            return None
        before = self._override_registry.policy
        try:
            policy = _policy_of(file.path, found)
        except PolicyFileError as error:
            if not (found.is_missing and file.path.parent.is_dir()):
                return replace(before, error=str(error))
            policy = Policy(file.path, read_at=time.time())
        if file.agreeing < _looks_needed(policy, before, found):
            return None
        self._keep(None if found.is_missing else found.content)
        return policy

    def _keep(self, content: bytes | None) -> None:
        """Writes the copy for the next start, or removes it; logs if that fails."""
        try:
            if content is None:
                self._kept.unlink(missing_ok=True)
                return
            write_whole(self._kept, content)
            self._kept.chmod(_KEPT_MODE)
        except OSError as error:
            _log.warning("policy_not_kept", path=str(self._kept), error=str(error))


def _policy_of(path: Path, found: Found) -> Policy:
    """Parses a policy.  Raises PolicyFileError for a file that is missing or cannot be used."""
    if found.error:
        raise PolicyFileError(f"{path}: {found.error}")
    return Policy(path, parse_policy(path, found.content), time.time())


def _looks_needed(policy: Policy, before: Policy, found: Found) -> int:
    """Returns how many successive reads must agree on a policy."""
    if found.is_missing:
        return _GONE_LOOKS if before.overrides else AGREEING_LOOKS
    now, then = ({override.override_id for override in it.overrides} for it in (policy, before))
    return _SHORTER_LOOKS if now and now < then else AGREEING_LOOKS


def _log_policy(policy: Policy) -> None:
    if policy.error:
        _log.error("policy_not_read", error=policy.error, detail="its previous content is in force")
    else:
        _log.info("policy_read", path=str(policy.path), entries=len(policy.overrides))
