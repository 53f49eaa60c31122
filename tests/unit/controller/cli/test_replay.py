"""`controller serve` that records, a real agent that reports, `controller replay` and `report`."""

import json
import re
import shlex
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from controller.cli import app
from controller.recording.recording import find_recording
from controller.recording.segments import MAGIC, pack_frame, read_blocks
from tests.support.eventually import eventually
from tests.support.linked_engine import linked_engine
from tests.support.recorded_events import segments
from tests.support.service_harness import ENVIRONMENT
from tests.support.sidecar_process import CONTROLLER, controller, wait_until_serving
from tests.unit.controller.cli.recording_process import recording, reports_of, rich_reports, steer

ROOT = Path(__file__).resolve().parents[4]
HOSTILE = "<script>alert('x')</script>\"&$\\frac{\x7f"
STEPS = 300


class Recorded:
    """What the fixture leaves behind."""

    def __init__(self, directory: Path, token: str, lines: list[dict[str, Any]]) -> None:
        self.directory, self.token, self.lines = directory, token, lines


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """An engine behind its agent, and one with hostile names, under a hostile override."""
    directory = tmp_path_factory.mktemp("recorded")
    with recording(directory) as sidecar:
        with linked_engine(sidecar.address, "pod-7") as engine:
            engine.run(STEPS // 2)
            done = controller(
                "override", "set", "--fleet", "--at-most", "2", "--ttl", "2h", "--author",
                "ann <ops> & co", "--reason", HOSTILE.rstrip("\x7f"), "--address", sidecar.address,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            assert controller("explain", "pod-7", "--address", sidecar.address).returncode == 0
            engine.run(STEPS // 2)
            eventually(
                lambda: reports_of(sidecar.address, "pod-7") == STEPS or None, timeout_seconds=60.0
            )
        token = steer(sidecar.address, rich_reports(200), 20)
        code, lines = sidecar.stop()
    assert code == 0
    return Recorded(directory / "record", token, lines)


def replayed(*arguments: str | Path) -> Result:
    """`controller replay` in this process: its start is tested once, by `controller`."""
    return CliRunner().invoke(app, ["replay", *map(str, arguments)])


def test_what_a_real_engine_was_told_is_decided_the_same_again(recorded: Recorded):
    done = controller("replay", str(recorded.directory), "--engine", "pod-7")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"pod-7: {STEPS} reports" in done.stdout
    assert "decisions are the same, bit by bit" in done.stdout
    assert not [line for line in recorded.lines if line["event"].startswith("recording_")]


def test_what_would_have_been_otherwise(recorded: Recorded):
    # One draft where the recorded choice is more, whenever its plans came.
    change = ("--engine", "pod-7", "--policy", "tide", "--planner-constant", "tide_gamma=1")
    done = replayed(recorded.directory, *change, "-o", "json")
    assert (done.exit_code, done.stderr) == (0, "")
    body = json.loads(done.stdout)
    assert body["same"] is True
    other = body["otherwise"]
    assert other["estimate"] is True
    assert other["steps"] == STEPS
    assert 0 < other["differing_share"] <= 1
    assert other["stretches"]
    shown = replayed(recorded.directory, *change).stdout
    assert f"another choice in {other['differing_share']:.1%} of {STEPS} steps" in shown
    assert "The estimate uses" in shown
    assert "Where the choice differs" in shown


def test_a_forged_plan_ends_with_1_and_is_shown(recorded: Recorded, tmp_path: Path):
    source = find_recording(recorded.directory, "pod-7").paths[0]
    records = [r for _, block in read_blocks(source.read_bytes()) for r in block.records]
    forged = next(r for r in records[1:] if r.decision.HasField("plan"))
    row = forged.decision.plan.rows[0]
    row.gamma = 5 if row.gamma == 7 else 7
    (tmp_path / "x.record").write_bytes(MAGIC + pack_frame(records))
    done = replayed(tmp_path / "x.record")
    assert done.exit_code == 1
    assert "1 differences; the first, at " in done.stdout
    assert "B <= 1: recorded" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "has recordings of several engines: name one of odd, pod-7"),
        (("--engine", "pod-8"), "has no recording of engine 'pod-8'"),
        (("--engine", "odd", "--policy", "best"), "policy must be one of"),
        (
            ("--engine", "odd", "--planner-constant", "busy_step=1"),
            "the name of a constant: did you mean busy_steps, ",
        ),
        (("--engine", "odd", "--planner-constant", "busy_steps=0"), "busy_steps must be in [1, "),
        (("--engine", "odd", "--planner-constant", "fast_steps=x"), "could not convert"),
        (("--engine", "odd", "--profile", "/nowhere"), "/nowhere"),
    ],
)
def test_bad_input_ends_with_2_in_one_line(recorded: Recorded, arguments, text: str):
    done = replayed(recorded.directory, *arguments)
    assert done.exit_code == 2
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1


