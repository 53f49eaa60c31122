"""The ranks of an SGLang engine: which one this is, how an update reaches all, what they exchange.

What they adopt and how they choose: engine_shim/link/ranks.py.  SGLang may leave a broadcast out
(--scheduler-recv-interval) or hold it back (a pause).
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
    """The ranks that share an engine's drafter, over the host's network.

    Each method is a collective: every rank calls it, in the same order, or all of them hang.  A
    lone rank asks nobody.  rank: of this one, from 0.  size: their number.  group: of torch.
    """

    rank: int = 0
    size: int = 1
    group: Any = None

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.size > 1

    def told(self, value: _Told) -> list[_Told]:
        """Returns what each rank has called this with, by rank."""
        if not self.several:
            return [value]
        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, value, group=self.group)
        return found

    def any_of(self, *flags: bool) -> tuple[bool, ...]:
        """Returns of each flag whether some rank has set it."""
        if not self.several:
            return flags
        found = torch.tensor(flags, dtype=torch.int32)
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=self.group)
        return tuple(bool(flag) for flag in found)

    def collected(self, held: torch.Tensor) -> list[torch.Tensor]:
        """Returns on rank 0, on the host, what the ranks hold; all of one shape.  [] elsewhere."""
        part = held.detach().cpu().contiguous()
        if not self.several:
            return [part]
        found = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else []
        torch.distributed.gather(
            _bytes(part), [_bytes(one) for one in found] or None, self._first, group=self.group
        )
        return found

    def spread(self, tensor: torch.Tensor) -> None:
        """Fills this tensor of the host, contiguous, with what rank 0's holds."""
        if self.several:
            torch.distributed.broadcast(_bytes(tensor), self._first, group=self.group)

    @property
    def _first(self) -> int:
        return torch.distributed.get_global_rank(self.group, 0)


# Of an engine that shares nothing.
ALONE = Peers()


def peers() -> Peers:
    """Returns the ranks of the engine of this process."""
    parallel = get_parallel()
    if parallel.tp_size == 1:
        return ALONE
    return Peers(parallel.tp_rank, parallel.tp_size, parallel.tp_group.cpu_group)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, for a library that does not know every type."""
    return tensor.view(-1).view(torch.uint8)


def is_first() -> bool:
    """Whether this rank is the one with the link."""
    return bool(get_parallel().tp_rank == 0)


def are_several() -> bool:
    """Whether there are others, which this rank must not differ from."""
    return bool(get_parallel().tp_size > 1)


def require_agreement(facts: dict[str, Any]) -> None:
    """Compares what must be alike on all ranks; every rank calls it as it starts.

    Raises UnsupportedEngineError on all of them: on two hosts, the variables may differ.
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
    """Lets a scheduler's dispatcher know updates and orders; after `init_request_dispatcher`."""
    kinds: list[Any] = [(RankUpdate, adopt), (Order, obey)]
    scheduler._request_dispatcher += TypeBasedDispatcher(kinds)
