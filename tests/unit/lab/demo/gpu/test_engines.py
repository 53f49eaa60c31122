"""The engines of the day in real time differ in their speculation flags alone."""

import json
from pathlib import Path

import pytest

from lab.demo.gpu import engine_watch, engines
from lab.demo.gpu.plan import SETTINGS
from lab.gpu_check.shapes import QWEN3_8B, Device
from lab.harness.engines import Workplace
from lab.paced.engines import ADAPTIVE, OFF, STEERED, log_path, static_policy
from lab.paced.traffic import own_curves

POLICIES = (STEERED, static_policy(4), ADAPTIVE, OFF)


@pytest.fixture
def place(tmp_path):
    return Workplace(tmp_path / "output", tmp_path / "scratch")


@pytest.fixture
def setting(tmp_path):
    models = QWEN3_8B.write(tmp_path / "models")
    options = ("--attention-backend", "triton")
    return engines.EngineSetting(
        SETTINGS[QWEN3_8B.name], models, own_curves(), Device.GPU, options=options
    )


def test_caches_graphs_and_batches_are_the_same(setting):
    commands = [engines.command(policy, setting, 30000) for policy in POLICIES]
    common = commands[-1]
    index = common.index("--attention-backend")
    for command in commands:
        assert command[:index] == common[:index]
        assert command[-2:] == ["--attention-backend", "triton"]
    assert common[1:3] == ["-m", "sglang.launch_server"]
    first = common.index("--cuda-graph-bs-decode") + 1
    sizes = [str(size) for size in setting.day.graph_sizes]
    assert common[first : first + len(sizes)] == sizes
    assert "--speculative-algorithm" not in common
    assert "--speculative-adaptive" in commands[2]


def test_all_draw_and_log_and_only_the_steered_one_knows_the_sidecar(setting, place):
    for policy in POLICIES:
        variables = engines.environment(policy, setting, place)
        watched = json.loads(variables[engine_watch.VARIABLE])
        assert watched["log"] == str(log_path(policy, place).absolute())
        assert set(watched["curves"]) == set(own_curves())
        assert Path(watched["log"]).parent.is_dir()
        steered = {name for name in variables if name.startswith("SPECULATION_")}
        assert bool(steered) == (policy == STEERED)
    variables = engines.environment(STEERED, setting, place)
    assert variables["SPECULATION_SIDECAR"] == place.address
    assert variables["SPECULATION_GAMMAS"] == "0,1,2,3,4,5,7"
