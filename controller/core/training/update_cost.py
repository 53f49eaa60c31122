"""Measures what an online update costs the steps beside it.

An update runs beside decode steps (another process, another stream) and slows them down: they
contend for processors, memory bandwidth or the GPU.  Its cost is the number of seconds by which all
of these steps together took longer than expected, from the hand-over to the landing.
"""

from dataclasses import dataclass

from controller.core.recorded_state import recorded
from controller.core.step_report import StepReport

# Before any update was observed: the share of a step's seconds lost, and the steps beside it.
_GUESSED_STEPS_LOST = 0.5
_GUESSED_STEPS_BESIDE = 2.0
# A step that took longer than so many expected ones was not slowed down by an update alone.
_MOST_STEPS_LOST = 3.0
_RATE_FLOOR = 0.05


@recorded("update_costs")
@dataclass(slots=True)
class _Paid:
    """Holds means over the updates of batches of about this size."""

    updates: int = 0
    lost: float = 0.0
    beside: float = 0.0


@recorded("update_price", "seconds _paid _open_lost _open_steps")
class UpdatePrice:
    """Estimates the seconds lost by an update, and the steps beside it; by batch size."""

    def __init__(self) -> None:
        self._paid: dict[int, _Paid] = {}
        self._open_lost = 0.0
        self._open_steps = 0
        self.seconds = 0.0

    def fold(self, report: StepReport, expected_seconds: float) -> float:
        """Takes a step and returns the seconds that it lost by an update."""
        flags = report.flags
        lost = 0.0
        if flags.updating:
            self._open_steps += 1
            if not flags.distorts_shape:
                most = _MOST_STEPS_LOST * expected_seconds
                lost = min(report.step_seconds - expected_seconds, most)
                self._open_lost += lost
        if report.update_seconds:
            self.seconds = report.update_seconds
            paid = self._paid.setdefault(report.batch_size.bit_length(), _Paid())
            paid.updates += 1
            rate = max(_RATE_FLOOR, 1 / paid.updates)
            paid.lost += rate * (self._open_lost - paid.lost)
            paid.beside += rate * (self._open_steps - paid.beside)
            self._open_lost, self._open_steps = 0.0, 0
        return lost

    @property
    def known(self) -> bool:
        """Whether any update was observed."""
        return bool(self._paid)

    def per_update(self, batch_size: int, step_seconds: float) -> float:
        """Returns the seconds that an update takes from the steps beside it, 0 or more."""
        paid = self._nearest(batch_size)
        return _GUESSED_STEPS_LOST * step_seconds if paid is None else max(0.0, paid.lost)

    def updates_per_round(self, batch_size: int, stride: int) -> float:
        """Returns the updates a round: what the stride asks for, limited by how long one takes."""
        paid = self._nearest(batch_size)
        beside = _GUESSED_STEPS_BESIDE if paid is None else paid.beside
        return 1 / max(stride, beside, 1.0)

    def _nearest(self, batch_size: int) -> _Paid | None:
        if not self._paid:
            return None
        bits = batch_size.bit_length()
        return self._paid[min(self._paid, key=lambda known: abs(known - bits))]
