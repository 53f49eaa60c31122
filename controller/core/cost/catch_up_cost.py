"""Counts the tokens that each drafter has not read yet, and estimates the cost of waking it up.

A wake-up has a fixed cost, and a cost for each missed token.  The cost of a token starts at the
profile's value, and the fixed cost, a pass of the drafter, at 0.  Both are fitted to the excess of
wake-up steps over plain steps.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.core.engine_spec import Capabilities
from controller.core.recorded_state import recorded
from controller.core.settings import PlannerSettings
from controller.core.step_report import StepReport


@recorded("drafter_backlog", "_slept_steps", backlog="_missed_tokens", asleep="_must_track")
class DrafterBacklog:
    """Counts the missed tokens by drafter.  One object per engine.

    A drafter misses the tokens that are generated while it sleeps (gamma = 0).  If the engine's
    drafters do not follow the stream by themselves, it also misses those that are generated while
    another drafter runs, unless the two are `in_sync`: for each drafter, the drafters that its
    drafting keeps in sync.  A sleeping drafter may catch up by itself every
    `Capabilities.catch_up_steps` steps.  Missed tokens of ended requests are counted too; a wake-up
    reads at most the tokens in the KV cache.
    """

    def __init__(
        self,
        drafters: Sequence[str],
        capabilities: Capabilities,
        in_sync: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        self._missed_tokens = dict.fromkeys(drafters, 0.0)
        self._in_sync = {name: (in_sync or {}).get(name, (name,)) for name in drafters}
        self.use_capabilities(capabilities)
        self._are_separate = len(self._missed_tokens) > 1 and not capabilities.drafters_follow
        # If all drafters follow the stream and have missed nothing, steps need no accounting.
        self._must_track = self._are_separate
        self._slept_steps = 0

    def use_capabilities(self, capabilities: Capabilities) -> None:
        """Updates the engine's capabilities."""
        self._can_sleep = capabilities.can_sleep
        self._catch_up_steps = capabilities.catch_up_steps

    @property
    def missed_tokens(self) -> Mapping[str, float]:
        """Missed tokens by drafter."""
        return self._missed_tokens

    def observe(self, report: StepReport) -> float:
        """Adds a step; returns the tokens that its drafter had to read first, usually 0."""
        if report.gamma > 0 and not self._must_track:
            return 0.0
        generated_tokens = report.batch_size + report.accepted_tokens
        drafter_runs = report.gamma > 0 or not self._can_sleep
        self._must_track = self._are_separate or not drafter_runs
        if drafter_runs:
            self._slept_steps = 0
        elif self._slept_steps == self._catch_up_steps > 0:
            self._slept_steps = 1
            self._missed_tokens = dict.fromkeys(self._missed_tokens, 0.0)
        else:
            self._slept_steps += 1
        missed_tokens = min(self._missed_tokens[report.drafter], float(report.kv_tokens))
        in_sync = self._in_sync[report.drafter]
        for name, drafter_backlog in self._missed_tokens.items():
            if not drafter_runs or (self._are_separate and name not in in_sync):
                self._missed_tokens[name] = drafter_backlog + generated_tokens
            elif report.gamma > 0:
                self._missed_tokens[name] = 0.0
        return missed_tokens if drafter_runs and report.gamma > 0 else 0.0


@dataclass(frozen=True, slots=True)
class CatchUpPrice:
    """Holds the cost of waking a drafter, in seconds.

    cheapest_seconds: of the cheapest wake-up now.  seconds_per_token: of each missed token.
    """

    cheapest_seconds: float
    seconds_per_token: float


