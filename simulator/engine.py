"""A decode engine in virtual time: continuous batching, KV growth, lag, and the costs of a surface.

    admit -> (prefill) -> choose -> draft, verify, accept -> leave -> ... -> observe, `lag` late

The engine makes no choices.  With the same workload and seed every policy gets the same requests,
the same acceptance at the same position, and the same noise on the same step.
"""

import math
import time
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from controller.core.engine_spec import drafters_in_sync
from controller.core.step_report import StepFlags
from simulator.batch import Batch
from simulator.errors import InvalidInputError
from simulator.policy import (
    ArmChoice,
    Clairvoyant,
    FullInformation,
    NonLearningPolicy,
    Policy,
    Situation,
    StepRecord,
)
from simulator.results import Latencies
from simulator.surface import MIN_COST_SHARE, CostSurface
from simulator.workload import OpenLoop, Workload

_NOISE_BLOCK = 4096
_PACE_STEPS = 50.0
# By (after a gap, switched).
_FLAGS_BY_GAP_AND_SWITCH = {
    (gap, switched): StepFlags(after_gap=gap, switched=switched)
    for gap in (False, True)
    for switched in (False, True)
}


class Prefill(Enum):
    """Names where prompts are read: on another server, or in chunks between steps."""

    NONE = "none"
    CHUNKED = "chunked"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Describes how the engine behaves.  Raises InvalidInputError for impossible values.

    lag: additional steps until the policy receives the report of a step.
    noise: standard deviation of the log of a step's seconds.  outlier_share of the steps take
    outlier_factor times as long.  pace: standard deviation of the log of the machine's pace, with a
    correlation time of about fifty steps (first-order autoregressive).  switch_seconds: added to a
    step whose arm differs from the previous one.
    warm_factor: factor on a step at gamma = 0 if the drafter stays awake.  stale_steps: for
    this many steps after a sleep longer than `stale_after`, drafts are accepted with
    stale_acceptance times their usual probability (the drafter's KV cache has holes).
    """

    lag: int = 1
    noise: float = 0.03
    outlier_share: float = 0.0
    outlier_factor: float = 10.0
    pace: float = 0.0
    switch_seconds: float = 0.0
    warm_factor: float = 1.05
    prefill: Prefill = Prefill.NONE
    prefill_chunk_tokens: int = 2048
    stale_after: int = 8
    stale_steps: int = 0
    stale_acceptance: float = 0.3
    max_steps: int = 5_000_000

    def __post_init__(self) -> None:
        checks = (
            ("lag", 0 <= self.lag <= 64),
            ("noise", 0 <= self.noise < 2),
            ("pace", 0 <= self.pace < 2),
            ("outlier_share", 0 <= self.outlier_share < 1),
            ("outlier_factor", 1 <= self.outlier_factor < math.inf),
            ("switch_seconds", 0 <= self.switch_seconds < math.inf),
            ("warm_factor", 1 <= self.warm_factor < math.inf),
            ("prefill_chunk_tokens", self.prefill_chunk_tokens >= 1),
            ("stale_acceptance", 0 <= self.stale_acceptance <= 1),
        )
        for name, is_valid in checks:
            if not is_valid:
                raise InvalidInputError(name, 0, f"{getattr(self, name)} is out of range")


@dataclass(slots=True)
class Trace:
    """Records the steps (Python lists, one entry per step).

    seconds: of the step.  ends: virtual time at its end.  segments: of the oracle.
    """

    arms: list[int] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=list)
    kv_tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    # (step, phase index) of every phase's first step.
    phase_starts: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class RunResult:
    """Results of one run.

    seconds: with requests in flight.  segment_*: by the oracle's segments (comparison/oracle.py).
    probe_steps: steps with a probe's id.

    octaves: batch sizes 2^(o-1)+1 .. 2^o -> [tokens, seconds].  sequence_seconds: sum over steps of
    batch size * seconds.  latencies: of the requests that finished.
    """

    open_loop: bool
    tokens: float = 0.0
    seconds: float = 0.0
    steps: int = 0
    switches: int = 0
    probe_steps: int = 0
    segment_tokens: list[float] = field(default_factory=list)
    segment_seconds: list[float] = field(default_factory=list)
    octaves: dict[int, list[float]] = field(default_factory=dict)
    sequence_seconds: float = 0.0
    decision_seconds: float = 0.0
    trace: Trace = field(default_factory=Trace)
    latencies: Latencies = field(default_factory=Latencies)

    @property
    def tokens_per_second(self) -> float:
        """Returns tokens per second."""
        return self.tokens / self.seconds

    @property
    def score(self) -> float:
        """Returns the value by which policies are compared; more is better.

        Closed loop: tokens per second.  Open loop, where every policy serves the same load: the
        inverse of the mean latency per token, from arrival to the last token.
        """
        if not self.open_loop:
            return self.tokens_per_second
        return 1.0 / float(self.latencies.per_token.mean())


def simulate(
    workload: Workload, surface: CostSurface, policy: Policy, options: EngineOptions, seed: int
) -> RunResult:
    """Runs the workload to its end.  Raises InvalidInputError if it never ends."""
    return _EngineRun(workload, surface, policy, options, seed).run()


class _EngineRun:
    def __init__(
        self,
        workload: Workload,
        surface: CostSurface,
        policy: Policy,
        options: EngineOptions,
        seed: int,
    ) -> None:
        self._surface = surface
        self._policy = policy
        self._options = options
        # Separate streams: a policy's choices must not change the noise.
        streams = np.random.default_rng(seed).spawn(3)
        self._noise_rng, self._stale_rng, self._pace_rng = streams
        self._idle_positions = policy.idle_positions if isinstance(policy, FullInformation) else 0
        self._is_learning = not isinstance(policy, NonLearningPolicy)
        self._batch = Batch(workload, surface, self._idle_positions, with_counts=self._is_learning)
        self._drafters = [d.name for d in surface.drafters]
        self._plain_drafter_count = sum(d.mixture is None for d in surface.drafters)
        self._drafter_by_arm = [self._drafters.index(arm.drafter) for arm in surface.arms]
        self._gammas = [arm.gamma for arm in surface.arms]
        # Plain lists: reading a numpy scalar costs more than the addition.
        self._seconds: list[list[float]] = surface.seconds.tolist()
        self._kv_seconds: list[float] = surface.kv_seconds.tolist()
        self._kv_reference = surface.kv_reference
        self._missed_tokens = [0.0] * len(self._drafters)
        drafters_kept_together = drafters_in_sync(surface.drafters)
        # By drafter, the drafters that are kept in sync while it drafts, and the others.
        self._kept_together: list[list[int]] = []
        self._falling_behind: list[list[int]] = []
        for name in self._drafters:
            is_kept = [other in drafters_kept_together[name] for other in self._drafters]
            self._kept_together.append([d for d, kept in enumerate(is_kept) if kept])
            self._falling_behind.append([d for d, kept in enumerate(is_kept) if not kept])
        self._all_drafters = range(len(self._drafters))
        self._can_be_stale = options.stale_steps > 0
        self._asleep_steps = 0
        self._stale_steps_left = 0
        self._noise_factors: list[float] = []
        self._pace = 0.0
        self._decision_seconds = 0.0
        self._clairvoyant = policy if isinstance(policy, Clairvoyant) else None
        self._pending_records: deque[StepRecord] = deque()
        self._now, self._last_arm, self._is_after_gap = 0.0, -1, False
        # The share of the last step's tokens that a closed loop needed.
        self._last_share = 1.0
        # (segment, seconds) in which no step ran.
        self._prefill_intervals: list[tuple[int, float]] = []
        self.result = RunResult(isinstance(workload, OpenLoop))

    def run(self) -> RunResult:
        """Runs the whole workload."""
        batch, options, result = self._batch, self._options, self.result
        while True:
            if self._now >= batch.admission_seconds:
                batch.admit(self._now)
            if batch.phase_changed:
                result.trace.phase_starts.append((result.steps, batch.phase))
                batch.phase_changed = False
            if batch.prefilling:
                self._read_prompts()
            if batch.size > 0:
                self._step()
                if batch.done:
                    break
                if result.steps >= options.max_steps:
                    raise InvalidInputError(
                        "workload", 0,
                        f"it has not ended after {options.max_steps} steps: it is too large",
                    )  # fmt: skip
            elif not batch.prefilling:
                arrival = batch.next_arrival()
                if arrival is None:
                    break
                self._now, self._is_after_gap = max(self._now, arrival), True
        self._sum_up()
        return result

    def _read_prompts(self) -> None:
        batch, options = self._batch, self._options
        if options.prefill is Prefill.NONE:
            batch.start_all()
            return
        spent = batch.prefill(options.prefill_chunk_tokens, self._surface.prefill_seconds_per_token)
        spent += self._surface.prefill_pass_seconds
        self._prefill_intervals.append((batch.segment_at(self._now), spent))
        batch.count_phase_tokens(0)
        self._now += spent
        self._is_after_gap = True

    def _choose(self, step: int) -> ArmChoice:
        """Delivers the reports whose lag has passed to the policy, and returns its choice."""
        policy, pending_records, now = self._policy, self._pending_records, self._now
        if self._clairvoyant is not None:
            self._clairvoyant.set_situation(self._situation())
        start_time = time.perf_counter()
        known_before_step = step - self._options.lag
        while pending_records and pending_records[0].step < known_before_step:
            policy.observe(pending_records.popleft(), now)
        choice = policy.choose(self._batch.size, now)
        self._decision_seconds += time.perf_counter() - start_time
        return choice

    def _situation(self) -> Situation:
        batch, surface = self._batch, self._surface
        kv = batch.kv_tokens
        return Situation(
            batch.segment_at(self._now),
            kv,
            tuple(batch.kind_counts),
            [
                surface.catch_up_seconds(min(missed, kv)) if missed else 0.0
                for missed in self._missed_tokens
            ],
            self._options.stale_acceptance if self._is_stale() else 1.0,
        )

    def _step(self) -> None:
        """Runs one decode step, from the choice to its record."""
        batch, result, trace = self._batch, self.result, self.result.trace
        step, n, kv = result.steps, batch.size, batch.kv_tokens
        choice = self._choose(step)
        arm = choice.arm
        # For a policy with full information every drafter reads every step, so none sleeps.
        asleep = choice.asleep and not self._idle_positions
        switched = arm != self._last_arm and self._last_arm >= 0
        seconds = self._step_seconds(arm, n, kv, switched, asleep)
        counts, classes, tokens = batch.step(
            self._drafter_by_arm[arm],
            self._gammas[arm],
            self._draw_kept_drafts() if self._can_be_stale and self._is_stale() else None,
            choice.rules,
        )
        if self._idle_positions:
            # The other drafters read the step's tokens, so they miss none.
            seconds += (self._plain_drafter_count - 1) * self._surface.catch_up_seconds(tokens)
        else:
            self._update_missed_tokens(arm, asleep, tokens)
        trace.segments.append(batch.segment_at(self._now))
        self._now = now = self._now + seconds
        self._last_share = batch.count_phase_tokens(tokens)
        if batch.unset_times:
            batch.set_times(now)
        trace.arms.append(arm)
        trace.batch_sizes.append(n)
        trace.kv_tokens.append(kv)
        trace.seconds.append(seconds)
        trace.ends.append(now)
        trace.tokens.append(tokens)
        result.steps += 1
        if switched:
            result.switches += 1
        if choice.probe_id:
            result.probe_steps += 1
        if self._is_learning:
            flags = _FLAGS_BY_GAP_AND_SWITCH[self._is_after_gap, switched]
            self._pending_records.append(
                StepRecord(
                    step, n, kv, arm, counts, seconds, flags, choice.probe_id, classes,
                    batch.idle_counts,
                    batch.evidence,
                )
            )  # fmt: skip
        self._last_arm, self._is_after_gap = arm, False

    def _step_seconds(self, arm: int, n: int, kv: int, switched: bool, asleep: bool) -> float:
        """Returns the seconds of the step that is about to run, with noise and penalties."""
        surface, options = self._surface, self._options
        reference_seconds = self._seconds[arm][n]
        base = reference_seconds + self._kv_seconds[arm] * (kv - n * self._kv_reference)
        base = max(base, MIN_COST_SHARE * reference_seconds)
        gamma = self._gammas[arm]
        if gamma == 0 and not asleep:
            base *= options.warm_factor
        seconds = base * (self._noise_factors.pop() if self._noise_factors else self._next_noise())
        if gamma > 0:
            drafter = self._drafter_by_arm[arm]
            if self._missed_tokens[drafter]:
                seconds += surface.catch_up_seconds(min(self._missed_tokens[drafter], kv))
                for d in self._kept_together[drafter]:
                    self._missed_tokens[d] = 0.0
        if switched:
            seconds += options.switch_seconds
        return seconds

    def _update_missed_tokens(self, arm: int, asleep: bool, tokens: int) -> None:
        """Counts the tokens that each drafter missed in this step, and the stale steps."""
        is_sleeping = asleep and self._gammas[arm] == 0
        drafters = (
            self._all_drafters if is_sleeping else self._falling_behind[self._drafter_by_arm[arm]]
        )
        for d in drafters:
            self._missed_tokens[d] += tokens
        if self._can_be_stale:
            self._update_stale_steps(is_sleeping)

    def _update_stale_steps(self, is_sleeping: bool) -> None:
        if is_sleeping:
            self._asleep_steps += 1
            return
        if self._asleep_steps > self._options.stale_after:
            self._stale_steps_left = self._options.stale_steps
        self._asleep_steps = 0
        self._stale_steps_left = max(0, self._stale_steps_left - 1)

    def _is_stale(self) -> bool:
        """Whether a drafter that drafts in this step is stale after a long sleep."""
        wakes_up_stale = self._can_be_stale and self._asleep_steps > self._options.stale_after
        return wakes_up_stale or self._stale_steps_left > 0

    def _draw_kept_drafts(self) -> list[bool]:
        """Draws [sequences], whether the drafts of a stale drafter can be accepted."""
        draws = self._stale_rng.random(self._batch.size)
        kept: list[bool] = (draws < self._options.stale_acceptance).tolist()
        return kept

    def _next_noise(self) -> float:
        """Draws a new block of noise factors; returns the first one."""
        # The mean is 1, so that noise does not change the expected cost.
        sigma = self._options.noise
        block = np.exp(sigma * self._noise_rng.standard_normal(_NOISE_BLOCK) - sigma * sigma / 2)
        is_outlier = self._noise_rng.random(_NOISE_BLOCK) < self._options.outlier_share
        block[is_outlier] *= self._options.outlier_factor
        if self._options.pace:
            block *= self._pace_factors()
        self._noise_factors = block[::-1].tolist()
        return self._noise_factors.pop()

    def _pace_factors(self) -> NDArray[np.float64]:
        """Returns the next block's factors of the machine's pace, with mean 1."""
        sigma, decay = self._options.pace, 1 - 1 / _PACE_STEPS
        shocks = sigma * math.sqrt(1 - decay * decay) * self._pace_rng.standard_normal(_NOISE_BLOCK)
        logs = np.empty(_NOISE_BLOCK)
        for i, shock in enumerate(shocks.tolist()):
            self._pace = logs[i] = decay * self._pace + shock
        factors: NDArray[np.float64] = np.exp(logs - sigma * sigma / 2)
        return factors

    def _sum_up(self) -> None:
        """Adds the steps up; a closed loop's last step counts up to its last token."""
        batch, result, trace = self._batch, self.result, self.result.trace
        tokens, seconds = np.array(trace.tokens, dtype=np.float64), np.array(trace.seconds)
        batch_sizes = np.array(trace.batch_sizes, dtype=np.int64)
        # The exponent of n - 1 is its number of bits.
        octaves = np.frexp(batch_sizes - 1)[1]
        sums = zip(np.bincount(octaves, tokens), np.bincount(octaves, seconds), strict=True)
        result.octaves = {o: [float(t), float(s)] for o, (t, s) in enumerate(sums) if s > 0}
        result.sequence_seconds = float(batch_sizes @ seconds)
        tokens[-1:] *= self._last_share
        seconds[-1:] *= self._last_share
        segments = np.array([*trace.segments, *(s for s, _ in self._prefill_intervals)], np.int64)
        spans = np.array([*seconds, *(spent for _, spent in self._prefill_intervals)])
        result.segment_seconds = np.bincount(segments, spans).tolist()
        result.segment_tokens = np.bincount(
            trace.segments, tokens, minlength=len(result.segment_seconds)
        ).tolist()
        result.tokens, result.seconds = float(tokens.sum()), float(spans.sum())
        result.decision_seconds = self._decision_seconds
        result.latencies = batch.times.finished_latencies()
