"""Keeps one session per engine id, found by its token or by its engine."""

import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

import structlog

from controller.core.clock import Clock
from controller.core.cost.profile import Profile
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import EngineSpec
from controller.core.errors import SpeculationError
from controller.service.net.errors import (
    EngineTakenError,
    NoSessionError,
    TooManyEnginesError,
    UnknownEngineError,
)
from controller.service.sessions.counters import Received
from controller.service.sessions.engine_identity import NOBODY, EngineIdentity
from controller.service.sessions.session import EngineSession, SessionObserver

# An engine opens its stream at once; where the registry is full, one that did not is removed.
_UNUSED_SECONDS = 5.0
# Sessions that are over, and of which it is known what arrived: an agent whose stream broke asks as
# soon as it is back.
_REMEMBERED = 4096
# An engine whose connection or agent broke off is back within this time.  Whoever comes under its
# id later than that takes it over: the next process of an engine that crashed, for example.
_TAKEN_SECONDS = 5.0
# Engines that the refusal of an unknown one names.
_NAMED_MAX = 16

CoreFactory = Callable[[EngineSpec, Profile | None], EngineController]

# Reports a message, on average, from which an engine's reports come too late.
LONG_MESSAGE: Final = 64
# How often `look` is to be called.
LOOK_SECONDS: Final = 5.0
# After so many looks in a row that find reports lost, no other engine is taken.
_LOOKS: Final = 2

_log = structlog.get_logger(__name__)


class ProfileSource(Protocol):
    """Gives new sessions their profiles."""

    def find(self, spec: EngineSpec) -> Profile | None:
        """Returns the profile that was measured on such an engine; None without one."""

    def why_none(self, spec: EngineSpec) -> str:
        """Explains to people why no profile matches this engine."""


@dataclass(eq=False, repr=False)
class SessionRegistry:
    """All sessions, by token and by engine.

    At most `max_engines`; one that nothing is heard of ends after `idle_seconds`.
    """

    core_factory: CoreFactory
    profiles: ProfileSource
    clock: Clock
    max_engines: int = 1024
    idle_seconds: float = 600.0
    observer: SessionObserver = field(default_factory=SessionObserver)

    def __post_init__(self) -> None:
        self.load = Load()
        self._by_token: dict[str, EngineSession] = {}
        self._by_engine: dict[str, EngineSession] = {}
        # By token, of sessions that are over; the newest last.
        self._received: dict[str, Received] = {}
        self._closed: SpeculationError | None = None

    def __len__(self) -> int:
        return len(self._by_engine)

    def __iter__(self) -> Iterator[EngineSession]:
        return iter(list(self._by_engine.values()))

    def introduce(self, spec: EngineSpec, identity: EngineIdentity = NOBODY) -> EngineSession:
        """Opens a session; one that the same engine_id had is over.

        Raises TooManyEnginesError when the registry is full or the sidecar cannot serve those that
        it has, EngineTakenError when another engine holds the id.
        """
        if self._closed is not None:
            raise self._closed
        known = self._by_engine.get(spec.engine_id)
        if known is not None:
            _require_free(known, identity)
        if known is None and len(self) >= self.max_engines:
            self.expire()
            self._make_room()
            if len(self) >= self.max_engines:
                raise TooManyEnginesError(
                    f"{len(self)} engines are being steered already, which is the limit "
                    "(CONTROLLER_MAX_ENGINES)"
                )
        if known is None and self.load.is_too_much:
            raise TooManyEnginesError(
                f"the sidecar cannot take the reports of its {len(self)} engines fast enough: give "
                "it a faster core or one of its own, or run another sidecar for some of them"
            )
        profile = self.profiles.find(spec)
        core = self.core_factory(spec, profile)
        if known is not None:
            self._remove(
                known,
                NoSessionError(
                    f"engine {spec.engine_id!r} introduced itself again: this session is over"
                ),
            )
        session = EngineSession(secrets.token_hex(16), core, self.clock, identity, self.observer)
        self._by_token[session.session_id] = session
        self._by_engine[spec.engine_id] = session
        _log.info(
            "engine_introduced",
            engine=spec.engine_id,
            drafters={d.name: list(d.gammas) for d in spec.drafters},
            max_batch_size=spec.max_batch_size,
            again=known is not None,
            profile=core.profile_id or None,
            costs="measured" if core.profile_id else "prior",
            **({} if profile else {"no_profile": self.profiles.why_none(spec)}),
        )
        self.observer.opened(session, known)
        return session

    def by_token(self, session_id: str) -> EngineSession:
        """Finds a session.  Raises NoSessionError."""
        session = self._by_token.get(session_id)
        if session is None:
            raise self._closed or NoSessionError(
                f"session {session_id[:64]!r} is unknown or over: the engine has to introduce "
                "itself (again)"
            )
        return session

    def received_in(self, session_id: str) -> Received | None:
        """Returns what arrived on the stream of an ended session; None if that is unknown."""
        return self._received.get(session_id)

    def by_engine(self, engine_id: str) -> EngineSession:
        """Finds a session.  Raises UnknownEngineError."""
        session = self._by_engine.get(engine_id)
        if session is None:
            known = sorted(self._by_engine)
            named = ", ".join(known[:_NAMED_MAX]) or "none"
            more = f" and {len(known) - _NAMED_MAX} more" if len(known) > _NAMED_MAX else ""
            raise UnknownEngineError(
                f"no engine {engine_id[:128]!r} has a session; introduced: {named}{more}",
                resource=engine_id,
            )
        return session

    def expire(self) -> None:
        """Ends the sessions that nothing was heard of for the idle time."""
        for session in self:
            idle = session.seconds_since_contact
            if idle >= self.idle_seconds:
                self._remove(session, NoSessionError(f"nothing was heard for {idle:.0f} s"))
                _log.info("session_expired", engine=session.engine_id, idle_seconds=round(idle))

    def _make_room(self) -> None:
        """Ends the oldest session of which nothing has come but its introduction."""
        if len(self) < self.max_engines:
            return
        for session in self:
            idle = session.seconds_since_contact
            if not session.used and idle >= _UNUSED_SECONDS:
                self._remove(session, NoSessionError("others came, and nothing was reported"))
                _log.warning("session_made_way", engine=session.engine_id, idle=round(idle))
                return

    def close(self, why: SpeculationError, last_lease_seconds: float = 0.0) -> None:
        """Ends every session and takes no new one; their engines hold their plan for so long."""
        self._closed = why
        for session in self:
            session.part(last_lease_seconds)
            self._remove(session, why)

    def _remove(self, session: EngineSession, why: SpeculationError) -> None:
        del self._by_token[session.session_id]
        del self._by_engine[session.engine_id]
        session.end(why)
        self._received[session.session_id] = session.received
        if len(self._received) > _REMEMBERED:
            del self._received[next(iter(self._received))]
        self.observer.ended(session)


