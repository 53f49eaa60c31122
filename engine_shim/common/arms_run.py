"""Remembers what steps have run, for the report flags that compare a step with earlier ones."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from speculation.v1.engine_pb2 import StepReport

# Drafter, draft length, whether the drafter slept, and the batch.
Ran = tuple[int, int, bool, int]


class ArmsRun:
    """Remembers what an engine has run.  last: of the last step, None before the first one.

    graph_batch_sizes: ascending; a batch is padded to the next of them, and a larger batch has no
    graph.  Empty: the engine has no graphs.
    """

    def __init__(self, graph_batch_sizes: Sequence[int] = ()) -> None:
        self._sizes = tuple(graph_batch_sizes)
        # Every combination that has run, with its padded batch size.
        self._used: set[Ran] = set()
        self.last: Ran | None = None

    def change(self, ran: Ran, report: StepReport) -> None:
        """Flags the report of a step that differs from the previous one, and remembers the step."""
        last, self.last = self.last, ran
        if last is not None and last[:3] != ran[:3]:
            report.flags.switched = True
        shape = (*ran[:3], self.padded(ran[3]))
        if shape not in self._used:
            self._used.add(shape)
            report.flags.first_use = True

    def padded(self, batch_size: int) -> int:
        """Returns the batch size that the engine executes, padding included."""
        index = bisect_left(self._sizes, batch_size)
        return self._sizes[index] if index < len(self._sizes) else batch_size
