"""What online updates are found to do to acceptance."""

import numpy as np
import pytest

from controller.core.step_report import RowGroup, StepFlags, StepReport
from controller.core.training.update_response import Forecast, UpdateResponse
from tests.support.accepted_counts import accepted_counts

RATES = (0.0, 0.02, 0.2)
GAMMA = 3


class Drafter:
    """One whose acceptance moves as the estimate assumes, with known numbers."""

    def __init__(self, base: float, gain: float, eta: float, delta: float, seed: int = 1) -> None:
        self.base, self.gain, self.eta, self.delta = base, gain, eta, delta
        self.state = 0.0
        self.rng = np.random.default_rng(seed)
        self.response = UpdateResponse()
        self.steps = 0

    def run(self, rounds: int, stride: int, *, batch: int = 8, gamma: int = GAMMA) -> None:
        """`rounds` rounds, with an update every `stride` of them (0: none)."""
        for _ in range(rounds):
            self.steps += 1
            landed = stride > 0 and self.steps % stride == 0
            if landed:
                self.state += self.eta * (1 - self.state)
            self.state *= 1 - self.delta
            chance = self.base + self.gain * self.state
            accepted = np.minimum(self.rng.geometric(1 - chance, batch) - 1, gamma)
            counts = tuple(np.bincount(accepted, minlength=gamma + 1).tolist())
            report = StepReport(
                self.steps, batch, batch, "eagle3", gamma, counts, 0.02,
                update_seconds=0.05 if landed else 0.0,
            )  # fmt: skip
            self.response.observe(report, is_learner_step=True)

    def reset(self) -> None:
        """Back to the first weights, as the next step reports it."""
        self.state = 0.0
        report = StepReport(
            self.steps, 1, 1, "eagle3", 0, (1,), 0.02, StepFlags(drafter_reset=True)
        )
        self.response.observe(report, is_learner_step=True)

    def forecast(self, horizon: float = 5000.0) -> Forecast:
        return self.response.forecast(RATES, horizon, 0)


def test_before_any_evidence_more_updates_are_expected_to_help():
    forecast = UpdateResponse().forecast(RATES, 5000.0, 0)
    ahead = forecast.mean[:, -1]
    assert ahead[0] < ahead[1] < ahead[2]
    assert (forecast.optimistic[1:, -1] > ahead[1:]).all()
    assert forecast.optimistic[0] == pytest.approx(forecast.mean[0])


def test_a_trial_shows_what_its_updates_reach():
    """What takes many updates to come true is hoped for, and no short trial can show it."""
    drafter = Drafter(0.75, 0.0, 0.03, 0.001)
    drafter.run(100, 0)
    never, short, longer, always = (
        drafter.response.forecast(RATES, 5000.0, 0, most) for most in (0.0, 5.0, 100.0, np.inf)
    )
    for forecast_variant in (never, short, longer, always):
        assert forecast_variant.mean == pytest.approx(always.mean)
        assert forecast_variant.optimistic == pytest.approx(always.optimistic)
        # Of what runs now nothing has to be shown.
        assert forecast_variant.testable[0] == pytest.approx(forecast_variant.optimistic[0])
    assert never.testable[1:] == pytest.approx(never.mean[1:])
    hoped = [
        float((forecast_variant.testable - forecast_variant.mean)[2, -1])
        for forecast_variant in (short, longer, always)
    ]
    assert hoped == sorted(hoped)
    most = float((always.optimistic - always.mean)[2, -1])
    assert 0.2 * most < hoped[0] < 0.7 * most
    assert 0.8 * most < hoped[2] < most


def test_what_is_reached_already_needs_no_trial_to_show_it():
    drafter = Drafter(0.6, 0.2, 0.1, 0.0)
    drafter.run(100, 0)
    before = drafter.response.forecast(RATES, 5000.0, 0, 0.0)
    drafter.run(300, 5)
    after = drafter.response.forecast(RATES, 5000.0, 0, 0.0)
    assert before.testable[2, -1] == pytest.approx(before.mean[2, -1])
    assert after.testable[2, -1] > after.mean[2, -1] + 0.001


def test_the_gain_is_found():
    drafter = Drafter(0.6, 0.2, 0.03, 0.001)
    for rounds, stride in ((300, 0), (1500, 5), (2500, 0), (800, 5)):
        drafter.run(rounds, stride)
    forecast = drafter.forecast()
    assert forecast.current == pytest.approx(0.6 + 0.2 * drafter.state, abs=0.03)
    settled = 0.2 * 0.006 / 0.007
    assert forecast.mean[2, -1] - forecast.mean[0, -1] == pytest.approx(settled, abs=0.08)


def test_a_drafter_that_does_not_answer_is_found_not_to():
    drafter = Drafter(0.8, 0.0, 0.03, 0.001)
    drafter.run(300, 0)
    drafter.run(1500, 5)
    forecast = drafter.forecast()
    assert forecast.gain < 0.03
    assert forecast.mean[2, -1] - forecast.mean[0, -1] < 0.02


def test_what_harms_has_no_gain_below_zero():
    drafter = Drafter(0.8, -0.3, 0.03, 0.001)
    drafter.run(300, 0)
    drafter.run(1500, 5)
    forecast = drafter.forecast()
    assert forecast.gain >= 0
    assert (forecast.mean[2] >= forecast.mean[0]).all()


