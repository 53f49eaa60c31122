"""Kinds of traffic are remembered, recognised when they return, and bound to batch sizes."""

import numpy as np
import pytest

from controller.core.acceptance.traffic_estimator import TrafficEstimator
from controller.core.engine_spec import Arm, DrafterSpec
from controller.core.model_shapes import DrafterKind
from controller.core.settings import PlannerSettings
from controller.core.step_report import StepReport

SPECS = (
    DrafterSpec("mtp", DrafterKind.MTP, (0, 1, 2, 3, 4)),
    DrafterSpec("dflash", DrafterKind.DFLASH, (0, 4)),
)
JSON, PROSE, GARBLED = 0.92, 0.5, 0.1


class FedEstimator:
    """Feeds an estimator; decides every fourth step, as an engine of 10 ms steps does."""

    def __init__(self, seed=0):
        self.traffic = TrafficEstimator(SPECS, PlannerSettings())
        self.rng = np.random.default_rng(seed)
        self.step = 0

    def run(self, steps, acceptance, batch=16, gamma=4, drafter="mtp", prompt=True):
        """Returns in which of the steps the traffic was called another one."""
        called = []
        for i in range(steps):
            self.step += 1
            counts, left = [], batch
            for _ in range(gamma):
                good = int(self.rng.binomial(left, acceptance))
                counts.append(left - good)
                left = good
            report = StepReport(
                self.step, batch, 100 * batch, drafter, gamma, (*counts, left), 0.01
            )
            if self.traffic.observe(report, 0.01 * self.step):
                called.append(i)
                if prompt:
                    self.traffic.commit()
            elif self.step % 4 == 0:
                self.traffic.commit()
        return called

    def expected(self, gamma=4, batch=16, drafter="mtp"):
        expected_accepted = self.traffic.curves().expected_accepted(
            [Arm(drafter, gamma)], np.array([float(batch)])
        )
        return float(expected_accepted[0, 0])


def tokens(acceptance, gamma=4):
    return sum(acceptance**k for k in range(1, gamma + 1))


def test_traffic_that_returns_is_recognised_within_two_steps_and_known_at_once():
    engine = FedEstimator()
    for _ in range(3):
        engine.run(100, JSON)
        engine.run(100, PROSE)
    called = engine.run(4, JSON)
    assert called
    assert called[0] <= 1
    assert engine.expected() == pytest.approx(tokens(JSON), rel=0.06)
    assert len(engine.traffic.state_tracker.remembered) == 1


def test_a_drafter_that_did_not_run_since_is_remembered_with_its_traffic():
    engine = FedEstimator()
    engine.run(100, JSON)
    engine.run(30, 0.7, drafter="dflash")
    engine.run(100, PROSE)
    engine.run(40, PROSE, drafter="dflash")
    engine.run(60, PROSE)
    engine.run(20, JSON)
    engine.run(20, PROSE)
    assert engine.expected(drafter="dflash") == pytest.approx(tokens(PROSE), rel=0.15)


def test_stationary_traffic_has_one_state_and_the_same_estimate_for_every_batch():
    engine = FedEstimator()
    for batch in (1, 64, 4, 32, 8, 2, 16) * 3:
        engine.run(60, 0.7, batch=batch)
    assert engine.traffic.shifts <= 3
    assert [engine.expected(batch=b) for b in (1, 8, 64)] == pytest.approx(
        [tokens(0.7)] * 3, rel=0.1
    )


def test_batch_sizes_with_traffic_of_their_own_are_valued_by_it():
    engine = FedEstimator()
    for _ in range(12):
        engine.run(30, JSON, batch=1)
        engine.run(30, PROSE, batch=64)
    assert engine.expected(batch=64) == pytest.approx(tokens(PROSE), rel=0.15)
    assert engine.expected(batch=1) == pytest.approx(tokens(JSON), rel=0.15)


def test_slow_change_makes_no_states_and_is_followed():
    engine = FedEstimator()
    for i in range(60):
        engine.run(20, 0.9 - 0.6 * i / 60, batch=16)
    assert engine.expected() == pytest.approx(tokens(0.31), rel=0.35)


def test_no_more_than_the_most_are_remembered_and_old_ones_are_forgotten():
    engine = FedEstimator()
    for acceptance in (0.95, 0.05, 0.8, 0.2, 0.9, 0.35, 0.98, 0.1, 0.6, 0.02):
        engine.run(120, acceptance)
    assert len(engine.traffic.state_tracker.remembered) <= PlannerSettings().remembered_states_max


def test_what_a_shift_is_taken_for_is_named():
    engine = FedEstimator()
    engine.run(100, JSON)
    assert engine.traffic.curves().earlier_visit is None
    engine.run(100, PROSE)
    engine.run(20, JSON)
    resemblance = engine.traffic.curves().earlier_visit
    assert resemblance is not None
    assert (resemblance.began_at, resemblance.visits) == (0.0, 1)
    assert resemblance.ended_at == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_drafts_of_which_all_or_none_are_accepted_are_no_shift(acceptance):
    engine = FedEstimator()
    engine.run(40, acceptance, batch=4, gamma=3)
    assert engine.run(400, acceptance, batch=4, gamma=3) == []
    assert engine.expected(gamma=1) == pytest.approx(acceptance, abs=0.03)


@pytest.mark.parametrize("seed", range(4))
def test_any_course_of_traffic_keeps_the_states_in_order(seed):
    """States come, go and return while they are young, before a decision is made for them."""
    engine = FedEstimator(seed)
    for _ in range(150):
        rng = engine.rng
        engine.run(
            int(rng.integers(1, 40)), float(rng.choice([0.0, 0.1, 0.5, 0.9, 1.0])),
            batch=int(rng.choice([1, 4, 64])), gamma=int(rng.integers(0, 5)),
            drafter=str(rng.choice(["mtp", "dflash"])), prompt=False,
        )  # fmt: skip
        states = engine.traffic.state_tracker
        assert len(states.remembered) <= PlannerSettings().remembered_states_max
        assert sum(state.probability for state in states.all_states) == pytest.approx(1.0)
        assert 0 <= engine.expected() <= 4


def test_two_drafters_that_both_turn_useless_are_not_taken_for_good_in_turn():
    engine = FedEstimator()
    engine.run(400, 0.5, batch=8, gamma=3)
    engine.run(100, 0.3, batch=8, drafter="dflash")
    engine.run(300, 0.5, batch=8, gamma=3)
    called = 0
    for _ in range(12):
        for drafter in ("mtp", "dflash"):
            called += len(engine.run(10, 0.0, batch=4, drafter=drafter))
    assert called <= 12
    assert engine.expected(batch=4) < 0.1
    assert engine.expected(batch=4, drafter="dflash") < 0.1


def test_the_row_of_the_last_batch_has_the_traffic_of_its_octave():
    engine = FedEstimator()
    for _ in range(12):
        engine.run(30, JSON, batch=62)
        engine.run(30, GARBLED, batch=68)
    engine.run(30, JSON, batch=62)
    # A row up to 66 ends in the octave of 68.
    row = np.array([56.0, 66.0, 80.0])
    expected_accepted = engine.traffic.curves().expected_accepted([Arm("mtp", 4)], row)[0]
    assert expected_accepted[1] == pytest.approx(tokens(JSON), rel=0.15)
    assert expected_accepted[2] < expected_accepted[1]
