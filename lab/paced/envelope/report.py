"""Shows the outcome to a person: one table, and a picture beside the published envelope."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from controller.core.engine_spec import Arm
from lab.cpu_engine.pace.step_costs import OWN, SECOND
from lab.harness.measured import DOUBTFUL_CORES
from lab.harness.terminal import Terminal
from lab.paced.envelope.outcome import (
    DFLASH,
    MTP,
    OFF,
    PLAIN,
    STEERED,
    Point,
    Run,
    arm_name,
    best_arm,
    count_agreeing,
)
from lab.papers.drafters import Floats
from simulator import published_qwen

# Arms that ran less are left out of the table.
_MIN_SHOWN_SHARE = 0.1
_COLOURS = {OFF: "#9d9d9d", MTP: "#4c78a8", DFLASH: "#7a3b9a", STEERED: "#d1495b"}
_TITLES = {OFF: "off", MTP: "MTP", DFLASH: "DFlash", STEERED: "steered"}
_OWNERS = {OWN: MTP, SECOND: DFLASH}
# Name -> [concurrencies] tokens/s, and the draft length at each.
Curves = Mapping[str, tuple[Sequence[float], Sequence[int]]]


def label(source: str) -> str:
    """Says what is imposed, what is drawn and what is real."""
    return (
        f"Step times are imposed, by a {source}; acceptance is drawn from the curves "
        "published with them; scheduling, drafting, plugin, sidecar and profile are real. Time is "
        "the model's."
    )


def show(points: Sequence[Point], source: str, terminal: Terminal) -> None:
    """Prints the table, what it is made of, and what is doubtful."""
    terminal.table(
        "The envelope of MTP and DFlash, tokens/s, and steered on top of it",
        [
            "B",
            "published",
            "table",
            "by runs",
            "off",
            "MTP",
            "DFlash",
            "steered",
            "÷ env.",
            "steps",
        ],
        [row(point) for point in points],
    )
    drafters, arms = count_agreeing(points)
    terminal.say(
        f"By runs the published drafter wins at {drafters} of {len(points)} concurrencies, at "
        f"{arms} with the published draft length. {label(source)}"
    )
    busiest = max(point.foreign_cores for point in points)
    if busiest > DOUBTFUL_CORES:
        terminal.say(
            f"Other programs kept up to {busiest:.1f} cores busy meanwhile. That delays what the "
            "sidecar decides; steps that missed their pace because of it are counted as late."
        )


def row(point: Point) -> list[str]:
    """The cells of a concurrency."""
    rates = [point.runs[policy].rate for policy in (OFF, MTP, DFLASH, STEERED)]
    return [
        str(point.concurrency),
        *(arm_name(a) for a in (point.published_winner, point.table_winner, point.winner)),
        *(f"{rate:.0f}" for rate in rates),
        f"{point.steered_share:.3f}",
        shares(point.runs[STEERED]),
    ]


def shares(run: Run) -> str:
    """The arms that ran most, with their share of the steps."""
    frequent_arms = {arm: share for arm, share in run.shares.items() if share >= _MIN_SHOWN_SHARE}
    return ", ".join(f"{arm_name(arm)} {share:.0%}" for arm, share in frequent_arms.items())


if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(
    points: Sequence[Point], grid: Mapping[str, Floats] | None, source: str, path: Path
) -> None:
    """Writes a PNG.  Without the published grid the imposed table stands in its place."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(12.5, 8.6), layout="constrained")
    reference_axes = axes[0, 0]
    if grid is None:
        _draw_speeds(
            reference_axes, points, _table_curves(points), "the imposed table (no --grid was given)"
        )
    else:
        _draw_speeds(
            reference_axes, points, published_speeds(points, grid), "published (simulated there)"
        )
    _draw_speeds(axes[0, 1], points, _run_curves(points), "run: the real SGLang, paced")
    axes[0, 1].sharey(reference_axes)
    _draw_winners(axes[1, 0], points)
    _draw_shares(axes[1, 1], points)
    figure.supxlabel(label(source), fontsize=7.5, wrap=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def published_speeds(points: Sequence[Point], grid: Mapping[str, Floats]) -> Curves:
    """The published goodput of each drafter at its best draft length, from the sweep's file."""
    columns = [published_qwen.CONCURRENCIES.index(point.concurrency) for point in points]
    curves: dict[str, tuple[Sequence[float], Sequence[int]]] = {
        OFF: (grid[MTP][0, columns].tolist(), [0] * len(points))
    }
    for drafter in (MTP, DFLASH):
        rates = grid[drafter][1:, columns]
        curves[drafter] = (rates.max(axis=0).tolist(), (rates.argmax(axis=0) + 1).tolist())
    return curves


def _table_curves(points: Sequence[Point]) -> Curves:
    curves: dict[str, tuple[Sequence[float], Sequence[int]]] = {
        OFF: ([point.table[PLAIN] for point in points], [0] * len(points))
    }
    for role, drafter in _OWNERS.items():
        arms = [best_arm(point.table, role) for point in points]
        rates = [point.table[arm] for point, arm in zip(points, arms, strict=True)]
        curves[drafter] = (rates, [arm.gamma for arm in arms])
    return curves


def _run_curves(points: Sequence[Point]) -> Curves:
    curves = {}
    for policy in (OFF, MTP, DFLASH, STEERED):
        runs = [point.runs[policy] for point in points]
        gammas = [0 if run.arm is None else run.arm.gamma for run in runs]
        curves[policy] = ([run.rate for run in runs], gammas)
    return curves


def _draw_speeds(axes: "Axes", points: Sequence[Point], curves: Curves, title: str) -> None:
    """Draws tokens/s over those of no speculation in the same picture; γ stands at each point."""
    places = range(len(points))
    plain = np.array(curves[OFF][0])
    for name, (rates, gammas) in curves.items():
        gains = np.array(rates) / plain
        steered = name == STEERED
        axes.plot(
            places, gains, "o--" if steered else "o-", color=_COLOURS[name], label=_TITLES[name],
            markersize=9 if steered else 5, markerfacecolor="none" if steered else None,
        )  # fmt: skip
        if name in (MTP, DFLASH):
            is_above = name == DFLASH
            for place, gain, gamma in zip(places, gains, gammas, strict=True):
                axes.annotate(
                    f"{gamma}", (place, gain), (0, 7 if is_above else -15), ha="center",
                    textcoords="offset points", color=_COLOURS[name], fontsize=8,
                )  # fmt: skip
    _label_concurrencies(axes, points, title)
    axes.set_ylabel("tokens/s over those of no speculation")
    axes.legend(fontsize=8, loc="upper left")


def _draw_winners(axes: "Axes", points: Sequence[Point]) -> None:
    rows: dict[str, list[Arm]] = {
        "published": [point.published_winner for point in points],
        "table": [point.table_winner for point in points],
        "by runs": [point.winner for point in points],
        "steered": [next(iter(point.runs[STEERED].shares)) for point in points],
    }
    for height, arms in enumerate(reversed(rows.values())):
        for place, arm in enumerate(arms):
            colour = _COLOURS[_OWNERS[arm.drafter] if arm.gamma else OFF]
            axes.barh(height, 0.94, 0.86, place - 0.47, color=colour)
            axes.text(
                place, height, arm_name(arm), ha="center", va="center", color="white", fontsize=8
            )
    axes.set_yticks(range(len(rows)), list(reversed(rows)))
    _label_concurrencies(axes, points, "the winner and its γ; of steered, the arm that ran most")


def _draw_shares(axes: "Axes", points: Sequence[Point]) -> None:
    for place, point in enumerate(points):
        run, bottom = point.runs[STEERED], 0.0
        for arm, share in sorted(
            run.shares.items(), key=lambda item: (item[0].gamma > 0, item[0].drafter, item[0].gamma)
        ):
            name = _OWNERS[arm.drafter] if arm.gamma else OFF
            axes.bar(place, share, 0.8, bottom, color=_COLOURS[name], edgecolor="white")
            if share >= 0.08:
                axes.text(
                    place, bottom + share / 2, f"{arm.gamma}", ha="center", va="center",
                    color="white", fontsize=8,
                )  # fmt: skip
            bottom += share
        axes.text(place, 1.02, f"{point.steered_share:.3f}", ha="center", va="bottom", fontsize=8)
    axes.set_ylim(0, 1.12)
    axes.set_ylabel("share of steered's steps")
    title = "steered: drafter (colour) and γ; above: its tokens/s over the envelope's"
    _label_concurrencies(axes, points, title)


def _label_concurrencies(axes: "Axes", points: Sequence[Point], title: str) -> None:
    axes.set_xticks(range(len(points)), [str(point.concurrency) for point in points])
    axes.set_xlim(-0.5, len(points) - 0.5)
    axes.set_xlabel("sequences at a time")
    axes.set_title(title, loc="left", fontsize=10)
