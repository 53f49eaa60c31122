"""Makes self-contained HTML pages: no scripts, no network, light and dark, printable, accessible.

Figures are inline SVG, drawn by matplotlib.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import TYPE_CHECKING, Literal, TypeAlias

from controller.core.errors import SpeculationError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --good: #2a7f3f; --bad: #b3261e; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem auto; max-width: 70rem;
       padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid var(--line); text-align: right;
         white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
tr.ours td { font-weight: 650; }
.good { color: var(--good); font-weight: 600; } .bad { color: var(--bad); font-weight: 600; }
details { border-top: 1px solid var(--line); padding: .4rem 0; }
summary { cursor: pointer; font-weight: 600; }
svg { max-width: 100%; height: auto; background: #fff; border-radius: 6px; }
p.small { opacity: .75; font-size: .9rem; } code { font-size: .9em; }
@media (prefers-color-scheme: dark) { :root { --good: #7bc98d; --bad: #f28b82; } }
:focus-visible { outline: 2px solid #4c8bf5; outline-offset: 2px; }
@media print { details:not([open]) > * { display: revert; } }
"""


@dataclass(frozen=True, slots=True)
class HighlightedCell:
    """A highlighted cell."""

    kind: Literal["good", "bad"]
    text: str


Cell: TypeAlias = str | HighlightedCell


def html_document(title: str, body: str) -> str:
    """Returns the HTML of a page.  body: HTML.  title: plain text."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def html_table(
    head: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    marked: Sequence[bool] = (),
    label: str = "table",
) -> str:
    """Returns a table.  Cells are plain text.  marked: rows in bold.  label: for screen readers."""
    cells = "".join(f"<th scope=col>{escape(text)}</th>" for text in head)
    body = "".join(
        f"<tr{' class=ours' if i < len(marked) and marked[i] else ''}>"
        f"{''.join(map(_cell_html, row))}</tr>"
        for i, row in enumerate(rows)
    )
    # A scrollable region must be reachable by the keyboard.
    return (
        f'<div class=scroll tabindex=0 role=region aria-label="{escape(label)}">'
        f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell_html(cell: Cell) -> str:
    if isinstance(cell, HighlightedCell):
        return f"<td class={cell.kind}>{escape(cell.text)}</td>"
    return f"<td>{escape(cell)}</td>"


def time_text(wall_seconds: float) -> str:
    """Formats Unix seconds as UTC to the millisecond; an invalid time as "-"."""
    try:
        moment = datetime.fromtimestamp(wall_seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return "-"
    return moment.isoformat(sep=" ", timespec="milliseconds").replace("+00:00", "Z")


class MissingPlotsError(SpeculationError):
    """matplotlib is not installed."""

    def __init__(self) -> None:
        super().__init__("the plots need matplotlib: pip install 'speculation-controller[plots]'")


def new_figure(width: float, height: float) -> "Figure":
    """Makes a figure of this size in inches.  Raises MissingPlotsError."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPlotsError from error
    return Figure(figsize=(width, height), layout="constrained")


def inline_svg(figure: "Figure", title: str) -> str:
    """Renders a figure as inline SVG; title: the text for screen readers."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "controller"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    # Remove the prolog and the metadata, whose URLs a browser might fetch.
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return text.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)
