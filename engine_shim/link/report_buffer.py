"""Keeps reports until the sidecar has received them: each arrives once or counts as dropped.

The newest reports wait in a bounded buffer between the socket and the sidecar.  When a stream ends,
some of its messages may not have arrived.  A sidecar that stops states how much it has received; a
sidecar that keeps running states it when the engine introduces itself again.  The reports that were
not received return to the buffer.  A sidecar that was killed states nothing: the reports that it
had not acknowledged count as dropped, because no report may be used twice.  Only a message that was
certainly not sent returns to the buffer then.
"""

from collections import deque
from collections.abc import Sequence

from engine_shim.link.messages import is_report
from speculation.v1.service_pb2 import Received


class ReportBuffer:
    """Buffers at most `capacity` serialized reports in step order.

    `dropped`: reports that were lost and not yet reported as dropped (`forgive`), including those
    lost on the engine's side.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._reports: deque[bytes] = deque()
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._reports)

    def add(self, report: bytes) -> None:
        """Adds a report; drops the oldest one if the buffer is full."""
        self._reports.append(report)
        if len(self._reports) > self.capacity:
            self._reports.popleft()
            self.dropped += 1

    def lose(self, count: int = 1) -> None:
        """Counts reports as dropped that are not in the buffer."""
        self.dropped += count

    def take(self, most: int, most_bytes: int) -> list[bytes]:
        """Removes and returns the oldest reports.

        At most `most` reports of `most_bytes` in total, or one report that is larger.
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
        """Puts unsent reports back in front; drops the oldest ones if the buffer is full."""
        room = self.capacity - len(self._reports)
        kept = reports[max(0, len(reports) - room) :] if room > 0 else ()
        self.dropped += len(reports) - len(kept)
        self._reports.extendleft(reversed(kept))

    def forgive(self, count: int) -> None:
        """Subtracts `count` dropped reports that have been reported to the sidecar."""
        self.dropped -= count


class InFlightReports:
    """The reports sent on the stream of one session, until `settle`.

    Keeps the newest reports, at most the capacity of `buffer`.  messages_max: the sidecar's limit
    of unacknowledged messages with reports, 0 for no limit.  acknowledged: the counts that the
    sidecar last acknowledged; None if its version does not acknowledge.  received: the counts that
    it stated when it stopped; None before that.
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
        # For each message in flight, the number of reports sent up to its end.
        self._ends: deque[int] = deque()

    @property
    def is_full(self) -> bool:
        """Whether reports must wait until the sidecar acknowledges more messages."""
        if not self._messages_max or self.acknowledged is None:
            return False
        while self._ends and self._ends[0] <= self.acknowledged.reports:
            self._ends.popleft()
        return len(self._ends) >= self._messages_max

    def begin(self, reports: Sequence[bytes], dropped: int) -> None:
        """Counts a message that is about to be written, with these reports and dropped reports."""
        self._buffer.forgive(dropped)
        self._newest.extend(reports)
        self._sent.reports += len(reports)
        self._sent.dropped_reports += dropped
        if reports and self._messages_max:
            self._ends.append(self._sent.reports)
        self._last = Received(reports=len(reports), dropped_reports=dropped)

    def did_not_go_out(self) -> None:
        """Marks the last message as unsent, because the stream had ended before it."""
        self._unsent = self._last

    def settle(self, received: Received | None) -> None:
        """Returns to the buffer the reports that did not arrive; call once, after the stream ended.

        A report that no sidecar can parse would end every stream that it is sent on, so it is
        dropped.  received: the counts that the next sidecar states for this stream; None if it does
        not know them.
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
        """Returns the number of sent and dropped reports that were not acknowledged."""
        if self.acknowledged is None:
            return 0
        doubtful = _difference(_difference(self._sent, self._unsent), self.acknowledged)
        return doubtful.reports + doubtful.dropped_reports


def _difference(more: Received, less: Received) -> Received:
    """Subtracts counts, but not below 0, because the counts come from outside."""
    return Received(
        reports=max(0, more.reports - less.reports),
        dropped_reports=max(0, more.dropped_reports - less.dropped_reports),
    )
