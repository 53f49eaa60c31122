"""Prompts beside decoding: their price is learnt, and is charged to no arm."""

import random
from dataclasses import replace

import pytest

from controller.core.clock import VirtualClock
from controller.core.cost.live_estimates import PrefillPrice
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import Capabilities
from controller.core.settings import PlannerSettings
from controller.core.step_report import StepReport
from controller.wire.explanations import explain
from tests.support.accepted_counts import accepted_counts
from tests.support.virtual_engine import engine_spec, gpu_like, profile_of

ACCEPTANCE = 0.6
BATCH = 8


class Engine:
    """Runs the plan's arms; every so many steps, prompts are read beside decoding."""

    def __init__(self, every: int = 0, tokens: int = 0, draft_lag: int = 0) -> None:
        spec = replace(engine_spec(), capabilities=Capabilities(draft_lag=draft_lag))
        self.clock, self.rng = VirtualClock(), random.Random(5)
        profile = profile_of(spec, gpu_like)
        self.core = EngineController(spec, PlannerSettings(), profile, self.clock)
        self.every, self.tokens, self.step = every, tokens, 0
        # What a step beside prompts takes longer.
        self.standstill = 0.0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            row = self.core.decide(BATCH)
            arm = row.probe.arm if row.probe else row.arm
            counts = accepted_counts(self.rng, BATCH, arm.gamma, ACCEPTANCE)
            tokens = self.tokens if self.every and self.step % self.every == 0 else 0
            seconds = gpu_like(arm.gamma, BATCH) + 2e-5 * tokens
            seconds += self.standstill if tokens else 0.0
            self.clock.advance(seconds)
            report = StepReport(
                self.step, BATCH, BATCH * 512, arm.drafter, arm.gamma, tuple(counts), seconds,
                probe_id=row.probe.probe_id if row.probe else 0, prefill_tokens=tokens,
            )  # fmt: skip
            self.core.observe(report)
            self.core.next_plan()

    @property
    def gamma(self) -> int:
        return self.core.current_plan().row_for(BATCH).arm.gamma


def test_the_price_is_a_ratio_of_sums():
    price = PrefillPrice()
    assert price.seconds_of(100) == 0
    for tokens in (100, 1000, 500):
        price.observe(tokens, 0.01 + 1e-5 * tokens, 0.01)
        price.count(tokens)
    assert price.seconds_of(2000) == pytest.approx(0.02)
    assert 0 < price.seconds_a_step < price.seconds_of(1000)


def test_prompts_move_no_arms_cost_and_acceptance_counts_beside_them():
    engine = Engine(every=1, tokens=1000)
    engine.run(400)
    explained = explain(engine.core, BATCH)
    assert all(arm.cost_drift == pytest.approx(1, abs=0.01) for arm in explained.arms)
    position = explained.positions[0]
    assert position.exposures > 500
    assert position.conditional_acceptance == pytest.approx(ACCEPTANCE, abs=0.06)
    plain = next(arm for arm in explained.arms if arm.arm.gamma == 0)
    assert plain.step_seconds == pytest.approx(gpu_like(0, BATCH) + 0.02, rel=0.3)


def test_where_every_step_reads_prompts_a_longer_draft_pays():
    calm, busy = Engine(), Engine(every=1, tokens=2000)
    for engine in (calm, busy):
        engine.run(600)
    assert busy.gamma > calm.gamma


def test_a_machine_that_stood_still_beside_a_prompt_is_no_price_of_prompts():
    engine = Engine(every=1, tokens=1000)
    engine.run(200)
    before = engine.core._prefill.seconds_of(1000)
    engine.standstill = 600.0
    engine.run(1)
    engine.standstill = 0.0
    after = engine.core._prefill.seconds_of(1000)
    assert before == pytest.approx(0.02, rel=0.2)
    assert after < 1.2 * before
    # One that lasts is learnt all the same.
    engine.standstill = 0.2
    engine.run(600)
    assert engine.core._prefill.seconds_of(1000) == pytest.approx(0.22, rel=0.2)


def test_a_probe_of_an_engine_that_verifies_a_step_later_lasts_a_step_longer():
    def first_probe(engine: Engine) -> int:
        while engine.core.explorer.running is None:
            engine.run(1)
        return engine.core.explorer.running[1].steps

    assert first_probe(Engine(draft_lag=1)) == first_probe(Engine()) + 1
