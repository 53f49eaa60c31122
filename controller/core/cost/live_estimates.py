"""Estimates context lengths and the cost of prompts and changes of arm, from live steps alone."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from controller.core.recorded_state import recorded
from controller.core.settings import PlannerSettings
from controller.core.step_report import StepReport


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

    def __init__(self, buckets: Sequence[int], start: float, settings: PlannerSettings) -> None:
        self._octaves = np.log2(np.asarray(buckets, dtype=np.float64))
        self.use_settings(settings)
        self.mean_tokens = start
        # Plain lists: each step reads and writes one entry.
        self._means = [start] * len(buckets)
        self._weights = [0.0] * len(buckets)
        self._last_steps = [0] * len(buckets)
        self._steps = 0

    def use_settings(self, settings: PlannerSettings) -> None:
        """Uses these settings from now on and keeps the averages."""
        self._settings = settings
        distance = np.abs(self._octaves[:, None] - self._octaves[None, :])
        self._nearness = np.exp(distance / -settings.context_near_octaves)
        np.fill_diagonal(self._nearness, 0.0)

    def observe(self, bucket: int, kv_per_sequence: float) -> None:
        """Adds a step.  kv_per_sequence: mean context of its sequences, in tokens."""
        self._steps += 1
        memory_steps = min(self._settings.context_steps, float(self._steps))
        self.mean_tokens += (kv_per_sequence - self.mean_tokens) / memory_steps
        weight = self._weights[bucket]
        if idle_steps := self._steps - self._last_steps[bucket] - 1:
            weight *= math.exp(-idle_steps / self._settings.context_adapt_steps)
        weight = min(weight + 1, self._settings.context_steps)
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
        sums[0] *= np.exp(idle_steps / -self._settings.context_fade_steps)
        sums[1] *= sums[0]
        settings, (weights, totals) = self._settings, sums
        # Where no near bucket has steps, the overall mean is used.
        near_weights, near_totals = sums @ self._nearness
        overall_weight, neighbour_weight = (
            settings.context_overall_weight,
            settings.context_neighbour_weight,
        )
        neighbour_means = (near_totals + overall_weight * self.mean_tokens) / (
            near_weights + overall_weight
        )
        context_tokens: NDArray[np.float64] = (totals + neighbour_weight * neighbour_means) / (
            weights + neighbour_weight
        )
        return context_tokens


@recorded("prefill_price", "_seconds _tokens _mean_tokens")
class PrefillPrice:
    """Estimates the cost of prompt tokens that a decode step processes beside its decoding.

        seconds per token = sum of (seconds of such steps - expected without) / sum of tokens

    Old steps fade.  Prompts add the same mean seconds to a step of any arm.  Where there are many,
    a longer draft has more value, because fewer steps have this overhead.
    """

    def __init__(self, settings: PlannerSettings) -> None:
        self._settings = settings
        self._seconds = self._tokens = 0.0
        self._mean_tokens = 0.0

    def use_settings(self, settings: PlannerSettings) -> None:
        """Uses these settings from now on and keeps the price."""
        self._settings = settings

    def observe(self, tokens: int, step_seconds: float, expected_seconds: float) -> None:
        """Adds a step with prompt tokens.  expected_seconds: of its decoding alone."""
        kept_share = 1 - 1 / self._settings.prefill_memory_steps
        self._seconds = kept_share * self._seconds + max(step_seconds - expected_seconds, 0.0)
        self._tokens = kept_share * self._tokens + tokens

    def count_prompt_tokens(self, tokens: int) -> None:
        """Counts the prompt tokens of any step, 0 for most."""
        self._mean_tokens += (tokens - self._mean_tokens) / self._settings.prompt_memory_steps

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

    def __init__(self, settings: PlannerSettings) -> None:
        self._settings = settings
        self._mean_seconds = 0.0
        self._switches = self._settings.switch_prior
        # Switched steps that were skipped since the last plain one.
        self._skipped = 0

    @property
    def seconds(self) -> float:
        """Returns the price of a switch, in seconds."""
        return max(0.0, self._mean_seconds)

    def use_settings(self, settings: PlannerSettings) -> None:
        """Uses these settings from now on and keeps the price."""
        self._settings = settings

    def observe(self, step_seconds: float, expected_seconds: float) -> None:
        """Adds a switched step.  expected_seconds: of a plain step of this shape."""
        max_excess = self._settings.switch_excess_max * expected_seconds
        excess_seconds = max(-max_excess, min(max_excess, step_seconds - expected_seconds))
        self._switches = min(self._switches + 1, self._settings.switch_memory)
        self._mean_seconds += (excess_seconds - self._mean_seconds) / self._switches

    def seconds_without_switch(self, report: StepReport) -> float | None:
        """Returns the step's seconds without the switch; None if they cannot be estimated yet."""
        seconds = report.step_seconds
        if not report.flags.switched:
            self._skipped = 0
            return seconds
        if self._switches < self._settings.switch_prior + self._settings.switch_known:
            self._skipped += 1
            return None if self._skipped <= self._settings.switch_skipped_max else seconds
        # The initial weight of 0 guards against outliers; without it the mean is unbiased.
        prior = self._settings.switch_prior
        switch_seconds = self.seconds * self._switches / (self._switches - prior)
        if self._switches == self._settings.switch_memory:
            switch_seconds = self.seconds
        return max(seconds - switch_seconds, 0.1 * seconds)
