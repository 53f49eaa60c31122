"""Computes the projections of multi-head latent attention (MLA).

Source: DeepSeek-V2 (2024), section 2.1.  Each cache row holds what all heads' keys and values are
made of; the matrices that would make them are moved to the queries and to the output.
"""

import torch
from torch import Tensor

from ._registry import operator
from .dense import rmsnorm_cpu, rotary_embedding_cpu, weight_packed_linear


@operator
def bmm_cpu(out: Tensor, x: Tensor, weight: Tensor, is_vnni: bool, scale: Tensor | None) -> None:
    """Writes ``x @ weight.T`` of each head into ``out [heads, rows, outputs]``.

    ``x``: ``[heads, rows, inputs]``; ``weight``: ``[heads, outputs, inputs]``.  Rows have the same
    bits whatever other rows share the call.

    Raises:
        NotImplementedError: weights are quantized.
    """
    if scale is not None:
        raise NotImplementedError("the stand-in multiplies unquantized weights only")
    for head, matrix in enumerate(weight):
        out[head].copy_(weight_packed_linear(x[head].contiguous(), matrix.contiguous(), None, True))


@operator
def qkv_proj_with_rope_fused_weight(
    hidden: Tensor,
    qkv_a: Tensor,
    q_b: Tensor,
    w_kc: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    eps: float,
    is_int8: bool,
    is_fp8: bool,
    qkv_a_scale: Tensor | None,
    q_b_scale: Tensor | None,
    w_scale: Tensor | None,
    is_vnni: bool,
    block_size: list[int] | None,
    q_rank: int,
    kv_rank: int,
    rotary: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Makes queries for latent rows, and the new latent rows.

    Args:
        hidden: ``[tokens, d]``.
        qkv_a: ``[q_rank + kv_rank + rotary, d]``.
        q_b: ``[heads * (size + rotary), q_rank]``.
        w_kc: ``[heads, kv_rank, size]``, from a head's query to one for latent rows.
        positions: ``[tokens]``.
        cos_sin_cache: see ``rotary_embedding_cpu``; a number's partner is its neighbour.

    Returns:
        Queries ``[tokens, heads, kv_rank + rotary]``, latent rows ``[tokens, 1, kv_rank + rotary]``
        and the part of them that values are made of, ``[tokens, 1, kv_rank]``.

    Raises:
        NotImplementedError: weights are quantized.
    """
    if is_int8 or is_fp8:
        raise NotImplementedError("the stand-in multiplies unquantized weights only")
    tokens, heads = hidden.shape[0], w_kc.shape[0]
    parts = weight_packed_linear(hidden, qkv_a, None, is_vnni).split((q_rank, kv_rank, rotary), -1)
    low, latent, key_turned = (part.contiguous() for part in parts)
    queries = weight_packed_linear(rmsnorm_cpu(low, q_norm, eps), q_b, None, is_vnni)
    plain, turned = queries.view(tokens, heads, -1).split((w_kc.shape[2], rotary), -1)
    turned, key_turned = rotary_embedding_cpu(
        positions, turned.contiguous(), key_turned.unsqueeze(1), rotary, cos_sin_cache, False
    )
    absorbed = hidden.new_empty(heads, tokens, kv_rank)
    bmm_cpu(absorbed, plain.transpose(0, 1), w_kc, is_vnni, None)
    query = torch.cat((absorbed.transpose(0, 1), turned), -1)
    rows = torch.cat((rmsnorm_cpu(latent, kv_norm, eps).unsqueeze(1), key_turned), -1)
    return query, rows, rows.narrow(-1, 0, kv_rank)
