"""Writes what the lab found: plots, and in words which effects show and which do not."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from itertools import pairwise
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


def _length(found: Mapping[str, Any]) -> Part:
    def draw(axes: Axes) -> None:
        for regime in ("off", "online:5"):
            curve = found[regime]["acceptance length by context"]
            at = [int(context) for context in curve]
            axes.plot(at, [bin_["median"] for bin_ in curve.values()], marker="o", label=regime)
            axes.fill_between(
                at,
                [bin_["low"] for bin_ in curve.values()],
                [bin_["high"] for bin_ in curve.values()],
                alpha=0.2,
            )
        axes.set_xlabel("context, tokens")
        axes.set_ylabel("tokens a verification")
        axes.legend()

    off = list(found["off"]["acceptance length by context"].values())
    on = list(found["online:5"]["acceptance length by context"].values())
    decay = off[-1]["median"] / off[0]["median"]
    held = on[-1]["median"] / off[-1]["median"]
    words = (
        f"Left alone, acceptance at the end of the answer is {decay:.2f} of that at its beginning; "
        f"with an update every 5 rounds it ends at {held:.2f} of what it is left alone. "
        f"{_shows(decay < 0.95, 'The decay')} {_shows(held > 1.03, 'That updates hold it up')} "
        f"gamma = 0 decodes {found['gamma 0 tokens/s']} tokens/s, gamma = {found['gamma']} "
        f"{found['off']['tokens/s']['median']:.0f} left alone and "
        f"{found['online:5']['tokens/s']['median']:.0f} with updates."
    )
    return draw, [words]


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


def _sd2(found: Mapping[str, Any]) -> Part:
    # As they should come out, the least first; the quick lab leaves the first one out.
    names = [name for name in ("pretrained", "distilled", "sd2") if name in found]
    domains = list(found["sd2"]["acceptance length"])

    def draw(axes: Axes) -> None:
        for offset, name in zip((-0.25, 0.0, 0.25), names, strict=False):
            values, errors = _bars([found[name]["acceptance length"][domain] for domain in domains])
            at = [index + offset for index in range(len(domains))]
            axes.bar(at, values, width=0.22, yerr=errors, capsize=3, label=name)
        axes.set_xticks(range(len(domains)), domains)
        axes.set_ylabel(f"tokens a verification, gamma {found['gamma']}")
        axes.legend()

    mean = {name: found[name]["mean acceptance length"] for name in names}
    order = all(mean[one] < mean[after] for one, after in pairwise(names))
    exact = all(found[name]["same tokens as gamma 0"] for name in names)
    words = (
        f"Mean over domains: {', '.join(f'{name} {mean[name]:.2f}' for name in names)}. "
        f"{_shows(order, ' below '.join(names).capitalize())} A step with steering takes "
        f"{found['step of sd2 over distilled']:.3f} of one without. gamma = 0 decodes "
        f"{found['sd2']['gamma 0 tokens/s (json)']:.0f} tokens/s of json, the SD² drafter "
        f"{found['sd2']['tokens/s']['json']['median']:.0f}. Tokens are "
        f"{'those of gamma = 0' if exact else 'NOT those of gamma = 0'}."
    )
    return draw, [words]


_PARTS: dict[str, tuple[str, Callable[[Mapping[str, Any]], Part]]] = {
    "length": ("TTS: acceptance along a long answer", _length),
    "shift": ("TIDE: training beside the engine when traffic shifts", _shift),
    "sd2": ("SD²: steering a pretrained drafter", _sd2),
}


def _shows(is_so: bool, what: str) -> str:
    return f"{what} shows." if is_so else f"{what} does not show here."


def _bars(spreads: Sequence[Mapping[str, float]]) -> tuple[list[float], list[list[float]]]:
    """Medians, and how far the lowest and the highest are from them."""
    medians = [spread["median"] for spread in spreads]
    below = [spread["median"] - spread["low"] for spread in spreads]
    above = [spread["high"] - spread["median"] for spread in spreads]
    return medians, [below, above]
