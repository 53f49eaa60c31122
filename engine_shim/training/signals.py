"""Training signals on disk: what the target said at positions that an engine has served.

A signal is a run of consecutive positions of one request.  The store is a folder of safetensors
files, one signal each, that any process may read while an engine writes: a file appears whole or
not at all (written aside, then renamed), and once the store is larger than it may be the oldest
files go.  What cannot be read is named, never guessed at.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

FORMAT: Final = "speculation-signals-2"
_SUFFIX: Final = ".safetensors"
_ASIDE: Final = ".part"
# Left aside by a writer that was killed, if older.
_ABANDONED_SECONDS: Final = 600.0
_TENSORS: Final = ("tokens", "features", "top_tokens", "top_logs")
_FINAL: Final = "final"
# By name: dtype, and dimensions.
_KINDS: Final = {
    "tokens": (torch.int64, 1),
    "features": (torch.bfloat16, 2),
    "top_tokens": (torch.int32, 2),
    "top_logs": (torch.float32, 2),
    _FINAL: (torch.bfloat16, 2),
}
_CLOSE_SECONDS: Final = 10.0

_log = logging.getLogger(__name__)


class SignalError(ValueError):
    """A file that is no signal; the message names it and says why."""


@dataclass(frozen=True, slots=True)
class Signal:
    """Consecutive positions of one request, n of them.

    tokens: int64 [n].  features: bfloat16 [n, width], the target's hidden states there that the
    drafter reads.  top_tokens: int32 [n, top], the target's likeliest successors of each, and
    top_logs: float32 [n, top], their log-probabilities (nats).  start: position of the first one in
    its request.  accepted, tried: drafts that were accepted, of those whose turn came (the accepted
    ones and the first refused of each step).  final: bfloat16 [n, hidden], the target's last hidden
    states after its norm, where they were asked for.
    """

    tokens: Tensor
    features: Tensor
    top_tokens: Tensor
    top_logs: Tensor
    start: int
    accepted: int
    tried: int
    final: Tensor | None = None

    def __post_init__(self) -> None:
        rows = {name: part.shape[0] for name, part in self.tensors.items()}
        if len(set(rows.values())) != 1 or not rows["tokens"]:
            raise SignalError(f"a signal needs as many rows everywhere, and some: {rows}")
        if self.top_tokens.shape != self.top_logs.shape:
            raise SignalError("a signal needs a log-probability of every likeliest token")
        if min(self.start, self.accepted, self.tried - self.accepted) < 0:
            raise SignalError(
                f"start {self.start}, {self.accepted} of {self.tried} drafts: cannot be"
            )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those that there are, by name."""
        found = {name: getattr(self, name) for name in (*_TENSORS, _FINAL)}
        return {name: part for name, part in found.items() if part is not None}

    def encoded(self) -> bytes:
        """The file's content."""
        tensors = {name: part.contiguous() for name, part in self.tensors.items()}
        numbers = {name: str(getattr(self, name)) for name in ("start", "accepted", "tried")}
        content: bytes = save(tensors, {"format": FORMAT, **numbers})
        return content


def load(path: Path) -> Signal:
    """Raises SignalError, FileNotFoundError for one that has gone meanwhile."""
    if not path.exists():
        raise FileNotFoundError(path)
    try:
        return _decoded(path)
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise SignalError(f"{path}: {type(error).__name__}: {error}") from error


def _decoded(path: Path) -> Signal:
    with safe_open(path, "pt") as file:
        facts = file.metadata() or {}
        if facts.get("format") != FORMAT:
            raise SignalError(f"format {facts.get('format')!r}, not {FORMAT}")
        there = (*_TENSORS, _FINAL) if _FINAL in file.keys() else _TENSORS  # noqa: SIM118
        tensors: dict[str, Any] = {name: file.get_tensor(name) for name in there}
        numbers: dict[str, Any] = {
            name: int(facts[name]) for name in ("start", "accepted", "tried")
        }
    _check(tensors)
    return Signal(**tensors, **numbers)


