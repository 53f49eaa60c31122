"""A table as its texts: what a package shows, however wide the place is where it is shown."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TextColumn:
    """Describes a column of a table.

    priority: 0 is always shown; of the others, the largest are left out first where the table does
    not fit.  styles: how a cell with this text is drawn, in rich's words.
    """

    title: str
    right: bool = False
    priority: int = 0
    styles: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TextTable:
    """Holds a table.  rows: as many texts each as there are columns."""

    title: str
    columns: Sequence[TextColumn]
    rows: Sequence[tuple[str, ...]]


def numbers(titles: Iterable[str], priorities: Mapping[str, int]) -> list[TextColumn]:
    """Describes columns of numbers; a title without a priority is always shown."""
    return [TextColumn(title, right=True, priority=priorities.get(title, 0)) for title in titles]


def spread_priorities(count: int) -> list[int]:
    """Ranks columns of a series, so that those left over span it: the ends are always shown."""
    return [
        0 if at in {0, count - 1} else 3 if at % 2 else 2 if at % 4 else 1 for at in range(count)
    ]
