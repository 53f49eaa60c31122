"""Runs work on a thread during a `with` block: load, an engine's steps, a watch."""

import threading
from abc import ABC, abstractmethod
from typing import Self


class BackgroundThread(ABC):
    """Runs `_run` on a thread while the context is open.

    name: of the thread.  join_seconds: how long leaving waits for it; None: until it has ended.
    """

    def __init__(self, name: str, join_seconds: float | None = None) -> None:
        self._stop = threading.Event()
        self._join_seconds = join_seconds
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(self._join_seconds)

    @abstractmethod
    def _run(self) -> None:
        """Ends soon after `_stop` is set."""
