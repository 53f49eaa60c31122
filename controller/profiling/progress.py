"""Shows the progress of a measurement: a bar on a terminal, and lines otherwise."""

import sys
from typing import Protocol, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from controller.core.clock import Clock, WallClock
from controller.util.text import to_printable

_LINE_SECONDS = 10.0


class Reporter(Protocol):
    """Shows the progress of a run.  `async` code calls it, so that no method may block for long."""

    def note(self, text: str) -> None:
        """Shows a line permanently."""

    def waiting(self, text: str) -> None:
        """Shows what is waited for; called repeatedly."""

    def progress(self, share: float, doing: str, left_seconds: float) -> None:
        """Shows the share in [0, 1] of the work that is done.  doing: the current cell."""


class LineReporter:
    """Prints plain lines, one every few seconds, for logs."""

    def __init__(self, stream: TextIO | None = None, clock: Clock | None = None) -> None:
        self._stream = stream or sys.stderr
        self._clock = clock or WallClock()
        self._last_kind = ""
        self._last_line_at = -float("inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def note(self, text: str) -> None:
        """Prints a line, as Reporter asks."""
        print(to_printable(text), file=self._stream, flush=True)

    def waiting(self, text: str) -> None:
        """Prints the text at once, and again every few seconds, as Reporter asks."""
        self._note_throttled(text, text)

    def progress(self, share: float, doing: str, left_seconds: float) -> None:
        """Prints the progress, as Reporter asks."""
        line = f"{share:4.0%}  {doing}  about {left_seconds:.0f} s left"
        self._note_throttled("progress", line)

    def _note_throttled(self, kind: str, line: str) -> None:
        now = self._clock.now()
        if kind != self._last_kind or now - self._last_line_at >= _LINE_SECONDS:
            self._last_kind, self._last_line_at = kind, now
            self.note(line)


class BarReporter:
    """Shows a bar with the remaining time on a terminal."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=Console(stderr=True, highlight=False),
            transient=True,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def note(self, text: str) -> None:
        """Prints above the bar, as Reporter asks."""
        self._progress.console.print(to_printable(text), markup=False, soft_wrap=True)

    def waiting(self, text: str) -> None:
        """Shows the text beside the bar, as Reporter asks."""
        self._show(None, text, "")

    def progress(self, share: float, doing: str, left_seconds: float) -> None:
        """Moves the bar, as Reporter asks."""
        self._show(share, doing, f"about {left_seconds:.0f} s left")

    def _show(self, share: float | None, doing: str, remaining_text: str) -> None:
        total, doing = None if share is None else 1.0, to_printable(doing)
        if self._task is None:
            self._task = self._progress.add_task(doing, total=total, left=remaining_text)
        self._progress.update(
            self._task, description=doing, total=total, completed=share or 0.0, left=remaining_text
        )
