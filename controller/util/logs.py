"""Writes logs as JSON lines on standard error, one per change and none per step.

Logging never blocks.
"""

import contextlib
import logging
import queue
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from logging.handlers import QueueHandler
from typing import Any, Final, TextIO

import structlog

_SHARED: list[structlog.typing.Processor] = [
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
]
# Lines that may wait in the queue; a pipe holds a few hundred more.
_LINES_MAX: Final = 1000
# How long `close` waits if the lines are not read.
_CLOSE_SECONDS: Final = 2.0
# Burst of lines of one kind, and the interval at which one more is allowed.
_BURST: Final = 10
_SECONDS_A_LINE: Final = 6.0
# Number of kinds that are tracked.  Beyond it, the least recently seen kind is dropped, and its
# suppressed lines are counted by event.
_KINDS: Final = 4096
_SAME = ("engine", "override")

_Kind = tuple[str, ...]

Line = MutableMapping[str, Any]

_listeners: list[Callable[[Line], None]] = []
_log = structlog.get_logger(__name__)


class LogQueue(QueueHandler):
    """Formats lines on the logging thread, and writes them to `stream` on a separate thread.

    A bounded queue connects the two.  Lines that do not fit are counted in `lost`.  Once there is
    space again, a separate line reports their number, and `lost` is reset to 0.
    """

    def __init__(self, stream: TextIO) -> None:
        self._lines: queue.Queue[logging.LogRecord | None] = queue.Queue(_LINES_MAX)
        super().__init__(self._lines)
        self.lost = 0
        self._stream = stream
        self._thread = threading.Thread(target=self._write, name="speculation-log", daemon=True)
        self._thread.start()

    def enqueue(self, record: logging.LogRecord) -> None:
        """Puts a line into the queue, or counts it as lost; never waits."""
        try:
            self._lines.put_nowait(record)
        except queue.Full:
            self.lost += 1

    def close(self) -> None:
        """Waits until all lines are written, but at most a few seconds."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=_CLOSE_SECONDS)
            self._thread.join(_CLOSE_SECONDS)
        super().close()

    def _write(self) -> None:
        while (record := self._lines.get()) is not None:
            # If standard error is closed, the failure cannot be reported, and this thread must not
            # end unnoticed.
            with contextlib.suppress(Exception):
                self._stream.write(f"{record.getMessage()}\n")
                self._stream.flush()
            if self.lost and self._lines.qsize() < _LINES_MAX // 2:
                lost, self.lost = self.lost, 0
                _log.warning("log_lines_lost", lines=lost)


@dataclass(slots=True)
class _LineBucket:
    lines: float
    filled_at: float
    suppressed: int = 0


class RepeatedLineFilter(logging.Filter):
    """Suppresses repeated lines of a handler, and counts them in the next line of their kind.

    Lines are of the same kind if they have the same event, engine and override (as far as they name
    them).  Every kind has a token bucket of `_BURST` lines, which gains one every
    `_SECONDS_A_LINE`.  `suppressed` counts all suppressed lines.  clock: seconds, for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        # In the order of the last use.
        self._buckets: OrderedDict[_Kind, _LineBucket] = OrderedDict()
        # Suppressed lines of dropped kinds, by event.
        self._forgotten: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.suppressed = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns False for a suppressed line; adds `suppressed` to one that follows such lines."""
        kind = _line_kind(record)
        with self._lock:
            bucket = self._refilled_bucket(kind)
            if bucket.lines < 1:
                bucket.suppressed += 1
                self.suppressed += 1
                return False
            bucket.lines -= 1
            suppressed_count, bucket.suppressed = bucket.suppressed, 0
        if suppressed_count:
            if isinstance(record.msg, dict):
                record.msg = {**record.msg, "suppressed": suppressed_count}
            else:
                record.suppressed = suppressed_count
        return True

    def pending_suppressed_counts(self) -> dict[str, int]:
        """Returns and resets the counts of suppressed lines that were not logged yet, by event."""
        with self._lock:
            counts, self._forgotten = self._forgotten, Counter()
            for kind, bucket in self._buckets.items():
                counts[kind[0]] += bucket.suppressed
                bucket.suppressed = 0
        return {event: count for event, count in sorted(counts.items()) if count}

    def _refilled_bucket(self, kind: _Kind) -> _LineBucket:
        now = self._clock()
        if kind not in self._buckets:
            if len(self._buckets) >= _KINDS:
                self._forget_oldest_kind()
            self._buckets[kind] = _LineBucket(_BURST, now)
        self._buckets.move_to_end(kind)
        bucket = self._buckets[kind]
        bucket.lines = min(_BURST, bucket.lines + (now - bucket.filled_at) / _SECONDS_A_LINE)
        bucket.filled_at = now
        return bucket

    def _forget_oldest_kind(self) -> None:
        (event, *_), bucket = self._buckets.popitem(last=False)
        if bucket.suppressed:
            # The number of events is unbounded: a library may log any text.
            has_counter = event in self._forgotten or len(self._forgotten) < _KINDS
            self._forgotten[event if has_counter else "other events"] += bucket.suppressed


def _line_kind(record: logging.LogRecord) -> _Kind:
    message = record.msg
    if isinstance(message, dict):
        return (
            str(message.get("event")),
            *(str(message[name]) for name in _SAME if name in message),
        )
    # A library's line: its text before arguments are inserted.
    return (str(message), record.name)


_line_filter = RepeatedLineFilter()


def configure(level: str) -> None:
    """Sets up the logs of structlog and of the standard library.  level: "info", for example."""
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_SHARED,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = LogQueue(sys.stderr)
    handler.addFilter(_line_filter)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*_SHARED, structlog.stdlib.ExtraAdder(allow=["suppressed"])],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                _notify_listeners,
                structlog.processors.JSONRenderer(),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())


def add_listener(reader: Callable[[Line], None]) -> None:
    """Calls `reader` with every line that is written from now on, on the thread that logs it."""
    _listeners.append(reader)


def remove_listener(reader: Callable[[Line], None]) -> None:
    """Stops calling `reader`."""
    _listeners.remove(reader)


def suppressed_lines() -> int:
    """Returns the number of lines that were suppressed so far."""
    return _line_filter.suppressed


def log_suppressed_counts() -> None:
    """Logs the number of suppressed lines that were not logged yet, by event."""
    if lines := _line_filter.pending_suppressed_counts():
        _log.warning("log_lines_suppressed", lines=lines)


def _notify_listeners(_logger: object, _method: str, line: Line) -> Line:
    for reader in _listeners:
        reader(line)
    return line
