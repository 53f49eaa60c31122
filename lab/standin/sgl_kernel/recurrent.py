"""Computes the layers of a gated delta network: short convolutions and the gated delta rule.

Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (2024), equation 10.  Everything is
computed token by token, in the order of one sequence, so that a token has the same bits whether it
was decoded, verified among others, or read with its prompt.
"""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from ._registry import operator
from .dense import gemma_rmsnorm_cpu, rmsnorm_cpu

# Numbers that torch's loops take at a time: two vector registers, of 512 bits at most.
_LANES = 32


def _in_lanes(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Applies an elementwise function so that no element is among the leftovers of a vector.

    Exponentials round differently there.
    """
    size = x.shape[-1]
    return function(F.pad(x, (0, -size % _LANES)))[..., :size]


def _convolve(windows: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Convolves ``[..., d, width - 1 + T]`` with ``[d, width]`` to ``[..., d, T]``."""
    width = weight.shape[-1]
    tokens = windows.shape[-1] - width + 1
    by_token = windows.transpose(-1, -2)
    out = torch.zeros_like(by_token[..., :tokens, :])
    for place in range(width):
        out += by_token[..., place : place + tokens, :] * weight[:, place]
    if bias is not None:
        out += bias.to(out.dtype)
    if activation in ("silu", "swish"):
        out = _in_lanes(F.silu, out)
    return out.transpose(-1, -2)


@operator
def causal_conv1d_weight_pack(weight: Tensor) -> Tensor:
    """Returns ``weight`` itself; see ``convert_weight_packed``."""
    return weight


@operator
def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: Iterable[int] | None = None,
) -> Tensor:
    """Convolves the new tokens of several sequences, and keeps each one's last inputs.

    Args:
        x: ``[d, tokens]``, sequence after sequence.
        weight: ``[d, width]``; ``bias``: ``[d]``.
        conv_states: ``[slots, d, width - 1]``, the inputs before the next one; written to.
        has_initial_state: ``[sequences]``, whether the slot holds inputs of the sequence.
        cache_indices: ``[sequences]``, the slots.
        query_start_loc: ``[sequences + 1]``, where the sequences begin.

    Returns:
        ``[d, tokens]``.
    """
    out = torch.empty_like(x)
    bounds = query_start_loc.tolist()
    for row, slot in enumerate(cache_indices.tolist()):
        first, end = bounds[row], bounds[row + 1]
        earlier_inputs = conv_states[slot].to(x.dtype)
        if not has_initial_state[row]:
            earlier_inputs = torch.zeros_like(earlier_inputs)
        windows = torch.cat((earlier_inputs, x[:, first:end]), -1)
        out[:, first:end] = _convolve(windows, weight, bias, activation)
        conv_states[slot] = windows[:, windows.shape[-1] - earlier_inputs.shape[-1] :].to(
            conv_states.dtype
        )
    return out


@operator
def causal_conv1d_update_cpu(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "silu",
    *,
    conv_state_indices: Tensor,
    intermediate_conv_window: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    retrieve_next_token: Tensor | None = None,
    retrieve_next_sibling: Tensor | None = None,
    retrieve_parent_token: Tensor | None = None,
) -> Tensor:
    """Convolves one or a few new tokens of each sequence.

    Args:
        x: ``[sequences, d]`` or ``[sequences, d, T]``.
        conv_state: ``[slots, d, width - 1]``; written to unless the tokens are to be verified.
        conv_state_indices: ``[sequences]``, the slots; negative for padding.
        intermediate_conv_window: ``[rows, steps, d, width - 1]``, where the inputs after each token
            are kept for the time after the verification; None when nothing is verified.
        intermediate_state_indices: ``[sequences]``, rows of ``intermediate_conv_window``.
        retrieve_parent_token: of a draft tree.

    Returns:
        The shape of ``x``.

    Raises:
        NotImplementedError: the drafts are a tree.
    """
    _refuse_trees(retrieve_parent_token)
    tokens = x.unsqueeze(-1) if x.dim() == 2 else x
    is_live = conv_state_indices >= 0
    slots = conv_state_indices.clamp(min=0).long()
    windows = torch.cat((conv_state[slots].to(x.dtype), tokens), -1)
    size = conv_state.shape[-1]
    if intermediate_conv_window is None:
        last_inputs = windows[..., windows.shape[-1] - size :].to(conv_state.dtype)
        conv_state[slots[is_live]] = last_inputs[is_live]
    else:
        assert intermediate_state_indices is not None
        rows = intermediate_state_indices[: len(slots)].long()
        for step in range(tokens.shape[-1]):
            last_inputs = windows[..., step + 1 : step + 1 + size]
            intermediate_conv_window[rows[is_live], step] = last_inputs[is_live].to(
                conv_state.dtype
            )
    # SGLang takes the result for a view of [sequences, T, d], as x is one.
    return torch.empty_like(x).copy_(_convolve(windows, weight, bias, activation).reshape(x.shape))


