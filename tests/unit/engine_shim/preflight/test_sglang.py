"""A plugin that SGLang does not load is an obstacle of its own."""

import json
import os
import subprocess
import sys

import pytest

from engine_shim.link.messages import PURE_PYTHON_VARIABLE
from engine_shim.preflight import sglang
from engine_shim.preflight.verdict import InputError
from engine_shim.sglang.api import hook_check, versions


@pytest.mark.parametrize(
    ("allowed", "targets", "obstacle"),
    [
        ("", ("a hook",), ""),
        ("", (), "SGLang does not find it: install speculation-controller-shim"),
        ("other", (), "SGLANG_PLUGINS=other leaves it out: add speculation_controller"),
    ],
)
def test_the_plugin_has_to_be_loaded(
    monkeypatch: pytest.MonkeyPatch, allowed: str, targets: tuple[str, ...], obstacle: str
) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", allowed)
    monkeypatch.setattr(hook_check, "registered_targets", lambda: targets)
    plugin_obstacle = sglang._plugin_check().obstacle
    assert plugin_obstacle.startswith(obstacle)
    assert bool(plugin_obstacle) == bool(obstacle)


def test_without_sglang_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "sglang_version", lambda: "")
    with pytest.raises(InputError, match="SGLang is not installed in this environment"):
        sglang.verdict(["--model-path", "m"])


def test_another_version_is_the_only_thing_that_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPECULATION_SIDECAR", "unix:/nowhere")
    monkeypatch.setattr(versions, "sglang_version", lambda: "0.6.0")
    verdict = sglang.verdict(["--model-path", "m"])
    assert not verdict.is_steered
    (check,) = verdict.checks
    assert "SGLang 0.6.0 is installed, the plugin is tested with 0.5.21" in check.obstacle


def test_a_slow_protobuf_is_a_no_and_not_the_end_of_the_answer() -> None:
    path = os.pathsep.join(sys.path)
    program = [sys.executable, "-m", "engine_shim.preflight", "sglang", "-o", "json"]
    done = subprocess.run(
        [*program, "--", "--model-path", "m"], capture_output=True, text=True, check=False,
        env=os.environ | {PURE_PYTHON_VARIABLE: "python", "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    checks_by_topic = {check["topic"]: check for check in json.loads(done.stdout)["checks"]}
    assert PURE_PYTHON_VARIABLE in checks_by_topic["protobuf"]["obstacle"]
