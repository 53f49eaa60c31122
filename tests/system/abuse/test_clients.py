"""Clients and commands, where an attacker controls what answers or what they read."""

import asyncio
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from controller.cli import app
from controller.client.channels import Credentials, CredentialsError
from controller.client.client import Client
from controller.client.paging import LIST_BYTES_MAX, PAGES_MAX, EndlessListError
from controller.profiling.engine_http import EngineHttp
from controller.profiling.errors import EngineUnreachableError
from controller.recording.segments import MAGIC
from controller.util.exit_codes import Exit
from engine_shim.link.credentials import EngineCredentials
from engine_shim.link.errors import LinkSettingsError
from engine_shim.preflight import __main__ as would_steer
from engine_shim.preflight.running_engine import fetch_flags
from engine_shim.sglang.training.versions import VersionError, VersionOrigin, Versions
from tests.support.addresses import ELSEWHERE
from tests.support.answering import serve_answers
from tests.support.hostile_sidecar import hostile_sidecar
from tests.support.training_rounds import make_student, make_target

LISTS = (
    ("top", "--once"), ("top", "--once", "--fleet"), ("engines",), ("engines", "--fleet"),
    ("profile", "list"), ("override", "log"), ("doctor", "--engine-url", ""),
    ("profile", "--engine-url", "http://127.0.0.1:1"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def in_peace() -> None:
    """No sidecar is under attack here."""


def ran(address: str, *words: str) -> tuple[int, str]:
    """Exit code and output of a command."""
    option = "--sidecar" if words[:2] == ("profile", "--engine-url") else "--address"
    result = CliRunner().invoke(app, [*words, option, address])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.mark.parametrize("words", LISTS, ids=" ".join)
def test_a_list_that_names_the_same_page_for_ever_ends_every_command(words: tuple[str, ...]):
    with hostile_sidecar(lambda _: ("again", 0)) as sidecar:
        code, output = ran(sidecar.address, *words)
    assert code != 0
    assert "the sidecar's list repeats a page" in output
    assert sidecar.pages == 2


def test_a_list_that_always_has_a_next_page_takes_no_more_memory_than_a_limit():
    page = 3 << 20
    with hostile_sidecar(lambda number: (str(number), page)) as sidecar:
        code, output = ran(sidecar.address, "top", "--once")
    assert code == Exit.FAILED
    assert f"more than {LIST_BYTES_MAX} bytes" in output
    assert sidecar.pages == LIST_BYTES_MAX // page + 1


def test_a_list_of_empty_pages_ends_too():
    with hostile_sidecar(lambda number: (str(number), 0)) as sidecar:
        with Client(sidecar.address) as client, pytest.raises(EndlessListError):
            client.profiles()
        assert sidecar.pages == PAGES_MAX + 1
    with hostile_sidecar(lambda number: (str(number), 0)) as sidecar:
        with Client(sidecar.address) as client, pytest.raises(EndlessListError):
            list(client.audit())
        assert sidecar.pages == PAGES_MAX + 1


FORMS = ((), ("-o", "wide"), ("-o", "json"), ("-o", "yaml"), ("-o", "name"))


@pytest.mark.parametrize("words", LISTS[:-2], ids=" ".join)
def test_words_of_a_stranger_command_no_terminal(words: tuple[str, ...]):
    hostile = "a\x1b]0;x\x07\x1b[2J\x9b31m\u202eb\u2066\u2028\x7f\r"
    with hostile_sidecar(lambda _: ("", 0), hostile) as sidecar:
        for form in FORMS:
            code, output = ran(sidecar.address, *words, *form)
            assert code == 0
            assert output.strip()
            assert all(line.isprintable() for line in output.split("\n")), output


def test_what_answers_in_the_place_of_an_engine_has_nothing_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """What SGLang makes of the rest is in tests/system/engine/test_would_steer.py."""
    command = f"--model-path {tmp_path} --trust-remote-code --config {tmp_path}/x --tp-size 2"
    with serve_answers({"/server_info": {"launch_command": command}}) as url:
        assert would_steer.run(["sglang", "--url", url]) == would_steer.BAD_INPUT
        assert "paths that SGLang loads are not taken from" in capsys.readouterr().err
        taken = fetch_flags(url)
    assert taken.flags == ("--tp-size", "2")
    assert taken.left_out == ("--model-path", "--trust-remote-code", "--config")


@pytest.mark.parametrize("client", ["would-steer", "doctor", "profile"])
def test_the_key_of_an_engine_follows_no_redirect(client: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ENGINE_API_KEY", "the-key")
    stolen: list[str | None] = []
    sent: list[str | None] = []
    with (
        serve_answers({}, keys=stolen) as other,
        serve_answers({}, redirect=f"{other}/steal", keys=sent) as url,
        hostile_sidecar(lambda _: ("", 0)) as sidecar,
    ):
        if client == "would-steer":
            code = would_steer.run(["sglang", "--url", url])
        elif client == "doctor":
            code, _ = ran(sidecar.address, "doctor", "--engine-url", url)
        else:
            with pytest.raises(EngineUnreachableError):
                asyncio.run(EngineHttp(url, "the-key").limits())
            code = 1
    assert code != 0
    assert sent
    assert set(sent) == {"Bearer the-key"}
    assert stolen == []


def test_a_token_goes_to_no_machine_that_is_only_named_like_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    token = tmp_path / "token"
    token.write_text("the-token")
    monkeypatch.setenv("CONTROLLER_TOKEN_FILE", str(token))
    for address in ELSEWHERE:
        with pytest.raises(CredentialsError, match="unencrypted"):
            Credentials.for_address(address)
        with pytest.raises(LinkSettingsError, match="unencrypted"):
            EngineCredentials(token_file=str(token)).channel(address)


def test_a_small_recording_takes_no_memory_without_bound(tmp_path: Path):
    """Records of two bytes, of which a small file would become ten million."""
    packed = zlib.compress(b"\x0a\x00" * (10 << 20), 1)
    path = tmp_path / "x.record"
    path.write_bytes(MAGIC + struct.pack("<II", len(packed), zlib.crc32(packed)) + packed)
    assert path.stat().st_size < 200_000
    script = (
        "from controller.cli import main\n"
        "try: main()\n"
        "finally: print(open('/proc/self/status').read().partition('VmHWM:')[2].split()[0])"
    )
    words = [sys.executable, "-c", script, "replay", str(path)]
    process = subprocess.run(words, capture_output=True, text=True, check=False)
    assert process.returncode == Exit.USAGE
    assert "a block of more than 8388608 bytes" in process.stderr
    # KiB; the interpreter itself has 100 MiB.
    assert int(process.stdout) < 300 * 1024


def test_a_version_with_quantised_values_is_a_typed_error(tmp_path: Path):
    student = make_student(make_target())
    parameters = {name: part.detach() for name, part in student.named_parameters()}
    versions = Versions(tmp_path)
    versions.adopt_base(student.shape, parameters, student.borrowed)
    quantised = {name: part.to(torch.float8_e4m3fn) for name, part in parameters.items()}
    versions.publish(quantised, VersionOrigin(0, 0.0, 0.0, 0.0, 1, 0.0))
    with pytest.raises(VersionError, match=r"torch\.float8_e4m3fn"):
        versions.load_parameters(1, parameters)
