"""Makes the command that serves a small model with the unmodified vLLM on a CPU."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lab.vllm_engine.environment import PYTHON


def serve_command(
    port: int,
    model: Path,
    speculation: Mapping[str, Any] | None = None,
    flags: Sequence[str] = (),
    *,
    max_batch_size: int = 8,
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
        "--max-num-seqs", str(max_batch_size),
        "--kv-cache-memory-bytes", str(128 << 20),
        "--no-enable-prefix-caching",
        *options,
        *flags,
    ]  # fmt: skip
