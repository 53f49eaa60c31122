"""Detects drafter passes of a decode step that run without a CUDA graph.

SGLang reports this for a step's verification only.  The draft and the draft-extend fall back to
eager execution silently.  So does a DFlash block, whose graphs SGLang does not even capture if less
than 1 GB of device memory is free.  A step with such a pass takes longer than the cost of its
shape.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Any

_log = logging.getLogger(__name__)


class Passes(IntFlag):
    """The passes of a decode step that SGLang captures graphs for."""

    VERIFICATION = 1
    DRAFT = 2
    DRAFT_EXTEND = 4
    BLOCK = 8

    @property
    def names(self) -> list[str]:
        """Returns the names as the status shows them."""
        return [str(pass_kind.name).lower() for pass_kind in self]


NO_PASSES = Passes(0)


@dataclass(slots=True)
class EagerPasses:
    """Watches the drafters of one engine and counts its eager passes.

    captured: the passes that have graphs.  missing: the passes that the engine runs without having
    graphs for them; they are eager in every step, so the step's cost includes that.  counts: steps
    with an eager pass of a kind that has graphs.  step_passes: the drafters' eager passes of the
    current step; the caller clears it before each step.
    """

    captured: Passes = NO_PASSES
    missing: Passes = NO_PASSES
    counts: Counter[Passes] = field(default_factory=Counter)
    step_passes: Passes = field(default=NO_PASSES, init=False)

    def watch_chain(self, runner: Any) -> None:
        """Watches the `ModelRunner` of an EAGLE drafter.

        Graphs are executed without a call of its `forward`.  So `forward` is called for eager
        passes only, and for prefills and catch-ups, which have no graph by design.
        """

        def record_pass(forward_batch: Any, _: Any) -> None:
            mode = forward_batch.forward_mode
            if mode.is_decode():
                self.step_passes |= Passes.DRAFT
            elif mode.is_draft_extend_v2():
                self.step_passes |= Passes.DRAFT_EXTEND

        _observe_forward(runner, record_pass)

    def watch_block(self, runner: Any) -> None:
        """Watches the `ModelRunner` of a DFlash drafter, whose output says how a block ran."""

        def record_pass(_: Any, output: Any) -> None:
            if not output.can_run_graph:
                self.step_passes |= Passes.BLOCK

        _observe_forward(runner, record_pass)

    def count(self, eager: Passes) -> bool:
        """Counts a step's eager passes; returns whether one of them has graphs."""
        if not eager:
            return False
        fallbacks = eager & self.captured
        for pass_kind in fallbacks:
            self.counts[pass_kind] += 1
        return bool(fallbacks)

    def log(self) -> None:
        """Logs one line if passes have no graph in an engine with graphs."""
        if self.missing:
            _log.warning(
                "SGLang captured no graphs for %s: these passes run eagerly in every step; its log "
                "lines of the capture say why",
                ", ".join(self.missing.names),
            )

    def status(self) -> dict[str, Any]:
        """Returns the counters as plain values, by the passes' names."""
        steps = {name: self.counts[Passes[name.upper()]] for name in self.captured.names}
        return {"steps": steps, "without_graphs": self.missing.names}


def watch_drafters(worker: Any, states: Iterable[Any], dflash_drafter: Any | None) -> EagerPasses:
    """Makes the `EagerPasses` of an `EAGLEWorkerV2`.

    states: its `SpecRuntimeState` of every draft length.  dflash_drafter: its `DFlashDrafter`, if
    any.
    """
    states = tuple(states)
    active_block = (
        dflash_drafter if dflash_drafter is not None and not dflash_drafter.failure_reason else None
    )
    runner = worker.draft_worker.draft_runner
    has_chain = dflash_drafter is None or dflash_drafter.runner is not runner
    executed = Passes.VERIFICATION
    captured = _passes_if(any(state.target_graph_runner for state in states), Passes.VERIFICATION)
    if has_chain:
        # A single draft token is an output of the preceding draft-extend.
        executed |= _passes_if(
            any(state.speculative_num_steps > 1 for state in states), Passes.DRAFT
        )
        executed |= Passes.DRAFT_EXTEND
        captured |= _passes_if(any(state.cuda_graph_runner for state in states), Passes.DRAFT)
        has_extend_graphs = any(state.cuda_graph_runner_for_draft_extend for state in states)
        captured |= _passes_if(has_extend_graphs, Passes.DRAFT_EXTEND)
    if active_block is not None:
        executed |= Passes.BLOCK
        block_graphs = getattr(active_block.runner.decode_cuda_graph_runner, "capture_bs", None)
        captured |= _passes_if(bool(block_graphs), Passes.BLOCK)
    # An engine without any graphs was started that way, so no graph counts as missing.
    missing = executed & ~captured if captured & Passes.VERIFICATION else NO_PASSES
    eager_passes = EagerPasses(captured if captured & Passes.VERIFICATION else NO_PASSES, missing)
    if eager_passes.captured:
        if has_chain:
            eager_passes.watch_chain(runner)
        if active_block is not None:
            eager_passes.watch_block(active_block.runner)
    return eager_passes


def _passes_if(condition: bool, passes: Passes) -> Passes:
    return passes if condition else NO_PASSES


def _observe_forward(runner: Any, record_pass: Callable[[Any, Any], None]) -> None:
    """Calls `record_pass` with the batch and the output after each pass of a `ModelRunner`."""
    original = runner.forward

    def forward(forward_batch: Any, *arguments: Any, **named: Any) -> Any:
        output = original(forward_batch, *arguments, **named)
        record_pass(forward_batch, output)
        return output

    runner.forward = forward
