"""Estimates what waking a drafter costs: its backlog times the seconds of one token.

The rate starts at the profile's and follows the seconds that waking steps take beyond a plain one.
"""

from collections.abc import Mapping, Sequence

from controller.core.cost.drafter_backlog import DrafterBacklog
from controller.core.engine_spec import Capabilities
from controller.core.recorded_state import recorded
from controller.core.step_report import StepReport

# The rate's memory, in wakings, and the missed tokens that its first value weighs.
_WAKINGS = 50.0
_PRIOR_TOKENS = 1000.0


@recorded("catch_up", "_backlog _product _weight")
class CatchUp:
    """Tracks each drafter's backlog and the price of a token.  One object per engine.

    The price is a least-squares line through the origin: excess seconds over missed tokens.
    """

    def __init__(
        self, drafters: Sequence[str], seconds_per_token: float, able: Capabilities
    ) -> None:
        self._backlog = DrafterBacklog(drafters, able)
        self.use(seconds_per_token)

    def use(self, seconds_per_token: float) -> None:
        """Restarts from a measured price."""
        self._weight = _PRIOR_TOKENS**2
        self._product = self._weight * seconds_per_token

    def use_capabilities(self, able: Capabilities) -> None:
        """Sets what the engine is able to do from now on."""
        self._backlog.use(able)

    @property
    def seconds_per_token(self) -> float:
        """The present estimate of the price of a missed token."""
        return max(0.0, self._product / self._weight)

    def observe(self, report: StepReport, expected_seconds: float) -> bool:
        """Takes a step; True if it woke a drafter, so that it was not a plain step.

        expected_seconds: of a plain step of this shape.
        """
        behind = self._backlog.observe(report)
        if behind > 0 and not (report.flags.after_gap or report.flags.first_use):
            excess = report.step_seconds - expected_seconds
            # One outlier must not make waking look expensive for the next fifty.
            excess = min(excess, 4 * expected_seconds)
            keep = 1 - 1 / _WAKINGS
            self._product = keep * self._product + excess * behind
            self._weight = keep * self._weight + behind * behind
        return behind > 0

    def seconds(self) -> Mapping[str, float]:
        """Returns by drafter what using it in the next step costs beyond the step."""
        rate = self.seconds_per_token
        return {name: rate * backlog for name, backlog in self._backlog.now.items()}
