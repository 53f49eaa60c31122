"""Log lines are written by a thread: a reader of standard error that stalls stalls nobody else.

Between the two stands a bounded queue.  What it has no room for is lost and counted, and told of
once there is room again.
"""

import contextlib
import logging
import queue
import threading
from logging.handlers import QueueHandler
from typing import Final, TextIO

import structlog

# Lines that may wait; a pipe holds some hundred more.
_LINES_MAX: Final = 1000
# How long the end waits for lines that nobody reads.
_CLOSE_SECONDS: Final = 2.0

_log = structlog.get_logger(__name__)


class LogQueue(QueueHandler):
    """Formats where a line is logged, and writes it to `stream` on a thread of its own.

    lost: lines that nobody has been told of yet.
    """

    def __init__(self, stream: TextIO) -> None:
        self._lines: queue.Queue[logging.LogRecord | None] = queue.Queue(_LINES_MAX)
        super().__init__(self._lines)
        self.lost = 0
        self._stream = stream
        self._thread = threading.Thread(target=self._write, name="speculation-log", daemon=True)
        self._thread.start()

    def enqueue(self, record: logging.LogRecord) -> None:
        """Never waits."""
        try:
            self._lines.put_nowait(record)
        except queue.Full:
            self.lost += 1

    def close(self) -> None:
        """Waits a little for what is still to be written."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=_CLOSE_SECONDS)
            self._thread.join(_CLOSE_SECONDS)
        super().close()

    def _write(self) -> None:
        while (record := self._lines.get()) is not None:
            # Nobody is left to be told that standard error is gone.
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(f"{record.getMessage()}\n")
                self._stream.flush()
            if self.lost and self._lines.qsize() < _LINES_MAX // 2:
                lost, self.lost = self.lost, 0
                _log.warning("log_lines_lost", lines=lost)
