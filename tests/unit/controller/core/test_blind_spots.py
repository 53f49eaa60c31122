"""Situations in which simpler rules were once better: the core is driven directly, step by step.

Every ratio is the time that the best arm of each step would have taken (an oracle by exact batch,
context and traffic) over the time that was taken, by expected tokens: luck has no weight.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from controller.core.cost.profile import Profile, ProfileCell
from controller.core.step_report import StepFlags
from controller.wire.explanations import explain
from simulator import published
from simulator.cold_start import TRAFFIC_CURVES
from simulator.controller_policy import FINGERPRINT, ControllerPolicy
from simulator.policy import StepRecord
from simulator.surface import CostSurface, profile_sizes

EAGLE = published.published_surface("h100-llama3.1-8b").with_drafters("eagle")
LAG = 1


@dataclass(frozen=True)
class Traffic:
    """Conditional acceptance by position (the last one continues), batch, context a sequence."""

    acceptance: Sequence[float]
    batch_size: int
    context: float = 384.0

    def expected(self, gamma: int) -> float:
        padded = [*self.acceptance, *[self.acceptance[-1]] * 16]
        return float(np.cumprod(padded[:gamma]).sum()) if gamma else 0.0

    def draw(self, gamma: int, rng: np.random.Generator) -> list[int]:
        padded, left, counts = [*self.acceptance, *[self.acceptance[-1]] * 16], self.batch_size, []
        for k in range(gamma):
            good = int(rng.binomial(left, padded[k]))
            counts.append(left - good)
            left = good
        return [*counts, left]


@dataclass
class Found:
    """oracle, off: ratios.  late: the oracle's, last half.  probes, switches: of all steps."""

    oracle: float
    off: float
    late: float
    probes: float
    switches: float
    policy: ControllerPolicy


def drive(
    surface: CostSurface,
    profile: Profile | None,
    phases: Sequence[tuple[Traffic, int]],
    steps: int = 4000,
    switch_seconds: float = 0.0,
    seed: int = 0,
) -> Found:
    """phases: traffic and how many steps of its best arm it lasts; again and again."""
    rng, arms = np.random.default_rng(seed), surface.arms
    policy = ControllerPolicy(surface, profile, surface.max_batch_size)
    late: deque[StepRecord] = deque()
    now, last, phase, left = 0.0, -1, -1, 0.0
    best, taken, off = [], [], 0.0
    probes = switches = 0
    for step in range(steps):
        if left <= 0:
            phase = (phase + 1) % len(phases)
            traffic, length = phases[phase]
            n = traffic.batch_size
            tokens = n * (1 + np.array([traffic.expected(arm.gamma) for arm in arms]))
            context = n * (traffic.context - surface.kv_reference)
            seconds = surface.seconds[:, n] + surface.kv_seconds * context
            rates = tokens / seconds
            left = length * tokens[rates.argmax()]
        while late and late[0].step < step - LAG:
            policy.observe(late.popleft(), now)
        choice = policy.choose(n, now)
        arm = choice.arm
        switched = arm != last and last >= 0
        paid = seconds[arm] + switch_seconds * switched
        took = paid * math.exp(0.03 * rng.standard_normal())
        now, last, left = now + took, arm, left - tokens[arm]
        best.append(tokens[arm] / rates.max())
        taken.append(paid)
        off += tokens[arm] / rates[0]
        probes += choice.probe_id > 0
        switches += switched
        counts = traffic.draw(arms[arm].gamma, rng)
        flags = StepFlags(switched=switched)
        kv = round(n * traffic.context)
        late.append(StepRecord(step, n, kv, arm, counts, took, flags, choice.probe_id))
    half = steps // 2
    return Found(
        sum(best) / sum(taken), off / sum(taken), sum(best[half:]) / sum(taken[half:]),
        probes / steps, switches / steps, policy,
    )  # fmt: skip


def wrong(factor: Callable[[ProfileCell], float], surface: CostSurface = EAGLE) -> Profile:
    profile = surface.make_profile(FINGERPRINT, profile_sizes(surface.max_batch_size))
    return replace(
        profile,
        cells=tuple(
            replace(cell, step_seconds=cell.step_seconds * factor(cell)) for cell in profile.cells
        ),
    )


EXACT = wrong(lambda _: 1.0)


