"""Counts the generated tokens that each drafter has not read yet."""

from collections.abc import Collection, Mapping, Sequence

from controller.core.engine_spec import Capabilities
from controller.core.recorded_state import recorded
from controller.core.step_report import StepReport


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
