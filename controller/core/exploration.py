"""Bounded exploration: gamma = 0 shows nothing about acceptance, so something must look.

Every step of the engine earns `probe_share` of its seconds as credit.  When credit is there, the
arm whose optimistic value beats the current one by the most per second lost is run for a few
steps.  What a probe really cost is measured against what the current arm would have made of the
same seconds, and charged.  So probing is frequent where it is cheap, rare where it is dear, and
never more than its share.
"""

import math
from dataclasses import dataclass

from controller.core.planner import Values
from controller.core.settings import PlannerSettings
from controller.core.types import Arm, Probe, StepReport

# A probe whose steps never come (the batch left its bucket) is given up after this time.
_PROBE_PATIENCE_SECONDS = 2.0


@dataclass(slots=True)
class _Running:
    probe: Probe
    bucket: int
    deadline: float
    seen: int
    baseline_tokens_per_second: float


class Explorer:
    """Decides when to probe what, and keeps the account.  One object per engine."""

    def __init__(self, settings: PlannerSettings) -> None:
        self._settings = settings
        self._credit = settings.probe_credit_start_seconds
        self._running: _Running | None = None
        self._next_id = 1
        self.probes = 0
        self.lost_seconds = 0.0
        self.total_seconds = 0.0

    @property
    def probe_share(self) -> float:
        """Share of all step time that probing has cost so far (0 before the first step)."""
        return max(self.lost_seconds, 0.0) / self.total_seconds if self.total_seconds else 0.0

    @property
    def running(self) -> tuple[int, Probe] | None:
        """(bucket, probe) under way, or None."""
        return (self._running.bucket, self._running.probe) if self._running else None

    def observe(self, report: StepReport, now: float) -> None:
        """Earns credit, charges a probe's step, ends a probe that is done or stuck."""
        self.total_seconds += report.step_seconds
        earned = self._settings.probe_share * report.step_seconds
        running = self._running
        if running and report.probe_id == running.probe.probe_id:
            running.seen += 1
            tokens = report.batch_size + sum(
                k * count for k, count in enumerate(report.accepted_counts)
            )
            lost = report.step_seconds - tokens / running.baseline_tokens_per_second
            self.lost_seconds += lost
            earned -= max(lost, 0.0)
        self._credit = min(self._credit + earned, self._settings.probe_credit_max_seconds)
        if running and (running.seen >= running.probe.steps or now > running.deadline):
            self._running = None

    def consider(
        self,
        arms: tuple[Arm, ...],
        values: Values,
        bucket: int,
        batch_size: int,
        current: int,
        now: float,
    ) -> None:
        """Starts a probe in the active bucket if one is worth its price and the credit is there."""
        if self._running or self._settings.probe_share == 0:
            return
        here = values.value[:, bucket]
        hoped = values.optimistic_value[:, bucket]
        steps = math.ceil(self._settings.probe_exposures / batch_size)
        steps = max(1, min(self._settings.probe_steps_max, steps))
        best, best_score = -1, 0.0
        for i in range(len(arms)):
            gain = hoped[i] / here[current] - 1
            if i == current or gain <= self._settings.switch_margin:
                continue
            # Share of a step's seconds that running this arm is expected to lose.
            loss = max(1 - here[i] / here[current], 0.0)
            price = steps * loss * values.costs.seconds[i, bucket]
            score = gain / (loss + 0.02)
            if price <= self._credit and score > best_score:
                best, best_score = i, score
        if best < 0:
            return
        probe = Probe(self._next_id, arms[best], steps)
        self._next_id += 1
        self.probes += 1
        self._running = _Running(
            probe, bucket, now + _PROBE_PATIENCE_SECONDS, 0, float(here[current])
        )

    def cancel(self) -> None:
        """Forgets the probe under way (the choice is forced from outside)."""
        self._running = None
