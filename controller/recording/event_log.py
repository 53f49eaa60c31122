"""One session's way into its recording: a bounded queue to the recorder's thread.

    core -> put(moment) -> queue -> recorder

Where the queue is full the moment is dropped and counted, and everything after it until the core's
state could be put in again: what lies in between is a marked gap.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from controller.recording.events import Moment

# Moments of all sessions between two rounds of the recorder's thread: seconds of a busy fleet.
QUEUE_MAX: Final = 20_000
Queue = deque[tuple["EventLog", Moment]]
# Of an override by id: Unix seconds, None without an end or if unknown.
EndOf = Callable[[str], float | None]


@dataclass(slots=True, eq=False)
class EventLog:
    """Carries the events of one session.

    session: its number.  due: an opening is asked for, nothing is lost yet.

    broken: nothing is taken before an opening.  lost: moments that were dropped since the last one.
    over: nothing more is taken.  parts: openings so far; taken: moments since the last one, and
    fitting: how many a segment holds.
    """

    engine_id: str
    session: int
    queue: Queue
    end_of: EndOf
    wall: Callable[[], float]
    due: bool = True
    broken: bool = True
    lost: int = 0
    over: bool = False
    parts: int = 0
    taken: int = 0
    fitting: int = QUEUE_MAX

    @property
    def can_open(self) -> bool:
        """Whether an opening is due, and the queue takes it."""
        due = (self.due or self.broken) and not self.over
        return due and len(self.queue) < QUEUE_MAX

    def put(self, moment: Moment) -> None:
        """Hands a moment over, or counts it as lost."""
        if self.over:
            return
        if self.broken or len(self.queue) >= QUEUE_MAX:
            self.break_off()
            return
        self.queue.append((self, moment))
        self.taken += 1
        if self.taken >= self.fitting:
            self.due = True

    def break_off(self) -> None:
        """Loses a moment: what follows cannot be decided again before the next opening."""
        self.broken = True
        self.lost += 1

    def open(self, opening: Moment) -> None:
        """Hands over an opening, where one can be."""
        self.parts += 1
        self.taken = 0
        self.lost, self.due, self.broken = 0, False, False
        self.queue.append((self, opening))
