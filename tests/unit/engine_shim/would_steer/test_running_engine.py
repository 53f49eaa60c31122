"""Flags of a running engine, from whatever answers at its address."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from engine_shim.steering.verdict import InputError
from engine_shim.would_steer.running_engine import flags_of


class _Server(HTTPServer):
    answer: bytes = b""
    asked: str = ""
    key: str | None = None


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server: Any = self.server
        server.asked, server.key = self.path, self.headers["Authorization"]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(server.answer)

    def log_message(self, *_: Any) -> None:
        """Keeps quiet."""


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server(("127.0.0.1", 0), _Handler) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def flags(server: _Server) -> list[str]:
    return flags_of(f"http://127.0.0.1:{server.server_port}/")


def test_the_command_line_is_read_and_the_key_is_sent(
    server: _Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_API_KEY", "secret")
    server.answer = json.dumps({"launch_command": "--model-path m --tp-size 2"}).encode()
    assert flags(server) == ["--model-path", "m", "--tp-size", "2"]
    assert (server.asked, server.key) == ("/server_info", "Bearer secret")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"<html>", "does not answer as SGLang does"),
        (b"\xff\xfe", "does not answer as SGLang does"),
        (100_000 * b"[", "does not answer as SGLang does"),
        (b"[1]", "has no launch_command"),
        (b'{"version": "0.5.21"}', "has no launch_command"),
        (b'{"launch_command": 7}', "has no launch_command"),
        (b'{"launch_command": "--x {\\"a\\": 1}"}', "hold JSON"),
    ],
)
def test_an_answer_without_a_command_line_is_bad_input(
    server: _Server, answer: bytes, says: str
) -> None:
    server.answer = answer
    with pytest.raises(InputError, match=says):
        flags(server)
