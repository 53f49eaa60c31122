"""The order of parts and the writing of results; the parts are small functions of the test."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from lab.gpu_check.budget import OutOfTimeError, Work
from lab.gpu_check.check import Check, GpuCheckOptions
from lab.gpu_check.device import Device
from lab.gpu_check.plan import Planner
from lab.gpu_check.run import run
from lab.gpu_check.shapes import SMALL
from lab.harness.errors import HarnessError
from lab.harness.terminal import Terminal


class ScriptedPart:
    """A part that does what the test says."""

    def __init__(self, key: str, act: Callable[[Check], None], seconds: float = 0.0) -> None:
        self.KEY = key
        self._act = act
        self._seconds = seconds

    def plan(self, _: Planner) -> Work:
        return Work(wait_seconds=self._seconds)

    def run(self, check: Check) -> None:
        self._act(check)

    def summary(self, document: Mapping[str, Any]) -> tuple[str, str]:
        return "done", str(document[self.KEY])

    def problems(self, _: Mapping[str, Any]) -> list[str]:
        return []

    def sections(self, _: Mapping[str, Any]) -> list[str]:
        return []


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    def play(*parts: ScriptedPart, seconds: float = 600.0) -> dict[str, Any]:
        named = {part.KEY: part for part in parts}
        monkeypatch.setattr("lab.gpu_check.run.PARTS", named)
        monkeypatch.setattr("lab.gpu_check.page.PARTS", named)
        options = GpuCheckOptions(
            shape=SMALL, device=Device.CPU, parts=tuple(named), seconds=seconds, output=tmp_path
        )
        return run(options, Terminal())

    return play


def written(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return document


def finding(key: str, value: Any) -> ScriptedPart:
    return ScriptedPart(key, lambda check: check.document.update({key: value}))


def test_parts_run_in_the_order_given_and_each_is_written_down(play, tmp_path: Path):
    seen = []

    def look(check: Check) -> None:
        seen.append("first" in written(tmp_path))
        check.document["second"] = 2

    document = play(finding("first", 1), ScriptedPart("second", look))
    assert seen == [True]
    assert list(document["part_seconds"]) == ["first", "second"]
    assert written(tmp_path)["second"] == 2
    assert "| second | done | 2 |" in (tmp_path / "page.md").read_text()


def test_a_part_that_does_not_fit_is_left_out_and_the_next_one_runs(play, tmp_path: Path):
    document = play(
        ScriptedPart("long", lambda _: pytest.fail("it ran"), seconds=10_000.0),
        finding("short", 1),
    )
    assert "about 5000 s" in document["left_out"]["long"]
    assert document["short"] == 1
    assert "long: the part long takes" in (tmp_path / "page.md").read_text()


def test_a_part_that_runs_out_of_time_keeps_what_it_has(play):
    def act(check: Check) -> None:
        check.document["cut"] = "half"
        raise OutOfTimeError("no time")

    document = play(ScriptedPart("cut", act), finding("next", 1))
    assert (document["cut"], document["left_out"]["cut"], document["next"]) == (
        "half",
        "no time",
        1,
    )


def test_a_part_that_fails_keeps_what_it_has_and_the_next_one_runs(play, tmp_path: Path):
    def act(check: Check) -> None:
        check.document["broken"] = "half"
        raise HarnessError("engine died\nits log")

    document = play(ScriptedPart("broken", act), finding("next", 1))
    assert (document["broken"], document["next"]) == ("half", 1)
    assert document["failed"] == {"broken": "engine died\nits log"}
    assert "- broken: engine died\n" in (tmp_path / "page.md").read_text()


@pytest.mark.parametrize("error", [ValueError("a fault"), SystemExit(143)])
def test_what_was_found_before_the_end_is_written_down(play, tmp_path: Path, error: BaseException):
    def act(check: Check) -> None:
        check.document["cut"] = "half"
        raise error

    with pytest.raises(type(error)):
        play(ScriptedPart("cut", act))
    assert written(tmp_path)["cut"] == "half"
    assert str(error) in written(tmp_path)["stopped"]
    assert "| cut | done | half |" in (tmp_path / "page.md").read_text()
