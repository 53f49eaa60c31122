"""A drafter's parameters where tensor-parallel ranks share them: as a whole, and this rank's share.

    Gathering      as the engine starts: brings together on rank 0 what the ranks hold
    RankShares     later: this rank's share of given weights, and the served ones as a whole

A student and its trainer know the whole alone.  With one rank, whole and share are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from engine_shim.sglang.api.ranks import ALONE, Peers
from engine_shim.sglang.api.shards import Shard, shard_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True, slots=True)
class Gathered:
    """A tensor of the model.

    held: by this rank, live, with SGLang's padding.  shard: how it lies on the ranks.  whole: rank
    0's copy; elsewhere it has the shape, and no values.
    """

    held: torch.Tensor
    shard: Shard
    whole: torch.Tensor


@dataclass(frozen=True, slots=True)
class RankShares:
    """Keeps what this rank holds of a drafter's parameters.

    live: written to in place; held: the same with SGLang's padding.  shards: how they lie on the
    ranks.  All by name.  borrowed: of the target, only read.  With one rank only `live` is set.
    """

    live: dict[str, torch.Tensor]
    peers: Peers = ALONE
    held: dict[str, torch.Tensor] = field(default_factory=dict)
    shards: dict[str, Shard] = field(default_factory=dict)
    borrowed: tuple[Gathered, ...] = ()

    def of(self, whole: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns this rank's share of weights; views of them where that is possible."""
        if not self.shards:
            return {name: whole[name] for name in self.live}
        rank = self.peers.rank
        return {name: shard.cut(whole[name], rank) for name, shard in self.shards.items()}

    def whole(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields on rank 0 the weights that are served, one after the other; a collective."""
        if not self.shards:
            yield from self.live.items()
        for name, shard in self.shards.items():
            if found := self.peers.collected(self.held[name]):
                yield name, shard.joined(found)

    def copy_borrowed(self) -> None:
        """Copies what the drafter borrows of the target to rank 0 again; a collective."""
        for part in self.borrowed:
            if found := self.peers.collected(part.held):
                part.whole.copy_(part.shard.joined(found))


class Gathering:
    """Brings a model's parameters together; every rank makes the same calls, which are collectives.

    On rank 0 they are whole, on the host.  What another rank gets has the shape, and no values.
    With one rank they are the live ones.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._live: dict[str, torch.Tensor] = {}
        self._shards: dict[str, Shard] = {}
        # By the place of what is held, so that what is tied remains so.
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
        """Returns this rank's share of these, which `parameters` has returned, maybe cut."""
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
