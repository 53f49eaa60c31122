"""`controller top` in a terminal, against a real sidecar that steers a real agent."""

import asyncio
import json
import os
import pty
import re
import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Never

import grpc
import grpc.aio
import pytest

from controller.cli.connection import is_unreachable
from controller.cli.output import API_VERSION
from controller.cli.top import _safe_text
from controller.util.exit_codes import Exit
from speculation.v1 import service_pb2, service_pb2_grpc
from tests.support.eventually import eventually
from tests.support.linked_engine import linked_engine
from tests.support.service_harness import ENVIRONMENT
from tests.support.sidecar_process import CONTROLLER, PATIENCE_SECONDS, controller, sidecar_process

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A command on a pseudo-terminal, and all that it has written."""

    def __init__(self, process: "subprocess.Popen[bytes]", descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor
        self._raw = b""

    @property
    def raw(self) -> str:
        """What has come so far."""
        while select.select([self._descriptor], [], [], 0)[0]:
            try:
                chunk = os.read(self._descriptor, 65536)
            except OSError:
                break
            if not chunk:
                break
            self._raw += chunk
        return self._raw.decode(errors="replace")

    def screen(self) -> str:
        """The last look's text."""
        return _ESCAPES.sub("", self.raw).rpartition("controller 0")[2]

    def wait_for_pattern(self, pattern: str) -> None:
        eventually(
            lambda: re.search(pattern, self.screen()),
            timeout_seconds=PATIENCE_SECONDS,
            description=f"{pattern} in {self.screen()}",
        )


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    variables = ENVIRONMENT | {"COLUMNS": "160", "LINES": "30", "TERM": "xterm"}
    with subprocess.Popen(
        [*CONTROLLER, *arguments], env=variables, stdin=theirs, stdout=theirs, stderr=theirs
    ) as process:
        os.close(theirs)
        try:
            yield Terminal(process, ours)
        finally:
            process.kill()
            os.close(ours)


def test_it_shows_the_engine_live_and_survives_the_sidecars_restart(tmp_path: Path):
    with (
        sidecar_process(tmp_path) as sidecar,
        linked_engine(sidecar.address, "pod-7") as engine,
        terminal("top", "--interval", "0.2", "--address", sidecar.address) as top,
    ):
        for size in (4, 23):
            for _ in range(600):
                engine.run(50, size)
                if re.search(rf"pod-7 +│ +{size} │ +\d │ eagle3 .* steered ", top.screen()):
                    break
            else:
                raise AssertionError(top.screen())
        for _ in range(600):
            engine.run(50, 23)
            if re.search(r"eagle3 +│ +[1-8]\.\d\d │ +\d+ │ +x\d+\.\d\d │ off ", top.screen()):
                break
        else:
            raise AssertionError(top.screen())
        sidecar.stop()
        # What was known stays.
        top.wait_for_pattern(r"no sidecar answers at unix:.* since .*: waiting for it(?s:.*)pod-7")
        with sidecar_process(tmp_path) as again:
            assert again.address == sidecar.address
            engine.wait_for_a_plan()
            engine.run(20, 7)
            top.wait_for_pattern(r"^(?!(?s:.*)waiting for it)(?s:.*)pod-7 +│ +7 │")
            top.process.send_signal(signal.SIGINT)
            eventually(lambda: top.raw and top.process.poll() is not None)
            assert top.process.returncode == Exit.DONE
        # The terminal is restored: the first screen, and its cursor.
        assert "\x1b[?1049l" in top.raw
        assert "\x1b[?25h" in top.raw


