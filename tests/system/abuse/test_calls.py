"""Calls as gRPC makes them, by attackers: floods, replays, rights that were not granted."""

import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from controller.client import Client
from controller.service.net.callers import Right
from controller.service.net.guard import LIMITS, WATCHES_MAX
from speculation.v1 import policy_pb2, policy_pb2_grpc, service_pb2, service_pb2_grpc, training_pb2
from tests.support.eventually import eventually
from tests.support.service_harness import (
    ENVIRONMENT,
    PATIENCE_SECONDS,
    engine_message,
    health_stub,
    report_message,
)
from tests.system.abuse.calls import CODE, introduce, status_of
from tests.system.abuse.conftest import MAX_ENGINES, Besieged, raw_channel

HONEST = "honest"


def test_ten_thousand_engines_do_not_push_out_one_that_is_steered(
    besieged: Besieged, channel: grpc.Channel, scale: int
):
    codes = Counter(
        status_of(introduce_as(channel), f"flood-{number}") for number in range(1_000 * scale)
    )
    assert set(codes) == {CODE.OK, CODE.RESOURCE_EXHAUSTED}
    assert codes[CODE.OK] < 1_000 * scale
    besieged.holds(20)
    # Nor does the flood keep others away for long: sessions that never reported are evicted.
    eventually(
        lambda: status_of(introduce_as(channel), "late") is CODE.OK,
        timeout_seconds=60.0,
        description="a place",
    )
    listing = service_pb2_grpc.InspectionServiceStub(channel).ListEngines(
        service_pb2.ListEnginesRequest(), timeout=PATIENCE_SECONDS
    )
    names = {engine.engine.engine_id for engine in listing.engines}
    assert {HONEST, "late"} <= names
    assert len(names) <= MAX_ENGINES


def introduce_as(channel: grpc.Channel) -> Callable[..., Any]:
    stub = service_pb2_grpc.SpeculationServiceStub(channel)

    def call(engine_id: str, timeout: float) -> Any:
        request = service_pb2.IntroduceRequest(engine=engine_message(engine_id))
        return stub.Introduce(request, timeout=timeout)

    return call


def test_introductions_without_end_are_refused_and_not_kept(
    besieged: Besieged, channel: grpc.Channel
):
    stub = service_pb2_grpc.SpeculationServiceStub(channel)
    huge = engine_message("huge")
    huge.fingerprint.target_model = "m" * 4_000_000
    many = engine_message("many")
    many.fingerprint.graph_batch_sizes.extend(range(1, 500_000))
    for engine in (huge, many):
        for _ in range(20):
            request = service_pb2.IntroduceRequest(engine=engine)
            assert status_of(stub.Introduce, request) is CODE.INVALID_ARGUMENT
    besieged.holds(20)


def test_an_old_session_and_one_of_others_steer_nothing(channel: grpc.Channel):
    stub = service_pb2_grpc.SpeculationServiceStub(channel)
    first = introduce(channel, "victim")
    second = introduce(channel, "victim")
    other = introduce(channel, "other")
    report = report_message(1)
    for stolen in (first, "", "0" * 32, second[:-1], second.upper(), HONEST):
        request = service_pb2.SteerRequest(session_id=stolen, reports=[report])
        assert status_of(stub.Steer, iter([request])) is CODE.FAILED_PRECONDITION
        asked = service_pb2.DecideRequest(session_id=stolen, report=report)
        assert status_of(stub.Decide, asked) is CODE.FAILED_PRECONDITION
    mixed = [
        service_pb2.SteerRequest(session_id=other),
        service_pb2.SteerRequest(session_id=second, reports=[report]),
    ]
    assert status_of(stub.Steer, iter(mixed)) is CODE.FAILED_PRECONDITION
    seen = service_pb2_grpc.InspectionServiceStub(channel).ListEngines(
        service_pb2.ListEnginesRequest(), timeout=PATIENCE_SECONDS
    )
    counts = {engine.engine.engine_id: engine.reports for engine in seen.engines}
    assert counts["victim"] == counts["other"] == 0


def test_reports_again_from_yesterday_or_of_other_plans_are_refused_one_by_one(
    besieged: Besieged, channel: grpc.Channel, scale: int
):
    stub = service_pb2_grpc.SpeculationServiceStub(channel)
    session = introduce(channel, "replays")
    reports = [report_message(step) for step in (9, 9, 8, 2**64 - 1, 1)] * 400 * scale
    requests = [
        service_pb2.SteerRequest(session_id=session, reports=reports[start : start + 1_000])
        for start in range(0, len(reports), 1_000)
    ]
    rejected: Counter[int] = Counter()
    for answer in stub.Steer(iter(requests), timeout=6 * scale * PATIENCE_SECONDS):
        for rejection in answer.rejections:
            rejected[rejection.code] += rejection.count
    assert rejected == {CODE.FAILED_PRECONDITION.value[0]: len(reports) - 2}
    besieged.holds(20)


