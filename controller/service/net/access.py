"""Decides who may do what.

Reading, steering, measuring, installing profiles and overriding are different rights.  Whoever may
open the engines' unix socket (its mode decides) may read and steer.  Operators have a socket of
their own (`operator_door`): there the access list decides by the user that the kernel names, or,
when it names no user, the mode alone.  On TCP the access list decides, by bearer token or by the
name in a client certificate; without a list, callers on TCP may read and steer.

The access list is a file of lines

    RIGHTS  token-sha256:HEX   [NAME]  [engine:GLOBS]
    RIGHTS  cert:NAME                    common name, or a DNS or URI subject alternative name
    RIGHTS  uid:NUMBER                   a user of this machine, on the operators' socket
    RIGHTS  gid:NUMBER                   a primary group

and is read again when it changes.  RIGHTS are read, steer, measure, install and override, joined by
commas.  GLOBS are engine ids with * and ?, joined by commas: the entry steers, measures and
overrides no other engines, and installs no profiles.  The file holds digests of tokens, no tokens.
"""

import hashlib
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import structlog

from controller.core.errors import SpeculationError
from controller.service.net.callers import ALL, Caller, Right
from controller.service.net.errors import UnauthenticatedError
from controller.service.net.operator_socket import OperatorSocket, Peer

# Finds the caller of a call by its gRPC context.  Raises UnauthenticatedError.
Identify: TypeAlias = Callable[[Any], Caller]

_LOOK_SECONDS = 1.0
_log = structlog.get_logger(__name__)


class AccessFileError(SpeculationError):
    """An access list that cannot be used; the message names file and line."""


_RIGHTS = {
    (right.name or "").lower(): right
    for right in (Right.READ, Right.STEER, Right.MEASURE, Right.INSTALL, Right.OVERRIDE)
}
_KEY = re.compile(r"token-sha256:[0-9a-f]{64}|cert:\S+|[ug]id:\d{1,10}")
_ENGINES = "engine:"
_GLOB = re.compile(r"[A-Za-z0-9._:*?-]{1,128}")


class AccessList:
    """The file, as it stands.  Raises AccessFileError when it cannot be read at the start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Counts how often the entries have changed.
        self.version = 0
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
        self.look()
        return any(key.startswith(("uid:", "gid:")) for key in self._entries)

    def find(self, key: str) -> Caller | None:
        """Finds the entry of a key "token-sha256:HEX" or "cert:NAME"."""
        self.look()
        return self._entries.get(key)

    def look(self) -> None:
        """Reads the file again if it has changed; looks once a second at most."""
        now = time.monotonic()
        if now - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = now
        stamp = self._stamp()
        if stamp == self._seen:
            return
        # A file that cannot be read now is read again when it has changed once more.
        self._seen = stamp
        try:
            self._entries = _parse(self._path)
        except AccessFileError as error:
            # It may be half-written: what was allowed before stays allowed.
            _log.error("access_not_read", error=str(error))
            return
        self.version += 1
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
        if words:
            # Messages never quote the line: it may hold a token by mistake.
            key, caller = _entry(words, f"{path}, line {number}")
            found[key] = caller
    return found


def _entry(words: list[str], where: str) -> tuple[str, Caller]:
    engines: tuple[str, ...] = ("*",)
    if len(words) > 2 and words[-1].startswith(_ENGINES):
        engines = tuple(words.pop().removeprefix(_ENGINES).split(","))
        if not all(_GLOB.fullmatch(pattern) for pattern in engines):
            raise AccessFileError(
                f"{where}: engine:GLOBS are engine ids with * and ?, joined by commas"
            )
    if len(words) not in {2, 3}:
        raise AccessFileError(f"{where}: RIGHTS KEY [NAME] [engine:GLOBS] is needed")
    rights = Right.NONE
    for word in words[0].split(","):
        if word not in _RIGHTS:
            raise AccessFileError(f"{where}: rights are {', '.join(_RIGHTS)}, joined by commas")
        rights |= _RIGHTS[word]
    key = words[1]
    if not _KEY.fullmatch(key):
        raise AccessFileError(
            f"{where}: the key is token-sha256:HEX (64 digits), cert:NAME, uid:NUMBER or gid:NUMBER"
        )
    if Right.INSTALL in rights and "*" not in engines:
        raise AccessFileError(
            f"{where}: a profile is for every engine of its kind, so that install goes with no "
            "engine:GLOBS"
        )
    name = words[2] if len(words) == 3 else key.partition(":")[2][:12]
    return key, Caller(name, rights, identity=name, engines=engines)


def on_engines_socket(_context: Any) -> Caller:
    """The socket's mode decides who gets there; gRPC does not tell who it is."""
    name = "a client of the engines' socket"
    return Caller(name, Right.READ | Right.STEER, origin=name)


def on_operators_socket(operator_socket: OperatorSocket, access: AccessList | None) -> Identify:
    """Identifies callers by what the kernel tells about the connected process."""

    def identify(context: Any) -> Caller:
        peer = operator_socket.peers.get(context.peer() or "")
        if peer is None:
            raise UnauthenticatedError("this connection did not come through the operators' socket")
        return _operator(peer, access)

    return identify


def _operator(peer: Peer, access: AccessList | None) -> Caller:
    user = f"uid:{peer.uid}"
    if access is None or not access.has_users:
        return Caller(str(peer), ALL, origin=str(peer), user=user)
    for key in (user, f"gid:{peer.gid}"):
        caller = access.find(key)
        if caller is not None:
            return replace(caller, origin=str(peer), user=user)
    raise UnauthenticatedError(f"the access list does not know {peer}")


def on_tcp(access: AccessList | None) -> Identify:
    """Identifies callers by their token or client certificate."""

    def identify(context: Any) -> Caller:
        name: str = context.peer() or "unknown"
        if access is None:
            return Caller(name, Right.READ | Right.STEER, origin=name)
        for key in _keys(context):
            caller = access.find(key)
            if caller is not None:
                return replace(caller, origin=f"{caller.name} at {name}")
        raise UnauthenticatedError(
            "no token or client certificate that the access list knows: send `authorization: "
            "Bearer TOKEN`, or call with a certificate"
        )

    return identify


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
