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
from controller.core.step_report import StepReport

# The estimate's memory, in wake-ups.
_WAKINGS = 50.0
# The weight of the initial price of a token, in missed tokens; it fades like a wake-up.
_PRIOR_TOKENS = 1000.0
# The weight of a fixed part of 0, in wake-ups.  It does not fade, because similar wake-ups show
# only the sum of both parts.
_PLAIN_WAKINGS = 4.0


@recorded("drafter_backlog", "_backlog _asleep _slept_steps")
class DrafterBacklog:
    """Counts the missed tokens by drafter.  One object per engine.

    A drafter misses the tokens that are generated while it sleeps (gamma = 0).  If the engine's
    drafters do not follow the stream by themselves, it also misses those that are generated while
    another drafter runs, unless the two are `together`: for each drafter, the drafters that its
    drafting keeps in step.  A sleeping drafter may catch up by itself every
    `Capabilities.catch_up_steps` steps.  Missed tokens of ended requests are counted too; a wake-up
    reads at most the tokens in the KV cache.
    """

    def __init__(
        self,
        drafters: Sequence[str],
        able: Capabilities,
        together: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        self._backlog = dict.fromkeys(drafters, 0.0)
        self._together = {name: (together or {}).get(name, (name,)) for name in drafters}
        self.use(able)
        self._apart = len(self._backlog) > 1 and not able.drafters_follow
        # If all drafters follow the stream and have missed nothing, steps need no accounting.
        self._asleep = self._apart
        self._slept_steps = 0

    def use(self, able: Capabilities) -> None:
        """Updates the engine's capabilities."""
        self._can_sleep = able.can_sleep
        self._most_steps = able.catch_up_steps

    @property
    def now(self) -> Mapping[str, float]:
        """Missed tokens by drafter."""
        return self._backlog

    def observe(self, report: StepReport) -> float:
        """Adds a step; returns the tokens that its drafter had to read first, usually 0."""
        if report.gamma > 0 and not self._asleep:
            return 0.0
        gained = report.batch_size + sum(k * n for k, n in enumerate(report.accepted_counts))
        runs = report.gamma > 0 or not self._can_sleep
        self._asleep = self._apart or not runs
        if runs:
            self._slept_steps = 0
        elif self._slept_steps == self._most_steps > 0:
            self._slept_steps = 1
            self._backlog = dict.fromkeys(self._backlog, 0.0)
        else:
            self._slept_steps += 1
        behind = min(self._backlog[report.drafter], float(report.kv_tokens))
        together = self._together[report.drafter]
        for name, backlog in self._backlog.items():
            if not runs or (self._apart and name not in together):
                self._backlog[name] = backlog + gained
            elif report.gamma > 0:
                self._backlog[name] = 0.0
        return behind if runs and report.gamma > 0 else 0.0


@dataclass(frozen=True, slots=True)
class CatchUpPrice:
    """Holds the cost of waking a drafter, in seconds.

    now: of the cheapest wake-up now.  fixed: of any wake-up.  per_token: of each missed token.
    """

    now: float
    fixed: float
    per_token: float


@recorded(
    "catch_up",
    "_backlog _fixed _kv_tokens _batch_size _rate _wakings _tokens _squares _seconds _products",
)
class CatchUp:
    """Tracks each drafter's backlog and the cost of reading it.  One object per engine.

    The price is a least-squares line, excess seconds over missed tokens, with a ridge penalty on
    the fixed part; neither part is below 0.  together: see `DrafterBacklog`.
    """

    def __init__(
        self,
        drafters: Sequence[str],
        seconds_per_token: float,
        able: Capabilities,
        together: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        self._backlog = DrafterBacklog(drafters, able, together)
        # From the last report.
        self._kv_tokens, self._batch_size = 0, 1
        self.use(seconds_per_token)

    def use(self, seconds_per_token: float) -> None:
        """Restarts from a measured cost of a token."""
        self._fixed, self._rate = 0.0, seconds_per_token
        self._wakings = self._tokens = self._seconds = 0.0
        self._squares = _PRIOR_TOKENS**2
        self._products = self._squares * seconds_per_token

    def use_capabilities(self, able: Capabilities) -> None:
        """Updates the engine's capabilities."""
        self._backlog.use(able)

    @property
    def price(self) -> CatchUpPrice:
        """The present estimates, with the cheapest wake-up of all drafters."""
        return CatchUpPrice(min(self.seconds().values()), self._fixed, self._rate)

    def seconds_of(self, drafter: str) -> float:
        """Returns the extra seconds of the next step if this drafter has to catch up in it."""
        backlog = self._backlog.now[drafter]
        return self._fixed + self._rate * min(backlog, self._kv_tokens) if backlog else 0.0

    def observe(self, report: StepReport, expected_seconds: float) -> bool:
        """Adds a step; True if it woke a drafter, so that it was not a plain step.

        expected_seconds: of a plain step of this shape.
        """
        self._kv_tokens, self._batch_size = report.kv_tokens, report.batch_size
        behind = self._backlog.observe(report)
        if behind > 0 and not (report.flags.after_gap or report.flags.first_use):
            excess = report.step_seconds - expected_seconds
            # One outlier must not make wake-ups look expensive for the next fifty, but reading many
            # tokens may take as long as several plain steps.
            plain = max(4.0, behind / (4 * report.batch_size))
            excess = min(excess, plain * expected_seconds)
            self._learn(excess, behind)
        return behind > 0

    def _learn(self, excess: float, behind: float) -> None:
        keep = 1 - 1 / _WAKINGS
        self._wakings = keep * self._wakings + 1
        self._tokens = keep * self._tokens + behind
        self._squares = keep * self._squares + behind * behind
        self._seconds = keep * self._seconds + excess
        self._products = keep * self._products + excess * behind
        wakings = self._wakings + _PLAIN_WAKINGS
        spread = wakings * self._squares - self._tokens**2
        rate = (wakings * self._products - self._tokens * self._seconds) / spread
        self._rate = max(0.0, rate)
        self._fixed = (self._seconds - self._rate * self._tokens) / wakings
        if self._fixed < 0.0:
            self._fixed, self._rate = 0.0, max(0.0, self._products / self._squares)

    def seconds(self) -> Mapping[str, float]:
        """Returns `seconds_of` each drafter."""
        return {name: self.seconds_of(name) for name in self._backlog.now}

    def by_batch(
        self, sizes: NDArray[np.float64], context: NDArray[np.float64]
    ) -> Mapping[str, NDArray[np.float64]]:
        """Returns the same, [buckets], if the next step has another batch size.

        sizes, context: [buckets], sequences, and tokens per sequence.  The next batch may still
        contain the present requests, so the longer of the two contexts counts.
        """
        tokens = sizes * np.maximum(context, self._kv_tokens / self._batch_size)
        return {
            name: self._fixed + self._rate * np.minimum(backlog, tokens)
            if backlog
            else np.zeros(len(sizes))
            for name, backlog in self._backlog.now.items()
        }
