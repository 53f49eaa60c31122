"""Keeps one session per engine id, and finds it by its token or its engine."""

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

# An engine opens its stream at once.  A session without a stream or report for this long is removed
# if the registry is full.
_UNUSED_SECONDS = 5.0
# Ended sessions whose received counts are remembered: an agent whose stream broke asks for them on
# its return.
_REMEMBERED = 4096
# An engine whose connection or agent has failed reconnects within this time.  After it, another
# process may take over the id, for example the next process of an engine that crashed.
_TAKEN_SECONDS = 5.0
# Engines that the error about an unknown one names.
_NAMED_MAX = 16

CoreFactory = Callable[[EngineSpec, Profile | None], EngineController]

# Average reports per message from which an engine's reports count as late.
LONG_MESSAGE: Final = 64
# The interval between calls of `look`.
LOOK_SECONDS: Final = 5.0
# After this many consecutive checks with lost reports, no other engine is accepted.
_LOOKS: Final = 2

_log = structlog.get_logger(__name__)


class ProfileSource(Protocol):
    """Finds profiles for new sessions."""

    def find(self, spec: EngineSpec) -> Profile | None:
        """Returns the profile that matches an engine; None without one."""

    def why_none(self, spec: EngineSpec) -> str:
        """Explains to people why no profile matches this engine."""


@dataclass(eq=False, repr=False)
class SessionRegistry:
    """Holds all sessions, by token and by engine.

    There are at most `max_engines`.  A session without contact ends after `idle_seconds`.
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
        # By token, for ended sessions; the newest last.
        self._received: dict[str, Received] = {}
        self._closed: SpeculationError | None = None

    def __len__(self) -> int:
        return len(self._by_engine)

    def __iter__(self) -> Iterator[EngineSession]:
        return iter(list(self._by_engine.values()))

    def introduce(self, spec: EngineSpec, identity: EngineIdentity = NOBODY) -> EngineSession:
        """Opens a session, and ends the earlier one of the same engine_id.

        Raises TooManyEnginesError if the registry is full or the sidecar is overloaded, and
        EngineTakenError if another engine holds the id.
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
                    f"{len(self)} engines are steered already, which is the limit "
                    "(CONTROLLER_MAX_ENGINES)"
                )
        if known is None and self.load.is_too_much:
            raise TooManyEnginesError(
                f"the sidecar cannot process the reports of its {len(self)} engines fast enough: "
                "give it a faster core or a dedicated one, or run another sidecar for some of them"
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
        """Finds a session by its token.  Raises NoSessionError."""
        session = self._by_token.get(session_id)
        if session is None:
            raise self._closed or NoSessionError(
                f"session {session_id[:64]!r} is unknown or over: the engine must introduce "
                "itself again"
            )
        return session

    def received_in(self, session_id: str) -> Received | None:
        """Returns what arrived on the stream of an ended session; None if that is unknown."""
        return self._received.get(session_id)

    def by_engine(self, engine_id: str) -> EngineSession:
        """Finds a session by its engine id.  Raises UnknownEngineError."""
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
        """Ends the sessions that were without contact for the idle time."""
        for session in self:
            idle = session.seconds_since_contact
            if idle >= self.idle_seconds:
                self._remove(session, NoSessionError(f"there was no contact for {idle:.0f} s"))
                _log.info("session_expired", engine=session.engine_id, idle_seconds=round(idle))

    def _make_room(self) -> None:
        """Ends the oldest session that has sent nothing but its introduction."""
        if len(self) < self.max_engines:
            return
        for session in self:
            idle = session.seconds_since_contact
            if not session.used and idle >= _UNUSED_SECONDS:
                self._remove(
                    session, NoSessionError("other engines came, and this one sent nothing")
                )
                _log.warning("session_made_way", engine=session.engine_id, idle=round(idle))
                return

    def close(self, why: SpeculationError, last_lease_seconds: float = 0.0) -> None:
        """Ends every session and accepts no new one.

        last_lease_seconds: how long the engines keep their last plan; 0: for its lease.
        """
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
    """Raises EngineTakenError if another identity holds the session, and was in contact lately."""
    silent = session.seconds_since_steered
    if session.identity.is_same(identity) or silent >= _TAKEN_SECONDS:
        return
    raise EngineTakenError(
        f"another engine is steered under the id {session.engine_id!r}: give this one another id; "
        f"if the other one has ended, its id is free {_TAKEN_SECONDS:g} s after its last message",
        resource=session.engine_id,
    )


class Load:
    """Detects overload of the sidecar.

    is_too_much: agents drop reports because the sidecar is behind.

    An agent sends its next message when earlier ones are acknowledged (`messages_in_flight_max`).
    A sidecar that is behind therefore gets fewer messages, with up to 128 reports in each, which
    take a fraction of the time.  If agents must drop reports nevertheless, there are too many
    engines.  The sidecar counts as behind if the messages of more than half of its engines are
    long, so that a single engine cannot keep others out.
    """

    def __init__(self) -> None:
        self.is_too_much = False
        self._bad_looks = 0
        # Messages, reports and dropped reports at the last check, by session.
        self._seen: dict[str, tuple[int, int, int]] = {}

    def look(self, sessions: Iterable[EngineSession]) -> None:
        """Evaluates the messages since the last check."""
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
                detail="reports are lost; no other engine is accepted until the sidecar keeps up: "
                "give it a faster core or a dedicated one, or run another sidecar for some engines",
            )
        elif self.is_too_much and not is_behind:
            self.is_too_much = False
            _log.info("overload_over", engines=sending)


def _counted(session: EngineSession) -> tuple[int, int, int]:
    counters = session.counters
    return counters.messages, counters.reports, counters.dropped
