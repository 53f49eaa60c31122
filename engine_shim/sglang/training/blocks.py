"""The building blocks of target and drafters, with SGLang's run-time parameter names.

Query, key and value are one fused matrix (``qkv_proj``), and so are gate and up
(``gate_up_proj``).  A module built from these blocks has the ``state_dict`` keys of the live model,
so weights are copied without conversion.  Checkpoints store the parts separately;
:mod:`trainer.checkpoint` splits and joins them.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Llama3Rope:
    """Stretches rotary positions as Llama 3.1 does (``rope_type`` "llama3" of transformers).

    Frequencies that turn less than low_frequency times within original_positions are divided by
    factor, those that turn more than high_frequency times are kept, and between the two the
    division fades out.
    """

    factor: float
    low_frequency: float
    high_frequency: float
    original_positions: int

    def stretch(self, frequencies: Tensor) -> Tensor:
        """Maps frequencies in radians a position, any shape."""
        turns = self.original_positions * frequencies / (2 * math.pi)
        width = self.high_frequency - self.low_frequency
        unscaled_share = ((turns - self.low_frequency) / width).clamp(0, 1)
        return frequencies * (unscaled_share + (1 - unscaled_share) / self.factor)


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
    rope: Llama3Rope | None = None

    def replace_layers(self, layers: int) -> DecoderShape:
        """Returns the same sizes with another number of layers."""
        return dataclasses.replace(self, layers=layers)

    @property
    def query_width(self) -> int:
        """Returns the width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Returns the width of all key heads together; that of the values is the same."""
        return self.kv_heads * self.head_dim


class RmsNorm(nn.Module):
    """Root-mean-square norm with a learned gain (Zhang and Sennrich 2019)."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Any [..., width] to float32 of the same shape."""
        # float32 even under autocast: norms need the precision, and torch's fused kernel needs one
        # type for all arguments.
        return functional.rms_norm(x.float(), (x.shape[-1],), self.weight, self.epsilon)


class Rotary(nn.Module):
    """Cosines and sines of rotary position embedding in the half-split ("NeoX") layout.

    SGLang serves a drafter beyond its config's ``max_position_embeddings``, so there is no table of
    limited length.
    """

    frequencies: Tensor

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        frequencies = shape.rope_base**-exponents
        if shape.rope is not None:
            frequencies = shape.rope.stretch(frequencies)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def compute_rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Computes cosines and sines [..., 1, head_dim] of ``positions`` [...], in float32."""
        angles = positions[..., None, None].float() * self.frequencies
        return torch.cat([angles.cos()] * 2, dim=-1), torch.cat([angles.sin()] * 2, dim=-1)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Applies a :meth:`Rotary.compute_rotation` to heads ``x`` [..., heads, head_dim]."""
    cosines, sines = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cosines + torch.cat([-second, first], dim=-1) * sines


