"""Computes the best possible result on a stream, and where a steered engine lost time.

What the imposed table makes of a stream, with every static arm and with an oracle's, is computed
before anything runs: the simulator replays the stream with the engine's own draws, costs and order
of work.

The table and the classes' curves also say what each arm would have gained in a step of some batch,
context and mix of classes.  What the arm that ran gains less is lost, and has one cause:

  probing     the step was a probe
  switching   the switch itself, and a drafter that caught up
  link        the sidecar had decided otherwise before the step began, and the engine did not know
              yet; or no plan steered it
  waiting     the best arm had changed, and the sidecar had not chosen a good one since
  estimates   everything else: a worse arm was chosen although a good one had been in use

The shim's own work is not among them: it hides behind the pace, as it does behind a GPU's step with
the overlap schedule.  `shim` says what it would have cost if nothing had hidden it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from controller.core.engine_spec import Arm
from controller.recording.recording import SegmentReader, find_recording
from lab.cpu_engine.pace.step_costs import OWN, SECOND, StepCosts
from lab.cpu_engine.pace.step_log import LoggedStep
from lab.harness.sidecar import find_row
from lab.paced.engines import PREFILL_CHUNK_TOKENS
from lab.paced.traffic import Stream, as_workload
from simulator.comparison.contestants import static_names
from simulator.comparison.oracle import SegmentSchedule, best_by_segment
from simulator.engine import EngineOptions, Prefill, RunResult, simulate
from simulator.peers.static import StaticPolicy
from speculation.v1 import plan_pb2

# An arm this near to the best one is a good one.
_GOOD_SHARE = 0.99
# Steps after a change within which a loss counts as waiting; later ones count as wrong estimates.
_WAITING_STEPS_MAX = 100


@dataclass(frozen=True, slots=True)
class LostTime:
    """Shares of the decode steps' time, in the model's seconds.  shim: not part of the total."""

    waiting: float = 0.0
    probing: float = 0.0
    switching: float = 0.0
    estimates: float = 0.0
    link: float = 0.0
    shim: float = 0.0

    @property
    def total(self) -> float:
        """Everything that the engine has lost, without the shim's work."""
        return self.waiting + self.probing + self.switching + self.estimates + self.link


@dataclass(frozen=True, slots=True)
class DecidedPlan:
    """A plan, and when the sidecar decided on it (seconds of the machine's monotonic clock)."""

    seconds: float
    plan: plan_pb2.Plan

    def arm(self, batch_size: int) -> tuple[str, int]:
        """The drafter and draft length that it gives to this batch size."""
        row = find_row(self.plan, batch_size)
        return row.drafter, row.gamma


def decided_plans(folder: Path, engine_id: str) -> tuple[DecidedPlan, ...]:
    """The plans in the sidecar's recording of an engine, in order.  Raises RecordingError."""
    plans = []
    for path in find_recording(folder, engine_id).paths:
        plans += [
            DecidedPlan(moment.seconds, moment.plan)
            for moment in SegmentReader(path).events()
            if moment.kind != "parting" and moment.plan is not None
        ]
    return tuple(sorted(plans, key=lambda plan: plan.seconds))


class StepValues:
    """Computes the expected tokens per second, in the model's time, of every arm in a step."""

    def __init__(
        self, costs: StepCosts, curves: Mapping[str, Mapping[str, Sequence[float]]]
    ) -> None:
        self._costs = costs
        self.arms = costs.surface.arms
        self._expected_tokens = {
            kind: self._expected_gains(drafter_curves) for kind, drafter_curves in curves.items()
        }

    def _expected_gains(self, curves: Mapping[str, Sequence[float]]) -> NDArray[np.float64]:
        """[arms] of tokens that a sequence of this class gains in a step."""
        gains = []
        for arm in self.arms:
            curve = np.cumprod(np.array(curves.get(arm.drafter, ()), dtype=np.float64))
            gains.append(1.0 + float(curve[: arm.gamma].sum()))
        return np.array(gains)

    def rates(self, step: LoggedStep) -> NDArray[np.float64]:
        """[arms] tokens per second in a step's batch, context and mix of classes."""
        surface, size = self._costs.surface, step.batch_size
        plain = surface.seconds[:, min(size, surface.max_batch_size)]
        context = surface.kv_seconds * (step.kv_tokens - size * surface.kv_reference)
        expected_tokens = np.zeros(len(self.arms))
        for kind, count in step.kinds.items():
            expected_tokens += count * self._expected_tokens.get(kind, np.ones(len(self.arms)))
        values: NDArray[np.float64] = expected_tokens / np.maximum(plain + context, 0.1 * plain)
        return values

    def executed_row(self, step: LoggedStep) -> int:
        """The row of the arm that the step ran."""
        drafter = step.drafter if step.gamma and step.drafter in (OWN, SECOND) else OWN
        return self.arms.index(Arm(drafter, step.gamma))


