"""Every command ends with the code that docs/command-line.md has for what happened."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from controller.cli import app, main
from controller.util.exit_codes import Exit
from speculation.v1 import service_pb2, service_pb2_grpc
from tests.support.command_tree import list_commands
from tests.support.service_harness import (
    ENVIRONMENT,
    PATIENCE_SECONDS,
    engine_message,
    make_profile,
)
from tests.support.sidecar_process import CONTROLLER, SidecarProcess, sidecar_process

ROOT = Path(__file__).resolve().parents[4]
NOBODY = 65534
SET = ("override", "set", "--reason", "test", "--dry-run")
FORMS = "must be unix:PATH, /PATH or HOST:PORT"
RUNNING = "is `controller serve` running there?"

POLICY = "policies:\n  - {name: bound, fleet: true, reason: memory, at_most: 2}\n"

# {SOCKET}: path of the sidecar's socket.  {HERE}: a directory with one.json, other.json (profiles)
# and policy.yaml.
CASES: list[tuple[str, Exit, str]] = [
    ("version", Exit.DONE, ""),
    ("version x", Exit.USAGE, "unexpected extra argument"),
    ("nosuch", Exit.USAGE, "No such command"),
    ("engines", Exit.DONE, "night"),
    ("engines --address {SOCKET}", Exit.DONE, "night"),
    ("engines --address unix://{SOCKET}", Exit.DONE, "night"),
    ("engines -o csv", Exit.USAGE, "is not one of"),
    ("engines --address nosuch", Exit.USAGE, FORMS),
    ("engines --address here/controller.sock", Exit.USAGE, FORMS),
    ("engines --address host:port", Exit.USAGE, FORMS),
    ("engines --address unix:", Exit.USAGE, FORMS),
    ("engines --address {HERE}/none.sock", Exit.NO_SIDECAR, RUNNING),
    ("engines --address unix:{HERE}/none.sock", Exit.NO_SIDECAR, RUNNING),
    ("engines --address 127.0.0.1:1", Exit.NO_SIDECAR, RUNNING),
    ("explain night", Exit.DONE, "night d"),
    ("explain nosuch", Exit.NOT_INTRODUCED, "nosuch"),
    ("explain night --batch-size 99999999", Exit.USAGE, "must be in [0, 65536]"),
    ("explain night --short --numbers", Exit.USAGE, "contradict"),
    ("explain night --batch-size x", Exit.USAGE, "--batch-size"),
    ("explain night -o name", Exit.DONE, "night"),
    ("explain", Exit.USAGE, "Missing argument"),
    ("explain night --address {HERE}/none.sock", Exit.NO_SIDECAR, RUNNING),
    ("top --once", Exit.DONE, "night"),
    ("top --once --address {HERE}/none.sock", Exit.NO_SIDECAR, RUNNING),
    ("top --once --interval 0", Exit.USAGE, "--interval"),
    ("override list", Exit.DONE, "no override is in force"),
    ("override list --address nosuch", Exit.USAGE, FORMS),
    ("override log", Exit.DONE, ""),
    ("override log --limit 0", Exit.USAGE, "--limit"),
    ("config --check --address 127.0.0.1:1", Exit.USAGE, "address: must be a unix socket"),
    ("override log a\tb", Exit.DONE, ""),
    ("override watch x", Exit.USAGE, "unexpected extra argument"),
    ("override watch --address {HERE}/none.sock", Exit.NO_SIDECAR, RUNNING),
    ("SET --fleet --off", Exit.DONE, "the allowed choices change"),
    ("SET --fleet --off --address {HERE}/none.sock", Exit.NO_SIDECAR, RUNNING),
    ("SET --fleet --gamma 99", Exit.USAGE, "gamma 99 must be in [0, 64]"),
    ("SET --fleet --at-least 99", Exit.USAGE, "gamma_min 99 must be in [0, 64]"),
    ("SET --fleet --gamma -1", Exit.USAGE, "--gamma"),
    ("SET --fleet --off --ttl 0s", Exit.USAGE, "ttl_seconds 0"),
    ("SET --fleet --off --ttl 90d", Exit.USAGE, "at most 604800"),
    ("SET --fleet --off --batch 9-3", Exit.USAGE, "the range is empty"),
    ("SET --fleet --off --id a/b", Exit.USAGE, "override id"),
    ("SET --fleet --off --author a\tb", Exit.USAGE, "only printable"),
    ("SET --fleet --regime online:0", Exit.USAGE, "need a stride"),
    ("SET --fleet --regime online:4294967296", Exit.USAGE, "--regime: 4294967296 is too large"),
    ("SET --fleet --batch 1-4294967296 --off", Exit.USAGE, "--batch: 4294967296 is too large"),
    ("SET --fleet --gamma 4294967296", Exit.USAGE, "--gamma"),
    ("explain night --batch-size 4294967296", Exit.USAGE, "--batch-size"),
    ("SET --fleet", Exit.USAGE, "must demand something"),
    ("SET --off", Exit.USAGE, "name the engines: one of"),
    ("SET --engine nosuch --off", Exit.NOT_INTRODUCED, "knows no engine nosuch"),
    ("SET --model nosuch --off", Exit.NO_EFFECT, "knows no model nosuch"),
    ("SET --engine night --gamma 6", Exit.NO_EFFECT, "no draft length 6"),
    ("SET --engine night --drafter x", Exit.NO_EFFECT, "no drafter x"),
    ("SET --engine night --drafter x --allow-no-effect", Exit.DONE, "would last"),
    ("SET --fleet --off --etag 9-a --id x", Exit.NOT_FOUND, "does not exist"),
    ("override clear nosuch --reason test", Exit.NOT_FOUND, "no override 'nosuch' is in force"),
    ("override clear nosuch --reason a\tb", Exit.USAGE, "reason"),
    ("override clear x --reason y --address {HERE}/none.sock", Exit.NO_SIDECAR, RUNNING),
    ("override log --address {HERE}/none.sock", Exit.NO_SIDECAR, RUNNING),
    ("override list --address {HERE}/none.sock", Exit.NO_SIDECAR, RUNNING),
    ("override clear nosuch", Exit.USAGE, "--reason"),
    ("profile list", Exit.DONE, ""),
    ("profile list --address nosuch", Exit.USAGE, FORMS),
    ("profile pull", Exit.USAGE, "name either a profile"),
    ("profile pull 0123456789abcdef", Exit.NOT_FOUND, "0123456789abcdef"),
    ("profile pull --engine nosuch", Exit.NOT_INTRODUCED, "nosuch"),
    ("profile pull --engine night", Exit.NOT_FOUND, "no profile"),
    ("profile show 0123456789abcdef", Exit.NOT_FOUND, "0123456789abcdef"),
    ("profile show {HERE}/none.json", Exit.USAGE, "No such file"),
    ("profile push {HERE}/none.json", Exit.USAGE, "No such file"),
    ("profile list --address {HERE}/none.sock", Exit.NO_SIDECAR, RUNNING),
    ("profile push {HERE}/one.json", Exit.DONE, "is in the profile store"),
    ("profile push {HERE}/one.json --address {HERE}/none.sock", Exit.NO_SIDECAR, RUNNING),
    ("profile pull 0123456789abcdef --address {HERE}/none.sock", Exit.NO_SIDECAR, RUNNING),
    ("profile show {HERE}/one.json", Exit.DONE, "milliseconds per step"),
    ("profile show 0123456789abcdef --address {HERE}/none.sock", Exit.NO_SIDECAR, RUNNING),
    ("profile diff {HERE}/one.json {HERE}/one.json", Exit.DONE, "second / first"),
    ("profile diff {HERE}/one.json {HERE}/other.json", Exit.MISMATCH, "target_model"),
    (
        "profile diff {HERE}/one.json 0123456789abcdef --address {HERE}/none.sock",
        Exit.NO_SIDECAR,
        RUNNING,
    ),
    ("profile diff {HERE}/one.json 0123456789abcdef", Exit.NOT_FOUND, "0123456789abcdef"),
    ("profile merge {HERE}/one.json --output {HERE}/merged.json", Exit.DONE, "merged.json"),
    ("profile push {ROOT}/pyproject.toml", Exit.USAGE, "is not a valid profile"),
    ("profile diff {HERE}/a.json {HERE}/b.json", Exit.USAGE, "No such file"),
    ("profile merge {HERE}/a.json --output {HERE}/b.json", Exit.USAGE, "No such file"),
    ("profile --address nosuch", Exit.USAGE, FORMS),
    ("profile --batch-sizes x", Exit.USAGE, "list of integers separated by commas"),
    ("profile --address {HERE}/none.sock --wait-seconds 0", Exit.NO_SIDECAR, "no sidecar listens"),
    ("profile --engine-url http://127.0.0.1:1 --wait-seconds 0", Exit.NO_ENGINE, "127.0.0.1:1"),
    ("doctor --address nosuch", Exit.USAGE, FORMS),
    ("doctor --engine-url= --address {HERE}/none.sock", Exit.FAILED, "fail socket"),
    ("policy check {HERE}/policy.yaml", Exit.DONE, "policy:bound"),
    ("policy check {HERE}/none.yaml", Exit.USAGE, "none.yaml"),
    ("policy check {HERE}/one.json", Exit.USAGE, "one.json"),
    ("doctor --engine-url http://127.0.0.1:1", Exit.FAILED, "fail engine HTTP"),
    ("config --check", Exit.DONE, ""),
    ("config --check --address 127.0.0.1:9464", Exit.USAGE, "--tcp HOST:PORT"),
    ("config --check --page-port 9464", Exit.USAGE, "metrics_port and page_port"),
    ("serve --address 127.0.0.1:9464", Exit.USAGE, "--tcp HOST:PORT"),
    ("serve --page-port 9464", Exit.USAGE, "metrics_port and page_port"),
    ("serve --nosuch", Exit.USAGE, "--nosuch"),
    ("simulate --scenario {HERE}/none.yaml", Exit.USAGE, ""),
    ("simulate --cost {HERE}/one.json --acceptance geometric:2", Exit.USAGE, "geometric"),
    ("replay {HERE}/none", Exit.USAGE, "none"),
    ("replay {HERE}/one.json", Exit.USAGE, "one.json"),
    ("report {HERE}/one.json --output {HERE}/x.html", Exit.USAGE, "one.json"),
    ("report {HERE}/none", Exit.USAGE, "--output"),
    ("convert {HERE}/one.json {HERE}/one.csv", Exit.DONE, "cells"),
    ("convert {ROOT}/pyproject.toml {HERE}/one.csv", Exit.USAGE, "pyproject.toml"),
    ("advise --pool H100:8:6.76:2.44", Exit.DONE, "pays from"),
    ("report {HERE}/none --output {HERE}/x.html", Exit.USAGE, "none"),
    ("convert {HERE}/none.json {HERE}/none.csv", Exit.USAGE, "none.json"),
    ("advise", Exit.USAGE, "controller advise"),
    ("advise --pool x", Exit.USAGE, "NAME:CARDS"),
]


# What asks a sidecar.
DENIED = [
    "engines", "explain x", "top --once", "override list", "override log", "override watch",
    "override clear x --reason y", "override set --fleet --off --reason x", "profile list",
    "profile pull 0123456789abcdef", "profile show 0123456789abcdef",
    "profile diff 0123456789abcdef 0123456789abcdef", "profile push {HERE}/one.json",
    "profile --wait-seconds 0",
]  # fmt: skip
COMMANDS = list_commands(app)


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    """Steers "night", which has no profile."""
    with (
        sidecar_process(tmp_path_factory.mktemp("sidecar")) as running,
        grpc.insecure_channel(running.address) as channel,
    ):
        request = service_pb2.IntroduceRequest(engine=engine_message("night"))
        stub = service_pb2_grpc.SpeculationServiceStub(channel)
        stub.Introduce(request, timeout=PATIENCE_SECONDS)
        yield running


@pytest.mark.parametrize(("line", "code", "text"), CASES, ids=[line for line, _, _ in CASES])
def test_a_command_line_ends_with_its_code(
    sidecar: SidecarProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    code: Exit,
    text: str,
):
    for name in [name for name in os.environ if name.startswith("CONTROLLER_")]:
        monkeypatch.delenv(name)
    for name, model in (("one", "target"), ("other", "another")):
        (tmp_path / f"{name}.json").write_text(make_profile(model).to_json())
    (tmp_path / "policy.yaml").write_text(POLICY)
    path = sidecar.address.removeprefix("unix:")
    # `serve` and `config` take their own from it, and must not serve there.
    serves = line.startswith(("serve", "config"))
    monkeypatch.setenv("CONTROLLER_ADDRESS", f"unix:{tmp_path}/own.sock" if serves else path)
    words = [
        word.format(SOCKET=path, HERE=tmp_path, ROOT=ROOT)
        for part in line.split(" ")
        for word in (SET if part == "SET" else (part,))
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == code, done.output
    assert text in " ".join(done.output.replace("│", " ").split())
    assert done.exception is None or isinstance(done.exception, SystemExit)


# Where a command ends well is tested: with an engine, a recording, a simulation, or a signal.
DONE_ELSEWHERE = {
    "serve": "test_serve.py", "profile": "../profiling/test_profile_command.py",
    "profile pull": "test_profiles.py", "override watch": "test_override.py",
    "override clear": "test_override.py", "doctor": "../doctor/test_doctor.py",
    "simulate": "../../simulator/commands/test_simulate.py",
    "replay": "test_replay.py", "report": "test_replay.py",
}  # fmt: skip


def codes_of(command: str) -> set[Exit]:
    """The codes that the lines above have for a command."""
    words = command.split()
    exit_codes = set()
    for line, code, _ in CASES:
        line_words = " ".join(
            "override set" if part == "SET" else part for part in line.split()
        ).split()
        inner = " ".join(line_words[: len(words) + 1]) in COMMANDS and len(line_words) > len(words)
        if line_words[: len(words)] == words and not inner:
            exit_codes.add(code)
    return exit_codes


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_line_for_each_way_in_which_it_can_end(command: str):
    parameters = {parameter.name: parameter for parameter in COMMANDS[command].params}
    wanted = {Exit.DONE, Exit.USAGE}
    if command in DONE_ELSEWHERE:
        wanted.remove(Exit.DONE)
        assert (Path(__file__).parent / DONE_ELSEWHERE[command]).is_file()
    # What asks a sidecar; `doctor` reports one that does not answer as what it has found.
    if {"address", "sidecar"} & set(parameters) and command not in {"serve", "doctor"}:
        wanted.add(Exit.NO_SIDECAR)
    if ("override_id" in parameters and command == "override clear") or "profile_id" in parameters:
        wanted.add(Exit.NOT_FOUND)
    if "engine" in parameters and {"address"} & set(parameters):
        wanted.add(Exit.NOT_INTRODUCED)
    assert wanted <= codes_of(command)


def test_every_command_that_asks_a_sidecar_is_tested_with_a_socket_that_may_not_be_opened():
    asking = {
        name
        for name, command in COMMANDS.items()
        if {"address", "sidecar"} & {parameter.name for parameter in command.params}
    }
    assert {name for name in asking if any(line.startswith(name) for line in DENIED)} == (
        asking - {"serve", "doctor"}
    )


@pytest.fixture
def mute(tmp_path: Path) -> Iterator[socket.socket]:
    """Listens, and never says anything; no other caller's call waits there."""
    path = tmp_path / "controller.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(8)
        listener.settimeout(PATIENCE_SECONDS * 6)
        yield listener


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("engines", Exit.INTERRUPTED),
        ("profile --wait-seconds 600", Exit.INTERRUPTED),
        ("override watch", Exit.DONE),
    ],
)
def test_an_interrupted_command_ends_at_once(mute: socket.socket, line: str, code: Exit):
    path = Path(mute.getsockname())
    path.with_name("controller-operators.sock").symlink_to(path)
    command = [*CONTROLLER, *line.split(), "--address", str(path)]
    with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as process:
        # It has called, and waits.
        caller, _ = mute.accept()
        caller.recv(1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_SECONDS * 6)
        caller.close()
    assert process.returncode == code, errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    "line", ["engines -o json", "explain night --numbers", "config", "version"]
)
def test_a_reader_that_goes_away_ends_a_command_quietly(sidecar: SidecarProcess, line: str):
    reader, writer = os.pipe()
    os.close(reader)
    variables = ENVIRONMENT | {"CONTROLLER_ADDRESS": sidecar.address}
    done = subprocess.run(
        [*CONTROLLER, *line.split()], env=variables, stdout=writer, stderr=subprocess.PIPE,
        text=True, timeout=PATIENCE_SECONDS * 6, check=False,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, done.stderr) == (Exit.BROKEN_PIPE, "")


