"""Completion of ids as a shell asks for it, against a real sidecar."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from controller.cli import app, main
from speculation.v1 import service_pb2, service_pb2_grpc
from tests.support.service_harness import (
    ENVIRONMENT,
    PATIENCE_SECONDS,
    engine_message,
    make_profile,
)
from tests.support.sidecar_process import CONTROLLER, SidecarProcess, sidecar_process

# What bash does with what it gets: it puts the candidates into COMPREPLY.
BASH = """
eval "$(_CONTROLLER_COMPLETE=source_bash controller)"
COMP_WORDS=(controller explain pod-7 : 3)
COMP_CWORD=4
export _CONTROLLER_COMPLETE=complete_bash
_controller_completion controller
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    """Steers engines of two pods, and has an override and a profile."""
    folder = tmp_path_factory.mktemp("sidecar")
    (folder / "policy.yaml").write_text(
        "policies:\n  - {name: bound, fleet: true, reason: memory, at_most: 2}\n"
    )
    (folder / "p.json").write_text(make_profile().to_json())
    environment = {"CONTROLLER_POLICY": str(folder / "policy.yaml")}
    with (
        sidecar_process(folder, environment=environment) as running,
        grpc.insecure_channel(running.address) as channel,
    ):
        stub = service_pb2_grpc.SpeculationServiceStub(channel)
        for name in ("pod-7:30000", "pod-7:30001", "pod-8:30000"):
            request = service_pb2.IntroduceRequest(engine=engine_message(name))
            stub.Introduce(request, timeout=PATIENCE_SECONDS)
        for line in (
            "override set --fleet --off --id night --reason x --allow-no-effect",
            f"profile push {folder}/p.json",
        ):
            done = CliRunner().invoke(app, [*line.split(), "--address", running.address])
            assert done.exit_code == 0, done.output
        yield running


@pytest.fixture
def completed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """A function that asks as bash asks: the words as it splits them, the last one incomplete."""

    def ask(*words: str, shell: str = "bash", separator: str = "\n") -> list[str]:
        monkeypatch.setenv("_CONTROLLER_COMPLETE", f"complete_{shell}")
        monkeypatch.setenv("COMP_WORDS", separator.join(["controller", *words]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", " ".join(["controller", *words]))
        monkeypatch.setattr(sys, "argv", ["controller"])
        with pytest.raises(SystemExit):
            main()
        captured = capfd.readouterr()
        assert captured.err == ""
        return captured.out.split()

    return ask


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["explain", ""], ["pod-7:30000", "pod-7:30001", "pod-8:30000"]),
        (["explain", "pod-8"], ["pod-8:30000"]),
        (["explain", "x"], []),
        # Bash splits words at colons, and replaces what is behind the last one.
        (["explain", "pod-7", ":"], ["30000", "30001"]),
        (["explain", "pod-7", ":", "30001"], ["30001"]),
        (["override", "set", "--engine", "pod-8"], ["pod-8:30000"]),
        (["profile", "pull", "--engine", "pod-8"], ["pod-8:30000"]),
        (["profile", "--engine-id", "pod-8"], ["pod-8:30000"]),
        # Policy is not cleared by hand.
        (["override", "clear", ""], ["night"]),
        (["override", "log", "n"], ["night"]),
        (["profile", "pull", ""], [make_profile().profile_id]),
    ],
)
def test_ids_are_offered(
    completed, sidecar: SidecarProcess, monkeypatch: pytest.MonkeyPatch, words, offered
):
    monkeypatch.setenv("CONTROLLER_ADDRESS", sidecar.address)
    assert sorted(completed(*words)) == offered


def test_the_line_may_name_the_sidecar(completed, sidecar: SidecarProcess):
    path = sidecar.address.removeprefix("unix:")
    for separator in ("\n", " "):
        words = ("explain", "--address", "unix", ":", path, "pod-8")
        assert completed(*words, separator=separator) == ["pod-8:30000"]


def test_other_shells_get_whole_words(
    completed, sidecar: SidecarProcess, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CONTROLLER_ADDRESS", sidecar.address)
    assert completed("explain", "pod-8:3", shell="fish") == ["pod-8:30000"]


@pytest.mark.parametrize("kind", ["nobody", "mute", "no address", "no token"])
def test_whatever_is_wrong_nothing_is_offered_and_nothing_is_said(
    completed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
):
    monkeypatch.setenv("CONTROLLER_TOKEN_FILE", str(tmp_path / "none"))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "mute.sock"))
        listener.listen()
        address = {
            "nobody": f"{tmp_path}/absent.sock", "mute": f"{tmp_path}/mute.sock",
            "no address": "nonsense", "no token": "127.0.0.1:1",
        }[kind]  # fmt: skip
        monkeypatch.setenv("CONTROLLER_ADDRESS", address)
        assert completed("explain", "") == []


def test_bash_itself_gets_them(sidecar: SidecarProcess, tmp_path: Path):
    script = tmp_path / "controller"
    script.write_text(f'#!/bin/sh\nexec {" ".join(CONTROLLER)} "$@"\n')
    script.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", BASH],
        env=os.environ | ENVIRONMENT | {"CONTROLLER_ADDRESS": sidecar.address, "PATH": path},
        capture_output=True, text=True, timeout=PATIENCE_SECONDS * 6, check=False,
    )  # fmt: skip
    assert (done.stdout.split(), done.stderr) == (["30000", "30001"], "")
