"""Prints the outcome as one table for a person."""

from collections.abc import Sequence

from lab.harness.foreign_load import DOUBTFUL_CORES
from lab.harness.terminal import Terminal
from lab.paced.envelope.arms import name_of
from lab.paced.envelope.outcome import DFLASH, MTP, OFF, STEERED, Point, Run, agreeing

# Arms that ran less are left out of the table.
_LEAST_SHOWN = 0.1


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
    drafters, arms = agreeing(points)
    terminal.say(
        f"By runs the published drafter wins at {drafters} of {len(points)} concurrencies, at "
        f"{arms} with the published draft length. {label(source)}"
    )
    busiest = max(point.foreign_cores for point in points)
    if busiest > DOUBTFUL_CORES:
        terminal.say(
            f"Other programs kept up to {busiest:.1f} cores busy meanwhile. That delays what the "
            "sidecar decides; steps that missed their pace for it are counted."
        )


def row(point: Point) -> list[str]:
    """The cells of a concurrency."""
    rates = [point.runs[policy].rate for policy in (OFF, MTP, DFLASH, STEERED)]
    return [
        str(point.concurrency),
        *(name_of(a) for a in (point.published_winner, point.table_winner, point.winner)),
        *(f"{rate:.0f}" for rate in rates),
        f"{point.steered_share:.3f}",
        shares(point.runs[STEERED]),
    ]


def shares(run: Run) -> str:
    """The arms that ran most, with their share of the steps."""
    shown = {arm: share for arm, share in run.shares.items() if share >= _LEAST_SHOWN}
    return ", ".join(f"{name_of(arm)} {share:.0%}" for arm, share in shown.items())
