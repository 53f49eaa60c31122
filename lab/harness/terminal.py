"""Shows what a run does: a live line on a terminal, plain lines anywhere else."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from lab.harness.errors import HarnessError

# Exit code of every command of the lab.
EXIT_FAILED = 1


class Terminal:
    """Prints steps as they begin and end, with their seconds."""

    def __init__(self) -> None:
        # Without a terminal rich falls back to 80 columns, which breaks the tables' rows.
        probe = Console()
        self._console = Console(highlight=False, width=None if probe.is_terminal else 140)

    def say(self, text: str) -> None:
        """Prints one line."""
        # In a file, lines that stay whole can be copied: commands, and the rows of a page.
        self._console.print(text, markup=False, soft_wrap=not self._console.is_terminal)

    def say_stopped(self, page: Path) -> None:
        """Prints that the run was told to end, and where its page is if there is one."""
        page_hint = f"  The results so far are in {page}." if page.exists() else ""
        self.say(f"\nStopped.{page_hint}")

    @contextmanager
    def exit_on_error(self, text: str) -> Iterator[None]:
        """Ends the command with this text and the reason if a run cannot continue."""
        try:
            yield
        except HarnessError as error:
            self.say(f"\n{text}: {error}")
            raise typer.Exit(EXIT_FAILED) from error

    def heading(self, text: str) -> None:
        """Prints a line that begins a part."""
        self._console.print()
        self._console.print(text, style="bold", markup=False)

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """Prints a table; the first column is left-aligned, the others are numbers."""
        table = Table()
        for index, column in enumerate(columns):
            # A cell that does not fit takes two lines rather than an ellipsis.
            table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
        for row in rows:
            table.add_row(*row)
        self.heading(title)  # not the table's own title, which breaks at the table's width
        self._console.print(table)

    @contextmanager
    def show_progress(self, text: str) -> Iterator["RunningStep"]:
        """Shows that something runs; the line stays, with its seconds and its result."""
        started = time.monotonic()
        if self._console.is_terminal:
            with self._console.status(text) as status:
                work = RunningStep(lambda detail: status.update(f"{text}  [dim]{detail}[/dim]"))
                yield work
        else:
            self.say(f"{text} ...")
            work = RunningStep(lambda _: None)  # a detail is not worth a line
            yield work
        result = f"  {work.result}" if work.result else ""
        seconds = time.monotonic() - started
        prefix = "" if self._console.is_terminal else "  done: "
        self.say(f"{prefix}{text}{result}  ({seconds:.0f} s)")


class RunningStep:
    """A running step: `update` shows where it is, `result` is printed at its end."""

    def __init__(self, update: Callable[[str], None]) -> None:
        self.update = update
        self.result = ""
