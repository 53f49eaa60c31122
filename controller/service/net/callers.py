"""Describes who makes a call, and what that caller may do.

A guard (`guard.Guard`) finds the caller of every call before anything of the call is read, and
keeps both as the current `Call`.  Servicers ask `calling()` for it.
"""

import asyncio
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Flag, auto
from fnmatch import fnmatchcase

from controller.core.errors import SpeculationError
from controller.service.net.errors import ForbiddenError


class Right(Flag):
    """Names what a caller may do."""

    NONE = 0
    READ = auto()
    STEER = auto()
    MEASURE = auto()
    INSTALL = auto()
    OVERRIDE = auto()


ALL = Right.READ | Right.STEER | Right.MEASURE | Right.INSTALL | Right.OVERRIDE


@dataclass(frozen=True, slots=True)
class Caller:
    """Describes a caller.

    name: for people to read.  identity: key of the access entry that the caller proved to be, which
    no other entry has; "" for an anonymous one.  user: the user on the operators' socket as
    "uid:NUMBER", whatever process calls; "" elsewhere.  engines: globs of the engine ids that the
    caller may act on.  origin: where the call came from, for the audit.
    """

    name: str
    rights: Right
    identity: str = ""
    engines: tuple[str, ...] = ("*",)
    origin: str = ""
    user: str = ""

    @property
    def account(self) -> str:
        """Names who calls, in whatever process and through whatever connection; "" for nobody."""
        return self.user or self.identity

    @property
    def is_restricted(self) -> bool:
        """True when there are engines that the caller may not act on."""
        return "*" not in self.engines

    def may_act_on(self, engine_id: str) -> bool:
        """Whether one of the globs matches."""
        return any(fnmatchcase(engine_id, pattern) for pattern in self.engines)

    def require_engines(self, engine_ids: Iterable[str]) -> None:
        """Raises ForbiddenError for an engine that the caller may not act on."""
        for engine_id in engine_ids:
            if not self.may_act_on(engine_id):
                raise ForbiddenError(
                    f"{self.name} may act on the engines {', '.join(self.engines)}, and not on "
                    f"{engine_id[:128]!r}: the access list restricts it",
                    resource=engine_id,
                )


@dataclass(eq=False, slots=True)
class Call:
    """A call under way."""

    caller: Caller
    right: Right
    # Whose limits the call uses (`source_of`).
    source: str = ""
    # Engines that the call has named; the access list is asked about them again when it changes.
    engine_ids: set[str] = field(default_factory=set)
    # Why the caller has lost the call, None while it may go on.
    revoked: SpeculationError | None = None
    task: "asyncio.Task[object] | None" = None

    def revoke(self, why: SpeculationError) -> None:
        """Ends the call with this error."""
        self.revoked = why
        if self.task is not None:
            self.task.cancel()


def source_of(caller: Caller, peer: str) -> str:
    """Names those who share a limit: an access entry, a host on TCP, or a connection.

    peer: gRPC's name of the connection.  It is the same for all connections of the engines' socket,
    because gRPC does not tell these apart.
    """
    if caller.identity:
        return caller.identity
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer


_current: ContextVar[Call | None] = ContextVar("call", default=None)
_UNGUARDED = Caller("an unknown caller", Right.NONE, origin="unknown")


def begin(call: Call) -> None:
    """Makes it the current one, for the task that serves it."""
    _current.set(call)


def calling() -> Caller:
    """The caller of the current call."""
    call = _current.get()
    return _UNGUARDED if call is None else call.caller


def source() -> str:
    """Names those whose limits the current call uses; "" outside of a call."""
    call = _current.get()
    return "" if call is None else call.source


def require_engine(engine_id: str) -> None:
    """Raises ForbiddenError when the current caller may not act on this engine."""
    calling().require_engines([engine_id])
    call = _current.get()
    if call is not None:
        call.engine_ids.add(engine_id)
