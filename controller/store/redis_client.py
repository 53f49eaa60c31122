"""Makes a Redis client from a URL and settings: one server, Sentinel or Cluster.

`redis_url` parses the URL, and `redis_connections` opens connections.
"""

import dataclasses
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import redis.asyncio
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import Connection, ConnectionPool, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel as _UntypedSentinel
from redis.asyncio.sentinel import SentinelManagedConnection
from redis.backoff import NoBackoff

from controller.core.errors import SpeculationError
from controller.store.redis_connections import Credentials, SentinelTlsConnection, TlsConnection
from controller.store.redis_errors import REDIS_ERRORS, NoPrimaryError, explain_error
from controller.store.redis_replies import BoundedParser, to_printable
from controller.store.redis_url import (
    NO_EXTRA_ACCESS,
    RedisAccess,
    RedisUrl,
    UnusableUrlError,
    read_url,
    redact,
)

# Options of a URL's query that are not passed to a connection.
_LOGINS: Final = frozenset({"password", "sentinel_password", "sentinel_username", "username"})
# Options of a URL's query by the setting with the same meaning.
_TLS_FILES: Final = {
    "ca": "ssl_ca_certs", "client_certificate": "ssl_certfile", "client_key": "ssl_keyfile",
}  # fmt: skip
_TLS_OPTION: Final = "ssl_"
# Sentinels without configured users accept any password for this user.
_DEFAULT_USER: Final = "default"
# Python's error text for an unknown argument.
_UNEXPECTED: Final = re.compile(r"unexpected keyword argument '([a-z_]+)'")
# Most services of a Sentinel that a message names.
_NAMES_MAX: Final = 5
_Sentinel: Any = _UntypedSentinel


class RedisUrlError(SpeculationError):
    """A URL, or other redis_ settings, that cannot be used; the message contains no password."""


def connect(
    url: str,
    timeout_seconds: float,
    password_file: Path | None = None,
    access: RedisAccess = NO_EXTRA_ACCESS,
) -> Any:
    """Makes a client that is not connected yet.  password_file: replaces that of `access`.

    Raises RedisUrlError.
    """
    if password_file is not None:
        access = dataclasses.replace(access, password_file=password_file)
    try:
        return _client(read_url(url), timeout_seconds, access)
    except UnusableUrlError as error:
        raise RedisUrlError(f"{redact(url, url) or 'redis_url'}: {error}") from None
    except ssl.SSLError as error:
        message = redact(" ".join(part for part in error.args if isinstance(part, str)), url)
        raise RedisUrlError(f"{redact(url, url)}: a TLS option cannot be used: {message}") from None
    except (ValueError, TypeError, *REDIS_ERRORS) as error:
        raise RedisUrlError(f"{redact(url, url)}: {redact(str(error), url)}") from None


async def close(client: Any) -> None:
    """Closes a client of any kind.  Raises one of REDIS_ERRORS, OSError."""
    await client.aclose()
    if isinstance(client, RedisCluster):
        # After an error, redis-py considers its connections closed.
        await client.nodes_manager.aclose()
        await client.nodes_manager.aclose("startup_nodes")
        return
    pool = client.connection_pool
    await pool.disconnect()
    for sentinel in pool.sentinel_manager.sentinels if hasattr(pool, "sentinel_manager") else ():
        await sentinel.connection_pool.disconnect()


def _client(url: RedisUrl, timeout_seconds: float, access: RedisAccess) -> Any:
    options: dict[str, Any] = {
        "socket_timeout": timeout_seconds,
        "socket_connect_timeout": timeout_seconds,
        # Data of other writers may not be text: every entry is decoded separately.
        "decode_responses": False,
        "protocol": 2,
        "parser_class": BoundedParser,
        # A write is never retried automatically: the effect of the first attempt is unknown.
        "retry": Retry(NoBackoff(), 0),
    }
    options |= {name: value for name, value in url.options.items() if name not in _LOGINS}
    options |= _tls_files(url, access)
    if url.tls or url.sentinel_tls:
        _check_tls_options(options)
    user = _login_value(url, access, "user", "username")
    password = _login_value(url, access, "password", "password")
    sentinel_user = _login_value(url, access, "sentinel_user", "sentinel_username")
    sentinel_password = _login_value(url, access, "sentinel_password", "sentinel_password")
    login = _credential_options(user, password)
    if url.kind == "sentinel":
        # By default, Sentinels are assumed to have the password of Redis, but not its users.
        guarded = sentinel_user or (_DEFAULT_USER if sentinel_password or password else None)
        sentinel_login = _credential_options(guarded, sentinel_password or password)
        return _sentinel_client(url, options | login, options | sentinel_login)
    if sentinel_user or sentinel_password:
        raise UnusableUrlError("a user or password of Sentinels needs the scheme redis+sentinel")
    return (_cluster_client if url.kind else _plain_client)(url, options | login)


