"""Estimates what a change of arm costs: the seconds that the first step of an arm takes too long.

It is a mean over the steps that the engine flagged as switched, of arms whose plain steps are
known, beyond what a plain step takes.  It starts at nothing, and is never below 0.  Until it is
known, what a switched step takes says nothing about its arm.
"""

from controller.core.recorded_state import recorded
from controller.core.step_report import StepReport

# The estimate's memory, in switches, and the switches that the price of nothing weighs at first.
_SWITCHES = 50.0
_FREE_SWITCHES = 4.0
# One outlier must not make switching look expensive for the next fifty.
_EXCESS_MAX = 2.0
# The price is known after so many switches.  Where every step is switched, it has to be guessed.
_KNOWN = 8.0
_SKIPPED_MAX = 4


@recorded("switch_price", "_mean _switches _skipped")
class SwitchPrice:
    """Holds the estimate for one engine."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._switches = _FREE_SWITCHES
        # Switched steps that were left out since the last plain one.
        self._skipped = 0

    @property
    def seconds(self) -> float:
        """Returns the price of a switch, in seconds."""
        return max(0.0, self._mean)

    def observe(self, step_seconds: float, expected_seconds: float) -> None:
        """Takes a switched step.  expected_seconds: of a plain step of this shape."""
        most = _EXCESS_MAX * expected_seconds
        excess = max(-most, min(most, step_seconds - expected_seconds))
        self._switches = min(self._switches + 1, _SWITCHES)
        self._mean += (excess - self._mean) / self._switches

    def without(self, report: StepReport) -> float | None:
        """Returns the step's seconds without the switch; None while that cannot be told."""
        seconds = report.step_seconds
        if not report.flags.switched:
            self._skipped = 0
            return seconds
        if self._switches < _FREE_SWITCHES + _KNOWN:
            self._skipped += 1
            return None if self._skipped <= _SKIPPED_MAX else seconds
        # The switches that cost nothing are there against outliers: without them the mean is true.
        price = self.seconds * self._switches / (self._switches - _FREE_SWITCHES)
        if self._switches == _SWITCHES:
            price = self.seconds
        return max(seconds - price, 0.1 * seconds)
