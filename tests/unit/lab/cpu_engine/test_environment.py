"""The environment of an SGLang process on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import engine_shim
from lab.cpu_engine.environment import STANDIN_FOLDER, cpu_engine_env
from tests.support.engine import fork_engine

ROOT = Path(engine_shim.__file__).parents[1]
PATIENCE_SECONDS = 240.0


def test_the_stand_in_comes_first_on_the_path_and_once() -> None:
    path = os.pathsep.join(["/elsewhere", str(STANDIN_FOLDER), "", "/other"])
    env = cpu_engine_env({"PYTHONPATH": path})
    assert env["PYTHONPATH"].split(os.pathsep) == [str(STANDIN_FOLDER), "/elsewhere", "/other"]
    assert cpu_engine_env({})["PYTHONPATH"] == str(STANDIN_FOLDER)


@pytest.mark.parametrize(
    ("plugins", "expected"),
    [
        ("mine", "mine,sglang_cpu_standin"),
        ("mine, sglang_cpu_standin", "mine, sglang_cpu_standin"),
        ("", ""),
    ],
)
def test_a_whitelist_of_plugins_lets_the_stand_in_pass(plugins: str, expected: str) -> None:
    assert cpu_engine_env({"SGLANG_PLUGINS": plugins})["SGLANG_PLUGINS"] == expected


def run(code: str, env: dict[str, str]) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**env, "PYTHONPATH": os.pathsep.join([env.get("PYTHONPATH", ""), str(ROOT)])},
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    return done.stdout.strip()


def test_torch_answers_sglang_in_the_cpu_environment_only() -> None:
    ask = "import torch; print(torch.cpu._is_amx_tile_supported.__name__)"
    plain = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "SGLANG_USE_CPU_ENGINE")
    }
    assert run(ask, plain) == "_is_amx_tile_supported"
    assert run(ask, plain | {"PYTHONPATH": str(STANDIN_FOLDER)}) == "_is_amx_tile_supported"
    answer = "import torch; print(torch.cpu._is_amx_tile_supported())"
    assert run(answer, cpu_engine_env(plain)) == "True"


def test_a_process_can_enter_before_it_imports_torch() -> None:
    plain = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and "SGLANG" not in k}
    enter = "from lab.cpu_engine.environment import enter_cpu_environment as enter; enter(); "
    answer = "import torch, sgl_kernel; print(torch.cpu._is_amx_tile_supported()); enter()"
    assert run(enter + answer, plain) == "True"


def test_a_process_that_imported_torch_cannot_enter() -> None:
    plain = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and "SGLANG" not in k}
    code = (
        "import torch\n"
        "from lab.cpu_engine.environment import enter_cpu_environment\n"
        "try: enter_cpu_environment()\n"
        "except RuntimeError as error: print(error)"
    )
    assert "before torch is imported" in run(code, plain)


@pytest.mark.engine
@pytest.mark.slow
def test_sglang_serves_models_with_its_own_code(tmp_path: Path) -> None:
    """A model file that fails to import would fall back on Transformers, silently."""
    modules = {
        "Qwen3ForCausalLM": "sglang.srt.models.qwen3",
        "LlamaForCausalLM": "sglang.srt.models.llama",
        "LlamaForCausalLMEagle3": "sglang.srt.models.llama_eagle3",
        "MiMoMTP": "sglang.srt.models.mimo_mtp",
    }
    output_path, log = tmp_path / "found.json", tmp_path / "log"
    module = "tests.unit.lab.cpu_engine.registry_probe"
    probe = fork_engine(module, [output_path.name, *modules], tmp_path, {}, log)
    assert probe.wait(PATIENCE_SECONDS) == 0, log.read_text()
    assert json.loads(output_path.read_text()) == modules
