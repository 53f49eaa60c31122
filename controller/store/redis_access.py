"""Defines what opens a Redis beside its URL."""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RedisAccess:
    """Holds the settings redis_user, redis_user_file and so on.

    A file may be replaced while it is in use: it is read for every connection.  None: the URL says
    it, or it is not needed.  sentinel_password: by default Sentinels get the password of Redis.
    """

    user: str | None = None
    user_file: Path | None = None
    password: str | None = field(default=None, repr=False)
    password_file: Path | None = None
    sentinel_user: str | None = None
    sentinel_user_file: Path | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    sentinel_password_file: Path | None = None
    ca: Path | None = None
    client_certificate: Path | None = None
    client_key: Path | None = None


NOTHING_BESIDE_THE_URL = RedisAccess()
