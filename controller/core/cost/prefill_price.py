"""Estimates what prompt tokens cost that a decode step reads beside its decoding.

    seconds a token = sum of (seconds of such steps - expected seconds without) / sum of tokens

Old steps fade.  What prompts add to a step on average, they add whatever the arm: where many are
read, a longer draft is worth more, because fewer steps pay for them.
"""

from controller.core.recorded_state import recorded

# Memory in steps: of the price, those with prompt tokens; of how many there are, all.
_PRICED_STEPS = 64.0
_STEPS = 256.0


@recorded("prefill_price", "_seconds _tokens _mean_tokens")
class PrefillPrice:
    """Holds the estimate for one engine."""

    def __init__(self) -> None:
        self._seconds = self._tokens = 0.0
        self._mean_tokens = 0.0

    def observe(self, tokens: int, step_seconds: float, expected_seconds: float) -> None:
        """Takes a step that has read prompts.  expected_seconds: of its decoding alone."""
        keep = 1 - 1 / _PRICED_STEPS
        self._seconds = keep * self._seconds + max(step_seconds - expected_seconds, 0.0)
        self._tokens = keep * self._tokens + tokens

    def count(self, tokens: int) -> None:
        """Counts the prompt tokens of any step, 0 for most."""
        self._mean_tokens += (tokens - self._mean_tokens) / _STEPS

    def seconds_of(self, tokens: float) -> float:
        """Returns the seconds that so many prompt tokens add to a step."""
        return tokens * self._seconds / self._tokens if self._tokens else 0.0

    @property
    def seconds_a_step(self) -> float:
        """Returns the seconds that prompts add to a step, on average over all of late."""
        return self.seconds_of(self._mean_tokens)
