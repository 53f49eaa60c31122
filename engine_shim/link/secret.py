"""The secret by which a sidecar knows an engine again, and the engine's trainer.

An engine chooses it at random when it starts, and its agents show it in every introduction.  An
engine with a trainer keeps it in the folder that both use: whoever can read that folder can read
the engine's training signals anyway.
"""

import contextlib
import logging
import os
import secrets
from pathlib import Path
from typing import Final

_NAME: Final = "engine.secret"
# As open as the folder lets it be; nothing for those outside its group.
_MODE: Final = 0o640
_BYTES: Final = 32

_log = logging.getLogger(__name__)


def new_secret() -> str:
    """Makes a secret for an engine that keeps it in memory only."""
    return secrets.token_hex(_BYTES)


def secret_of(folder: str) -> str:
    """The secret of an engine with this folder, "" for none.

    Where it cannot be kept there, the engine has one of its own and its trainer is refused.
    """
    if not folder:
        return new_secret()
    try:
        return kept_secret(Path(folder))
    except (OSError, ValueError) as error:
        _log.warning("the sidecar will refuse this engine's trainer: %s", error)
        return new_secret()


def kept_secret(folder: Path) -> str:
    """The secret in the folder; the first caller chooses it.  Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _NAME
    if not path.exists():
        # Whole or not there: a trainer may look at any moment.
        unfinished = folder / f".{_NAME}.{os.getpid()}"
        unfinished.unlink(missing_ok=True)
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
        with os.fdopen(descriptor, "w") as file:
            file.write(new_secret())
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(unfinished)
        unfinished.unlink()
    return path.read_text(encoding="ascii").strip()


def secret_in(folder: Path) -> str:
    """Returns the secret in the folder, "" without one.  Raises OSError where it cannot be read."""
    try:
        return (folder / _NAME).read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return ""