@pytest.mark.parametrize(
    "line", ["explain \udcff", "override set --fleet --off --reason \udcff", "override log \udcff"]
)
def test_an_argument_that_is_no_text_is_a_usage_error(
    sidecar: SidecarProcess,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
):
    words = ["controller", *line.split(), "--address", sidecar.address]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == Exit.USAGE
    assert "is not UTF-8 text" in capsys.readouterr().err


@pytest.fixture
def shut() -> Iterator[Path]:
    """A socket on which a server listens, and which only root's group may open."""
    if os.getuid() != 0:
        pytest.skip("only root can be another user")
    # Every user may enter the directories above: those of pytest are root's alone.
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        path = Path(folder) / "controller.sock"
        path.parent.chmod(0o755)
        listener.bind(str(path))
        listener.listen()
        path.chmod(0o660)
        yield path


@pytest.mark.parametrize("line", DENIED)
def test_a_socket_that_may_not_be_opened_says_who_may(shut: Path, line: str):
    # These go to the operators' socket.
    if line.startswith(("override set", "override clear", "profile --", "profile push")):
        operators = shut.with_name("controller-operators.sock")
        shut.rename(operators)
        wanted = operators
    else:
        wanted = shut
    if "{HERE}" in line:
        (shut.parent / "one.json").write_text(make_profile().to_json())
    words = line.format(HERE=shut.parent).split()
    # What python needs may lie where only root looks: this user may read, and write nothing.
    user = [
        "setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups",
        "--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search",
    ]  # fmt: skip
    done = subprocess.run(
        [*user, *CONTROLLER, *words, "--address", str(shut)],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE_SECONDS * 6, check=False,
    )  # fmt: skip
    text = done.stdout + done.stderr
    assert done.returncode == Exit.DENIED, text
    assert f"permission denied: {wanted} has mode srw-rw----, uid 0 and gid 0" in text
    assert f"runs as uid {NOBODY}, gid {NOBODY}; run this command as uid 0 or in group 0" in text
    assert "no sidecar" not in text


