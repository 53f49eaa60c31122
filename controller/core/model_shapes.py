"""What a model and a drafter weigh: the sizes that the roofline prices.

Parameters are counts, not bytes; `bytes_per_weight` and `bytes_per_kv` say what one is stored in.
Multiply and add are two FLOPs.
"""

import math
from dataclasses import dataclass

from controller.core.errors import SpeculationError
from controller.core.kinds import DrafterKind


class InvalidShapeError(SpeculationError):
    """A model, drafter or device whose numbers cannot be."""


@dataclass(frozen=True, slots=True)
class GroupedQueryAttention:
    """Full softmax attention with shared key/value heads (MHA and MQA are its ends)."""

    query_heads: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        _require_positive(self, "query_heads", "kv_heads", "head_dim")
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
    """MLA in its absorbed decode form: every head reads one shared latent per context token."""

    query_heads: int
    latent_dim: int
    rope_dim: int

    def __post_init__(self) -> None:
        _require_positive(self, "query_heads", "latent_dim")
        _require_not_negative(self, "rope_dim")

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
    """A recurrent state of fixed size per sequence (GatedDeltaNet, Mamba), whatever the context.

    One layer.  state_bytes: read per sequence and step.  token_flops: of one token's update and
    read-out.
    """

    state_bytes: float
    token_flops: float

    def __post_init__(self) -> None:
        _require_positive(self, "state_bytes")
        _require_not_negative(self, "token_flops")


SoftmaxAttention = GroupedQueryAttention | LatentAttention
Attention = SoftmaxAttention | LinearAttention


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed and shared experts of `layers` MoE layers; router weights count as dense."""

    layers: int
    experts: int
    experts_per_token: int
    shared: int
    params_per_expert: int

    def __post_init__(self) -> None:
        _require_positive(self, "layers", "experts", "experts_per_token", "params_per_expert")
        _require_not_negative(self, "shared")
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
    """The target model.

    attention: (kind, number of layers of that kind).  dense_params: read whole at every step, all
    layers: attention projections, dense MLPs, routers; embedding and LM head are not in it.
    """

    hidden_size: int
    vocabulary_size: int
    attention: tuple[tuple[Attention, int], ...]
    dense_params: int
    experts: Experts | None = None
    bytes_per_weight: float = 2.0
    bytes_per_kv: float = 2.0

    def __post_init__(self) -> None:
        _require_positive(
            self,
            "hidden_size",
            "vocabulary_size",
            "dense_params",
            "bytes_per_weight",
            "bytes_per_kv",
        )
        if not self.attention or any(layers < 1 for _, layers in self.attention):
            raise InvalidShapeError("ModelShape: every kind of attention needs at least one layer")

    @property
    def head_params(self) -> int:
        """The LM head's."""
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
    def state_bytes_per_sequence(self) -> float:
        """Recurrent state of a sequence, all layers."""
        return sum(
            layers * kind.state_bytes
            for kind, layers in self.attention
            if isinstance(kind, LinearAttention)
        )

    @property
    def active_params(self) -> int:
        """Parameters that one token meets, LM head included."""
        routed = self.experts.active_params if self.experts else 0
        return self.dense_params + self.head_params + routed


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """A drafter.

    dense_params: read in every pass, an LM head included (a borrowed one is still read).
    experts: of an MTP layer that is MoE.  block_size: positions of DFLASH's one pass; it is what is
    computed, however few of them are verified.  kv_bytes_per_token: what a pass reads of the
    drafter's own cache per context token (0: so little that it is left out).
    """

    kind: DrafterKind
    dense_params: int = 0
    experts: Experts | None = None
    block_size: int = 0
    bytes_per_weight: float = 2.0
    kv_bytes_per_token: float = 0.0

    def __post_init__(self) -> None:
        _require_not_negative(self, "dense_params", "block_size", "kv_bytes_per_token")
        _require_positive(self, "bytes_per_weight")
        name = self.kind.name
        if self.kind is DrafterKind.NGRAM:
            if self.dense_params or self.experts:
                raise InvalidShapeError("DrafterShape: NGRAM looks tokens up, it has no parameters")
        elif self.dense_params < 1:
            raise InvalidShapeError(f"DrafterShape: {name} needs dense_params above 0")
        if (self.kind is DrafterKind.DFLASH) != (self.block_size > 0):
            raise InvalidShapeError(
                f"DrafterShape: block_size {self.block_size} does not go with {name}; "
                "DFLASH has one above 0, nothing else has"
            )

    @property
    def active_params(self) -> int:
        """Parameters that one token meets in a pass."""
        return self.dense_params + (self.experts.active_params if self.experts else 0)

    def passes(self, gamma: int) -> int:
        """Serial forward passes for a draft of gamma.  Raises InvalidShapeError past the block."""
        if gamma == 0 or self.kind is DrafterKind.NGRAM:
            return 0
        if self.kind is DrafterKind.DFLASH:
            if gamma > self.block_size:
                raise InvalidShapeError(
                    f"a DFLASH block of {self.block_size} cannot draft {gamma} tokens"
                )
            return 1
        return gamma


def _require_positive(shape: object, *names: str) -> None:
    for name in names:
        value = getattr(shape, name)
        if not (math.isfinite(value) and value > 0):
            raise InvalidShapeError(f"{type(shape).__name__}: {name} {value} must be above 0")


def _require_not_negative(shape: object, *names: str) -> None:
    for name in names:
        value = getattr(shape, name)
        if not (math.isfinite(value) and value >= 0):
            raise InvalidShapeError(f"{type(shape).__name__}: {name} {value} must not be negative")
