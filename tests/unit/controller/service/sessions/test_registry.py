import asyncio
from typing import Any

import pytest

from controller.core.clock import VirtualClock
from controller.core.engine_spec import Arm
from controller.core.errors import StaleReportError, UnknownArmError
from controller.core.plan import Reason
from controller.service.net.callers import Caller, Right
from controller.service.net.errors import (
    EngineTakenError,
    InvalidMeasurementError,
    MeasurementConflictError,
    NoSessionError,
    ShuttingDownError,
    SlowClientError,
    TooManyEnginesError,
    UnknownDrafterError,
    UnknownEngineError,
)
from controller.service.sessions.engine_identity import EngineIdentity
from controller.service.state.profile_registry import ProfileRegistry
from controller.wire.reports import report_from_proto
from tests.support.service_harness import make_profile, report_message
from tests.unit.controller.service.sessions.small_registry import ANYBODY, registry, spec

OWN, OTHER = (
    EngineIdentity.from_caller(ANYBODY, "its secret"),
    EngineIdentity.from_caller(ANYBODY, "another secret"),
)


def test_sessions_are_found_by_token_and_by_engine():
    sessions = registry()
    session = sessions.introduce(spec())
    assert sessions.find_by_token(session.session_id) is session
    assert sessions.find_by_engine("engine-0") is session
    with pytest.raises(NoSessionError, match="must introduce itself"):
        sessions.find_by_token("guess")
    with pytest.raises(UnknownEngineError, match=r"'engine-1' .* introduced: engine-0$"):
        sessions.find_by_engine("engine-1")


def test_the_refusal_of_an_unknown_engine_names_some_of_those_that_are_known():
    sessions = registry(max_engines=20)
    with pytest.raises(UnknownEngineError, match=r"introduced: none$"):
        sessions.find_by_engine("nobody")
    for number in range(20):
        sessions.introduce(spec(f"engine-{number:02d}"))
    with pytest.raises(UnknownEngineError, match=r"engine-15 and 4 more$"):
        sessions.find_by_engine("nobody")


def test_a_second_introduction_ends_the_first_session():
    sessions = registry()
    old, new = sessions.introduce(spec(), OWN), sessions.introduce(spec(), OWN)
    assert isinstance(old.end_error, NoSessionError)
    assert new.end_error is None
    assert sessions.find_by_engine("engine-0") is new
    with pytest.raises(NoSessionError):
        sessions.find_by_token(old.session_id)
    assert len(sessions) == 1


@pytest.mark.parametrize("other", [OTHER, EngineIdentity.from_caller(ANYBODY, "")])
def test_an_id_is_not_taken_from_an_engine_that_is_there(other: EngineIdentity):
    clock = VirtualClock()
    sessions = registry(clock)
    session = sessions.introduce(spec(), OWN)
    session.stream = object()
    clock.advance(99)
    with pytest.raises(EngineTakenError, match="another engine is steered under the id 'engine-0'"):
        sessions.introduce(spec(), other)
    session.stream = None
    session.record_contact()
    clock.advance(4.9)
    with pytest.raises(EngineTakenError, match="free 5 s after"):
        sessions.introduce(spec(), other)
    assert session.end_error is None
    assert sessions.find_by_engine("engine-0") is session


def test_the_id_of_an_engine_that_is_gone_is_free_within_seconds():
    clock = VirtualClock()
    sessions = registry(clock)
    old = sessions.introduce(spec(), OWN)
    clock.advance(5)
    new = sessions.introduce(spec(), OTHER)
    assert isinstance(old.end_error, NoSessionError)
    assert sessions.find_by_engine("engine-0") is new


def test_neither_is_an_id_that_was_introduced_without_a_secret_taken_from_an_engine_that_is_there():
    sessions = registry()
    sessions.introduce(spec())
    for holder in (EngineIdentity.from_caller(ANYBODY, ""), OWN):
        with pytest.raises(EngineTakenError):
            sessions.introduce(spec(), holder)


def test_an_access_entry_takes_its_engines_id_again_at_once():
    sessions = registry()
    one, other = (Caller(name, Right.STEER, access_key=name) for name in ("one", "other"))
    sessions.introduce(spec(), EngineIdentity.from_caller(one, "before the restart"))
    with pytest.raises(EngineTakenError):
        sessions.introduce(spec(), EngineIdentity.from_caller(other, ""))
    sessions.introduce(spec(), EngineIdentity.from_caller(one, "after it"))


