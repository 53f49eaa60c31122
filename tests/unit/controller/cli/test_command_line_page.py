"""docs/command-line.md says what every command prints, and with which code it ends."""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from typer.testing import CliRunner

from controller.cli import app
from controller.cli.output import API_VERSION
from controller.util.exit_codes import Exit
from speculation.v1 import policy_pb2, service_pb2, service_pb2_grpc
from tests.support.command_tree import list_commands
from tests.support.eventually import eventually
from tests.support.service_harness import (
    PATIENCE_SECONDS,
    engine_message,
    make_profile,
    report_message,
)
from tests.support.sidecar_process import SidecarProcess, sidecar_process

PAGE = (Path(__file__).parents[4] / "docs" / "command-line.md").read_text(encoding="utf-8")
COMMANDS = list_commands(app)
# Command: its cells for kinds, fields and names.
ROWS = {
    row[1]: [cell.strip() for cell in row[2].split("|")][1:]
    for row in re.finditer(r"^\| `controller ([\w ]+)` \|(.*)\|$", PAGE, re.MULTILINE)
}
MESSAGES = {
    message.__name__: set(message.DESCRIPTOR.fields_by_name)
    for message in (
        service_pb2.ExplainResponse, service_pb2.PushProfileResponse, service_pb2.ListFleetResponse,
        policy_pb2.SetOverrideResponse, policy_pb2.ClearOverrideResponse,
    )
}  # fmt: skip
# A line for each command that ends by itself.  {HERE}: a directory with the files below.
SET = "override set --fleet --gamma 1 --reason test --allow-no-effect"
LINES = {
    "config": "config",
    "doctor": "doctor --engine-url http://127.0.0.1:1",
    "engines": "engines",
    "explain": "explain night",
    "top": "top --once",
    "override set": SET,
    "override list": "override list",
    "override log": "override log",
    "override clear": "override clear drill --reason test",
    "policy check": "policy check {HERE}/policy.yaml",
    "profile push": "profile push {HERE}/one.json",
    "profile list": "profile list",
    "profile pull": "profile pull --engine night",
    "profile show": "profile show {HERE}/one.json",
    "profile diff": "profile diff {HERE}/one.json {HERE}/two.json",
    "profile merge": "profile merge {HERE}/one.json {HERE}/two.json --output {HERE}/merged.json",
    "simulate": "simulate --acceptance geometric:0.7 --cost {HERE}/costs.csv --concurrency 1 "
    "--tokens 50 --seeds 1 --processes 1 off",
    "replay": "replay {HERE}/record",
    "report": "report {HERE}/record --output {HERE}/page.html",
    "convert": "convert {HERE}/one.json {HERE}/one.csv --force",
    "advise": "advise --pool H100:8:6.76:2.44 --pool MI250:4:1:1 --training 4",
    "version": "version",
}
# What has tests of its own: it needs an engine, ends when it is stopped, or prints a log.
ELSEWHERE = {"profile", "override watch", "serve"}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("here")
    for name, slower in (("one", 1.0), ("two", 1.3)):
        profile = make_profile(measured_at=f"2020-01-01 {name}")
        cells = tuple(
            dataclasses.replace(cell, step_seconds=cell.step_seconds * slower)
            for cell in profile.cells
        )
        (folder / f"{name}.json").write_text(dataclasses.replace(profile, cells=cells).to_json())
    (folder / "policy.yaml").write_text(
        "policies:\n  - {name: bound, fleet: true, reason: memory, at_most: 2}\n"
    )
    rows = [f"{size},{width},0.0{size + width}" for size in (1, 2) for width in (1, 2)]
    (folder / "costs.csv").write_text(
        "\n".join(["batch_size,num_draft_tokens,step_seconds", *rows])
    )
    return folder


