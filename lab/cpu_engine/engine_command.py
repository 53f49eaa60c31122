"""Makes the commands with which the demo and the lab serve the shipped target on a CPU."""

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


def engine_command(
    port: int, max_batch_size: int, flags: Sequence[str], models: Path = MODELS
) -> list[str]:
    """Makes the command line; flags: of its speculation, and further ones.  models: the set.

    It runs in float32, because in bfloat16 even SGLang's own speculation differs from plain
    decoding by rounding.
    """
    return [
        sys.executable, "-m", "lab.cpu_engine.serve",
        "--model-path", str(models / "target"),
        "--dtype", "float32",
        "--host", "127.0.0.1",
        "--port", str(port),
        "--max-running-requests", str(max_batch_size),
        "--max-total-tokens", "16384",
        "--context-length", "2048",
        "--random-seed", "1",
        "--skip-server-warmup",
        "--log-level-http", "warning",
        *flags,
    ]  # fmt: skip


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
