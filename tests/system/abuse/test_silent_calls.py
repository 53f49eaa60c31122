"""Calls that are opened and send nothing: they end, and keep no caller out meanwhile."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import grpc
import pytest
from grpc_health.v1 import health_pb2

from controller.service.net import limits, request_parsing
from speculation.v1 import service_pb2, service_pb2_grpc
from tests.support.service_harness import PATIENCE_SECONDS, engine_message, health_stub
from tests.system.abuse.calls import INTRODUCE
from tests.system.abuse.conftest import MAX_OPEN_CALLS, Besieged, raw_channel
from tests.system.abuse.http2 import Connection, connections

_CONNECTIONS = 16
_ALONE = (("grpc.use_local_subchannel_pool", 1),)


def open_silent_calls(many: list[Connection], count: int, path: str) -> None:
    for connection in many:
        connection.greet()
        for _ in range(count // len(many)):
            connection.call(path)


def introduce(address: str, engine_id: str) -> None:
    """On a connection of its own.  Raises grpc.RpcError."""
    with grpc.insecure_channel(address, _ALONE) as channel:
        service_pb2_grpc.SpeculationServiceStub(channel).Introduce(
            service_pb2.IntroduceRequest(engine=engine_message(engine_id)),
            timeout=PATIENCE_SECONDS,
        )


@pytest.mark.parametrize("way", ["tcp", "unix"])
def test_calls_without_a_message_keep_no_engine_out(besieged: Besieged, way: str, scale: int):
    address = besieged.tcp if way == "tcp" else besieged.sidecar.address
    with connections(address, _CONNECTIONS) as many:
        open_silent_calls(many, 2 * MAX_OPEN_CALLS * scale, INTRODUCE)
        for number in range(5):
            introduce(besieged.sidecar.address, f"beside-{way}-{number}")
        besieged.holds(_CONNECTIONS + 20)


def test_calls_without_a_message_do_not_hide_the_health_of_the_sidecar(besieged: Besieged):
    address = f"127.0.0.1:{besieged.health_port}"
    with connections(address, _CONNECTIONS) as many:
        open_silent_calls(many, 1024, "/grpc.health.v1.Health/Check")
        for _ in range(5):
            with grpc.insecure_channel(address, _ALONE) as channel:
                answer = health_stub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=PATIENCE_SECONDS
                )
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_a_call_without_a_message_ends_in_time(besieged: Besieged):
    with raw_channel(besieged.sidecar.address) as channel, ExitStack() as open_calls:
        is_finished = threading.Event()
        open_calls.callback(is_finished.set)
        silence: Iterator[bytes] = iter(is_finished.wait, True)  # type: ignore[arg-type]  # never gives any
        with pytest.raises(grpc.RpcError) as ended:
            channel.stream_unary(INTRODUCE)(silence, timeout=6 * PATIENCE_SECONDS)
    assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert f"{request_parsing.FIRST_MESSAGE_SECONDS:g} s" in (ended.value.details() or "")


def test_a_call_that_ends_without_a_message_is_refused(besieged: Besieged):
    with raw_channel(besieged.sidecar.address) as channel, pytest.raises(grpc.RpcError) as ended:
        channel.stream_unary(INTRODUCE)(iter(()), timeout=PATIENCE_SECONDS)
    assert ended.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_one_connection_has_so_many_calls_and_no_more():
    options = dict(limits.connection_options(7))
    assert options["grpc.max_concurrent_streams"] == limits.STREAMS_PER_CONNECTION
