"""Draws the demo's picture: draft lengths over the day, speeds, phases, and lost time."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from lab.demo.outcome import DemoOutcome
from lab.paced.engines import ADAPTIVE, STEERED
from lab.paced.lost_time import LostTime
from lab.paced.plays import StreamPlay

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#9d9d9d", "#4c78a8", "#b279a2", "#72b07a", "#f2a65a")
_STEERED_COLOUR = "#d1495b"
_SHADES = ("#eef2f7", "#f8f4ec")
_SECOND_COLOUR = "#7a3b9a"


def draw(outcome: DemoOutcome, path: Path) -> None:
    """Writes a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure = plt.figure(figsize=(13.0, 9.0), layout="constrained")
    grid = figure.add_gridspec(3, 2, height_ratios=(1.0, 0.7, 1.1))
    _over_time(outcome, STEERED, figure.add_subplot(grid[0, :]), legend=True)
    if ADAPTIVE in outcome.plays:
        _over_time(outcome, ADAPTIVE, figure.add_subplot(grid[1, :]), legend=False)
    _speeds(outcome, figure.add_subplot(grid[2, 0]))
    _phases(outcome, figure.add_subplot(grid[2, 1]))
    figure.suptitle(
        f"Step times are imposed: {outcome.costs.source}.\nAcceptance is drawn from measured "
        "curves; scheduler, batching, shim, link and sidecar are real.",
        fontsize=8,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _colour(outcome: DemoOutcome, policy: str) -> str:
    return _STEERED_COLOUR if policy == STEERED else _COLOURS[outcome.others.index(policy)]


def _typical(plays: Sequence[StreamPlay]) -> StreamPlay:
    """The play whose speed is the median one."""
    return sorted(plays, key=lambda play: play.tokens_per_second)[len(plays) // 2]


def _over_time(outcome: DemoOutcome, policy: str, axes: "Axes", *, legend: bool) -> None:
    play = _typical(outcome.plays[policy])
    origin, steps = play.played.began[0], play.decode_steps
    batch = axes.twinx()
    batch.set_zorder(0)
    axes.set_zorder(1)
    axes.patch.set_visible(False)
    highest = max(7, *(step.gamma for step in steps))
    for number, (begin, end) in enumerate(play.edges):
        left, right = (begin - origin) / play.dilation, (end - origin) / play.dilation
        batch.axvspan(left, right, color=_SHADES[number % 2], linewidth=0)
        plan = outcome.stream.phases[number].plan
        if legend:
            axes.text(
                (left + right) / 2, highest + 0.6,
                f"{plan.name}\n{'+'.join(plan.kinds)} ×{plan.concurrency}",
                ha="center", va="bottom", fontsize=8,
            )  # fmt: skip
    times = [(step.began - origin) / play.dilation for step in steps]
    batch.fill_between(
        times, [step.batch_size for step in steps], step="post", color="#333333", alpha=0.15,
        linewidth=0,
    )  # fmt: skip
    colour = _colour(outcome, policy)
    axes.step(times, [step.gamma for step in steps], where="post", color=colour, linewidth=0.8)
    seconds = [
        (t, s) for t, s in zip(times, steps, strict=True) if s.gamma and s.drafter != "eagle3"
    ]
    if seconds:
        axes.plot(
            [t for t, _ in seconds], [s.gamma for _, s in seconds], "s", markersize=2,
            color=_SECOND_COLOUR, label=f"drafted by {seconds[0][1].drafter}",
        )  # fmt: skip
    probes = [(t, step.gamma) for t, step in zip(times, steps, strict=True) if step.probe]
    if probes:
        axes.plot(
            [t for t, _ in probes], [gamma for _, gamma in probes], "o", markersize=3,
            markerfacecolor="white", markeredgecolor=colour, linestyle="none", label="probe",
        )  # fmt: skip
    axes.set_ylim(-0.3, highest + (2.0 if legend else 0.6))
    axes.set_yticks(range(highest + 1))
    axes.set_xlim(0, play.seconds)
    axes.set_xlabel("seconds of the model's time")
    axes.set_ylabel(f"{policy}:\ndraft length γ", color=colour, fontsize=9)
    batch.set_ylabel("sequences decoding (grey)")
    batch.set_ylim(0, outcome.stream.max_concurrency * 1.3)
    if legend and (probes or seconds):
        axes.legend(loc="upper right", fontsize=8, frameon=False)


def _speeds(outcome: DemoOutcome, axes: "Axes") -> None:
    names = outcome.policies
    spreads = [outcome.rates(name) for name in names]
    places = range(len(names))
    axes.bar(
        places, [s.median for s in spreads], color=[_colour(outcome, n) for n in names], width=0.65
    )
    axes.vlines(places, [s.low for s in spreads], [s.high for s in spreads], color="black")
    for place, name, spread in zip(places, names, spreads, strict=True):
        label = f"{spread.median:.0f}"
        if name != STEERED:
            label += f"\nsteered\n×{outcome.ratio(name).median:.2f}"
        axes.text(place, spread.median / 2, label, ha="center", va="center", color="white")
    oracle = outcome.oracles[0].oracle.rate
    axes.axhline(oracle, color="black", linestyle=":", linewidth=1)
    axes.text(
        -0.45, oracle * 1.14, "dotted: the best arm of each phase, computed from the table",
        fontsize=8, va="bottom",
    )  # fmt: skip
    axes.set_xticks(list(places), names)
    axes.set_ylim(0, max(oracle, *(s.high for s in spreads)) * 1.25)
    axes.set_ylabel("tokens/s of the model's time")
    lost = "  ".join(
        f"{field.name} {getattr(outcome.lost[0], field.name):.1%}" for field in fields(LostTime)
    )
    axes.set_title("whole day", loc="left", fontsize=11)
    axes.set_xlabel(f"steered lost, by cause: {lost} (hidden)", fontsize=8)


def _phases(outcome: DemoOutcome, axes: "Axes") -> None:
    phases = outcome.stream.phases
    width = 0.8 / len(outcome.policies)
    for number, policy in enumerate(outcome.policies):
        shares = [outcome.phase_shares(policy, i).median for i in range(len(phases))]
        axes.bar(
            [i + number * width for i in range(len(phases))], shares, width=width,
            color=_colour(outcome, policy), label=policy,
        )  # fmt: skip
    axes.axhline(1.0, color="black", linestyle=":", linewidth=1)
    axes.set_xticks(
        [i + 0.4 - width / 2 for i in range(len(phases))],
        [f"{p.plan.name}\n×{p.plan.concurrency}" for p in phases], fontsize=8,
    )  # fmt: skip
    axes.set_title("tokens/s of each phase over those of its best arm", loc="left", fontsize=11)
    axes.legend(fontsize=8, ncols=2, loc="lower right")
