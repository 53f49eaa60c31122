"""Makes all ranks carry out rank 0's orders about a drafter's weights before the same step.

  rank 0     propose      a version is read, the trainer has answered, acceptance fell, ...
  engine                  broadcasts the order, in one list with the requests that came in
  all ranks  adopt        store the order
  all ranks  carry_out    as the next pass begins: call the order's handler, in order

Like plans (see ranks.py), orders travel with the engine's own broadcast, and are sent until rank 0
has adopted them.  A handler may run a collective, because every rank is in the same pass.  An
engine of one rank carries out an order as soon as it is proposed.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple


class OrderKind(IntEnum):
    """Kind of an order to all ranks."""

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
    """An order to all ranks.  number: ascending.  value: for example a version."""

    number: int
    kind: OrderKind
    value: int = 0


class Orders:
    """Keeps this rank's orders.  several: whether there are other ranks."""

    def __init__(self, *, several: bool = False) -> None:
        self._several = several
        self._obey: dict[OrderKind, Callable[[int], None]] = {}
        self._proposed: list[Order] = []
        self._adopted: list[Order] = []
        # Numbers of the last order that was proposed (on rank 0) and of the last one adopted.
        self._last = self._newest = 0

    @property
    def are_open(self) -> bool:
        """Whether an order that was proposed or adopted has not been carried out yet."""
        return bool(self._proposed or self._adopted)

    def register(self, kind: OrderKind, obey: Callable[[int], None]) -> None:
        """Registers the handler of a kind of order; `obey` is called with the order's value."""
        self._obey[kind] = obey

    def propose(self, kind: OrderKind, value: int = 0) -> None:
        """Proposes an order, on rank 0."""
        if not self._several:
            self._obey[kind](value)
            return
        self._last += 1
        self._proposed.append(Order(self._last, kind, value))

    def outgoing(self) -> list[Order]:
        """Returns the orders to broadcast; rank 0 calls it between two steps."""
        return list(self._proposed)

    def adopt(self, order: Order) -> None:
        """Stores, on every rank, an order from rank 0.

        An order that was adopted before is ignored.
        """
        if order.number <= self._newest:
            return
        self._newest = order.number
        self._proposed = [other for other in self._proposed if other.number > order.number]
        self._adopted.append(order)

    def carry_out(self) -> None:
        """Carries out the adopted orders; every rank calls it at the start of the same pass."""
        while self._adopted:
            order = self._adopted.pop(0)
            self._obey[order.kind](order.value)
