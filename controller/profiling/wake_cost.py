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
from controller.core.engine_spec import Arm, EngineSpec, drafters_in_sync
from controller.core.step_report import StepReport

# Least number of wake-ups for an estimate.
_WAKE_UPS_MIN = 5
# A step that takes this many times its cell's time was disturbed by something else.
_OUTLIER_RATIO = 4.0
# Weight of the assumed pass, in wake-ups.
_ASSUMED_PASS_WEIGHT = 4.0


@dataclass(frozen=True, slots=True)
class WakeUp:
    """A step that first read `backlog_tokens` missed tokens."""

    arm: Arm
    batch_size: int
    kv_tokens: int
    backlog_tokens: float
    seconds: float


class WakeUpRecorder:
    """Collects the wake-ups from all reports, in order."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._wake_ups: list[WakeUp] = []
        self.begin_load()

    def begin_load(self) -> None:
        """Resets the backlog: the requests of the load before have ended."""
        names = [drafter.name for drafter in self._spec.drafters]
        self._backlog = DrafterBacklog(
            names, self._spec.remaining_capabilities, drafters_in_sync(self._spec.drafters)
        )

    def observe(self, report: StepReport) -> None:
        """Takes the report of any step."""
        backlog = self._backlog.observe(report)
        if backlog and not (report.flags.is_unusable_for_cost or report.flags.unsteered):
            self._wake_ups.append(
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
        step_seconds = {(cell.arm, cell.batch_size): cell.step_seconds for cell in cells}
        backlogs, extra_seconds, pass_seconds = [], [], []
        for wake_up in self._wake_ups:
            expected_seconds = step_seconds.get((wake_up.arm, wake_up.batch_size))
            if expected_seconds is None:
                continue
            extra_kv_tokens = wake_up.kv_tokens - wake_up.batch_size * kv_per_sequence
            expected_seconds += seconds_per_kv_token * extra_kv_tokens
            if wake_up.seconds < _OUTLIER_RATIO * expected_seconds:
                backlogs.append(wake_up.backlog_tokens)
                extra_seconds.append(wake_up.seconds - expected_seconds)
                pass_seconds.append(_pass_seconds(cells, wake_up.arm.drafter))
        if len(backlogs) < _WAKE_UPS_MIN:
            return 0.0, 0
        return max(
            0.0,
            _seconds_per_token(np.array(backlogs), np.array(extra_seconds), np.array(pass_seconds)),
        ), len(backlogs)


def _pass_seconds(cells: Sequence[ProfileCell], drafter: str) -> float:
    """Returns an upper bound of the seconds of a drafter pass; 0 if the grid does not show it."""
    smallest_batch = min(cell.batch_size for cell in cells)
    plain_seconds = [
        cell.step_seconds for cell in cells if cell.batch_size == smallest_batch and not cell.gamma
    ]
    draft_seconds = {
        cell.gamma: cell.step_seconds
        for cell in cells
        if cell.batch_size == smallest_batch and cell.gamma and cell.drafter == drafter
    }
    return (
        max(0.0, draft_seconds[min(draft_seconds)] - min(plain_seconds))
        if plain_seconds and draft_seconds
        else 0.0
    )


def _seconds_per_token(
    backlogs: NDArray[np.float64],
    extra_seconds: NDArray[np.float64],
    pass_seconds: NDArray[np.float64],
) -> float:
    """Returns seconds per token.  All arrays: [wake-ups].  A pass is in [0, the assumed time]."""
    wake_up_weight = len(backlogs) + _ASSUMED_PASS_WEIGHT
    unexplained_seconds = extra_seconds - pass_seconds
    spread = wake_up_weight * (backlogs @ backlogs) - backlogs.sum() ** 2
    slope = float(
        (
            wake_up_weight * (backlogs @ unexplained_seconds)
            - backlogs.sum() * unexplained_seconds.sum()
        )
        / spread
    )
    pass_excess = float(unexplained_seconds.sum() - slope * backlogs.sum()) / wake_up_weight
    if pass_excess >= 0:
        return float(backlogs @ unexplained_seconds / (backlogs @ backlogs))
    if pass_excess <= -float(pass_seconds.mean()):
        return float(backlogs @ extra_seconds / (backlogs @ backlogs))
    return slope