def lost_time(
    steps: Sequence[LoggedStep],
    plans: Sequence[DecidedPlan],
    values: StepValues,
) -> LostTime:
    """Attributes the lost time of a play's decode steps to causes.  plans: of that engine."""
    lost_seconds = dict.fromkeys((f.name for f in fields(LostTime)), 0.0)
    newest = _newest(steps, plans)
    # The last arm that was good when it ran, and the number of steps since without a good one.
    known_good_arm, search_steps = -1, 0
    total = 0.0
    for step, plan in zip(steps, newest, strict=True):
        total += step.seconds
        lost_seconds["switching"] += step.switch_seconds + step.catch_up_seconds
        lost_seconds["shim"] += step.shim_seconds
        worth = values.rates(step)
        executed_arm, best = values.executed_row(step), float(worth.max())
        share = float(worth[executed_arm]) / best
        decode_seconds = step.seconds - step.switch_seconds - step.catch_up_seconds
        wasted = decode_seconds * (1.0 - share)
        is_good = share >= _GOOD_SHARE
        if step.probe:
            lost_seconds["probing"] += wasted
            continue
        late = plan is not None and plan.plan.epoch > step.epoch
        if not step.steered or (
            late and plan is not None and plan.arm(step.batch_size) != (step.drafter, step.gamma)
        ):
            lost_seconds["link"] += wasted
        elif is_good:
            lost_seconds["estimates"] += wasted
        elif known_good_arm >= 0 and worth[known_good_arm] >= _GOOD_SHARE * best:
            # What was good before still is.
            lost_seconds["estimates"] += wasted
        else:
            search_steps += 1
            lost_seconds["waiting" if search_steps <= _WAITING_STEPS_MAX else "estimates"] += wasted
        if is_good:
            known_good_arm, search_steps = executed_arm, 0
    return LostTime(
        **{name: value / total for name, value in lost_seconds.items()} if total else {}
    )


def _newest(
    steps: Sequence[LoggedStep], plans: Sequence[DecidedPlan]
) -> Iterator[DecidedPlan | None]:
    """Yields for each step the newest plan that the sidecar had decided on when it was launched."""
    i = 0
    for step in steps:
        while i < len(plans) and plans[i].seconds <= step.launched:
            i += 1
        yield plans[i - 1] if i else None


@dataclass(frozen=True, slots=True)
class PolicyRate:
    """Holds one policy's tokens per second: over the whole stream, and of each phase."""

    rate: float
    phases: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Oracle:
    """Holds every static arm, and the oracle: it runs the best static arm of each phase.

    arms: the oracle's, by phase.
    """

    statics: Mapping[Arm, PolicyRate]
    arms: tuple[Arm, ...]
    oracle: PolicyRate

    @property
    def best_static(self) -> Arm:
        """The arm with the most tokens per second over the whole stream."""
        return max(self.statics, key=lambda arm: self.statics[arm].rate)

    @property
    def gain(self) -> float:
        """Tokens/s of the oracle over those of the best static arm."""
        return self.oracle.rate / self.statics[self.best_static].rate


def compute_oracle(
    stream: Stream, curves: Mapping[str, Mapping[str, Sequence[float]]], costs: StepCosts
) -> Oracle:
    """Replays the stream with every static arm, then with the best arm of each phase."""
    surface = costs.surface
    workload = as_workload(stream, curves, [d.name for d in surface.drafters])
    options = EngineOptions(
        lag=0, noise=0.0, switch_seconds=costs.switch_seconds, warm_factor=costs.warm_factor,
        prefill=Prefill.CHUNKED, prefill_chunk_tokens=PREFILL_CHUNK_TOKENS,
    )  # fmt: skip
    indices = list(static_names(surface).values())
    runs = {
        index: simulate(workload, surface, StaticPolicy(surface.arms, index), options, stream.seed)
        for index in indices
    }
    best = [indices[i] for i in best_by_segment(list(runs.values()))]
    oracle_run = simulate(workload, surface, SegmentSchedule(best), options, stream.seed)
    statics = {surface.arms[index]: _policy_rate(run) for index, run in runs.items()}
    return Oracle(statics, tuple(surface.arms[index] for index in best), _policy_rate(oracle_run))


def _policy_rate(run: RunResult) -> PolicyRate:
    pairs = zip(run.segment_tokens, run.segment_seconds, strict=True)
    return PolicyRate(run.tokens_per_second, tuple(tokens / seconds for tokens, seconds in pairs))