def test_nobody_overrides_from_where_engines_come(besieged: Besieged, channel: grpc.Channel):
    override = policy_pb2.Override(
        override_id="evil",
        scope=policy_pb2.Scope(fleet=True),
        rule=policy_pb2.OverrideRule(off=True),
        author="root",
        reason="trust me",
    )
    forged = (("authorization", "Bearer x"), ("x-forwarded-for", "127.0.0.1"))
    with grpc.insecure_channel(besieged.tcp) as by_tcp:
        for way in (channel, by_tcp):
            stub = policy_pb2_grpc.PolicyServiceStub(way)
            for metadata in ((), forged):
                with pytest.raises(grpc.RpcError) as refused:
                    stub.SetOverride(
                        policy_pb2.SetOverrideRequest(override=override),
                        metadata=metadata,
                        timeout=PATIENCE_SECONDS,
                    )
                assert refused.value.code() is CODE.PERMISSION_DENIED
        assert status_of(by_tcp.unary_unary("/speculation.v1.Nothing/There"), b"") is (
            CODE.UNIMPLEMENTED
        )
    held = policy_pb2_grpc.PolicyServiceStub(channel).ListOverrides(
        policy_pb2.ListOverridesRequest(), timeout=PATIENCE_SECONDS
    )
    assert not held.overrides


def test_only_so_many_watch_and_operators_are_not_among_them(
    channel: grpc.Channel, operators: grpc.Channel
):
    with ExitStack() as watching:
        open_ones = [_watch(channel, watching) for _ in range(3 * WATCHES_MAX)]
        refused = eventually(
            lambda: [call for call in open_ones if call.code_now() is CODE.RESOURCE_EXHAUSTED],
            description="refusals",
        )
        assert eventually(
            lambda: (
                len([c for c in open_ones if c.code_now() is not None]) == 2 * WATCHES_MAX or None
            ),
            description="just this number stays",
        )
        assert refused
        mine = _watch(operators, watching)
        assert mine.answered()

    # Who has gone leaves his place to another.
    def taken() -> bool:
        with ExitStack() as again:
            return _watch(channel, again).answered()

    eventually(taken, description="a place")


class _Watching:
    def __init__(self, call: Any) -> None:
        self._call = call
        self._heard = threading.Event()
        self._ended = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for _ in self._call:
                self._heard.set()
        except grpc.RpcError:
            pass
        self._ended.set()

    def code_now(self) -> grpc.StatusCode | None:
        """None while it continues."""
        return self._call.code() if self._ended.is_set() else None

    def answered(self) -> bool:
        """Something came, before it ended."""
        eventually(lambda: self._heard.is_set() or self._ended.is_set(), description="a word")
        return self._heard.is_set()


def _watch(channel: grpc.Channel, cleanup: ExitStack) -> _Watching:
    call = health_stub(channel).Watch(health_pb2.HealthCheckRequest())
    cleanup.callback(call.cancel)
    return _Watching(call)


def test_reflection_and_channelz_tell_no_more_than_they_should(
    besieged: Besieged, channel: grpc.Channel, scale: int
):
    asked = reflection_pb2.ServerReflectionRequest
    questions: Sequence[Any] = [
        asked(list_services=""),
        asked(file_containing_symbol="x" * 100_000),
        asked(file_by_filename="../../../../etc/passwd"),
        asked(file_containing_extension={"containing_type": "a.B", "extension_number": -1}),
        asked(all_extension_numbers_of_type="\u0000"),
        asked(),
    ] * 20 * scale  # fmt: skip
    make: Any = reflection_pb2_grpc.ServerReflectionStub
    stub = make(channel)
    answers = list(stub.ServerReflectionInfo(iter(questions), timeout=PATIENCE_SECONDS))
    assert len(answers) == len(questions)
    assert "root:" not in str(answers)
    raw: Any = channel
    bad = raw.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    assert status_of(bad, iter([b"\xff\xff\xff"])) is CODE.INVALID_ARGUMENT
    local = channelz_pb2_grpc.ChannelzStub(channel)
    for number in (0, 2**63 - 1):
        assert status_of(local.GetServer, channelz_pb2.GetServerRequest(server_id=number)) in {
            CODE.NOT_FOUND, CODE.OK,
        }  # fmt: skip
    with grpc.insecure_channel(besieged.tcp) as by_tcp:
        far = channelz_pb2_grpc.ChannelzStub(by_tcp)
        refused = status_of(far.GetServers, channelz_pb2.GetServersRequest())
        assert refused is CODE.UNIMPLEMENTED


