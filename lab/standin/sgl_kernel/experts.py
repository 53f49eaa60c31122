"""Chooses experts and runs them, token by token in one order of sums.

Sources: GShard (Lepikhin et al., 2020) for experts chosen by a softmax; DeepSeek-V3 (section 2.1.2)
for groups of experts whose scores are corrected by a bias.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ._registry import operator
from .dense import weight_packed_linear


def _normalised(weights: Tensor, renormalize: bool) -> Tensor:
    return weights / weights.sum(-1, keepdim=True) if renormalize else weights


@operator
def topk_softmax_cpu(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    correction_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses ``topk`` experts by the softmax of their scores.

    Args:
        hidden_states: ``[tokens, d]``, unused.
        gating_output: scores ``[tokens, experts]``.
        correction_bias: ``[experts]``, added for the choice and not for the weights.

    Returns:
        Weights (float32) and experts (int32), both ``[tokens, topk]``.
    """
    scores = gating_output.float().softmax(-1)
    return _choose_experts(scores, correction_bias, topk, renormalize)


@operator
def topk_sigmoid_cpu(
    hidden_states: Tensor,
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    correction_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses ``topk`` experts by the sigmoid of their scores; see ``topk_softmax_cpu``."""
    return _choose_experts(gating_output.float().sigmoid(), correction_bias, topk, renormalize)


def _choose_experts(
    scores: Tensor, bias: Tensor | None, topk: int, renormalize: bool
) -> tuple[Tensor, Tensor]:
    corrected = scores if bias is None else scores + bias
    experts = corrected.topk(topk, dim=-1).indices
    return _normalised(scores.gather(-1, experts), renormalize), experts.int()


@operator
def biased_grouped_topk_cpu(
    hidden_states: Tensor,
    gating_output: Tensor,
    correction_bias: Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int,
    topk_group: int,
    num_fused_shared_experts: int,
    routed_scaling_factor: float | None,
    num_token_non_padded: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses groups by their two best experts, and then ``topk`` experts of those groups.

    Args:
        hidden_states: ``[tokens, d]``, unused.
        gating_output: scores ``[tokens, experts]``, of which the sigmoid is taken.
        correction_bias: ``[experts]``, added for the choice and not for the weights.
        num_expert_group: groups, of neighbouring experts.
        topk_group: groups of which experts are chosen.
        routed_scaling_factor: multiplies the weights; None leaves them.

    Returns:
        Weights (float32) and experts (int32), both ``[tokens, topk]``.

    Raises:
        NotImplementedError: shared experts are to be chosen along.
    """
    if num_fused_shared_experts:
        raise NotImplementedError("the stand-in does not fuse shared experts into the routed ones")
    scores = gating_output.float().sigmoid()
    tokens, experts = scores.shape
    corrected = scores + correction_bias
    groups = corrected.view(tokens, num_expert_group, -1)
    best = groups.topk(2, dim=-1).values.sum(-1)
    is_kept = torch.zeros_like(best, dtype=torch.bool)
    is_kept.scatter_(1, best.topk(topk_group, dim=-1).indices, True)
    outside = ~is_kept.repeat_interleave(experts // num_expert_group, 1)
    chosen_experts = corrected.masked_fill(outside, float("-inf")).topk(topk, dim=-1).indices
    weights = _normalised(scores.gather(-1, chosen_experts), renormalize)
    if routed_scaling_factor is not None:
        weights = weights * routed_scaling_factor
    return weights, chosen_experts.int()


@operator
def fused_experts_cpu(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    inplace: bool,
    quantization: int,
    w1_scale: Tensor | None,
    w2_scale: Tensor | None,
    w1_zero: Tensor | None,
    w2_zero: Tensor | None,
    block_size: list[int] | None,
    w1_bias: Tensor | None,
    w2_bias: Tensor | None,
    alpha: float | None,
    limit: float | None,
    is_vnni: bool,
    activation: str = "silu",
) -> Tensor:
    """Sums the chosen experts' outputs: ``w2 @ (silu(gate) * up)``, with ``gate, up = w1 @ x``.

    A token's sum is in the order in which its experts were chosen, whatever tokens share the call.

    Args:
        x: ``[tokens, d]``.
        w1: ``[experts, 2 h, d]``; ``w2``: ``[experts, d, h]``.
        topk_weights: ``[tokens, topk]``; ``topk_ids``: the experts, likewise.
        quantization: 0, weights as they are.

    Raises:
        NotImplementedError: weights are quantized, or an option is set that no tested model uses.
    """
    if quantization or activation != "silu" or inplace or alpha or limit:
        raise NotImplementedError("the stand-in runs unquantized experts with SiLU only")
    tokens, topk = topk_ids.shape
    parts = x.new_zeros(tokens, topk, x.shape[1])
    for expert in topk_ids.unique().tolist():
        rows, places = (topk_ids == expert).nonzero(as_tuple=True)
        bias = None if w1_bias is None else w1_bias[expert]
        gate, up = weight_packed_linear(x[rows], w1[expert], bias, True).chunk(2, dim=-1)
        bias = None if w2_bias is None else w2_bias[expert]
        parts[rows, places] = weight_packed_linear(F.silu(gate) * up, w2[expert], bias, True)
    out = torch.zeros_like(x)
    for place in range(topk):
        out += parts[:, place] * topk_weights[:, place, None].to(x.dtype)
    return out


@operator
def fused_linear_sigmoid_mul(
    x: Tensor, weight: Tensor, bias: Tensor | None, is_vnni: bool, shared: Tensor
) -> Tensor:
    """Multiplies ``shared [tokens, d]`` by ``sigmoid(x @ weight.T)``, one factor for each token."""
    return shared * weight_packed_linear(x, weight, bias, is_vnni).sigmoid()


@operator
def shared_expert_cpu(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    routed: Tensor,
    routed_scaling_factor: float,
    inplace: bool,
    is_int8: bool,
    is_fp8: bool,
    w1_scale: Tensor | None,
    w2_scale: Tensor | None,
    block_size: list[int] | None,
    is_vnni: bool,
) -> Tensor:
    """Adds the expert of all tokens to ``routed [tokens, d]`` times ``routed_scaling_factor``.

    ``x``: ``[tokens, d]``; ``w1``: ``[2 h, d]``; ``w2``: ``[d, h]``.

    Raises:
        NotImplementedError: weights are quantized.
    """
    if is_int8 or is_fp8:
        raise NotImplementedError("the stand-in runs unquantized experts only")
    gate, up = weight_packed_linear(x, w1, None, is_vnni).chunk(2, dim=-1)
    shared = weight_packed_linear(F.silu(gate) * up, w2, None, is_vnni)
    return shared + routed * routed_scaling_factor
