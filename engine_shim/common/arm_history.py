"""Remembers what steps have run, for the report flags that compare a step with earlier ones."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from speculation.v1.engine_pb2 import StepReport

# Drafter, draft length, whether the drafter slept, and the batch.
ExecutedArm = tuple[int, int, bool, int]


class ArmHistory:
    """Remembers what an engine has run.  last_arm: of the last step, None before the first one.

    graph_batch_sizes: ascending; a batch is padded to the next of them, and a larger batch has no
    graph.  Empty: the engine has no graphs.
    """

    def __init__(self, graph_batch_sizes: Sequence[int] = ()) -> None:
        self._graph_batch_sizes = tuple(graph_batch_sizes)
        # Every combination that has run, with its padded batch size.
        self._seen_arms: set[ExecutedArm] = set()
        self.last_arm: ExecutedArm | None = None

    def flag_change(self, executed_arm: ExecutedArm, report: StepReport) -> None:
        """Flags the report of a step that differs from the previous one, and remembers the step."""
        previous, self.last_arm = self.last_arm, executed_arm
        if previous is not None and previous[:3] != executed_arm[:3]:
            report.flags.switched = True
        padded_arm = (*executed_arm[:3], self.padded_batch_size(executed_arm[3]))
        if padded_arm not in self._seen_arms:
            self._seen_arms.add(padded_arm)
            report.flags.first_use = True

    def padded_batch_size(self, batch_size: int) -> int:
        """Returns the batch size that the engine executes, padding included."""
        index = bisect_left(self._graph_batch_sizes, batch_size)
        return (
            self._graph_batch_sizes[index] if index < len(self._graph_batch_sizes) else batch_size
        )
