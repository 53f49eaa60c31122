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
from controller.util.files import (
    EQUAL_READS_MIN,
    POLL_SECONDS,
    FileSnapshot,
    WatchedFile,
    write_atomically,
)

# Successive reads with fewer entries and no new one, 2 s: longer than a writer pauses.
_SHORTER_CHECKS: Final = 1 + math.ceil(2.0 / POLL_SECONDS)
# Successive reads without a file, 10 s: longer than an editor or a mount takes to replace it.
_MISSING_CHECKS: Final = 1 + math.ceil(10.0 / POLL_SECONDS)
_COPY_NAME: Final = "policy.yaml"
_COPY_MODE: Final = 0o640

_log = structlog.get_logger(__name__)


class PolicyWatch:
    """Watches one file.  path: None for no policy.  state: directory of the copy."""

    def __init__(
        self, path: Path | None, state: Path, override_registry: OverrideRegistry, audit: AuditLog
    ) -> None:
        self._file = None if path is None else WatchedFile(path, MAX_BYTES)
        self._copy_path = state / _COPY_NAME
        self._override_registry = override_registry
        self._audit = audit
        # The content that was last processed: put into force, or refused.
        self._last_processed: FileSnapshot | None = None

    async def open(self) -> None:
        """Puts the policy into force.

        Raises PolicyFileError if the file cannot be used and no earlier policy is known.
        """
        if self._file is None:
            return
        policy = await asyncio.to_thread(self._initial_policy, self._file)
        await self._override_registry.use_policy(policy)
        _log_policy(policy)

    def _initial_policy(self, file: WatchedFile) -> Policy:
        if not file.path.parent.is_dir():
            raise PolicyFileError(f"{file.path}: there is no directory {file.path.parent}")
        file_state = file.read()
        try:
            policy = _parse_file(file.path, file_state)
        except PolicyFileError as error:
            previous_policy = self._policy_from_copy(file.path)
            if file_state.is_missing:
                # The watch ends the policy of the copy, unless the file returns.
                return previous_policy or Policy(file.path)
            if previous_policy is None:
                raise
            self._last_processed = file_state
            return replace(previous_policy, error=str(error))
        self._last_processed = file_state
        self._write_copy(file_state.content)
        return policy

    def _policy_from_copy(self, path: Path) -> Policy | None:
        """Returns the policy of an earlier run of the sidecar; None if there is no valid copy."""
        try:
            return Policy(path, read_policy(self._copy_path)[0], self._copy_path.stat().st_mtime)
        except (PolicyFileError, OSError):
            return None

    async def watch(self) -> None:
        """Puts every change of the file into force, until cancelled."""
        file = self._file
        assert file is not None
        while True:
            await asyncio.sleep(POLL_SECONDS)
            policy = await asyncio.to_thread(self._check_file, file)
            if policy is None:
                continue
            previous_overrides = self._override_registry.policy.overrides
            await self._override_registry.use_policy(policy)
            # Only now: a change that could not be put into force is not forgotten.
            self._last_processed = file.snapshot
            _log_policy(policy)
            if policy.overrides != previous_overrides:
                self._audit.record_policy_change(
                    str(file.path),
                    f"{len(policy.overrides)} entries, {len(previous_overrides)} before",
                )

    def _check_file(self, file: WatchedFile) -> Policy | None:
        """Returns the new policy; None without a change, or if the change is too recent."""
        file_state = file.read()
        if file_state == self._last_processed or file.equal_reads < EQUAL_READS_MIN:
            return None
        previous_policy = self._override_registry.policy
        try:
            policy = _parse_file(file.path, file_state)
        except PolicyFileError as error:
            if not (file_state.is_missing and file.path.parent.is_dir()):
                return replace(previous_policy, error=str(error))
            policy = Policy(file.path, read_at=time.time())
        if file.equal_reads < _checks_needed(policy, previous_policy, file_state):
            return None
        self._write_copy(None if file_state.is_missing else file_state.content)
        return policy

    def _write_copy(self, content: bytes | None) -> None:
        """Writes the copy for the next start, or removes it; logs if that fails."""
        try:
            if content is None:
                self._copy_path.unlink(missing_ok=True)
                return
            write_atomically(self._copy_path, content)
            self._copy_path.chmod(_COPY_MODE)
        except OSError as error:
            _log.warning("policy_not_kept", path=str(self._copy_path), error=str(error))


def _parse_file(path: Path, file_state: FileSnapshot) -> Policy:
    """Parses a policy.  Raises PolicyFileError for a file that is missing or cannot be used."""
    if file_state.error:
        raise PolicyFileError(f"{path}: {file_state.error}")
    return Policy(path, parse_policy(path, file_state.content), time.time())


def _checks_needed(policy: Policy, previous_policy: Policy, file_state: FileSnapshot) -> int:
    """Returns how many successive reads must agree on a policy."""
    if file_state.is_missing:
        return _MISSING_CHECKS if previous_policy.overrides else EQUAL_READS_MIN
    current_ids, previous_ids = (
        {override.override_id for override in each_policy.overrides}
        for each_policy in (policy, previous_policy)
    )
    return _SHORTER_CHECKS if current_ids and current_ids < previous_ids else EQUAL_READS_MIN


def _log_policy(policy: Policy) -> None:
    if policy.error:
        _log.error("policy_not_read", error=policy.error, detail="its previous content is in force")
    else:
        _log.info("policy_read", path=str(policy.path), entries=len(policy.overrides))
