"""Describes which part of a model's parameters each tensor-parallel rank holds, by its layers.

As its weight loaders slice a checkpoint: rows of the column-parallel layers (each part of a fused
one by itself), columns of the row-parallel ones, rows of embeddings and heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine_shim.sglang.training.configs import UnsupportedDrafterError


class Piece(NamedTuple):
    """One of the matrices that a parameter fuses.

    length: of the whole.  size: of a rank's share; the last one's may be shorter.  replicas: ranks
    that hold the same share.
    """

    length: int
    size: int
    replicas: int = 1

    def span(self, rank: int) -> tuple[int, int]:
        """Returns where a rank's share begins and ends in the whole."""
        first = min(rank // self.replicas * self.size, self.length)
        return first, min(first + self.size, self.length)


@dataclass(frozen=True, slots=True)
class Shard:
    """Describes how a parameter is shared.

    dim: that is divided.  pieces: one behind the other, () where every rank holds the whole.
    """

    dim: int = 0
    pieces: tuple[Piece, ...] = ()

    def cut(self, whole: Tensor, rank: int) -> Tensor:
        """Returns a rank's share of the whole; a view where it is one run of it."""
        if not self.pieces:
            return whole
        parts, start = [], 0
        for piece in self.pieces:
            first, last = piece.span(rank)
            parts.append(whole.narrow(self.dim, start + first, last - first))
            start += piece.length
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def joined(self, held: Sequence[Tensor]) -> Tensor:
        """Returns the whole of what the ranks hold, in their order, padding included there."""
        if not self.pieces:
            return held[0]
        parts, start = [], 0
        for piece in self.pieces:
            for rank in range(0, len(held), piece.replicas):
                first, last = piece.span(rank)
                parts.append(held[rank].narrow(self.dim, start, last - first))
            start += piece.size
        return torch.cat(parts, self.dim)

    def whole_shape(self, held: Tensor) -> list[int]:
        """Returns the shape of the whole, from what one rank holds."""
        shape = list(held.shape)
        if self.pieces:
            shape[self.dim] = sum(piece.length for piece in self.pieces)
        return shape

    def without_padding(self, length: int) -> Shard:
        """Returns the same for the first rows alone, where the whole ends in rows of padding."""
        if self.dim or len(self.pieces) != 1:
            return self
        return replace(self, pieces=(self.pieces[0]._replace(length=length),))

    def unpadded(self, held: Tensor, rank: int) -> Tensor:
        """Returns, of what a rank holds, its share of the whole: a view without the padding."""
        if len(self.pieces) != 1:
            return held
        first, last = self.pieces[0].span(rank)
        return held.narrow(self.dim, 0, last - first)


def shard_of(module: Any, name: str, ranks: int) -> Shard:
    """Returns how the parameter `name` of this layer is shared among so many ranks.

    It knows SGLang's layers by the names of their classes, because importing them takes a machine
    that can run them.  Raises UnsupportedDrafterError.
    """
    kinds = {kind.__name__ for kind in type(module).__mro__}
    if "VocabParallelEmbedding" in kinds:
        if module.num_added_embeddings:
            raise UnsupportedDrafterError("its embedding has rows for added tokens")
        size = module.num_embeddings_per_partition
        return _rows(module, ranks, Piece(module.num_embeddings_padded, size))
    if "QKVParallelLinear" in kinds:
        replicas = module.num_kv_head_replicas
        keys, values = (
            Piece(module.total_num_kv_heads * width, module.num_kv_heads * width, replicas)
            for width in (module.head_size, module.v_head_size)
        )
        queries = Piece(
            module.total_num_heads * module.head_size, module.num_heads * module.head_size
        )
        return _rows(module, ranks, queries, keys, values)
    if "MergedColumnParallelLinear" in kinds:
        shares = zip(module.output_sizes, module.output_partition_sizes, strict=True)
        return _rows(module, ranks, *(Piece(*share) for share in shares))
    if "ColumnParallelLinear" in kinds:
        return _rows(module, ranks, Piece(module.output_size, module.output_size_per_partition))
    if "RowParallelLinear" in kinds and name == "weight":
        shard = _rows(module, ranks, Piece(module.input_size, module.input_size_per_partition))
        return replace(shard, dim=1)
    return Shard()


def _rows(module: Any, ranks: int, *pieces: Piece) -> Shard:
    if all(piece.length == piece.size for piece in pieces):
        return Shard()
    if any(piece.length * piece.replicas != piece.size * ranks for piece in pieces):
        raise UnsupportedDrafterError(
            f"its {type(module).__name__} is not divided by the number of ranks, {ranks}"
        )
    return Shard(0, pieces)
