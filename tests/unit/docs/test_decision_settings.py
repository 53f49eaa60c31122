"""docs/decision-settings.md is what the code declares."""

import dataclasses
import sys
from pathlib import Path

import pytest

from controller.core.constants.setting import setting_text
from controller.core.settings import PlannerSettings
from scripts import decision_settings


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    monkeypatch.setattr(sys, "argv", ["decision_settings", *map(str, arguments)])
    return decision_settings.main()


def test_the_page_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "--check") == 0


def test_a_page_that_says_something_else_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text(decision_settings.reference().replace("0.009", "0.01", 1))
    assert run(monkeypatch, "--check", "--file", page) == 1
    assert "page.md is not what the code says" in capsys.readouterr().out
    assert run(monkeypatch, "--file", page) == 0
    assert page.read_text() == decision_settings.REFERENCE.read_text()


def test_every_setting_has_one_row() -> None:
    page = decision_settings.reference()
    for declared in dataclasses.fields(PlannerSettings):
        assert page.count(f"\n| `planner.{declared.name}` | `") == 1


def test_every_default_is_in_its_range_and_every_text_is_there() -> None:
    for declared in dataclasses.fields(PlannerSettings):
        text = setting_text(declared)
        if declared.name == "policy":
            continue
        assert text is not None, declared.name
        assert text.allows(getattr(PlannerSettings(), declared.name)), declared.name
        assert all((text.unit, text.trades, text.tuned)), declared.name
