"""Stores training signals on disk: the target's outputs at positions that an engine has served.

A signal has consecutive positions of one request: the end of its prompt, if the engine computed it
while it collected signals, and verified positions.

The store is a folder of safetensors files, one for each signal.  Any process may read it while an
engine writes, because a file is written under a temporary name and then renamed.  If the store
exceeds its limit, the oldest files are deleted.  A file that cannot be read is reported and
skipped.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

FORMAT: Final = "speculation-signals-3"
# The formats that are read.  The older one has no context.
_FORMATS: Final = (FORMAT, "speculation-signals-2")
_SUFFIX: Final = ".safetensors"
_PARTIAL_SUFFIX: Final = ".part"
# Older temporary files are those of a killed writer.
_ABANDONED_SECONDS: Final = 600.0
_TENSOR_FIELDS: Final = ("tokens", "features", "top_tokens", "top_logs")
_FINAL_FIELD: Final = "final"
_NUMBER_FIELDS: Final = ("start", "accepted", "tried")
_CONTEXT_FIELD: Final = "context"
# By name: dtype, and dimensions.
_TENSOR_TYPES: Final = {
    "tokens": (torch.int64, 1),
    "features": (torch.bfloat16, 2),
    "top_tokens": (torch.int32, 2),
    "top_logs": (torch.float32, 2),
    _FINAL_FIELD: (torch.bfloat16, 2),
}
_CLOSE_SECONDS: Final = 10.0

_log = logging.getLogger(__name__)


class SignalError(ValueError):
    """A file is not a valid signal; the message names it and says why."""


@dataclass(frozen=True, slots=True)
class Signal:
    """Consecutive positions of one request, n of them.

    tokens: int64 [n].  features: bfloat16 [n, width], the target's hidden states that the drafter
    reads.  context: number of leading positions from the prompt, which have no logits; m = n -
    context verified positions follow.  top_tokens: int32 [m, top], the target's likeliest
    successors of each verified position, and top_logs: float32 [m, top], their log-probabilities
    (nats).  start: position of the first token in its request.  accepted, tried: number of accepted
    drafts, and of tested ones (the accepted ones and the first rejected one of each step).  final:
    bfloat16 [n, hidden], the target's last hidden states after its norm, if they are collected.
    """

    tokens: Tensor
    features: Tensor
    top_tokens: Tensor
    top_logs: Tensor
    start: int
    accepted: int
    tried: int
    final: Tensor | None = None
    context: int = 0

    def __post_init__(self) -> None:
        rows = {name: part.shape[0] for name, part in self.tensors.items()}
        verified = {rows.pop("top_tokens") + self.context, rows.pop("top_logs") + self.context}
        if len({*rows.values(), *verified}) != 1 or not 0 <= self.context < rows["tokens"]:
            raise SignalError(
                f"a signal needs one or more verified rows, the same number everywhere: {rows}, "
                f"{self.context} of the prompt and {len(self.top_tokens)} others"
            )
        if self.top_tokens.shape != self.top_logs.shape:
            raise SignalError("a signal needs a log-probability of every likeliest token")
        if min(self.start, self.accepted, self.tried - self.accepted) < 0:
            raise SignalError(
                f"start {self.start}, {self.accepted} of {self.tried} drafts accepted: the numbers "
                "must be 0 or more, and no more accepted than tried"
            )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Returns the signal's tensors by name, without absent ones."""
        all_tensors = {name: getattr(self, name) for name in (*_TENSOR_FIELDS, _FINAL_FIELD)}
        return {name: part for name, part in all_tensors.items() if part is not None}

    def encode(self) -> bytes:
        """Encodes the signal as a safetensors file."""
        tensors = {name: part.contiguous() for name, part in self.tensors.items()}
        numbers = {name: str(getattr(self, name)) for name in (*_NUMBER_FIELDS, _CONTEXT_FIELD)}
        content: bytes = save(tensors, {"format": FORMAT, **numbers})
        return content


def load_signal(path: Path) -> Signal:
    """Reads a signal.  Raises SignalError, or FileNotFoundError for one that was deleted."""
    if not path.exists():
        raise FileNotFoundError(path)
    try:
        return _decode(path)
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise SignalError(f"{path}: {type(error).__name__}: {error}") from error


def _decode(path: Path) -> Signal:
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") not in _FORMATS:
            raise SignalError(f"format {metadata.get('format')!r}, not {FORMAT}")
        tensor_names = (
            (*_TENSOR_FIELDS, _FINAL_FIELD) if _FINAL_FIELD in file.keys() else _TENSOR_FIELDS  # noqa: SIM118
        )
        tensors: dict[str, Any] = {name: file.get_tensor(name) for name in tensor_names}
        numbers: dict[str, Any] = {name: int(metadata[name]) for name in _NUMBER_FIELDS}
        numbers[_CONTEXT_FIELD] = (
            int(metadata[_CONTEXT_FIELD]) if metadata["format"] == FORMAT else 0
        )
    _require_valid(tensors)
    return Signal(**tensors, **numbers)


