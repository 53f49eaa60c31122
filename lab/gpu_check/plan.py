"""Counts the work of the parts of a check before anything runs."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from lab.gpu_check import acceptance, engines, small_engines
from lab.gpu_check.budget import Prices, Work
from lab.gpu_check.device import Device
from lab.gpu_check.engines import SHAPE_ENGINES
from lab.gpu_check.load import warm_up_loads
from lab.gpu_check.scale import Scale
from lab.gpu_check.shapes import Load, Shape
from lab.harness.load_generator import StreamPhase

Arm = tuple[str, int]


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """The counts of one part and their price in seconds."""

    name: str
    work: Work
    seconds: float


class Planner:
    """Counts, as `Check` does: engines that run already are not started again.

    graph_sizes: () for those of shape and scale.  probabilities: drafter -> probability that a
    draft is accepted if those before it were.
    """

    def __init__(
        self,
        shape: Shape,
        scale: Scale,
        device: Device,
        graph_sizes: tuple[int, ...] = (),
        probabilities: Mapping[str, float] = acceptance.ASSUMED,
    ) -> None:
        self.shape = shape
        self.scale = scale
        self.device = device
        self.graph_sizes = graph_sizes or scale.batch_sizes(shape)
        self.has_profile = False
        self._probabilities = probabilities
        self._running: tuple[str, ...] = ()

    def only(self, *policies: str) -> Work:
        """Counts the starts of those of the engines that do not run; all others are stopped."""
        work = Work()
        for policy in policies:
            if policy in self._running:
                continue
            work += Work(launches=1, captures=self.captures(policy))
            if policy in SHAPE_ENGINES:
                work += self.play(warm_up_loads(self.shape))
        self._running = policies
        return work

    def captures(self, policy: str) -> int:
        """Counts the CUDA graphs of an engine."""
        if policy in small_engines.SMALL_ENGINES:
            return small_engines.captures(policy, self.device)
        return engines.captures(policy, self.shape, self.graph_sizes)

    def play(
        self,
        loads: Iterable[Load | StreamPhase],
        arm: Arm | None = None,
        tokens_a_step: float = 0.0,
    ) -> Work:
        """Counts one play of loads, or of a stream.

        arm: that runs, None for plain decoding.  tokens_a_step: instead of what the arm gives.
        """
        gain = tokens_a_step or (1.0 if arm is None else self.tokens_a_step(arm))
        work = Work()
        for load in map(_load_of, loads):
            tokens = load.requests * load.new_tokens / load.concurrency
            work += Work(passes=math.ceil(tokens / gain), requests=load.requests)
        return work

    def tokens_a_step(self, arm: Arm) -> float:
        """Returns the tokens that a sequence gains in a step of an arm, by the assumed curve."""
        drafter, gamma = arm
        probability = self._probabilities[drafter]
        return float(sum(probability**k for k in range(gamma + 1)))


def _load_of(load: Load | StreamPhase) -> Load:
    """Returns a phase as so many like requests; its prompts do not count."""
    if isinstance(load, Load):
        return load
    requests = len(load.requests)
    return Load(load.concurrency, requests, 0, math.ceil(load.new_tokens / requests))


def plan(
    parts: Iterable[tuple[str, Callable[[Planner], Work]]], planner: Planner, prices: Prices
) -> list[PlannedPart]:
    """Counts and prices parts in the order in which they will run.

    parts: name, and the function that counts.
    """
    planned = []
    for name, count in parts:
        work = count(planner)
        planned.append(PlannedPart(name, work, prices.seconds(work)))
    return planned


def total_seconds(planned: Iterable[PlannedPart]) -> float:
    """Adds the seconds."""
    return sum(part.seconds for part in planned)
