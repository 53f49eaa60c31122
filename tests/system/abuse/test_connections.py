"""Connections and frames: many, silent, half open, or not HTTP/2 at all."""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import grpc
import pytest

from controller.service.net import limits, request_parsing
from tests.support.eventually import eventually
from tests.system.abuse.calls import INTRODUCE
from tests.system.abuse.conftest import MAX_CONNECTIONS, MAX_OPEN_CALLS, Besieged, raw_channel
from tests.system.abuse.http2 import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    Connection,
    connections,
    frame,
    headers_of,
    message_head,
)

STEER = "/speculation.v1.SpeculationService/Steer"
MEASURE = "/speculation.v1.ProfilingService/Measure"
ATTEND = "/speculation.v1.TrainingService/Attend"


def test_no_more_connections_than_allowed_stay_open(besieged: Besieged, scale: int):
    for address in (besieged.sidecar.address, besieged.tcp):
        with connections(address, 400 * scale) as many:
            assert len(many) > MAX_CONNECTIONS
            for connection in many:
                connection.greet()
            # The last came too late, and finds itself put out.
            assert many[-1].hung_up()
            besieged.holds(MAX_CONNECTIONS + 60)
        eventually(
            lambda: besieged.process.num_fds() <= besieged.descriptors + 40,
            description="all are closed",
        )


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        b"\x00" * 100_000,
        PREFACE + b"\xff" * 100_000,
        PREFACE + frame(SETTINGS, 0, 0) + frame(DATA, 0, 1, b"x" * 100),
        PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, 4, 1, b"\xff" * 200),
        PREFACE + frame(SETTINGS, 0, 0, b"odd"),
        PREFACE + frame(SETTINGS, 0, 0) + frame(CONTINUATION, 0, 1, b"x"),
        PREFACE + frame(SETTINGS, 0, 0) + frame(99, 255, 2**31 - 1, bytes(16_384)) * 64,
    ],
    ids=["http1", "tls", "zeros", "ones", "data", "hpack", "settings", "continuation", "unknown"],
)
def test_what_is_no_call_ends_its_own_connection_only(besieged: Besieged, words: bytes):
    with connections(besieged.sidecar.address, 20) as many:
        for connection in many:
            connection.say(words)
            connection.socket.shutdown(socket.SHUT_WR)
        assert all(connection.hung_up() for connection in many)


def test_who_does_not_greet_or_opens_a_stream_and_says_nothing_is_put_out(besieged: Besieged):
    with (
        connections(besieged.sidecar.address, 40) as silent,
        connections(besieged.tcp, 40) as half,
        connections(besieged.tcp, 10) as unanswered,
        raw_channel(besieged.sidecar.address) as channel,
        raw_channel(besieged.operators) as operators,
        ExitStack() as open_calls,
    ):
        for connection in half:
            connection.say(PREFACE[:7])
        for connection in unanswered:
            # The server's settings are not acknowledged: until then it takes large headers.
            connection.greet()
        calls = [
            way.stream_stream(path)(_silence(open_calls))
            for way, path in ((channel, STEER), (channel, ATTEND), (operators, MEASURE))
            for _ in range(20)
        ]
        besieged.holds(130)
        assert {call.code() for call in calls} == {grpc.StatusCode.DEADLINE_EXCEEDED}
        assert f"{request_parsing.FIRST_MESSAGE_SECONDS:g} s" in calls[0].details()
        assert all(connection.hung_up() for connection in (*silent, *half, *unanswered))


def _silence(cleanup: ExitStack) -> Iterator[bytes]:
    """Requests of a stream that stays open, and has none."""
    is_finished = threading.Event()
    cleanup.callback(is_finished.set)
    return iter(is_finished.wait, True)  # type: ignore[arg-type]  # it ends, and never gives anything


def test_no_more_calls_than_allowed_are_under_way(besieged: Besieged, scale: int):
    with connections(besieged.sidecar.address, 4) as many:
        for connection in many:
            connection.greet()
            for _ in range(MAX_OPEN_CALLS * scale):
                connection.call(STEER)
        # A byte at intervals, so that none of them stays silent.
        for connection in many:
            for stream in range(1, 2 * MAX_OPEN_CALLS * scale, 16):
                connection.data(stream, b"\x00")
        besieged.holds(20)


def test_messages_that_claim_more_than_they_may_are_refused(besieged: Besieged):
    with connections(besieged.sidecar.address, 4) as many:
        for connection in many:
            connection.greet()
            for size in (5_000_000, 2**31 - 1, 2**32 - 1):
                connection.data(connection.call(INTRODUCE), message_head(size) + b"x" * 10_000)
        besieged.holds(20)
    with raw_channel(besieged.sidecar.address) as channel:
        call = channel.unary_unary(INTRODUCE)
        with pytest.raises(grpc.RpcError) as refused:
            call(bytes(5_000_000), timeout=60)
        # The end of the call may overtake its status while the client still sends.
        codes = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED}
        assert refused.value.code() in codes


def test_a_gigabyte_of_messages_begun_and_never_ended_stays_outside(besieged: Besieged, scale: int):
    """Each call says that 4 MB come, and sends as much of it as the server takes."""
    with connections(besieged.sidecar.address, 16) as many:
        for connection in many:
            connection.greet()
            connection.socket.settimeout(0.2)
            for _ in range(16 * scale):
                stream = connection.call(INTRODUCE)
                connection.data(stream, message_head(4_000_000))
                if not all(connection.data(stream, b"x" * 16_000) for _ in range(240)):
                    break
        besieged.holds(40)


