"""Computes linear layers, norms, activation and rotary embedding."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ._memo import Memo
from ._registry import operator
from ._tiles import min_linear_rows


@operator
def convert_weight_packed(weight: Tensor) -> Tensor:
    """Returns ``weight`` itself: an update of the parameter is an update of what is multiplied."""
    return weight


@operator
def weight_packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, is_vnni: bool) -> Tensor:
    """Computes ``x @ weight.T + bias``: ``x [rows, in]``, ``weight [out, in]``, ``bias [out]``.

    In float32 a row has the same bits whatever other rows share the call (see ``_tiles``).
    """
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.to(x.dtype)
    if x.dtype == torch.float32:
        (outputs, inputs), rows = weight.shape, x.shape[0]
        min_rows = min_linear_rows(outputs, inputs)
        if 0 < rows < min_rows:
            repeated = torch.cat((x,) * -(-min_rows // rows))
            # resize_ keeps the leading rows and, unlike a slice, makes no view to keep track of.
            return F.linear(repeated, weight, bias).resize_(rows, outputs)
    return F.linear(x, weight, bias)


_ZERO = torch.zeros((), dtype=torch.float32)


def _rms(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """Computes the RMS norm of a float32 tensor over its last dimension.

    ``x * weight / sqrt(mean(x^2) + eps)`` is written with the vector's length as ``sqrt(size) * x *
    weight / sqrt(|x|^2 + size * eps)``, which takes two thirds of the time of ``F.rms_norm``.  Each
    call rounds alike in vector lanes and in leftovers.
    """
    size = x.shape[-1]
    length = torch.linalg.vector_norm(x, 2, -1, True)
    length.mul_(length).add_(size * eps).sqrt_()
    return torch.addcdiv(_ZERO, x * weight, length, value=math.sqrt(size), out=out)


@operator
def rmsnorm_cpu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divides ``x [..., d]`` by its root mean square, times ``weight [d]``; float32 inside."""
    if x.dtype == torch.float32:
        return _rms(x, weight, eps)
    return _rms(x.float(), weight.float(), eps).to(x.dtype)


@operator
def fused_add_rmsnorm_cpu(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """Sets ``residual += x`` and ``x = rms_norm(residual) * weight`` in place; both ``[rows, d]``.

    In bfloat16 the norm is taken of the float32 sum, before it is rounded into ``residual``.
    """
    if x.dtype == torch.float32:
        _rms(residual.add_(x), weight, eps, out=x)
        return
    total = x.float() + residual.float()
    residual.copy_(total)
    x.copy_(_rms(total, weight.float(), eps))


@operator
def gemma_rmsnorm_cpu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes ``rmsnorm_cpu`` with ``1 + weight`` for a weight: Gemma's checkpoints hold that."""
    return _rms(x.float(), 1.0 + weight.float(), eps).to(x.dtype)


@operator
def gemma3_rmsnorm_cpu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes what ``gemma_rmsnorm_cpu`` does; SGLang has a name of its own for Gemma 3."""
    return _rms(x.float(), 1.0 + weight.float(), eps).to(x.dtype)


@operator
def gemma_fused_add_rmsnorm_cpu(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """Sets ``residual += x`` and ``x = gemma_rmsnorm(residual)`` in place; both ``[rows, d]``."""
    total = x.float() + residual.float()
    residual.copy_(total)
    x.copy_(_rms(total, 1.0 + weight.float(), eps))


@operator
def gemma4_rmsnorm_cpu(
    x: Tensor, weight: Tensor, eps: float, scale_shift: float, with_scale: bool
) -> Tensor:
    """Computes ``rmsnorm_cpu`` with ``scale_shift + weight`` for a weight, or without one."""
    factor = weight.float() + scale_shift if with_scale else torch.ones_like(weight.float())
    return _rms(x.float(), factor, eps).to(x.dtype)


@operator
def gelu_tanh_and_mul_cpu(x: Tensor) -> Tensor:
    """Computes ``gelu(x[..., :d]) * x[..., d:]`` with tanh's approximation; float32 inside."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate.float(), approximate="tanh").mul_(up.float()).to(x.dtype)


@operator
def silu_and_mul_cpu(x: Tensor) -> Tensor:
    """Computes ``silu(x[..., :d]) * x[..., d:]`` for ``x [..., 2 d]``; float32 inside."""
    gate, up = x.chunk(2, dim=-1)
    if x.dtype == torch.float32:
        return F.silu(gate).mul_(up)
    return F.silu(gate.float()).mul_(up.float()).to(x.dtype)


def _rotation_factors(
    positions: Tensor, cos_sin_cache: Tensor, neox: bool
) -> tuple[Tensor, Tensor]:
    """Returns factors of a number and of its partner, both float32 ``[tokens, 1, rotary_dim]``."""
    factors = cos_sin_cache.index_select(0, positions.flatten()).float()
    cos, sin = factors.unsqueeze(1).chunk(2, dim=-1)
    if neox:
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)


