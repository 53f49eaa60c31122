"""A drafter's parameters if tensor-parallel ranks share them: the whole and this rank's share.

    Gathering      when the engine starts: gathers on rank 0 what the ranks hold
    RankShares     later: this rank's share of given weights, and the served weights as a whole

A student and its trainer only see whole parameters.  With one rank, whole and share are the same.

The part of each rank follows from the layers, because their weight loaders slice a checkpoint in a
fixed way: rows of column-parallel layers (each part of a fused layer separately), columns of
row-parallel layers, rows of embeddings and heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine_shim.sglang.api.ranks import ALONE, Peers
from engine_shim.sglang.training.students import UnsupportedDrafterError


@dataclass(frozen=True, slots=True)
class Gathered:
    """A tensor of the model.

    held: this rank's live part, with SGLang's padding.  shard: how the ranks share it.  whole: rank
    0's copy; on other ranks a tensor of that shape without values.
    """

    held: torch.Tensor
    shard: Shard
    whole: torch.Tensor


@dataclass(frozen=True, slots=True)
class RankShares:
    """This rank's share of a drafter's parameters.

    live: written to in place; held: the same with SGLang's padding; shards: how the ranks share
    them; all by name.  borrowed: tensors of the target, only read.  With one rank only `live` is
    set.
    """

    live: dict[str, torch.Tensor]
    peers: Peers = ALONE
    held: dict[str, torch.Tensor] = field(default_factory=dict)
    shards: dict[str, Shard] = field(default_factory=dict)
    borrowed: tuple[Gathered, ...] = ()

    def of(self, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns this rank's share of whole weights; views where that is possible."""
        if not self.shards:
            return {name: whole[name] for name in self.live}
        rank = self.peers.rank
        return {name: shard.cut(whole[name], rank) for name, shard in self.shards.items()}

    def whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields on rank 0 the whole served weights, one after the other; a collective."""
        if not self.shards:
            yield from self.live.items()
        for name, shard in self.shards.items():
            if found := self.peers.collected(self.held[name]):
                yield name, shard.joined(found)

    def copy_borrowed(self) -> None:
        """Copies what the drafter borrows from the target to rank 0 again; a collective."""
        for part in self.borrowed:
            if found := self.peers.collected(part.held):
                part.whole.copy_(part.shard.joined(found))


class Gathering:
    """Gathers a model's parameters.  The calls are collectives: every rank makes the same ones.

    On rank 0 the parameters are whole, on the host.  Other ranks get tensors of the same shape
    without values.  With one rank they are the live ones.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._live: dict[str, torch.Tensor] = {}
        self._shards: dict[str, Shard] = {}
        # By the address of this rank's part, so that tied parameters stay tied.
        self._found: dict[int, Gathered] = {}

    def parameters(self, model: Any) -> dict[str, torch.Tensor]:
        """Returns all of them by name.  Raises UnsupportedDrafterError."""
        if not self._peers.several:
            return dict(model.named_parameters())
        found: dict[str, torch.Tensor] = {}
        modules = dict(model.named_modules())
        for name, held in model.named_parameters():
            owner, _, own_name = name.rpartition(".")
            found[name] = self._whole(modules[owner], own_name, held)
            self._live[name] = held
            self._shards[name] = shard_of(modules[owner], own_name, self._peers.size)
        return found

    def weight(self, module: Any) -> torch.Tensor:
        """Returns the weight of an embedding or a head.  Raises UnsupportedDrafterError."""
        if not self._peers.several:
            weight: torch.Tensor = module.weight
            return weight
        return self._whole(module, "weight", module.weight)

    def shares(self, parameters: Mapping[str, torch.Tensor]) -> RankShares:
        """Returns this rank's share of parameters that `parameters` has returned.

        The caller may have cut rows of padding off them.
        """
        if not self._peers.several:
            return RankShares(dict(parameters))
        held = {name: self._live[name].detach() for name in parameters}
        shards = {
            name: self._shards[name].without_padding(len(whole))
            for name, whole in parameters.items()
        }
        rank = self._peers.rank
        live = {name: shards[name].unpadded(part, rank) for name, part in held.items()}
        trained = {part.data_ptr() for part in held.values()}
        borrowed = [part for place, part in self._found.items() if place not in trained]
        return RankShares(live, self._peers, held, shards, tuple(borrowed))

    def _whole(self, module: Any, name: str, held: torch.Tensor) -> torch.Tensor:
        found = self._found.get(held.data_ptr())
        if found is None:
            shard = shard_of(module, name, self._peers.size)
            parts = self._peers.collected(held)
            whole = (
                shard.joined(parts)
                if parts
                else torch.empty(shard.whole_shape(held), dtype=held.dtype)
            )
            found = Gathered(held.detach(), shard, whole)
            self._found[held.data_ptr()] = found
        return found.whole


class Piece(NamedTuple):
    """One of the matrices that a parameter fuses.

    length: rows of the whole.  size: rows of a rank's share; that of the last rank may be shorter.
    replicas: number of ranks that hold the same share.
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
    """Describes how ranks share a parameter.

    dim: the divided dimension.  pieces: in order; () if every rank holds the whole.
    """

    dim: int = 0
    pieces: tuple[Piece, ...] = ()

    def cut(self, whole: Tensor, rank: int) -> Tensor:
        """Returns a rank's share of the whole; a view if it is contiguous."""
        if not self.pieces:
            return whole
        parts, start = [], 0
        for piece in self.pieces:
            first, last = piece.span(rank)
            parts.append(whole.narrow(self.dim, start + first, last - first))
            start += piece.length
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def joined(self, held: Sequence[Tensor]) -> Tensor:
        """Joins the ranks' parts, which include padding, in the order of the ranks."""
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
        """Returns the shape of the whole, from one rank's part."""
        shape = list(held.shape)
        if self.pieces:
            shape[self.dim] = sum(piece.length for piece in self.pieces)
        return shape

    def without_padding(self, length: int) -> Shard:
        """Returns the shard of the first `length` rows, if the whole ends in padding rows."""
        if self.dim or len(self.pieces) != 1:
            return self
        return replace(self, pieces=(self.pieces[0]._replace(length=length),))

    def unpadded(self, held: Tensor, rank: int) -> Tensor:
        """Returns a rank's share of the whole: a view of its part without the padding."""
        if len(self.pieces) != 1:
            return held
        first, last = self.pieces[0].span(rank)
        return held.narrow(self.dim, 0, last - first)


def shard_of(module: Any, name: str, ranks: int) -> Shard:
    """Returns how `ranks` ranks share the parameter `name` of this layer.

    Recognises SGLang's layers by the names of their classes, because they can only be imported on a
    machine that can run them.  Raises UnsupportedDrafterError.
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
