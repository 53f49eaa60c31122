"""The environment in which the unmodified SGLang wheel runs on a CPU."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from lab.harness.engine_environment import without_crash_dumps

STANDIN_FOLDER = Path(__file__).resolve().parents[1] / "standin"
STANDIN_PLUGIN = "sglang_cpu_standin"
# How long the steps of an engine last (see pace/).
PACE_VARIABLE = "LAB_PACE"

_SETTINGS = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # Dynamo would compile on the first request. That takes half a minute and gains nothing here.
    "TORCHDYNAMO_DISABLE": "1",
    # Triton's kernels run in Python, for an engine with `--attention-backend triton`.
    "TRITON_INTERPRET": "1",
    # The products of a small model are too short to share: two threads make a step many times
    # slower.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # SGLang needs a NUMA node or a list of cores for each rank; the stand-in ignores both.
    "SGLANG_CPU_OMP_THREADS_BIND": "0|0",
    "TOKENIZERS_PARALLELISM": "false",
    # Models are given by folder; a look-up on the hub would only wait for its time-out.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    # torch finds the stand-in as it finds device backends, unless told not to look.
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
}
# What tells SGLang that it runs on a CPU.
_CPU_ONLY = ("SGLANG_USE_CPU_ENGINE", "SGLANG_CPU_OMP_THREADS_BIND")
# Switches the emulated GPU on.
EMULATION = "EMULATED_CUDA"
_EMULATED_CUDA = {
    EMULATION: "1",
    # The stand-in is no build of sgl_kernel.
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    # The one in Rust makes tensors behind Python's back, on a real device.
    "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
    # Diagnosing a crash would take a minute.
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
}


def cpu_engine_env(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns a copy of ``base``, or of the current environment, with what SGLang needs on a CPU.

    It serves any way of starting SGLang (``python -m sglang.launch_server``, a script that makes a
    ``sglang.Engine``, ``lab.cpu_engine.serve``), since the processes SGLang spawns inherit it.
    """
    env = dict(os.environ if base is None else base)
    env.pop(EMULATION, None)
    env.update(_SETTINGS)
    env.update(without_crash_dumps(env))
    folder = str(STANDIN_FOLDER)
    import_paths = [part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part]
    env["PYTHONPATH"] = os.pathsep.join(
        [folder, *(part for part in import_paths if part != folder)]
    )
    # SGLANG_PLUGINS is a whitelist; an empty one lets every plugin in.
    allowed = [name.strip() for name in env.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    if allowed and STANDIN_PLUGIN not in allowed:
        env["SGLANG_PLUGINS"] = ",".join([*allowed, STANDIN_PLUGIN])
    return env


def emulated_cuda_env(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns a copy of ``base``, or of the current environment, with an emulated GPU.

    In it SGLang takes the paths that it takes on CUDA (see lab/standin/emulated_cuda), and
    nvidia-smi lists the emulated device.  Whatever starts SGLang may be used, as for
    ``cpu_engine_env``.
    """
    env = {name: value for name, value in cpu_engine_env(base).items() if name not in _CPU_ONLY}
    env.update(_EMULATED_CUDA)
    folder = str(STANDIN_FOLDER / "emulated_cuda" / "bin")
    executable_paths = [
        part for part in env.get("PATH", os.defpath).split(os.pathsep) if part != folder
    ]
    env["PATH"] = os.pathsep.join([folder, *executable_paths])
    return env


def enter_cpu_environment() -> None:
    """Turns the running process, and those it will start, into one where SGLang runs on a CPU.

    Raises:
        RuntimeError: if torch is imported already; it reads its settings while it is imported.
    """
    _enter(cpu_engine_env())


def enter_emulated_cuda() -> None:
    """Turns the running process, and those it will start, into one with an emulated GPU.

    Raises:
        RuntimeError: as `enter_cpu_environment`.
    """
    _enter(emulated_cuda_env())


def _enter(environment: Mapping[str, str]) -> None:
    if os.environ.items() >= environment.items() and str(STANDIN_FOLDER) in sys.path:
        return
    if "torch" in sys.modules:
        raise RuntimeError(
            "the environment of an engine has to be entered before torch is imported: enter it "
            "first, or start the process with cpu_engine_env() or emulated_cuda_env()"
        )
    for name in (*_CPU_ONLY, EMULATION):
        os.environ.pop(name, None)
    os.environ.update(environment)
    sys.path.insert(0, str(STANDIN_FOLDER))
