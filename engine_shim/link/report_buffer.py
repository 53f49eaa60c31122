"""Buffers reports between the socket and the sidecar: bounded, the newest stay."""

from collections import deque
from collections.abc import Sequence

from engine_shim.link.packets import ReportPacket


class ReportBuffer:
    """Reports in step order, at most `capacity` of them.

    `dropped`: reports lost since it was last reduced with `forgive`, those lost on the engine's
    side included (`ReportPacket.dropped_before`).
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._reports: deque[ReportPacket] = deque()
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._reports)

    def add(self, report: ReportPacket) -> None:
        """Keeps a report; the oldest one goes when there is no room."""
        self.dropped += report.dropped_before
        self._reports.append(report)
        if len(self._reports) > self.capacity:
            self._reports.popleft()
            self.dropped += 1

    def lose(self, count: int = 1) -> None:
        """Counts reports that are not in here and reach nobody."""
        self.dropped += count

    def take(self, most: int) -> list[ReportPacket]:
        """The oldest reports, up to `most`, which leave the buffer."""
        return [self._reports.popleft() for _ in range(min(most, len(self._reports)))]

    def give_back(self, reports: Sequence[ReportPacket]) -> None:
        """Puts unsent reports back in front; the oldest go when there is no room."""
        room = self.capacity - len(self._reports)
        kept = reports[max(0, len(reports) - room) :] if room > 0 else ()
        self.dropped += len(reports) - len(kept)
        self._reports.extendleft(reversed(kept))

    def forgive(self, count: int) -> None:
        """`count` losses have been told to the sidecar."""
        self.dropped -= count
