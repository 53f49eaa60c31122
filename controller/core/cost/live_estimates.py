"""Estimates context lengths and the cost of prompts and changes of arm, from live steps alone."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from controller.core.recorded_state import recorded
from controller.core.step_report import StepReport

# Memory of an average of contexts in steps; idle steps until it adapts quickly, and until it fades.
_CONTEXT_STEPS = 20.0
_ADAPT_AFTER_STEPS = 100.0
_FADE_STEPS = 2000.0
# Octaves between batch sizes over which nearness falls to a third.
_NEAR_OCTAVES = 0.5
# The weight of the neighbours' mean, in steps.
_NEIGHBOUR_WEIGHT = 0.02
# The weight of the mean over all batch sizes.
_OVERALL_WEIGHT = 1e-3
# Memory of the price of prompts, in steps with prompt tokens; of their number, in all steps.
_PREFILL_MEMORY_STEPS = 64.0
_PROMPT_MEMORY_STEPS = 256.0
# Memory of the price of a switch, in switches, and the weight of the initial price of 0.
_MEMORY_SWITCHES = 50.0
_PRIOR_SWITCHES = 4.0
# One outlier must not make switching look expensive for the next fifty switches.
_EXCESS_MAX_STEPS = 2.0
# The price is known after this many switches.  After this many skipped switched steps in a row, a
# step is used with its switch.
_KNOWN_SWITCHES = 8.0
_SKIPPED_MAX = 4


@recorded("context_by_batch", "_means _steps _weights", mean="mean_tokens", seen="_last_steps")
class ContextByBatch:
    """Estimates the context of a sequence by batch size, as small batches may have long contexts.

    Each bucket of batch sizes has a moving average, shrunk towards the buckets near it:

        context_j = (n_j m_j + w l_j) / (n_j + w),   l_j = mean of the others, weighted by nearness

    with a small w, so that a bucket without steps has the context of its neighbours.  An average
    that was not used for a while adapts quickly when its batch size returns, and loses weight
    slowly until then.

    buckets: ascending batch sizes.  start: tokens, before any step.  mean_tokens: tokens per
    sequence, over all batch sizes.
    """

    def __init__(self, buckets: Sequence[int], start: float) -> None:
        octaves = np.log2(np.asarray(buckets, dtype=np.float64))
        nearness = np.exp(-np.abs(octaves[:, None] - octaves[None, :]) / _NEAR_OCTAVES)
        np.fill_diagonal(nearness, 0.0)
        self._nearness = nearness
        self.mean_tokens = start
        # Plain lists: each step reads and writes one entry.
        self._means = [start] * len(buckets)
        self._weights = [0.0] * len(buckets)
        self._last_steps = [0] * len(buckets)
        self._steps = 0

    def observe(self, bucket: int, kv_per_sequence: float) -> None:
        """Adds a step.  kv_per_sequence: mean context of its sequences, in tokens."""
        self._steps += 1
        memory_steps = min(_CONTEXT_STEPS, float(self._steps))
        self.mean_tokens += (kv_per_sequence - self.mean_tokens) / memory_steps
        weight = self._weights[bucket]
        if idle_steps := self._steps - self._last_steps[bucket] - 1:
            weight *= math.exp(-idle_steps / _ADAPT_AFTER_STEPS)
        weight = min(weight + 1, _CONTEXT_STEPS)
        self._means[bucket] += (kv_per_sequence - self._means[bucket]) / weight
        self._weights[bucket] = weight
        self._last_steps[bucket] = self._steps

    def by_bucket(self) -> NDArray[np.float64]:
        """Returns [buckets], tokens per sequence."""
        if self._steps == 0:
            return np.array(self._means)
        # [weights and totals, buckets]
        sums = np.array([self._weights, self._means])
        idle_steps = self._steps - np.array(self._last_steps)
        sums[0] *= np.exp(idle_steps / -_FADE_STEPS)
        sums[1] *= sums[0]
        weights, totals = sums
        # Where no near bucket has steps, the overall mean is used.
        near_weights, near_totals = sums @ self._nearness
        neighbour_means = (near_totals + _OVERALL_WEIGHT * self.mean_tokens) / (
            near_weights + _OVERALL_WEIGHT
        )
        context_tokens: NDArray[np.float64] = (totals + _NEIGHBOUR_WEIGHT * neighbour_means) / (
            weights + _NEIGHBOUR_WEIGHT
        )
        return context_tokens


@recorded("prefill_price", "_seconds _tokens _mean_tokens")
class PrefillPrice:
    """Estimates the cost of prompt tokens that a decode step processes beside its decoding.

        seconds per token = sum of (seconds of such steps - expected without) / sum of tokens

    Old steps fade.  Prompts add the same mean seconds to a step of any arm.  Where there are many,
    a longer draft has more value, because fewer steps have this overhead.
    """

    def __init__(self) -> None:
        self._seconds = self._tokens = 0.0
        self._mean_tokens = 0.0

    def observe(self, tokens: int, step_seconds: float, expected_seconds: float) -> None:
        """Adds a step with prompt tokens.  expected_seconds: of its decoding alone."""
        kept_share = 1 - 1 / _PREFILL_MEMORY_STEPS
        self._seconds = kept_share * self._seconds + max(step_seconds - expected_seconds, 0.0)
        self._tokens = kept_share * self._tokens + tokens

    def count_prompt_tokens(self, tokens: int) -> None:
        """Counts the prompt tokens of any step, 0 for most."""
        self._mean_tokens += (tokens - self._mean_tokens) / _PROMPT_MEMORY_STEPS

    def predict_seconds(self, tokens: float) -> float:
        """Returns the seconds that this many prompt tokens add to a step."""
        return tokens * self._seconds / self._tokens if self._tokens else 0.0

    @property
    def mean_seconds_per_step(self) -> float:
        """Returns the mean seconds that prompts add to a step, over recent steps."""
        return self.predict_seconds(self._mean_tokens)


@recorded("switch_price", "_switches _skipped", mean="_mean_seconds")
class SwitchPrice:
    """Estimates the cost of a change of arm: the excess seconds of the first step after it.

    It is the mean excess over a plain step, over the steps that the engine flagged as switched and
    whose arms have known plain costs.  It starts at 0 and is never below 0.  Until it is known, a
    switched step is not used as evidence about its arm's cost.
    """

    def __init__(self) -> None:
        self._mean_seconds = 0.0
        self._switches = _PRIOR_SWITCHES
        # Switched steps that were skipped since the last plain one.
        self._skipped = 0

    @property
    def seconds(self) -> float:
        """Returns the price of a switch, in seconds."""
        return max(0.0, self._mean_seconds)

    def observe(self, step_seconds: float, expected_seconds: float) -> None:
        """Adds a switched step.  expected_seconds: of a plain step of this shape."""
        max_excess = _EXCESS_MAX_STEPS * expected_seconds
        excess_seconds = max(-max_excess, min(max_excess, step_seconds - expected_seconds))
        self._switches = min(self._switches + 1, _MEMORY_SWITCHES)
        self._mean_seconds += (excess_seconds - self._mean_seconds) / self._switches

    def seconds_without_switch(self, report: StepReport) -> float | None:
        """Returns the step's seconds without the switch; None if they cannot be estimated yet."""
        seconds = report.step_seconds
        if not report.flags.switched:
            self._skipped = 0
            return seconds
        if self._switches < _PRIOR_SWITCHES + _KNOWN_SWITCHES:
            self._skipped += 1
            return None if self._skipped <= _SKIPPED_MAX else seconds
        # The initial weight of 0 guards against outliers; without it the mean is unbiased.
        switch_seconds = self.seconds * self._switches / (self._switches - _PRIOR_SWITCHES)
        if self._switches == _MEMORY_SWITCHES:
            switch_seconds = self.seconds
        return max(seconds - switch_seconds, 0.1 * seconds)
