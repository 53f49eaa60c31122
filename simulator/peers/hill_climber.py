"""Hill climbing on goodput: try a neighbouring draft length, keep going while tokens/second rise.

Restated from the idea of spec-goodput-control (KookiesNKareem, 2026), whose measurements showed
that acceptance says little about speed while measured tokens/second do: per batch bucket, measure a
window of steps, compare one window of another draft length, and decide by a margin.  Its constants:
windows of 24 steps, margin 3 %, averaging weight 0.35, start at gamma = 1.  (`GoodputProbe` is its
prototype's exact rule, which tries every draft length once and then never again; `HillClimber` is
the climber that its text describes, which keeps adapting.)

    measure the base -> one window at the neighbour in the current direction
        better by the margin: it becomes the base, continue in the same direction at once
        otherwise: back to the base, other direction next; after two failed probes in a row keep
        the base for `hold_windows` windows before the next probe

A probe is one sample, which is the known weakness: at small batches a window's tokens/second vary
by more than the margin.  A new batch bucket starts at the base of the last one (ours, generous).
It knows no costs, no acceptance, and the first drafter only.

Probe once, then the best: the rule of the goodput prototype, as implemented in its code.

Restated from spec-goodput-control (KookiesNKareem, 2026), the controller that is kept per batch
bin with switching off allowed: start at gamma = 1, run every other draft length for one window of
24 steps (0 last), then after every window take the shortest draft length whose averaged
tokens/second (weight 0.35 per step) is within 3 % of the best one.  An idle draft length keeps the
average of its only window: it is tried again only if the running one falls below it.

Batch bins end at 1, 2, 4, 8, 16, 24, 32, 48, 64 and infinity.  It knows no costs, no acceptance,
and the first drafter only.  Left out: the variant that decides per request.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from controller.core.engine_spec import Arm
from simulator.peers.common import (
    accepted_tokens,
    arms_by_gamma,
    first_drafter,
    nearest_gamma,
    octave,
)
from simulator.policy import ArmChoice, StepRecord
from simulator.results import PolicyOrigin

WINDOW_STEPS = 24
MARGIN = 0.03
EWMA_WEIGHT = 0.35
INITIAL_GAMMA = 1
HOLD_WINDOWS = 8


_BIN_ENDS = (1, 2, 4, 8, 16, 24, 32, 48, 64)


@dataclass(slots=True)
class _Bucket:
    """Remembers one octave of the batch size.  Positions index the ascending gammas.

    rate: tokens/second of the base, 0 = not measured.  windows_at_base: windows at the base since
    the last probe.  failed_probes: probes in a row that were not better.
    """

    base: int
    running: int
    direction: int = 1
    rate: float = 0.0
    windows_at_base: int = 0
    failed_probes: int = 0
    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0


class HillClimber:
    """Climbs over the first drafter's draft lengths, one memory per octave of the batch size."""

    origin = PolicyOrigin.RESTATED

    def __init__(
        self,
        arms: Sequence[Arm],
        *,
        window_steps: int = WINDOW_STEPS,
        hold_windows: int = HOLD_WINDOWS,
    ) -> None:
        index = arms_by_gamma(arms, first_drafter(arms))
        self._arms = list(index.values())
        self._choices = [ArmChoice(arm) for arm in self._arms]
        self._start = list(index).index(nearest_gamma(list(index), INITIAL_GAMMA))
        self._window_steps = window_steps
        self._hold_windows = hold_windows
        self._buckets: dict[int, _Bucket] = {}

    def choose(self, batch_size: int, _: float) -> ArmChoice:
        """Returns the base of this octave, or the neighbour that is on trial."""
        start = _Bucket(self._start, self._start)
        bucket = self._buckets.setdefault(octave(batch_size), start)
        self._start = bucket.base
        return self._choices[bucket.running]

    def observe(self, record: StepRecord, _: float) -> None:
        """Adds a step of the arm that is being measured; a full window decides."""
        bucket = self._buckets.get(octave(record.batch_size))
        # Steps that were under way when the arm changed belong to no window.
        if bucket is None or record.arm != self._arms[bucket.running]:
            return
        bucket.tokens += record.batch_size + accepted_tokens(record.counts)
        bucket.seconds += record.step_seconds
        bucket.steps += 1
        if bucket.steps >= self._window_steps:
            rate = bucket.tokens / bucket.seconds
            bucket.tokens, bucket.seconds, bucket.steps = 0, 0.0, 0
            if bucket.running == bucket.base:
                self._finish_base_window(bucket, rate)
            else:
                self._finish_probe_window(bucket, rate)

    def _finish_base_window(self, bucket: _Bucket, rate: float) -> None:
        weight = EWMA_WEIGHT if bucket.rate else 1.0
        bucket.rate += weight * (rate - bucket.rate)
        bucket.windows_at_base += 1
        if bucket.windows_at_base >= (self._hold_windows if bucket.failed_probes >= 2 else 1):
            self._start_probe(bucket)

    def _finish_probe_window(self, bucket: _Bucket, rate: float) -> None:
        if rate > bucket.rate * (1 + MARGIN):
            bucket.base, bucket.rate, bucket.failed_probes = bucket.running, rate, 0
            self._start_probe(bucket)
            return
        bucket.running = bucket.base
        bucket.direction = -bucket.direction
        bucket.failed_probes += 1

    def _start_probe(self, bucket: _Bucket) -> None:
        bucket.windows_at_base = 0
        last = len(self._arms) - 1
        if not 0 <= bucket.base + bucket.direction <= last:
            # Past the end there is nothing: that direction counts as refused.
            bucket.direction = -bucket.direction
            bucket.failed_probes += 1
        bucket.running = min(max(bucket.base + bucket.direction, 0), last)


