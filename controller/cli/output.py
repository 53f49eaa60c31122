"""Prints the results of commands: text for people, JSON and YAML for programs, ids for scripts.

On a terminal, columns that do not fit are left out, the least important first; values are never
shortened.  Into a pipe or a file all columns are written, aligned by spaces, one line per item.
"""

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any, Generic, Never, TypeVar

import typer

from controller.util.exit_codes import Exit
from controller.util.text import escape_json, escape_yaml, to_printable, to_printable_lines

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from rich.console import Console
    from rich.table import Table

    from controller.util.text import TextTable

# The api_version of all documents.  Within a version, fields are only added.
API_VERSION = "speculation.v1"
# Characters that a table's frame takes in all, and in addition for each column.
_FRAME_WIDTH, _COLUMN_FRAME_WIDTH = 1, 3
_GAP = "  "
# Least width of a column whose text is folded.
_FOLDED_WIDTH_MIN = 10

Item = TypeVar("Item")


class Output(StrEnum):
    """Names the output formats of a command."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


# The formats for programs, and those for people.
DOCUMENTS = frozenset({Output.JSON, Output.YAML})
TABLES = frozenset({Output.TABLE, Output.WIDE})
FORM_HELP = "Format: table (columns that fit), wide (all columns), json, yaml, or name (only ids)."
OutputOption = Annotated[Output, typer.Option("--output", "-o", help=FORM_HELP)]
# For a command whose --output names a file.
FormOption = Annotated[Output, typer.Option("-o", help=FORM_HELP)]


@dataclass(frozen=True, slots=True)
class Column(Generic[Item]):
    """Describes a column of a list.

    cell_text: the text of an item's cell.  priority: 0 is always shown; of the others, the largest
    are left out first.  is_wide_only: it is shown with `-o wide` only.  style: of a cell, by its
    text.
    """

    title: str
    cell_text: Callable[[Item], str]
    is_right_aligned: bool = False
    priority: int = 0
    is_wide_only: bool = False
    style: Callable[[str], str] = lambda _: ""


@dataclass(frozen=True, slots=True)
class Listing(Generic[Item]):
    """Describes a list of items of one kind.

    kind: of its document.  name: of an item.  document: an item as plain values.
    unavailable_reason: why an item cannot be shown, "" if it can; printed after the name.
    """

    kind: str
    name: Callable[[Item], str]
    columns: Sequence[Column[Item]]
    document: Callable[[Item], Any]
    unavailable_reason: Callable[[Item], str] = lambda _: ""


def print_list(
    listing: Listing[Item], items: Sequence[Item], output: Output, empty: str = ""
) -> None:
    """Prints items in a format.  empty: the text that is printed if there are no items."""
    if output in DOCUMENTS:
        values = {"items": [listing.document(item) for item in items]}
        print_document(listing.kind, values, output)
    elif output is Output.NAME:
        _print_names(map(listing.name, items))
    elif not items:
        print_line(empty)
    else:
        _print_list_table(listing, items, wide=output is Output.WIDE)


def print_result(
    kind: str,
    values: Mapping[str, Any],
    output: Output,
    names: Sequence[str],
    print_for_people: Callable[[], None],
) -> None:
    """Prints a result that is not a list.

    values: its document.  names: for `-o name`.  print_for_people: prints it as text.
    """
    if output in DOCUMENTS:
        print_document(kind, values, output)
    elif output is Output.NAME:
        _print_names(names)
    else:
        print_for_people()


def print_change(kind: str, values: Mapping[str, Any], output: Output, name: str) -> None:
    """Prints one message of a stream: a line of JSON, a document of a YAML stream, or a name."""
    if output is Output.JSON:
        print_json(_make_document(kind, values))
    elif output is Output.YAML:
        print("---")
        print_document(kind, values, output)
    else:
        _print_names([name])


def print_document(kind: str, values: Mapping[str, Any], output: Output) -> None:
    """Prints values as JSON or YAML, with the version and the kind of the document."""
    document = _make_document(kind, values)
    if output is Output.JSON:
        print_json(document, indent=2)
    else:
        print(_yaml_text(document), end="", flush=True)


def _yaml_text(document: Mapping[str, Any]) -> str:
    """Returns YAML with escapes for unprintable characters."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Quotes strings with unprintable characters, since only quoted strings have escapes."""

    def quoted(dumper: Dumper, text: str) -> yaml.Node:
        style = None if text.isprintable() else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)

    Dumper.add_representer(str, quoted)
    return escape_yaml(yaml.dump(document, Dumper=Dumper, allow_unicode=True, sort_keys=False))


