"""Writes what the lab found: tables and plots, and in words which claims reproduce."""

from collections.abc import Mapping
from html import escape
from typing import Any

from controller.recording.html_page import new_figure, svg, table
from controller.recording.html_page import page as html_page
from lab.learning.headline import Verdict, verdict_text


def page(result: Mapping[str, Any]) -> str:
    """Makes one self-contained HTML file."""
    machine = result["machine"]
    about = (
        f"{machine['processor']}, {machine['cores']} cores; {result['seconds']:.0f} s; "
        f"<code>{escape(' '.join(result['command']))}</code>. Ratios inside one claim can be "
        "compared; times of different claims were taken at different moments."
    )
    body = [f"<h1>What updating and steering a drafter does</h1><p>{about}</p>"]
    body += [
        _claim(name, part)
        for name, part in result.items()
        if isinstance(part, dict) and "claim" in part
    ]
    return html_page("Lab", "".join(body))


def _claim(name: str, found: Mapping[str, Any]) -> str:
    """Makes the section of a `Headline`."""
    title = f"{found['paper']}: {found['title']}"
    words = [f"Claim: {found['claim']}", f"Here: {found['setup']}"]
    words.append(f"It {verdict_text(name, Verdict(found['verdict']))}. {found['because']}")
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
