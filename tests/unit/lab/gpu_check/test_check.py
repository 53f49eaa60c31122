"""Engines of a check that do not start in time, or die; a process that serves nothing plays one."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from lab.gpu_check.budget import Deadline, OutOfTimeError, Prices
from lab.gpu_check.check import Check, GpuCheckOptions
from lab.gpu_check.shapes import SMALL, WITHOUT_GPU, Device
from lab.gpu_check.small_engines import EXACT, PLAIN
from lab.harness.engines import Engine, Workplace
from lab.harness.errors import EngineFailedError
from lab.harness.processes import Child
from lab.harness.terminal import Terminal


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    options = GpuCheckOptions(
        shape=SMALL, device=Device.CPU, parts=("exact",), seconds=600.0, output=tmp_path,
        prices=Prices(0.0, 0.0, 0.0, 0.0, "the test"),
    )  # fmt: skip
    with ExitStack() as stack:
        check = Check(
            options, WITHOUT_GPU[Device.CPU], Deadline(600.0), Workplace(tmp_path, tmp_path),
            Terminal(), stack, {}, lambda: None,
        )  # fmt: skip
        monkeypatch.setattr(check, "_sidecar_child", stack.enter_context(silent(tmp_path)))
        monkeypatch.setattr(check, "_launch", launcher(tmp_path))
        yield check


def silent(folder: Path, command: str = "sleep 600") -> Child:
    return Child("silent", command.split(), folder / "log")


def launcher(folder: Path, command: str = "sleep 600") -> Callable[[str], Engine]:
    return lambda policy: Engine(policy, "http://127.0.0.1:1", silent(folder, command))


def test_an_engine_that_starts_longer_than_the_budget_is_out_of_time_and_ended(check: Check):
    check.deadline = Deadline(0.5)
    with pytest.raises(OutOfTimeError, match="plain had not started within the budget"):
        check.run_only(PLAIN)
    with pytest.raises(KeyError):
        check.engine(PLAIN)


def test_an_engine_that_dies_at_its_start_is_a_failure(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(check, "_launch", launcher(tmp_path, "false"))
    with pytest.raises(EngineFailedError, match="ended with status 1"):
        check.run_only(PLAIN)


def test_an_engine_that_has_died_is_noted_and_what_comes_next_begins(check: Check, tmp_path: Path):
    check._register_engine(launcher(tmp_path, "true")(EXACT))
    check.run_only()
    (loss,) = check.document["lost"][EXACT]
    assert loss["capability"] == "the engine"
    assert "is not answered" in loss["reason"]
