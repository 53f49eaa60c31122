"""Shows the progress of a measurement: a bar on a terminal, and lines otherwise."""

import sys
from typing import Protocol, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from controller.core.clock import Clock, WallClock
from controller.util.text import printable

_LINE_SECONDS = 10.0


class Reporter(Protocol):
    """Shows progress.  `async` code calls it, so that no method may block for long."""

    def note(self, text: str) -> None:
        """Shows a line permanently."""

    def waiting(self, text: str) -> None:
        """Shows what is waited for; called repeatedly."""

    def progress(self, share: float, doing: str, left_seconds: float) -> None:
        """Shows the share in [0, 1] of the work that is done.  doing: the current cell."""


class LineReporter:
    """Prints plain lines, one every few seconds, for logs."""

    def __init__(self, out: TextIO | None = None, clock: Clock | None = None) -> None:
        self._out = out or sys.stderr
        self._clock = clock or WallClock()
        self._said = ""
        self._said_at = -float("inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def note(self, text: str) -> None:
        """Prints a line, as Reporter asks."""
        print(printable(text), file=self._out, flush=True)

    def waiting(self, text: str) -> None:
        """Prints the text at once, and again every few seconds, as Reporter asks."""
        self._now_and_then(text, text)

    def progress(self, share: float, doing: str, left_seconds: float) -> None:
        """Prints the progress, as Reporter asks."""
        line = f"{share:4.0%}  {doing}  about {left_seconds:.0f} s left"
        self._now_and_then("progress", line)

    def _now_and_then(self, kind: str, line: str) -> None:
        now = self._clock.now()
        if kind != self._said or now - self._said_at >= _LINE_SECONDS:
            self._said, self._said_at = kind, now
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
        self._progress.console.print(printable(text), markup=False, soft_wrap=True)

    def waiting(self, text: str) -> None:
        """Shows the text beside the bar, as Reporter asks."""
        self._show(None, text, "")

    def progress(self, share: float, doing: str, left_seconds: float) -> None:
        """Moves the bar, as Reporter asks."""
        self._show(share, doing, f"about {left_seconds:.0f} s left")

    def _show(self, share: float | None, doing: str, left: str) -> None:
        total, doing = None if share is None else 1.0, printable(doing)
        if self._task is None:
            self._task = self._progress.add_task(doing, total=total, left=left)
        self._progress.update(
            self._task, description=doing, total=total, completed=share or 0.0, left=left
        )
