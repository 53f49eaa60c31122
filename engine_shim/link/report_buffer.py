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

from engine_shim.link.messages import is_readable_report
from speculation.v1.service_pb2 import Received


class ReportBuffer:
    """Buffers at most `capacity` serialized reports in step order.

    `dropped`: reports that were lost and not yet reported as dropped (`mark_drops_reported`),
    including those lost on the engine's side.
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

    def count_lost(self, count: int = 1) -> None:
        """Counts reports as dropped that are not in the buffer."""
        self.dropped += count

    def take_oldest(self, max_reports: int, max_bytes: int) -> list[bytes]:
        """Removes and returns the oldest reports.

        At most `max_reports` reports of `max_bytes` in total, or one report that is larger.
        """
        oldest_reports: list[bytes] = []
        size = 0
        while self._reports and len(oldest_reports) < max_reports:
            size += len(self._reports[0])
            if oldest_reports and size > max_bytes:
                break
            oldest_reports.append(self._reports.popleft())
        return oldest_reports

    def put_back(self, reports: Sequence[bytes]) -> None:
        """Puts unsent reports back in front; drops the oldest ones if the buffer is full."""
        free_slots = self.capacity - len(self._reports)
        fitting_reports = reports[max(0, len(reports) - free_slots) :] if free_slots > 0 else ()
        self.dropped += len(reports) - len(fitting_reports)
        self._reports.extendleft(reversed(fitting_reports))

    def mark_drops_reported(self, count: int) -> None:
        """Subtracts `count` dropped reports that have been reported to the sidecar."""
        self.dropped -= count


class InFlightReports:
    """The reports sent on the stream of one session, until `return_unreceived`.

    Keeps the newest reports, at most the capacity of `buffer`.  max_messages: the sidecar's limit
    of unacknowledged messages with reports, 0 for no limit.  acknowledged: the counts that the
    sidecar last acknowledged; None if its version does not acknowledge.  received: the counts that
    it stated when it stopped; None before that.
    """

    def __init__(self, buffer: ReportBuffer, session_id: str, max_messages: int = 0) -> None:
        self.session_id = session_id
        self.acknowledged: Received | None = Received()
        self.received: Received | None = None
        self._buffer = buffer
        self._newest_reports: deque[bytes] = deque(maxlen=buffer.capacity)
        self._total_sent = Received()
        self._last_message = Received()
        self._unsent_message = Received()
        self._max_messages = max_messages
        # For each message in flight, the number of reports sent up to its end.
        self._message_ends: deque[int] = deque()

    @property
    def is_full(self) -> bool:
        """Whether reports must wait until the sidecar acknowledges more messages."""
        if not self._max_messages or self.acknowledged is None:
            return False
        while self._message_ends and self._message_ends[0] <= self.acknowledged.reports:
            self._message_ends.popleft()
        return len(self._message_ends) >= self._max_messages

    def add_message(self, reports: Sequence[bytes], dropped: int) -> None:
        """Counts a message that is about to be written, with these reports and dropped reports."""
        self._buffer.mark_drops_reported(dropped)
        self._newest_reports.extend(reports)
        self._total_sent.reports += len(reports)
        self._total_sent.dropped_reports += dropped
        if reports and self._max_messages:
            self._message_ends.append(self._total_sent.reports)
        self._last_message = Received(reports=len(reports), dropped_reports=dropped)

    def mark_last_unsent(self) -> None:
        """Marks the last message as unsent, because the stream had ended before it."""
        self._unsent_message = self._last_message

    def return_unreceived(self, received: Received | None) -> None:
        """Returns to the buffer the reports that did not arrive; call once, after the stream ended.

        A report that no sidecar can parse would end every stream that it is sent on, so it is
        dropped.  received: the counts that the next sidecar states for this stream; None if it does
        not know them.
        """
        received = self.received or received
        if received is not None:
            unsent, lost_count = _subtract_counts(self._total_sent, received), 0
        else:
            unsent, lost_count = self._unsent_message, self._count_unacknowledged()
        readable_reports = list(self._newest_reports)[-unsent.reports :] if unsent.reports else []
        readable_reports = [report for report in readable_reports if is_readable_report(report)]
        self._buffer.count_lost(
            unsent.reports - len(readable_reports) + unsent.dropped_reports + lost_count
        )
        self._buffer.put_back(readable_reports)

    def _count_unacknowledged(self) -> int:
        """Returns the number of sent and dropped reports that were not acknowledged."""
        if self.acknowledged is None:
            return 0
        unacknowledged = _subtract_counts(
            _subtract_counts(self._total_sent, self._unsent_message), self.acknowledged
        )
        return unacknowledged.reports + unacknowledged.dropped_reports


def _subtract_counts(larger: Received, smaller: Received) -> Received:
    """Subtracts counts, but not below 0, because the counts come from outside."""
    return Received(
        reports=max(0, larger.reports - smaller.reports),
        dropped_reports=max(0, larger.dropped_reports - smaller.dropped_reports),
    )
