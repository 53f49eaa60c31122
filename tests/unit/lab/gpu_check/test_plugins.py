import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.gpu_check import plugins

CODE = (
    "from importlib.metadata import entry_points\n"
    "found = entry_points(group='sglang.srt.plugins')\n"
    "print(sorted(e.load().__module__ for e in found if e.name.startswith('lab_gpu_check')))\n"
)


def test_every_plugin_is_found_by_the_checks_own_engines_and_by_no_other(tmp_path: Path):
    def printed(extra: dict[str, str]) -> str:
        done = subprocess.run(
            [sys.executable, "-c", CODE],
            env=os.environ | extra,
            capture_output=True,
            text=True,
            check=True,
            cwd=tmp_path,
        )
        return done.stdout.strip()

    names = ["acceptance", "float32_rmsnorm", "shim_time", "syncs"]
    expected = str([f"lab.gpu_check.{name}" for name in names])
    assert printed(plugins.environment(tmp_path / "plugins")) == expected
    assert printed({}) == "[]"


@pytest.mark.parametrize("module", plugins.MODULES)
def test_a_plugin_without_its_variable_does_nothing(module, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(module.VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.scheduler", None)
    module.register()  # an import of SGLang's scheduler would fail
