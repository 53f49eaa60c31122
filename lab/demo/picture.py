"""Draws the picture of a demo: draft lengths over the day, speeds, phases, and lost time.

It is drawn from result.json, so that a run on a machine without matplotlib can be drawn elsewhere:
`python -m lab.demo.picture RESULT`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lab.paced.engines import ADAPTIVE, STEERED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#9d9d9d", "#4c78a8", "#b279a2", "#72b07a", "#f2a65a")
_STEERED_COLOUR = "#d1495b"
_SHADES = ("#eef2f7", "#f8f4ec")
_SECOND_COLOUR = "#7a3b9a"
EXIT_FAILED = 1


def draw(document: Mapping[str, Any], path: Path) -> None:
    """Writes a PNG.

    document: what lab/demo/outcome.py makes of a demo.  Raises KeyError for another document.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    runs = {run["policy"]: run for run in document["runs"]}
    figure = plt.figure(figsize=(13.0, 9.0), layout="constrained")
    grid = figure.add_gridspec(3, 2, height_ratios=(1.0, 0.7, 1.1))
    _draw_timeline(document, runs[STEERED], figure.add_subplot(grid[0, :]), legend=True)
    if ADAPTIVE in runs:
        _draw_timeline(document, runs[ADAPTIVE], figure.add_subplot(grid[1, :]), legend=False)
    _draw_speeds(document, figure.add_subplot(grid[2, 0]))
    _draw_phases(document, figure.add_subplot(grid[2, 1]))
    figure.suptitle(document["label"]["title"], fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _colour(document: Mapping[str, Any], policy: str) -> str:
    compared_policies = [run["policy"] for run in document["runs"] if run["policy"] != STEERED]
    return _STEERED_COLOUR if policy == STEERED else _COLOURS[compared_policies.index(policy)]


def _draw_timeline(
    document: Mapping[str, Any], run: Mapping[str, Any], axes: "Axes", *, legend: bool
) -> None:
    # The play whose speed is the median one.
    repeats = sorted(run["repeats"], key=lambda repeat: float(repeat["tokens_per_second"]))
    play = repeats[len(repeats) // 2]
    phases, samples = document["stream"]["phases"], play["samples"]
    batch = axes.twinx()
    batch.set_zorder(0)
    axes.set_zorder(1)
    axes.patch.set_visible(False)
    times, sizes, gammas, drafters = zip(*samples, strict=True)
    highest = max(7, *gammas)
    ends = [*play["began"][1:], play["seconds"]]
    for number, (start, end) in enumerate(zip(play["began"], ends, strict=True)):
        batch.axvspan(start, end, color=_SHADES[number % 2], linewidth=0)
        phase = phases[number]
        if legend:
            axes.text(
                (start + end) / 2, highest + 0.6,
                f"{phase['phase']}\n{'+'.join(phase['kinds'])} ×{phase['concurrency']}",
                ha="center", va="bottom", fontsize=8,
            )  # fmt: skip
    batch.fill_between(times, sizes, step="post", color="#333333", alpha=0.15, linewidth=0)
    colour = _colour(document, run["policy"])
    axes.step(times, gammas, where="post", color=colour, linewidth=0.8)
    seconds = [
        (time, gamma, drafter)
        for time, gamma, drafter in zip(times, gammas, drafters, strict=True)
        if gamma and drafter != "eagle3"
    ]
    if seconds:
        axes.plot(
            [t for t, *_ in seconds], [gamma for _, gamma, _ in seconds], "s", markersize=2,
            color=_SECOND_COLOUR, label=f"drafted by {seconds[0][2]}",
        )  # fmt: skip
    probes = play["probe_samples"]
    if probes:
        axes.plot(
            [probe[0] for probe in probes], [probe[2] for probe in probes], "o", markersize=3,
            markerfacecolor="white", markeredgecolor=colour, linestyle="none", label="probe",
        )  # fmt: skip
    axes.set_ylim(-0.3, highest + (2.0 if legend else 0.6))
    axes.set_yticks(range(highest + 1))
    axes.set_xlim(0, play["seconds"])
    axes.set_xlabel(f"seconds {document['label']['time']}".strip())
    axes.set_ylabel(f"{run['policy']}:\ndraft length γ", color=colour, fontsize=9)
    batch.set_ylabel("sequences decoding (grey)")
    batch.set_ylim(0, max(phase["concurrency"] for phase in phases) * 1.3)
    if legend and (probes or seconds):
        axes.legend(loc="upper right", fontsize=8, frameon=False)


def _draw_speeds(document: Mapping[str, Any], axes: "Axes") -> None:
    names = [run["policy"] for run in document["runs"]]
    spreads = [run["rates"] for run in document["runs"]]
    places = range(len(names))
    axes.bar(
        places, [s["median"] for s in spreads], width=0.65,
        color=[_colour(document, name) for name in names],
    )  # fmt: skip
    axes.vlines(places, [s["low"] for s in spreads], [s["high"] for s in spreads], color="black")
    for place, name, spread in zip(places, names, spreads, strict=True):
        label = f"{spread['median']:.0f}"
        if name != STEERED:
            label += f"\nsteered\n×{document['ratios'][f'steered/{name}']['median']:.2f}"
        axes.text(place, spread["median"] / 2, label, ha="center", va="center", color="white")
    oracle = document["oracle"][0]["tokens_per_second"]
    axes.axhline(oracle, color="black", linestyle=":", linewidth=1)
    axes.text(
        0.01, oracle * 1.14, "dotted: the best arm of each phase, computed from the table",
        fontsize=8, va="bottom", transform=axes.get_yaxis_transform(),
    )  # fmt: skip
    axes.set_xticks(list(places), names)
    axes.set_ylim(0, max(oracle, *(s["high"] for s in spreads)) * 1.25)
    axes.set_ylabel(f"tokens/s {document['label']['time']}".strip())
    lost_text = "  ".join(
        f"{cause} {share:.1%}" for cause, share in document["lost_time"][0].items()
        if cause != "total"
    )  # fmt: skip
    axes.set_title("whole day", loc="left", fontsize=11)
    axes.set_xlabel(f"steered lost, by cause: {lost_text} (hidden)", fontsize=8)


def _draw_phases(document: Mapping[str, Any], axes: "Axes") -> None:
    runs, phases = document["runs"], document["stream"]["phases"]
    width = 0.8 / len(runs)
    for number, run in enumerate(runs):
        axes.bar(
            [i + number * width for i in range(len(phases))], run["phase_shares"], width=width,
            color=_colour(document, run["policy"]), label=run["policy"],
        )  # fmt: skip
    axes.axhline(1.0, color="black", linestyle=":", linewidth=1)
    axes.set_xticks(
        [i + 0.4 - width / 2 for i in range(len(phases))],
        [f"{phase['phase']}\n×{phase['concurrency']}" for phase in phases], fontsize=8,
    )  # fmt: skip
    axes.set_title("tokens/s of each phase over those of its best arm", loc="left", fontsize=11)
    axes.legend(fontsize=8, ncols=2, loc="lower right")


def main(
    result: Annotated[Path, typer.Argument(help="The result.json of a demo.")],
    output: Annotated[
        Path | None, typer.Option(help="The PNG; demo.png beside the result if not given.")
    ] = None,
) -> None:
    """Draws the picture of a demo that has run, here or elsewhere."""
    path = output or result.with_name("demo.png")
    try:
        draw(json.loads(result.read_text(encoding="utf-8")), path)
    except OSError as error:
        typer.echo(f"{result} cannot be read: {error.strerror}", err=True)
        raise typer.Exit(EXIT_FAILED) from error
    except ValueError as error:
        typer.echo(f"{result} is not the result.json of a demo: {error}", err=True)
        raise typer.Exit(EXIT_FAILED) from error
    except ModuleNotFoundError as error:
        typer.echo("A picture needs matplotlib: pip install matplotlib", err=True)
        raise typer.Exit(EXIT_FAILED) from error
    except KeyError as error:
        typer.echo(
            f"{result} holds no play of a steered engine ({error} is missing).  A demo writes one "
            "to result.json in its output folder.",
            err=True,
        )
        raise typer.Exit(EXIT_FAILED) from error
    typer.echo(str(path))


if __name__ == "__main__":
    typer.run(main)
