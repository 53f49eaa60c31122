"""The environment in which the unmodified SGLang wheel runs on a CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

STANDIN_FOLDER = Path(__file__).parent / "standin"
STANDIN_PLUGIN = "sglang_cpu_standin"

_SETTINGS = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # Dynamo would compile on the first request, which takes half a minute and gains nothing at
    # these sizes.
    "TORCHDYNAMO_DISABLE": "1",
    # The products of a small model are too short to share: with two threads a step is tens of times
    # slower.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Models are given by folder; a look-up on the hub would only wait for its time-out.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    # The stand-in is announced to torch as a device backend; this keeps such announcements on.
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
}


def cpu_engine_env(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """``base`` (the current environment by default) with what an SGLang process on CPU needs;
    ``base`` is not changed.

    Works for any way of starting SGLang (``sglang.launch_server``, ``sglang.Engine``,
    ``engine_shim.cpu.serve``), because everything in it is inherited by the processes SGLang
    spawns.
    """
    env = dict(os.environ if base is None else base)
    env.update(_SETTINGS)
    old = [
        part
        for part in env.get("PYTHONPATH", "").split(os.pathsep)
        if part and part != str(STANDIN_FOLDER)
    ]
    env["PYTHONPATH"] = os.pathsep.join([str(STANDIN_FOLDER), *old])
    allowed = [name for name in env.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    if allowed and STANDIN_PLUGIN not in allowed:  # a whitelist; an empty one allows every plugin
        env["SGLANG_PLUGINS"] = ",".join([*allowed, STANDIN_PLUGIN])
    return env
