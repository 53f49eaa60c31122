import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lab.gpu_check import shim_time
from lab.gpu_check.shim_time import ShimTimes


class ScriptedWatch:
    """Gives the seconds of each step in turn."""

    def __init__(self, *seconds: float) -> None:
        self._seconds = list(seconds)

    def begin(self) -> None:
        pass

    def take_seconds(self) -> float:
        return self._seconds.pop(0)


def batch(size: int, *, decodes: bool = True) -> Any:
    mode = SimpleNamespace(is_decode=lambda: decodes)
    return SimpleNamespace(reqs=[None] * size, forward_mode=mode)


def test_the_newest_plays_decode_steps_are_kept_by_batch_size(tmp_path: Path):
    path = tmp_path / "times.json"
    times = ShimTimes(path, ScriptedWatch(1e-6, 2e-6, 5e-3, 3e-6, 4e-6))
    for one in (batch(1), batch(8), batch(8, decodes=False), batch(8)):
        assert times.around_run_batch(lambda *_: "result", None, one) == "result"
    assert not path.exists()
    assert times.around_idle(lambda _: "idle", None) == "idle"
    assert shim_time.read_times(path) == {1: [1.0], 8: [2.0, 3.0]}
    times.around_run_batch(lambda *_: None, None, batch(1))
    times.around_idle(lambda _: None, None)
    assert json.loads(path.read_text()) == {"1": [4.0]}


def test_without_a_file_there_are_no_times(tmp_path: Path):
    assert shim_time.read_times(tmp_path / "none") == {}