def test_a_directory_that_may_not_be_entered_says_who_may(shut: Path):
    shut.parent.chmod(0o700)
    program = (
        "import os, sys\n"
        "from controller.util.sockets import permission_denied_reason\n"
        f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        "print(permission_denied_reason(sys.argv[1]))\n"
    )
    text = subprocess.run(
        [sys.executable, "-c", program, f"unix:{shut}"],
        env=ENVIRONMENT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert text.startswith(f"permission denied: {shut.parent} has mode drwx------")
    assert text.rstrip().endswith("run this command as uid 0")


@pytest.mark.parametrize("words", [["-h"], ["explain", "-h"], ["override", "set", "-h"]])
def test_h_is_short_for_help(words: list[str]):
    short = CliRunner().invoke(app, words)
    long = CliRunner().invoke(app, [*words[:-1], "--help"])
    assert short.exit_code == Exit.DONE, short.output
    assert short.output == long.output


@pytest.mark.parametrize("words", [["explain", "pod-7"], ["policy", "check", "policy.yaml"]])
def test_a_wrong_value_of_an_option_is_named_without_the_words_of_a_library(words: list[str]):
    done = CliRunner().invoke(app, [*words, "-o", "jsn"], env={"COLUMNS": "300"})
    assert done.exit_code == Exit.USAGE
    assert "'jsn' is not one of 'table'" in done.output
    assert "Value error" not in done.output


def test_a_profile_on_the_shelf_is_pulled(sidecar: SidecarProcess, tmp_path: Path):
    file = tmp_path / "p.json"
    file.write_text(make_profile("another").to_json())
    pushed = CliRunner().invoke(app, ["profile", "push", str(file), "--address", sidecar.address])
    assert pushed.exit_code == Exit.DONE, pushed.output
