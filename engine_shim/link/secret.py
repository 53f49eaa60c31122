"""The secret that identifies an engine and its trainer to the sidecar.

An engine generates it at random when it starts, and its agents send it in every introduction.  An
engine with a trainer stores it in the folder that both use: a user who can read that folder can
read the engine's training signals anyway.
"""

import contextlib
import logging
import os
import secrets
from pathlib import Path
from typing import Final

_FILE_NAME: Final = "engine.secret"
# Readable for the owner and the group.
_FILE_MODE: Final = 0o640
_SECRET_BYTES: Final = 32

_log = logging.getLogger(__name__)


def new_secret() -> str:
    """Generates a secret for an engine that keeps it in memory only."""
    return secrets.token_hex(_SECRET_BYTES)


def resolve_secret(folder: str) -> str:
    """Returns the secret of an engine with this folder; folder: "" for an engine without one.

    If the secret cannot be stored in the folder, a new one is generated, and the sidecar will
    refuse the engine's trainer.
    """
    if not folder:
        return new_secret()
    try:
        return load_or_create_secret(Path(folder))
    except (OSError, ValueError) as error:
        _log.warning("the sidecar will refuse this engine's trainer: %s", error)
        return new_secret()


def load_or_create_secret(folder: Path) -> str:
    """Returns the secret in the folder; the first caller generates it.  Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _FILE_NAME
    if not path.exists():
        # Created atomically, because a trainer may read it at any time.
        temporary_path = folder / f".{_FILE_NAME}.{os.getpid()}"
        temporary_path.unlink(missing_ok=True)
        descriptor = os.open(temporary_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODE)
        with os.fdopen(descriptor, "w") as file:
            file.write(new_secret())
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(temporary_path)
        temporary_path.unlink()
    return path.read_text(encoding="ascii").strip()


def read_secret(folder: Path) -> str:
    """Returns the secret in the folder, "" if it is missing.  Raises OSError."""
    try:
        return (folder / _FILE_NAME).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return ""