def _login_value(url: RedisUrl, access: RedisAccess, name: str, option: str) -> Any:
    """Returns the text or file that the URL or the settings give.  Raises UnusableUrlError.

    name: of the setting.  option: of the URL's query.
    """
    sources = {
        "the URL": url.account.get(option),
        f"{option} in its query": url.options.get(option),
        f"redis_{name}": getattr(access, name),
        f"redis_{name}_file": getattr(access, f"{name}_file"),
    }
    return _agreed_value(name.replace("_", " "), sources)


def _agreed_value(name: str, sources: Mapping[str, Any]) -> Any:
    """Returns the value that all non-empty sources agree on.  Raises UnusableUrlError."""
    values = {source: value for source, value in sources.items() if value}
    if len(set(values.values())) > 1:
        raise UnusableUrlError(f"{' and '.join(values)} give different values of {name}: keep one")
    return next(iter(values.values()), None)


def _credential_options(user: str | Path | None, password: str | Path | None) -> dict[str, Any]:
    return {"credential_provider": Credentials(user, password)} if user or password else {}


def _tls_files(url: RedisUrl, access: RedisAccess) -> dict[str, str]:
    """Returns the connection options that name files.  Raises UnusableUrlError."""
    files: dict[str, str] = {}
    for name, option in _TLS_FILES.items():
        path: Path | None = getattr(access, name)
        sources = {
            f"{option} in the URL": url.options.get(option),
            f"redis_{name}": None if path is None else str(path),
        }
        if path_text := _agreed_value(name.replace("_", " "), sources):
            files[option] = path_text
    has_tls_options = files or any(option.startswith(_TLS_OPTION) for option in url.options)
    if has_tls_options and not (url.tls or url.sentinel_tls):
        raise UnusableUrlError(
            "redis_ca, redis_client_certificate, redis_client_key and options that begin with ssl_ "
            "need a scheme with TLS: rediss; if only the Sentinels use TLS, set sentinel_tls=yes"
        )
    if "ssl_keyfile" in files and "ssl_certfile" not in files:
        raise UnusableUrlError("redis_client_key needs redis_client_certificate as well")
    if "ssl_certfile" in files:
        # One file may contain both.
        files.setdefault("ssl_keyfile", files["ssl_certfile"])
    return files


def _check_tls_options(options: Mapping[str, Any]) -> None:
    """Checks the TLS options, except those that name files: these may be created later.

    Raises UnusableUrlError, or a ValueError or ssl.SSLError whose message may quote an option.
    """
    checked_options = {
        name: value
        for name, value in options.items()
        if name.startswith(_TLS_OPTION) and name not in {*_TLS_FILES.values(), "ssl_ca_path"}
    }
    connections: list[TlsConnection] = []
    _try_options(lambda: connections.append(TlsConnection(**checked_options)))
    context: Any = connections[0].ssl_context
    context.get()


def _without_tls(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if not name.startswith(_TLS_OPTION)}


def _plain_client(url: RedisUrl, options: Mapping[str, Any]) -> Any:
    kind = TlsConnection if url.tls else Connection if url.hosts else UnixDomainSocketConnection
    return redis.asyncio.Redis(connection_pool=_pool(url.hosts, kind, options))


def _sentinel_client(
    url: RedisUrl, options: Mapping[str, Any], sentinel_options: Mapping[str, Any]
) -> Any:
    kind = TlsConnection if url.sentinel_tls else Connection
    sentinel_connection_options = (
        dict(sentinel_options) if url.sentinel_tls else _without_tls(sentinel_options)
    )
    sentinel_connection_options.pop("db", None)
    clients = [
        redis.asyncio.Redis(connection_pool=_pool([host], kind, sentinel_connection_options))
        for host in url.hosts
    ]
    kind = SentinelTlsConnection if url.tls else SentinelManagedConnection
    manager: Any = Sentinels(clients)
    primary = options if url.tls else _without_tls(options)
    client = manager.master_for(url.service, connection_class=kind, **primary)
    _try_options(client.connection_pool.make_connection)
    return client


