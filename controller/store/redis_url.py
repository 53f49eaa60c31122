"""Parses the URL of a Redis by the rules of redis-py, and redacts its credentials.

redis://USER:PASSWORD@HOST:PORT/DB?OPTION=VALUE                   rediss://...   with TLS
unix://USER:PASSWORD@/PATH?db=DB
redis+sentinel://USER:PASSWORD@HOST:PORT,HOST:PORT/SERVICE/DB     rediss+sentinel://...
redis+cluster://USER:PASSWORD@HOST:PORT,HOST:PORT                 rediss+cluster://...

With Sentinels, the scheme decides about TLS to Redis, and sentinel_tls in the query to Sentinels.

https://redis.readthedocs.io/en/stable/connections.html
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, quote, quote_plus, unquote, unquote_plus

SCHEMES: Final = (
    "redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster",
    "rediss+cluster",
)  # fmt: skip
_PORT: Final = 6379
_SENTINEL_PORT: Final = 26379
# Connection options that a query may set, besides those that begin with ssl_.  Options that this
# package sets itself (protocol, retries, decoding) are not allowed.
_OPTIONS: Final = frozenset(
    {
        "client_name", "db", "health_check_interval", "max_connections", "password",
        "socket_connect_timeout", "socket_keepalive", "socket_read_size", "socket_timeout",
        "username",
    }
)  # fmt: skip
_TLS_OPTION: Final = "ssl_"
# Options whose value may contain a delimiter that is not percent-encoded.
_SECRETS: Final = frozenset({"password", "sentinel_password", "ssl_password"})
# A possible misspelt option, which may be quoted; redis-py's have at most 40 characters.
_NAME: Final = re.compile(r"[a-z][a-z_]{,39}")
_SENTINEL_OPTIONS: Final = frozenset({"sentinel_password", "sentinel_tls", "sentinel_username"})
# redis-py treats any other word as true.
_SWITCHES: Final = ("sentinel_tls", "socket_keepalive", "ssl_check_hostname")
_ON: Final = frozenset({"1", "t", "true", "y", "yes"})
_OFF: Final = frozenset({"0", "f", "false", "n", "no"})
_CERTIFICATE_CHECKS: Final = ("none", "optional", "required")
_ABOVE_ZERO: Final = ("socket_connect_timeout", "socket_read_size", "socket_timeout")
# One connection always waits for messages, so that commands need a second one.
_MINIMUM: Final = {"db": 0, "health_check_interval": 0, "max_connections": 2}
# CLIENT SETNAME accepts no other characters.
_CLIENT_NAME = re.compile(r"[!-~]+")
# An address that begins with colons, with or without a port.
_BARE_IPV6 = re.compile(r"::[0-9A-Fa-f:.]*")
_PARTS = re.compile(r"([^/?#]*)([^?#]*)(?:\?([^#]*))?")
# Replacement for a credential in a text.
HIDDEN = "***"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_HOST = r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?"
# Hosts and a path of at most two parts, which may be shown.
_PLACE = re.compile(rf"{_HOST}(?:,{_HOST})*(?:/[A-Za-z0-9._-]*){{0,2}}")
# A unix socket, whose URL has no host.
_SOCKET = re.compile(r"(?:/[A-Za-z0-9._-]+)+")
# Query values such as a database or a switch.  They are secret only if their name is.
_PLAIN = re.compile(r"[0-9.]{1,5}|true|false|yes|no|none", re.IGNORECASE)
_DELIMITERS = re.compile(r"[:/@?#&=;,]")


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """A parsed URL.

    kind: "", "sentinel" or "cluster".  hosts: (name or address, port); empty for a unix socket,
    whose `path` is in the options.  tls: to Redis; sentinel_tls: to its Sentinels, False without
    Sentinels.  account: "username" and "password" before the hosts.  options: those of the query,
    with the database as "db".
    """

    kind: str
    tls: bool
    sentinel_tls: bool
    hosts: Sequence[tuple[str, int]]
    service: str
    account: Mapping[str, str]
    options: Mapping[str, Any]


class UnusableUrlError(ValueError):
    """A URL, or other settings, that cannot be used; the message quotes only names of options."""


def read_url(url: str) -> RedisUrl:
    """Reads a URL.

    Raises UnusableUrlError, or another ValueError, whose message may quote a part of the URL.
    """
    if not url.strip():
        raise UnusableUrlError("it is empty: set the URL, or remove the setting")
    scheme, _, after_scheme = url.strip().partition("://")
    if scheme.lower() not in SCHEMES:
        raise UnusableUrlError(f"unknown scheme; the schemes are {', '.join(SCHEMES)}")
    base, _, kind = scheme.lower().partition("+")
    parts = _PARTS.fullmatch(after_scheme)
    if parts is None:
        raise UnusableUrlError("a # in it must be written as %23")
    authority, path, query = parts[1], parts[2], parts[3] or ""
    account_text, _, hosts = authority.rpartition("@")
    service = ""
    if kind == "sentinel":
        service, _, path = path.strip("/").partition("/")
        if not service:
            raise UnusableUrlError(
                "the path must name the service: redis+sentinel://HOST:PORT/SERVICE/DB"
            )
    _check_options(query, kind)
    _check_place(base, hosts, path)
    names = hosts.split(",") if kind else [hosts]
    texts = [f"{base}://{name}/{path.strip('/')}?{query}" for name in names]
    if base == "unix":
        texts = [f"unix://{path}?{query}"]
    parsed_urls = [_parse_one_host(text) for text in texts]
    port = _SENTINEL_PORT if kind == "sentinel" else _PORT
    places = [
        (str(host_options.pop("host", "")), int(host_options.pop("port", port)))
        for host_options in parsed_urls
    ]
    _check_values(parsed_urls[0], "" if base == "unix" else path)
    tls = base == "rediss"
    sentinel_tls = parsed_urls[0].pop("sentinel_tls", "yes" if tls else "no")
    account = _parse_one_host(f"redis://{account_text}@host")
    account.pop("host")
    return RedisUrl(
        kind,
        tls,
        kind == "sentinel" and sentinel_tls.lower() in _ON,
        () if base == "unix" else places,
        unquote(service),
        account,
        parsed_urls[0],
    )


def _parse_one_host(url: str) -> dict[str, Any]:
    """Parses a URL with one host.  Raises ValueError."""
    # Imported only if Redis is used, because the import is slow.
    from redis.asyncio.connection import parse_url  # noqa: PLC0415

    options: dict[str, Any] = {**parse_url(url)}
    # This package uses its own connection classes.
    options.pop("connection_class", None)
    return options


def _check_options(query: str, kind: str) -> None:
    """Raises UnusableUrlError for an unknown or repeated option, or an invalid value."""
    options = parse_qsl(query, keep_blank_values=True)
    names = [name for name, _ in options]
    known_names = _OPTIONS | (_SENTINEL_OPTIONS if kind == "sentinel" else frozenset())
    for name in names:
        if name not in known_names and not name.startswith(_TLS_OPTION):
            # The name may be a part of a password that contains a delimiter.
            is_safe = "@" not in query and _SECRETS.isdisjoint(names) and _NAME.fullmatch(name)
            raise UnusableUrlError(
                "its query has an option that the Redis client does not know"
                f"{f' ({name})' if is_safe else ''}; the options are "
                f"{', '.join(sorted(known_names))} "
                f"and, for TLS, those of redis-py that begin with {_TLS_OPTION}"
            )
    if len(set(names)) < len(names):
        raise UnusableUrlError("its query has an option twice")
    for name, value in options:
        if not value:
            raise UnusableUrlError(f"{name} in its query has no value: set one, or remove it")
        if name in _SWITCHES and value.lower() not in _ON | _OFF:
            raise UnusableUrlError(f"{name} in its query must be yes or no")
        if name == "ssl_cert_reqs" and value not in _CERTIFICATE_CHECKS:
            raise UnusableUrlError(
                f"{name} in its query must be one of {', '.join(_CERTIFICATE_CHECKS)}"
            )


def _check_place(base: str, hosts: str, path: str) -> None:
    """Raises UnusableUrlError for invalid hosts or an invalid path."""
    if base == "unix":
        if hosts or not path.strip("/"):
            raise UnusableUrlError("a unix socket needs an absolute path: unix:///PATH")
        return
    for host in hosts.split(","):
        if not host or (host.startswith(":") and not _BARE_IPV6.fullmatch(host)):
            raise UnusableUrlError(
                "it has no host, or a delimiter in the user or password is not percent-encoded"
            )
        if re.search(r"\s", host):
            raise UnusableUrlError("a host contains a blank")
        if re.search(r":0*$", host):
            raise UnusableUrlError("a host has no port after its colon, or port 0")
        in_brackets = re.fullmatch(r"\[[^\[\]]+\](:[0-9]+)?", host)
        if not in_brackets and (host.count(":") > 1 or "[" in host):
            raise UnusableUrlError("an IPv6 address must be in brackets: [::1]:6379")
    if not re.fullmatch(r"/?[0-9]*/?", path):
        raise UnusableUrlError("the database, at the end of the path, must be a number")


def _check_values(options: Mapping[str, Any], path: str) -> None:
    """Raises UnusableUrlError for values that redis-py accepts but cannot use."""
    for name in _ABOVE_ZERO:
        value = options.get(name, 1)
        if not (math.isfinite(value) and value > 0):
            raise UnusableUrlError(f"{name} in its query must be above 0")
    for name, minimum in _MINIMUM.items():
        if options.get(name, minimum) < minimum:
            raise UnusableUrlError(f"{name} in its query must be at least {minimum}")
    if not _CLIENT_NAME.fullmatch(options.get("client_name", "-")):
        raise UnusableUrlError("client_name in its query must be ASCII without blanks")
    path_database = path.strip("/")
    if path_database.isdecimal() and int(path_database) != options.get("db"):
        raise UnusableUrlError("its path and its query name different databases")


def redact(text: str, url: str) -> str:
    """Returns `text` without the credentials of `url`: verbatim, decoded or quoted.

    The URL itself is replaced by its scheme, hosts and path, or by its scheme only if it is unclear
    which part is a credential.  `redact(url, url)` is the URL in a form that may be shown.
    """
    if not url:
        return text
    shown, secrets = _shown_url(url), sorted(_secrets(url), key=len, reverse=True)
    hide = re.compile("|".join(map(re.escape, secrets))) if secrets else None
    pieces = text.split(url)
    return shown.join(hide.sub(HIDDEN, piece) if hide else piece for piece in pieces)


def _shown_url(url: str) -> str:
    scheme, separator, after_scheme = url.partition("://")
    if not (separator and _SCHEME.fullmatch(scheme)):
        return HIDDEN
    place = _shown_place(scheme, after_scheme)
    if place is None:
        return f"{scheme}://{HIDDEN}"
    before_query, query = _split_query(after_scheme)
    return f"{scheme}://{f'{HIDDEN}@' * ('@' in before_query)}{place}{f'?{HIDDEN}' * bool(query)}"


def _split_query(after_scheme: str) -> tuple[str, str]:
    """Returns the part before the query or fragment, and the query with what follows it."""
    match = re.search(r"[?#]", after_scheme)
    return (
        (after_scheme[: match.start()], after_scheme[match.end() :])
        if match
        else (after_scheme, "")
    )


def _shown_place(scheme: str, after_scheme: str) -> str | None:
    """Returns hosts and path, or None if they may contain a credential."""
    pattern = _SOCKET if scheme == "unix" else _PLACE
    before_query, query = _split_query(after_scheme)
    place = before_query.rpartition("@")[2]
    # An @ after a ? may be the end of a password that contains a ?.
    return place if "@" not in query and pattern.fullmatch(place) else None


def _secrets(url: str) -> set[str]:
    scheme, _, after_scheme = url.partition("://")
    after_scheme = after_scheme or url
    if _shown_place(scheme, after_scheme) is None:
        parts = [after_scheme, *_DELIMITERS.split(after_scheme)]
    else:
        before_query, query = _split_query(after_scheme)
        account = before_query.rpartition("@")[0]
        user, _, password = account.partition(":")
        # An exception may quote the text between two delimiters.
        parts = [account, user, password, *_DELIMITERS.split(account), *_query_secrets(query)]
    return {form for part in parts for form in _encoded_forms(part) if form}


def _query_secrets(query: str) -> Iterator[str]:
    for pair in re.split(r"[&;#]", query):
        name, _, value = pair.partition("=")
        if not _PLAIN.fullmatch(value) or re.search(r"pass|user|auth|token|key", name):
            yield value


def _encoded_forms(secret: str) -> Iterator[str]:
    for decoded in (secret, unquote(secret), unquote_plus(secret)):
        yield decoded
        yield quote(decoded, safe="")
        yield quote_plus(decoded, safe="")
        # In the notations of repr and JSON.
        yield repr(decoded)[1:-1]
        yield json.dumps(decoded)[1:-1]


@dataclass(frozen=True, slots=True)
class RedisAccess:
    """The settings redis_user, redis_user_file and so on.

    A file may be replaced at any time: it is read for every connection.  None: the URL has the
    value, or it is not needed.  sentinel_password: by default the password of Redis is used.
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


NO_EXTRA_ACCESS = RedisAccess()