def test_calls_opened_and_cancelled_by_the_thousand(besieged: Besieged, scale: int):
    with connections(besieged.sidecar.address, 4) as many:
        for connection in many:
            connection.greet()
            for _ in range(2_000 * scale):
                if not connection.cancel(connection.call(STEER)):
                    break
        besieged.holds(20)


def test_floods_of_headers(besieged: Besieged, scale: int):
    large = [("x-noise", "x" * 8_000)] * 40
    block = headers_of(STEER, large)
    with connections(besieged.sidecar.address, 4) as many:
        for connection in many:
            connection.greet()
            connection.call(STEER, [("x-noise", "y" * 15_000)])
            # One block of headers without an end.
            connection.say(frame(HEADERS, 0, 3, block[:16_000]))
            for _ in range(200 * scale):
                if not connection.say(frame(CONTINUATION, 0, 3, block[:16_000])):
                    break
        besieged.holds(20)


@pytest.fixture(params=["engines", "tcp", "health"])
def way_in(besieged: Besieged, request: pytest.FixtureRequest) -> str:
    health = f"127.0.0.1:{besieged.health_port}"
    ways = {"engines": besieged.sidecar.address, "tcp": besieged.tcp, "health": health}
    return ways[request.param]


def test_calls_that_are_opened_and_reset_at_once(besieged: Besieged, way_in: str, scale: int):
    block = headers_of("/grpc.health.v1.Health/Check")
    reset = struct.pack(">I", 8)
    with _flooding(way_in) as connection:
        for first in range(1, 40_000 * scale, 200):
            flood = b"".join(
                frame(HEADERS, END_HEADERS, stream, block) + frame(RST_STREAM, 0, stream, reset)
                for stream in range(first, first + 200, 2)
            )
            if not connection.say(flood):
                break
        besieged.holds(20)


def test_a_block_of_headers_without_an_end(besieged: Besieged, way_in: str, scale: int):
    """Tiny fields, which take most memory for their bytes."""
    before = besieged.process.memory_info().rss
    more = frame(CONTINUATION, 0, 1, b"\x00\x01a\x01b" * 3200)
    with _flooding(way_in) as connection:
        connection.say(frame(HEADERS, 0, 1, headers_of("/grpc.health.v1.Health/Check")))
        for _ in range(1_000 * scale):
            if not connection.say(more):
                break
        besieged.holds(20)
    # Of 16 MB, what is within the limit of headers is kept.
    assert besieged.process.memory_info().rss - before < 40_000_000


@pytest.mark.parametrize("kind", [PING, SETTINGS], ids=["ping", "settings"])
def test_a_flood_of_control_frames(besieged: Besieged, way_in: str, kind: int, scale: int):
    flood = frame(kind, 0, 0, bytes(8) if kind == PING else b"\x00\x03\x00\x00\x01\x00")
    with _flooding(way_in) as connection:
        for _ in range(20 * scale):
            if not connection.say(flood * 1_000):
                break
        besieged.holds(20)


@pytest.mark.nightly
def test_a_connection_that_is_kept_alive_stays_and_a_hasty_one_ends(besieged: Besieged):
    """With calls and without: grpc-go's clients ask every ten seconds at the soonest."""
    ways = (besieged.sidecar.address, besieged.tcp, f"127.0.0.1:{besieged.health_port}")
    seconds = {"kept": limits.CLIENT_KEEPALIVE_SECONDS_MIN + 0.2, "hasty": 0.2}
    asked = {(way, pace): Connection(way) for way in ways for pace in seconds}
    for connection in asked.values():
        connection.greet()
        connection.acknowledge()
    ended = set()
    for pace, pause in seconds.items():
        for _ in range(8):
            time.sleep(pause)
            for (way, other), connection in asked.items():
                if other == pace and not connection.say(frame(PING, 0, 0, bytes(8))):
                    ended.add((way, pace))
        ended |= {key for key in asked if key[1] == pace and _goodbye(asked[key])}
    for connection in asked.values():
        connection.socket.close()
    assert ended == {(way, "hasty") for way in ways}


def _goodbye(connection: Connection) -> bool:
    """Whether the server has ended a connection (GOAWAY), by all that it has said until now."""
    connection.socket.settimeout(1.0)
    received = b""
    with contextlib.suppress(OSError):
        while part := connection.socket.recv(65_536):
            received += part
    return b"too_many_pings" in received


@contextmanager
def _flooding(address: str) -> Iterator[Connection]:
    """A connection that continues as a client's does; what it is sent is read."""
    connection = Connection(address)
    connection.greet()
    connection.acknowledge()
    threading.Thread(target=connection.hung_up, daemon=True).start()
    yield connection
    connection.socket.close()


def test_a_handshake_and_an_idle_connection_have_their_time():
    options = dict(limits.connection_options(7))
    assert options["grpc.max_allowed_incoming_connections"] == 7
    assert options["grpc.server_handshake_timeout_ms"] == 1000 * limits.HANDSHAKE_SECONDS
    assert options["grpc.http2.settings_timeout"] == 1000 * limits.HANDSHAKE_SECONDS
    assert options["grpc.max_connection_idle_ms"] == 1000 * limits.IDLE_SECONDS


def test_clients_may_keep_their_connections_alive_every_ten_seconds():
    options = dict(limits.connection_options(7))
    assert options["grpc.keepalive_permit_without_calls"] == 1
    assert options["grpc.http2.min_ping_interval_without_data_ms"] < 10_000
