"""Prompts beside decoding: their price is learnt, and is charged to no arm."""

import random
from dataclasses import replace

import pytest

from controller.core.clock import VirtualClock
from controller.core.cost.live_estimates import PrefillPrice
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import Arm, Capabilities
from controller.core.settings import PlannerSettings
from controller.core.step_report import StepReport
from controller.wire.explanations import explain
from tests.support.virtual_engine import (
    Acceptance,
    VirtualEngine,
    engine_spec,
    gpu_step_seconds,
    profile_of,
)

ACCEPTANCE = 0.6
BATCH = 8


class PromptEngine(VirtualEngine):
    """Every few steps, prompts of a given length are read beside decoding."""

    def __init__(self, every: int = 0, tokens: int = 0, draft_lag: int = 0) -> None:
        spec = replace(engine_spec(), capabilities=Capabilities(draft_lag=draft_lag))
        clock, profile = VirtualClock(), profile_of(spec, gpu_step_seconds)
        core = EngineController(spec, PlannerSettings(), profile, clock)
        super().__init__(core, clock, rng=random.Random(5), noise=0.0)
        self.every, self.prompt = every, tokens
        # What a step beside prompts takes longer.
        self.standstill = 0.0

    def run(self, steps: int, batch_size: int = BATCH, acceptance: Acceptance = ACCEPTANCE) -> None:
        super().run(steps, batch_size, acceptance)

    def decode(self, arm: Arm, batch_size: int, acceptance: Acceptance) -> StepReport:
        tokens = self.prompt if self.every and (self.step + 1) % self.every == 0 else 0
        more = 2e-5 * tokens + (self.standstill if tokens else 0.0)
        self.seconds = lambda gamma, size: gpu_step_seconds(gamma, size) + more
        return replace(super().decode(arm, batch_size, acceptance), prefill_tokens=tokens)

    @property
    def gamma(self) -> int:
        return self.plan.row_for(BATCH).arm.gamma


def test_the_price_is_a_ratio_of_sums():
    price = PrefillPrice(PlannerSettings())
    assert price.predict_seconds(100) == 0
    for tokens in (100, 1000, 500):
        price.observe(tokens, 0.01 + 1e-5 * tokens, 0.01)
        price.count_prompt_tokens(tokens)
    assert price.predict_seconds(2000) == pytest.approx(0.02)
    assert 0 < price.mean_seconds_per_step < price.predict_seconds(1000)


def test_prompts_move_no_arms_cost_and_acceptance_counts_beside_them():
    engine = PromptEngine(every=1, tokens=1000)
    engine.run(400)
    explained = explain(engine.core, BATCH)
    assert all(arm.cost_drift == pytest.approx(1, abs=0.01) for arm in explained.arms)
    position = explained.positions[0]
    assert position.exposures > 500
    assert position.conditional_acceptance == pytest.approx(ACCEPTANCE, abs=0.06)
    plain = next(arm for arm in explained.arms if arm.arm.gamma == 0)
    assert plain.step_seconds == pytest.approx(gpu_step_seconds(0, BATCH) + 0.02, rel=0.3)


def test_where_every_step_reads_prompts_a_longer_draft_pays():
    calm, busy = PromptEngine(), PromptEngine(every=1, tokens=2000)
    for engine in (calm, busy):
        engine.run(600)
    assert busy.gamma > calm.gamma


def test_a_machine_that_stood_still_beside_a_prompt_is_no_price_of_prompts():
    engine = PromptEngine(every=1, tokens=1000)
    engine.run(200)
    before = engine.core._prefill_price.predict_seconds(1000)
    engine.standstill = 600.0
    engine.run(1)
    engine.standstill = 0.0
    after = engine.core._prefill_price.predict_seconds(1000)
    assert before == pytest.approx(0.02, rel=0.2)
    assert after < 1.2 * before
    # One that lasts is learnt all the same.
    engine.standstill = 0.2
    engine.run(600)
    assert engine.core._prefill_price.predict_seconds(1000) == pytest.approx(0.22, rel=0.2)


def test_a_probe_of_an_engine_that_verifies_a_step_later_lasts_a_step_longer():
    def first_probe(engine: PromptEngine) -> int:
        while engine.core.explorer.running_probe is None:
            engine.run(1)
        return engine.core.explorer.running_probe[1].steps

    assert first_probe(PromptEngine(draft_lag=1)) == first_probe(PromptEngine()) + 1
