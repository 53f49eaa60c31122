"""Has all ranks carry out before the same step what rank 0 has decided about a drafter's weights.

  rank 0     propose      a version is read, the trainer has answered, acceptance fell, ...
  engine                  broadcasts it, in one list with the requests that came in
  all ranks  adopt        note it down
  all ranks  carry_out    as the next pass begins: call what is registered for it, in order

As plans do (see ranks.py), orders travel with the engine's own broadcast, and are sent until rank 0
has adopted them.  What is registered may be a collective, since every rank is in the same pass.  An
engine of one rank carries an order out at once, as it is proposed.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple


class OrderKind(IntEnum):
    """Names what all ranks have to do."""

    # A trainer's versions.
    READ = 1
    SERVE = 2
    # Online updates.
    LAND = 10
    KEEP = 11
    RESTORE = 12
    SHARE = 13
    END = 14
    ADOPT = 15


class Order(NamedTuple):
    """Holds an order.  number: counts up.  value: a version, say."""

    number: int
    kind: OrderKind
    value: int = 0


class Orders:
    """Keeps this rank's orders.  several: there are other ranks."""

    def __init__(self, *, several: bool = False) -> None:
        self._several = several
        self._obey: dict[OrderKind, Callable[[int], None]] = {}
        self._proposed: list[Order] = []
        self._adopted: list[Order] = []
        # Of the last order that was proposed, on rank 0, and that was adopted.
        self._last = self._newest = 0

    @property
    def are_open(self) -> bool:
        """Whether something that was proposed, or adopted, is yet to be carried out."""
        return bool(self._proposed or self._adopted)

    def register(self, kind: OrderKind, obey: Callable[[int], None]) -> None:
        """Registers what an order means to this rank; `obey` is called with its value."""
        self._obey[kind] = obey

    def propose(self, kind: OrderKind, value: int = 0) -> None:
        """Proposes an order, on rank 0."""
        if not self._several:
            self._obey[kind](value)
            return
        self._last += 1
        self._proposed.append(Order(self._last, kind, value))

    def outgoing(self) -> list[Order]:
        """Returns what has to reach all ranks; rank 0 calls it between two steps."""
        return list(self._proposed)

    def adopt(self, order: Order) -> None:
        """Notes down, on every rank, what rank 0 sent.

        An order that was adopted before is ignored.
        """
        if order.number <= self._newest:
            return
        self._newest = order.number
        self._proposed = [other for other in self._proposed if other.number > order.number]
        self._adopted.append(order)

    def carry_out(self) -> None:
        """Carries out what was adopted; every rank calls it as the same pass begins."""
        while self._adopted:
            order = self._adopted.pop(0)
            self._obey[order.kind](order.value)
