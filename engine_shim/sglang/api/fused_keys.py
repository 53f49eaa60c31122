"""The fused key and value weights of all layers of a DFlash drafter.

SGLang builds them from the layers' weights when it starts, in a `FusedKVMaterializeHelper`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def refresh_fused_weights(helper: Any, layers: Iterable[Any]) -> None:
    """Rebuilds the fused weights in place after the layers' weights have changed.

    Does not wait for the device.  Building a new helper would copy numbers from the host and wait.
    """
    with torch.no_grad():
        for number, layer in enumerate(layers):
            attention = layer.self_attn
            kv = attention.qkv_proj.weight[attention.q_size :][: 2 * attention.kv_size]
            columns = slice(number * len(kv), (number + 1) * len(kv))
            helper.flat_kv_weight_t[:, columns].copy_(kv.t())
            helper.k_norm_weights[number].copy_(attention.k_norm.weight)
