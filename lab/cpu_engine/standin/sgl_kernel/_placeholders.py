"""Names that must exist for SGLang's modules to import, and names that must not.

A model file that fails to import is skipped with a warning, and SGLang then serves the model
through its generic Transformers implementation: correct, several times slower, and easy to miss.
So each name below is bound.
"""

from __future__ import annotations

from ._registry import NAMESPACE, OperatorPlaceholder

LOOKED_UP_AT_IMPORT = (
    "apply_rotary_pos_emb_cpu",
    "conv3d_embed_cpu",
    "flash_attn_varlen_func",
    "fused_dual_residual_rmsnorm_cpu",
    "fused_gdn_gating_cpu",
    "fused_moe_router_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_sigmoid_mul_cpu",
)

# SGLang asks for these with `hasattr` and calls them when they are there (models/utils.py,
# models/qwen3_moe.py); even a placeholder would be taken for the real thing.
MUST_STAY_ABSENT = ("fused_qk_norm_cpu", "fused_qk_norm_rope_cpu")


def install() -> None:
    """Bind a placeholder to every name in ``LOOKED_UP_AT_IMPORT``."""
    for name in LOOKED_UP_AT_IMPORT:
        setattr(NAMESPACE, name, OperatorPlaceholder(name))
