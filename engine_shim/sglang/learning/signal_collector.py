"""Collects training signals from what an engine serves (the COLLECT regime).

    after_prefill   copies the end of each prompt on its device
    after_verify    copies the verified step on its device; every ROUNDS rounds, or earlier if the
                    copies take CANVAS_BYTES, passes all copies to a thread
    _read           runs on that thread; makes signals of the copies (signal_runs.py) and passes
                    them to the writer's thread

The engine's thread never waits, not even for a device.  A round for which the threads or the device
have no room is dropped and counted, before anything is allocated for it.
"""

from __future__ import annotations

import logging
import queue
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch

from engine_shim.common.errors import UnsupportedEngineError
from engine_shim.sglang.api import sglang_api
from engine_shim.sglang.api.settings import PluginSettings
from engine_shim.sglang.api.transfer import launched
from engine_shim.sglang.learning.signal_runs import (
    Canvas,
    DeviceBudget,
    PromptCanvas,
    SignalRuns,
    canvas_bytes,
    canvas_of,
    prompt_bytes,
    prompt_canvas_of,
)
from engine_shim.sglang.learning.verified_step import PromptPass, Verification
from engine_shim.sglang.training.signals import SignalStore, SignalWriter

# Copies of a batch that is read at once, the device memory of a batch, and how many batches may
# wait.
ROUNDS: Final = 16
CANVAS_BYTES: Final = 32 << 20
_BATCHES: Final = 2
_CLOSE_SECONDS: Final = 10.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Copies of steps and prompts, in order.

    nbytes: their size.  ends: whether every run ends after them.  ready: event of the last copy,
    None on a CPU.
    """

    canvases: list[Canvas | PromptCanvas]
    nbytes: int
    ends: bool
    ready: torch.Event | None


class SignalCollector:
    """Collects the signals of one engine.  Raises OSError if the folder cannot be made.

    over: why nothing is collected any longer; "" while collection is on.
    """

    def __init__(self, settings: PluginSettings, target: Any) -> None:
        """Opens the store.  target: the model that verifies."""
        store = SignalStore(Path(settings.signals_folder), settings.signals_megabytes << 20)
        self._writer = SignalWriter(store)
        self._runs = SignalRuns()
        self._top = settings.signals_top
        self._final = FinalStates(target) if settings.signals_final_states else None
        self._budget = DeviceBudget(settings.signals_device_megabytes << 20)
        # At once, one batch is read, _BATCHES wait, and one is filled.
        self._batch_bytes = min(CANVAS_BYTES, self._budget.limit // (_BATCHES + 2))
        self._canvases: list[Canvas | PromptCanvas] = []
        self._canvases_bytes = 0
        # Whether runs may continue in the next round.
        self._open = False
        self._unread = 0
        self._too_large = 0
        self.over = ""
        self._queue: queue.Queue[_Batch | None] = queue.Queue(_BATCHES)
        self._thread = threading.Thread(target=self._run, name="speculation-canvases", daemon=True)
        self._thread.start()

    def after_prefill(self, found: PromptPass | None) -> None:
        """Runs after a prefill while signals are collected.  found: None to skip the prefill."""
        if self.over or found is None:
            return
        final = None if self._final is None else self._final.of(len(found.tokens))
        size = prompt_bytes(found, final)
        if self._has_room(size):
            self._keep(prompt_canvas_of(found, final), size)
        else:
            self._unread += 1

    def after_verify(self, found: Verification, *, collecting: bool) -> None:
        """Runs before a step's draft-extend."""
        if self.over:
            self._forget()
            return
        if not collecting:
            if self._open:
                self._open = not self._put(ends=True)
            return
        final = None if self._final is None else self._final.of(len(found.tokens))
        size = canvas_bytes(found, self._top, final)
        if not self._has_room(size):
            self._unread += 1
            return
        self._keep(canvas_of(found, self._top, final), size)

    def _keep(self, canvas: Canvas | PromptCanvas, size: int) -> None:
        self._open = True
        self._canvases_bytes += size
        self._canvases.append(canvas)
        full = len(self._canvases) >= ROUNDS or self._canvases_bytes >= self._batch_bytes
        if full and not self._put(ends=False):
            self._unread += len(self._canvases)
            self._forget()

    def status(self) -> dict[str, Any]:
        """Returns the writer's counters and what waits for the writer.

        open: collecting has started, and the last signals have not reached the writer yet.  unread:
        rounds and prefills that were dropped because too many waited or the device had no room for
        them.  too_large: those of them that exceed the limit on their own.  device_bytes: size of
        the copies that are on the device now.
        """
        found = asdict(self._writer.counters)
        if self.over:
            found["state"] = self.over
        is_open = (self._open and not self.over) or self._queue.unfinished_tasks > 0
        return {
            **found,
            "waiting": self._writer.waiting,
            "open": is_open,
            "unread": self._unread,
            "too_large": self._too_large,
            "device_bytes": self._budget.held,
        }

    def give_up(self, why: str) -> None:
        """Ends the collection after an error; copies that were not read are dropped."""
        self.over = why
        self._forget()
        self._put(ends=True)

    def close(self) -> None:
        """Writes the remaining signals, for a few seconds at most; a second call does nothing."""
        if self._thread.is_alive():
            with suppress(queue.Full):
                if self._open:
                    self._queue.put(self._batch(ends=True), timeout=_CLOSE_SECONDS)
                    self._open = False
                self._queue.put(None, timeout=_CLOSE_SECONDS)
                self._thread.join(_CLOSE_SECONDS)
        self.over = self.over or "closed"
        self._writer.close()

    def _has_room(self, size: int) -> bool:
        """Reserves the bytes of a copy; without room, has the waiting copies read."""
        if self._budget.reserve(size):
            return True
        if size > self._budget.limit:
            if not self._too_large:
                _log.warning(
                    "a round takes %.1f MiB of the device, more than "
                    "SPECULATION_SIGNALS_DEVICE_MEGABYTES=%d: such rounds are not collected",
                    size / 2**20, self._budget.limit >> 20,
                )  # fmt: skip
            self._too_large += 1
        elif self._canvases:
            self._put(ends=False)
        return False

    def _batch(self, *, ends: bool) -> _Batch:
        ready = launched(self._canvases[-1].tokens.device) if self._canvases else None
        return _Batch(self._canvases, self._canvases_bytes, ends, ready)

    def _put(self, *, ends: bool) -> bool:
        """Queues the copies for reading; returns False while the queue is full."""
        try:
            self._queue.put_nowait(self._batch(ends=ends))
        except queue.Full:
            return False
        self._canvases, self._canvases_bytes = [], 0
        return True

    def _forget(self) -> None:
        self._budget.release(self._canvases_bytes)
        self._canvases, self._canvases_bytes = [], 0

    def _run(self) -> None:
        reads = True
        while (batch := self._queue.get()) is not None:
            size = batch.nbytes
            reads = reads and self._is_read(batch)
            # Frees its copies on the device now and not when the next batch arrives.
            del batch
            self._budget.were_read(size)
            self._queue.task_done()

    def _is_read(self, batch: _Batch) -> bool:
        """Reads a batch; after an error, ends the collection and returns False."""
        try:
            self._read(batch)
        except Exception as error:  # noqa: BLE001 - for example out of memory
            _log.exception("training signals are no longer collected")
            self.over = f"{type(error).__name__}: {error}"
            return False
        return True

    def _read(self, batch: _Batch) -> None:
        if batch.ready is not None:
            batch.ready.synchronize()
        signals = self._runs.read(batch.canvases) if batch.canvases else []
        if batch.ends:
            signals += self._runs.end()
        for signal in signals:
            self._writer.put(signal)


