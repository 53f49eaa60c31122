"""Keeps step costs in order: more work never costs less, whatever was measured.

    C(d, B, gamma) <= C(d, B', gamma')   for gamma <= gamma' and B <= B'
    C(d, B, 0)     <= C(d', B', gamma')  for gamma' > 0 and B <= B', whichever drafters d and d' are

A step at gamma = 0 is the target's pass alone, and every other step contains that pass.  So the
gain of an arm over plain decoding, (1 + E) C(0) / C(gamma), never exceeds its acceptance length.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from controller.core.engine_spec import Arm


class CostOrder:
    """Orders `arms` by work, for tables of [arms, buckets] with ascending buckets."""

    def __init__(self, arms: Sequence[Arm]) -> None:
        drafters = dict.fromkeys(arm.drafter for arm in arms)
        self._off = np.array([i for i, arm in enumerate(arms) if arm.gamma == 0], dtype=np.int64)
        self._is_off = np.array([arm.gamma == 0 for arm in arms])
        self._drafting = np.array([i for i, arm in enumerate(arms) if arm.gamma], dtype=np.int64)
        # Of each drafter, its arms by ascending draft length.
        self._chains = [
            np.array(
                sorted(
                    (i for i, arm in enumerate(arms) if arm.drafter == drafter),
                    key=lambda i: arms[i].gamma,
                ),
                dtype=np.int64,
            )
            for drafter in drafters
        ]
        # Where the first of each of these costs no more than the second, all arms are in order.
        pairs = [(a, b) for chain in self._chains for a, b in pairwise(chain)]
        shortest = [next((i for i in chain if arms[i].gamma), None) for chain in self._chains]
        pairs += [(a, b) for a in self._off for b in shortest if b is not None]
        self._less, self._more = np.array(pairs, dtype=np.int64).reshape(-1, 2).T.copy()
        # [arms, arms]: the first costs no more than the second.
        self._below = np.array(
            [
                [
                    (a.drafter == b.drafter and a.gamma <= b.gamma)
                    or (a.gamma == 0 and b.gamma > 0)
                    for b in arms
                ]
                for a in arms
            ]
        )

    def lowered(
        self, table: NDArray[np.float64], *, over_batches: bool = True
    ) -> NDArray[np.float64]:
        """Returns the largest ordered table nowhere above this one; itself if it is in order.

        over_batches: False if the batches have different contexts, so that only arms are ordered.
        """
        found = table if self._are_arms_ordered(table) else self._ordered_arms(table)
        if over_batches and not _are_batches_ordered(found):
            found = np.minimum.accumulate(found[:, ::-1], axis=1)[:, ::-1]
        return found

    def is_ordered(self, table: NDArray[np.float64]) -> bool:
        """Returns whether a table is in order."""
        return self._are_arms_ordered(table) and _are_batches_ordered(table)

    def _are_arms_ordered(self, table: NDArray[np.float64]) -> bool:
        less, more = table.take(self._less, axis=0), table.take(self._more, axis=0)
        return not np.count_nonzero(more < less)

    def _ordered_arms(self, table: NDArray[np.float64]) -> NDArray[np.float64]:
        found = table.copy()
        for chain in self._chains:
            longest_first = chain[::-1]
            found[longest_first] = np.minimum.accumulate(table[longest_first], axis=0)
        if len(self._off) and len(self._drafting):
            least = found[self._drafting].min(axis=0)
            found[self._off] = np.minimum(found[self._off], least)
        return found

    def settled(self, table: NDArray[np.float64], seen: NDArray[np.int64]) -> NDArray[np.float64]:
        """Returns a table in order, in which the cells that were seen last moved least.

        seen: [arms, buckets] when each cell was seen last, 0: never.  The newest cell stays, and
        every older one moves between the newer cells that lie above and below it.
        """
        least = np.zeros_like(table)
        most = np.full_like(table, np.inf)
        arms, buckets = np.nonzero(seen)
        newest_first = np.argsort(-seen[arms, buckets], kind="stable")
        for i, j in zip(arms[newest_first].tolist(), buckets[newest_first].tolist(), strict=True):
            value = min(max(table[i, j], least[i, j]), most[i, j])
            above, below = self._below[i], self._below[:, i]
            least[above, j:] = np.maximum(least[above, j:], value)
            most[below, : j + 1] = np.minimum(most[below, : j + 1], value)
        # A table in order stays in order when it is cut to bounds that are in order.
        return np.clip(self.lowered(table), least, most)

    def next_to(self, seen: NDArray[np.bool_], sure: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Marks [arms] of every drafter up to the longest seen, and one more if that is sure."""
        found = np.zeros_like(seen)
        for chain in self._chains:
            ran = np.flatnonzero(seen[chain])
            longest = int(ran[-1]) if len(ran) else -1
            more = 1 if longest < 0 or sure[chain[longest]] or self._is_off[chain[longest]] else 0
            found[chain[: longest + 1 + more]] = True
        return found


def _are_batches_ordered(table: NDArray[np.float64]) -> bool:
    return not np.count_nonzero(table[:, 1:] < table[:, :-1])
