"""The page's and the metrics' ports: huge, slow, strange."""

import contextlib
import http.client
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from controller.service.net import http_server
from tests.support.eventually import eventually
from tests.support.service_harness import PATIENCE_SECONDS
from tests.system.abuse.conftest import Besieged


@pytest.fixture(params=["page_port", "metrics_port"])
def port(request: pytest.FixtureRequest, besieged: Besieged) -> int:
    return int(getattr(besieged, request.param))


def get(port: int, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=6 * PATIENCE_SECONDS)
    try:
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", "localhost")
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@contextmanager
def saying(port: int, words: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=6 * PATIENCE_SECONDS) as opened:
        opened.sendall(words)
        yield opened


def heard(opened: socket.socket) -> bytes:
    """Everything up to the end."""
    received = bytearray()
    try:
        while piece := opened.recv(65_536):
            received += piece
    except ConnectionError:
        pass
    return bytes(received)


def served(port: int) -> bool:
    return get(port)[0] == 200


def test_what_says_a_byte_now_and_then_does_not_keep_others_out(besieged: Besieged, scale: int):
    """All places are taken by requests that never end; after their time they are free again."""
    ports = besieged.page_port, besieged.metrics_port
    with ExitStack() as open_ones:
        slow = [
            open_ones.enter_context(saying(port, b"GET / HTTP/1.1\r\n"))
            for port in ports
            for _ in range(5 * http_server.REQUESTS_MAX * scale)
        ]

        def drip() -> bool:
            for one in slow:
                try:
                    one.send(b"x")
                except OSError:
                    continue
            try:
                return all(map(served, ports))
            except (OSError, http.client.HTTPException):
                return False

        besieged.holds(100)
        eventually(drip, timeout_seconds=120.0, description="served beside the slow ones")


@pytest.mark.parametrize(
    "words",
    [
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X-Header: y\r\n" * 2_000 + b"\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"y" * 200_000 + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 999999999999\r\n\r\n" + b"x" * 50_000,
        b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01" + bytes(300),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\r\n" * 1_000,
    ],
    ids=["path", "headers", "header", "body", "url", "tls", "http2", "nothing"],
)
def test_huge_and_strange_requests_are_answered_or_hung_up_on(port: int, words: bytes):
    with saying(port, words) as opened:
        with contextlib.suppress(OSError):
            opened.shutdown(socket.SHUT_WR)
        answer = heard(opened)
    assert not answer.startswith(b"HTTP/1.0 2")
    assert b"Traceback" not in answer
    assert served(port)


def test_a_scrape_of_what_is_no_url_is_told_so(besieged: Besieged):
    with saying(
        besieged.metrics_port, b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n"
    ) as asked:
        assert heard(asked).split(b"\r\n")[0].split()[1] == b"400"


def test_a_name_of_somebody_else_that_points_here_is_not_served(port: int):
    for host in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", ""):
        with saying(port, b"GET /metrics HTTP/1.0\r\nHost: %s\r\n\r\n" % host.encode()) as opened:
            answer = heard(opened)
        assert answer.split(b"\r\n")[0].split()[1] == b"421", host
        assert b"speculation_" not in answer
    for host in ("localhost", "127.0.0.1:9464", "[::1]"):
        with saying(port, b"GET / HTTP/1.0\r\nHost: %s\r\n\r\n" % host.encode()) as opened:
            assert heard(opened).split(b"\r\n")[0].split()[1] == b"200", host


@pytest.mark.parametrize(
    "path",
    [
        "/../../../../etc/passwd",
        "/..%2f..%2f..%2fetc%2fpasswd",
        "/page.css/../../settings.py",
        "//etc/passwd",
        "/page.js%00.html",
        "/controller/settings.py",
    ],
)
def test_no_file_but_the_pages_own_is_served(besieged: Besieged, path: str):
    status, body = get(besieged.page_port, path)
    assert status == 404
    assert b"root:" not in body
    status, body = get(besieged.metrics_port, path)
    assert b"root:" not in body


def test_the_page_takes_no_strange_questions(besieged: Besieged):
    for query in (
        "id=" + "x" * 60_000,
        "since=nan&id=honest",
        "since=1e999",
        "id=%ff%fe",
        "&" * 5_000,
    ):
        status, _ = get(besieged.page_port, f"/api/v1/engine?{query}")
        assert status in {400, 404}


def test_many_at_once_are_told_to_come_again(besieged: Besieged, port: int):
    with ExitStack() as open_ones:
        many = [open_ones.enter_context(saying(port, b"")) for _ in range(60)]
        assert heard(many[-1]).startswith(b"HTTP/1.0 503")
        besieged.holds(80)
