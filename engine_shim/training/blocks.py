"""What target and draft are built from, under SGLang's run-time parameter names.

Query, key and value are one fused matrix (``qkv_proj``) and so are gate and up (``gate_up_proj``):
a module built from these blocks has a ``state_dict`` whose keys are those of the live model, and
weights are handed over as they are. Checkpoints store the parts separately;
:mod:`engine_shim.training.checkpoint` splits and joins.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a decoder; every count is a number of elements, heads, layers or positions."""

    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    mlp: int = 384
    layers: int = 24
    vocabulary: int = 1024
    max_positions: int = 2048
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-6

    def with_layers(self, layers: int) -> DecoderShape:
        """The same sizes at another depth."""
        return dataclasses.replace(self, layers=layers)

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads together; the values take the same again."""
        return self.kv_heads * self.head_dim


class RmsNorm(nn.Module):
    """Root-mean-square norm with a learned gain (Zhang and Sennrich 2019)."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Any [..., width] to float32 of the same shape."""
        # float32 even under autocast: norms want the precision, and torch's fused kernel wants one
        # type for all.
        return functional.rms_norm(x.float(), (x.shape[-1],), self.weight, self.epsilon)


class RotaryTable(nn.Module):
    """Cosines and sines of rotary position embedding in the half-split ("NeoX") layout."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        angles = (
            torch.arange(shape.max_positions, dtype=torch.float32)[:, None]
            * shape.rope_base**-exponents
        )
        self.register_buffer("cosines", torch.cat([angles.cos()] * 2, dim=-1), persistent=False)
        self.register_buffer("sines", torch.cat([angles.sin()] * 2, dim=-1), persistent=False)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """For ``positions`` [...]: cosines and sines [..., 1, head_dim].

        Beyond the last position, where nothing can be served, it is the last.
        """
        positions = positions.clamp_max(len(self.cosines) - 1)
        return self.cosines[positions].unsqueeze(-2), self.sines[positions].unsqueeze(-2)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Apply a rotation from :meth:`RotaryTable.at` to heads ``x`` [..., heads, head_dim]."""
    cosines, sines = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat([-second, first], dim=-1) * sines


class AttentionProjections(nn.Module):
    """The weights of grouped-query attention; which rows attend to which is the caller's part."""

    def __init__(
        self, shape: DecoderShape, input_width: int, *, norm_heads: bool, bias: bool = False
    ) -> None:
        """bias: on queries, keys and values."""
        super().__init__()
        self.shape = shape
        self.qkv_proj = nn.Linear(input_width, shape.query_width + 2 * shape.kv_width, bias=bias)
        self.o_proj = nn.Linear(shape.query_width, shape.hidden, bias=False)
        self.q_norm: nn.Module | None = (
            RmsNorm(shape.head_dim, shape.norm_epsilon) if norm_heads else None
        )
        self.k_norm: nn.Module | None = (
            RmsNorm(shape.head_dim, shape.norm_epsilon) if norm_heads else None
        )

    def project(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """``x`` [batch, length, input width] to q, k, v [batch, length, heads, head_dim].

        Keys and values are repeated so that every query head has its own.
        """
        shape = self.shape
        rows = x.shape[:2]
        q, k, v = self.qkv_proj(x).split(
            [shape.query_width, shape.kv_width, shape.kv_width], dim=-1
        )
        q = q.view(*rows, shape.heads, shape.head_dim)
        k = k.view(*rows, shape.kv_heads, shape.head_dim)
        v = v.view(*rows, shape.kv_heads, shape.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        group = shape.heads // shape.kv_heads
        keys = rotate(k, rotation).repeat_interleave(group, dim=2)
        return rotate(q, rotation), keys, v.repeat_interleave(group, dim=2)


class GatedMlp(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(shape.hidden, 2 * shape.mlp, bias=False)
        self.down_proj = nn.Linear(shape.mlp, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Normed residual stream [..., hidden] to what is added to it."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        output: Tensor = self.down_proj(functional.silu(gate) * up)
        return output


def initialise(module: nn.Module, deviation: float = 0.02) -> None:
    """Draw every matrix under ``module`` from a centred normal; gains of norms stay at one."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=deviation)
