"""Counts the tokens that each drafter has not read yet, and estimates what waking it costs.

A waking costs a fixed part, and the seconds of each token that was missed.  The price of a token
starts at the profile's and the fixed part, a pass of the drafter, at nothing; both follow the
seconds that waking steps take beyond a plain one.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.core.engine_spec import Capabilities
from controller.core.recorded_state import recorded
from controller.core.step_report import StepReport

# The estimate's memory, in wakings.
_WAKINGS = 50.0
# The missed tokens that the first price of a token weighs; it is forgotten like a waking.
_PRIOR_TOKENS = 1000.0
# The wakings that a fixed part of 0 weighs: for good, because wakings alike show only the sum.
_PLAIN_WAKINGS = 4.0


@recorded("drafter_backlog", "_backlog _asleep _slept_steps")
class DrafterBacklog:
    """Missed tokens by drafter.  One object per engine.

    A drafter misses what the engine generates while it sleeps (gamma = 0) or, in an engine whose
    drafters do not follow the stream by themselves, while another drafter runs, unless the two are
    `together`: by drafter, what is kept in step by its drafting, if more than itself.  One that
    sleeps may catch up by itself every so many steps (`Capabilities.catch_up_steps`).  Tokens of
    requests that have ended are among them: no drafter reads more than what is in the KV cache.
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
        # While all drafters follow and have missed nothing there is nothing to do.
        self._asleep = self._apart
        self._slept_steps = 0

    def use(self, able: Capabilities) -> None:
        """Sets what the engine is able to do from now on."""
        self._can_sleep = able.can_sleep
        self._most_steps = able.catch_up_steps

    @property
    def now(self) -> Mapping[str, float]:
        """The missed tokens by drafter."""
        return self._backlog

    def observe(self, report: StepReport) -> float:
        """Takes a step and returns the tokens that its drafter had to read first, mostly 0."""
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
    """Holds what waking a drafter costs, in seconds.

    now: the cheapest waking now.  fixed, per_token: of any waking, and of each missed token.
    """

    now: float
    fixed: float
    per_token: float


@recorded(
    "catch_up",
    "_backlog _fixed _kv_tokens _batch_size _rate _wakings _tokens _squares _seconds _products",
)
class CatchUp:
    """Tracks each drafter's backlog and what reading it costs.  One object per engine.

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
        # Of the last report.
        self._kv_tokens, self._batch_size = 0, 1
        self.use(seconds_per_token)

    def use(self, seconds_per_token: float) -> None:
        """Restarts from a measured price of a token."""
        self._fixed, self._rate = 0.0, seconds_per_token
        self._wakings = self._tokens = self._seconds = 0.0
        self._squares = _PRIOR_TOKENS**2
        self._products = self._squares * seconds_per_token

    def use_capabilities(self, able: Capabilities) -> None:
        """Sets what the engine is able to do from now on."""
        self._backlog.use(able)

    @property
    def price(self) -> CatchUpPrice:
        """The present estimates, with the cheapest waking of all drafters."""
        return CatchUpPrice(min(self.seconds().values()), self._fixed, self._rate)

    def seconds_of(self, drafter: str) -> float:
        """Returns what using a drafter in the next step costs beyond the step."""
        backlog = self._backlog.now[drafter]
        return self._fixed + self._rate * min(backlog, self._kv_tokens) if backlog else 0.0

    def observe(self, report: StepReport, expected_seconds: float) -> bool:
        """Takes a step; True if it woke a drafter, so that it was not a plain step.

        expected_seconds: of a plain step of this shape.
        """
        self._kv_tokens, self._batch_size = report.kv_tokens, report.batch_size
        behind = self._backlog.observe(report)
        if behind > 0 and not (report.flags.after_gap or report.flags.first_use):
            excess = report.step_seconds - expected_seconds
            # One outlier must not make waking look expensive for the next fifty, but reading many
            # tokens may take as long as some steps that generate as many.
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
        """Returns the same, [buckets], if the next step has another batch.

        sizes, context: [buckets] sequences, and tokens of a sequence.  The next batch may still be
        the present requests, so their context counts where it is longer.
        """
        tokens = sizes * np.maximum(context, self._kv_tokens / self._batch_size)
        return {
            name: self._fixed + self._rate * np.minimum(backlog, tokens)
            if backlog
            else np.zeros(len(sizes))
            for name, backlog in self._backlog.now.items()
        }
