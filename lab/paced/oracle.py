"""Computes what the imposed table makes of a stream: with every static arm, and with an oracle's.

The simulator replays the stream with the engine's own draws, costs and order of work; nothing in
it is measured, so it can be known before any engine runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from controller.core.engine_spec import Arm
from lab.cpu_engine.pace.step_costs import StepCosts
from lab.paced.day import Stream, as_workload
from lab.paced.engines import PREFILL_CHUNK_TOKENS
from simulator.comparison.contestants import static_names
from simulator.comparison.oracle import SegmentSchedule, best_by_segment
from simulator.engine import EngineOptions, Prefill, RunResult, simulate
from simulator.peers.static import Static


@dataclass(frozen=True, slots=True)
class Computed:
    """Holds one policy's tokens per second: over the whole stream, and of each phase."""

    rate: float
    phases: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Oracle:
    """Holds every static arm, and the oracle: it runs the best static arm of each phase.

    arms: the oracle's, by phase.
    """

    statics: Mapping[Arm, Computed]
    arms: tuple[Arm, ...]
    oracle: Computed

    @property
    def best_static(self) -> Arm:
        """The arm with the most tokens per second over the whole stream."""
        return max(self.statics, key=lambda arm: self.statics[arm].rate)

    @property
    def gain(self) -> float:
        """Tokens/s of the oracle over those of the best static arm."""
        return self.oracle.rate / self.statics[self.best_static].rate


def compute(
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
        index: simulate(workload, surface, Static(surface.arms, index), options, stream.seed)
        for index in indices
    }
    best = [indices[i] for i in best_by_segment(list(runs.values()))]
    found = simulate(workload, surface, SegmentSchedule(best), options, stream.seed)
    statics = {surface.arms[index]: _computed(run) for index, run in runs.items()}
    return Oracle(statics, tuple(surface.arms[index] for index in best), _computed(found))


def _computed(run: RunResult) -> Computed:
    pairs = zip(run.segment_tokens, run.segment_seconds, strict=True)
    return Computed(run.rate, tuple(tokens / seconds for tokens, seconds in pairs))
