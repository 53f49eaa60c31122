"""A machine that is slow for a while: no arm is charged for it, and no gain is impossible."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.cost.model import CostModel
from controller.core.cost.table import CostOrder
from controller.core.engine.prediction_audit import estimate_gains
from controller.core.engine_spec import Arm
from controller.core.settings import PlannerSettings
from controller.core.step_report import StepReport
from controller.wire.explanations import explain
from tests.support.accepted_counts import accepted_counts
from tests.support.virtual_engine import (
    GAMMAS,
    VirtualEngine,
    engine_spec,
    gpu_step_seconds,
    make_engine,
    profile_of,
)

BATCH_SIZE = 2


def on_a_cpu(gamma, batch_size):
    """35 ms without drafting, 7 ms more for every draft token: pays from an acceptance of 0.2."""
    return 0.034 + 0.006 * gamma + 0.0006 * batch_size * (gamma + 1)


class BusyMachine:
    """An engine whose steps take `factor` times as long as they should, with log-normal noise.

    Its beliefs are checked after every step.
    """

    def __init__(self, profile_error=1.0, seed=0, noise=0.03):
        self.factor = 1.0
        self.engine: VirtualEngine = make_engine(
            profile_error, lambda g, b: self.factor * on_a_cpu(g, b), seed
        )
        self.engine.noise = noise
        self.core = self.engine.core

    def run(self, steps, acceptance):
        """Under the plan.  Returns the draft lengths that ran."""
        before = len(self.engine.arms_run)
        for _ in range(steps):
            self.engine.run(1, BATCH_SIZE, [acceptance] * 7)
            self.require_order()
        return [arm.gamma for arm in self.engine.arms_run[before:]]

    def run_arm(self, gamma, steps, acceptance, batch_size=BATCH_SIZE):
        """Whatever the plan says, as an engine does that an operator has pinned."""
        engine = self.engine
        for _ in range(steps):
            counts = accepted_counts(engine.rng, batch_size, gamma, acceptance)
            seconds = engine.seconds(gamma, batch_size)
            seconds *= engine.rng.lognormvariate(0, engine.noise)
            engine.clock.advance(seconds)
            engine.step += 1
            self.core.observe(
                StepReport(
                    engine.step, batch_size, batch_size * 512, "mtp", gamma, tuple(counts), seconds
                )
            )
            self.core.next_plan()
            self.require_order(batch_size)

    def require_order(self, batch_size=BATCH_SIZE):
        explanation = explain(self.core, batch_size)
        seconds = np.array(explanation.table.seconds)
        assert np.all(np.diff(seconds, axis=0) >= -1e-12), "a longer draft is believed cheaper"
        assert np.all(np.diff(seconds, axis=1) >= -1e-12), "a larger batch is believed cheaper"
        chosen = next(arm for arm in explanation.arms if arm.chosen)
        values = {arm.arm: arm.tokens_per_second for arm in explanation.arms}
        gain = estimate_gains(values, self.core.spec, chosen.arm)["off"]
        assert gain <= (1 + chosen.expected_accepted) * (1 + 1e-9)


def steps_until_off(gammas):
    """Steps until gamma = 0 has run in 15 of 20 steps."""
    for last in range(20, len(gammas)):
        if sum(gamma == 0 for gamma in gammas[last - 20 : last]) >= 15:
            return last
    return math.inf


# Which arms run in the slow minute, and which after it until the plan is followed again.
MINUTES = [((0,), (1,)), ((0,), (3,)), ((0, 1), (1,)), ((1,), (0, 1)), ((0, 3), (3, 1))]


@pytest.mark.parametrize("factor", [2.0, 3.0])
@pytest.mark.parametrize(("slow", "after"), MINUTES)
def test_after_a_slow_minute_drafting_that_does_not_pay_is_left(slow, after, factor):
    machine = BusyMachine()
    machine.run_arm(0, 40, 0.9)
    machine.run_arm(1, 40, 0.9)
    machine.factor = factor
    for gamma in slow:
        machine.run_arm(gamma, 40, 0.9)
    machine.factor = 1.0
    for gamma in after:
        machine.run_arm(gamma, 40, 0.9)
    assert steps_until_off(machine.run(450, 0.1)) <= 400


@pytest.mark.parametrize("profile_error", [0.7, 1.3, None])
def test_with_a_wrong_profile_or_none_too(profile_error):
    machine = BusyMachine(profile_error, seed=1)
    machine.run(80, 0.9)
    machine.factor = 2.0
    machine.run_arm(0, 40, 0.9)
    machine.factor = 1.0
    machine.run_arm(1, 40, 0.9)
    assert steps_until_off(machine.run(450, 0.1)) <= 400


def test_on_a_machine_that_is_always_busy_off_is_found():
    machine = BusyMachine(seed=2, noise=0.3)
    rng = random.Random(3)
    for _ in range(12):
        machine.factor = rng.choice([1.0, 1.5, 2.5])
        machine.run(25, 0.9)
    ratios = []
    for _ in range(24):
        machine.factor = rng.choice([1.0, 1.5, 2.5])
        ratios += machine.run(25, 0.05)
    assert steps_until_off(ratios) <= 300
    assert sum(gamma == 0 for gamma in ratios[-200:]) > 150


def cost_model():
    spec = engine_spec()
    return CostModel(spec.arms, (1, 2, 4, 8), profile_of(spec, gpu_step_seconds), PlannerSettings())


def observe(model, arm, batch_size, seconds):
    expected = model.predict(arm, batch_size, 512 * batch_size)
    model.observe((arm, model.bucket_of(batch_size)), 512.0, expected, seconds)
    model.commit()


def relative_costs(model, bucket=1):
    seconds = model.costs(512.0).seconds[:, bucket]
    return seconds / seconds[0]


@pytest.mark.parametrize("arm", range(len(GAMMAS)))
def test_a_leap_of_a_known_arm_is_the_machines(arm):
    """Only one arm runs when the machine slows down, and another one when it recovers."""
    model, rng = cost_model(), random.Random(arm)
    for i in range(300):
        known = i % len(GAMMAS)
        observe(model, known, 2, gpu_step_seconds(GAMMAS[known], 2) * rng.lognormvariate(0, 0.03))
    before = relative_costs(model)
    for _ in range(60):
        observe(model, arm, 2, 2 * gpu_step_seconds(GAMMAS[arm], 2) * rng.lognormvariate(0, 0.03))
    assert relative_costs(model) == pytest.approx(before, rel=0.08)
    other = (arm + 3) % len(GAMMAS)
    for _ in range(60):
        observe(model, other, 2, gpu_step_seconds(GAMMAS[other], 2) * rng.lognormvariate(0, 0.03))
    assert relative_costs(model) == pytest.approx(before, rel=0.08)


def test_an_arm_that_grows_dearer_for_good_is_told_from_the_machine():
    model, rng = cost_model(), random.Random(0)
    for dearer in (1.0, 1.6):
        for i in range(600):
            arm = (i // 10) % 2 * 3
            factor = dearer if arm else 1.0
            observe(
                model,
                arm,
                2,
                factor * gpu_step_seconds(GAMMAS[arm], 2) * rng.lognormvariate(0, 0.03),
            )
    expected = 1.6 * gpu_step_seconds(GAMMAS[3], 2) / gpu_step_seconds(0, 2)
    assert relative_costs(model)[3] == pytest.approx(expected, rel=0.1)


def test_steps_of_before_a_slow_minute_are_learnt_before_those_of_it():
    model = cost_model()
    for arm in (0, 1):
        for _ in range(50):
            observe(model, arm, 2, gpu_step_seconds(GAMMAS[arm], 2))
    before = relative_costs(model)[1]
    # All between two plans: too few steps of the first to be learnt by themselves.
    for arm, steps, factor in ((1, 5, 1.0), (0, 7, 1.3), (1, 5, 1.0)):
        for _ in range(steps):
            expected = model.predict(arm, 2, 1024)
            cell = arm, model.bucket_of(2)
            model.observe(cell, 512.0, expected, factor * gpu_step_seconds(GAMMAS[arm], 2))
    model.commit()
    for _ in range(20):
        observe(model, 1, 2, gpu_step_seconds(GAMMAS[1], 2))
    assert relative_costs(model)[1] > 0.85 * before


REPORTS = st.lists(
    st.tuples(
        st.integers(0, len(GAMMAS) - 1), st.sampled_from([1, 2, 3, 8]), st.integers(1, 12),
        st.floats(0.2, 5.0),
    ),
    min_size=1, max_size=40,
)  # fmt: skip


@given(REPORTS, st.floats(0.0, 4000.0))
@settings(max_examples=60, deadline=None)
def test_whatever_is_reported_more_work_is_never_believed_cheaper(reports, kv_tokens):
    model = cost_model()
    for arm, batch_size, steps, factor in reports:
        for _ in range(steps):
            observe(model, arm, batch_size, factor * gpu_step_seconds(GAMMAS[arm], batch_size))
        seconds = model.costs(kv_tokens).seconds
        assert np.all(np.diff(seconds, axis=0) >= -1e-12)
        assert np.all(np.diff(seconds, axis=1) >= -1e-12)


TWO = [Arm(d, g) for d in ("mtp", "dflash") for g in (0, 1, 4)]
TABLES = st.lists(st.floats(1e-4, 1.0), min_size=24, max_size=24)


@given(TABLES, st.lists(st.integers(0, 3), min_size=24, max_size=24))
@settings(max_examples=200, deadline=None)
def test_a_table_is_put_in_order_and_its_newest_cell_stays(values, seen):
    order, table = CostOrder(TWO), np.array(values).reshape(6, 4)
    when = np.array(seen).reshape(6, 4)
    when[4, 2] = 9
    new_table = order.restore_order(table, when)
    assert new_table[4, 2] == table[4, 2]
    for drafter in (new_table[:3], new_table[3:]):
        assert np.all(np.diff(drafter, axis=0) >= 0)
        assert np.all(np.diff(drafter, axis=1) >= 0)
    assert np.all(new_table[[0, 3]].max(axis=0) <= new_table[[1, 2, 4, 5]].min(axis=0))
    assert order.lower_to_order(new_table) is new_table
