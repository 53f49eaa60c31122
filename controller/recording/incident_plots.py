"""Draws the incident report's plots: what ran, the batch, the acceptance and the prices."""

import numpy as np
from numpy.typing import NDArray

from controller.recording.html_page import new_figure, svg
from controller.recording.window import Window

_POINTS = 400
_COLOURS = (
    "#0b6e4f", "#c8553d", "#4062bb", "#e0a030", "#8d5a97", "#59a5d8", "#7a7a7a", "#b8c04a",
)  # fmt: skip


def timeline(window: Window) -> str:
    """Draft length by drafter, batch, acceptance, and step seconds; "" without a step."""
    if not window.steps:
        return ""
    wall = np.array(window.steps.wall)
    seconds = wall - wall[0]
    which = _bins(seconds)
    points = np.array([float(seconds[part].mean()) for part in which])
    arms = np.array(window.steps.arm)
    gammas = np.array([arm.gamma for arm in window.arms])[arms]
    names = list(dict.fromkeys(arm.drafter for arm in window.arms))
    drafter = np.array([names.index(arm.drafter) for arm in window.arms])[arms]
    batch = np.array(window.steps.batch)
    decoded = np.array(window.steps.decoded)
    gained = np.array(window.steps.tokens) / np.maximum(decoded, 1)

    figure = new_figure(9.5, 8.0)
    draft, size, gain, price = figure.subplots(4, 1, sharex=True)
    for i, name in enumerate(names):
        mine = _means(which, gammas, drafter == i)
        colour = _COLOURS[i % len(_COLOURS)]
        draft.plot(points, mine, ".-", color=colour, label=plain(name), markersize=3, linewidth=1)
    draft.set_ylabel("draft length")
    draft.legend(fontsize=8, frameon=False, ncols=4, loc="upper right")
    size.plot(points, _means(which, batch), color="#555555")
    size.set_ylabel("batch size")
    gain.plot(points, _means(which, gained, decoded > 0), color=_COLOURS[0])
    gain.set_ylabel("tokens a\nsequence and step")
    usual = np.array(window.steps.odd) == 0
    for values, colour, name in (
        (window.steps.seconds, _COLOURS[2], "observed"),
        (window.steps.predicted, _COLOURS[1], "predicted"),
    ):
        line = 1e3 * _means(which, np.array(values), usual)
        price.plot(points, line, color=colour, label=name, linewidth=1)
    price.set_ylabel("step, ms")
    price.legend(fontsize=8, frameon=False, ncols=2, loc="upper right")
    price.set_xlabel("seconds since the first step")
    for axes in (draft, size, gain, price):
        axes.grid(alpha=0.3)
        _mark(axes, window, float(wall[0]))
    return svg(figure, "draft length, batch size, tokens a step and step seconds over time")


def _mark(axes: object, window: Window, start: float) -> None:
    """Changes of overrides as lines, steps without a lease as areas."""
    for spell in window.spells:
        for moment in (spell.began_at, spell.ended_at):
            if moment is not None:
                axes.axvline(moment - start, color="#8d5a97", linewidth=0.8, linestyle="--")  # type: ignore[attr-defined]
    for alone in window.alone[:200]:
        axes.axvspan(alone.began_at - start, alone.ended_at - start, color="#b3261e", alpha=0.15)  # type: ignore[attr-defined]


def _bins(seconds: NDArray[np.float64]) -> list[NDArray[np.int64]]:
    """Indices of the steps of each stretch of time that has any."""
    width = max(float(seconds[-1]), 1e-9) / _POINTS
    bins = np.minimum((seconds / width).astype(np.int64), _POINTS - 1)
    edges = np.flatnonzero(np.diff(bins)) + 1
    return [part.astype(np.int64) for part in np.split(np.arange(len(bins)), edges)]


def _means(
    parts: list[NDArray[np.int64]],
    values: NDArray[np.float64] | NDArray[np.int64],
    counting: NDArray[np.bool_] | None = None,
) -> NDArray[np.float64]:
    """[parts] means, no number where none counts."""
    found = []
    for part in parts:
        chosen = part if counting is None else part[counting[part]]
        found.append(float(values[chosen].mean()) if len(chosen) else np.nan)
    return np.array(found)


def plain(name: str) -> str:
    """A name that a plot shows as it is: no formulas, no signs that its font has not."""
    shown = name.encode("ascii", "backslashreplace").decode()
    shown = "".join(c if c.isprintable() else "?" for c in shown).replace("$", r"\$")
    return f" {shown}" if shown.startswith("_") else shown
