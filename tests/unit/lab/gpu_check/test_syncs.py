"""There is no CUDA here: the warnings are raised by the tests, through Python's own machinery."""

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.gpu_check import syncs

MESSAGE = "called a synchronizing CUDA operation"


@pytest.fixture
def modes() -> Iterator[list[str]]:
    with warnings.catch_warnings():
        yield []


def synchronise_from(file: str) -> None:
    """Warns from a frame of that file."""
    code = compile(f"import warnings\nwarnings.warn({MESSAGE!r}, stacklevel=1)", file, "exec")
    exec(code, {"__name__": "fake"})


def test_a_warning_is_the_shims_where_the_shim_made_the_call(tmp_path: Path, modes: list[str]):
    ledger = tmp_path / "syncs.json"
    watch = syncs.SyncWatch(ledger, modes.append)
    watch.step()
    assert modes == []
    syncs.switch_path(ledger).touch()
    watch.step()
    for _ in range(2):
        synchronise_from("/x/engine_shim/sglang/hooks.py")
    synchronise_from("/x/sglang/srt/managers/scheduler.py")
    syncs.switch_path(ledger).unlink()
    watch.step()
    assert modes == ["warn", "default"]
    assert syncs.read_ledger(ledger) == {
        "steps": 1,
        "shim": {"/x/engine_shim/sglang/hooks.py:2": 2},
        "others": {"/x/sglang/srt/managers/scheduler.py:2": 1},
    }


def test_other_warnings_are_shown_as_before(
    tmp_path: Path, modes: list[str], monkeypatch: pytest.MonkeyPatch
):
    shown: list[str] = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_, **__: shown.append(message))
    ledger = tmp_path / "syncs.json"
    watch = syncs.SyncWatch(ledger, modes.append)
    syncs.switch_path(ledger).touch()
    watch.step()
    warnings.simplefilter("always")
    warnings.warn("something else", stacklevel=1)
    assert [str(message) for message in shown] == ["something else"]
    assert not watch.shim
    assert not watch.outside_shim


def test_frames_inside_torch_are_passed_over():
    frames = [("/p/torch/_tensor.py", 9), ("/x/engine_shim/sglang/a.py", 3), ("/x/b.py", 1)]
    assert syncs.innermost(frames) == "/x/engine_shim/sglang/a.py:3"


def test_without_its_variable_it_does_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(syncs.VARIABLE, raising=False)
    syncs.register()
    assert syncs.read_ledger(Path("/nonexistent")) is None