def _make_document(kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = _to_plain({"api_version": API_VERSION, "kind": kind, **values})
    return document


def _to_plain(value: Any) -> Any:
    """Returns a value of JSON's types; NaN and infinity, which JSON lacks, become null."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _to_plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain(inner) for inner in value]
    return str(value)


def plain_values(message: "Message") -> dict[str, Any]:
    """Returns a protobuf message as plain values, by its proto field names."""
    from google.protobuf import json_format

    values: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return values


def optional_text(message: "Message", name: str, form: str) -> str:
    """Formats an optional field, for example by "{:.2f}"; "-" if the message lacks it."""
    return form.format(getattr(message, name)) if message.HasField(name) else "-"


def optional_column(title: str, name: str, form: str, priority: int) -> Column[Any]:
    """Describes a column of an optional number; name and form are those of `optional_text`."""
    return Column(
        title,
        lambda message: optional_text(message, name, form),
        is_right_aligned=True,
        priority=priority,
    )


def print_line(text: str) -> None:
    """Prints one line, without line breaks and terminal control characters."""
    print(to_printable(text), flush=True)


def print_lines(text: str) -> None:
    """Prints text without terminal control characters."""
    print(to_printable_lines(text), flush=True)


def print_error(text: str) -> None:
    """Prints lines to standard error, without terminal control characters."""
    typer.echo(to_printable_lines(text), err=True)


def exit_with_error(command: str, error: object, code: Exit = Exit.USAGE) -> Never:
    """Ends a command with an error text.  command: its name; "" if several commands share it."""
    print_error(f"controller{command and ' '}{command}: {error}")
    raise typer.Exit(code)


def print_json(value: Any, indent: int | None = None) -> None:
    """Prints JSON with escapes for unprintable characters; by default in one line."""
    print(escape_json(json.dumps(value, ensure_ascii=False, indent=indent)), flush=True)


def print_table(table: "TextTable", *, wide: bool = False) -> None:
    """Prints a table below its title.  wide: prints all columns, even if they do not fit."""
    columns: list[Column[tuple[str, ...]]] = [
        Column(
            column.title, itemgetter(number), column.is_right_aligned, column.priority,
            style=partial(_style, column.styles),
        )
        for number, column in enumerate(table.columns)
    ]  # fmt: skip
    if table.title:
        print_wrapped(table.title)
    _print_list_table(Listing("", itemgetter(0), columns, list), table.rows, wide=wide)


def _style(styles: Mapping[str, str], text: str) -> str:
    return styles.get(text, "")


def print_wrapped(text: str) -> None:
    """Prints a text.  On a terminal, lines are broken between words."""
    console = _console()
    if not console.is_terminal:
        print_lines(text)
        return
    from rich.text import Text

    console.print(Text(to_printable_lines(text)), overflow="fold")


def _print_names(names: Iterable[str]) -> None:
    for name in names:
        print_line(name)


def _console() -> "Console":
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def _print_list_table(listing: Listing[Item], items: Sequence[Item], *, wide: bool) -> None:
    console = _console()
    if console.is_terminal:
        table, left_out = fit_table(listing, items, console, wide=wide)
        console.print(table)
        if left_out:
            console.print(f"left out: {', '.join(left_out)} (-o wide)", style="dim")
        return
    columns = [column for column in listing.columns if wide or not column.is_wide_only]
    rows = [[column.title for column in columns], *(_row_cells(listing, columns, i) for i in items)]
    widths = [max(len(row[n]) for row in rows if len(row) > n) for n in range(len(columns))]
    for row in rows:
        cells = [
            cell.rjust(width) if column.is_right_aligned else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=False)
        ]
        print_line(_GAP.join(cells).rstrip())


def fit_table(
    listing: Listing[Item],
    items: Sequence[Item],
    console: "Console",
    *,
    wide: bool = False,
    style: str = "",
) -> "tuple[Table, list[str]]":
    """Returns a table that fits the console, and the titles of the columns that do not.

    wide: all columns are shown, even if they do not fit.
    """
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    columns = [column for column in listing.columns if wide or not column.is_wide_only]
    cells = {
        column.title: [to_printable(_cell_text(listing, column, i)) for i in items]
        for column in columns
    }

    widest = {c.title: max(map(cell_len, (c.title, *cells[c.title]))) for c in columns}

    def table_width(column_width_max: int = sys.maxsize) -> int:
        """Returns the table's width if no column but the first is wider than `column_width_max`."""
        return _FRAME_WIDTH + sum(
            _COLUMN_FRAME_WIDTH
            + (min(column_width_max, widest[c.title]) if number else widest[c.title])
            for number, c in enumerate(columns)
        )

    left_out: list[str] = []
    while not wide and table_width() > console.width and any(c.priority for c in columns):
        dropped = max(columns, key=lambda column: column.priority)
        columns.remove(dropped)
        left_out.append(dropped.title)
    table = Table(style=style)
    # Text that still does not fit is folded; the names in the first column are folded last.
    is_name_unfolded = (
        table_width() > console.width >= table_width(column_width_max=_FOLDED_WIDTH_MIN)
    )
    for number, column in enumerate(columns):
        table.add_column(
            column.title,
            justify="right" if column.is_right_aligned else "left",
            overflow="fold",
            width=widest[column.title] if is_name_unfolded and not number else None,
        )
    for number, item in enumerate(items):
        if reason := listing.unavailable_reason(item):
            table.add_row(Text(to_printable(listing.name(item))), Text(to_printable(reason), "red"))
            continue
        table.add_row(*(
            Text(cells[c.title][number], c.style(cells[c.title][number])) for c in columns
        ))  # fmt: skip
    return table, left_out


def _row_cells(listing: Listing[Item], columns: Sequence[Column[Item]], item: Item) -> list[str]:
    if reason := listing.unavailable_reason(item):
        return [to_printable(listing.name(item)), to_printable(reason)]
    return [to_printable(column.cell_text(item)) or "-" for column in columns]


def _cell_text(listing: Listing[Item], column: Column[Item], item: Item) -> str:
    return "" if listing.unavailable_reason(item) else column.cell_text(item)
