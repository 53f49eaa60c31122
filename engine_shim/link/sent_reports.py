"""What has gone out on one stream, so that what its sidecar did not take in is not lost.

A sidecar that stops says how much it has received; what was sent after that goes back to the
buffer, for the next sidecar.  One that is killed says nothing: then only a message that certainly
never left goes back, since what happened to the others nobody knows, and none may count twice.
"""

from collections import deque
from collections.abc import Sequence

from engine_shim.link.packets import ReportPacket
from engine_shim.link.report_buffer import ReportBuffer
from speculation.v1.service_pb2 import Received


class SentReports:
    """Of one stream.  received: what the sidecar said as it stopped, None while it has not.

    As many reports are kept as `buffer` holds, the newest.
    """

    def __init__(self, buffer: ReportBuffer) -> None:
        self._buffer = buffer
        self._newest: deque[ReportPacket] = deque(maxlen=buffer.capacity)
        self._sent = Received()
        self._last = Received()
        self._unsent = Received()
        self.received: Received | None = None

    def begin(self, reports: Sequence[ReportPacket], dropped: int) -> None:
        """A message with these reports, which tells of so many dropped ones, is to be written."""
        self._buffer.forgive(dropped)
        self._newest.extend(reports)
        self._sent.reports += len(reports)
        self._sent.dropped_reports += dropped
        self._last = Received(reports=len(reports), dropped_reports=dropped)

    def did_not_go_out(self) -> None:
        """The stream had ended before that message."""
        self._unsent = self._last

    def take_back(self) -> None:
        """The stream is over: what was not received goes back to the buffer."""
        reports, dropped = self._unsent.reports, self._unsent.dropped_reports
        if self.received is not None:
            reports = max(0, self._sent.reports - self.received.reports)
            dropped = max(0, self._sent.dropped_reports - self.received.dropped_reports)
        kept = list(self._newest)[-reports:] if reports else []
        self._buffer.lose(reports - len(kept) + dropped)
        self._buffer.give_back(kept)