@pytest.mark.parametrize("factor", [0.5, 1.75, 2.0, 5.0])
def test_a_machine_that_differs_from_its_profile_by_a_common_factor(factor):
    """Hardly anything is accepted at B = 64: off is best, and has to be found."""
    steps = drive(EAGLE, wrong(lambda _: factor), [(Traffic([0.1], 64), 10**6)], steps=2500)
    assert steps.off > 0.985
    assert steps.late > 0.99


@pytest.mark.parametrize("period", [20, 100])
def test_context_that_depends_on_the_batch_size(period):
    long, short = Traffic([0.7], 2, 100_000.0), Traffic([0.7], 32, 500.0)
    assert drive(EAGLE, EXACT, [(long, period), (short, period)]).oracle > 0.985


@pytest.mark.parametrize("period", [20, 100])
def test_acceptance_that_depends_on_the_batch_size(period):
    alone, many = Traffic(TRAFFIC_CURVES["json"], 1), Traffic(TRAFFIC_CURVES["prose"], 64)
    assert drive(EAGLE, EXACT, [(alone, period), (many, period)]).oracle > 0.985


@pytest.mark.parametrize(("period", "bar"), [(20, 0.96), (50, 0.98), (100, 0.985), (400, 0.99)])
def test_traffic_that_returns_is_not_learnt_again(period, bar):
    phases = [(Traffic(TRAFFIC_CURVES[kind], 16), period) for kind in ("json", "prose")]
    assert drive(EAGLE, EXACT, phases).oracle > bar


def test_traffic_that_returns_while_nothing_is_drafted_is_found_by_looking():
    phases = [(Traffic(TRAFFIC_CURVES[kind], 16), 100) for kind in ("json", "garbled")]
    assert drive(EAGLE, EXACT, phases).late > 0.955


@pytest.mark.parametrize("kind", ["json", "code", "prose"])
def test_probes_are_few_when_nothing_changes_and_a_switch_has_a_price(kind):
    steps = drive(
        EAGLE, EXACT, [(Traffic(TRAFFIC_CURVES[kind], 16), 10**6)], 2758, switch_seconds=2e-4
    )
    assert steps.probes <= 0.02
    assert steps.oracle > 0.993
    core = steps.policy.controller
    assert core.explorer.probe_steps / 2758 == pytest.approx(steps.probes, abs=1e-3)


def test_the_price_of_a_switch_is_measured():
    phases = [(Traffic(TRAFFIC_CURVES[kind], 16), 50) for kind in ("json", "prose")]
    steps = drive(EAGLE, EXACT, phases, switch_seconds=1e-3)
    assert explain(steps.policy.controller, 16).switch_seconds == pytest.approx(1e-3, rel=0.3)


@pytest.mark.parametrize(
    "factor",
    [
        lambda cell: 3.0 if cell.gamma else 1.0,
        lambda cell: 1 / 3 if cell.gamma else 1.0,
        lambda cell: 2.0 if cell.gamma % 2 else 1.0,
    ],
    ids=["drafting-3x", "drafting-a-third", "every-second-gamma-2x"],
)
def test_costs_that_are_wrong_beyond_the_bound_of_drift(factor):
    steps = drive(EAGLE, wrong(factor), [(Traffic(TRAFFIC_CURVES["code"], 8), 10**6)], steps=2500)
    assert steps.oracle > 0.985


def test_an_engine_of_fast_steps_is_planned_for_as_often_as_a_slow_one():
    fast = replace(EAGLE, seconds=EAGLE.seconds * 0.1, kv_seconds=EAGLE.kv_seconds * 0.1)
    phases = [(Traffic(TRAFFIC_CURVES[kind], 16), 150) for kind in ("json", "prose", "code")]
    assert drive(fast, wrong(lambda _: 1.0, fast), phases).oracle > 0.985


def test_an_explanation_says_which_earlier_traffic_the_present_one_resembles():
    phases = [
        (Traffic(TRAFFIC_CURVES["json"], 16), 200),
        (Traffic(TRAFFIC_CURVES["prose"], 16), 200),
    ]
    first = explain(drive(EAGLE, EXACT, phases, steps=150).policy.controller, 16)
    assert first.resembles is None
    assert first.traffic_states == 1
    third = explain(drive(EAGLE, EXACT, phases, steps=500).policy.controller, 16)
    assert third.traffic_states == 2
    assert third.resembles is not None
    assert third.resembles.began_seconds_ago > third.resembles.ended_seconds_ago > 0
    assert third.resembles.visits >= 1
