"""Writes what the lab found: plots, and in words which effects show and which do not."""

from collections.abc import Callable, Mapping, Sequence
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


def _strides(found: Mapping[str, Any]) -> Part:
    rows = found["by"]
    names = list(rows)

    def draw(axes: Axes) -> None:
        plain = found["gamma 0 tokens/s"]
        axes.errorbar(names, *_bars([rows[n]["tokens/s"] for n in names]), marker="o", capsize=3)
        axes.axhline(plain, linestyle="--", color="gray", label="gamma 0")
        axes.set_ylabel("tokens/s")
        axes.legend(loc="upper left")
        other = axes.twinx()
        other.errorbar(
            names,
            *_bars([rows[n]["acceptance length"] for n in names]),
            marker="s", capsize=3, color="tab:orange",
        )  # fmt: skip
        other.set_ylabel("tokens a verification (orange)")

    best = max(names, key=lambda name: rows[name]["tokens/s"]["median"])
    gain = rows[best]["tokens/s"]["median"] / rows["off"]["tokens/s"]["median"]
    against = rows[best]["tokens/s"]["median"] / found["gamma 0 tokens/s"]
    exact = all(row["same tokens as without updates"] for row in rows.values())
    words = (
        f"Best tokens/s: {best}, {gain:.2f} of off and {against:.2f} of gamma = 0. "
        f"{_shows(best not in {'off', names[-1]}, 'A best stride between off and 1')} "
        f"Tokens with and without updates are {'the same' if exact else 'NOT the same'}."
    )
    return draw, [words]


def _regime(found: Mapping[str, Any]) -> Part:
    batches = found["batches"]

    def draw(axes: Axes) -> None:
        axes.plot([row["acceptance length"] for row in batches], marker="o")
        axes.set_ylabel("tokens a verification")
        axes.set_xlabel("batch of four requests")
        for at, row in enumerate(batches):
            label = f"S={row['stride']}" if row["stride"] else "off"
            axes.annotate(
                f"{label}\nγ={row['gamma']}", (at, row["acceptance length"]), fontsize=7,
                textcoords="offset points", xytext=(0, 6), ha="center",
            )  # fmt: skip

    first, last = batches[0], batches[-1]
    words = (
        f"Nobody sets a stride. From {first['acceptance length']:.2f} to "
        f"{last['acceptance length']:.2f} tokens a verification, {last['updates']} updates; "
        f"{last['tokens/s']:.0f} tokens/s at the end, gamma = 0 decodes "
        f"{found['gamma 0 tokens/s']:.0f}."
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


def _choices(found: Mapping[str, Any]) -> Part:
    streams = list(found)

    def draw(axes: Axes) -> None:
        for index, stream in enumerate(streams):
            speeds = found[stream]["tokens/s"]
            off = speeds["off"]["median"]
            for place, (choice, speed) in enumerate(speeds.items()):
                axes.bar(
                    index + 0.2 * place - 0.3, speed["median"] / off, width=0.18,
                    color=f"C{place}", label=choice if not index else None,
                )  # fmt: skip
        axes.set_xticks(range(len(streams)), streams)
        axes.set_ylabel("tokens/s over those of off")
        axes.legend()

    words = []
    for stream, row in found.items():
        best, off = row["chosen over best fixed"], row["chosen over off"]
        later = row["chosen over best fixed, later"]
        words.append(
            f"{stream}: the sidecar's choice over the best fixed one ({row['best fixed']}) "
            f"{best['median']:.3f} ({best['low']:.3f} to {best['high']:.3f}; bar 0.98), in the "
            f"second half of the stream {later['median']:.3f}; over off {off['median']:.3f}, then "
            f"{row['chosen over off, later']['median']:.3f}."
        )
    return draw, words


def _predictor(found: Mapping[str, Any]) -> Part:
    rows = {name: row for name, row in found.items() if isinstance(row, dict)}
    before, after = "acceptance length before", "acceptance length after"

    def draw(axes: Axes) -> None:
        for offset, when in ((-0.2, before), (0.2, after)):
            values, errors = _bars([row[when] for row in rows.values()])
            at = [index + offset for index in range(len(rows))]
            axes.bar(at, values, width=0.36, yerr=errors, capsize=3, label=when)
        axes.set_xticks(range(len(rows)), rows)
        axes.set_ylabel(f"tokens a verification, gamma {found['gamma']}")
        axes.legend()

    words = [
        f"{name} on {found['domain']}: {row[before]['median']:.2f} to {row[after]['median']:.2f} "
        f"tokens a verification after {row['updates']} updates, {row['ratio']['median']:.2f} times "
        f"({row['ratio']['low']:.2f} to {row['ratio']['high']:.2f})."
        for name, row in rows.items()
    ]
    return draw, words


_PARTS: dict[str, tuple[str, Callable[[Mapping[str, Any]], Part]]] = {
    "strides": ("TTS: how often to update", _strides),
    "regime": ("The sidecar's own choice of a stride", _regime),
    "shift": ("TIDE: training beside the engine when traffic shifts", _shift),
    "predictor": ("Online updates of a multi-token predictor, and of EAGLE3", _predictor),
    "bars": ("The sidecar's choice against fixed strides", _choices),
}


def _shows(is_so: bool, what: str) -> str:
    return f"{what} shows." if is_so else f"{what} does not show here."


def _bars(spreads: Sequence[Mapping[str, float]]) -> tuple[list[float], list[list[float]]]:
    """Medians, and how far the lowest and the highest are from them."""
    medians = [spread["median"] for spread in spreads]
    below = [spread["median"] - spread["low"] for spread in spreads]
    above = [spread["high"] - spread["median"] for spread in spreads]
    return medians, [below, above]