def _refuse_trees(parents: Tensor | None) -> None:
    if parents is not None:
        raise NotImplementedError("the stand-in verifies chains only in layers with a state")


@operator
def fused_gdn_gating_cpu(
    A_log: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
) -> tuple[Tensor, Tensor]:
    """Computes how much of a state stays, as a logarithm, and how much of an update enters it.

    ``a``, ``b``: ``[tokens, heads]``; ``A_log``, ``dt_bias``: ``[heads]``.  Returns both as ``[1,
    tokens, heads]``, the first one in float32.
    """
    decay = -A_log.float().exp() * _in_lanes(F.softplus, a.float() + dt_bias.float())
    return decay.unsqueeze(0), _in_lanes(torch.sigmoid, b.float()).to(b.dtype).unsqueeze(0)


def _unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def _prepare_heads(
    query: Tensor, key: Tensor, heads: int, normalise: bool
) -> tuple[Tensor, Tensor]:
    """Returns queries and keys ``[tokens, heads, d]`` in float32, of unit length, repeated."""
    query, key = query[0].float(), key[0].float()
    if normalise:
        query, key = _unit(query), _unit(key)
    query = query * query.shape[-1] ** -0.5
    repeats = heads // query.shape[1]
    return query.repeat_interleave(repeats, 1), key.repeat_interleave(repeats, 1)


def _advance_state(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Takes one token of each sequence into its state.

    ``state``: ``[sequences, heads, d_v, d_k]``; ``query``, ``key``: ``[sequences, heads, d_k]``;
    ``value``: ``[sequences, heads, d_v]``; ``decay``, ``beta``: ``[sequences, heads]``.
    """
    state = state * _in_lanes(torch.exp, decay)[..., None, None]
    predicted = (state * key.unsqueeze(-2)).sum(-1)
    state = state + ((value - predicted) * beta.unsqueeze(-1)).unsqueeze(-1) * key.unsqueeze(-2)
    return state, (state * query.unsqueeze(-2)).sum(-1)


@operator
def chunk_gated_delta_rule_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
    initial_state_indices: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Reads the new tokens of several sequences into their states.

    Args:
        q: ``[1, tokens, key heads, d_k]``, sequence after sequence; ``k`` likewise.
        v: ``[1, tokens, heads, d_v]``.
        g: logarithms of what stays of a state, ``[1, tokens, heads]``; ``beta`` likewise.
        initial_state: ``[slots, heads, d_v, d_k]``; written to.
        cu_seqlens: ``[sequences + 1]``, where the sequences begin.
        initial_state_indices: ``[sequences]``, the slots.

    Returns:
        ``[1, tokens, heads, d_v]``, and two places for what only other kernels return.
    """
    query, key = _prepare_heads(q, k, v.shape[2], use_qk_l2norm_in_kernel)
    out = torch.empty_like(v)
    bounds = cu_seqlens.tolist()
    for row, slot in enumerate(initial_state_indices.tolist()):
        state = initial_state[slot : slot + 1].float()
        for position in range(bounds[row], bounds[row + 1]):
            token = slice(position, position + 1)
            state, result = _advance_state(
                state, query[token], key[token], v[0, token].float(), g[0, token].float(),
                beta[0, token].float(),
            )  # fmt: skip
            out[0, position] = result[0].to(v.dtype)
        initial_state[slot] = state[0].to(initial_state.dtype)
    return out, None, None


@operator
def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    is_kda: bool = False,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: Tensor | None = None,
) -> Tensor:
    """Takes as many new tokens of each sequence into its state: one, or those of a verification.

    Args:
        A_log: see ``fused_gdn_gating_cpu``, also for ``dt_bias``, ``a`` and ``b``.
        q: see ``chunk_gated_delta_rule_cpu``, also for ``k`` and ``v``.
        initial_state_source: ``[slots, heads, d_v, d_k]``.
        initial_state_indices: ``[sequences]``, the slots; negative for padding.
        disable_state_update: leaves the states as they were.
        intermediate_states_buffer: ``[rows, steps, heads, d_v, d_k]``, for the states after each
            token; None keeps none.
        intermediate_state_indices: ``[sequences]``, its rows.

    Returns:
        ``[1, tokens, heads, d_v]``.

    Raises:
        NotImplementedError: the drafts are a tree, or each channel has a gate of its own.
    """
    _refuse_trees(retrieve_parent_token)
    if is_kda:
        raise NotImplementedError("the stand-in has one gate for each head only")
    sequences = len(cu_seqlens) - 1
    indices = initial_state_indices[:sequences]
    is_live, slots = indices >= 0, indices.clamp(min=0).long()
    heads = v.shape[2]
    decay, beta = fused_gdn_gating_cpu(A_log, a.view(-1, heads), b.view(-1, heads), dt_bias)
    query, key = _prepare_heads(q, k, heads, use_qk_l2norm_in_kernel)
    sequence_tokens = v.shape[1] // sequences

    def by_sequence(x: Tensor) -> Tensor:
        return x.float().reshape(sequences, sequence_tokens, *x.shape[1:])

    query, key, value = by_sequence(query), by_sequence(key), by_sequence(v[0])
    decay, beta = by_sequence(decay[0]), by_sequence(beta[0])
    state = initial_state_source[slots].float()
    out = torch.empty_like(value)
    for position in range(sequence_tokens):
        state, out[:, position] = _advance_state(
            state,
            query[:, position],
            key[:, position],
            value[:, position],
            decay[:, position],
            beta[:, position],
        )
        if intermediate_states_buffer is not None:
            assert intermediate_state_indices is not None
            rows = intermediate_state_indices[:sequences].long()
            next_state = state[is_live].to(intermediate_states_buffer.dtype)
            intermediate_states_buffer[rows[is_live], position] = next_state
    if not disable_state_update:
        initial_state_source[slots[is_live]] = state[is_live].to(initial_state_source.dtype)
    return out.view(v.shape).to(v.dtype)


