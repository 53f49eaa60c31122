"""Opens connections to Redis with credentials and certificates whose files may be replaced.

Every connection reads the files again, because the content of a Secret may be rotated.
"""

import asyncio
from pathlib import Path
from typing import Any, Final

import redis.exceptions
from redis.asyncio.connection import SSLConnection
from redis.asyncio.sentinel import SentinelManagedSSLConnection
from redis.credentials import CredentialProvider

from controller.util.files import UnreadableFileError, read_small

# Far more than the length of a password.
_PASSWORD_BYTES_MAX: Final = 64 * 1024
# The same limit as for the TLS files of the sidecar's listeners.
_PEM_BYTES_MAX: Final = 1024 * 1024


class UnusableFileError(redis.exceptions.ConnectionError):
    """A file that a connection needs and cannot use; nothing was sent.

    It is a subclass of a redis-py error, since only after these redis-py closes the connection.
    """


class Credentials(CredentialProvider):
    """A user and a password, each as a text or as the path of a file with it.

    user: None for the default user.  password: None for a user without one.
    """

    def __init__(self, user: str | Path | None, password: str | Path | None) -> None:
        self._user = user
        self._password = password

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Reads the user and the password.  Raises UnusableFileError."""
        password = _read_secret(self._password, "password")
        return (password,) if self._user is None else (_read_secret(self._user, "user"), password)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """Reads the user and the password; the files are small enough to block for."""
        return self.get_credentials()


class TlsConnection(SSLConnection):
    """A TLS connection that reloads its certificates when their files have changed."""

    _loaded_files: tuple[bytes, ...] = ()

    async def _connect(self) -> None:
        settings: Any = self.ssl_context
        pem_files = await asyncio.to_thread(_pem_files, settings)
        if pem_files != self._loaded_files:
            settings.context = None
        try:
            await asyncio.to_thread(settings.get)
        except (ValueError, OSError) as error:
            # Nothing was sent yet, so the cause is one of these files or options.
            raise UnusableFileError(f"its TLS files or options cannot be used: {error}") from error
        self._loaded_files = pem_files
        await super()._connect()  # type: ignore[no-untyped-call]


class SentinelTlsConnection(SentinelManagedSSLConnection, TlsConnection):
    """A TLS connection to the primary that Sentinel names."""


def _pem_files(settings: Any) -> tuple[bytes, ...]:
    """Returns the content of all files that a connection loads.  Raises UnusableFileError."""
    files = {"CA": settings.ca_certs, "certificate": settings.certfile, "key": settings.keyfile}
    contents = {
        name: _read_file(Path(path), name, _PEM_BYTES_MAX) for name, path in files.items() if path
    }
    for name, content in contents.items():
        label = "private key" if name == "key" else "certificate"
        if f"{label}-----".upper().encode() not in content:
            also = "; without redis_client_key, redis_client_certificate must contain the key too"
            raise UnusableFileError(
                f"{name} file {files[name]}: it contains no {label} in PEM{also * (name == 'key')}"
            )
    if settings.ca_path and not Path(settings.ca_path).is_dir():
        raise UnusableFileError(f"CA folder {settings.ca_path} (ssl_ca_path): no such folder")
    # OpenSSL would ask for the passphrase at the terminal.
    if b"ENCRYPTED" in contents.get("key", b"") and not getattr(settings, "password", None):
        raise UnusableFileError(
            f"key file {settings.keyfile}: it is encrypted: set ssl_password in the query of "
            "redis_url, or use an unencrypted key"
        )
    return tuple(contents.values())


def _read_secret(text_or_path: str | Path | None, name: str) -> str:
    """Returns a text unchanged, or the content of a file.  Raises UnusableFileError."""
    if not isinstance(text_or_path, Path):
        return text_or_path or ""
    try:
        # Editors on Windows write a byte order mark.
        text = _read_file(text_or_path, name, _PASSWORD_BYTES_MAX).decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        # The original error quotes a part of the password.
        raise UnusableFileError(f"{name} file {text_or_path}: not UTF-8 text") from None
    if not text:
        raise UnusableFileError(f"{name} file {text_or_path}: it is empty")
    return text


def _read_file(path: Path, name: str, bytes_max: int) -> bytes:
    """Reads a file.  Raises UnusableFileError."""
    try:
        return read_small(path, bytes_max)
    except UnreadableFileError as error:
        raise UnusableFileError(f"{name} file {path}: {error}") from error
