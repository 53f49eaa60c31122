"""Keeps the reports that the sidecar has not got: every one arrives once or counts as dropped.

Between the socket and the sidecar the newest reports wait in a bounded buffer.  When a stream ends,
some of its messages may not have arrived.  A sidecar that stops says how much it has received, and
one that keeps running says it when the engine introduces itself again.  The reports that were not
received go back to the buffer.  A sidecar that was killed says nothing: the reports that it had not
acknowledged count as dropped, because none may be used twice.  Only a message that certainly never
left goes back then.
"""

from collections import deque
from collections.abc import Sequence

from engine_shim.link.messages import is_report
from speculation.v1.service_pb2 import Received


class ReportBuffer:
    """Reports in step order, at most `capacity` of them, serialized as they came.

    `dropped`: reports lost since it was last reduced with `forgive`, those lost on the engine's
    side included.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._reports: deque[bytes] = deque()
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._reports)

    def add(self, report: bytes) -> None:
        """Keeps a report; the oldest one goes when there is no room."""
        self._reports.append(report)
        if len(self._reports) > self.capacity:
            self._reports.popleft()
            self.dropped += 1

    def lose(self, count: int = 1) -> None:
        """Counts reports that are not in here and reach nobody."""
        self.dropped += count

    def take(self, most: int, most_bytes: int) -> list[bytes]:
        """The oldest reports, which leave the buffer.

        They are `most` at most, and `most_bytes` together, or one report that is larger.
        """
        taken: list[bytes] = []
        size = 0
        while self._reports and len(taken) < most:
            size += len(self._reports[0])
            if taken and size > most_bytes:
                break
            taken.append(self._reports.popleft())
        return taken

    def give_back(self, reports: Sequence[bytes]) -> None:
        """Puts unsent reports back in front; the oldest go when there is no room."""
        room = self.capacity - len(self._reports)
        kept = reports[max(0, len(reports) - room) :] if room > 0 else ()
        self.dropped += len(reports) - len(kept)
        self._reports.extendleft(reversed(kept))

    def forgive(self, count: int) -> None:
        """`count` losses have been told to the sidecar."""
        self.dropped -= count


class InFlightReports:
    """The reports sent on the stream of one session, until `settle`.

    As many are kept as `buffer` holds, the newest.  messages_max: messages with reports that the
    sidecar wants to have on their way at most, 0 for any number.  acknowledged: what the sidecar
    said last to have received so far; None when its version does not say it.  received: what it
    said as it stopped, None while it has not.
    """

    def __init__(self, buffer: ReportBuffer, session_id: str, messages_max: int = 0) -> None:
        self.session_id = session_id
        self.acknowledged: Received | None = Received()
        self.received: Received | None = None
        self._buffer = buffer
        self._newest: deque[bytes] = deque(maxlen=buffer.capacity)
        self._sent = Received()
        self._last = Received()
        self._unsent = Received()
        self._messages_max = messages_max
        # Of the messages on their way, the reports sent up to the end of each.
        self._ends: deque[int] = deque()

    @property
    def is_full(self) -> bool:
        """Whether reports have to wait until more of the messages are acknowledged."""
        if not self._messages_max or self.acknowledged is None:
            return False
        while self._ends and self._ends[0] <= self.acknowledged.reports:
            self._ends.popleft()
        return len(self._ends) >= self._messages_max

    def begin(self, reports: Sequence[bytes], dropped: int) -> None:
        """A message with these reports, which tells of so many dropped ones, is to be written."""
        self._buffer.forgive(dropped)
        self._newest.extend(reports)
        self._sent.reports += len(reports)
        self._sent.dropped_reports += dropped
        if reports and self._messages_max:
            self._ends.append(self._sent.reports)
        self._last = Received(reports=len(reports), dropped_reports=dropped)

    def did_not_go_out(self) -> None:
        """The stream had ended before that message."""
        self._unsent = self._last

    def settle(self, received: Received | None) -> None:
        """The stream is over.  Gives back to the buffer what did not arrive; to be called once.

        A report that no sidecar can read would end every stream that it is sent on: it is lost.
        received: what the next sidecar says to have received on it; None when it does not know.
        """
        received = self.received or received
        if received is not None:
            unsent, lost = _difference(self._sent, received), 0
        else:
            unsent, lost = self._unsent, self._in_doubt()
        kept = list(self._newest)[-unsent.reports :] if unsent.reports else []
        kept = [report for report in kept if is_report(report)]
        self._buffer.lose(unsent.reports - len(kept) + unsent.dropped_reports + lost)
        self._buffer.give_back(kept)

    def _in_doubt(self) -> int:
        """Reports, and losses told, that left and were not acknowledged."""
        if self.acknowledged is None:
            return 0
        doubtful = _difference(_difference(self._sent, self._unsent), self.acknowledged)
        return doubtful.reports + doubtful.dropped_reports


def _difference(more: Received, less: Received) -> Received:
    """Never below zero: the numbers come from outside."""
    return Received(
        reports=max(0, more.reports - less.reports),
        dropped_reports=max(0, more.dropped_reports - less.dropped_reports),
    )
