"""Estimates the cost of waking a drafter.

The grid visits gamma = 0, where the drafter sleeps, between the other draft lengths.  Every round
therefore wakes it: the first step of the next arm reads the missed tokens before it drafts.  These
steps are in no cell.  Their extra time over their cell is a drafter pass plus a cost per missed
token (`controller.core.cost.catch_up_cost` learns both from live steps).

Wake-ups with similar backlogs show only the sum, and after a few tokens the pass dominates it.  The
pass is therefore assumed to take the time of the shortest draft minus that of plain decoding in the
smallest batch, an upper bound, unless wake-ups with large backlogs contradict it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.core.cost.catch_up_cost import DrafterBacklog
from controller.core.cost.profile import ProfileCell
from controller.core.engine_spec import Arm, EngineSpec, kept_together
from controller.core.step_report import StepReport

# Least number of wake-ups for an estimate.
_LEAST_WAKINGS = 5
# A step that takes this many times its cell's time was disturbed by something else.
_WILD = 4.0
# Weight of the assumed pass, in wake-ups.
_ASSUMED_WAKINGS = 4.0


@dataclass(frozen=True, slots=True)
class WakeUp:
    """A step that first read `backlog` missed tokens."""

    arm: Arm
    batch_size: int
    kv_tokens: int
    backlog: float
    seconds: float


class WakeUps:
    """Collects the wake-ups from all reports, in order."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._found: list[WakeUp] = []
        self.begin_load()

    def begin_load(self) -> None:
        """Resets the backlog: the requests of the load before have ended."""
        names = [drafter.name for drafter in self._spec.drafters]
        self._backlog = DrafterBacklog(names, self._spec.able, kept_together(self._spec.drafters))

    def observe(self, report: StepReport) -> None:
        """Takes the report of any step."""
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
        """Returns the seconds per missed token, at least 0, and the number of wake-ups.

        Returns (0, 0) if there are too few.  cells: the fitted grid, at `kv_per_sequence` tokens of
        context.  Least squares, with a ridge penalty on the difference to the assumed pass.
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
    """Returns an upper bound of the seconds of a drafter pass; 0 if the grid does not show it."""
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
    """Returns seconds per token.  All arrays: [wake-ups].  A pass is in [0, the assumed time]."""
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
