"""Makes all ranks carry out rank 0's orders about a drafter's weights before the same step.

  rank 0     propose      a version is read, the trainer has answered, acceptance fell, ...
  engine                  broadcasts the order, in one list with the requests that came in
  all ranks  adopt        store the order
  all ranks  execute_adopted    as the next pass begins: call the order's handler, in order

Like plans (see ranks.py), orders travel with the engine's own broadcast, and are sent until rank 0
has adopted them.  A handler may run a collective, because every rank is in the same pass.  An
engine of one rank carries out an order as soon as it is proposed.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple


class RankCommandKind(IntEnum):
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


class RankCommand(NamedTuple):
    """An order to all ranks.  sequence_number: ascending.  value: for example a version."""

    sequence_number: int
    kind: RankCommandKind
    value: int = 0


class RankCommands:
    """Keeps this rank's orders.  has_other_ranks: whether there are any."""

    def __init__(self, *, has_other_ranks: bool = False) -> None:
        self._has_other_ranks = has_other_ranks
        self._handlers: dict[RankCommandKind, Callable[[int], None]] = {}
        self._proposed: list[RankCommand] = []
        self._adopted: list[RankCommand] = []
        # Numbers of the last order that was proposed (on rank 0) and of the last one adopted.
        self._last_proposed = self._last_adopted = 0

    @property
    def has_pending(self) -> bool:
        """Whether an order that was proposed or adopted has not been carried out yet."""
        return bool(self._proposed or self._adopted)

    def register(self, kind: RankCommandKind, handler: Callable[[int], None]) -> None:
        """Registers the handler of a kind of order; `handler` is called with the order's value."""
        self._handlers[kind] = handler

    def propose(self, kind: RankCommandKind, value: int = 0) -> None:
        """Proposes an order, on rank 0."""
        if not self._has_other_ranks:
            self._handlers[kind](value)
            return
        self._last_proposed += 1
        self._proposed.append(RankCommand(self._last_proposed, kind, value))

    def outgoing_commands(self) -> list[RankCommand]:
        """Returns the orders to broadcast; rank 0 calls it between two steps."""
        return list(self._proposed)

    def adopt(self, command: RankCommand) -> None:
        """Stores, on every rank, an order from rank 0.

        An order that was adopted before is ignored.
        """
        if command.sequence_number <= self._last_adopted:
            return
        self._last_adopted = command.sequence_number
        self._proposed = [
            proposed
            for proposed in self._proposed
            if proposed.sequence_number > command.sequence_number
        ]
        self._adopted.append(command)

    def execute_adopted(self) -> None:
        """Carries out the adopted orders; every rank calls it at the start of the same pass."""
        while self._adopted:
            command = self._adopted.pop(0)
            self._handlers[command.kind](command.value)