def _require_free(session: EngineSession, identity: EngineIdentity) -> None:
    """Raises EngineTakenError while the session's engine is there, and has not this identity."""
    silent = session.seconds_since_steered
    if session.identity.is_same(identity) or silent >= _TAKEN_SECONDS:
        return
    raise EngineTakenError(
        f"another engine steers under the id {session.engine_id!r}: give this one an id of its "
        f"own; if the other one has ended, its id is free {_TAKEN_SECONDS:g} s after its last word",
        resource=session.engine_id,
    )


class Load:
    """Follows what all engines send.  is_too_much: agents lose reports to a sidecar behind.

    An agent sends its next message when those before it are acknowledged
    (`messages_in_flight_max`).  A sidecar that is behind therefore gets fewer messages, with up to
    128 reports in each, which takes a fraction of the time.  Where agents have to drop reports even
    so, the engines are too many.  It is behind if the messages of more than half of its engines are
    long, so that no single engine can keep others out.
    """

    def __init__(self) -> None:
        self.is_too_much = False
        self._bad_looks = 0
        # Messages, reports and dropped ones at the last look, by session.
        self._seen: dict[str, tuple[int, int, int]] = {}

    def look(self, sessions: Iterable[EngineSession]) -> None:
        """Judges what has come since the last look."""
        before, self._seen = self._seen, {s.session_id: _counted(s) for s in sessions}
        sending = late = lost = 0
        for name, now in self._seen.items():
            was = before.get(name, (0, 0, 0))
            messages, reports, dropped = (n - w for n, w in zip(now, was, strict=True))
            if messages:
                sending += 1
                if reports >= LONG_MESSAGE * messages:
                    late += 1
                    lost += dropped
        is_behind = 2 * late > sending
        self._bad_looks = self._bad_looks + 1 if is_behind and lost else 0
        if self._bad_looks >= _LOOKS and not self.is_too_much:
            self.is_too_much = True
            _log.warning(
                "overloaded",
                engines=sending,
                late=late,
                dropped_reports=lost,
                detail="reports are lost; no other engine is taken until the sidecar keeps up: "
                "give it a faster core or one of its own, or run another sidecar for some engines",
            )
        elif self.is_too_much and not is_behind:
            self.is_too_much = False
            _log.info("overload_over", engines=sending)


def _counted(session: EngineSession) -> tuple[int, int, int]:
    counters = session.counters
    return counters.messages, counters.reports, counters.dropped