@recorded(
    "catch_up",
    "_backlog _kv_tokens _batch_size",
    fixed="_fixed_seconds",
    rate="_seconds_per_token",
    wakings="_wake_ups",
    tokens="_token_sum",
    squares="_token_square_sum",
    seconds="_seconds_sum",
    products="_product_sum",
)
class CatchUpEstimator:
    """Tracks each drafter's backlog and the cost of reading it.  One object per engine.

    The price is a least-squares line, excess seconds over missed tokens, with a ridge penalty on
    the fixed part; neither part is below 0.  in_sync: see `DrafterBacklog`.
    """

    def __init__(
        self,
        drafters: Sequence[str],
        seconds_per_token: float,
        capabilities: Capabilities,
        settings: PlannerSettings,
        in_sync: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        self._settings = settings
        self._backlog = DrafterBacklog(drafters, capabilities, in_sync)
        # From the last report.
        self._kv_tokens, self._batch_size = 0, 1
        self.restart_from_price(seconds_per_token)

    def use_settings(self, settings: PlannerSettings) -> None:
        """Uses these settings from now on and keeps the price."""
        self._settings = settings

    def restart_from_price(self, seconds_per_token: float) -> None:
        """Restarts from a measured cost of a token."""
        self._fixed_seconds, self._seconds_per_token = 0.0, seconds_per_token
        self._wake_ups = self._token_sum = self._seconds_sum = 0.0
        self._token_square_sum = self._settings.wake_up_prior_tokens**2
        self._product_sum = self._token_square_sum * seconds_per_token

    def use_capabilities(self, capabilities: Capabilities) -> None:
        """Updates the engine's capabilities."""
        self._backlog.use_capabilities(capabilities)

    @property
    def price(self) -> CatchUpPrice:
        """The present estimates, with the cheapest wake-up of all drafters."""
        return CatchUpPrice(min(self.seconds_by_drafter().values()), self._seconds_per_token)

    def predict_seconds(self, drafter: str) -> float:
        """Returns the extra seconds of the next step if this drafter has to catch up in it."""
        missed_tokens = self._backlog.missed_tokens[drafter]
        return (
            self._fixed_seconds + self._seconds_per_token * min(missed_tokens, self._kv_tokens)
            if missed_tokens
            else 0.0
        )

    def observe(self, report: StepReport, expected_seconds: float) -> bool:
        """Adds a step; True if it woke a drafter, so that it was not a plain step.

        expected_seconds: of a plain step of this shape.
        """
        self._kv_tokens, self._batch_size = report.kv_tokens, report.batch_size
        missed_tokens = self._backlog.observe(report)
        if missed_tokens > 0 and not (report.flags.after_gap or report.flags.first_use):
            excess_seconds = report.step_seconds - expected_seconds
            # One outlier must not make wake-ups look expensive for the next fifty, but reading many
            # tokens may take as long as several plain steps.
            max_plain_steps = max(4.0, missed_tokens / (4 * report.batch_size))
            excess_seconds = min(excess_seconds, max_plain_steps * expected_seconds)
            self._update_price(excess_seconds, missed_tokens)
        return missed_tokens > 0

    def _update_price(self, excess_seconds: float, missed_tokens: float) -> None:
        kept_share = 1 - 1 / self._settings.wake_up_memory
        self._wake_ups = kept_share * self._wake_ups + 1
        self._token_sum = kept_share * self._token_sum + missed_tokens
        self._token_square_sum = kept_share * self._token_square_sum + missed_tokens * missed_tokens
        self._seconds_sum = kept_share * self._seconds_sum + excess_seconds
        self._product_sum = kept_share * self._product_sum + excess_seconds * missed_tokens
        wake_ups = self._wake_ups + self._settings.wake_up_prior
        determinant = wake_ups * self._token_square_sum - self._token_sum**2
        seconds_per_token = (
            wake_ups * self._product_sum - self._token_sum * self._seconds_sum
        ) / determinant
        self._seconds_per_token = max(0.0, seconds_per_token)
        self._fixed_seconds = (
            self._seconds_sum - self._seconds_per_token * self._token_sum
        ) / wake_ups
        if self._fixed_seconds < 0.0:
            self._fixed_seconds, self._seconds_per_token = (
                0.0,
                max(0.0, self._product_sum / self._token_square_sum),
            )

    def seconds_by_drafter(self) -> Mapping[str, float]:
        """Returns `predict_seconds` each drafter."""
        return {name: self.predict_seconds(name) for name in self._backlog.missed_tokens}

    def seconds_by_batch(
        self, sizes: NDArray[np.float64], context_tokens: NDArray[np.float64]
    ) -> Mapping[str, NDArray[np.float64]]:
        """Returns the same, [buckets], of the drafters that have missed tokens.

        It is the price of the next step if that has another batch size.
        sizes, context_tokens: [buckets], sequences, and tokens per sequence.  The next batch may
        still contain the present requests, so the longer of the two contexts counts.
        """
        missed_by_drafter = {
            name: tokens for name, tokens in self._backlog.missed_tokens.items() if tokens
        }
        if not missed_by_drafter:
            return {}
        batch_tokens = sizes * np.maximum(context_tokens, self._kv_tokens / self._batch_size)
        return {
            name: self._fixed_seconds
            + self._seconds_per_token * np.minimum(missed_tokens, batch_tokens)
            for name, missed_tokens in missed_by_drafter.items()
        }