def test_resets_take_away_what_was_won():
    kept, reset = (Drafter(0.6, 0.2, 0.03, 0.0) for _ in range(2))
    for _ in range(20):
        kept.run(100, 5)
        reset.run(100, 5)
        reset.reset()
    for drafter in (kept, reset):
        drafter.run(64, 5)
    # Without updates one may hold what it has, the other one loses it with the next request.
    assert reset.forecast().current > 0.63
    # Two requests on, most of it is gone: sooner than drift takes it.
    soon = reset.forecast(200.0)
    assert soon.current - soon.mean[0, -1] > 0.03
    assert kept.forecast().mean[0, -1] > reset.forecast().mean[0, -1] + 0.04


def test_a_single_rollback_does_not_take_away_what_is_won_after_it():
    kept, rolled_back = (Drafter(0.6, 0.2, 0.03, 0.0) for _ in range(2))
    for drafter in (kept, rolled_back):
        drafter.run(145, 10)
    rolled_back.reset()
    for drafter in (kept, rolled_back):
        drafter.run(400, 10)
    assert not rolled_back.response.is_reset_repeatedly
    # Without further updates it is expected to keep as much of it as one that never was.
    usual, ours = kept.forecast(), rolled_back.forecast()
    lost = ours.current - ours.mean[0, -1]
    assert lost == pytest.approx(usual.current - usual.mean[0, -1], abs=0.02)


def test_the_second_reset_shows_how_often_they_come():
    drafter = Drafter(0.6, 0.2, 0.03, 0.0)
    drafter.run(400, 10)
    drafter.reset()
    drafter.run(99, 10)
    once = drafter.response.is_reset_repeatedly
    drafter.reset()
    assert (once, drafter.response.is_reset_repeatedly) == (False, True)
    # What is won after it is expected to be gone with the next one.
    drafter.run(99, 5)
    soon = drafter.forecast(400.0)
    assert soon.mean[0, -1] < soon.current - 0.01


def test_longer_drafts_do_not_look_like_a_change():
    """Later positions are accepted less often; gamma moves, and nothing else does."""
    response = UpdateResponse()
    rng = np.random.default_rng(3)
    chances = (0.8, 0.6, 0.5, 0.5, 0.4, 0.4, 0.4)
    nows, shifts = [], 0
    for step in range(3000):
        gamma = 7 if step % 1000 > 500 else 1
        counts = accepted_counts(rng, 8, gamma, chances)
        response.observe(
            StepReport(step, 8, 8, "eagle3", gamma, tuple(counts), 0.02), is_learner_step=True
        )
        if step > 1000 and step % 250 == 0:
            nows.append(response.forecast(RATES, 5000.0, 0).current)
        if step == 2000:
            shifts = response.shifts
    assert nows == pytest.approx([0.8] * len(nows), abs=0.04)
    assert response.shifts == shifts


def test_a_harder_traffic_is_noticed_and_has_everything_to_win_again():
    drafter = Drafter(0.6, 0.3, 0.03, 0.0)
    drafter.run(300, 0)
    drafter.run(1500, 5)
    assert drafter.response.shifts == 0
    drafter.state, drafter.base = 0.0, 0.4
    drafter.run(200, 0)
    assert drafter.response.shifts >= 1
    after = drafter.forecast()
    assert after.current == pytest.approx(0.4, abs=0.06)
    assert after.mean[2, -1] - after.mean[0, -1] > 0.1


def test_another_drafters_counts_are_not_taken():
    response = UpdateResponse()
    for step in range(200):
        response.observe(StepReport(step, 8, 8, "other", 1, (8, 0), 0.02), is_learner_step=False)
    assert response.forecast(RATES, 5000.0, 0).current == pytest.approx(0.7)


def feed(response: UpdateResponse, counts: tuple[int, ...], times: int) -> None:
    for step in range(times):
        report = StepReport(step, sum(counts), 1, "eagle3", len(counts) - 1, counts, 0.02)
        response.observe(report, is_learner_step=True)


@pytest.mark.parametrize(
    "counts",
    [(65_536, 0), (0, 65_536), (1, 0), (0, 1), (4, *[0] * 64), (*[0] * 64, 4)],
    ids=["large, none", "large, all", "one, none", "one, all", "deep, none", "deep, all"],
)
def test_the_ends_of_what_can_be_reported_give_numbers(counts: tuple[int, ...]):
    response = UpdateResponse()
    feed(response, counts, 400)
    # Deep positions after a long time without any.
    feed(response, (3, 1), 4000)
    feed(response, (4, *[0] * 64), 100)
    forecast = response.forecast(RATES, 5000.0, 0)
    for estimates in (forecast.mean, forecast.optimistic):
        assert np.isfinite(estimates).all()
        assert ((estimates > 0) & (estimates < 1)).all()
    assert 0 < forecast.current < 1
    assert forecast.gain_deviation > 0


def test_rows_that_must_not_be_drafted_for_have_rejected_nothing():
    response = UpdateResponse()
    groups = (RowGroup("eagle3", 1, (0, 4)), RowGroup("", 0, (4,)))
    for step in range(400):
        report = StepReport(step, 8, 8, "eagle3", 1, (4, 4), 0.02, groups=groups)
        response.observe(report, is_learner_step=True)
    assert response.forecast(RATES, 5000.0, 0).current > 0.9