def test_questions_by_the_thousand_are_limited_and_steering_is_not(
    besieged: Besieged, channel: grpc.Channel, scale: int
):
    stub = service_pb2_grpc.InspectionServiceStub(channel)
    question = service_pb2.ExplainRequest(engine_id=HONEST)
    for _ in range(scale):
        calls = [stub.Explain.future(question, timeout=6 * PATIENCE_SECONDS) for _ in range(800)]
        assert {call.code() for call in calls} <= {CODE.OK, CODE.RESOURCE_EXHAUSTED}
    besieged.holds(20)


def test_operators_read_while_the_engines_socket_is_asked_more_than_it_answers(
    besieged: Besieged, channel: grpc.Channel
):
    policy = policy_pb2_grpc.PolicyServiceStub(channel)
    question = policy_pb2.GetOverrideRequest(override_id="none")
    asked: list[Any] = []
    with Client(besieged.sidecar.address, timeout_seconds=PATIENCE_SECONDS) as client:
        for _ in range(10):
            asked += [
                policy.GetOverride.future(question, timeout=PATIENCE_SECONDS) for _ in range(150)
            ]
            assert client.sidecar().version
            assert client.explain(HONEST).engine_id == HONEST
    # gRPC itself refuses calls beyond those that may wait (UNAVAILABLE, CANCELLED).
    assert CODE.RESOURCE_EXHAUSTED in {call.code() for call in asked}


def test_one_connection_does_not_use_up_what_the_others_may_ask(besieged: Besieged):
    question = policy_pb2.GetOverrideRequest(override_id="none")
    alone = (("grpc.use_local_subchannel_pool", 1),)
    most = int(LIMITS[Right.READ][1])
    with (
        grpc.insecure_channel(besieged.operators, alone) as greedy,
        grpc.insecure_channel(besieged.operators, alone) as other,
    ):
        policy = policy_pb2_grpc.PolicyServiceStub(greedy)
        asked = [
            policy.GetOverride.future(question, timeout=PATIENCE_SECONDS) for _ in range(2 * most)
        ]
        assert {call.code() for call in asked} == {CODE.NOT_FOUND, CODE.RESOURCE_EXHAUSTED}
        policy_stub = policy_pb2_grpc.PolicyServiceStub(other)
        codes = [status_of(policy_stub.GetOverride, question) for _ in range(most // 2)]
        assert set(codes) == {CODE.NOT_FOUND}


def test_a_request_id_is_known_again_in_another_process(besieged: Besieged):
    """The first process has ended without an answer, say; the next one asks again."""
    program = (
        "import sys, grpc\n"
        "from speculation.v1 import policy_pb2 as p, policy_pb2_grpc as g\n"
        "request = p.SetOverrideRequest.FromString(bytes.fromhex(sys.argv[2]))\n"
        "stub = g.PolicyServiceStub(grpc.insecure_channel(sys.argv[1]))\n"
        f"print(stub.SetOverride(request, timeout={PATIENCE_SECONDS}).SerializeToString().hex())\n"
    )
    override = policy_pb2.Override(
        override_id="once", scope=policy_pb2.Scope(fleet=True),
        rule=policy_pb2.OverrideRule(off=True), author="ann", reason="asked twice",
    )  # fmt: skip
    request = policy_pb2.SetOverrideRequest(override=override, request_id=str(uuid.uuid4()))
    answers = []
    for _ in range(2):
        command = [sys.executable, "-c", program, besieged.operators]
        done = subprocess.run(
            [*command, request.SerializeToString().hex()],
            env=ENVIRONMENT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert not done.returncode, done.stderr
        answers.append(done.stdout)
        with Client(besieged.sidecar.address) as client:
            client.clear_override("once", "it was done", allow_missing=True)
    assert answers[0] == answers[1]


def test_trainers_that_nobody_called(channel: grpc.Channel):
    raw: Any = channel
    attend = raw.stream_stream("/speculation.v1.TrainingService/Attend")
    for data, code in (
        (b"", CODE.NOT_FOUND),
        (b"\x0a\x06honest", CODE.PERMISSION_DENIED),
        (b"\xff\xff", CODE.INVALID_ARGUMENT),
        (training_pb2.AttendRequest(engine_id="../" * 400).SerializeToString(), CODE.NOT_FOUND),
    ):
        assert status_of(attend, iter([data])) is code


def test_the_health_port_serves_health_and_nothing_else(besieged: Besieged):
    with raw_channel(f"127.0.0.1:{besieged.health_port}") as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert status_of(check, b"") is CODE.OK
        assert status_of(check, b"\xff\xff") is CODE.INVALID_ARGUMENT
        assert status_of(check, bytes(100_000)) is CODE.RESOURCE_EXHAUSTED
        for path in (
            "/grpc.health.v1.Health/Watch",
            "/speculation.v1.SpeculationService/Introduce",
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        ):
            assert status_of(channel.unary_unary(path), b"") is CODE.UNIMPLEMENTED
