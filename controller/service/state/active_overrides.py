"""Describes overrides in force, and notifies clients that watch their changes."""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from controller.core.errors import SpeculationError
from controller.core.planning.overrides import Override
from controller.service.net.errors import SlowClientError

# Unread changes of a watch, at most.
_UNREAD_CHANGES_MAX = 1000


@dataclass(frozen=True, slots=True)
class ActiveOverride:
    """Holds an override in force.

    deadline: the end in monotonic seconds, inf without an end.  created_at: Unix seconds.
    origin: path of the policy file that it comes from; empty for one that an operator has set.
    """

    override: Override
    etag: str
    deadline: float
    created_at: float
    origin: str = ""

    @property
    def remaining_seconds(self) -> float | None:
        """Returns the time left; None without an end."""
        return None if math.isinf(self.deadline) else max(0.0, self.deadline - time.monotonic())


@dataclass(frozen=True, slots=True)
class OverrideChange:
    """Describes a change for a watch.  kind: "present", "set" or "ended"."""

    kind: str
    active: ActiveOverride


# None: the sidecar stops.
_Queue: TypeAlias = "asyncio.Queue[OverrideChange | SpeculationError | None]"


class OverrideWatchers:
    """Notifies every watch of every change."""

    def __init__(self) -> None:
        self._queues: set[_Queue] = set()

    @contextlib.asynccontextmanager
    async def watch(
        self, present: Iterable[ActiveOverride]
    ) -> AsyncIterator[AsyncIterator[OverrideChange]]:
        """Yields the overrides in force, then every change, until `close`.

        Raises SlowClientError if the reader falls behind.
        """
        queue: _Queue = asyncio.Queue(_UNREAD_CHANGES_MAX)
        for active in present:
            queue.put_nowait(OverrideChange("present", active))
        self._queues.add(queue)
        try:
            yield _changes(queue)
        finally:
            self._queues.discard(queue)

    def notify(self, change: OverrideChange) -> None:
        """Notifies all watches of a change; a watch that is read too slowly ends with an error."""
        for queue in list(self._queues):
            try:
                queue.put_nowait(change)
            except asyncio.QueueFull:
                self._queues.discard(queue)
                queue.get_nowait()
                queue.put_nowait(
                    SlowClientError("too many unread changes: read faster, or watch again")
                )

    def close(self) -> None:
        """Ends every watch."""
        for queue in self._queues:
            with contextlib.suppress(asyncio.QueueFull):
                queue.put_nowait(None)


async def _changes(queue: "_Queue") -> AsyncIterator[OverrideChange]:
    while (change := await queue.get()) is not None:
        if isinstance(change, SpeculationError):
            raise change
        yield change
