"""Defines what every part of the check can do."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from lab.gpu_check.budget import Work
from lab.gpu_check.check import Check
from lab.gpu_check.plan import Planner

Document = Mapping[str, Any]


class Part(ABC):
    """One part of the check.

    KEY: the name of what it finds in the result file.
    """

    KEY: ClassVar[str]

    @abstractmethod
    def plan(self, planner: Planner) -> Work:
        """Counts the work that `run` will do."""

    @abstractmethod
    def run(self, check: Check) -> None:
        """Measures, and adds what was found to the check's document, bit by bit."""

    @abstractmethod
    def summary(self, document: Document) -> tuple[str, str]:
        """Returns the verdict and the details, for a line of the page."""

    def problems(self, document: Document) -> list[str]:  # noqa: ARG002 - for others
        """Returns what is wrong, in sentences; a part that only yields figures finds nothing."""
        return []

    def sections(self, document: Document) -> list[str]:  # noqa: ARG002 - for others
        """Returns the tables and paragraphs of the page, as Markdown."""
        return []
