"""Reports that mean harm: endless, stale, counted wrongly, with numbers at the edge of what is."""

import math
from collections.abc import Iterator

import grpc
import pytest

from controller.core.engine_spec import MAX_GAMMA
from controller.core.step_report import MIN_STEP_SECONDS
from controller.service.net.limits import MESSAGE_BYTES
from controller.service.rpc.steering import MESSAGE_REPORTS
from speculation.v1 import engine_pb2, service_pb2, service_pb2_grpc
from tests.support.service_harness import PATIENCE_SECONDS, report_message
from tests.system.abuse.calls import CODE, introduce, status_of
from tests.system.abuse.conftest import Besieged


def one(besieged: Besieged, engine_id: str) -> service_pb2.EngineStatus:
    with grpc.insecure_channel(besieged.operators) as own:
        found = service_pb2_grpc.InspectionServiceStub(own).ListEngines(
            service_pb2.ListEnginesRequest(), timeout=PATIENCE_SECONDS
        )
    return next(e for e in found.engines if e.engine.engine_id == engine_id)


def test_others_are_served_while_a_message_of_stale_reports_is_refused(
    besieged: Besieged, channel: grpc.Channel
):
    stub = service_pb2_grpc.SpeculationServiceStub(channel)
    session, victim = introduce(channel, "stale"), introduce(channel, "victim-of-stale")
    fresh = service_pb2.SteerRequest(session_id=session, reports=[report_message(1)])
    stale = service_pb2.SteerRequest(
        session_id=session,
        reports=[engine_pb2.StepReport(step=1)] * MESSAGE_REPORTS,
    )

    def messages() -> Iterator[service_pb2.SteerRequest]:
        yield fresh
        for _ in range(20):
            yield stale

    call = stub.Steer(messages())
    answers = iter(call)
    next(answer for answer in answers if answer.rejections)
    for step in range(1, 101):
        request = service_pb2.DecideRequest(session_id=victim, report=report_message(step))
        stub.Decide(request, timeout=PATIENCE_SECONDS)
    # The flood is far from its end: whoever sends it waits, and nobody else does.
    assert one(besieged, "stale").rejected_reports < 10 * MESSAGE_REPORTS
    assert one(besieged, "victim-of-stale").reports == 100
    call.cancel()
    besieged.holds(20)


def test_a_message_with_too_many_reports_ends_its_stream_and_none_is_used(
    besieged: Besieged, channel: grpc.Channel
):
    stub = service_pb2_grpc.SpeculationServiceStub(channel)
    session = introduce(channel, "too-many")
    request = service_pb2.SteerRequest(
        session_id=session, reports=[engine_pb2.StepReport(step=1)] * (MESSAGE_REPORTS + 1)
    )
    assert status_of(stub.Steer, iter([request])) is CODE.INVALID_ARGUMENT
    status = one(besieged, "too-many")
    assert (status.reports, status.rejected_reports) == (0, 0)


@pytest.mark.parametrize("method", ["Steer", "Decide"])
def test_a_message_that_is_too_long_is_not_even_parsed(channel: grpc.Channel, method: str):
    stub = service_pb2_grpc.SpeculationServiceStub(channel)
    session = introduce(channel, "too-long")
    long = report_message(1, accepted_counts=[1] * (MESSAGE_BYTES + 1))
    if method == "Steer":
        request = service_pb2.SteerRequest(session_id=session, reports=[long])
        assert status_of(stub.Steer, iter([request])) is CODE.INVALID_ARGUMENT
    else:
        asked = service_pb2.DecideRequest(session_id=session, report=long)
        assert status_of(stub.Decide, asked) is CODE.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "bad",
    [
        {"step_seconds": 5e-324},
        {"step_seconds": MIN_STEP_SECONDS / 2},
        {"step_seconds": math.nan},
        {"update_seconds": 5e-324},
        {"update_seconds": math.inf},
        {"accepted_counts": [1] * 100_000},
        {"accepted_counts": [2**32 - 1] * 3},
        {"confidences": [0.5] * (MAX_GAMMA + 1)},
        {"confidences": [math.nan] * 2},
        {"classes": [engine_pb2.ClassCounts(label="a", accepted_counts=[1] * 60_000)]},
        {"classes": [engine_pb2.ClassCounts(label=str(n)) for n in range(1_000)]},
        {"drafter": "x" * 100_000},
    ],
    ids=lambda bad: next(iter(bad)),
)
def test_a_report_that_cannot_be_is_refused_and_the_next_one_is_used(
    besieged: Besieged, channel: grpc.Channel, bad: dict[str, object]
):
    stub = service_pb2_grpc.SpeculationServiceStub(channel)
    session = introduce(channel, "edge")
    asked = service_pb2.DecideRequest(session_id=session, report=report_message(1, **bad))
    with pytest.raises(grpc.RpcError) as refused:
        stub.Decide(asked, timeout=PATIENCE_SECONDS)
    assert refused.value.code() is CODE.INVALID_ARGUMENT
    assert len(refused.value.details() or "") <= 500
    good = service_pb2.DecideRequest(session_id=session, report=report_message(2))
    assert stub.Decide(good, timeout=PATIENCE_SECONDS).drafter == "mtp"
    assert one(besieged, "edge").reports == 1


def test_the_shortest_and_longest_steps_leave_an_engine_that_is_planned_for(
    besieged: Besieged, channel: grpc.Channel
):
    stub = service_pb2_grpc.SpeculationServiceStub(channel)
    session = introduce(channel, "extremes")
    for step, seconds in enumerate([0.02, MIN_STEP_SECONDS, 3600.0] * 40, 1):
        kv_tokens = (0, 2**64 - 1)[step % 2]
        report = report_message(step, step_seconds=seconds, kv_tokens=kv_tokens)
        request = service_pb2.DecideRequest(session_id=session, report=report)
        assert stub.Decide(request, timeout=PATIENCE_SECONDS).drafter == "mtp"
    assert not one(besieged, "extremes").unavailable


def test_dropped_reports_at_their_top_break_no_list(besieged: Besieged, channel: grpc.Channel):
    stub = service_pb2_grpc.SpeculationServiceStub(channel)
    session = introduce(channel, "drops")
    requests = [service_pb2.SteerRequest(session_id=session, dropped_reports=2**64 - 1)] * 3
    assert status_of(stub.Steer, iter(requests)) is CODE.OK
    assert one(besieged, "drops").dropped_reports == 2**64 - 1
    assert one(besieged, "honest").reports > 0