def _require_valid(tensors: Mapping[str, Tensor]) -> None:
    for name, part in tensors.items():
        dtype, dimensions = _TENSOR_TYPES[name]
        if part.dtype is not dtype or part.dim() != dimensions:
            raise SignalError(f"{name}: {part.dtype} in {part.dim()} dimensions")
        if part.is_floating_point():
            # An impossible token has a log-probability of minus infinity.
            minimum = torch.finfo(dtype).min if name != "top_logs" else -torch.inf
            is_valid = (part >= minimum) & (part <= torch.finfo(dtype).max)
        else:
            is_valid = part >= 0
        if not bool(is_valid.all()):
            raise SignalError(f"{name} contains NaN, infinite values or negative tokens")
    if not bool(tensors["top_logs"].isfinite().any(dim=-1).all()):
        raise SignalError("top_logs has a position where every token has probability 0")


def signal_paths(folder: Path) -> list[Path]:
    """Returns the signals in a folder, oldest first."""
    return sorted(folder.glob(f"*{_SUFFIX}"))


def read_valid(
    paths: Iterable[Path],
    on_skipped: Callable[[SignalError], object] = lambda error: _log.warning(
        "passed over: %s", error
    ),
) -> Iterator[Signal]:
    """Reads signals in order; reports those that cannot be read, and skips deleted ones."""
    for path in paths:
        try:
            yield load_signal(path)
        except FileNotFoundError:
            continue
        except SignalError as error:
            on_skipped(error)


class SignalStore:
    """A folder of at most `max_bytes`; one writer of a name prefix, any number of readers."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Makes the folder if it does not exist.  Raises OSError."""
        self.folder = folder
        self._max_bytes = max_bytes
        self._written_count = 0
        folder.mkdir(parents=True, exist_ok=True)
        for partial_path in folder.glob(f"*{_PARTIAL_SUFFIX}"):
            if time.time() - partial_path.stat().st_mtime > _ABANDONED_SECONDS:
                partial_path.unlink(missing_ok=True)

    def add(self, signal: Signal) -> Path:
        """Writes a signal, after deleting the oldest ones until there is room.

        Raises OSError; then no part of the signal is left.
        """
        content = signal.encode()
        self._make_room(len(content))
        self._written_count += 1
        # Names sort by age, and no two writers share one.
        name = f"{time.time_ns():020d}-{os.getpid()}-{self._written_count}"
        partial_path, path = self.folder / (name + _PARTIAL_SUFFIX), self.folder / (name + _SUFFIX)
        try:
            with partial_path.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial_path.rename(path)
        except OSError:
            partial_path.unlink(missing_ok=True)
            raise
        return path

    def paths(self) -> list[Path]:
        """Returns all signals, oldest first."""
        return signal_paths(self.folder)

    def read(self) -> Iterator[Signal]:
        """Reads all signals, oldest first; logs and skips those that cannot be read."""
        return read_valid(self.paths())

    def _make_room(self, needed_bytes: int) -> None:
        if needed_bytes > self._max_bytes:
            raise OSError(
                f"a signal takes {needed_bytes} bytes, more than the store's {self._max_bytes}"
            )
        sizes = deque[tuple[Path, int]]()
        for path in self.paths():
            try:
                sizes.append((path, path.stat().st_size))
            except FileNotFoundError:
                continue
        stored_bytes = sum(file_bytes for _, file_bytes in sizes)
        while sizes and stored_bytes + needed_bytes > self._max_bytes:
            path, file_bytes = sizes.popleft()
            path.unlink(missing_ok=True)
            stored_bytes -= file_bytes


@dataclass(slots=True)
class WriterCounters:
    """Counters of a writer.

    signals, positions: written ones.  dropped: signals that were not written because the queue was
    full or writing failed.  state: "ready", or why nothing is written.
    """

    signals: int = 0
    positions: int = 0
    dropped: int = 0
    state: str = "ready"


class SignalWriter:
    """Writes signals on its own thread; `put` never waits."""

    def __init__(self, store: SignalStore, max_waiting: int = 64) -> None:
        self.counters = WriterCounters()
        self._store = store
        self._queue: queue.Queue[Signal | None] = queue.Queue(max_waiting)
        self._thread = threading.Thread(target=self._run, name="speculation-signals", daemon=True)
        self._thread.start()

    def put(self, signal: Signal) -> bool:
        """Queues a signal; returns False, and counts it as dropped, while the queue is full."""
        try:
            self._queue.put_nowait(signal)
        except queue.Full:
            self.counters.dropped += 1
            return False
        return True

    @property
    def waiting_count(self) -> int:
        """Returns the number of queued signals that are neither written nor dropped yet."""
        return self._queue.unfinished_tasks

    def close(self) -> None:
        """Writes the queued signals, for 10 seconds at most, and ends the thread."""
        try:
            self._queue.put(None, timeout=_CLOSE_SECONDS)
        except queue.Full:
            return
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        while (signal := self._queue.get()) is not None:
            try:
                self._store.add(signal)
            except Exception as error:  # noqa: BLE001 - the thread must survive any signal
                if self.counters.state == "ready":
                    _log.warning("training signals cannot be written: %s", error)
                self.counters.state = f"failing: {error}"
                # After the state: whoever reads the count finds the reason.
                self.counters.dropped += 1
            else:
                self.counters.state = "ready"
                self.counters.positions += len(signal.tokens)
                self.counters.signals += 1
            self._queue.task_done()
