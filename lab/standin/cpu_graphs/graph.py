"""Graphs that replay a recording on the memory of its capture, strictly.

A replay sees no scalar and no buffer that has changed since the capture, because it runs no Python
of the model.  It is stricter than a GPU in two ways: memory that the graph reads must be at the
same address and still have an owner, and intermediate results are overwritten afterwards, as
another graph in the same memory pool may do.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import torch
from sgl_kernel import _memo
from torch import Tensor

from cpu_graphs import recorder
from cpu_graphs.recorder import CaptureError, Recording

# Aliases that all graphs together hold of a storage, by its address.
_alias_counts: Final[Counter[int]] = Counter()


class GraphMemoryError(RuntimeError):
    """A graph was replayed whose memory was freed or moved since its capture."""


class Graph:
    """Takes the place of `torch.cuda.CUDAGraph`."""

    def __init__(self, *_: object, **__: object) -> None:
        self._recording: Recording | None = None
        # Address of each storage that the graph only reads or that outlives it -> its memory.
        self._inputs: dict[int, tuple[int, Tensor]] = {}
        self._intermediates: list[Tensor] | None = None

    def capture(self, recording: Recording) -> None:
        """Takes a finished recording."""
        self._recording = recording
        for (storage, *_), alias in recording.aliases.items():
            _alias_counts[storage] += 1
            if storage not in recording.allocated:
                self._inputs[storage] = (alias.untyped_storage().data_ptr(), alias)

    def replay(self) -> None:
        """Runs the recorded operators.  Raises CaptureError, GraphMemoryError."""
        recording = self._recording
        if recording is None:
            raise CaptureError("a graph was replayed that was never captured")
        if recorder.current is not None:
            raise CaptureError("a graph was replayed inside a capture")
        self._check_inputs()
        # The memory of the inputs has changed without a change of the tensors' versions.
        _memo.begin_generation()
        with torch.no_grad():
            for node in recording.nodes:
                node.run()
            _memo.begin_generation()
            self._overwrite_intermediates(recording)

    def reset(self) -> None:
        """Forgets the recording and gives up its memory."""
        if self._recording is not None:
            for storage, *_ in self._recording.aliases:
                _release(storage)
            for tensor in self._intermediates or ():
                _release(tensor.untyped_storage()._cdata)
        self._recording, self._inputs, self._intermediates = None, {}, None

    def __del__(self) -> None:
        # An address that is no longer counted may be that of new memory.
        self.reset()

    def pool(self) -> tuple[int, int]:
        """Returns the handle of the one memory pool."""
        return (0, 0)

    def _check_inputs(self) -> None:
        for storage, (address, alias) in self._inputs.items():
            if not _has_owner(storage):
                raise GraphMemoryError(
                    f"a graph reads a tensor of shape {list(alias.shape)} and type {alias.dtype} "
                    "that was freed after the capture: keep it as long as the graph"
                )
            if alias.untyped_storage().data_ptr() != address:
                raise GraphMemoryError(
                    f"a graph reads a tensor of shape {list(alias.shape)} and type {alias.dtype} "
                    "whose memory was moved after the capture"
                )

    def _overwrite_intermediates(self, recording: Recording) -> None:
        if self._intermediates is None:
            aliases = {storage: alias for (storage, *_), alias in recording.aliases.items()}
            # Only now: what a capture returns has its owner once the capture is over.
            self._intermediates = [
                _whole_storage(alias)
                for storage, alias in aliases.items()
                if storage in recording.allocated and not _has_owner(storage)
            ]
        for tensor in self._intermediates:
            tensor.fill_(recorder.garbage(tensor.dtype))


class capture:  # noqa: N801 - named like torch.cuda.graph
    """Takes the place of `torch.cuda.graph`."""

    def __init__(self, cuda_graph: Graph, *_: object, **__: object) -> None:
        self._graph, self._recording = cuda_graph, Recording()

    def __enter__(self) -> None:
        self._recording.__enter__()

    def __exit__(self, *error: object) -> None:
        self._recording.__exit__(*error)
        if error[0] is None:
            self._graph.capture(self._recording)


def is_capturing() -> bool:
    """Takes the place of `torch.cuda.is_current_stream_capturing`."""
    return recorder.current is not None


def _release(storage: int) -> None:
    _alias_counts[storage] -= 1
    if not _alias_counts[storage]:
        del _alias_counts[storage]


def _has_owner(storage: int) -> bool:
    """Whether anything but graphs holds a storage.

    torch's own wrapper, which asking a tensor for its storage has made, counts as one more.
    """
    return torch._C._storage_Use_Count(storage) > _alias_counts[storage] + 1


def _whole_storage(alias: Tensor) -> Tensor:
    storage = alias.untyped_storage()
    _alias_counts[storage._cdata] += 1
    size = storage.nbytes() // alias.itemsize
    with torch.inference_mode(False):
        return torch.empty(0, dtype=alias.dtype).set_(storage, 0, (size,), (1,))
