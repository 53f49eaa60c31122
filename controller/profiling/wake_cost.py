"""Finds what waking a drafter costs.

The grid visits gamma = 0, with the drafter asleep, between the other draft lengths, so every round
wakes it: the first step of the next arm reads what was missed before it drafts.  Those steps are in
no cell.  What they take beyond their cell's is a pass of the drafter and a price for each token
that was missed (`controller.core.cost.catch_up_cost` learns both from live steps).

Wakings that missed alike show only the sum, and after a few tokens nearly all of it is the pass.
The pass is therefore taken to be what one drafter pass takes at most, the shortest draft over plain
decoding in the smallest batch, as far as wakings that missed many tokens do not say otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.core.cost.catch_up_cost import DrafterBacklog
from controller.core.cost.profile import ProfileCell
from controller.core.engine_spec import Arm, EngineSpec, kept_together
from controller.core.step_report import StepReport

# Fewer say nothing.
_LEAST_WAKINGS = 5
# A step that takes so many times its cell's was hit by something else.
_WILD = 4.0
# The wakings that what is assumed of a pass weighs.
_ASSUMED_WAKINGS = 4.0


@dataclass(frozen=True, slots=True)
class WakeUp:
    """A step that read `missed` tokens first."""

    arm: Arm
    batch_size: int
    kv_tokens: int
    backlog: float
    seconds: float


class WakeUps:
    """Takes every report, in order."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._found: list[WakeUp] = []
        self.begin_load()

    def begin_load(self) -> None:
        """The requests of before are gone, and nobody will read what they had missed."""
        names = [drafter.name for drafter in self._spec.drafters]
        self._backlog = DrafterBacklog(names, self._spec.able, kept_together(self._spec.drafters))

    def observe(self, report: StepReport) -> None:
        """One step of the engine, of whatever batch."""
        backlog = self._backlog.observe(report)
        if backlog and not (report.flags.distorts_cost or report.flags.unsteered):
            self._found.append(
                WakeUp(
                    report.arm, report.batch_size, report.kv_tokens, backlog, report.step_seconds
                )
            )

    def seconds_per_token(
        self, cells: Sequence[ProfileCell], kv_per_sequence: float, seconds_per_kv_token: float
    ) -> tuple[float, int]:
        """The price of a missed token, at least 0, and the wakings behind it; (0, 0): too few.

        cells: the fitted grid, at `kv_per_sequence` tokens of context.  By least squares, with a
        ridge penalty on what a pass differs from the assumed one.
        """
        plain = {(cell.arm, cell.batch_size): cell.step_seconds for cell in cells}
        missed, beyond, passes = [], [], []
        for waking in self._found:
            usual = plain.get((waking.arm, waking.batch_size))
            if usual is None:
                continue
            more = waking.kv_tokens - waking.batch_size * kv_per_sequence
            usual += seconds_per_kv_token * more
            if waking.seconds < _WILD * usual:
                missed.append(waking.backlog)
                beyond.append(waking.seconds - usual)
                passes.append(_pass_seconds(cells, waking.arm.drafter))
        if len(missed) < _LEAST_WAKINGS:
            return 0.0, 0
        return max(0.0, _slope(np.array(missed), np.array(beyond), np.array(passes))), len(missed)


def _pass_seconds(cells: Sequence[ProfileCell], drafter: str) -> float:
    """Returns what a pass of a drafter takes at most; 0 where the grid does not show it."""
    least = min(cell.batch_size for cell in cells)
    plain = [cell.step_seconds for cell in cells if cell.batch_size == least and not cell.gamma]
    drafts = {
        cell.gamma: cell.step_seconds
        for cell in cells
        if cell.batch_size == least and cell.gamma and cell.drafter == drafter
    }
    return max(0.0, drafts[min(drafts)] - min(plain)) if plain and drafts else 0.0


def _slope(
    missed: NDArray[np.float64], beyond: NDArray[np.float64], passes: NDArray[np.float64]
) -> float:
    """Returns seconds for each token; [wakings] each.  A pass takes between 0 and the assumed."""
    wakings = len(missed) + _ASSUMED_WAKINGS
    rest = beyond - passes
    spread = wakings * (missed @ missed) - missed.sum() ** 2
    slope = float((wakings * (missed @ rest) - missed.sum() * rest.sum()) / spread)
    differs = float(rest.sum() - slope * missed.sum()) / wakings
    if differs >= 0:
        return float(missed @ rest / (missed @ missed))
    if differs <= -float(passes.mean()):
        return float(missed @ beyond / (missed @ missed))
    return slope
