"""Records and limits the runtime states that SGLang prepares for the draft lengths.

SGLang builds the states of all draft lengths in the drafter's scope.  With data-parallel attention
an EAGLE3 drafter runs on fewer ranks than its target (each rank drafts for itself), and a graph of
the target that was captured there would gather from one rank only.  `around_init_cuda_graphs`
builds the states after that scope was left, and enters it again for the drafter's part of each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from time import perf_counter
from typing import Any, Final

import torch

from engine_shim.sglang.api import sglang_api
from engine_shim.sglang.memory import MIB, Prediction

_log = logging.getLogger(__name__)

# The drafter's parts of `EAGLEWorkerV2.build_adaptive_runtime_state`.
DRAFT_PARTS: Final = ("init_attention_backend", "_capture_cuda_graphs")


@dataclass(frozen=True, slots=True)
class GraphState:
    """Describes the prepared state of one draft length.

    seconds: duration of its capture; device_bytes: memory it took, 0 on a CPU; predicted_bytes:
    memory that `engine_shim.sglang.memory` predicted; largest_batch: the largest batch with a
    graph, None if that is the engine's largest.
    """

    seconds: float
    device_bytes: int
    predicted_bytes: int
    largest_batch: int | None


class GraphStates:
    """The states of all draft lengths but the one that the engine starts with."""

    def __init__(self, limits: Mapping[int, int] | None = None) -> None:
        """Takes the largest batch to capture by draft length; other lengths capture all."""
        self._limits = dict(limits or {})
        self._states: dict[int, GraphState] = {}
        self._has_graphs = False
        self._predicted: dict[int, int] = {}

    def set_prediction(self, prediction: Prediction) -> None:
        """Takes the predicted memory of the draft lengths, to show it beside the measured one."""
        self._predicted = {row.gamma: round(row.total_mib * MIB) for row in prediction.reserves}

    def around_build(
        self, original: Callable[..., Any], worker: Any, speculative_num_steps: int,
        speculative_num_draft_tokens: int, cuda_graph_bs: list[int] | None = None,
    ) -> Any:  # fmt: skip
        """Wraps the method `EAGLEWorkerV2.build_adaptive_runtime_state`.

        SGLang's `cuda_graph_bs` stays unused: no capture reads what it overrides.
        """
        free_bytes, started = _free_bytes(), perf_counter()
        all_batch_sizes = sglang_api.graph_batch_sizes(worker.target_worker.model_runner)
        self._has_graphs = bool(all_batch_sizes)
        limit = self._limits.get(speculative_num_steps)
        with _limit_captured_batches(limit, all_batch_sizes):
            try:
                state = original(
                    worker,
                    speculative_num_steps=speculative_num_steps,
                    speculative_num_draft_tokens=speculative_num_draft_tokens,
                    cuda_graph_bs=cuda_graph_bs,
                )
            except Exception as error:
                error.add_note(
                    f"while draft length {speculative_num_steps} was prepared: fewer lengths in "
                    "SPECULATION_GAMMAS, or SPECULATION_GRAPH_LIMITS, take less memory"
                )
                raise
        largest_batch = _largest_captured_batch(state)
        self._states[speculative_num_steps] = GraphState(
            perf_counter() - started,
            max(0, free_bytes - _free_bytes()),
            self._predicted.get(speculative_num_steps, 0),
            None if not all_batch_sizes or largest_batch >= all_batch_sizes[-1] else largest_batch,
        )
        return state

    @property
    def batch_limits(self) -> dict[int, int]:
        """Returns the largest captured batch of draft lengths captured for small batches only.

        If the engine has no graphs at all, these are the limits as they were set.
        """
        if not self._has_graphs:
            return dict(self._limits)
        return {
            gamma: state.largest_batch
            for gamma, state in self._states.items()
            if state.largest_batch is not None
        }

    def log(self) -> None:
        """Logs one line about all states."""
        states = self._states.values()
        _log.info(
            "prepared %d more draft lengths in %.1f s, %.2f GiB (%.2f GiB were predicted)",
            len(states),
            sum(state.seconds for state in states),
            sum(state.device_bytes for state in states) / 2**30,
            sum(state.predicted_bytes for state in states) / 2**30,
        )

    def status(self) -> dict[str, dict[str, Any]]:
        """Returns the states by draft length, in plain values."""
        return {str(gamma): asdict(state) for gamma, state in sorted(self._states.items())}


@contextmanager
def _limit_captured_batches(limit: int | None, all_batch_sizes: tuple[int, ...]) -> Iterator[None]:
    """Limits captures inside the block to batch sizes up to `limit`; None: no limit.

    all_batch_sizes: the sizes that the engine's own graphs have, ascending; empty without graphs.
    """
    if limit is None or not all_batch_sizes or limit >= all_batch_sizes[-1]:
        yield
        return
    from sglang.srt.model_executor.cuda_graph_config import Backend

    decode = sglang_api.decode_graphs()
    saved = decode.bs, decode.backend
    # SGLang shares the list between configurations, so it is replaced and never changed.  The
    # largest batch (`max_bs`) stays, because other buffers have its size.
    decode.bs = [size for size in all_batch_sizes if size <= limit]
    if not decode.bs:
        decode.backend = Backend.DISABLED
    try:
        yield
    finally:
        decode.bs, decode.backend = saved


def _largest_captured_batch(state: Any) -> int:
    """Returns the largest batch that all graphs of a `SpecRuntimeState` were captured for."""
    if state.target_graph_runner is None:
        return 0
    draft_runners = (state.cuda_graph_runner, state.cuda_graph_runner_for_draft_extend)
    runners = [
        state.target_graph_runner,
        *(runner for runner in draft_runners if runner is not None),
    ]
    return min(max(runner.capture_bs, default=0) for runner in runners)


def _free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def around_init_cuda_graphs(original: Callable[[Any], None], worker: Any) -> None:
    """Wraps the method `EAGLEWorkerV2.init_cuda_graphs`."""
    controller = worker.adaptive_controller
    postponed: list[Callable[[], None]] = []

    def postpone(**arguments: Any) -> None:
        postponed.append(partial(type(controller).init_states, controller, **arguments))

    controller.init_states = postpone
    try:
        original(worker)
    finally:
        del controller.init_states
    with _enter_draft_scope(worker.draft_worker):
        for build in postponed:
            build()


@contextmanager
def _enter_draft_scope(draft: Any) -> Iterator[None]:
    """Makes the drafter's parts enter its scope, inside the block."""

    def run(part: str) -> None:
        with sglang_api.draft_pass(draft):
            getattr(type(draft), part)(draft)

    for part in DRAFT_PARTS:
        setattr(draft, part, partial(run, part))
    try:
        yield
    finally:
        for part in DRAFT_PARTS:
            delattr(draft, part)