@pytest.fixture(scope="module")
def sidecar(here: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SidecarProcess]:
    """Steers "night", and has recorded some of its steps."""
    environment = {"CONTROLLER_RECORD_DIRECTORY": str(here / "record")}
    with (
        sidecar_process(tmp_path_factory.mktemp("sidecar"), environment=environment) as running,
        grpc.insecure_channel(running.address) as channel,
    ):
        stub = service_pb2_grpc.SpeculationServiceStub(channel)
        session = stub.Introduce(
            service_pb2.IntroduceRequest(engine=engine_message("night")), timeout=PATIENCE_SECONDS
        )
        for step in range(1, 30):
            request = service_pb2.DecideRequest(
                session_id=session.session_id, report=report_message(step)
            )
            stub.Decide(request, timeout=PATIENCE_SECONDS)
        eventually(lambda: any((here / "record").glob("*.record")), description="a recording")
        for words in (
            f"{SET} --id drill",
            f"{SET} --id standing-override-20261126-0001",
            LINES["profile push"].format(HERE=here),
        ):
            done = CliRunner().invoke(app, [*words.split(), "--address", running.address])
            assert done.exit_code == Exit.DONE, done.output
        yield running


@pytest.fixture
def run(sidecar: SidecarProcess, here: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that runs a command beside the sidecar."""
    monkeypatch.setenv("CONTROLLER_ADDRESS", sidecar.address)

    def run_it(command: str, *more: str) -> Any:
        words = [word.format(HERE=here) for word in LINES[command].split()]
        done = CliRunner().invoke(app, [*words, *more])
        failed = Exit.FAILED if command == "doctor" else Exit.DONE
        assert done.exit_code == failed, done.output
        return done

    return run_it


def test_the_page_has_every_command():
    assert set(ROWS) == set(COMMANDS)
    assert set(LINES) | ELSEWHERE == set(COMMANDS)


@pytest.mark.parametrize("command", LINES)
def test_a_document_has_the_kind_and_the_fields_of_the_page(run: Any, command: str):
    kinds, fields, _ = ROWS[command]
    document = json.loads(run(command, "-o", "json").stdout)
    assert document.pop("api_version") == API_VERSION
    assert f"`{document.pop('kind')}`" in kinds
    named = set(re.findall(r"`(\w+)`", fields))
    known = named - MESSAGES.keys()
    if not fields.startswith("those of"):
        assert known - {"path"} <= set(document)
        assert set(document) <= known.union(*(MESSAGES.get(name, ()) for name in named))


@pytest.mark.parametrize("command", sorted(LINES.keys() - {"override clear"}))
def test_names_and_the_two_languages_agree(run: Any, command: str):
    names = run(command, "-o", "name").stdout.splitlines()
    assert names or command == "profile diff"
    assert all(names)
    assert len(names) == len(set(names)) or command == "override log"
    document = yaml.safe_load(run(command, "-o", "yaml").stdout)
    assert document["api_version"] == API_VERSION
    assert f"`{document['kind']}`" in ROWS[command][0]


@pytest.mark.parametrize("command", sorted(LINES.keys() - {"override clear"}))
def test_a_pipe_gets_plain_text(run: Any, command: str):
    for form in ("table", "wide"):
        shown = run(command, "-o", form).stdout
        assert shown.strip()
        assert not re.search("[\x1b\u2500-\u257f\u2026]", shown)


@pytest.mark.parametrize("width", [80, 60])
def test_a_terminal_shows_whole_names_and_no_line_is_too_long(
    run: Any, monkeypatch: pytest.MonkeyPatch, width: int
):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    for command in ("config", "engines", "override list", "override log", "policy check",
                    "profile list", "profile show", "profile diff", "simulate"):  # fmt: skip
        names = run(command, "-o", "name").stdout.splitlines()
        shown = re.sub(r"\x1b\[[0-9;]*m", "", run(command).stdout)
        assert max(len(line) for line in shown.splitlines() if "\u2502" in line) <= width, command
        assert "\u2026" not in shown
        rows = [
            line.strip("\u2502").split("\u2502") for line in shown.splitlines() if "\u2502" in line
        ]
        # Where a cell continues in the next line, it does so in its column.
        columns = ["".join(cell.strip() for cell in column) for column in zip(*rows, strict=False)]
        for name in names:
            assert name in shown or any(name in column for column in columns), f"{command}: {name}"


def test_every_command_that_prints_takes_a_form():
    silent = {"serve"}
    for name, command in COMMANDS.items():
        options = {option for parameter in command.params for option in parameter.opts}
        assert ("-o" in options) == (name not in silent), name


def test_the_page_has_every_exit_code():
    exit_rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", PAGE, re.MULTILINE)
    assert exit_rows == [(str(int(code)), code.name) for code in Exit]