def _pool(
    hosts: Sequence[tuple[str, int]], kind: type[Any], options: Mapping[str, Any]
) -> ConnectionPool:
    """Makes a connection pool for the first host, or for a unix socket."""
    place: dict[str, Any] = dict(zip(("host", "port"), hosts[0], strict=True)) if hosts else {}
    pool = ConnectionPool(connection_class=kind, **place, **options)
    _try_options(pool.make_connection)
    return pool


def _cluster_client(url: RedisUrl, options: Mapping[str, Any]) -> Any:
    if options.get("db"):
        raise UnusableUrlError("a cluster has only database 0")
    client = _Cluster(
        startup_nodes=[ClusterNode(host, port) for host, port in url.hosts],
        retry=options["retry"],
        protocol=options["protocol"],
    )
    # Its constructor accepts only some connection options, but it passes on all of these.
    common = client.nodes_manager.connection_kwargs
    common |= {name: value for name, value in options.items() if name != "retry"}
    common["connection_class"] = TlsConnection if url.tls else Connection
    client.seeds = [ClusterNode(host, port, **common) for host, port in url.hosts]
    client.nodes_manager.startup_nodes = {node.name: node for node in client.seeds}
    _try_options(client.seeds[0].acquire_connection)
    return client


class _Cluster(RedisCluster):
    """A cluster client that asks the nodes of the URL again if it has lost all others.

    redis-py drops nodes that are not in the cluster's own list, such as a service name.
    """

    seeds: Sequence[ClusterNode] = ()

    async def initialize(self, *arguments: Any, **options: Any) -> "RedisCluster":
        """Discovers the nodes if they are not known."""
        if self._initialize:
            for node in self.seeds:
                self.nodes_manager.startup_nodes.setdefault(node.name, node)
        return await super().initialize(*arguments, **options)


def _try_options(make_connection: Callable[[], object]) -> None:
    """Makes a connection without opening it, which checks its options.  Raises UnusableUrlError."""
    try:
        make_connection()
    except TypeError as error:
        match = _UNEXPECTED.search(str(error))
        raise UnusableUrlError(
            "its query has an option that a connection of this kind does not support"
            f"{f' ({match[1]})' if match else ''}"
        ) from error


class Sentinels(_Sentinel):  # type: ignore[misc]
    """The Sentinels of one service.

    clients: one for each Sentinel.  It differs from redis-py's class in its error texts.  A
    Sentinel that does not answer is asked last the next time, even if the caller was cancelled.
    """

    def __init__(self, clients: Sequence[Any]) -> None:
        super().__init__([])
        self.sentinels = list(clients)

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        """Returns the primary's address and port.  Raises NoPrimaryError."""
        reasons: dict[str, list[str]] = {}
        fixes: dict[str, None] = {}
        for client in tuple(self.sentinels):
            self._move_to(client, len(self.sentinels))
            try:
                states = await client.sentinel_masters()
                state = states.get(service_name)
                if state and self.check_master_state(state, service_name):
                    self._move_to(client, 0)
                    return state["ip"], state["port"]
                reason, fix = _no_primary_reason(service_name, states, state)
            except Exception as error:  # noqa: BLE001  # a malformed reply can raise any error
                reason, fix = explain_error(error, "redis_sentinel_")
            reasons.setdefault(reason, []).append(_client_address(client))
            fixes[fix] = None
        failures = "; ".join(
            f"{', '.join(addresses)}: {reason}" for reason, addresses in reasons.items()
        )
        raise NoPrimaryError(
            f"no Sentinel names the primary of {service_name!r}: {failures}",
            "; ".join(fix for fix in fixes if fix),
        )

    def _move_to(self, client: Any, place: int) -> None:
        self.sentinels.remove(client)
        self.sentinels.insert(place, client)


def _no_primary_reason(service: str, states: Mapping[str, Any], state: Any) -> tuple[str, str]:
    """Returns why a Sentinel's answer names no primary, and what to do."""
    if state:
        return (
            f"says that {_printable_text(state['ip'])}:{state['port']} is down",
            "check that it runs",
        )
    service_names = ", ".join(map(_printable_text, sorted(states)[:_NAMES_MAX]))
    return (
        f"watches {service_names or 'nothing'}, not {service!r}",
        "correct the service in redis_url",
    )


def _printable_text(text: str) -> str:
    return to_printable(text.encode(errors="replace"))


def _client_address(client: Any) -> str:
    place = client.connection_pool.connection_kwargs
    host = f"[{place['host']}]" if ":" in place["host"] else place["host"]
    return f"{host}:{place['port']}"
