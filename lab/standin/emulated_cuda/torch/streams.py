"""Streams, events, and graphs of the emulated device.

Whatever a stream is given has run when the call returns, so an event has occurred as soon as it is
recorded.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Final, Self

import torch
from cpu_graphs import graph

from emulated_cuda.torch import places, waits


class Event:
    """Takes the place of `torch.cuda.Event`."""

    def __init__(self, *_: object, **__: object) -> None:
        self._recorded = 0.0

    def record(self, stream: object = None) -> None:
        """Notes the time."""
        self._recorded = time.perf_counter()

    def wait(self, stream: object = None) -> None:
        """Returns, as it has occurred."""

    def query(self) -> bool:
        """Whether it has occurred."""
        return True

    def synchronize(self) -> None:
        """Returns, as it has occurred."""

    def elapsed_time(self, later: Event) -> float:
        """Returns the milliseconds until a later event."""
        return (later._recorded - self._recorded) * 1e3


class Stream:
    """Takes the place of `torch.cuda.Stream`."""

    device = places.DEVICE
    device_index = 0
    priority = 0

    def __init__(self, *_: object, **__: object) -> None:
        # CUDA's handle of a stream; 0 is the default stream's.
        self.cuda_stream = id(self)

    @property
    def stream_id(self) -> int:
        """The handle, as torch's own streams name it."""
        return self.cuda_stream

    def wait_stream(self, other: object) -> None:
        """Returns, as what other streams were given has run."""

    def wait_event(self, event: object) -> None:
        """Returns, as the event has occurred."""

    def record_event(self, event: Event | None = None) -> Event:
        """Returns an event that has occurred."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether all of its work has run."""
        return True

    def synchronize(self) -> None:
        """Reports a wait, as torch does."""
        waits.synchronise()


class StreamContext:
    """Takes the place of `torch.cuda.StreamContext`."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self._previous: list[Stream] = []

    def __enter__(self) -> None:
        self._previous.append(_current.stream)
        if self.stream is not None:
            _current.stream = self.stream

    def __exit__(self, *_: object) -> None:
        _current.stream = self._previous.pop()


class DeviceContext:
    """Takes the place of `torch.cuda.device`: there is one device."""

    def __init__(self, device: Any = None) -> None:
        self.idx = self.prev_idx = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


default_stream: Final = Stream()
default_stream.cuda_stream = 0


class _Current(threading.local):
    stream = default_stream


_current: Final = _Current()


def use_stream(stream: Stream | None) -> StreamContext:
    """Takes the place of `torch.cuda.stream`."""
    return StreamContext(stream)


def current_stream(device: object = None) -> Stream:
    """Takes the place of `torch.cuda.current_stream`."""
    return _current.stream


def set_stream(stream: Stream) -> None:
    """Takes the place of `torch.cuda.set_stream`."""
    _current.stream = stream


class Graph(graph.Graph):
    """Takes the place of `torch.cuda.CUDAGraph`."""

    def replay(self) -> None:
        """Runs the recorded operators, which have their memory, and need not be told where."""
        with torch._C.DisableTorchFunction():
            super().replay()


class Capture(graph.capture):
    """Takes the place of `torch.cuda.graph`."""

    def __init__(self, cuda_graph: graph.Graph, pool: Any = None, stream: Any = None, **_: Any):  # noqa: ANN204
        super().__init__(cuda_graph)
        self._context = StreamContext(stream or Stream())

    def __enter__(self) -> None:
        self._context.__enter__()
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._context.__exit__()
