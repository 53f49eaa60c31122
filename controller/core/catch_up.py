"""What waking a drafter costs: the tokens it missed times what one of them takes.

A drafter misses what the engine generates while it sleeps (gamma = 0) or, in an engine whose
drafters do not follow the stream by themselves, while another drafter runs.
The rate starts at the profile's and follows the seconds that waking steps take beyond a plain one.
"""

from collections.abc import Mapping, Sequence

from controller.core.types import StepReport

# The rate's memory, in wakings, and the missed tokens that its first value weighs.
_WAKINGS = 50.0
_PRIOR_TOKENS = 1000.0


class CatchUp:
    """Missed tokens by drafter, and the price of one.  One object per engine.

    The price is a least-squares line through the origin: excess seconds over missed tokens.
    follow: in every step that is not asleep all drafters read along.
    """

    def __init__(
        self,
        drafters: Sequence[str],
        seconds_per_token: float,
        *,
        can_sleep: bool,
        follow: bool = False,
    ) -> None:
        self._missed = dict.fromkeys(drafters, 0.0)
        self._can_sleep = can_sleep
        self._apart = len(self._missed) > 1 and not follow
        # Where all keep up and have missed nothing there is nothing to do.
        self._asleep = self._apart
        self.use(seconds_per_token)

    def use(self, seconds_per_token: float) -> None:
        """Starts from a measured price."""
        self._weight = _PRIOR_TOKENS**2
        self._product = self._weight * seconds_per_token

    @property
    def seconds_per_token(self) -> float:
        """The price of a missed token, as known now."""
        return max(0.0, self._product / self._weight)

    def observe(self, report: StepReport, expected_seconds: float) -> bool:
        """Takes a step; True when it woke a drafter, so that its seconds are no plain step's.

        expected_seconds: of a plain step of this shape.
        """
        if report.gamma > 0 and not self._asleep:
            return False
        gained = report.batch_size + sum(k * n for k, n in enumerate(report.accepted_counts))
        runs = report.gamma > 0 or not self._can_sleep
        self._asleep = self._apart or not runs
        behind = self._missed[report.drafter]
        for name, missed in self._missed.items():
            if not runs or (self._apart and name != report.drafter):
                self._missed[name] = min(missed + gained, float(report.kv_tokens + gained))
            elif report.gamma > 0:
                self._missed[name] = 0.0
        woke = behind > 0 and runs and report.gamma > 0
        if woke and not (report.flags.after_gap or report.flags.first_use):
            excess = report.step_seconds - expected_seconds
            # A wild step must not make waking look dear for the next fifty.
            excess = min(excess, 4 * expected_seconds)
            keep = 1 - 1 / _WAKINGS
            self._product = keep * self._product + excess * behind
            self._weight = keep * self._weight + behind * behind
        return woke

    def seconds(self) -> Mapping[str, float]:
        """By drafter, what drafting with it in the next step costs beyond the step."""
        return {name: self.seconds_per_token * missed for name, missed in self._missed.items()}
