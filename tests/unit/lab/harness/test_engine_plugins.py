"""A plugin of a run is found by a process that has its folder on the path, and by no other."""

import os
import subprocess
import sys

from lab.harness.engine_plugins import register_plugin

LIST = """
from importlib.metadata import entry_points
for found in entry_points(group="sglang.srt.plugins"):
    if found.name == "made-up":
        print(found.load().__name__)
"""


def listed(folder, variables):
    done = subprocess.run(
        [sys.executable, "-c", LIST],
        cwd=folder, env=os.environ | variables, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.split()


def test_its_function_is_loaded_from_the_clone(tmp_path):
    variables = register_plugin(tmp_path / "plugins", "made-up", "lab.harness.ports:free_port")
    assert listed(tmp_path, variables) == ["free_port"]
    assert listed(tmp_path, {}) == []


def test_several_can_be_registered_in_one_folder(tmp_path):
    register_plugin(tmp_path, "other", "lab.harness.ports:free_port")
    variables = register_plugin(tmp_path, "made-up", "lab.harness.ports:free_port")
    assert listed(tmp_path, variables) == ["free_port"]
    assert len(list(tmp_path.glob("*.dist-info"))) == 2
