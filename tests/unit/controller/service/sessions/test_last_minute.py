import pytest

from controller.core.engine.prediction_audit import PredictionAudit
from controller.service.sessions.counters import LastMinute, StepCounters
from tests.support.virtual_engine import engine_spec


def make_meters() -> tuple[StepCounters, PredictionAudit, LastMinute]:
    spec = engine_spec()
    counters, audit = StepCounters(sequences_by_length=[0] * 5), PredictionAudit(spec, spec.arms)
    return counters, audit, LastMinute(counters, audit)


def decode(counters: StepCounters, audit: PredictionAudit) -> None:
    """Ten drafts of four tokens, of which five were accepted whole."""
    counters.drafts += 10
    counters.drafted_tokens += 40
    counters.sequences_by_length = [
        had + new for had, new in zip(counters.sequences_by_length, (5, 0, 0, 0, 5), strict=True)
    ]
    audit.expected_tokens += 25
    audit.plain_seconds += 2.0
    audit.predicted_seconds += 1.5
    audit.error_seconds += 0.75


def test_nothing_is_known_before_something_was_drafted():
    _, _, minute = make_meters()
    minute.sample()
    assert minute.acceptance_length is None
    assert minute.draft_acceptance_rate is None
    assert minute.accepted_per_verified is None
    assert minute.acceptance_length_error is None
    assert minute.step_time_error is None
    assert minute.step_time_bias is None


def test_ratios_are_of_what_was_kept():
    counters, audit, minute = make_meters()
    decode(counters, audit)
    assert minute.acceptance_length is None
    minute.sample()
    assert minute.acceptance_length == pytest.approx(1 + 20 / 10)
    assert minute.draft_acceptance_rate == pytest.approx(20 / 40)
    assert minute.accepted_per_verified == pytest.approx(30 / 50)
    assert minute.acceptance_length_error == pytest.approx(0.5)
    assert minute.step_time_error == pytest.approx(0.375)
    assert minute.step_time_bias == pytest.approx(-0.25)


def test_what_is_older_than_a_minute_does_not_count():
    counters, audit, minute = make_meters()
    decode(counters, audit)
    minute.sample()
    counters.drafts += 10
    counters.drafted_tokens += 40
    counters.sequences_by_length[0] += 10
    for _ in range(60):
        minute.sample()
    assert minute.acceptance_length == 1.0
    minute.sample()
    assert minute.acceptance_length is None
