"""The ranks of an SGLang engine: which one this is, and how an update reaches all of them.

What they adopt and how they choose: engine_shim/link/ranks.py.  SGLang may leave a broadcast out
(--scheduler-recv-interval) or hold it back (a pause).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed
from sglang.srt.runtime_context import get_parallel
from sglang.utils import TypeBasedDispatcher

from engine_shim.link.ranks import RankUpdate
from engine_shim.steering.errors import UnsupportedEngineError

if TYPE_CHECKING:
    from collections.abc import Callable


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
    parallel = get_parallel()
    found: list[Any] = [None] * parallel.tp_size
    torch.distributed.all_gather_object(found, facts, group=parallel.tp_group.cpu_group)
    for rank, others in enumerate(found):
        for name, value in found[0].items():
            if others.get(name) != value:
                raise UnsupportedEngineError(
                    f"the ranks disagree: {name} is {value} on rank 0 and {others.get(name)} on "
                    f"rank {rank}; give all hosts the same SPECULATION_* variables"
                )


def add_handler(scheduler: Any, adopt: Callable[[RankUpdate], None]) -> None:
    """Lets a scheduler's dispatcher know updates; after `init_request_dispatcher`."""
    scheduler._request_dispatcher += TypeBasedDispatcher([(RankUpdate, adopt)])
