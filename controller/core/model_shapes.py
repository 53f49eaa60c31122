"""Describes the sizes of a model and a drafter, from which the roofline estimates costs.

Parameters are counts, not bytes; `bytes_per_weight` and `bytes_per_kv` say what one is stored in.
Multiply and add are two FLOPs.
"""

import math
from dataclasses import dataclass
from enum import Enum

from controller.core.errors import SpeculationError


class InvalidShapeError(SpeculationError):
    """The numbers of a model, a drafter or a device are out of range."""


class DrafterKind(Enum):
    """Names how drafting scales with the draft length."""

    MTP = "mtp"  # gamma serial passes of a small head (MTP, EAGLE, EAGLE3)
    DFLASH = "dflash"  # one pass for a fixed block
    STANDALONE = "standalone"  # gamma serial passes of a small model
    NGRAM = "ngram"  # prompt lookup
    MIXTURE = "mixture"  # of two other drafters, row by row


# Kinds without weights of their own: the acceptance of a lookup depends on the text alone, and a
# mixture consists of two other drafters.
WEIGHTLESS = frozenset({DrafterKind.NGRAM, DrafterKind.MIXTURE})


@dataclass(frozen=True, slots=True)
class GroupedQueryAttention:
    """Describes softmax attention with shared key/value heads (MHA and MQA are special cases)."""

    query_heads: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        require_positive(self, "query_heads", "kv_heads", "head_dim")
        if self.query_heads % self.kv_heads:
            raise InvalidShapeError(
                f"GroupedQueryAttention: {self.query_heads} query heads do not share "
                f"{self.kv_heads} key/value heads evenly"
            )

    @property
    def pair_flops(self) -> float:
        """FLOPs of one query token on one context token: score and weighted sum."""
        return 4.0 * self.query_heads * self.head_dim

    @property
    def context_elements(self) -> int:
        """KV-cache elements read per context token."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def query_elements(self) -> int:
        """Elements read per query token."""
        return self.query_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Describes MLA in its absorbed decode form: all heads share one latent per context token."""

    query_heads: int
    latent_dim: int
    rope_dim: int

    def __post_init__(self) -> None:
        require_positive(self, "query_heads", "latent_dim")
        require_not_negative(self, "rope_dim")

    @property
    def pair_flops(self) -> float:
        """FLOPs of one query token on one context token: the sum is over the latent only."""
        return 2.0 * self.query_heads * (2 * self.latent_dim + self.rope_dim)

    @property
    def context_elements(self) -> int:
        """KV-cache elements read per context token."""
        return self.latent_dim + self.rope_dim

    @property
    def query_elements(self) -> int:
        """Elements read per query token."""
        return self.query_heads * (self.latent_dim + self.rope_dim)


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Describes one layer with a recurrent state of fixed size (GatedDeltaNet, Mamba).

    state_bytes: read per sequence and step.  token_flops: of one token's update and read-out.
    """

    state_bytes: float
    token_flops: float

    def __post_init__(self) -> None:
        require_positive(self, "state_bytes")
        require_not_negative(self, "token_flops")


SoftmaxAttention = GroupedQueryAttention | LatentAttention
Attention = SoftmaxAttention | LinearAttention


@dataclass(frozen=True, slots=True)
class Experts:
    """Describes the experts of `layers` MoE layers; router weights count as dense."""

    layers: int
    experts: int
    experts_per_token: int
    shared: int
    params_per_expert: int

    def __post_init__(self) -> None:
        require_positive(self, "layers", "experts", "experts_per_token", "params_per_expert")
        require_not_negative(self, "shared")
        if self.experts_per_token > self.experts:
            raise InvalidShapeError(
                f"Experts: a token cannot use {self.experts_per_token} of {self.experts} experts"
            )

    @property
    def active_params(self) -> int:
        """Parameters that one token meets, all layers."""
        return self.layers * (self.experts_per_token + self.shared) * self.params_per_expert


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Describes the target model.

    attention: (kind, number of layers of that kind).  dense_params: parameters of all layers that
    every step reads: attention projections, dense MLPs, routers, but no embedding or LM head.
    """

    hidden_size: int
    vocabulary_size: int
    attention: tuple[tuple[Attention, int], ...]
    dense_params: int
    experts: Experts | None = None
    bytes_per_weight: float = 2.0
    bytes_per_kv: float = 2.0

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "vocabulary_size", "dense_params")
        require_positive(self, *sizes, "bytes_per_weight", "bytes_per_kv")
        if not self.attention or any(layers < 1 for _, layers in self.attention):
            raise InvalidShapeError("ModelShape: every kind of attention needs at least one layer")

    @property
    def head_params(self) -> int:
        """Parameters of the LM head."""
        return self.hidden_size * self.vocabulary_size

    @property
    def kv_bytes_per_token(self) -> float:
        """KV-cache bytes of a context token, all layers."""
        return self.bytes_per_kv * sum(
            layers * kind.context_elements
            for kind, layers in self.attention
            if not isinstance(kind, LinearAttention)
        )

    @property
    def active_params(self) -> int:
        """Parameters that one token meets, LM head included."""
        routed = self.experts.active_params if self.experts else 0
        return self.dense_params + self.head_params + routed


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """Describes a drafter.

    dense_params: parameters read in every pass, including the LM head even if it is shared.
    experts: of an MTP layer that is MoE.  block_size: positions that DFLASH's one pass computes,
    however few of them are verified.  kv_bytes_per_token: bytes of the drafter's own cache that a
    pass reads per context token (0: negligible).
    """

    kind: DrafterKind
    dense_params: int = 0
    experts: Experts | None = None
    block_size: int = 0
    bytes_per_weight: float = 2.0
    kv_bytes_per_token: float = 0.0

    def __post_init__(self) -> None:
        require_not_negative(self, "dense_params", "block_size", "kv_bytes_per_token")
        require_positive(self, "bytes_per_weight")
        name = self.kind.name
        if self.kind is DrafterKind.NGRAM:
            if self.dense_params or self.experts:
                raise InvalidShapeError("DrafterShape: NGRAM is a lookup and has no parameters")
        elif self.dense_params < 1:
            raise InvalidShapeError(f"DrafterShape: {name} needs dense_params above 0")
        if (self.kind is DrafterKind.DFLASH) != (self.block_size > 0):
            raise InvalidShapeError(
                f"DrafterShape: block_size {self.block_size} does not fit {name}: it is above 0 "
                "for DFLASH and 0 for every other kind"
            )

    @property
    def active_params(self) -> int:
        """Parameters that one token meets in a pass."""
        return self.dense_params + (self.experts.active_params if self.experts else 0)

    def passes(self, gamma: int) -> int:
        """Counts the serial passes for gamma tokens.  Raises InvalidShapeError past the block."""
        if gamma == 0 or self.kind is DrafterKind.NGRAM:
            return 0
        if self.kind is DrafterKind.DFLASH:
            if gamma > self.block_size:
                raise InvalidShapeError(
                    f"a DFLASH block of {self.block_size} cannot draft {gamma} tokens"
                )
            return 1
        return gamma


def require_positive(shape: object, *names: str) -> None:
    """Raises InvalidShapeError unless these fields are finite and above 0."""
    for name in names:
        value = getattr(shape, name)
        if not (math.isfinite(value) and value > 0):
            raise InvalidShapeError(f"{type(shape).__name__}: {name} {value} must be above 0")


def require_not_negative(shape: object, *names: str) -> None:
    """Raises InvalidShapeError unless these fields are finite and 0 or more."""
    for name in names:
        value = getattr(shape, name)
        if not (math.isfinite(value) and value >= 0):
            raise InvalidShapeError(f"{type(shape).__name__}: {name} {value} must not be negative")
