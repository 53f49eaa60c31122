"""Writes what the lab found: plots, and in words which effects show and which do not."""

from collections.abc import Callable, Mapping
from html import escape
from typing import Any, TypeAlias

from matplotlib.axes import Axes

from controller.report.figures import new_figure, svg
from controller.report.page import page as html_page
from controller.report.page import table

# How to draw a part, and paragraphs about it.
Part: TypeAlias = tuple[Callable[[Axes], None], list[str]]


def page(result: Mapping[str, Any]) -> str:
    """Makes one self-contained HTML file."""
    machine = result["machine"]
    about = (
        f"{machine['processor']}, {machine['cores']} cores; {result['seconds']:.0f} s; "
        f"<code>{escape(' '.join(result['command']))}</code>. Ratios inside one part can be "
        "compared; times of different parts were taken at different moments."
    )
    body = [f"<h1>What updating and steering a drafter does</h1><p>{about}</p>"]
    for part, (title, make) in _PARTS.items():
        if part in result:
            draw, words = make(result[part])
            figure = new_figure(8, 3.6)
            draw(figure.subplots())
            text = "".join(f"<p>{escape(one)}</p>" for one in words)
            body.append(f"<h2>{escape(title)}</h2>{svg(figure, title)}{text}")
    body += [_claim(part) for part in result.values() if isinstance(part, dict) and "claim" in part]
    return html_page("Lab", "".join(body))


def _claim(found: Mapping[str, Any]) -> str:
    """Makes the section of a `Headline`."""
    title = f"{found['paper']}: {found['title']}"
    words = [f"Claim: {found['claim']}", f"Here: {found['setup']}"]
    words.append(f"It {found['verdict']}. {found['because']}")
    picture = ""
    if found["curves"]:
        figure = new_figure(8, 3.6)
        axes = figure.subplots()
        for curve in found["curves"]:
            across, up = zip(*curve["points"], strict=True)
            axes.plot(across, up, marker="o", label=curve["label"])
        axes.set_xlabel(found["axes"][0])
        axes.set_ylabel(found["axes"][1])
        axes.legend()
        picture = svg(figure, title)
    shown = table(found["columns"], found["rows"], label=title)
    text = "".join(f"<p>{escape(one)}</p>" for one in words)
    return f"<h2>{escape(title)}</h2>{picture}{shown}{text}"


def _shift(found: Mapping[str, Any]) -> Part:
    def draw(axes: Axes) -> None:
        for number, run in enumerate(found["runs"]):
            batches = run["batches"]
            line = axes.plot(
                [row["acceptance length"] for row in batches], marker="o", label=f"run {number + 1}"
            )[0]
            shifted = next(i for i, row in enumerate(batches) if row["domain"] != "code")
            axes.axvline(shifted - 0.5, linestyle=":", color=line.get_color())
            for at, row in enumerate(batches):
                if at and row["version served"] != batches[at - 1]["version served"]:
                    axes.annotate(
                        f"v{row['version served']}", (at, row["acceptance length"]),
                        textcoords="offset points", xytext=(0, 6), ha="center",
                    )  # fmt: skip
        axes.set_ylabel("tokens a verification")
        axes.set_xlabel("batch of four requests; dotted: code becomes csv")
        axes.legend()

    words = []
    for number, run in enumerate(found["runs"], start=1):
        csv = [row for row in run["batches"] if row["domain"] == "csv"]
        before, after = csv[0]["acceptance length"], csv[-1]["acceptance length"]
        outcomes = ", ".join(entry["outcome"] for entry in run["rounds"]) or "none"
        words.append(
            f"Run {number}: {run['signals kept while traffic was stable']} signals kept while "
            f"traffic was stable; on csv {before:.2f} to {after:.2f} tokens a verification; "
            f"rounds: {outcomes}; {csv[-1]['tokens/s']:.0f} tokens/s at the end, gamma = 0 "
            f"{run['gamma 0 tokens/s']:.0f}. {_shows(after > 1.1 * before, 'The adaptation')}"
        )
    return draw, words


_PARTS: dict[str, tuple[str, Callable[[Mapping[str, Any]], Part]]] = {
    "shift": ("TIDE: training beside the engine when traffic shifts", _shift),
}


def _shows(is_so: bool, what: str) -> str:
    return f"{what} shows." if is_so else f"{what} does not show here."
