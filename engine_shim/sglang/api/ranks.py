"""The ranks of an SGLang engine: which one this is, how updates reach all, and their collectives.

engine_shim/link/rank_plan_sync.py defines what ranks adopt and how they choose.  SGLang may skip a
broadcast (--scheduler-recv-interval) or delay it (a pause).
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
from engine_shim.link.rank_commands import RankCommand
from engine_shim.link.rank_plan_sync import RankUpdate

_Value = TypeVar("_Value")


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
    def has_other_ranks(self) -> bool:
        """Whether there is more than one rank."""
        return self.size > 1

    def all_gather(self, value: _Value) -> list[_Value]:
        """Returns the value of each rank, by rank."""
        if not self.has_other_ranks:
            return [value]
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value, group=self.group)
        return values

    def any_flags(self, *flags: bool) -> tuple[bool, ...]:
        """Returns for each flag whether at least one rank has set it."""
        if not self.has_other_ranks:
            return flags
        flag_tensor = torch.tensor(flags, dtype=torch.int32)
        torch.distributed.all_reduce(flag_tensor, torch.distributed.ReduceOp.MAX, group=self.group)
        return tuple(bool(flag) for flag in flag_tensor)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Returns the ranks' tensors on rank 0, on the host; [] elsewhere.

        All tensors must have one shape.
        """
        part = tensor.detach().cpu().contiguous()
        if not self.has_other_ranks:
            return [part]
        parts = [torch.empty_like(part) for _ in range(self.size)] if self.rank == 0 else []
        torch.distributed.gather(
            _byte_view(part),
            [_byte_view(buffer) for buffer in parts] or None,
            self._first_global_rank,
            group=self.group,
        )
        return parts

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Fills this contiguous tensor on the host with the values of rank 0's tensor."""
        if self.has_other_ranks:
            torch.distributed.broadcast(
                _byte_view(tensor), self._first_global_rank, group=self.group
            )

    @property
    def _first_global_rank(self) -> int:
        return torch.distributed.get_global_rank(self.group, 0)


# The peers of an engine with a single rank.
SINGLE_RANK = Peers()


def peers() -> Peers:
    """Returns the ranks of the engine of this process."""
    parallel = get_parallel()
    if parallel.tp_size == 1:
        return SINGLE_RANK
    return Peers(parallel.tp_rank, parallel.tp_size, parallel.tp_group.cpu_group)


def _byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same memory as bytes, because the communication library lacks some types."""
    return tensor.view(-1).view(torch.uint8)


def is_first_rank() -> bool:
    """Whether this rank is the one with the link."""
    return bool(get_parallel().tp_rank == 0)


def has_other_ranks() -> bool:
    """Whether the engine has other ranks, with which this one must agree."""
    return bool(get_parallel().tp_size > 1)


def require_agreement(facts: dict[str, Any]) -> None:
    """Compares values that must be equal on all ranks; every rank calls it at its start.

    Raises UnsupportedEngineError on all ranks if values differ, as they may on two hosts.
    """
    if not has_other_ranks():
        return
    rank_facts = peers().all_gather(facts)
    for rank, other_facts in enumerate(rank_facts):
        for name, value in rank_facts[0].items():
            if other_facts.get(name) != value:
                raise UnsupportedEngineError(
                    f"the ranks disagree: {name} is {value} on rank 0 and {other_facts.get(name)} "
                    "on "
                    f"rank {rank}; give all hosts the same SPECULATION_* variables"
                )


def add_handlers(
    scheduler: Any, adopt: Callable[[RankUpdate], None], execute: Callable[[RankCommand], None]
) -> None:
    """Registers updates and orders with a scheduler's dispatcher.

    Must be called after `init_request_dispatcher`.
    """
    kinds: list[Any] = [(RankUpdate, adopt), (RankCommand, execute)]
    scheduler._request_dispatcher += TypeBasedDispatcher(kinds)
