"""Configurations of models, for tests that need no weights."""

import json
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


def plain_model(folder: Path) -> Path:
    """One with grouped-query attention: 4 heads of 32 numbers."""
    return _write_config(
        folder,
        architectures=["Qwen3ForCausalLM"],
        model_type="qwen3",
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )


def latent_model(folder: Path) -> Path:
    """One with latent attention, of 16 heads and 512 + 64 numbers, and with a draft layer."""
    return _write_config(
        folder,
        architectures=["DeepseekV3ForCausalLM"],
        model_type="deepseek_v3",
        num_nextn_predict_layers=1,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        moe_intermediate_size=64,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    )


def _write_config(folder: Path, **fields: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(COMMON | fields))
    return folder
