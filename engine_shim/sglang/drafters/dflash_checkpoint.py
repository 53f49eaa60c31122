"""Reads the configuration of a DFlash checkpoint, without its weights."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_shim.common.errors import UnsupportedEngineError
from engine_shim.sglang.training.drafter_config import DFlashConfig, DrafterConfigError, read_dflash

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig


def draft_config(server_args: Any, model_path: str, revision: str | None) -> ModelConfig:
    """Reads the configuration of a drafter's checkpoint."""
    from sglang.srt.configs.model_config import ModelConfig

    return ModelConfig.from_server_args(
        server_args, model_path=model_path, model_revision=revision, is_draft_model=True
    )


def block_config(config: ModelConfig) -> DFlashConfig:
    """Reads the block settings of a checkpoint's configuration.  Raises UnsupportedEngineError."""
    try:
        return read_dflash(config.hf_config.to_dict())
    except DrafterConfigError as error:
        raise UnsupportedEngineError(f"{config.model_path}: {error}") from error


def block_size(config: ModelConfig) -> int:
    """Returns the tokens of a block, the newest one included.  Raises like `block_config`."""
    return block_config(config).block


def feature_layers(config: ModelConfig, target: ModelConfig) -> tuple[int, ...]:
    """Returns the target's layers that a checkpoint reads.  Raises UnsupportedEngineError."""
    try:
        return block_config(config).feature_layers(layer_count(target))
    except DrafterConfigError as error:
        raise UnsupportedEngineError(f"{config.model_path}: {error}") from error


def layer_count(target: ModelConfig) -> int:
    """Returns the number of layers that a target runs in sequence, as SGLang counts them."""
    config = target.hf_text_config
    return int(config.num_hidden_layers) * loop_count(config)


def loop_count(config: Any) -> int:
    """Returns how many times a target runs its layers in one pass.

    config: the part of its configuration that describes the layers.
    """
    return int(getattr(config, "num_loops", 1))


def block_draft_lengths(gammas: Iterable[int], size: int) -> tuple[int, ...]:
    """Returns the draft lengths that a block of this size can fill."""
    return tuple(gamma for gamma in gammas if gamma < size)


def block_too_large_reason(size: int, step_tokens: int) -> str:
    """Explains why the engine has no room for blocks of this size; "" if it has.

    step_tokens: tokens of one sequence in a step.  The block is written behind the context, where
    the engine reserves room for the widest step.
    """
    if step_tokens >= size:
        return ""
    return (
        f"the DFlash drafter drafts blocks of {size}, for which the engine keeps no room: add "
        f"{size - 1} to SPECULATION_GAMMAS"
    )


def block_size_mismatch_reason(requested_size: int | None, size: int) -> str:
    """Explains why blocks of the size that a user asked for cannot be drafted; "" if they can."""
    if requested_size in {None, size}:
        return ""
    return (
        f"--speculative-num-draft-tokens {requested_size}: the checkpoint drafts blocks of {size}, "
        "and "
        "shorter ones accept less; leave it out"
    )


def trained_mask_reason(model_path: str) -> str:
    """Explains why a checkpoint with a trained mask embedding is refused; "" without one."""
    path = Path(model_path) / "mask_embedding.pt"
    if not path.exists():
        return ""
    return (
        f"{path}: a trained mask embedding replaces a row of the target's, which would change the "
        "target: use a checkpoint without one beside another drafter"
    )
