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
from controller.service.sessions.counters import ReceivedCounts
from controller.service.sessions.engine_identity import ANONYMOUS, EngineIdentity
from controller.service.sessions.session import EngineSession, SessionObserver

# An engine opens its stream at once.  A session without a stream or report for this long is removed
# if the registry is full.
_UNUSED_SECONDS = 5.0
# Ended sessions whose received counts are remembered: an agent whose stream broke asks for them on
# its return.
_ENDED_SESSIONS_MAX = 4096
# An engine whose connection or agent has failed reconnects within this time.  After it, another
# process may take over the id, for example the next process of an engine that crashed.
_ID_RESERVED_SECONDS = 5.0
# Engines that the error about an unknown one names.
_NAMED_MAX = 16

CoreFactory = Callable[[EngineSpec, Profile | None], EngineController]

# Average reports per message from which an engine's reports count as late.
LONG_MESSAGE_REPORTS: Final = 64
# The interval between calls of `check`.
LOAD_CHECK_SECONDS: Final = 5.0
# After this many consecutive checks with lost reports, no other engine is accepted.
_OVERLOADED_CHECKS: Final = 2

_log = structlog.get_logger(__name__)


class ProfileSource(Protocol):
    """Finds profiles for new sessions."""

    def find(self, spec: EngineSpec) -> Profile | None:
        """Returns the profile that matches an engine; None without one."""

    def missing_profile_reason(self, spec: EngineSpec) -> str:
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
        self.load_monitor = LoadMonitor()
        self._by_token: dict[str, EngineSession] = {}
        self._by_engine: dict[str, EngineSession] = {}
        # By token, for ended sessions; the newest last.
        self._received: dict[str, ReceivedCounts] = {}
        self._close_error: SpeculationError | None = None

    def __len__(self) -> int:
        return len(self._by_engine)

    def __iter__(self) -> Iterator[EngineSession]:
        return iter(list(self._by_engine.values()))

    def introduce(self, spec: EngineSpec, identity: EngineIdentity = ANONYMOUS) -> EngineSession:
        """Opens a session, and ends the earlier one of the same engine_id.

        Raises TooManyEnginesError if the registry is full or the sidecar is overloaded, and
        EngineTakenError if another engine holds the id.
        """
        if self._close_error is not None:
            raise self._close_error
        previous = self._by_engine.get(spec.engine_id)
        if previous is not None:
            _require_free_id(previous, identity)
        if previous is None and len(self) >= self.max_engines:
            self.expire()
            self._evict_unused_session()
            if len(self) >= self.max_engines:
                raise TooManyEnginesError(
                    f"{len(self)} engines are steered already, which is the limit "
                    "(CONTROLLER_MAX_ENGINES)"
                )
        if previous is None and self.load_monitor.is_overloaded:
            raise TooManyEnginesError(
                f"the sidecar cannot process the reports of its {len(self)} engines fast enough: "
                "give it a faster core or a dedicated one, or run another sidecar for some of them"
            )
        profile = self.profiles.find(spec)
        core = self.core_factory(spec, profile)
        if previous is not None:
            self._remove(
                previous,
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
            again=previous is not None,
            profile=core.profile_id or None,
            costs="measured" if core.profile_id else "prior",
            **({} if profile else {"no_profile": self.profiles.missing_profile_reason(spec)}),
        )
        self.observer.on_session_opened(session, previous)
        return session

    def find_by_token(self, session_id: str) -> EngineSession:
        """Finds a session by its token.  Raises NoSessionError."""
        session = self._by_token.get(session_id)
        if session is None:
            raise self._close_error or NoSessionError(
                f"session {session_id[:64]!r} is unknown or over: the engine must introduce "
                "itself again"
            )
        return session

    def find_received(self, session_id: str) -> ReceivedCounts | None:
        """Returns what arrived on the stream of an ended session; None if that is unknown."""
        return self._received.get(session_id)

    def find_by_engine(self, engine_id: str) -> EngineSession:
        """Finds a session by its engine id.  Raises UnknownEngineError."""
        session = self._by_engine.get(engine_id)
        if session is None:
            engine_ids = sorted(self._by_engine)
            named_text = ", ".join(engine_ids[:_NAMED_MAX]) or "none"
            more_text = (
                f" and {len(engine_ids) - _NAMED_MAX} more" if len(engine_ids) > _NAMED_MAX else ""
            )
            raise UnknownEngineError(
                f"no engine {engine_id[:128]!r} has a session; introduced: {named_text}{more_text}",
                resource=engine_id,
            )
        return session

    def expire(self) -> None:
        """Ends the sessions that were without contact for the idle time."""
        for session in self:
            idle_seconds = session.seconds_since_contact
            if idle_seconds >= self.idle_seconds:
                self._remove(
                    session, NoSessionError(f"there was no contact for {idle_seconds:.0f} s")
                )
                _log.info(
                    "session_expired", engine=session.engine_id, idle_seconds=round(idle_seconds)
                )

    def _evict_unused_session(self) -> None:
        """Ends the oldest session that has sent nothing but its introduction."""
        if len(self) < self.max_engines:
            return
        for session in self:
            idle_seconds = session.seconds_since_contact
            if not session.was_used and idle_seconds >= _UNUSED_SECONDS:
                self._remove(
                    session, NoSessionError("other engines came, and this one sent nothing")
                )
                _log.warning("session_made_way", engine=session.engine_id, idle=round(idle_seconds))
                return

    def close(self, error: SpeculationError, last_lease_seconds: float = 0.0) -> None:
        """Ends every session and accepts no new one.

        last_lease_seconds: how long the engines keep their last plan; 0: for its lease.
        """
        self._close_error = error
        for session in self:
            session.plan_for_shutdown(last_lease_seconds)
            self._remove(session, error)

    def _remove(self, session: EngineSession, error: SpeculationError) -> None:
        del self._by_token[session.session_id]
        del self._by_engine[session.engine_id]
        session.end(error)
        self._received[session.session_id] = session.received
        if len(self._received) > _ENDED_SESSIONS_MAX:
            del self._received[next(iter(self._received))]
        self.observer.on_session_ended(session)