@operator
def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    mixed_qkvz: Tensor, mixed_ba: Tensor, key_heads: int, heads: int, d_k: int, d_v: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Splits two projections, each with one part after the other (Qwen3.5).

    Returns queries, keys and values side by side ``[tokens, 2 * key_heads * d_k + heads * d_v]``,
    the output gate ``[tokens, heads, d_v]``, ``b`` and ``a`` ``[tokens, heads]``.
    """
    tokens = mixed_qkvz.shape[0]
    qkv, z = mixed_qkvz.split((2 * key_heads * d_k + heads * d_v, heads * d_v), -1)
    b, a = mixed_ba.split((heads, heads), -1)
    return qkv.contiguous(), z.reshape(tokens, heads, d_v), b.contiguous(), a.contiguous()


@operator
def fused_qkvzba_split_reshape_cat_cpu(
    mixed_qkvz: Tensor, mixed_ba: Tensor, key_heads: int, heads: int, d_k: int, d_v: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Splits two projections that hold all parts of a key head side by side (Qwen3-Next).

    Returns what ``fused_qkvzba_split_reshape_cat_contiguous_cpu`` does.
    """
    tokens, shared = mixed_qkvz.shape[0], heads // key_heads
    parts = mixed_qkvz.view(tokens, key_heads, -1)
    q, k, v, z = parts.split((d_k, d_k, shared * d_v, shared * d_v), -1)
    qkv = torch.cat([part.reshape(tokens, -1) for part in (q, k, v)], -1)
    b, a = mixed_ba.view(tokens, key_heads, -1).split((shared, shared), -1)
    z = z.reshape(tokens, heads, d_v)
    return qkv, z, b.reshape(tokens, heads), a.reshape(tokens, heads)


@operator
def fused_rmsnorm_gated_cpu(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """Computes ``rmsnorm(x) * silu(gate)``: ``x``, ``gate`` ``[rows, d]``, ``weight`` ``[d]``."""
    return rmsnorm_cpu(x, weight, eps) * F.silu(gate.float()).to(x.dtype)


@operator
def fused_sigmoid_mul_cpu(x: Tensor, gate: Tensor) -> None:
    """Multiplies ``x [tokens, d]`` by the sigmoid of ``gate`` in place."""
    x.mul_(gate.reshape(x.shape).float().sigmoid().to(x.dtype))


@operator
def fused_qk_gemma_rmsnorm_cpu(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Normalises each head of queries and keys; see ``gemma_rmsnorm_cpu``."""
    return (
        gemma_rmsnorm_cpu(q.reshape(-1, head_dim), q_weight, eps),
        gemma_rmsnorm_cpu(k.reshape(-1, head_dim), k_weight, eps),
    )


@operator
def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    head_dim: int,
    num_head: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits each head of ``q_gate [tokens, num_head * 2 * head_dim]`` and normalises q and k.

    Returns queries, keys and gates, each ``[tokens * heads, head_dim]``.
    """
    q, gate = q_gate.reshape(-1, 2 * head_dim).chunk(2, -1)
    normalised = fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim)
    return *normalised, gate.contiguous()
