"""Remembers what steps have run, for the flags of a report that compare a step with others."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from speculation.v1.engine_pb2 import StepReport

# Drafter, draft length, whether the drafter slept, and the batch.
Ran = tuple[int, int, bool, int]


class ArmsRun:
    """Knows what an engine has run so far.  last: the last step, None before the first one.

    graph_batch_sizes: ascending; a batch is padded up to the next one, and a larger batch has no
    graph.  Empty: the engine has none.
    """

    def __init__(self, graph_batch_sizes: Sequence[int] = ()) -> None:
        self._sizes = tuple(graph_batch_sizes)
        # Every shape that has run, with its padded batch.
        self._used: set[Ran] = set()
        self.last: Ran | None = None

    def change(self, ran: Ran, report: StepReport) -> None:
        """Flags the report of a step that ran something else than the last one, which it is now."""
        last, self.last = self.last, ran
        if last is not None and last[:3] != ran[:3]:
            report.flags.switched = True
        shape = (*ran[:3], self.padded(ran[3]))
        if shape not in self._used:
            self._used.add(shape)
            report.flags.first_use = True

    def padded(self, batch_size: int) -> int:
        """Returns the batch that really runs."""
        index = bisect_left(self._sizes, batch_size)
        return self._sizes[index] if index < len(self._sizes) else batch_size