def test_one_engine_too_many_is_refused_but_an_old_one_may_come_again():
    sessions = registry(max_engines=2)
    sessions.introduce(spec("a"))
    sessions.introduce(spec("b"), OWN)
    with pytest.raises(TooManyEnginesError, match="2 engines are steered"):
        sessions.introduce(spec("c"))
    sessions.introduce(spec("b"), OWN)


def test_idle_sessions_make_room():
    clock = VirtualClock()
    sessions = registry(clock, max_engines=1)
    old = sessions.introduce(spec("a"))
    clock.advance(101)
    sessions.introduce(spec("b"))
    assert isinstance(old.end_error, NoSessionError)
    assert [session.engine_id for session in sessions] == ["b"]


async def test_a_session_with_an_open_stream_is_never_idle():
    clock = VirtualClock()
    sessions = registry(clock)
    session = sessions.introduce(spec())
    with session.register_stream(asyncio.Event()):
        clock.advance(1000)
        sessions.expire()
        assert len(sessions) == 1
    clock.advance(99)
    sessions.expire()
    assert len(sessions) == 1
    clock.advance(2)
    sessions.expire()
    assert len(sessions) == 0


def test_a_closed_registry_says_why_to_everyone():
    sessions = registry()
    session = sessions.introduce(spec())
    closing_error = ShuttingDownError("going")
    sessions.close(closing_error)
    assert session.end_error is closing_error
    with pytest.raises(ShuttingDownError):
        sessions.introduce(spec())
    with pytest.raises(ShuttingDownError):
        sessions.find_by_token(session.session_id)


def test_an_engine_gets_the_profile_that_matches_it():
    profiles = ProfileRegistry()
    profiles.add(make_profile())
    profiles.add(make_profile(target_model="another"))
    session = registry(profiles=profiles).introduce(spec())
    assert session.core.profile_id == make_profile().profile_id


def test_the_tally_counts_what_was_used():
    session = registry().introduce(spec())
    session.observe(report_from_proto(report_message(1)))
    session.observe(
        report_from_proto(
            report_message(2, gamma=0, accepted_counts=[4], flags={"unsteered": True})
        )
    )
    counters = session.counters
    assert (counters.reports, counters.unsteered_steps) == (2, 1)
    assert (counters.drafted_tokens, counters.accepted_tokens, counters.generated_tokens) == (
        8,
        5,
        13,
    )
    assert counters.step_seconds == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"drafter": "eagle9"}, UnknownDrafterError),
        ({"gamma": 9, "accepted_counts": [4] + 9 * [0]}, UnknownArmError),
        ({"step": 1}, StaleReportError),
    ],
)
def test_a_refused_report_leaves_no_trace(changes: dict[str, Any], kind: type[Exception]):
    session = registry().introduce(spec())
    session.observe(report_from_proto(report_message(1)))
    with pytest.raises(kind):
        session.observe(report_from_proto(report_message(**({"step": 2} | changes))))
    assert session.counters.reports == 1
    assert session.last_report is not None
    assert session.last_report.step == 1


def test_news_wakes_every_stream():
    session = registry().introduce(spec())
    bells = asyncio.Event(), asyncio.Event()
    with session.register_stream(bells[0]), session.register_stream(bells[1]):
        session.end(NoSessionError("over"))
    assert all(bell.is_set() for bell in bells)


def test_a_measurement_forces_and_lets_go():
    session = registry().introduce(spec())
    with session.reserve_for_measurement() as measurement:
        session.force_arm(measurement, Arm("mtp", 3))
        assert measurement.forced_epoch == session.plan.epoch == 2
        assert {row.arm.gamma for row in session.plan.rows} == {3}
        assert {row.reason for row in session.plan.rows} == {Reason.PROFILING}
        with pytest.raises(MeasurementConflictError):
            session.reserve_for_measurement().__enter__()
        with pytest.raises(InvalidMeasurementError, match="gamma 9 is out of range"):
            session.force_arm(measurement, Arm("mtp", 9))
        report = report_from_proto(report_message(1))
        session.observe(report)
        assert measurement.take_reports() == [report]
        assert measurement.take_reports() == []
    assert session.plan.epoch == 3
    assert Reason.PROFILING not in {row.reason for row in session.plan.rows}
    with session.reserve_for_measurement():
        pass


def test_a_measurement_with_gaps_is_not_handed_out():
    session = registry().introduce(spec())
    with session.reserve_for_measurement() as measurement:
        for step in range(1, 10_002):
            measurement.add_report(report_from_proto(report_message(step)))
        with pytest.raises(SlowClientError, match="read faster"):
            measurement.take_reports()
