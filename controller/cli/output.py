"""Prints lists as tables for people, as JSON and YAML for programs, and as names for scripts.

On a terminal, columns that do not fit are left out, the least important first; nothing that is
shown is cut.  Into a pipe or a file all columns go, aligned by spaces, one line for each item.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar

import typer

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from rich.console import Console
    from rich.table import Table

# Of all documents.  Fields are only added to a version.
API_VERSION = "speculation.v1"
# What a table's frame takes, and what it takes besides for each column.
_FRAME, _COLUMN = 1, 3
_GAP = "  "

Item = TypeVar("Item")


class Output(StrEnum):
    """Names the forms in which a list can be printed."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


OutputOption = Annotated[
    Output,
    typer.Option(
        "--output", "-o",
        help="How to print: table (what fits), wide (all columns), json, yaml, or name (ids only).",
    ),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Column(Generic[Item]):
    """Describes a column of a list.

    priority: 0 is always shown; of the others, the largest are left out first.  wide: it is shown
    with `-o wide` only.  style: of a cell, by its text.
    """

    title: str
    of: Callable[[Item], str]
    right: bool = False
    priority: int = 0
    wide: bool = False
    style: Callable[[str], str] = lambda _: ""


@dataclass(frozen=True, slots=True)
class Listing(Generic[Item]):
    """Describes a list of one kind of items.

    kind: of its document.  name: of an item.  document: an item as plain values.  unavailable: why
    an item cannot be shown, "" for one that can; it stands behind the name then.
    """

    kind: str
    name: Callable[[Item], str]
    columns: Sequence[Column[Item]]
    document: Callable[[Item], Any]
    unavailable: Callable[[Item], str] = lambda _: ""


def show(listing: Listing[Item], items: Sequence[Item], output: Output, empty: str = "") -> None:
    """Prints items in the form that was asked for.  empty: what to say in place of a table."""
    if output in {Output.JSON, Output.YAML}:
        found = {"items": [listing.document(item) for item in items]}
        print_document(listing.kind, found, output)
    elif output is Output.NAME:
        for item in items:
            print(printable(listing.name(item)))
    elif not items:
        print(empty)
    else:
        _show_table(listing, items, wide=output is Output.WIDE)


def print_document(kind: str, values: Mapping[str, Any], output: Output) -> None:
    """Prints plain values as JSON or YAML, with the version and the kind of the document."""
    document = {"api_version": API_VERSION, "kind": kind, **values}
    if output is Output.JSON:
        print(json.dumps(document, ensure_ascii=False, indent=2))
        return
    import yaml

    print(yaml.safe_dump(document, allow_unicode=True, sort_keys=False), end="")


def plain_values(message: "Message") -> dict[str, Any]:
    """Returns a message of the contract as plain values, by the contract's field names."""
    from google.protobuf import json_format

    found: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return found


def printable(words: str) -> str:
    """Returns words of others without what could command a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in words)


def _show_table(listing: Listing[Item], items: Sequence[Item], *, wide: bool) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if console.is_terminal:
        table, left_out = fitting_table(listing, items, console, wide=wide)
        console.print(table)
        if left_out:
            console.print(f"left out: {', '.join(left_out)} (-o wide)", style="dim")
        return
    columns = [column for column in listing.columns if wide or not column.wide]
    rows = [[column.title for column in columns], *(_row(listing, columns, i) for i in items)]
    widths = [max(len(row[n]) for row in rows if len(row) > n) for n in range(len(columns))]
    for row in rows:
        cells = [
            cell.rjust(width) if column.right else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=False)
        ]
        print(_GAP.join(cells).rstrip())


def fitting_table(
    listing: Listing[Item],
    items: Sequence[Item],
    console: "Console",
    *,
    wide: bool = False,
    style: str = "",
) -> "tuple[Table, list[str]]":
    """Returns a table that fits the console, and the titles of the columns that do not.

    wide: all columns are shown, whether they fit or not.
    """
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    columns = [column for column in listing.columns if wide or not column.wide]
    cells = {
        column.title: [printable(_cell(listing, column, i)) for i in items] for column in columns
    }

    def width() -> int:
        widest = (max(map(cell_len, (c.title, *cells[c.title]))) for c in columns)
        return _FRAME + sum(each + _COLUMN for each in widest)

    left_out: list[str] = []
    while not wide and width() > console.width and any(c.priority for c in columns):
        gone = max(columns, key=lambda column: column.priority)
        columns.remove(gone)
        left_out.append(gone.title)
    table = Table(style=style)
    for column in columns:
        # What does not fit even so goes on in the next line.
        table.add_column(column.title, justify="right" if column.right else "left", overflow="fold")
    for number, item in enumerate(items):
        if why := listing.unavailable(item):
            table.add_row(Text(printable(listing.name(item))), Text(printable(why), "red"))
            continue
        table.add_row(*(
            Text(cells[c.title][number], c.style(cells[c.title][number])) for c in columns
        ))  # fmt: skip
    return table, left_out


def _row(listing: Listing[Item], columns: Sequence[Column[Item]], item: Item) -> list[str]:
    if why := listing.unavailable(item):
        return [printable(listing.name(item)), printable(why)]
    return [printable(column.of(item)) or "-" for column in columns]


def _cell(listing: Listing[Item], column: Column[Item], item: Item) -> str:
    return "" if listing.unavailable(item) else column.of(item)