@dataclass(slots=True)
class _Bin:
    """Keeps one bin.

    running: the arm.  to_probe: arms left to try.  rates: arm -> averaged tokens/second.
    """

    running: int
    to_probe: list[int]
    rates: dict[int, float] = field(default_factory=dict)
    steps: int = 0


class GoodputProbe:
    """One window of each of the first drafter's draft lengths, then the best, per batch bin."""

    origin = PolicyOrigin.RESTATED

    def __init__(self, arms: Sequence[Arm], *, window_steps: int = WINDOW_STEPS) -> None:
        index = arms_by_gamma(arms, first_drafter(arms))
        self._ascending = list(index.values())
        self._choices = {arm: ArmChoice(arm) for arm in self._ascending}
        first_gamma = nearest_gamma(list(index), INITIAL_GAMMA)
        other_gammas = sorted(index.keys() - {first_gamma}, key=lambda gamma: (gamma == 0, gamma))
        self._window_steps = window_steps
        self._bins = defaultdict[int, _Bin](
            lambda: _Bin(index[first_gamma], [index[gamma] for gamma in other_gammas])
        )

    def choose(self, batch_size: int, _: float) -> ArmChoice:
        """Returns what the bin runs."""
        return self._choices[self._bins[bisect_left(_BIN_ENDS, batch_size)].running]

    def observe(self, record: StepRecord, _: float) -> None:
        """Averages the step's tokens/second; every window ends in a decision."""
        current_bin = self._bins[bisect_left(_BIN_ENDS, record.batch_size)]
        rate = (record.batch_size + accepted_tokens(record.counts)) / record.step_seconds
        previous_rate = current_bin.rates.get(record.arm)
        current_bin.rates[record.arm] = (
            rate if previous_rate is None else previous_rate + EWMA_WEIGHT * (rate - previous_rate)
        )
        current_bin.steps += 1
        if current_bin.steps >= self._window_steps:
            current_bin.steps = 0
            if current_bin.to_probe:
                current_bin.running = current_bin.to_probe.pop(0)
                return
            rate_threshold = max(current_bin.rates.values()) / (1 + MARGIN)
            current_bin.running = next(
                a for a in self._ascending if current_bin.rates.get(a, 0.0) >= rate_threshold
            )