def _check(tensors: Mapping[str, Tensor]) -> None:
    for name, part in tensors.items():
        kind, dimensions = _KINDS[name]
        if part.dtype is not kind or part.dim() != dimensions:
            raise SignalError(f"{name}: {part.dtype} in {part.dim()} dimensions")
        if part.is_floating_point():
            # The log-probability of what cannot be is minus infinity.
            least = torch.finfo(kind).min if name != "top_logs" else -torch.inf
            good = (part >= least) & (part <= torch.finfo(kind).max)
        else:
            good = part >= 0
        if not bool(good.all()):
            raise SignalError(f"{name} holds what is no number, or no token")
    if not bool(tensors["top_logs"].isfinite().any(dim=-1).all()):
        raise SignalError("top_logs has a position after which nothing can come")


class SignalStore:
    """A folder of at most `most_bytes`; one writer of a name prefix, any number of readers."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        """Makes the folder if need be.  Raises OSError."""
        self.folder = folder
        self._most = most_bytes
        self._written = 0
        folder.mkdir(parents=True, exist_ok=True)
        for aside in folder.glob(f"*{_ASIDE}"):
            if time.time() - aside.stat().st_mtime > _ABANDONED_SECONDS:
                aside.unlink(missing_ok=True)

    def add(self, signal: Signal) -> Path:
        """Writes one; the oldest go until there is room.  Raises OSError, and has kept nothing."""
        content = signal.encoded()
        self._make_room(len(content))
        self._written += 1
        # Names sort by age, and no two writers share one.
        name = f"{time.time_ns():020d}-{os.getpid()}-{self._written}"
        aside, path = self.folder / (name + _ASIDE), self.folder / (name + _SUFFIX)
        try:
            with aside.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            aside.rename(path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise
        return path

    def paths(self) -> list[Path]:
        """All signals, the oldest first."""
        return sorted(self.folder.glob(f"*{_SUFFIX}"))

    def read(self) -> Iterator[Signal]:
        """All that can be read, the oldest first; what cannot be is logged and passed over."""
        for path in self.paths():
            try:
                yield load(path)
            except FileNotFoundError:
                continue
            except SignalError as error:
                _log.warning("passed over: %s", error)

    def _make_room(self, needed: int) -> None:
        if needed > self._most:
            raise OSError(f"a signal of {needed} bytes; the store may hold {self._most}")
        sizes = deque[tuple[Path, int]]()
        for path in self.paths():
            try:
                sizes.append((path, path.stat().st_size))
            except FileNotFoundError:
                continue
        held = sum(size for _, size in sizes)
        while sizes and held + needed > self._most:
            path, size = sizes.popleft()
            path.unlink(missing_ok=True)
            held -= size


@dataclass(slots=True)
class WriterCounters:
    """signals, positions: written.  dropped: signals that found the queue full or the disk failing.

    state: what it does, or why it does nothing.
    """

    signals: int = 0
    positions: int = 0
    dropped: int = 0
    state: str = "ready"


class SignalWriter:
    """Writes on a thread of its own; `put` never waits."""

    def __init__(self, store: SignalStore, most_waiting: int = 64) -> None:
        self.counters = WriterCounters()
        self._store = store
        self._queue: queue.Queue[Signal | None] = queue.Queue(most_waiting)
        self._thread = threading.Thread(target=self._run, name="speculation-signals", daemon=True)
        self._thread.start()

    def put(self, signal: Signal) -> bool:
        """False, and the signal is lost and counted, while too many wait."""
        try:
            self._queue.put_nowait(signal)
        except queue.Full:
            self.counters.dropped += 1
            return False
        return True

    @property
    def waiting(self) -> int:
        """Signals that were taken and are neither written nor dropped yet."""
        return self._queue.unfinished_tasks

    def close(self) -> None:
        """Writes what waits, for some seconds at most, and ends."""
        try:
            self._queue.put(None, timeout=_CLOSE_SECONDS)
        except queue.Full:
            return
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while (signal := self._queue.get()) is not None:
            try:
                self._store.add(signal)
            except OSError as error:
                self.counters.dropped += 1
                if self.counters.state == "ready":
                    _log.warning("training signals cannot be written: %s", error)
                self.counters.state = f"failing: {error}"
            else:
                self.counters.state = "ready"
                self.counters.signals += 1
                self.counters.positions += len(signal.tokens)
            self._queue.task_done()
