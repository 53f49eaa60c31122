"""Knows when the sidecar has more engines than it can serve.

An agent sends its next message when those before it are acknowledged (`messages_in_flight_max`).
A sidecar that is behind therefore gets fewer messages, with up to 128 reports in each, which takes
a fraction of the time.  Where agents have to drop reports even so, the engines are too many.
"""

from collections.abc import Iterable
from typing import Final

import structlog

from controller.service.sessions.session import EngineSession

# Reports a message, on average, from which an engine's reports come too late.
LONG_MESSAGE: Final = 64
# How often `look` is to be called.
LOOK_SECONDS: Final = 5.0
# After so many looks in a row that find reports lost, no other engine is taken.
_LOOKS: Final = 2

_log = structlog.get_logger(__name__)


class Load:
    """Follows what all engines send.  is_too_much: agents lose reports to a sidecar behind.

    It is behind if the messages of more than half of its engines are long, so that no single engine
    can keep others out.
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
