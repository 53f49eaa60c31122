"""Decides who may do what.

Reading, steering, measuring, installing profiles and overriding are different rights.  Whoever may
open the engines' unix socket (its mode decides) may read and steer.  Operators have a socket of
their own (`OperatorSocket`): there the access list decides by the user that the kernel names, or,
when it names tokens and certificates only, the mode alone.  On TCP the access list decides, by
bearer token or by the name in a client certificate; without a list, callers on TCP may read and
steer.

The access list is a file of lines

    RIGHTS  token-sha256:HEX   [NAME]  [engine:GLOBS]
    RIGHTS  cert:NAME                    common name, or a DNS or URI subject alternative name
    RIGHTS  uid:NUMBER                   a user of this machine, on the operators' socket
    RIGHTS  gid:NUMBER                   a primary group

and is read again when it changes.  RIGHTS are read, steer, measure, install and override, joined by
commas.  GLOBS are engine ids with * and ?, joined by commas: the entry steers, measures and
overrides no other engines, and installs no profiles.  The file holds digests of tokens, no tokens.
The key identifies the caller; NAME is what people are shown.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import structlog

from controller.core.errors import SpeculationError
from controller.service.net.callers import ALL, Caller, Right
from controller.service.net.errors import UnauthenticatedError
from controller.service.net.unix_sockets import OperatorSocket, Peer
from controller.util.files import AGREEING_LOOKS, Found, WatchedFile

# Finds the caller of a call by its gRPC context.  Raises UnauthenticatedError.
Identify: TypeAlias = Callable[[Any], Caller]
# Checks the keys of a list against what they are used for.  Raises SpeculationError.
CheckKeys: TypeAlias = Callable[[Iterable[str]], None]

# A thousand entries with tokens are 100 KB.
_MAX_BYTES: Final = 256 * 1024
# Digits of a token's digest that are shown.
_DIGITS_SHOWN: Final = 12
_log = structlog.get_logger(__name__)


class AccessFileError(SpeculationError):
    """An access list that cannot be used; the message names file and line."""


_RIGHTS = {
    (right.name or "").lower(): right
    for right in (Right.READ, Right.STEER, Right.MEASURE, Right.INSTALL, Right.OVERRIDE)
}
DIGEST: Final = "token-sha256:"
_USERS: Final = ("uid:", "gid:")
_KEY = re.compile(r"token-sha256:[0-9a-f]{64}|cert:\S+|[ug]id:(0|[1-9][0-9]{0,9})")
_ENGINES = "engine:"
# What was meant as a restriction and would be taken for a name, so that nothing were restricted.
_IS_RESTRICTION = re.compile(r"engines?:", re.IGNORECASE)
_GLOB = re.compile(r"[A-Za-z0-9._:*?-]{1,128}")


class AccessList:
    """Holds the entries of the file that are in force.

    check: of the keys, at the start and at every change.  Raises AccessFileError, and what `check`
    raises, for a list that cannot be used at the start.
    """

    def __init__(self, path: Path, check: CheckKeys = lambda _: None) -> None:
        self._file = WatchedFile(path, _MAX_BYTES)
        self._check = check
        # Counts how often the entries have changed.
        self.version = 0
        self._judged = self._file.look()
        self._entries = self._read(self._judged)
        # Whether nobody but its users gets through the operators' socket.  A list that loses them,
        # or everything, while the sidecar runs does not open that socket again.
        self.governs_operators = not self._entries or _has_users(self._entries)

    def find(self, key: str) -> Caller | None:
        """Finds the entry of a key, "cert:NAME" say."""
        return self._entries.get(key)

    def look(self) -> None:
        """Reads the file, and puts a change into force that two looks in a row have found.

        A list that cannot be used changes nothing: what was allowed before stays allowed.
        """
        found = self._file.look()
        if found == self._judged or self._file.agreeing < AGREEING_LOOKS:
            return
        self._judged = found
        try:
            entries = self._read(found)
        except SpeculationError as error:
            _log.error("access_not_read", error=str(error))
            return
        # First this: at no moment is the socket open to whom neither list names.
        self.governs_operators = self.governs_operators or _has_users(entries)
        self._entries = entries
        self.version += 1
        _log.info("access_read", path=str(self._file.path), entries=len(entries))

    def _read(self, found: Found) -> Mapping[str, Caller]:
        """Raises AccessFileError, and what the check raises."""
        if found.error:
            raise AccessFileError(f"access list {self._file.path}: {found.error}")
        entries = _parse(self._file.path, found.content)
        self._check(entries)
        if not entries:
            _log.warning(
                "access_empty",
                path=str(self._file.path),
                detail="the access list has no entry: it lets nobody in",
            )
        return entries


def _has_users(keys: Iterable[str]) -> bool:
    return any(key.startswith(_USERS) for key in keys)


def _parse(path: Path, content: bytes) -> Mapping[str, Caller]:
    """Returns the entries by key.  Raises AccessFileError for what is no list."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise AccessFileError(f"access list {path}: {error}") from error
    found: dict[str, Caller] = {}
    lines_of: dict[str, int] = {}
    # Not `splitlines`, for which a line also ends within a comment, at a form feed say.
    for number, line in enumerate(text.split("\n"), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        # Messages never quote the line: it may hold a token by mistake.
        where = f"{path}, line {number}"
        key, caller = _entry(words, where)
        for what, text_of in (("key", f"key {key}"), ("name", f"name {caller.name}")):
            before = lines_of.setdefault(text_of, number)
            if before != number:
                raise AccessFileError(
                    f"{where}: the {what} of line {before} again: every entry needs its own"
                )
        found[key] = caller
    if not text.endswith("\n") and text:
        # Cut off, it may name another user, or no longer restrict an entry to its engines.
        raise AccessFileError(
            f"access list {path}: the last line has no line break, so it may have been cut off: "
            "end it with one"
        )
    return found


def _entry(words: list[str], where: str) -> tuple[str, Caller]:
    engines: tuple[str, ...] = ("*",)
    if len(words) > 2 and words[-1].startswith(_ENGINES):
        engines = tuple(words.pop().removeprefix(_ENGINES).split(","))
        if not all(_GLOB.fullmatch(pattern) for pattern in engines):
            raise AccessFileError(
                f"{where}: engine:GLOBS are engine ids with * and ?, joined by commas"
            )
    if len(words) not in {2, 3} or _IS_RESTRICTION.match(words[-1]):
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
    name = words[2] if len(words) == 3 else _shown(key)
    if not (key.isprintable() and name.isprintable()):
        raise AccessFileError(f"{where}: only printable characters are allowed")
    if Right.INSTALL in rights and "*" not in engines:
        raise AccessFileError(
            f"{where}: a profile is for every engine of its kind, so that install goes with no "
            "engine:GLOBS"
        )
    return key, Caller(name, rights, identity=key, engines=engines)


def _shown(key: str) -> str:
    """Names an entry without a name by its key; of a token's digest, by its first digits."""
    return key[: len(DIGEST) + _DIGITS_SHOWN] if key.startswith(DIGEST) else key


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
    if access is None or not access.governs_operators:
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
                keys.append(f"{DIGEST}{digest}")
    identity = context.auth_context() or {}
    for field in ("x509_common_name", "x509_subject_alternative_name"):
        keys += [f"cert:{name.decode('utf-8', 'replace')}" for name in identity.get(field, ())]
    return keys
