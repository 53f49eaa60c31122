"""Who may do what.

Reading, steering and overriding are different rights.  Whoever may open the unix socket (its mode
decides) may read and steer.  Operators have a socket of their own (`operator_door`): there the
access list decides by the user that the kernel names, or, when it names no user, the mode alone.
On TCP the access list decides, by bearer token or by the name in a client certificate; without a
list TCP may read and steer, and never override.

The access list is a file of lines

    RIGHTS  token-sha256:HEX   NAME        RIGHTS: read, steer, override, joined by commas
    RIGHTS  cert:NAME                      common name, or a DNS or URI subject alternative name
    RIGHTS  uid:NUMBER         NAME        a user of this machine, on the operators' socket
    RIGHTS  gid:NUMBER         NAME        a primary group

and is read again when it changes.  It holds digests of tokens, no tokens.
"""

import hashlib
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Flag, auto
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import structlog

from controller.core.errors import SpeculationError
from controller.service.errors import (
    ForbiddenError,
    TooManyCallsError,
    UnauthenticatedError,
    abort,
)
from controller.service.operator_door import OperatorDoor, Peer
from controller.service.reading import read_after

_LOOK_SECONDS = 1.0
_log = structlog.get_logger(__name__)


class AccessFileError(SpeculationError):
    """An access list that cannot be used; the message names file and line."""


class Right(Flag):
    """What a caller may do."""

    NONE = 0
    READ = auto()
    STEER = auto()
    OVERRIDE = auto()


ALL = Right.READ | Right.STEER | Right.OVERRIDE
_RIGHTS = {"read": Right.READ, "steer": Right.STEER, "override": Right.OVERRIDE}
# Served to callers on this machine only.
_LOCAL = {"Channelz"}
_WRITES = {"SetOverride", "ClearOverride"}
# Calls a second and at once, of one sidecar, by what they need.
_LIMITS = {
    Right.READ: (100.0, 400.0),
    Right.STEER: (50_000.0, 100_000.0),
    Right.OVERRIDE: (20.0, 200.0),
}

# Streams that are open to be told of news, of health or overrides, say.
_WATCHES_MAX = 64


def right_of(method: str) -> Right:
    """What a call of /package.Service/Method needs."""
    kind, name = _kind(method), method.rpartition("/")[2]
    if kind == "Health":
        return Right.NONE
    if kind == "PolicyService" and name in _WRITES:
        return Right.OVERRIDE
    if kind == "ProfilingService" and name in {"ListProfiles", "GetProfile"}:
        return Right.READ
    steers = {"SpeculationService", "ProfilingService", "TrainingService"}
    return Right.STEER if kind in steers else Right.READ


def _kind(method: str) -> str:
    return method.strip("/").partition("/")[0].rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, for the audit, and what he may."""

    name: str
    rights: Right


class AccessList:
    """The file, as it stands.  Raises AccessFileError when it cannot be read at the start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._stamp()
        self._looked_at = time.monotonic()
        self._entries = _parse(path)

    @property
    def has_tokens(self) -> bool:
        """True when a token is listed: they must not go over an open line."""
        return any(key.startswith("token-sha256:") for key in self._entries)

    @property
    def has_users(self) -> bool:
        """True when a user or group is listed: the operators' socket then is for them only."""
        self._look()
        return any(key.startswith(("uid:", "gid:")) for key in self._entries)

    def find(self, key: str) -> Caller | None:
        """By "token-sha256:HEX" or "cert:NAME"."""
        self._look()
        return self._entries.get(key)

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = now
        stamp = self._stamp()
        if stamp == self._seen:
            return
        try:
            self._entries = _parse(self._path)
        except AccessFileError as error:
            # Half-written, perhaps: what was allowed before stays, and it is read again.
            _log.error("access_not_read", error=str(error))
            return
        self._seen = stamp
        _log.info("access_read", path=str(self._path), entries=len(self._entries))

    def _stamp(self) -> tuple[int, int, int]:
        try:
            found = self._path.stat()
        except OSError:
            return (0, 0, 0)
        return (found.st_ino, found.st_size, found.st_mtime_ns)


def _parse(path: Path) -> Mapping[str, Caller]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise AccessFileError(f"access list {path}: {error}") from error
    found: dict[str, Caller] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) not in {2, 3}:
            raise AccessFileError(f"{path}, line {number}: RIGHTS KEY [NAME] is needed")
        rights, unknown = Right.NONE, set(words[0].split(",")) - set(_RIGHTS)
        if unknown:
            # Never the line itself: it may hold a token by mistake.
            raise AccessFileError(
                f"{path}, line {number}: rights are {', '.join(_RIGHTS)}, joined by commas"
            )
        for word in words[0].split(","):
            rights |= _RIGHTS[word]
        key = words[1]
        if not re.fullmatch(r"token-sha256:[0-9a-f]{64}|cert:\S+|[ug]id:\d{1,10}", key):
            raise AccessFileError(
                f"{path}, line {number}: the key is token-sha256:HEX (64 digits), cert:NAME, "
                "uid:NUMBER or gid:NUMBER"
            )
        name = words[2] if len(words) == 3 else key.partition(":")[2][:12]
        found[key] = Caller(name, rights)
    return found


