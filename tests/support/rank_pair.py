"""Two ranks of one engine as threads: they exchange what SGLang's ranks exchange over a network."""

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from engine_shim.link.rank_commands import RankCommands
from engine_shim.sglang.api.ranks import Peers
from engine_shim.sglang.learning.rank_shares import GatheredTensor, Piece, RankShares, Shard
from engine_shim.sglang.learning.student import LiveDrafter

SIZE = 2
HEAD = "lm_head.weight"
_PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class ThreadPeers(Peers):
    """One rank's; `board` and `barrier` are shared.  A rank that does not come is an error."""

    board: list[bytes] = field(default_factory=list)
    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(SIZE))

    def all_gather(self, value: Any) -> list[Any]:
        self.board[self.rank] = pickle.dumps(value)
        self.barrier.wait(_PATIENCE_SECONDS)
        values = [pickle.loads(pickled) for pickled in self.board]
        self.barrier.wait(_PATIENCE_SECONDS)
        return values

    def any_flags(self, *flags: bool) -> tuple[bool, ...]:
        return tuple(any(rank_flags) for rank_flags in zip(*self.all_gather(flags), strict=True))

    def gather(self, held: torch.Tensor) -> list[torch.Tensor]:
        tensors = self.all_gather(held.detach())
        return tensors if self.rank == 0 else []

    def broadcast(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self.all_gather(tensor)[0])


class RankPair:
    """Runs the same on both ranks at once; `orders` and `peers` are theirs."""

    def __init__(self) -> None:
        barrier = threading.Barrier(SIZE)
        board = [b""] * SIZE
        self.peers = [ThreadPeers(rank, SIZE, None, board, barrier) for rank in range(SIZE)]
        self.orders = [RankCommands(has_other_ranks=True) for _ in range(SIZE)]
        self._threads = ThreadPoolExecutor(SIZE)

    def split_drafter(self, drafter: LiveDrafter) -> list[LiveDrafter]:
        """The same drafter on each rank, which holds one half of its head, and all else whole.

        It borrows one half of the target's embedding there, of which rank 0 has a copy.
        """
        parameters = {name: part.detach() for name, part in drafter.parameters.items()}
        rows = len(parameters[HEAD])
        shards = {name: Shard() for name in parameters}
        shards[HEAD] = Shard(0, (Piece(rows, rows // SIZE),))
        embedding = drafter.borrowed.embedding.detach()
        halves = Shard(0, (Piece(len(embedding), len(embedding) // SIZE),))
        drafters = []
        for peers in self.peers:
            rank_parameters = {
                n: shards[n].cut(part, peers.rank).clone() for n, part in parameters.items()
            }
            is_first = peers.rank == 0
            # What is elsewhere was never written: it may be anything.
            copy = embedding.clone() if is_first else torch.full_like(embedding, torch.nan)
            borrowed = GatheredTensor(halves.cut(embedding, peers.rank).clone(), halves, copy)
            shares = RankShares(rank_parameters, peers, rank_parameters, shards, (borrowed,))
            copied = drafter.borrowed._replace(embedding=copy)
            drafters.append(replace(drafter, borrowed=copied, rank_shares=shares))
        return drafters

    def run_on_both(self, run: Callable[[int], Any]) -> list[Any]:
        """Calls it with each rank; raises what one of them raises."""
        return [future.result() for future in [self._threads.submit(run, r) for r in range(SIZE)]]

    def step(self) -> None:
        """Between two steps of SGLang: rank 0's orders reach both, which carry them out."""
        outgoing = self.orders[0].outgoing_commands()
        for orders in self.orders:
            for order in outgoing:
                orders.adopt(order)
        self.run_on_both(lambda rank: self.orders[rank].execute_adopted())
