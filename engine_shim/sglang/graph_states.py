"""Records what preparing the draft lengths takes: a state for each, with graphs for its batches."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GraphState:
    """Describes one state.

    seconds: of its capture; device_bytes: 0 on a CPU; largest_batch: None for all.
    """

    seconds: float
    device_bytes: int
    largest_batch: int | None


class GraphStates:
    """One for each draft length but the one that the engine starts with, which is its own."""

    def __init__(self) -> None:
        self._states: dict[int, GraphState] = {}

    def around_build(
        self, original: Callable[..., Any], worker: Any, speculative_num_steps: int,
        speculative_num_draft_tokens: int, cuda_graph_bs: list[int] | None = None,
    ) -> Any:  # fmt: skip
        """Wraps the method `EAGLEWorkerV2.build_adaptive_runtime_state`."""
        free, started = _free_bytes(), perf_counter()
        state = original(
            worker,
            speculative_num_steps=speculative_num_steps,
            speculative_num_draft_tokens=speculative_num_draft_tokens,
            cuda_graph_bs=cuda_graph_bs,
        )
        self._states[speculative_num_steps] = GraphState(
            perf_counter() - started,
            max(0, free - _free_bytes()),
            None if cuda_graph_bs is None else max(cuda_graph_bs, default=0),
        )
        return state

    def log(self) -> None:
        """One line over all of them."""
        states = self._states.values()
        _log.info(
            "prepared %d more draft lengths in %.1f s, %.2f GiB",
            len(states),
            sum(state.seconds for state in states),
            sum(state.device_bytes for state in states) / 2**30,
        )

    def status(self) -> dict[str, dict[str, Any]]:
        """Returns the states by draft length, in plain values."""
        return {str(gamma): asdict(state) for gamma, state in sorted(self._states.items())}


def _free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
