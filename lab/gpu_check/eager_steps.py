"""Counts the steps that ran without their graph although one was captured for their batch size."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from speculation.v1 import engine_pb2


class EagerSteps:
    """Counts steps by arm.

    captured: ascending batch sizes with graphs.  prepared: what the engine says of each draft
    length; its largest_batch is None for all of `captured`.
    """

    def __init__(self, captured: Sequence[int], prepared: Mapping[str, Mapping[str, Any]]) -> None:
        self._largest = max(captured, default=0)
        self._prepared = prepared
        self._steps: Counter[tuple[str, int]] = Counter()
        self._eager: Counter[tuple[str, int]] = Counter()
        self._beyond: Counter[tuple[str, int]] = Counter()

    def add(self, reports: Iterable[engine_pb2.StepReport]) -> None:
        """Counts the steps of a play."""
        for report in reports:
            arm = (report.drafter if report.gamma else "eagle3", report.gamma)
            self._steps[arm] += 1
            if report.flags.eager_fallback:
                known = report.batch_size <= self._limit(report.gamma)
                (self._eager if known else self._beyond)[arm] += 1

    def document(self) -> dict[str, Any]:
        """Returns the counts as plain values; beyond: eager where nothing was captured."""
        return {
            "largest_batch": self._largest,
            "arms": [
                {
                    "drafter": arm[0],
                    "gamma": arm[1],
                    "steps": steps,
                    "eager_steps": self._eager[arm],
                    "beyond": self._beyond[arm],
                }
                for arm, steps in self._steps.items()
            ],
        }

    def _limit(self, gamma: int) -> int:
        limit = self._prepared.get(str(gamma), {}).get("largest_batch")
        return self._largest if limit is None else min(self._largest, int(limit))
