"""Draws the demo's picture: draft lengths over time, speeds and acceptance lengths."""

from pathlib import Path
from typing import TYPE_CHECKING

from lab.demo.compare import DemoOutcome
from lab.harness.sidecar import OWN_DRAFTER

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DOMAIN_COLOURS = {
    "code": "#4c78a8", "prose": "#f2a65a", "json": "#72b07a", "csv": "#b279a2", "mixed": "#9d9d9d",
}  # fmt: skip
_POLICY_COLOURS = ("#9d9d9d", "#4c78a8", "#b279a2", "#d1495b")
_STEERED_COLOUR = _POLICY_COLOURS[-1]
_BLOCK_COLOUR = "#7a3b9a"


def draw(outcome: DemoOutcome, path: Path) -> None:
    """Writes a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure = plt.figure(figsize=(12.5, 8.2), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(1.15, 1.0))
    _over_time(outcome, figure.add_subplot(grid[0, :]))
    _speed(outcome, figure.add_subplot(grid[1, 0]))
    _acceptance(outcome, figure.add_subplot(grid[1, 1]))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _typical_repeat(outcome: DemoOutcome) -> int:
    """The index of the steered play whose speed is the median one."""
    plays = outcome.steered.plays
    order = sorted(range(len(plays)), key=lambda i: plays[i].tokens_per_second)
    return order[len(order) // 2]


def _over_time(outcome: DemoOutcome, axes: "Axes") -> None:
    repeat = _typical_repeat(outcome)
    phases = outcome.steered.plays[repeat].phases
    origin = phases[0].started
    samples = outcome.watched[repeat]
    batch = axes.twinx()
    batch.set_zorder(0)
    axes.set_zorder(1)
    axes.patch.set_visible(False)
    for played in phases:
        left, right = played.started - origin, played.started + played.seconds - origin
        colour = _DOMAIN_COLOURS[played.phase.domain]
        batch.axvspan(left, right, color=colour, alpha=0.22, linewidth=0)
        axes.text(
            (left + right) / 2, 7.75, f"{played.phase.domain}\n×{played.phase.concurrency}",
            ha="center", va="bottom", fontsize=9,
        )  # fmt: skip
    times = [sample.at - origin for sample in samples]
    batch.fill_between(
        times, [sample.batch_size for sample in samples], step="post", color="#333333", alpha=0.16,
        linewidth=0,
    )  # fmt: skip
    axes.step(
        times, [sample.gamma for sample in samples], where="post", color=_STEERED_COLOUR,
        linewidth=1.2,
    )  # fmt: skip
    blocks = [sample for sample in samples if sample.gamma and sample.drafter != OWN_DRAFTER]
    if blocks:
        axes.plot(
            [sample.at - origin for sample in blocks], [sample.gamma for sample in blocks], "s",
            markersize=3, color=_BLOCK_COLOUR, label=f"drafted by {blocks[0].drafter}",
        )  # fmt: skip
    probes = [sample for sample in samples if sample.probe]
    axes.plot(
        [sample.at - origin for sample in probes], [sample.gamma for sample in probes], "o",
        markersize=4, markerfacecolor="white", markeredgecolor=_STEERED_COLOUR, label="probe",
    )  # fmt: skip
    axes.set_ylim(-0.3, 9.0)
    axes.set_yticks(range(8))
    axes.set_xlim(0, phases[-1].started + phases[-1].seconds - origin)
    axes.set_xlabel("seconds")
    axes.set_ylabel("draft length γ", color=_STEERED_COLOUR)
    batch.set_ylabel("sequences decoding (grey)")
    batch.set_ylim(-0.3 * 2, 9.0 * 2)  # twice the γ axis: sixteen sequences reach γ = 8
    batch.set_yticks(range(0, 17, 4))
    if probes or blocks:
        axes.legend(
            loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, fontsize=8, frameon=False
        )
    axes.set_title(
        f"steered: draft length over time, sampled ten times a second (repeat {repeat + 1})",
        loc="left", fontsize=11,
    )  # fmt: skip


def _speed(outcome: DemoOutcome, axes: "Axes") -> None:
    names = [policy.policy for policy in outcome.policies]
    spreads = [policy.tokens_per_second() for policy in outcome.policies]
    places = range(len(names))
    axes.bar(places, [s.median for s in spreads], color=_POLICY_COLOURS, width=0.65)
    axes.vlines(places, [s.low for s in spreads], [s.high for s in spreads], color="black")
    for place, policy, spread in zip(places, outcome.policies, spreads, strict=True):
        axes.plot([place] * len(spread.values), spread.values, "_", color="black", markersize=9)
        label = f"{spread.median:.0f}"
        if policy is not outcome.steered:
            label += f"\nsteered ×{outcome.ratio(policy).median:.2f}"
        axes.text(place, spread.high * 1.01, label, ha="center", va="bottom", fontsize=9)
    axes.set_xticks(list(places), names)
    axes.set_ylim(0, max(s.high for s in spreads) * 1.18)
    axes.set_ylabel("tokens/s")
    repeats = len(spreads[0].values)
    axes.set_title(f"whole stream: median and range of {repeats}", loc="left", fontsize=11)


def _acceptance(outcome: DemoOutcome, axes: "Axes") -> None:
    drafting = outcome.policies[1:]
    domains = list(drafting[0].acceptance_by_domain())
    width = 0.8 / len(drafting)
    for index, (policy, colour) in enumerate(zip(drafting, _POLICY_COLOURS[1:], strict=True)):
        values = policy.acceptance_by_domain()
        axes.bar(
            [place + index * width for place in range(len(domains))],
            [values[domain] for domain in domains],
            width * 0.92, color=colour, label=policy.policy,
        )  # fmt: skip
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(domains))], domains)
    axes.set_ylabel("tokens per sequence and step")
    axes.set_ylim(0.8, axes.get_ylim()[1] * 1.1)
    axes.legend(fontsize=8, ncols=len(drafting), loc="upper left")
    axes.set_title("acceptance length, at the γ that ran", loc="left", fontsize=11)
