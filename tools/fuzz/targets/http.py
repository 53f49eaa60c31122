"""The page's and the metrics' ports: bytes on a connection, and one answer."""

import contextlib
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from controller.service.net.http_server import HttpServer
from lab.harness.processes import free_port
from tools.fuzz.mutation import mutate_text
from tools.fuzz.target import Feed, Target
from tools.fuzz.targets.rpc import BadAnswerError, RefusedError, serving

_SECONDS = 15.0
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
# What an answer may say; a server that broke says 500, or nothing.
_ALLOWED_STATUSES = {200, 304, 400, 404, 405, 408, 414, 421, 431, 501, 503, 505}
_REQUESTS = (
    "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    'GET /page.js HTTP/1.0\r\nHost: 127.0.0.1:80\r\nIf-None-Match: "0"\r\n\r\n',
    "GET /api/v1/state HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n",
    "GET /api/v1/engine?id=engine-0&since=1.5e9 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "GET /api/v1/fleet?filter=link=away&limit=2&after=a HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "HEAD /metrics?name[]=up HTTP/1.1\r\nHost: localhost\r\nAccept-Encoding: gzip\r\n\r\n",
    "GET //[::1]/../../etc/passwd HTTP/1.1\r\nHost: [::1]:80\r\n\r\n",
)


def _seeds() -> Sequence[bytes]:
    return [request.encode() for request in _REQUESTS]


def _opened(setting: str) -> Callable[[Path], AbstractContextManager[Feed]]:
    @contextmanager
    def opened(folder: Path) -> Iterator[Feed]:
        port = free_port()
        broken: list[str] = []

        def record_error(self: HttpServer, request: Any, client_address: Any) -> None:
            error = sys.exception()
            if not isinstance(error, OSError):
                broken.append(repr(error))

        def feed(data: bytes) -> None:
            answer = _ask(port, data)
            if broken:
                raise BadAnswerError(f"{setting}: {broken.pop()}")
            status = _STATUS.match(answer)
            if status is None:
                # HTTP/0.9 has no status, and an empty request gets no answer.
                raise RefusedError
            if int(status[1]) not in _ALLOWED_STATUSES:
                raise BadAnswerError(f"{setting}: {answer[:99]!r}")
            if int(status[1]) >= 400:
                raise RefusedError

        with (
            mock.patch.object(HttpServer, "handle_error", record_error),
            serving(folder, **{setting: port}) as served,
        ):
            served.introduce()
            yield feed

    return opened


def _ask(port: int, data: bytes) -> bytes:
    answer = bytearray()
    with (
        socket.create_connection(("127.0.0.1", port), _SECONDS) as connection,
        contextlib.suppress(OSError),  # it has heard enough
    ):
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while piece := connection.recv(65_536):
            answer += piece
    return bytes(answer)


TARGETS = (
    Target("http.page", _seeds, mutate_text, _opened("page_port"), (RefusedError,)),
    Target("http.metrics", _seeds, mutate_text, _opened("metrics_port"), (RefusedError,)),
)
