"""The order of parts and the writing of results; the parts are small functions of the test."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from lab.gpu_check.budget import OutOfTimeError, Planner, Work
from lab.gpu_check.check import Check, GpuCheckOptions
from lab.gpu_check.run import run
from lab.gpu_check.shapes import SMALL, Device
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


def test_a_part_that_runs_out_of_time_keeps_what_it_has(play, tmp_path: Path):
    def act(check: Check) -> None:
        check.document["cut"] = "half"
        raise OutOfTimeError("no time")

    document = play(ScriptedPart("cut", act), finding("next", 1))
    assert (document["cut"], document["left_out"]["cut"], document["next"]) == (
        "half",
        "no time",
        1,
    )
    assert "| cut | unfinished | half |" in (tmp_path / "page.md").read_text()


def test_a_part_that_fails_keeps_what_it_has_and_the_next_one_runs(play, tmp_path: Path):
    def act(check: Check) -> None:
        check.document["broken"] = "half"
        raise HarnessError("engine died\nits log")

    document = play(ScriptedPart("broken", act), finding("next", 1))
    assert (document["broken"], document["next"]) == ("half", 1)
    assert document["failed"] == {"broken": "engine died\nits log"}
    page = (tmp_path / "page.md").read_text()
    assert "- broken: engine died\n" in page
    assert "| broken | FAILED | half |" in page


def test_a_fault_of_a_part_does_not_keep_the_next_ones_from_running(play):
    def act(_: Check) -> None:
        raise KeyError("no such key")

    document = play(ScriptedPart("faulty", act), finding("next", 1))
    assert document["next"] == 1
    assert document["failed"]["faulty"].startswith("KeyError: 'no such key'")
    assert "test_run.py" in document["failed"]["faulty"]


def test_what_was_found_before_the_end_is_written_down(play, tmp_path: Path):
    def act(check: Check) -> None:
        check.document["cut"] = "half"
        raise SystemExit(143)

    with pytest.raises(SystemExit):
        play(ScriptedPart("cut", act))
    assert written(tmp_path)["cut"] == "half"
    assert "143" in written(tmp_path)["stopped"]
    assert "| cut | unfinished | half |" in (tmp_path / "page.md").read_text()


def test_a_check_that_is_stopped_while_it_writes_for_the_first_time_says_so(
    play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def stop(*_: object) -> None:
        patch.undo()
        raise SystemExit(143)

    with monkeypatch.context() as patch:
        patch.setattr("lab.gpu_check.run.write_result", stop)
        with pytest.raises(SystemExit):
            play(ScriptedPart("first", lambda _: pytest.fail("it ran")))
    assert "143" in written(tmp_path)["stopped"]


def test_a_part_has_no_verdict_of_its_own_until_it_has_ended(play, tmp_path: Path):
    seen = []

    def act(check: Check) -> None:
        check.document["first"] = "half"
        check.save()
        seen.append((tmp_path / "page.md").read_text())

    play(ScriptedPart("first", act), finding("second", 1))
    assert "| first | unfinished | half |" in seen[0]
    assert "Not finished when this page was written: first, second." in seen[0]
    page = (tmp_path / "page.md").read_text()
    assert "| first | done | half |" in page
    assert "Not finished" not in page


def test_nothing_of_an_earlier_check_is_left(play, tmp_path: Path):
    (tmp_path / "page.md").write_text("all passed")
    (tmp_path / "prices.json").write_text("{}")
    seen = []
    play(ScriptedPart("first", lambda _: seen.append((tmp_path / "page.md").read_text())))
    assert "all passed" not in seen[0]
    assert not (tmp_path / "prices.json").exists()


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(play, tmp_path: Path):
    (tmp_path / "result.json").mkdir()
    with pytest.raises(HarnessError, match="nothing can be written to"):
        play(ScriptedPart("first", lambda _: pytest.fail("it ran")))


def test_a_disk_that_is_full_ends_the_check_with_a_sentence(
    play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def act(_: Check) -> None:
        def refuse(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("lab.gpu_check.run.write_result", refuse)

    with pytest.raises(HarnessError, match="No space left"):
        play(finding("first", 1), ScriptedPart("last", act))
    assert written(tmp_path)["first"] == 1
