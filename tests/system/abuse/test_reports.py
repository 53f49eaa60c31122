"""Hostile reports: endless, stale, counted wrongly, with numbers at the edge of what is."""

import math
import threading
from collections.abc import Collection, Iterator
from contextlib import ExitStack, suppress

import grpc
import pytest

from controller.client.paging import collect_pages
from controller.core.engine_spec import MAX_GAMMA
from controller.core.step_report import MIN_STEP_SECONDS
from controller.service.net.limits import MESSAGE_BYTES_MAX
from controller.service.rpc.steering import MESSAGE_REPORTS_MAX
from speculation.v1 import engine_pb2, errors_pb2, service_pb2, service_pb2_grpc
from tests.support.eventually import eventually
from tests.support.service_harness import PATIENCE_SECONDS, report_message
from tests.system.abuse.calls import CODE, introduce, status_of
from tests.system.abuse.conftest import Besieged


def one(besieged: Besieged, engine_id: str) -> service_pb2.EngineStatus:
    return every(besieged, [engine_id])[0]


def every(besieged: Besieged, engine_ids: Collection[str]) -> list[service_pb2.EngineStatus]:
    with grpc.insecure_channel(besieged.operators) as own:
        stub = service_pb2_grpc.InspectionServiceStub(own)
        listed = collect_pages(
            lambda token: stub.ListEngines(
                service_pb2.ListEnginesRequest(page_token=token), timeout=PATIENCE_SECONDS
            )
        )
    return [e for e in listed.engines if e.engine.engine_id in engine_ids]


def test_others_are_served_while_a_message_of_stale_reports_is_refused(
    besieged: Besieged, channel: grpc.Channel
):
    stub = service_pb2_grpc.SpeculationServiceStub(channel)
    session, victim = introduce(channel, "stale"), introduce(channel, "victim-of-stale")
    fresh = service_pb2.SteerRequest(session_id=session, reports=[report_message(1)])
    stale = service_pb2.SteerRequest(
        session_id=session,
        reports=[engine_pb2.StepReport(step=1)] * MESSAGE_REPORTS_MAX,
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
    # The flood is far from its end: whoever sends it waits, and no other caller does.
    assert one(besieged, "stale").rejected_reports < 10 * MESSAGE_REPORTS_MAX
    assert one(besieged, "victim-of-stale").reports == 100
    call.cancel()
    besieged.holds(20)


def test_who_opens_many_sessions_has_no_more_refusals_for_it(besieged: Besieged):
    """Each session has 64 and 2 a second of its own, and all of them share 500 and 500 a second."""
    sessions, messages, reports = 40, 30, 64
    is_finished = threading.Event()
    with grpc.insecure_channel(besieged.sidecar.address) as channel, ExitStack() as ends:
        stub = service_pb2_grpc.SpeculationServiceStub(channel)
        honest = introduce(channel, "honest-among-many")
        ends.callback(is_finished.set)
        names = [f"many-{number}" for number in range(sessions)]
        for name in names:
            bad = [report_message(step, drafter="?") for step in range(1, reports + 1)]
            request = service_pb2.SteerRequest(session_id=introduce(channel, name), reports=bad)
            call = stub.Steer(_repeated(request, messages, is_finished))
            ends.callback(call.cancel)
            threading.Thread(target=_read_on, args=(call,), daemon=True).start()
        flood = sessions * messages * reports

        def refused() -> int:
            return sum(status.rejected_reports for status in every(besieged, names))

        eventually(lambda: refused() > sessions * reports, description="all have used up their own")
        # A caller that is wrong occasionally does not wait for them.
        requests = [
            service_pb2.SteerRequest(
                session_id=honest,
                reports=[
                    report_message(step, drafter="?"),
                    report_message(step + 1),
                    report_message(step),
                ],
            )
            for step in range(1, 50, 10)
        ]
        codes = [
            rejection.reason
            for answer in stub.Steer(iter(requests), timeout=PATIENCE_SECONDS)
            for rejection in answer.rejections
        ]
        assert codes.count(errors_pb2.ERROR_REASON_UNKNOWN_DRAFTER) == 5
        assert one(besieged, "honest-among-many").reports == 5
        assert refused() < flood / 2
    besieged.holds(60)


def test_a_message_that_is_wholly_stale_is_refused_at_once(
    besieged: Besieged, channel: grpc.Channel
):
    stub = service_pb2_grpc.SpeculationServiceStub(channel)
    session = introduce(channel, "wholly-stale")
    steps = ([100], range(1, 61), [99, 101, 98, 97])
    requests = [
        service_pb2.SteerRequest(session_id=session, reports=[report_message(s) for s in some])
        for some in steps
    ]
    answers = list(stub.Steer(iter(requests), timeout=PATIENCE_SECONDS))
    rejections = [rejection for answer in answers for rejection in answer.rejections]
    assert [(r.step, r.count) for r in rejections] == [(60, 60), (99, 1), (97, 2)]
    assert {r.reason for r in rejections} == {errors_pb2.ERROR_REASON_STALE_REPORT}
    assert answers[-1].received_so_far.reports == 65
    status = one(besieged, "wholly-stale")
    assert (status.reports, status.rejected_reports) == (2, 63)


def _repeated(
    request: service_pb2.SteerRequest, times: int, is_finished: threading.Event
) -> Iterator[service_pb2.SteerRequest]:
    for _ in range(times):
        yield request
    is_finished.wait()


def _read_on(call: Iterator[service_pb2.SteerResponse]) -> None:
    with suppress(grpc.RpcError):
        for _ in call:
            pass


def test_a_message_with_too_many_reports_ends_its_stream_and_none_is_used(
    besieged: Besieged, channel: grpc.Channel
):
    stub = service_pb2_grpc.SpeculationServiceStub(channel)
    session = introduce(channel, "too-many")
    request = service_pb2.SteerRequest(
        session_id=session, reports=[engine_pb2.StepReport(step=1)] * (MESSAGE_REPORTS_MAX + 1)
    )
    assert status_of(stub.Steer, iter([request])) is CODE.INVALID_ARGUMENT
    status = one(besieged, "too-many")
    assert (status.reports, status.rejected_reports) == (0, 0)


@pytest.mark.parametrize("method", ["Steer", "Decide"])
def test_a_message_that_is_too_long_is_not_even_parsed(channel: grpc.Channel, method: str):
    stub = service_pb2_grpc.SpeculationServiceStub(channel)
    session = introduce(channel, "too-long")
    long = report_message(1, accepted_counts=[1] * (MESSAGE_BYTES_MAX + 1))
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
