"""Describes the caller of a call, and its rights.

A guard (`guard.Guard`) identifies the caller of every call before it reads a message, and sets the
current `Call`.  Servicers get the caller from `current_caller()`.
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
    """Lists the rights of callers."""

    NONE = 0
    READ = auto()
    STEER = auto()
    MEASURE = auto()
    INSTALL = auto()
    OVERRIDE = auto()


ALL_RIGHTS = Right.READ | Right.STEER | Right.MEASURE | Right.INSTALL | Right.OVERRIDE


@dataclass(frozen=True, slots=True)
class Caller:
    """Describes a caller.

    name: shown to people.  access_key: the unique key of the caller's access entry, "" for an
    anonymous caller.  user: the user on the operators' socket as "uid:NUMBER", the same for all its
    processes; "" elsewhere.  engines: globs of the engine ids that the caller may act on.
    origin: where the call came from, for the audit.
    """

    name: str
    rights: Right
    access_key: str = ""
    engines: tuple[str, ...] = ("*",)
    origin: str = ""
    user: str = ""

    @property
    def account(self) -> str:
        """Identifies the caller across its processes and connections; "" if it is anonymous."""
        return self.user or self.access_key

    @property
    def is_restricted(self) -> bool:
        """Returns whether the caller may act on some engines only."""
        return "*" not in self.engines

    def may_act_on(self, engine_id: str) -> bool:
        """Returns whether one of the globs matches."""
        return any(fnmatchcase(engine_id, pattern) for pattern in self.engines)

    def require_engines(self, engine_ids: Iterable[str]) -> None:
        """Raises ForbiddenError for an engine that the caller may not act on."""
        for engine_id in engine_ids:
            if not self.may_act_on(engine_id):
                raise ForbiddenError(
                    f"{self.name} may act on the engines {', '.join(self.engines)}, but not on "
                    f"{engine_id[:128]!r}: the access list restricts it",
                    resource=engine_id,
                )


@dataclass(eq=False, slots=True)
class Call:
    """Describes a call under way."""

    caller: Caller
    right: Right
    # The source whose limits the call uses (`limit_source`).
    source: str = ""
    # Engines that the call has named; they are checked again when the access list changes.
    engine_ids: set[str] = field(default_factory=set)
    # Why the caller has lost the right to the call; None while it may continue.
    revocation_error: SpeculationError | None = None
    task: "asyncio.Task[object] | None" = None

    def revoke(self, error: SpeculationError) -> None:
        """Ends the call with this error."""
        self.revocation_error = error
        if self.task is not None:
            self.task.cancel()


def limit_source(caller: Caller, peer: str) -> str:
    """Names the source whose limit a caller uses: an access entry, a host on TCP, or a connection.

    peer: gRPC's name of the connection.  It is the same for all connections of the engines' socket,
    which gRPC does not distinguish.
    """
    if caller.access_key:
        return caller.access_key
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer


_current_call: ContextVar[Call | None] = ContextVar("call", default=None)
_UNGUARDED = Caller("an unknown caller", Right.NONE, origin="unknown")


def set_current_call(call: Call) -> None:
    """Sets the current call of the task that serves it."""
    _current_call.set(call)


def current_caller() -> Caller:
    """Returns the caller of the current call."""
    call = _current_call.get()
    return _UNGUARDED if call is None else call.caller


def current_source() -> str:
    """Returns the source whose limits the current call uses; "" outside of a call."""
    call = _current_call.get()
    return "" if call is None else call.source


def require_engine(engine_id: str) -> None:
    """Raises ForbiddenError if the current caller may not act on this engine."""
    current_caller().require_engines([engine_id])
    call = _current_call.get()
    if call is not None:
        call.engine_ids.add(engine_id)
