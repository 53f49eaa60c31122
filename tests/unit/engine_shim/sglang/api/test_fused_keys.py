"""What SGLang derives from a DFlash drafter's weights, after those have changed."""

from types import SimpleNamespace
from typing import Any

import torch
from sglang.kernels.ops.speculative.fused_kv_materialize import FusedKVMaterializeHelper

from engine_shim.sglang.api import fused_keys

HEADS, HEAD, HIDDEN, LAYERS = 2, 4, 12, 3


def layer() -> Any:
    """One layer's attention, with four heads that ask."""
    kv = HEADS * HEAD
    rotary = SimpleNamespace(
        rotary_dim=HEAD, is_neox_style=True, cos_sin_cache=torch.zeros(64, HEAD)
    )
    return SimpleNamespace(
        self_attn=SimpleNamespace(
            num_kv_heads=HEADS,
            head_dim=HEAD,
            q_size=4 * HEAD,
            kv_size=kv,
            rotary_emb=rotary,
            qkv_proj=SimpleNamespace(weight=torch.randn(4 * HEAD + 2 * kv, HIDDEN)),
            k_norm=SimpleNamespace(weight=torch.randn(HEAD), variance_epsilon=1e-6),
        )
    )


def helper_of(layers: list[Any]) -> Any:
    return FusedKVMaterializeHelper(
        layers, layers[0].self_attn.rotary_emb, HEADS, HEAD, torch.device("cpu"), 32
    )


def test_it_becomes_what_sglang_would_build_anew_where_it_is() -> None:
    layers = [layer() for _ in range(LAYERS)]
    helper = helper_of(layers)
    places = helper.flat_kv_weight_t.data_ptr(), helper.k_norm_weights.data_ptr()
    for one in layers:
        one.self_attn.qkv_proj.weight.normal_()
        one.self_attn.k_norm.weight.normal_()
    fused_keys.refresh_fused_weights(helper, layers)
    anew = helper_of(layers)
    assert torch.equal(helper.flat_kv_weight_t, anew.flat_kv_weight_t)
    assert torch.equal(helper.k_norm_weights, anew.k_norm_weights)
    assert places == (helper.flat_kv_weight_t.data_ptr(), helper.k_norm_weights.data_ptr())
