"""Reads the access list, and identifies callers with their rights.

Reading, steering, measuring, installing profiles and overriding are different rights.  A process
that can open the engines' unix socket (its mode decides) may read and steer.  Operators have a
separate socket (`OperatorSocket`).  There the access list decides by the user that the kernel
reports.  If the list has only tokens and certificates, the socket's mode alone decides.  On TCP the
access list decides by bearer token or by the name in a client certificate.  Without a list, callers
on TCP may read and steer.

The access list is a file of lines

    RIGHTS  token-sha256:HEX   [NAME]  [engine:GLOBS]
    RIGHTS  cert:NAME                    common name, or a DNS or URI subject alternative name
    RIGHTS  uid:NUMBER                   a user of this machine, on the operators' socket
    RIGHTS  gid:NUMBER                   a primary group

and is read again when it changes.  RIGHTS are read, steer, measure, install and override, joined by
commas.  GLOBS are engine ids with * and ?, joined by commas: the entry may steer, measure and
override only these engines, and may not install profiles.  The file holds digests of tokens, not
the tokens.  The key identifies the caller; NAME is the name shown to people.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import structlog

from controller.core.errors import SpeculationError
from controller.service.net.callers import ALL_RIGHTS, Caller, Right
from controller.service.net.errors import UnauthenticatedError
from controller.service.net.unix_sockets import OperatorSocket, Peer
from controller.util.files import EQUAL_READS_MIN, FileSnapshot, WatchedFile

# Identifies the caller of a call by its gRPC context.  Raises UnauthenticatedError.
Identify: TypeAlias = Callable[[Any], Caller]
# Checks whether the keys of a list may be used.  Raises SpeculationError.
CheckKeys: TypeAlias = Callable[[Iterable[str]], None]

# A thousand entries with tokens are 100 KB.
_MAX_BYTES: Final = 256 * 1024
# Digits of a token's digest that people are shown.
_DIGEST_DIGITS_SHOWN: Final = 12
_log = structlog.get_logger(__name__)


class AccessFileError(SpeculationError):
    """An access list cannot be used; the message names file and line."""


_RIGHTS = {
    (right.name or "").lower(): right
    for right in (Right.READ, Right.STEER, Right.MEASURE, Right.INSTALL, Right.OVERRIDE)
}
BEARER_KEY_PREFIX: Final = "token-sha256:"
_USER_PREFIXES: Final = ("uid:", "gid:")
_KEY = re.compile(r"token-sha256:[0-9a-f]{64}|cert:\S+|[ug]id:(0|[1-9][0-9]{0,9})")
_ENGINES_PREFIX = "engine:"
# A misspelt restriction, which would be taken for a name and restrict nothing.
_RESTRICTION_LIKE = re.compile(r"engines?:", re.IGNORECASE)
_GLOB = re.compile(r"[A-Za-z0-9._:*?-]{1,128}")


class AccessList:
    """Holds the entries of the file that are in force.

    check: checks the keys, at the start and at every change.  Raises AccessFileError, and the
    errors of `check`, for a list that cannot be used at the start.
    """

    def __init__(self, path: Path, check: CheckKeys = lambda _: None) -> None:
        self._file = WatchedFile(path, _MAX_BYTES)
        self._check = check
        # Counts how often the entries have changed.
        self.version = 0
        self._last_processed = self._file.read()
        self._entries = self._read(self._last_processed)
        # Whether only its users are admitted to the operators' socket.  If the list loses its users
        # or all entries while the sidecar runs, the socket stays restricted.
        self.governs_operators = not self._entries or _has_users(self._entries)

    def find(self, key: str) -> Caller | None:
        """Returns the entry of a key, such as "cert:NAME"; None if it is missing."""
        return self._entries.get(key)

    def reload_if_changed(self) -> None:
        """Reads the file, and applies a change once two successive reads agree.

        A list that cannot be used changes nothing: the previous entries stay in force.
        """
        file_state = self._file.read()
        if file_state == self._last_processed or self._file.equal_reads < EQUAL_READS_MIN:
            return
        self._last_processed = file_state
        try:
            entries = self._read(file_state)
        except SpeculationError as error:
            _log.error("access_not_read", error=str(error))
            return
        # First this, so that the socket is never open to a user whom neither list names.
        self.governs_operators = self.governs_operators or _has_users(entries)
        self._entries = entries
        self.version += 1
        _log.info("access_read", path=str(self._file.path), entries=len(entries))

    def _read(self, file_state: FileSnapshot) -> Mapping[str, Caller]:
        """Parses and checks the entries.  Raises AccessFileError, and the errors of the check."""
        if file_state.error:
            raise AccessFileError(f"access list {self._file.path}: {file_state.error}")
        entries = _parse(self._file.path, file_state.content)
        self._check(entries)
        if not entries:
            _log.warning(
                "access_empty",
                path=str(self._file.path),
                detail="the access list has no entry: it admits no caller",
            )
        return entries


def _has_users(keys: Iterable[str]) -> bool:
    return any(key.startswith(_USER_PREFIXES) for key in keys)


def _parse(path: Path, content: bytes) -> Mapping[str, Caller]:
    """Returns the entries by key.  Raises AccessFileError for an invalid list."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise AccessFileError(f"access list {path}: {error}") from error
    entries: dict[str, Caller] = {}
    first_lines: dict[str, int] = {}
    # Not `splitlines`, which also ends a line at a form feed, for example within a comment.
    for number, line in enumerate(text.split("\n"), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        # Messages never quote the line: it may contain a token by mistake.
        location = f"{path}, line {number}"
        key, caller = _parse_entry(words, location)
        for field_name, field_text in (("key", f"key {key}"), ("name", f"name {caller.name}")):
            first_line = first_lines.setdefault(field_text, number)
            if first_line != number:
                raise AccessFileError(
                    f"{location}: repeats the {field_name} of line {first_line}: every entry needs "
                    "its own"
                )
        entries[key] = caller
    if not text.endswith("\n") and text:
        # A truncated line may name another user, or lack the restriction to engines.
        raise AccessFileError(
            f"access list {path}: the last line has no line break, so it may be truncated: "
            "end it with one"
        )
    return entries


def _parse_entry(words: list[str], location: str) -> tuple[str, Caller]:
    engines: tuple[str, ...] = ("*",)
    if len(words) > 2 and words[-1].startswith(_ENGINES_PREFIX):
        engines = tuple(words.pop().removeprefix(_ENGINES_PREFIX).split(","))
        if not all(_GLOB.fullmatch(pattern) for pattern in engines):
            raise AccessFileError(
                f"{location}: engine:GLOBS are engine ids with * and ?, joined by commas"
            )
    if len(words) not in {2, 3} or _RESTRICTION_LIKE.match(words[-1]):
        raise AccessFileError(f"{location}: RIGHTS KEY [NAME] [engine:GLOBS] is needed")
    rights = Right.NONE
    for word in words[0].split(","):
        if word not in _RIGHTS:
            raise AccessFileError(f"{location}: rights are {', '.join(_RIGHTS)}, joined by commas")
        rights |= _RIGHTS[word]
    key = words[1]
    if not _KEY.fullmatch(key):
        raise AccessFileError(
            f"{location}: the key is token-sha256:HEX (64 digits), cert:NAME, uid:NUMBER or "
            "gid:NUMBER"
        )
    name = words[2] if len(words) == 3 else _display_name(key)
    if not (key.isprintable() and name.isprintable()):
        raise AccessFileError(f"{location}: only printable characters are allowed")
    if Right.INSTALL in rights and "*" not in engines:
        raise AccessFileError(
            f"{location}: a profile applies to every engine of its kind, so the right to install "
            "cannot be combined with engine:GLOBS"
        )
    return key, Caller(name, rights, access_key=key, engines=engines)


def _display_name(key: str) -> str:
    """Names an entry without a name by its key; a token's digest by its first digits."""
    return (
        key[: len(BEARER_KEY_PREFIX) + _DIGEST_DIGITS_SHOWN]
        if key.startswith(BEARER_KEY_PREFIX)
        else key
    )


def identify_engines_socket_caller(_context: Any) -> Caller:
    """Identifies a caller on the engines' socket, whose mode decides who may connect.

    gRPC does not expose the peer's credentials.
    """
    name = "a client of the engines' socket"
    return Caller(name, Right.READ | Right.STEER, origin=name)


def operators_socket_identifier(
    operator_socket: OperatorSocket, access: AccessList | None
) -> Identify:
    """Identifies callers by the connected process's credentials, which come from the kernel."""

    def identify(context: Any) -> Caller:
        peer = operator_socket.peers.get(context.peer() or "")
        if peer is None:
            raise UnauthenticatedError("this connection did not come through the operators' socket")
        return _operator_caller(peer, access)

    return identify


def _operator_caller(peer: Peer, access: AccessList | None) -> Caller:
    user = f"uid:{peer.uid}"
    if access is None or not access.governs_operators:
        return Caller(str(peer), ALL_RIGHTS, origin=str(peer), user=user)
    for key in (user, f"gid:{peer.gid}"):
        caller = access.find(key)
        if caller is not None:
            return replace(caller, origin=str(peer), user=user)
    raise UnauthenticatedError(f"the access list has no entry for {peer}")


def tcp_identifier(access: AccessList | None) -> Identify:
    """Identifies callers by their token or client certificate."""

    def identify(context: Any) -> Caller:
        name: str = context.peer() or "unknown"
        if access is None:
            return Caller(name, Right.READ | Right.STEER, origin=name)
        for key in _caller_keys(context):
            caller = access.find(key)
            if caller is not None:
                return replace(caller, origin=f"{caller.name} at {name}")
        raise UnauthenticatedError(
            "the call has no token or client certificate of the access list: send `authorization: "
            "Bearer TOKEN`, or call with a certificate"
        )

    return identify


def _caller_keys(context: Any) -> list[str]:
    keys = []
    for name, value in context.invocation_metadata() or ():
        if name == "authorization" and isinstance(value, str):
            kind, _, token = value.partition(" ")
            if kind.lower() == "bearer" and token:
                digest = hashlib.sha256(token.strip().encode()).hexdigest()
                keys.append(f"{BEARER_KEY_PREFIX}{digest}")
    identity = context.auth_context() or {}
    for field in ("x509_common_name", "x509_subject_alternative_name"):
        keys += [f"cert:{name.decode('utf-8', 'replace')}" for name in identity.get(field, ())]
    return keys
