"""Flags of a running engine, from whatever answers at its address."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from engine_shim.preflight.running_engine import AcceptedFlags, fetch_flags
from engine_shim.preflight.verdict import InputError


class _Server(HTTPServer):
    answer: bytes = b""
    redirect: str = ""
    asked: str = ""
    key: str | None = None


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server: Any = self.server
        server.asked, server.key = self.path, self.headers["Authorization"]
        if server.redirect:
            self.send_response(302)
            self.send_header("Location", server.redirect)
            self.end_headers()
            return
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


def flags(server: _Server) -> AcceptedFlags:
    return fetch_flags(f"http://127.0.0.1:{server.server_port}/")


def command(words: str) -> bytes:
    return json.dumps({"launch_command": words}).encode()


def test_the_command_line_is_read_and_the_key_is_sent(
    server: _Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_API_KEY", "secret")
    server.answer = command("--model-path m --tp-size 2")
    assert flags(server) == AcceptedFlags(("--tp-size", "2"), ("--model-path",), "m")
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
        (b'{"launch_command": "--x {\\"a\\": 1}"}', "contain JSON"),
        (command("--tp-size 2 " + 70_000 * "x"), "characters"),
        (command("--tp-size evil"), "--tp-size has 'evil'"),
        (command("--tp-size 2 3"), "--tp-size has '2 3'"),
        (command("--tp-size ٣"), "--tp-size has "),
        (command("--tp-size 1000000"), "--tp-size has '1000000'"),
        (command("--mem-fraction-static 7"), "--mem-fraction-static has '7'"),
        (command("--device /evil"), "--device has '/evil'"),
        (command("--dtype a/b"), "--dtype has 'a/b'"),
        (command("--dtype"), "--dtype has ''"),
        (command("--enable-lora yes"), "--enable-lora has 'yes'"),
        (b" " * ((4 << 20) + 1), "more than"),
    ],
)
def test_an_answer_without_a_command_line_is_bad_input(
    server: _Server, answer: bytes, says: str
) -> None:
    server.answer = answer
    with pytest.raises(InputError, match=says):
        flags(server)


def test_nothing_is_taken_that_sglang_would_load(server: _Server) -> None:
    """Its abbreviations, which SGLang's parser takes, are not taken either."""
    server.answer = command(
        "python -m sglang.launch_server --model-path evil/model --trust-remote-code "
        "--trust-remote --tokenizer-path=evil --config evil.yaml --api-key sk-secret "
        "--speculative-draft-model-path evil/draft --speculative-adaptive-config evil.json "
        "--load-format evil --model-impl evil --custom-weight-loader evil.loader "
        "--decrypted-config-file evil --speculative-token-map evil --quantization evil "
        "--speculative-algorithm EAGLE3 --tp 2 --mem-fraction-static=0.8 --context-length 8k "
        "--cuda-graph-bs-decode 1 2 4 --disable-overlap-schedule --lora-paths a=evil "
        "--\N{RIGHT-TO-LEFT OVERRIDE}evil x"
    )
    launch_flags = flags(server)
    assert launch_flags.flags == (
        "--speculative-algorithm", "EAGLE3", "--tp", "2", "--mem-fraction-static", "0.8",
        "--context-length", "8000", "--cuda-graph-bs-decode", "1", "2", "4",
        "--disable-overlap-schedule", "--enable-lora",
    )  # fmt: skip
    assert launch_flags.left_out == (
        "--model-path", "--trust-remote-code", "--trust-remote", "--tokenizer-path", "--config",
        "--api-key", "--speculative-draft-model-path", "--speculative-adaptive-config",
        "--load-format", "--model-impl", "--custom-weight-loader", "--decrypted-config-file",
        "--speculative-token-map", "--quantization", "words that are no flag",
    )  # fmt: skip
    assert (launch_flags.model, launch_flags.drafter) == ("evil/model", "evil/draft")


def test_flags_without_number_are_named_in_part(server: _Server) -> None:
    server.answer = command(" ".join(f"--a{number}" for number in range(1000)))
    assert flags(server).left_out[62:] == ("--a62", "--a63", "936 more")


def test_a_redirect_is_not_followed_and_the_key_goes_nowhere_else(
    server: _Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_API_KEY", "secret")
    # An http_proxy of the environment would get the key as well.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with _Server(("127.0.0.1", 0), _Handler) as other:
        thread = threading.Thread(target=other.serve_forever, args=(0.01,))
        thread.start()
        try:
            for place in (f"http://localhost:{other.server_port}/steal", "file:///etc/passwd"):
                server.redirect = place
                with pytest.raises(InputError, match="answers 302, a redirect"):
                    flags(server)
        finally:
            other.shutdown()
            thread.join()
    assert (server.key, other.asked) == ("Bearer secret", "")


@pytest.mark.parametrize("host", ["127.evil.example", "10.0.0.1", "[::2]", "engine"])
def test_the_key_never_goes_over_an_open_line(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setenv("ENGINE_API_KEY", "secret")
    with pytest.raises(InputError, match="would be sent unencrypted") as error:
        fetch_flags(f"http://{host}:1")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("url", ["http://", "ftp://a", "http://[", "http://a:x", "http://a:99999"])
def test_what_is_no_address_is_bad_input(url: str) -> None:
    with pytest.raises(InputError):
        fetch_flags(url)


def test_a_key_that_is_no_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_API_KEY", "a\r\nHost: b")
    with pytest.raises(InputError, match="not printable"):
        fetch_flags("http://127.0.0.1:1")