def test_into_a_pipe_it_writes_plain_tables(tmp_path: Path):
    with sidecar_process(tmp_path) as sidecar, linked_engine(sidecar.address, "pod-7"):
        once = controller("top", "--once", "--address", sidecar.address)
        assert once.returncode == Exit.DONE, once.stderr
        assert "\x1b" not in once.stdout
        assert once.stdout.count("pod-7") == 1
        header = next(line for line in once.stdout.splitlines() if "drafter" in line)
        titles = header.split("  ")
        titles = [title.strip() for title in titles if title]
        assert titles == [
            "engine", "B", "γ", "drafter", "τ", "tokens/s", "gain", "regime", "reason",
            "plan age", "link", "overrides",
        ]  # fmt: skip
        command = [*CONTROLLER, "top", "--interval", "0.1", "--address", sidecar.address]
        with subprocess.Popen(
            command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            tables = 0
            for line in process.stdout:
                tables += "pod-7" in line
                if tables == 3:
                    break
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=PATIENCE_SECONDS)
        assert (process.returncode, errors) == (Exit.DONE, "")


def test_it_shows_the_fleet_live(tmp_path: Path):
    with (
        sidecar_process(tmp_path) as sidecar,
        linked_engine(sidecar.address, "pod-7") as engine,
        terminal("top", "--fleet", "--interval", "0.2", "--address", sidecar.address) as top,
    ):
        for _ in range(600):
            engine.run(50, 4)
            if re.search(r"pod-7 +│ +4 │ +\d │ eagle3 ", top.screen()):
                break
        top.wait_for_pattern(
            r"engines of the fleet: 1(?s:.*)1 engines of 1 sidecars: steered 1(?s:.*)tokens/s"
        )
        top.process.send_signal(signal.SIGINT)
        eventually(lambda: top.raw and top.process.poll() is not None)
        assert top.process.returncode == Exit.DONE


@pytest.mark.parametrize("grace", [None, 0.1])
async def test_a_sidecar_that_stops_in_the_middle_of_a_call_is_away(
    tmp_path: Path, grace: float | None
):
    server = grpc.aio.server()
    arrived = asyncio.Event()

    class Slow(service_pb2_grpc.InspectionServiceServicer):
        async def Overview(self, request: object, context: object) -> Never:
            arrived.set()
            await asyncio.Event().wait()
            raise AssertionError((request, context))

    service_pb2_grpc.add_InspectionServiceServicer_to_server(
        Slow(),  # type: ignore[abstract]  # the others are not called
        server,
    )
    address = f"unix:{tmp_path}/slow.sock"
    server.add_insecure_port(address)
    await server.start()
    with grpc.insecure_channel(address) as channel:
        call = service_pb2_grpc.InspectionServiceStub(channel).Overview.future(
            service_pb2.OverviewRequest(), timeout=PATIENCE_SECONDS
        )
        await arrived.wait()
        await server.stop(grace)
        error = await asyncio.to_thread(call.exception)
    assert isinstance(error, grpc.RpcError)
    assert is_unreachable(error), error


@pytest.mark.parametrize("more", [(), ("--fleet",)])
def test_a_stream_has_a_document_a_line_and_waits_for_the_sidecar(
    tmp_path: Path, more: tuple[str, ...]
):
    with sidecar_process(tmp_path) as sidecar, linked_engine(sidecar.address, "pod-7"):
        words = ["top", "--interval", "0.1", "-o", "json", *more, "--address", sidecar.address]
        with subprocess.Popen(
            [*CONTROLLER, *words],
            env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            assert process.stderr is not None
            for _ in range(2):
                document = json.loads(process.stdout.readline())
                assert document["api_version"] == API_VERSION
                assert document["kind"] == ("FleetEngineList" if more else "EngineOverviewList")
                assert [item["engine_id"] for item in document["items"]] == ["pod-7"]
            sidecar.stop()
            assert "waiting for it" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=PATIENCE_SECONDS)
        assert (process.returncode, errors) == (Exit.DONE, "")


def test_without_a_sidecar_it_says_so(tmp_path: Path):
    result = controller("top", "--address", f"unix:{tmp_path}/absent.sock")
    assert result.returncode == Exit.NO_SIDECAR
    assert "no sidecar answers" in result.stderr


@pytest.mark.parametrize("words", ["[bold]x[/bold]", "a\x1b[31mb", "a\nb"])
def test_words_of_others_do_not_command_the_terminal(words: str):
    shown = _safe_text(words).plain
    assert shown.isprintable()
    assert len(shown) == len(words)
