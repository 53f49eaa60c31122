"""Formats figures as Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any


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
