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
        return [str(one.name).lower() for one in self]


NO_PASSES = Passes(0)


@dataclass(slots=True)
class EagerPasses:
    """Watches the drafters of one engine and counts its eager passes.

    captured: the passes that have graphs.  missing: the passes that the engine runs without having
    graphs for them; they are eager in every step, so the step's cost includes that.  counts: steps
    with an eager pass of a kind that has graphs.  seen: the drafters' eager passes of the current
    step; the caller clears it before each step.
    """

    captured: Passes = NO_PASSES
    missing: Passes = NO_PASSES
    counts: Counter[Passes] = field(default_factory=Counter)
    seen: Passes = field(default=NO_PASSES, init=False)

    def watch_chain(self, runner: Any) -> None:
        """Watches the `ModelRunner` of an EAGLE drafter.

        Graphs are executed without a call of its `forward`.  So `forward` is called for eager
        passes only, and for prefills and catch-ups, which have no graph by design.
        """

        def note(forward_batch: Any, _: Any) -> None:
            mode = forward_batch.forward_mode
            if mode.is_decode():
                self.seen |= Passes.DRAFT
            elif mode.is_draft_extend_v2():
                self.seen |= Passes.DRAFT_EXTEND

        _after_forward(runner, note)

    def watch_block(self, runner: Any) -> None:
        """Watches the `ModelRunner` of a DFlash drafter, whose output says how a block ran."""

        def note(_: Any, output: Any) -> None:
            if not output.can_run_graph:
                self.seen |= Passes.BLOCK

        _after_forward(runner, note)

    def count(self, eager: Passes) -> bool:
        """Counts a step's eager passes; returns whether one of them has graphs."""
        if not eager:
            return False
        fallbacks = eager & self.captured
        for one in fallbacks:
            self.counts[one] += 1
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


def watch(worker: Any, states: Iterable[Any], block: Any | None) -> EagerPasses:
    """Makes the `EagerPasses` of an `EAGLEWorkerV2`.

    states: its `SpecRuntimeState` of every draft length.  block: its `DFlashDrafter`, if any.
    """
    states = tuple(states)
    drafts = block if block is not None and not block.over else None
    runner = worker.draft_worker.draft_runner
    has_chain = block is None or block.runner is not runner
    runs = Passes.VERIFICATION
    captured = _if(any(state.target_graph_runner for state in states), Passes.VERIFICATION)
    if has_chain:
        # A single draft token is an output of the preceding draft-extend.
        runs |= _if(any(state.speculative_num_steps > 1 for state in states), Passes.DRAFT)
        runs |= Passes.DRAFT_EXTEND
        captured |= _if(any(state.cuda_graph_runner for state in states), Passes.DRAFT)
        extends = any(state.cuda_graph_runner_for_draft_extend for state in states)
        captured |= _if(extends, Passes.DRAFT_EXTEND)
    if drafts is not None:
        runs |= Passes.BLOCK
        graphs = getattr(drafts.runner.decode_cuda_graph_runner, "capture_bs", None)
        captured |= _if(bool(graphs), Passes.BLOCK)
    # An engine without any graphs was started that way, so no graph counts as missing.
    missing = runs & ~captured if captured & Passes.VERIFICATION else NO_PASSES
    found = EagerPasses(captured if captured & Passes.VERIFICATION else NO_PASSES, missing)
    if found.captured:
        if has_chain:
            found.watch_chain(runner)
        if drafts is not None:
            found.watch_block(drafts.runner)
    return found


def _if(condition: bool, found: Passes) -> Passes:
    return found if condition else NO_PASSES


def _after_forward(runner: Any, note: Callable[[Any, Any], None]) -> None:
    """Calls `note` with the batch and the output after each pass of a `ModelRunner`."""
    original = runner.forward

    def forward(forward_batch: Any, *arguments: Any, **named: Any) -> Any:
        output = original(forward_batch, *arguments, **named)
        note(forward_batch, output)
        return output

    runner.forward = forward
