"""Finds what waking a drafter costs.

The grid visits gamma = 0, with the drafter asleep, between the other draft lengths, so every round
wakes it: the first step of the next arm reads what was missed before it drafts.  Those steps are in
no cell.  What they take beyond their cell's, over the tokens that were missed, is the price.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from controller.core.cost.drafter_backlog import DrafterBacklog
from controller.core.cost.profile import ProfileCell
from controller.core.engine_spec import Arm, EngineSpec
from controller.core.step_report import StepReport

# Fewer say nothing.
_LEAST_WAKINGS = 5
# A step that takes so many times its cell's was hit by something else.
_WILD = 4.0


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
        self._backlog = DrafterBacklog(names, self._spec.able)

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

        cells: the fitted grid, at `kv_per_sequence` tokens of context.  By least squares through
        the origin.
        """
        plain = {(cell.arm, cell.batch_size): cell.step_seconds for cell in cells}
        points = []
        for waking in self._found:
            usual = plain.get((waking.arm, waking.batch_size))
            if usual is None:
                continue
            more = waking.kv_tokens - waking.batch_size * kv_per_sequence
            usual += seconds_per_kv_token * more
            if waking.seconds < _WILD * usual:
                points.append((waking.backlog, waking.seconds - usual))
        if len(points) < _LEAST_WAKINGS:
            return 0.0, 0
        backlog, excess = np.array(points).T
        return max(0.0, float(backlog @ excess / (backlog @ backlog))), len(points)
