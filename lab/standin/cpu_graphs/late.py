"""Has the plugin's side streams run late, as on a GPU that has other work to do.

What runs on such a stream is recorded.  Until the stream's events have been asked for a number of
times, garbage is where its results belong; then it runs, on what its sources hold by then.  So what
reads a copy too early, or writes to its source before it was read, shows in the results.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from cpu_graphs import recorder

_PLUGIN = "/engine_shim/sglang/"


class Patcher(Protocol):
    """Sets attributes, as `setattr` and pytest's monkeypatch do."""

    def __call__(self, target: Any, name: str, value: Any, /) -> None:
        """Sets one attribute."""


class LateEvent:
    """Takes the place of `torch.cpu.Event`."""

    def __init__(self, stream: LateStream, place: int) -> None:
        self._stream, self._place = stream, place
        self._due = stream.query_count + stream.queries_until_due

    def query(self) -> bool:
        """Whether all that the stream was given before has run."""
        self._stream.query_count += 1
        if self._stream.query_count < self._due:
            return False
        self.synchronize()
        return True

    def synchronize(self) -> None:
        """Runs it, if it has not run."""
        self._stream.run(self._place)


class LateStream:
    """Takes the place of a stream of the plugin.

    queries_until_due: number of queries after which a new event has occurred.  query_count: queries
    so far.
    """

    def __init__(self, queries_until_due: int) -> None:
        self.queries_until_due, self.query_count = queries_until_due, 0
        self._nodes: deque[recorder.Node] = deque()
        self._has_waited = False
        self._submitted = self._completed = 0

    def wait_stream(self, _: object) -> None:
        """Notes the wait.  There is nothing to wait for: the work of other streams has run."""
        self._has_waited = True

    def record_event(self) -> LateEvent:
        """Returns the event of all work that was given so far."""
        return LateEvent(self, self._submitted)

    def submit(self, nodes: list[recorder.Node]) -> None:
        """Takes what is to run later.

        Raises RuntimeError if the stream has not waited for the steps' stream, which may not have
        written the sources or read the targets yet.
        """
        if not self._has_waited:
            raise RuntimeError("a side stream was given work without waiting for the steps' stream")
        self._has_waited = False
        for node in nodes:
            for tensor in node.outputs or node.arguments[:1]:
                tensor.fill_(recorder.garbage(tensor.dtype))
        self._nodes.extend(nodes)
        self._submitted += len(nodes)

    def run(self, place: int) -> None:
        """Runs what was given up to there, in order."""
        with torch.no_grad():
            while self._completed < place:
                self._nodes.popleft().run()
                self._completed += 1


def install(queries_until_due: int, set_attribute: Patcher = setattr) -> None:
    """Has streams that the plugin makes from now on run late, and the plugin expect that of a CPU.

    queries_until_due: how often the events of a stream are asked for until a new one has occurred.
    """
    from engine_shim.sglang.api import transfer

    cpu: Any = torch.cpu
    stream_of, context_of = cpu.Stream, cpu.stream

    def make_stream(*arguments: Any, **keywords: Any) -> Any:
        if _PLUGIN in sys._getframe(1).f_code.co_filename:
            return LateStream(queries_until_due)
        return stream_of(*arguments, **keywords)

    def open_stream(stream: Any) -> AbstractContextManager[Any]:
        if isinstance(stream, LateStream):
            return _record_work(stream)
        context_manager: AbstractContextManager[Any] = context_of(stream)
        return context_manager

    set_attribute(cpu, "Stream", make_stream)
    set_attribute(cpu, "stream", open_stream)
    set_attribute(transfer, "is_asynchronous", lambda _: True)


@contextmanager
def _record_work(stream: LateStream) -> Iterator[None]:
    with recorder.Recording() as recording:
        yield
    stream.submit(recording.nodes)