class Reader(HTMLParser):
    """What a page is made of."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []
        self.regions = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        attributes = dict(attrs)
        self.links += [v for k, v in attrs if k in {"src", "href", "xlink:href"} and v]
        self.regions += attributes.get("role") == "region" and attributes.get("tabindex") == "0"
        assert not any(name.startswith("on") for name in attributes)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def page(recorded: Recorded, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "ticket.html"
    done = controller("report", str(recorded.directory), "--engine", "odd", "--output", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{path}: 200 steps, ")
    return path.read_text(encoding="utf-8")


def test_the_ticket_fetches_nothing_and_takes_no_name_for_markup(page: str):
    reader = Reader(page)
    assert not {"script", "link", "b", "img", "iframe", "ops"} & set(reader.tags)
    assert all(link.startswith("#") for link in reader.links)
    assert "@import" not in page
    assert "prefers-color-scheme: dark" in page
    assert "color-scheme: light dark" in page
    assert reader.tags.count("table") == reader.regions > 5
    text = " ".join(reader.text)
    assert HOSTILE.rstrip("\x7f") in text
    assert "ann <ops> & co" in text
    assert "<b>&chat$" in text


def test_the_ticket_says_what_an_operator_asks(page: str):
    reader = Reader(page)
    text = " ".join(" ".join(reader.text).split())
    assert "odd: decisions and their reasons" in text
    assert "the same, bit by bit" in text
    assert "gamma <= 2" in text
    assert "steps without a valid lease 4 4 intervals" in text
    assert "reports dropped by the engine's agent 1" in text
    assert "reports refused 1" in text
    assert "mtp 5" in text
    assert "generic prior" in text or "generic" in text
    for word in ("python", "numpy", "controller", "switch_margin", "still in force"):
        assert word in text
    assert "svg" in reader.tags


def test_no_secret_is_on_record(recorded: Recorded, page: str):
    assert recorded.token not in page
    for path in segments(recorded.directory):
        for _, block in read_blocks(path.read_bytes()):
            assert recorded.token.encode() not in block.SerializeToString()


def test_a_page_needs_the_name_of_its_file(recorded: Recorded, tmp_path: Path):
    words = ["report", str(recorded.directory), "--engine", "odd"]
    for more in (("-o", "json"), ("-o", "x.json", "--output", str(tmp_path / "y.html"))):
        refused = CliRunner().invoke(app, [*words, *more])
        assert refused.exit_code == 2, refused.output


def test_a_page_that_cannot_be_written_ends_with_2(recorded: Recorded, tmp_path: Path):
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "x.html"
    words = ["report", str(recorded.directory), "--engine", "odd", "--output", str(path)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert "cannot be written" in done.stderr


def test_the_commands_of_the_documentation_work(tmp_path: Path):
    text = (ROOT / "docs" / "replay.md").read_text(encoding="utf-8")
    lines = [
        shlex.split(line)
        for kind, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
        if "controller " in line and not kind
    ]
    assert [" ".join(line[:2]) for line in lines[1:]] == [
        "controller override", "controller override", "controller replay", "controller replay",
        "controller replay", "controller report",
    ]  # fmt: skip
    serve, *others = lines
    variables = dict(word.split("=", 1) for word in serve[: serve.index("controller")])
    command = [*CONTROLLER, *serve[serve.index("controller") + 1 :]]
    with subprocess.Popen(
        command, env=ENVIRONMENT | variables, cwd=tmp_path, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            address = f"unix:{tmp_path}/controller.sock"
            wait_until_serving(address, process)
            with linked_engine(address, "pod-7") as engine:
                engine.run(200)
                eventually(lambda: segments(tmp_path / "record") or None, timeout_seconds=60.0)
                for line in others:
                    done = subprocess.run(
                        [*CONTROLLER, *line[1:]], env=ENVIRONMENT, cwd=tmp_path, timeout=60,
                        capture_output=True, text=True, check=False,
                    )  # fmt: skip
                    assert (done.returncode, done.stderr) == (0, ""), line
                    engine.run(20)
        finally:
            process.kill()
    assert (tmp_path / "ticket.html").stat().st_size > 10_000
