"""The weights of all layers that SGLang keeps side by side, for a DFlash drafter's keys and values.

SGLang makes them of the layers' weights as it starts, in a `FusedKVMaterializeHelper`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def refresh(helper: Any, layers: Iterable[Any]) -> None:
    """Makes them again in place, once the layers' weights have changed; waits for no device.

    A new helper would be made with numbers of the host, for which the host waits.
    """
    with torch.no_grad():
        for number, layer in enumerate(layers):
            attention = layer.self_attn
            kv = attention.qkv_proj.weight[attention.q_size :][: 2 * attention.kv_size]
            columns = slice(number * len(kv), (number + 1) * len(kv))
            helper.flat_kv_weight_t[:, columns].copy_(kv.t())
            helper.k_norm_weights[number].copy_(attention.k_norm.weight)
