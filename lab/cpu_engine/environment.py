"""The environment in which the unmodified SGLang wheel runs on a CPU."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from lab.harness.crash_dumps import without_crash_dumps

STANDIN_FOLDER = Path(__file__).resolve().parent / "standin"
STANDIN_PLUGIN = "sglang_cpu_standin"
# How long the steps of an engine last (see pace/).
PACE_VARIABLE = "LAB_PACE"

_SETTINGS = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # Dynamo would compile on the first request: half a minute, for nothing at these sizes.
    "TORCHDYNAMO_DISABLE": "1",
    # Triton's kernels run in Python, for an engine with `--attention-backend triton`.
    "TRITON_INTERPRET": "1",
    # The products of a small model are too short to share: two threads make a step many times
    # slower.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # SGLang wants a NUMA node for each rank, or else to be told cores; the stand-in pins to none.
    "SGLANG_CPU_OMP_THREADS_BIND": "0|0",
    "TOKENIZERS_PARALLELISM": "false",
    # Models are given by folder; a look-up on the hub would only wait for its time-out.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    # torch finds the stand-in as it finds device backends, unless told not to look.
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
}


def cpu_engine_env(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns a copy of ``base``, or of the current environment, with what SGLang needs on a CPU.

    It serves any way of starting SGLang (``python -m sglang.launch_server``, a script that makes a
    ``sglang.Engine``, ``lab.cpu_engine.serve``), since the processes SGLang spawns inherit it.
    """
    env = dict(os.environ if base is None else base)
    env.update(_SETTINGS)
    env.update(without_crash_dumps(env))
    folder = str(STANDIN_FOLDER)
    others = [part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part]
    env["PYTHONPATH"] = os.pathsep.join([folder, *(part for part in others if part != folder)])
    # SGLANG_PLUGINS is a whitelist; an empty one lets every plugin in.
    allowed = [name.strip() for name in env.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    if allowed and STANDIN_PLUGIN not in allowed:
        env["SGLANG_PLUGINS"] = ",".join([*allowed, STANDIN_PLUGIN])
    return env


def enter_cpu_environment() -> None:
    """Turns the running process, and those it will start, into one where SGLang runs on a CPU.

    Raises:
        RuntimeError: if torch is imported already; it reads its settings while it is imported.
    """
    if os.environ.items() >= cpu_engine_env().items() and str(STANDIN_FOLDER) in sys.path:
        return
    if "torch" in sys.modules:
        raise RuntimeError(
            "the CPU environment has to be entered before torch is imported: call "
            "enter_cpu_environment() first, or start the process with cpu_engine_env()"
        )
    os.environ.update(cpu_engine_env())
    sys.path.insert(0, str(STANDIN_FOLDER))