_rotation_memo: Memo[tuple[Tensor, Tensor]] = Memo()


@operator
def rotary_embedding_cpu(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys by their positions; the inputs stay as they are.

    Args:
        positions: token positions ``[tokens]``, integer.
        query: ``[tokens, heads * head_size]`` (or with heads apart); ``key`` likewise with its own
            head count.
        cos_sin_cache: ``[max_position, rotary_dim]``, cosines in the first half of a row, sines in
            the second.
        is_neox: a number's partner is half a rotary_dim away (True), or its neighbour (False).
    """
    own_factors, partner_factors = _rotation_memo.get(
        cos_sin_cache,
        (positions,),
        (is_neox,),
        lambda: _rotation_factors(positions, cos_sin_cache, is_neox),
    )
    flat = torch.cat((query.flatten(1), key.flatten(1)), -1)
    heads = flat.view(flat.shape[0], flat.shape[1] // head_size, head_size)
    rotary = own_factors.shape[-1]
    rotated = (heads if rotary == head_size else heads[..., :rotary]).float()
    if is_neox:
        partner = rotated.roll(rotary // 2, -1)
    else:
        partner = rotated.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    rotated = torch.addcmul(rotated * own_factors, partner, partner_factors).to(query.dtype)
    if rotary != head_size:
        rotated = torch.cat((rotated, heads[..., rotary:]), -1)
    widths = (math.prod(query.shape[1:]), math.prod(key.shape[1:]))
    rotated_query, rotated_key = torch.split_with_sizes(rotated.view(flat.shape), widths, -1)
    return rotated_query.view(query.shape), rotated_key.view(key.shape)


@operator
def multimodal_rotary_embedding_cpu(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    sections: list[int] | None,
    interleaved: bool,
    is_neox: bool,
) -> None:
    """Rotates queries and keys in place by positions in time, height and width.

    Args:
        positions: ``[3, tokens]``, or ``[tokens]`` where all three are the same.
        query: see ``rotary_embedding_cpu``, also for ``key`` and ``cos_sin_cache``.
        sections: how many frequencies turn with each of the three.
        interleaved: the three take turns, and time has what is left; else one follows the other.
    """
    if positions.dim() == 1 or not sections:
        time_positions = positions if positions.dim() == 1 else positions[0]
        turned = rotary_embedding_cpu(time_positions, query, key, head_size, cos_sin_cache, is_neox)
    else:
        cos, sin = cos_sin_cache[positions].chunk(2, dim=-1)
        axis = torch.zeros(cos.shape[-1], dtype=torch.int64)
        for section, size in enumerate(sections):
            if interleaved:
                axis[section : 3 * size : 3] = section
            else:
                axis[sum(sections[:section]) :][:size] = section
        columns = torch.arange(cos.shape[-1])
        cache = torch.cat((cos[axis, :, columns].T, sin[axis, :, columns].T), -1)
        rows = torch.arange(positions.shape[1])
        turned = rotary_embedding_cpu(rows, query, key, head_size, cache, is_neox)
    query.copy_(turned[0])
    key.copy_(turned[1])