class Guard(grpc.aio.ServerInterceptor):
    """Lets calls through that may be made, and not too many of them."""

    def __init__(self, access: AccessList | None, door: OperatorDoor) -> None:
        self._access = access
        self._door = door
        self._buckets = {right: _Bucket(*limit) for right, limit in _LIMITS.items()}
        # Open streams of those who only look on: of operators, and of all others.
        self._watches = Counter[bool]()

    async def intercept_service(
        self,
        continuation: Callable[[Any], Awaitable[Any]],
        handler_call_details: Any,
    ) -> Any:
        """Puts the check before the call's own handler."""
        handler = await continuation(handler_call_details)
        right = right_of(handler_call_details.method)
        if handler is None:
            return None
        local = _kind(handler_call_details.method) in _LOCAL
        streams = handler.request_streaming or handler.response_streaming
        watches = streams and right in {Right.NONE, Right.READ}

        async def check(context: Any) -> None:
            try:
                if right is not Right.NONE:
                    self._check(context, right, local=local)
                if watches:
                    self._watch(context)
            except SpeculationError as error:
                await abort(context, error)

        return read_after(handler, check)

    def _check(self, context: Any, right: Right, *, local: bool) -> None:
        if local and not (context.peer() or "").startswith("unix"):
            raise ForbiddenError("channelz is served on the unix sockets only")
        caller = caller_of(context, self._access, self._door.peers)
        if right not in caller.rights:
            raise ForbiddenError(
                f"{caller.name} has not the right to {(right.name or '').lower()} here"
                + (
                    f": overrides are set on the operators' socket, unix:{self._door.path}"
                    if right is Right.OVERRIDE
                    else ""
                )
            )
        if not self._buckets[right].take():
            raise TooManyCallsError("too many calls: try again in a moment")

    def _watch(self, context: Any) -> None:
        """Counts a stream that stays open to be told of news; operators' apart."""
        who = context.peer() in self._door.peers
        if self._watches[who] >= _WATCHES_MAX:
            raise TooManyCallsError(f"{_WATCHES_MAX} such streams are open already: close some")
        self._watches[who] += 1
        context.add_done_callback(lambda _: self._watches.subtract([who]))


def caller_of(context: Any, access: AccessList | None, operators: Mapping[str, Peer]) -> Caller:
    """operators: who is connected to their socket.

    Raises UnauthenticatedError for one whom the access list does not know.
    """
    name: str = context.peer() or ""
    if (operator := operators.get(name)) is not None:
        return _operator(operator, access)
    if name.startswith("unix"):
        return Caller("who comes by the engines' socket", Right.READ | Right.STEER)
    if access is None:
        return Caller(name, Right.READ | Right.STEER)
    for key in _keys(context):
        caller = access.find(key)
        if caller is not None:
            return caller
    raise UnauthenticatedError(
        "no token or client certificate that the access list knows: send `authorization: Bearer "
        "TOKEN`, or call with a certificate"
    )


def _operator(peer: Peer, access: AccessList | None) -> Caller:
    if access is None or not access.has_users:
        return Caller(str(peer), ALL)
    for key in (f"uid:{peer.uid}", f"gid:{peer.gid}"):
        caller = access.find(key)
        if caller is not None:
            return caller
    raise UnauthenticatedError(f"the access list does not know {peer}")


def _keys(context: Any) -> list[str]:
    keys = []
    for name, value in context.invocation_metadata() or ():
        if name == "authorization" and isinstance(value, str):
            kind, _, token = value.partition(" ")
            if kind.lower() == "bearer" and token:
                digest = hashlib.sha256(token.strip().encode()).hexdigest()
                keys.append(f"token-sha256:{digest}")
    identity = context.auth_context() or {}
    for field in ("x509_common_name", "x509_subject_alternative_name"):
        keys += [f"cert:{name.decode('utf-8', 'replace')}" for name in identity.get(field, ())]
    return keys


class _Bucket:
    """So many calls a second, and so many at once."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._left, self._at = burst, time.monotonic()

    def take(self) -> bool:
        now = time.monotonic()
        self._left = min(self._burst, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


def certificates(certificate: Path, key: Path, client_ca: Path | None) -> grpc.ServerCredentials:
    """TLS from files that are read again when they change.  Raises AccessFileError."""
    paths = [certificate, key, *([client_ca] if client_ca else [])]

    def stamp() -> list[int]:
        return [path.stat().st_mtime_ns for path in paths]

    def read() -> Any:
        authority = client_ca.read_bytes() if client_ca else None
        return grpc.ssl_server_certificate_configuration(
            [(key.read_bytes(), certificate.read_bytes())], authority
        )

    seen: list[int] = []

    def fetch() -> Any:
        nonlocal seen
        try:
            now = stamp()
            if now == seen:
                return None
            found = read()
        except OSError as error:
            _log.error("certificate_not_read", error=str(error))
            return None
        seen = now
        return found

    try:
        first, seen = read(), stamp()
    except OSError as error:
        raise AccessFileError(f"TLS: {error}") from error
    return grpc.dynamic_ssl_server_credentials(first, fetch, client_ca is not None)
