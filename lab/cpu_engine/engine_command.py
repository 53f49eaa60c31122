"""Makes the commands with which the lab serves models: the shipped ones, and others."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

_SHIPPED = Path(__file__).parent / "models"
# Folder of the set that the demo and the lab serve; LAB_MODELS names another one.
MODELS = Path(os.environ.get("LAB_MODELS") or _SHIPPED).absolute()
# The set of a target with few layers.
SHALLOW = _SHIPPED / "shallow"
MIMO = _SHIPPED / "mimo"


def server_command(
    module: str,
    model: Path,
    port: int,
    max_batch_size: int,
    flags: Sequence[str],
    *,
    max_tokens: int = 16384,
    context: int = 2048,
) -> list[str]:
    """Makes the command line of an SGLang server.

    module: that serves.  max_tokens: slots of the cache.  context: tokens of the longest sequence.
    flags: further ones.
    """
    return [
        sys.executable, "-m", module,
        "--model-path", str(model),
        "--host", "127.0.0.1",
        "--port", str(port),
        "--max-running-requests", str(max_batch_size),
        "--max-total-tokens", str(max_tokens),
        "--context-length", str(context),
        "--random-seed", "1",
        "--log-level-http", "warning",
        *flags,
    ]  # fmt: skip


def engine_command(
    port: int, max_batch_size: int, flags: Sequence[str], models: Path = MODELS
) -> list[str]:
    """Makes the command line for a shipped target; flags: of its speculation, and further ones.

    It runs in float32, because in bfloat16 even SGLang's own speculation differs from plain
    decoding by rounding.  models: the set.
    """
    engine_flags = ["--dtype", "float32", "--skip-server-warmup", *flags]
    return server_command(
        "lab.cpu_engine.serve", models / "target", port, max_batch_size, engine_flags
    )


def eagle3_flags(draft: Path, gamma: int) -> list[str]:
    """Makes the flags for chains of `gamma` drafts by the drafter in that folder."""
    return chain_flags("EAGLE3", draft, gamma)


def chain_flags(algorithm: str, draft: Path, gamma: int) -> list[str]:
    """Makes the flags for chains of `gamma` drafts.

    algorithm: SGLang's name, NEXTN for a target's multi-token predictor, whose folder draft is.
    """
    return [
        "--speculative-algorithm", algorithm,
        "--speculative-draft-model-path", str(draft),
        "--speculative-num-steps", str(gamma),
        "--speculative-eagle-topk", "1",
        "--speculative-num-draft-tokens", str(gamma + 1),
    ]  # fmt: skip


def adaptive_flags(algorithm: str, draft: Path) -> list[str]:
    """Makes the flags for SGLang's own adaptive speculation."""
    return [
        "--speculative-algorithm", algorithm,
        "--speculative-draft-model-path", str(draft),
        "--speculative-adaptive",
    ]  # fmt: skip
