"""The ranks of an SGLang engine: which one this is, how updates reach all, and their collectives.

engine_shim/link/ranks.py defines what ranks adopt and how they choose.  SGLang may skip a broadcast
(--scheduler-recv-interval) or delay it (a pause).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed
from sglang.srt.runtime_context import get_parallel
from sglang.utils import TypeBasedDispatcher

from engine_shim.common.errors import UnsupportedEngineError
from engine_shim.link.orders import Order
from engine_shim.link.ranks import RankUpdate

_Told = TypeVar("_Told")


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks that share an engine's drafter; they communicate over the host's network.

    Each method is a collective: every rank must call it in the same order, or all of them hang.
    With a single rank nothing is sent.  rank: this rank, from 0.  size: number of ranks.  group:
    torch's process group.
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    @property
    def several(self) -> bool:
        """Whether there is more than one rank."""
        return self.size > 1

    def told(self, value: _Told) -> list[_Told]:
        """Returns the value of each rank, by rank."""
        if not self.several:
            return [value]
        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, value, group=self.group)
        return found

    def any_of(self, *flags: bool) -> tuple[bool, ...]:
        """Returns for each flag whether at least one rank has set it."""
        if not self.several:
            return flags
        found = torch.tensor(flags, dtype=torch.int32)
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=self.group)
        return tuple(bool(flag) for flag in found)

    def collected(self, held: torch.Tensor) -> list[torch.Tensor]:
        """Returns the ranks' tensors on rank 0, on the host; [] elsewhere.

        All tensors must have one shape.
        """
        part = held.detach().cpu().contiguous()
        if not self.several:
            return [part]
        found = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else []
        torch.distributed.gather(
            _bytes(part), [_bytes(one) for one in found] or None, self._first, group=self.group
        )
        return found

    def spread(self, tensor: torch.Tensor) -> None:
        """Fills this contiguous tensor on the host with the values of rank 0's tensor."""
        if self.several:
            torch.distributed.broadcast(_bytes(tensor), self._first, group=self.group)

    @property
    def _first(self) -> int:
        return torch.distributed.get_global_rank(self.group, 0)


# The peers of an engine with a single rank.
ALONE = Peers()


def peers() -> Peers:
    """Returns the ranks of the engine of this process."""
    parallel = get_parallel()
    if parallel.tp_size == 1:
        return ALONE
    return Peers(parallel.tp_rank, parallel.tp_size, parallel.tp_group.cpu_group)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same memory as bytes, because the communication library lacks some types."""
    return tensor.view(-1).view(torch.uint8)


def is_first() -> bool:
    """Whether this rank is the one with the link."""
    return bool(get_parallel().tp_rank == 0)


def are_several() -> bool:
    """Whether the engine has other ranks, with which this one must agree."""
    return bool(get_parallel().tp_size > 1)


def require_agreement(facts: dict[str, Any]) -> None:
    """Compares values that must be equal on all ranks; every rank calls it at its start.

    Raises UnsupportedEngineError on all ranks if values differ, as they may on two hosts.
    """
    if not are_several():
        return
    found = peers().told(facts)
    for rank, others in enumerate(found):
        for name, value in found[0].items():
            if others.get(name) != value:
                raise UnsupportedEngineError(
                    f"the ranks disagree: {name} is {value} on rank 0 and {others.get(name)} on "
                    f"rank {rank}; give all hosts the same SPECULATION_* variables"
                )


def add_handler(
    scheduler: Any, adopt: Callable[[RankUpdate], None], obey: Callable[[Order], None]
) -> None:
    """Registers updates and orders with a scheduler's dispatcher.

    Must be called after `init_request_dispatcher`.
    """
    kinds: list[Any] = [(RankUpdate, adopt), (Order, obey)]
    scheduler._request_dispatcher += TypeBasedDispatcher(kinds)
