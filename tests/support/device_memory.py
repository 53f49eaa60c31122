"""What a piece of code allocates for tensors, at its peak."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Counts the memory that results of operations hold inside the block.

    bytes: the most that was held at once.  What an operation allocates for itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self._held = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        function: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs an operation and looks at what it returns."""
        given = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in given | self._known:
                    self._take(storage)
        return result

    def _take(self, storage: torch.UntypedStorage) -> None:
        place, size = storage._cdata, storage.nbytes()
        self._known.add(place)
        self._held += size
        self.bytes = max(self.bytes, self._held)
        weakref.finalize(storage, self._release, place, size)

    def _release(self, place: int, size: int) -> None:
        self._known.discard(place)
        self._held -= size