def collector_for(runner: Any, settings: PluginSettings) -> SignalCollector:
    """Makes the collector of an engine; runner: the target's.

    Raises UnsupportedEngineError, OSError for a folder that cannot be made.
    """
    if settings.signals_final_states:
        reason = no_final_states_reason(runner.model, sglang_api.graph_batch_sizes(runner))
        if reason is not None:
            raise UnsupportedEngineError(f"SPECULATION_SIGNALS_FINAL_STATES is set: {reason}")
    return SignalCollector(settings, runner.model)


class FinalStates:
    """The target's last hidden states of its newest pass, after its norm.

    SGLang does not keep them.  A hook reads them at the input of the head, which works only
    without graphs.
    """

    def __init__(self, target: Any) -> None:
        self._newest: torch.Tensor | None = None
        target.logits_processor.register_forward_pre_hook(self._take)

    def of(self, rows: int) -> torch.Tensor:
        """Returns [rows, hidden].  Raises RuntimeError if that pass had another number of rows."""
        if self._newest is None or self._newest.shape[0] != rows:
            raise RuntimeError("the target's last hidden states are not those of this round")
        return self._newest

    def _take(self, _: Any, arguments: tuple[Any, ...]) -> None:
        self._newest = arguments[1]


def no_final_states_reason(target: Any, graph_batch_sizes: tuple[int, ...]) -> str | None:
    """Explains why a target's last hidden states cannot be kept; None if they can."""
    if graph_batch_sizes:
        return "a graph's replay does not hand them out (--disable-cuda-graph)"
    if not isinstance(getattr(target, "logits_processor", None), torch.nn.Module):
        return f"{type(target).__name__} has no logits_processor"
    return None
