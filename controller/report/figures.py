"""Figures as inline SVG drawn by matplotlib (the extra `simulate`)."""

import io
import re
from html import escape
from typing import TYPE_CHECKING

from controller.core.errors import SpeculationError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class MissingPlotsError(SpeculationError):
    """matplotlib is not installed."""

    def __init__(self) -> None:
        super().__init__(
            "the page's plots need matplotlib: pip install 'speculation-controller[simulate]'"
        )


def new_figure(width: float, height: float) -> "Figure":
    """Makes a figure of so many inches.  Raises MissingPlotsError."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPlotsError from error
    return Figure(figsize=(width, height), layout="constrained")


def svg(figure: "Figure", title: str) -> str:
    """Renders a figure as inline SVG; title: the text for screen readers."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "controller"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    # Without prolog, and without the references to schemes and licences: nothing to fetch.
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return text.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)