def _require_free_id(session: EngineSession, identity: EngineIdentity) -> None:
    """Raises EngineTakenError if another identity holds the session, and was in contact lately."""
    silent = session.seconds_since_steered
    if session.identity.is_same(identity) or silent >= _ID_RESERVED_SECONDS:
        return
    raise EngineTakenError(
        f"another engine is steered under the id {session.engine_id!r}: give this one another id; "
        f"if the other one has ended, its id is free {_ID_RESERVED_SECONDS:g} s after its last "
        "message",
        resource=session.engine_id,
    )


class LoadMonitor:
    """Detects overload of the sidecar.

    is_overloaded: agents drop reports because the sidecar is behind.

    An agent sends its next message when earlier ones are acknowledged (`messages_in_flight_max`).
    A sidecar that is behind therefore gets fewer messages, with up to 128 reports in each, which
    take a fraction of the time.  If agents must drop reports nevertheless, there are too many
    engines.  The sidecar counts as behind if the messages of more than half of its engines are
    long, so that a single engine cannot keep others out.
    """

    def __init__(self) -> None:
        self.is_overloaded = False
        self._overloaded_checks = 0
        # Messages, reports and dropped reports at the last check, by session.
        self._last_counts: dict[str, tuple[int, int, int]] = {}

    def check(self, sessions: Iterable[EngineSession]) -> None:
        """Evaluates the messages since the last check."""
        previous_counts, self._last_counts = (
            self._last_counts,
            {s.session_id: _message_counts(s) for s in sessions},
        )
        sending = falling_behind = lost_reports = 0
        for name, current in self._last_counts.items():
            previous = previous_counts.get(name, (0, 0, 0))
            messages, reports, dropped = (n - w for n, w in zip(current, previous, strict=True))
            if messages:
                sending += 1
                if reports >= LONG_MESSAGE_REPORTS * messages:
                    falling_behind += 1
                    lost_reports += dropped
        is_behind = 2 * falling_behind > sending
        self._overloaded_checks = self._overloaded_checks + 1 if is_behind and lost_reports else 0
        if self._overloaded_checks >= _OVERLOADED_CHECKS and not self.is_overloaded:
            self.is_overloaded = True
            _log.warning(
                "overloaded",
                engines=sending,
                late=falling_behind,
                dropped_reports=lost_reports,
                detail="reports are lost; no other engine is accepted until the sidecar keeps up: "
                "give it a faster core or a dedicated one, or run another sidecar for some engines",
            )
        elif self.is_overloaded and not is_behind:
            self.is_overloaded = False
            _log.info("overload_over", engines=sending)


def _message_counts(session: EngineSession) -> tuple[int, int, int]:
    counters = session.counters
    return counters.messages, counters.reports, counters.dropped_reports
