"""Defines models as far as their cost goes: shapes of published checkpoints without weights.

SGLang fills them in itself (`--load-format dummy`).  What such models say is noise, so how many
drafts are accepted is drawn from a curve instead; see acceptance.py.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Load:
    """One phase of the moving load: so many clients, each prompt and answer of so many tokens."""

    concurrency: int
    requests: int
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class Shape:
    """A target, an EAGLE3 and a DFlash drafter, and what to run on them.

    target, eagle3, dflash: their config.json.  gammas, graph_limits: as SPECULATION_GAMMAS and
    SPECULATION_GRAPH_LIMITS.  batch_sizes: of the profile.  static_gamma: of the engine without
    the plugin.
    """

    name: str
    target: Mapping[str, Any]
    eagle3: Mapping[str, Any]
    dflash: Mapping[str, Any]
    context_length: int
    gammas: tuple[int, ...]
    graph_limits: str
    batch_sizes: tuple[int, ...]
    loads: tuple[Load, ...]
    static_gamma: int = 3

    @property
    def max_batch(self) -> int:
        """Most sequences that decode at once."""
        return max(self.batch_sizes)

    @property
    def vocabulary(self) -> int:
        """Token ids that a prompt may hold lie below."""
        return int(self.target["vocab_size"])

    def arms(self) -> tuple[tuple[str, int], ...]:
        """Lists drafter and draft length of everything that can run; gamma 0 once."""
        block = int(self.dflash["block_size"])
        return (
            *(("eagle3", gamma) for gamma in self.gammas),
            *(("dflash", gamma) for gamma in self.gammas if 0 < gamma < block),
        )

    def write(self, folder: Path) -> "ModelFolders":
        """Makes a folder with a config.json for each model."""
        folders = ModelFolders(folder / "target", folder / "eagle3", folder / "dflash")
        for path, config in zip(
            (folders.target, folders.eagle3, folders.dflash),
            (self.target, self.eagle3, self.dflash),
            strict=True,
        ):
            path.mkdir(parents=True, exist_ok=True)
            (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        return folders


@dataclass(frozen=True, slots=True)
class ModelFolders:
    """The folders of the models' configs."""

    target: Path
    eagle3: Path
    dflash: Path


_QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
# The drafters' sizes are those of the public EAGLE3 and DFlash (block 16) drafters for Qwen3-8B.
QWEN3_8B = Shape(
    name="qwen3-8b",
    target=_QWEN3_8B
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 36,
        "tie_word_embeddings": False,
    },
    eagle3=_QWEN3_8B
    | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": 32000,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 18, 33]},
    },
    dflash=_QWEN3_8B
    | {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 5,
        "layer_types": ["full_attention"] * 5,
        "tie_word_embeddings": False,
        "block_size": 16,
        "dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 151669},
    },
    context_length=10240,
    gammas=(0, 1, 2, 3, 4, 5, 6, 8, 11, 15),
    graph_limits="8:128,11:64,15:64",
    batch_sizes=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    loads=(
        Load(1, 2, 512, 384),
        Load(8, 16, 1024, 256),
        Load(64, 96, 512, 192),
        Load(256, 320, 256, 128),
        Load(16, 24, 4096, 192),
        Load(1, 1, 8192, 384),
    ),
)

_SMALL: dict[str, Any] = _QWEN3_8B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
# For a machine without a GPU: everything of the check but the sizes and the graphs.
SMALL = Shape(
    name="small",
    target={**QWEN3_8B.target, **_SMALL, "num_hidden_layers": 8},
    eagle3={
        **QWEN3_8B.eagle3,
        **_SMALL,
        "model_type": "llama",
        "draft_vocab_size": 256,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]},
    },
    dflash={
        **QWEN3_8B.dflash,
        **_SMALL,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        "block_size": 4,
        "dflash_config": {"target_layer_ids": [1, 3, 5], "mask_token_id": 500},
    },
    context_length=1024,
    gammas=(0, 1, 3),
    graph_limits="",
    batch_sizes=(1, 4),
    loads=(Load(1, 1, 32, 48), Load(4, 6, 64, 48)),
)

SHAPES = {shape.name: shape for shape in (QWEN3_8B, SMALL)}
