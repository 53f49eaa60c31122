"""Watches the policy file, and keeps the last good policy in force while the file is bad.

    file --read_policy--> Policy --use_policy--> override registry --> engines
    file --text--> copy in the state directory, for a start with a bad file

The file's state is looked at once a second.  A mounted ConfigMap changes by a symbolic link to
another directory, so the link is followed to the file's inode.
"""

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeAlias

import structlog

from controller.service.sessions.audit_log import AuditLog
from controller.service.sessions.override_registry import OverrideRegistry
from controller.settings.policy_file import Policy, PolicyFileError, read_policy
from controller.util.atomic_file import write_whole

_LOOK_SECONDS: Final = 1.0
_KEPT: Final = "policy.yaml"
_KEPT_MODE: Final = 0o640
# Tells two contents of a file apart; None: there is no file.
_Stamp: TypeAlias = tuple[int, int, int] | None

_log = structlog.get_logger(__name__)


class PolicyWatch:
    """Watches one file.  path: None for no policy.  state: directory of the copy."""

    def __init__(
        self, path: Path | None, state: Path, override_registry: OverrideRegistry, audit: AuditLog
    ) -> None:
        self._path = path
        self._kept = state / _KEPT
        self._override_registry = override_registry
        self._audit = audit
        self._seen: _Stamp = None

    async def open(self) -> None:
        """Puts the policy into force.

        Raises PolicyFileError if the file cannot be used and no earlier policy is known.
        """
        if self._path is None:
            return
        policy = await asyncio.to_thread(self._first, self._path)
        await self._override_registry.use_policy(policy)
        _log_policy(policy)

    def _first(self, path: Path) -> Policy:
        if not path.parent.is_dir():
            raise PolicyFileError(f"{path}: there is no directory {path.parent}")
        self._seen = _stamp(path)
        try:
            return self._read(path)
        except PolicyFileError as error:
            try:
                overrides, _ = read_policy(self._kept)
            except PolicyFileError:
                raise error from None
            return Policy(path, overrides, self._kept.stat().st_mtime, str(error))

    async def watch(self) -> None:
        """Puts every change of the file into force, until cancelled."""
        assert self._path is not None
        path = self._path
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            policy = await asyncio.to_thread(self._look, path)
            if policy is None:
                continue
            before = self._override_registry.policy.overrides
            await self._override_registry.use_policy(policy)
            _log_policy(policy)
            if policy.overrides != before:
                self._audit.policy(
                    str(path), f"{len(policy.overrides)} entries, {len(before)} before"
                )

    def _look(self, path: Path) -> Policy | None:
        """Returns the policy from now on; None if the file is as it was."""
        stamp = _stamp(path)
        if stamp == self._seen:
            return None
        # A file that cannot be read now is read again when it has changed once more.
        self._seen = stamp
        now = self._override_registry.policy
        try:
            return self._read(path)
        except PolicyFileError as error:
            return replace(now, error=str(error))

    def _read(self, path: Path) -> Policy:
        """Reads the file and keeps a copy; without a file, there is no policy."""
        overrides, text = ((), None) if self._seen is None else read_policy(path)
        try:
            self._keep(text)
        except OSError as error:
            _log.warning("policy_not_kept", path=str(self._kept), error=str(error))
        return Policy(path, overrides, time.time())

    def _keep(self, text: str | None) -> None:
        """Writes the copy, or removes it where there is no file.  Raises OSError."""
        if text is None:
            self._kept.unlink(missing_ok=True)
            return
        write_whole(self._kept, text.encode())
        self._kept.chmod(_KEPT_MODE)


def _log_policy(policy: Policy) -> None:
    if policy.error:
        _log.error("policy_not_read", error=policy.error, detail="what it said before is in force")
    else:
        _log.info("policy_read", path=str(policy.path), entries=len(policy.overrides))


def _stamp(path: Path) -> _Stamp:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:  # reading it says what is wrong
        return 0, 0, error.errno or 0
    return found.st_ino, found.st_size, found.st_mtime_ns