class AttentionProjections(nn.Module):
    """The weights of grouped-query attention; the caller decides which rows attend to which."""

    def __init__(
        self, shape: DecoderShape, input_width: int, *, norm_heads: bool, bias: bool = False
    ) -> None:
        """Makes the weights; bias: whether queries, keys and values have one."""
        super().__init__()
        self.shape = shape
        self.qkv_proj = nn.Linear(input_width, shape.query_width + 2 * shape.kv_width, bias=bias)
        self.o_proj = nn.Linear(shape.query_width, shape.hidden, bias=False)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        if norm_heads:
            self.q_norm = RmsNorm(shape.head_dim, shape.norm_epsilon)
            self.k_norm = RmsNorm(shape.head_dim, shape.norm_epsilon)

    def project(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Maps ``x`` [batch, length, input width] to q, k, v [batch, length, heads, head_dim].

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
    """A SwiGLU block computes ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(shape.hidden, 2 * shape.mlp, bias=False)
        self.down_proj = nn.Linear(shape.mlp, shape.hidden, bias=False)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Maps the normed residual stream [..., hidden] to what is added to it.

        bias: added to ``up(x)``, [..., mlp].
        """
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        output: Tensor = self.down_proj(functional.silu(gate) * (up if bias is None else up + bias))
        return output


class PreNormLayer(nn.Module):
    """Attention and an MLP behind a norm each, both added to the residual stream.

    input_width: of what attention reads; None for the residual stream's own.  norm_heads: whether
    queries and keys are normed.  bias: whether queries, keys and values have one.
    """

    def __init__(
        self,
        shape: DecoderShape,
        input_width: int | None = None,
        *,
        norm_heads: bool = False,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(shape.hidden, shape.norm_epsilon)
        self.self_attn = AttentionProjections(
            shape, input_width or shape.hidden, norm_heads=norm_heads, bias=bias
        )
        self.post_attention_layernorm = RmsNorm(shape.hidden, shape.norm_epsilon)
        self.mlp = GatedMlp(shape)

    def finish(self, residual: Tensor, attended: Tensor, mlp_bias: Tensor | None = None) -> Tensor:
        """Adds attention's output and then the MLP to the residual stream [batch, L, hidden].

        attended: [batch, L, query width].  mlp_bias: see `GatedMlp`.
        """
        residual = residual + self.self_attn.o_proj(attended)
        output: Tensor = residual + self.mlp(self.post_attention_layernorm(residual), mlp_bias)
        return output


class Borrowed(NamedTuple):
    """Tensors that a drafter uses and never trains.

    embedding, head: the target's, [vocabulary, hidden]; head is None if the embedding serves as
    head, or if the drafter has its own.  tokens: int64 [draft vocabulary], the target's id of each
    token that the drafter can draft; None if the drafter's ids are the target's.
    """

    embedding: Tensor
    head: Tensor | None = None
    tokens: Tensor | None = None


class BorrowingStudent(nn.Module):
    """A trainable drafter; the arguments are those of `Borrowed`, and none of them is trained."""

    embedding: Tensor
    head: Tensor | None
    tokens: Tensor | None
    _columns: Tensor | None

    def __init__(
        self, embedding: Tensor, head: Tensor | None = None, tokens: Tensor | None = None
    ) -> None:
        super().__init__()
        columns = None
        if tokens is not None:
            columns = torch.full((len(embedding),), -1, device=tokens.device)
            columns[tokens] = torch.arange(len(tokens), device=tokens.device)
        for name, part in Borrowed(embedding, head, tokens)._asdict().items():
            buffer = None if part is None else part.detach().clone()
            self.register_buffer(name, buffer, persistent=False)
        self.register_buffer("_columns", columns, persistent=False)

    @property
    def borrowed(self) -> Borrowed:
        """Returns the tensors that it uses and never trains."""
        return Borrowed(self.embedding, self.head, self.tokens)

    def drafted_tokens(self, logits: Tensor) -> Tensor:
        """Returns the likeliest token of logits [..., draft vocabulary], as the target's id."""
        chosen = logits.argmax(dim=-1)
        return chosen if self.tokens is None else self.tokens[chosen]

    def columns(self, tokens: Tensor) -> Tensor:
        """Returns the columns of the logits that belong to the target's ``tokens``, int64.

        A token that the drafter cannot draft has the column -1.
        """
        return tokens if self._columns is None else self._columns[tokens]

    def target_logits(self, hidden: Tensor) -> Tensor:
        """Maps normed hidden states [..., hidden] to logits [..., vocabulary]."""
        return functional.linear(hidden, self.embedding if self.head is None else self.head)


def initialise(module: nn.Module, deviation: float = 0.02) -> None:
    """Draws every matrix under ``module`` from a centred normal; gains of norms stay at one."""
    for parameter in module.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=deviation)


@dataclass(frozen=True)
class Family:
    """Describes how the layers of one family of models differ from other families.

    architecture, model_type: as checkpoints name them.  norm_heads: whether queries and keys are
    normed.  bias: whether queries, keys and values have one.
    """

    architecture: str
    model_type: str
    norm_heads: bool = False
    bias: bool = False


LLAMA: Final = Family("LlamaForCausalLM", "llama")
QWEN2: Final = Family("Qwen2ForCausalLM", "qwen2", bias=True)
QWEN3: Final = Family("Qwen3ForCausalLM", "qwen3", norm_heads=True)
FAMILIES: Final = (LLAMA, QWEN2, QWEN3)
# As checkpoints name the steered drafters of SD2, by the family of each.
SD2_FAMILIES: Final = {f"Steered{family.architecture}": family for family in FAMILIES}


class DecoderLayer(PreNormLayer):
    """A layer of one of the families."""

    def __init__(self, shape: DecoderShape, family: Family = QWEN3) -> None:
        super().__init__(shape, norm_heads=family.norm_heads, bias=family.bias)

    def forward(
        self, residual: Tensor, rotation: tuple[Tensor, Tensor], mlp_bias: Tensor | None = None
    ) -> Tensor:
        """Maps the residual stream [batch, length, hidden] to the next layer's."""
        heads = self.self_attn.project(self.input_layernorm(residual), rotation)
        # Rotation and norms give float32 under autocast, the values stay bfloat16.  Attention needs
        # one type.
        q, k, v = (head.transpose(1, 2).to(heads[2].dtype) for head in heads)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.finish(residual, attended.transpose(1, 2).flatten(2), mlp_bias)
