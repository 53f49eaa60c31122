"""Estimates what a change of arm costs: the seconds that the first step of an arm takes too long.

It is a mean over the steps that the engine flagged as switched, of arms whose plain steps are
known, beyond what a plain step takes.  It starts at nothing, and is never below 0.
"""

from controller.core.recorded_state import recorded

# The estimate's memory, in switches, and the switches that the price of nothing weighs at first.
_SWITCHES = 50.0
_FREE_SWITCHES = 4.0
# One outlier must not make switching look expensive for the next fifty.
_EXCESS_MAX = 2.0


@recorded("switch_price", "_mean _switches")
class SwitchPrice:
    """Holds the estimate for one engine."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._switches = _FREE_SWITCHES

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
