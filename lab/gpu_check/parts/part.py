"""Defines what every part of the check can do, and formats figures as Markdown."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from lab.gpu_check.budget import Planner, Work
from lab.gpu_check.check import Check

Document = Mapping[str, Any]


class Part(ABC):
    """One part of the check.

    KEY: its name, which is also the key of its results in the result file.
    """

    KEY: ClassVar[str]

    @abstractmethod
    def plan(self, planner: Planner) -> Work:
        """Counts the work that `run` will do."""

    @abstractmethod
    def run(self, check: Check) -> None:
        """Measures, and adds each result to the check's document."""

    @abstractmethod
    def summary(self, document: Document) -> tuple[str, str]:
        """Returns the verdict and the details, for a line of the page."""

    def problems(self, document: Document) -> list[str]:  # noqa: ARG002 - for others
        """Returns what is wrong, in sentences; empty for a part that only yields figures."""
        return []

    def sections(self, document: Document) -> list[str]:  # noqa: ARG002 - for others
        """Returns the tables and paragraphs of the page, as Markdown."""
        return []


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Makes a table; the first column is text, the others are numbers."""
    return _table(columns, ["---", *["---:"] * (len(columns) - 1)], rows)


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Makes a table of text."""
    return _table(columns, ["---"] * len(columns), rows)


def spread(figure: Mapping[str, Any]) -> str:
    """Formats a median with the lowest and the highest value."""
    return f"{figure['median']:.3f} ({figure['low']:.3f} to {figure['high']:.3f})"


def arm_name(drafter: str, gamma: int) -> str:
    """Names an arm; without drafts the drafter does not matter."""
    return f"{drafter} {gamma}" if gamma else "0"


def _table(columns: Sequence[str], rule: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, rule, *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
