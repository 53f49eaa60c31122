"""Keeps what every layer of a forward pass would work out again."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

Derived = TypeVar("Derived")

# Counts the replays of graphs, which write into memory through tensors of their own.
_generation = 0


def begin_generation() -> None:
    """Has every kept value derived again."""
    global _generation  # noqa: PLW0603 - what a replay writes, any memo may have read
    _generation += 1


class Memo(Generic[Derived]):
    """Keeps the last derived value while everything it was made from stays the same.

    Small inputs are compared by value with private copies: they may be changed in place between
    calls, and tensors made in inference mode carry no version counter that would show it.  A large
    table is recognised by identity and version counter, which every in-place torch operation
    raises, in inference mode too; a table without a counter is never remembered.  Only a write
    behind torch's back (numpy, a raw pointer, ``.data``) would go unseen, and SGLang fills the
    tables used here, slots and rotary factors, with ordinary torch operations.  A graph's replay
    sees the tables through aliases without a common counter, so nothing is kept across its ends.
    """

    def __init__(self) -> None:
        self._table: Tensor | None = None
        self._key: tuple[int, int, tuple[int, ...]] = (0, 0, ())
        self._inputs: tuple[Tensor | None, ...] = ()
        self._derived: Derived

    def get(
        self,
        table: Tensor,
        inputs: tuple[Tensor | None, ...],
        options: tuple[int, ...],
        make: Callable[[], Derived],
    ) -> Derived:
        """Returns the kept value, or that of ``make()`` if another argument changed."""
        if table.is_inference():
            return make()
        key = (_generation, table._version, options)
        if (
            table is not self._table
            or key != self._key
            or not all(map(_is_same, inputs, self._inputs))
        ):
            copies = tuple(None if tensor is None else tensor.clone() for tensor in inputs)
            self._derived = make()
            self._table, self._key, self._inputs = table, key, copies
        return self._derived


def _is_same(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return first.dtype == second.dtype and torch.equal(first, second)
