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

from engine_shim.sglang.api.ranks import SINGLE_RANK, Peers
from engine_shim.sglang.training.students import UnsupportedDrafterError


@dataclass(frozen=True, slots=True)
class GatheredTensor:
    """A tensor of the model.

    rank_tensor: this rank's live part, with SGLang's padding.  shard: how the ranks share it.
    whole_tensor: rank 0's copy; on other ranks a tensor of that shape without values.
    """

    rank_tensor: torch.Tensor
    shard: Shard
    whole_tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class RankShares:
    """This rank's share of a drafter's parameters.

    live: written to in place; rank_tensors: the same with SGLang's padding; shards: how the ranks
    share them; all by name.  borrowed: tensors of the target, only read.  With one rank only `live`
    is set.
    """

    live: dict[str, torch.Tensor]
    peers: Peers = SINGLE_RANK
    rank_tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    shards: dict[str, Shard] = field(default_factory=dict)
    borrowed: tuple[GatheredTensor, ...] = ()

    def select_share(self, whole_tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns this rank's share of whole weights; views where that is possible."""
        if not self.shards:
            return {name: whole_tensors[name] for name in self.live}
        rank = self.peers.rank
        return {name: shard.cut(whole_tensors[name], rank) for name, shard in self.shards.items()}

    def gather_whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields on rank 0 the whole served weights, one after the other; a collective."""
        if not self.shards:
            yield from self.live.items()
        for name, shard in self.shards.items():
            if parts := self.peers.gather(self.rank_tensors[name]):
                yield name, shard.join(parts)

    def copy_borrowed(self) -> None:
        """Copies what the drafter borrows from the target to rank 0 again; a collective."""
        for part in self.borrowed:
            if parts := self.peers.gather(part.rank_tensor):
                part.whole_tensor.copy_(part.shard.join(parts))


class ParameterGatherer:
    """Gathers a model's parameters.  The calls are collectives: every rank makes the same ones.

    On rank 0 the parameters are whole, on the host.  Other ranks get tensors of the same shape
    without values.  With one rank they are the live ones.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._live: dict[str, torch.Tensor] = {}
        self._shards: dict[str, Shard] = {}
        # By the address of this rank's part, so that tied parameters stay tied.
        self._gathered: dict[int, GatheredTensor] = {}

    def parameters(self, model: Any) -> dict[str, torch.Tensor]:
        """Returns all of them by name.  Raises UnsupportedDrafterError."""
        if not self._peers.has_other_ranks:
            return dict(model.named_parameters())
        whole_parameters: dict[str, torch.Tensor] = {}
        modules = dict(model.named_modules())
        for name, rank_tensor in model.named_parameters():
            owner, _, own_name = name.rpartition(".")
            whole_parameters[name] = self._gather_whole(modules[owner], own_name, rank_tensor)
            self._live[name] = rank_tensor
            self._shards[name] = find_shard(modules[owner], own_name, self._peers.size)
        return whole_parameters

    def weight(self, module: Any) -> torch.Tensor:
        """Returns the weight of an embedding or a head.  Raises UnsupportedDrafterError."""
        if not self._peers.has_other_ranks:
            weight: torch.Tensor = module.weight
            return weight
        return self._gather_whole(module, "weight", module.weight)

    def shares(self, parameters: Mapping[str, torch.Tensor]) -> RankShares:
        """Returns this rank's share of parameters that `parameters` has returned.

        The caller may have cut rows of padding off them.
        """
        if not self._peers.has_other_ranks:
            return RankShares(dict(parameters))
        rank_tensors = {name: self._live[name].detach() for name in parameters}
        shards = {
            name: self._shards[name].trim_length(len(whole_tensor))
            for name, whole_tensor in parameters.items()
        }
        rank = self._peers.rank
        live = {name: shards[name].trim_padding(part, rank) for name, part in rank_tensors.items()}
        trained_addresses = {part.data_ptr() for part in rank_tensors.values()}
        borrowed = [
            part for address, part in self._gathered.items() if address not in trained_addresses
        ]
        return RankShares(live, self._peers, rank_tensors, shards, tuple(borrowed))

    def _gather_whole(self, module: Any, name: str, rank_tensor: torch.Tensor) -> torch.Tensor:
        gathered = self._gathered.get(rank_tensor.data_ptr())
        if gathered is None:
            shard = find_shard(module, name, self._peers.size)
            parts = self._peers.gather(rank_tensor)
            whole_tensor = (
                shard.join(parts)
                if parts
                else torch.empty(shard.whole_shape(rank_tensor), dtype=rank_tensor.dtype)
            )
            gathered = GatheredTensor(rank_tensor.detach(), shard, whole_tensor)
            self._gathered[rank_tensor.data_ptr()] = gathered
        return gathered.whole_tensor


class Piece(NamedTuple):
    """One of the matrices that a parameter fuses.

    whole_length: rows of the whole.  rank_length: rows of a rank's share; that of the last rank may
    be shorter. replicas: number of ranks that hold the same share.
    """

    whole_length: int
    rank_length: int
    replicas: int = 1

    def span(self, rank: int) -> tuple[int, int]:
        """Returns where a rank's share begins and ends in the whole."""
        first = min(rank // self.replicas * self.rank_length, self.whole_length)
        return first, min(first + self.rank_length, self.whole_length)


@dataclass(frozen=True, slots=True)
class Shard:
    """Describes how ranks share a parameter.

    dim: the divided dimension.  pieces: in order; () if every rank holds the whole.
    """

    dim: int = 0
    pieces: tuple[Piece, ...] = ()

    def cut(self, whole_tensor: Tensor, rank: int) -> Tensor:
        """Returns a rank's share of the whole; a view if it is contiguous."""
        if not self.pieces:
            return whole_tensor
        parts, start = [], 0
        for piece in self.pieces:
            first, last = piece.span(rank)
            parts.append(whole_tensor.narrow(self.dim, start + first, last - first))
            start += piece.whole_length
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def join(self, rank_tensors: Sequence[Tensor]) -> Tensor:
        """Joins the ranks' parts, which include padding, in the order of the ranks."""
        if not self.pieces:
            return rank_tensors[0]
        parts, start = [], 0
        for piece in self.pieces:
            for rank in range(0, len(rank_tensors), piece.replicas):
                first, last = piece.span(rank)
                parts.append(rank_tensors[rank].narrow(self.dim, start, last - first))
            start += piece.rank_length
        return torch.cat(parts, self.dim)

    def whole_shape(self, rank_tensor: Tensor) -> list[int]:
        """Returns the shape of the whole, from one rank's part."""
        shape = list(rank_tensor.shape)
        if self.pieces:
            shape[self.dim] = sum(piece.whole_length for piece in self.pieces)
        return shape

    def trim_length(self, length: int) -> Shard:
        """Returns the shard of the first `whole_length` rows, if the whole ends in padding rows."""
        if self.dim or len(self.pieces) != 1:
            return self
        return replace(self, pieces=(self.pieces[0]._replace(whole_length=length),))

    def trim_padding(self, rank_tensor: Tensor, rank: int) -> Tensor:
        """Returns a rank's share of the whole: a view of its part without the padding."""
        if len(self.pieces) != 1:
            return rank_tensor
        first, last = self.pieces[0].span(rank)
        return rank_tensor.narrow(self.dim, 0, last - first)


def find_shard(module: Any, name: str, rank_count: int) -> Shard:
    """Returns how `rank_count` ranks share the parameter `name` of this layer.

    Recognises SGLang's layers by the names of their classes, because they can only be imported on a
    machine that can run them.  Raises UnsupportedDrafterError.
    """
    kinds = {kind.__name__ for kind in type(module).__mro__}
    if "VocabParallelEmbedding" in kinds:
        if module.num_added_embeddings:
            raise UnsupportedDrafterError("its embedding has rows for added tokens")
        rank_rows = module.num_embeddings_per_partition
        return _row_shard(module, rank_count, Piece(module.num_embeddings_padded, rank_rows))
    if "QKVParallelLinear" in kinds:
        replicas = module.num_kv_head_replicas
        keys, values = (
            Piece(module.total_num_kv_heads * width, module.num_kv_heads * width, replicas)
            for width in (module.head_size, module.v_head_size)
        )
        queries = Piece(
            module.total_num_heads * module.head_size, module.num_heads * module.head_size
        )
        return _row_shard(module, rank_count, queries, keys, values)
    if "MergedColumnParallelLinear" in kinds:
        shares = zip(module.output_sizes, module.output_partition_sizes, strict=True)
        return _row_shard(module, rank_count, *(Piece(*share) for share in shares))
    if "ColumnParallelLinear" in kinds:
        return _row_shard(
            module, rank_count, Piece(module.output_size, module.output_size_per_partition)
        )
    if "RowParallelLinear" in kinds and name == "weight":
        shard = _row_shard(
            module, rank_count, Piece(module.input_size, module.input_size_per_partition)
        )
        return replace(shard, dim=1)
    return Shard()


def _row_shard(module: Any, rank_count: int, *pieces: Piece) -> Shard:
    if all(piece.whole_length == piece.rank_length for piece in pieces):
        return Shard()
    if any(
        piece.whole_length * piece.replicas != piece.rank_length * rank_count for piece in pieces
    ):
        raise UnsupportedDrafterError(
            f"its {type(module).__name__} is not divided by the number of ranks, {rank_count}"
        )
    return Shard(0, pieces)
