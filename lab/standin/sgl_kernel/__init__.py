"""A stand-in for ``sgl_kernel`` in plain torch: SGLang's CPU engine without its compiled operators.

Covers what SGLang 0.5.23 calls for dense Qwen3/Llama-style text models in float32 and bfloat16,
plain and speculative (EAGLE, EAGLE3, NEXTN, STANDALONE, NGRAM), with tensor-parallel size 1 or 2
and any page size.  In float32, on one rank and without cached prefixes, it also covers experts,
latent attention (DeepSeek V3) and gated delta networks (Qwen3-Next, Qwen3.5).
"""

import os
import sys

from ._registry import MissingOperatorError as MissingOperatorError
from ._registry import OperatorPlaceholder, bind_placeholders
from .attention import decode_attention_cpu as decode_attention_cpu
from .attention import extend_attention_cpu as extend_attention_cpu
from .dense import convert_weight_packed as convert_weight_packed
from .dense import fused_add_rmsnorm_cpu as fused_add_rmsnorm_cpu
from .dense import gelu_tanh_and_mul_cpu as gelu_tanh_and_mul_cpu
from .dense import gemma3_rmsnorm_cpu as gemma3_rmsnorm_cpu
from .dense import gemma4_rmsnorm_cpu as gemma4_rmsnorm_cpu
from .dense import gemma_fused_add_rmsnorm_cpu as gemma_fused_add_rmsnorm_cpu
from .dense import gemma_rmsnorm_cpu as gemma_rmsnorm_cpu
from .dense import multimodal_rotary_embedding_cpu as multimodal_rotary_embedding_cpu
from .dense import rmsnorm_cpu as rmsnorm_cpu
from .dense import rotary_embedding_cpu as rotary_embedding_cpu
from .dense import silu_and_mul_cpu as silu_and_mul_cpu
from .dense import weight_packed_linear as weight_packed_linear
from .experts import biased_grouped_topk_cpu as biased_grouped_topk_cpu
from .experts import fused_experts_cpu as fused_experts_cpu
from .experts import fused_linear_sigmoid_mul as fused_linear_sigmoid_mul
from .experts import shared_expert_cpu as shared_expert_cpu
from .experts import topk_sigmoid_cpu as topk_sigmoid_cpu
from .experts import topk_softmax_cpu as topk_softmax_cpu
from .kv_cache import (
    assign_draft_cache_locs_contiguous_cpu as assign_draft_cache_locs_contiguous_cpu,
)
from .kv_cache import assign_extend_cache_locs_cpu as assign_extend_cache_locs_cpu
from .kv_cache import assign_req_to_token_pool_cpu as assign_req_to_token_pool_cpu
from .kv_cache import build_draft_decode_metadata_cpu as build_draft_decode_metadata_cpu
from .kv_cache import copy_all_layer_kv_cache_cpu as copy_all_layer_kv_cache_cpu
from .kv_cache import store_cache_cpu as store_cache_cpu
from .latent import bmm_cpu as bmm_cpu
from .latent import qkv_proj_with_rope_fused_weight as qkv_proj_with_rope_fused_weight
from .process import init_cpu_threads_env as init_cpu_threads_env
from .process import initialize as initialize
from .process import shm_allgather as shm_allgather
from .process import shm_allreduce as shm_allreduce
from .recurrent import causal_conv1d_fn_cpu as causal_conv1d_fn_cpu
from .recurrent import causal_conv1d_update_cpu as causal_conv1d_update_cpu
from .recurrent import causal_conv1d_weight_pack as causal_conv1d_weight_pack
from .recurrent import chunk_gated_delta_rule_cpu as chunk_gated_delta_rule_cpu
from .recurrent import fused_gdn_gating_cpu as fused_gdn_gating_cpu
from .recurrent import fused_qk_gemma_rmsnorm_cpu as fused_qk_gemma_rmsnorm_cpu
from .recurrent import fused_qk_gemma_rmsnorm_with_gate_cpu as fused_qk_gemma_rmsnorm_with_gate_cpu
from .recurrent import (
    fused_qkvzba_split_reshape_cat_contiguous_cpu as fused_qkvzba_split_reshape_cat_contiguous_cpu,
)
from .recurrent import fused_qkvzba_split_reshape_cat_cpu as fused_qkvzba_split_reshape_cat_cpu
from .recurrent import fused_rmsnorm_gated_cpu as fused_rmsnorm_gated_cpu
from .recurrent import (
    fused_sigmoid_gating_delta_rule_update_cpu as fused_sigmoid_gating_delta_rule_update_cpu,
)
from .recurrent import fused_sigmoid_mul_cpu as fused_sigmoid_mul_cpu
from .sampling import top_k_renorm_prob as top_k_renorm_prob
from .sampling import top_p_renorm_prob as top_p_renorm_prob
from .sampling import (
    tree_speculative_sampling_target_only as tree_speculative_sampling_target_only,
)
from .speculative import build_tree_kernel_efficient_cpu as build_tree_kernel_efficient_cpu
from .speculative import fill_accept_out_cache_loc_cpu as fill_accept_out_cache_loc_cpu
from .speculative import fill_bonus_tokens_cpu as fill_bonus_tokens_cpu
from .speculative import reconstruct_indices_from_tree_mask as reconstruct_indices_from_tree_mask
from .speculative import rotate_input_ids_cpu as rotate_input_ids_cpu
from .speculative import verify_tree_greedy_cpu as verify_tree_greedy_cpu

__version__ = "0.4.10"

bind_placeholders()
# SGLang also imports operators from these modules.
for _name in ("kvcacheio", "mamba"):
    sys.modules[f"{__name__}.{_name}"] = sys.modules[__name__]
if os.environ.get("EMULATED_CUDA") == "1":
    from emulated_cuda import library

    library.install(sys.modules[__name__])


def __getattr__(name: str) -> OperatorPlaceholder:
    """Lets SGLang import any other operator by name; it fails when it is called."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return OperatorPlaceholder(name)
