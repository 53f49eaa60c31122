"""Two ranks of one engine as threads: they exchange what SGLang's ranks exchange over a network."""

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from engine_shim.link.orders import Orders
from engine_shim.sglang.api.ranks import Peers
from engine_shim.sglang.learning.rank_shares import Gathered, Piece, RankShares, Shard
from engine_shim.sglang.learning.student import LiveDrafter

SIZE = 2
HEAD = "lm_head.weight"
_PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class ThreadPeers(Peers):
    """One rank's; `board` and `barrier` are shared.  A rank that does not come is an error."""

    board: list[bytes] = field(default_factory=list)
    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(SIZE))

    def told(self, value: Any) -> list[Any]:
        self.board[self.rank] = pickle.dumps(value)
        self.barrier.wait(_PATIENCE_SECONDS)
        found = [pickle.loads(each) for each in self.board]
        self.barrier.wait(_PATIENCE_SECONDS)
        return found

    def any_of(self, *flags: bool) -> tuple[bool, ...]:
        return tuple(any(each) for each in zip(*self.told(flags), strict=True))

    def collected(self, held: torch.Tensor) -> list[torch.Tensor]:
        found = self.told(held.detach())
        return found if self.rank == 0 else []

    def spread(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self.told(tensor)[0])


class RankPair:
    """Runs the same on both ranks at once; `orders` and `peers` are theirs."""

    def __init__(self) -> None:
        barrier = threading.Barrier(SIZE)
        board = [b""] * SIZE
        self.peers = [ThreadPeers(rank, SIZE, None, board, barrier) for rank in range(SIZE)]
        self.orders = [Orders(several=True) for _ in range(SIZE)]
        self._threads = ThreadPoolExecutor(SIZE)

    def divided(self, drafter: LiveDrafter) -> list[LiveDrafter]:
        """The same drafter on each rank, which holds one half of its head, and all else whole.

        It borrows one half of the target's embedding there, of which rank 0 has a copy.
        """
        whole = {name: part.detach() for name, part in drafter.parameters.items()}
        rows = len(whole[HEAD])
        shards = {name: Shard() for name in whole}
        shards[HEAD] = Shard(0, (Piece(rows, rows // SIZE),))
        embedding = drafter.borrowed.embedding.detach()
        halves = Shard(0, (Piece(len(embedding), len(embedding) // SIZE),))
        found = []
        for peers in self.peers:
            held = {n: shards[n].cut(part, peers.rank).clone() for n, part in whole.items()}
            is_first = peers.rank == 0
            # What is elsewhere was never written: it may be anything.
            copy = embedding.clone() if is_first else torch.full_like(embedding, torch.nan)
            borrowed = Gathered(halves.cut(embedding, peers.rank).clone(), halves, copy)
            shares = RankShares(held, peers, held, shards, (borrowed,))
            copied = drafter.borrowed._replace(embedding=copy)
            found.append(replace(drafter, borrowed=copied, ranked=shares))
        return found

    def both(self, run: Callable[[int], Any]) -> list[Any]:
        """Calls it with each rank; raises what one of them raises."""
        return [future.result() for future in [self._threads.submit(run, r) for r in range(SIZE)]]

    def step(self) -> None:
        """Between two steps of SGLang: rank 0's orders reach both, which carry them out."""
        sent = self.orders[0].outgoing()
        for orders in self.orders:
            for order in sent:
                orders.adopt(order)
        self.both(lambda rank: self.orders[rank].carry_out())
