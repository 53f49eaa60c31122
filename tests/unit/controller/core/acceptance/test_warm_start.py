"""Estimates that outlive a session: pooled, aged, and never louder than live traffic."""

import dataclasses
import json
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.core.acceptance.traffic_estimator import TrafficEstimator
from controller.core.acceptance.warm_start import (
    HALF_LIFE_SECONDS,
    WARM_EXPOSURES,
    AcceptanceSnapshot,
    from_json,
    pool_snapshots,
    to_json,
)
from controller.core.clock import VirtualClock
from controller.core.engine.engine_controller import EngineController
from controller.core.engine_spec import DrafterSpec
from controller.core.errors import InvalidBeliefError
from controller.core.model_shapes import DrafterKind
from controller.core.settings import PlannerSettings
from controller.core.step_report import ClassCounts, StepReport
from tests.support.virtual_engine import VirtualEngine, engine_spec, gpu_step_seconds, profile_of

GOOD = AcceptanceSnapshot("mtp", "", (0.9, 0.8), (1000.0, 800.0))
POOR = AcceptanceSnapshot("mtp", "", (0.1,), (1000.0,))


def test_of_equal_beliefs_the_younger_counts_more():
    (fresh,) = pool_snapshots([(GOOD, 0.0), (POOR, HALF_LIFE_SECONDS)])
    assert fresh.conditional[0] == pytest.approx((2 * 0.9 + 0.1) / 3)
    assert fresh.conditional[1] == pytest.approx(0.8)
    (old,) = pool_snapshots([(GOOD, HALF_LIFE_SECONDS), (POOR, 0.0)])
    assert old.conditional[0] == pytest.approx((0.9 + 2 * 0.1) / 3)


def test_however_many_tell_they_are_bounded_and_what_is_old_fades():
    (many,) = pool_snapshots([(GOOD, 0.0)] * 200)
    assert many.exposures == pytest.approx((WARM_EXPOSURES, 0.8 * WARM_EXPOSURES))
    (aged,) = pool_snapshots([(GOOD, 6 * HALF_LIFE_SECONDS)])
    assert aged.exposures[0] == pytest.approx(1000 / 64)
    assert pool_snapshots([(GOOD, 20 * HALF_LIFE_SECONDS)]) == []
    assert pool_snapshots([]) == []


def test_drafters_and_classes_stay_apart():
    code = dataclasses.replace(POOR, label="code")
    other = dataclasses.replace(GOOD, drafter="dflash")
    first_acceptance = {
        (b.drafter, b.label): b.conditional[0]
        for b in pool_snapshots((b, 0.0) for b in (GOOD, code, other))
    }
    assert first_acceptance == pytest.approx(
        {("mtp", ""): 0.9, ("mtp", "code"): 0.1, ("dflash", ""): 0.9}
    )


@given(
    st.lists(
        st.builds(
            lambda pairs, label: AcceptanceSnapshot(
                "mtp", label, tuple(a for a, _ in pairs), tuple(n for _, n in pairs)
            ),
            st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1e9)), max_size=16),
            st.text(max_size=8),
        ),
        max_size=5,
    ),
    st.floats(0, 1e9),
)
def test_beliefs_survive_the_store_and_pool_to_beliefs(beliefs, age):
    assert from_json(to_json(beliefs)) == beliefs
    for pooled in pool_snapshots((belief, age) for belief in beliefs):
        assert max(pooled.exposures) <= WARM_EXPOSURES * (1 + 1e-9)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "7", "{}x", '["x"]', "[{}]", "[" * 10_000,
        json.dumps([{"drafter": "mtp", "label": "", "conditional": [1.5], "exposures": [1]}]),
        json.dumps([{"drafter": "mtp", "label": "", "conditional": [0.5], "exposures": [-1]}]),
        json.dumps([{"drafter": "mtp", "label": "", "conditional": [0.5], "exposures": []}]),
        json.dumps([{"drafter": "mtp", "label": "", "conditional": None, "exposures": []}]),
        json.dumps([{"drafter": "m", "label": "x" * 99, "conditional": [], "exposures": []}]),
        '[{"drafter": "mtp", "label": "", "conditional": [NaN], "exposures": [1]}]',
        '[{"drafter": "mtp", "label": "", "conditional": [0.5], "exposures": [Infinity]}]',
    ],
)  # fmt: skip
def test_what_is_no_belief_is_refused(text):
    with pytest.raises(InvalidBeliefError):
        from_json(text)


def engine(beliefs=(), seed=0):
    clock = VirtualClock()
    spec = engine_spec()
    core = EngineController(spec, PlannerSettings(), profile_of(spec, gpu_step_seconds), clock)
    if beliefs:
        core.warm_start_from(pool_snapshots((belief, 0.0) for belief in beliefs), "a test")
        core.next_plan()
    return VirtualEngine(core, clock, gpu_step_seconds, random.Random(seed))


def rate_of_the_first_steps(beliefs, acceptance, steps=60):
    rates = []
    for seed in range(8):
        running = engine(beliefs, seed)
        running.run(steps, 4, acceptance)
        rates.append(running.tokens / running.elapsed)
    return statistics.mean(rates)


def learnt(acceptance):
    running = engine()
    running.run(1500, 4, acceptance)
    return running.core.traffic.acceptance_snapshots()


HIGH, LOW = [0.97] * 7, [0.15] * 7


def test_what_others_learnt_puts_the_next_plan_in_the_right_place():
    for acceptance in (HIGH, LOW):
        warm = engine(learnt(acceptance)).core.current_plan().row_for(4).arm.gamma
        long = engine()
        long.run(1500, 4, acceptance)
        assert abs(warm - long.core.current_plan().row_for(4).arm.gamma) <= 1


def test_the_first_steps_are_better_when_it_is_right_and_soon_no_worse_when_it_is_wrong():
    for acceptance, other in ((HIGH, LOW), (LOW, HIGH)):
        cold = rate_of_the_first_steps([], acceptance)
        assert rate_of_the_first_steps(learnt(acceptance), acceptance) >= 0.995 * cold
        wrong = rate_of_the_first_steps(learnt(other), acceptance, 600)
        assert wrong >= 0.97 * rate_of_the_first_steps([], acceptance, 600)


def test_a_class_begins_from_its_belief_when_it_first_comes():
    spec = DrafterSpec("mtp", DrafterKind.MTP, (0, 1, 2))
    traffic = TrafficEstimator([spec], PlannerSettings())
    traffic.warm_start_from(
        [
            AcceptanceSnapshot("mtp", "code", (0.95, 0.95), (60.0, 57.0)),
            AcceptanceSnapshot("mtp", "", (0.5, 0.5), (60.0, 30.0)),
            AcceptanceSnapshot("elsewhere", "", (0.5,), (60.0,)),
        ]
    )
    assert not traffic.classes
    assert traffic.estimators["mtp"].curve().conditional[0] == pytest.approx(0.5, abs=0.03)
    counts = (0, 1, 1)
    report = StepReport(1, 2, 64, "mtp", 2, counts, 0.01, classes=(ClassCounts("code", counts),))
    traffic.observe(report)
    assert traffic.classes["code"]["mtp"].curve().conditional[0] > 0.8
    snapshot_keys = {(b.drafter, b.label) for b in traffic.acceptance_snapshots()}
    assert snapshot_keys == {("mtp", ""), ("mtp", "code")}
