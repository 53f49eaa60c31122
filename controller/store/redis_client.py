"""Makes a Redis client from a URL: one server, Sentinel or Cluster, with TLS for rediss://.

redis://[:PASSWORD@]HOST:PORT/DB          rediss://...                 TLS
redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB     rediss+sentinel://...
redis+cluster://HOST:PORT                           rediss+cluster://...
"""

from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import redis.asyncio
import redis.exceptions
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError
from redis.asyncio.sentinel import Sentinel as _UntypedSentinel
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider

from controller.core.errors import SpeculationError
from controller.store.redis_replies import BoundedParser
from controller.util.redaction import redact
from controller.util.watched_file import UnreadableFileError, read_small

# Far more than a password has.
_PASSWORD_BYTES_MAX: Final = 64 * 1024
_Sentinel: Any = _UntypedSentinel
# What the client raises on purpose; the errors of a cluster are not among those of Redis.
REDIS_ERRORS = (redis.exceptions.RedisError, redis.exceptions.RedisClusterException)
# Errors of a command that Redis, or a cluster, refused before it began.
_BEFORE_ANY_WRITE = (
    redis.exceptions.AskError,
    redis.exceptions.AuthenticationError,
    redis.exceptions.BusyLoadingError,
    # Also where a cluster has sent the command from node to node, and none took it.
    redis.exceptions.ClusterError,
    redis.exceptions.MaxConnectionsError,
    redis.exceptions.NoPermissionError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.SlotNotCoveredError,
    redis.exceptions.TryAgainError,
    MasterNotFoundError,
)
# Such errors without a class: too few replicas, or a snapshot that cannot be written.
_REFUSED_WRITES = ("NOREPLICAS", "MISCONF")


class RedisUrlError(SpeculationError):
    """A URL that names no Redis; the message never holds a password."""


class PasswordFile(CredentialProvider):
    """The password in a file, which may be replaced: read for every connection."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Reads the password.  Raises OSError, also for what is no text."""
        try:
            return (read_small(self._path, _PASSWORD_BYTES_MAX).decode("utf-8").strip(),)
        except UnreadableFileError as error:
            raise OSError(f"password file {self._path}: {error}") from error
        except UnicodeDecodeError as error:
            # Without the bytes, which are part of the password.
            raise OSError(f"password file {self._path}: not UTF-8 text") from error

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """Reads the same small file."""
        return self.get_credentials()


def connect(url: str, timeout_seconds: float, password_file: Path | None = None) -> Any:
    """Makes a client that has sent nothing yet.  Raises RedisUrlError."""
    try:
        return _client(url, timeout_seconds, password_file)
    except (ValueError, TypeError) as error:
        raise RedisUrlError(f"{redact(url, url)}: {redact(str(error), url)}") from None


async def close(client: Any) -> None:
    """Closes a client of any kind.  Raises one of REDIS_ERRORS, OSError."""
    manager = getattr(getattr(client, "connection_pool", None), "sentinel_manager", None)
    await client.aclose()
    if isinstance(client, RedisCluster):
        # After an error it takes its connections for closed.
        await client.nodes_manager.aclose()
        await client.nodes_manager.aclose("startup_nodes")
    for sentinel in manager.sentinels if manager else ():
        await sentinel.aclose()


def is_out_of_memory(error: Exception) -> bool:
    """Whether Redis refused a write for want of memory."""
    return isinstance(error, redis.exceptions.OutOfMemoryError) or "OOM" in str(error)


def came_before_any_write(error: Exception) -> bool:
    """Whether Redis has not begun to carry out the command that failed so."""
    connecting = isinstance(error, redis.exceptions.ConnectionError) and "connecting" in str(error)
    refused = isinstance(error, _BEFORE_ANY_WRITE) or str(error).startswith(_REFUSED_WRITES)
    return connecting or refused or is_out_of_memory(error)


def in_words(error: Exception) -> str:
    """Says what is wrong with Redis, in few words; they may hold what a URL holds."""
    if isinstance(error, redis.exceptions.ReadOnlyError):
        return "takes no writes (read-only)"
    if is_out_of_memory(error):
        return "takes no writes (out of memory)"
    if isinstance(error, redis.exceptions.AuthenticationError):
        return "refuses the credentials"
    words = " ".join(str(error).split())[:200]
    text = "".join(letter if letter.isprintable() else "?" for letter in words)
    return text or type(error).__name__


def _client(url: str, timeout_seconds: float, password_file: Path | None) -> Any:
    options: dict[str, Any] = {
        "socket_timeout": timeout_seconds,
        "socket_connect_timeout": timeout_seconds,
        # Others write there what they like: every entry is decoded on its own.
        "decode_responses": False,
        "protocol": 2,
    }
    if password_file is not None:
        options["credential_provider"] = PasswordFile(password_file)
    parts = urlsplit(url)
    scheme, _, kind = parts.scheme.partition("+")
    if scheme not in {"redis", "rediss"} or kind not in {"", "sentinel", "cluster"}:
        raise ValueError("the scheme is not known")
    if not parts.netloc.rpartition("@")[2]:
        raise ValueError("no host is named")
    if kind == "sentinel":
        return _sentinel(url, scheme == "rediss", options | {"retry": Retry(NoBackoff(), 0)})
    plain = url.replace(f"{parts.scheme}://", f"{scheme}://", 1)
    # A write is never sent twice on its own: the first one's effect is unknown.
    options["retry"] = Retry(NoBackoff(), 0)
    if kind == "cluster":
        return _cluster(plain, options)
    client: Any = redis.asyncio.Redis.from_url(plain, parser_class=BoundedParser, **options)
    # Nothing is sent: only here the options in the URL's query meet the client that takes them.
    try:
        client.connection_pool.make_connection()
    except TypeError as error:
        # Which one is not said: a password with a delimiter in it may stand there.
        raise ValueError("its query names an option that the Redis client does not know") from error
    return client


def _cluster(url: str, options: dict[str, Any]) -> Any:
    client = RedisCluster.from_url(url, **options)
    # It takes no parser, but hands these options to every connection.
    known: Any
    for known in (client.nodes_manager, *client.startup_nodes):
        known.connection_kwargs["parser_class"] = BoundedParser
    return client


def _sentinel(url: str, tls: bool, options: dict[str, Any]) -> Any:
    parts = urlsplit(url)
    account, _, hosts = parts.netloc.rpartition("@")
    user, _, password = account.partition(":")
    service, _, database = parts.path.strip("/").partition("/")
    if not service:
        raise ValueError("the path has to name the service: redis+sentinel://HOST:PORT/SERVICE/DB")
    sentinels = [_host_port(host, 26379) for host in hosts.split(",")]
    own = {"socket_timeout": options["socket_timeout"], "ssl": tls}
    sentinel: Any = _Sentinel(sentinels, sentinel_kwargs=own)
    return sentinel.master_for(
        service,
        db=int(database or 0),
        ssl=tls,
        parser_class=BoundedParser,
        **({} if "credential_provider" in options else {"username": user or None}),
        **({} if "credential_provider" in options else {"password": password or None}),
        **options,
    )


def _host_port(text: str, port: int) -> tuple[str, int]:
    host, colon, given = text.rpartition(":")
    return (host, int(given)) if colon else (text, port)
