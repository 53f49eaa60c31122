"""Collects training signals from what an engine serves (the COLLECT regime).

    after_prefill   copies the end of each prompt on its device
    after_verify    copies the verified step on its device; every ROUNDS rounds, or earlier if the
                    copies take MAX_BATCH_BYTES, passes all copies to a thread
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
from engine_shim.sglang.api.transfer import record_launched_work
from engine_shim.sglang.learning.signal_runs import (
    DeviceBudget,
    PromptCopy,
    SignalRuns,
    VerifiedStepCopy,
    copy_prompts,
    copy_verified_step,
    prompt_copy_bytes,
    verified_step_bytes,
)
from engine_shim.sglang.learning.verified_step import PromptPass, Verification
from engine_shim.sglang.training.signals import SignalStore, SignalWriter

# Copies of a batch that is read at once, the device memory of a batch, and how many batches may
# wait.
BATCH_ROUNDS: Final = 16
MAX_BATCH_BYTES: Final = 32 << 20
_WAITING_BATCHES: Final = 2
_CLOSE_SECONDS: Final = 10.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _CopyBatch:
    """Copies of steps and prompts, in order.

    nbytes: their size.  ends_runs: whether every run ends after them.  copy_done: event of the last
    copy, None on a CPU.
    """

    copies: list[VerifiedStepCopy | PromptCopy]
    nbytes: int
    ends_runs: bool
    copy_done: torch.Event | None


class SignalCollector:
    """Collects the signals of one engine.  Raises OSError if the folder cannot be made.

    end_reason: why nothing is collected any longer; "" while collection is on.
    """

    def __init__(self, settings: PluginSettings, target: Any) -> None:
        """Opens the store.  target: the model that verifies."""
        store = SignalStore(Path(settings.signals_folder), settings.signals_megabytes << 20)
        self._writer = SignalWriter(store)
        self._runs = SignalRuns()
        self._top = settings.signals_top
        self._final_states = FinalStates(target) if settings.signals_final_states else None
        self._budget = DeviceBudget(settings.signals_device_megabytes << 20)
        # At once, one batch is read, _BATCHES wait, and one is filled.
        self._batch_bytes = min(MAX_BATCH_BYTES, self._budget.limit_bytes // (_WAITING_BATCHES + 2))
        self._copies: list[VerifiedStepCopy | PromptCopy] = []
        self._copies_bytes = 0
        # Whether runs may continue in the next round.
        self._is_open = False
        self._dropped_rounds = 0
        self._too_large_rounds = 0
        self.end_reason = ""
        self._queue: queue.Queue[_CopyBatch | None] = queue.Queue(_WAITING_BATCHES)
        self._thread = threading.Thread(target=self._run, name="speculation-canvases", daemon=True)
        self._thread.start()

    def after_prefill(self, prompt_pass: PromptPass | None) -> None:
        """Runs after a prefill while signals are collected.  prompt_pass: None to skip it."""
        if self.end_reason or prompt_pass is None:
            return
        final = (
            None
            if self._final_states is None
            else self._final_states.newest_rows(len(prompt_pass.tokens))
        )
        copy_bytes = prompt_copy_bytes(prompt_pass, final)
        if self._reserve_room(copy_bytes):
            self._add_copy(copy_prompts(prompt_pass, final), copy_bytes)
        else:
            self._dropped_rounds += 1

    def after_verify(self, verification: Verification, *, collecting: bool) -> None:
        """Runs before a step's draft-extend."""
        if self.end_reason:
            self._drop_copies()
            return
        if not collecting:
            if self._is_open:
                self._is_open = not self._queue_batch(ends_runs=True)
            return
        final = (
            None
            if self._final_states is None
            else self._final_states.newest_rows(len(verification.tokens))
        )
        copy_bytes = verified_step_bytes(verification, self._top, final)
        if not self._reserve_room(copy_bytes):
            self._dropped_rounds += 1
            return
        self._add_copy(copy_verified_step(verification, self._top, final), copy_bytes)

    def _add_copy(self, step_copy: VerifiedStepCopy | PromptCopy, copy_bytes: int) -> None:
        self._is_open = True
        self._copies_bytes += copy_bytes
        self._copies.append(step_copy)
        is_full = len(self._copies) >= BATCH_ROUNDS or self._copies_bytes >= self._batch_bytes
        if is_full and not self._queue_batch(ends_runs=False):
            self._dropped_rounds += len(self._copies)
            self._drop_copies()

    def status(self) -> dict[str, Any]:
        """Returns the writer's counters and what waits for the writer.

        open: collecting has started, and the last signals have not reached the writer yet.  unread:
        rounds and prefills that were dropped because too many waited or the device had no room for
        them.  too_large: those of them that exceed the limit on their own.  device_bytes: size of
        the copies that are on the device now.
        """
        counters = asdict(self._writer.counters)
        if self.end_reason:
            counters["state"] = self.end_reason
        is_open = (self._is_open and not self.end_reason) or self._queue.unfinished_tasks > 0
        return {
            **counters,
            "waiting": self._writer.waiting_count,
            "open": is_open,
            "unread": self._dropped_rounds,
            "too_large": self._too_large_rounds,
            "device_bytes": self._budget.used_bytes,
        }

    def stop(self, reason: str) -> None:
        """Ends the collection after an error; copies that were not read are dropped."""
        self.end_reason = reason
        self._drop_copies()
        self._queue_batch(ends_runs=True)

    def close(self) -> None:
        """Writes the remaining signals, for a few seconds at most; a second call does nothing."""
        if self._thread.is_alive():
            with suppress(queue.Full):
                if self._is_open:
                    self._queue.put(self._make_batch(ends_runs=True), timeout=_CLOSE_SECONDS)
                    self._is_open = False
                self._queue.put(None, timeout=_CLOSE_SECONDS)
                self._thread.join(_CLOSE_SECONDS)
        self.end_reason = self.end_reason or "closed"
        self._writer.close()

    def _reserve_room(self, copy_bytes: int) -> bool:
        """Reserves the bytes of a copy; without room, has the waiting copies read."""
        if self._budget.reserve(copy_bytes):
            return True
        if copy_bytes > self._budget.limit_bytes:
            if not self._too_large_rounds:
                _log.warning(
                    "a round takes %.1f MiB of the device, more than "
                    "SPECULATION_SIGNALS_DEVICE_MEGABYTES=%d: such rounds are not collected",
                    copy_bytes / 2**20, self._budget.limit_bytes >> 20,
                )  # fmt: skip
            self._too_large_rounds += 1
        elif self._copies:
            self._queue_batch(ends_runs=False)
        return False

    def _make_batch(self, *, ends_runs: bool) -> _CopyBatch:
        copy_done = record_launched_work(self._copies[-1].tokens.device) if self._copies else None
        return _CopyBatch(self._copies, self._copies_bytes, ends_runs, copy_done)

    def _queue_batch(self, *, ends_runs: bool) -> bool:
        """Queues the copies for reading; returns False while the queue is full."""
        try:
            self._queue.put_nowait(self._make_batch(ends_runs=ends_runs))
        except queue.Full:
            return False
        self._copies, self._copies_bytes = [], 0
        return True

    def _drop_copies(self) -> None:
        self._budget.release(self._copies_bytes)
        self._copies, self._copies_bytes = [], 0

    def _run(self) -> None:
        is_reading = True
        while (batch := self._queue.get()) is not None:
            batch_bytes = batch.nbytes
            is_reading = is_reading and self._try_read(batch)
            # Frees its copies on the device now and not when the next batch arrives.
            del batch
            self._budget.release_read(batch_bytes)
            self._queue.task_done()

    def _try_read(self, batch: _CopyBatch) -> bool:
        """Reads a batch; after an error, ends the collection and returns False."""
        try:
            self._read(batch)
        except Exception as error:  # noqa: BLE001 - for example out of memory
            _log.exception("training signals are no longer collected")
            self.end_reason = f"{type(error).__name__}: {error}"
            return False
        return True

    def _read(self, batch: _CopyBatch) -> None:
        if batch.copy_done is not None:
            batch.copy_done.synchronize()
        signals = self._runs.read(batch.copies) if batch.copies else []
        if batch.ends_runs:
            signals += self._runs.end_runs()
        for signal in signals:
            self._writer.put(signal)


def make_collector(runner: Any, settings: PluginSettings) -> SignalCollector:
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
        target.logits_processor.register_forward_pre_hook(self._store_newest)

    def newest_rows(self, rows: int) -> torch.Tensor:
        """Returns [rows, hidden].  Raises RuntimeError if that pass had another number of rows."""
        if self._newest is None or self._newest.shape[0] != rows:
            raise RuntimeError("the target's last hidden states are not those of this round")
        return self._newest

    def _store_newest(self, _: Any, arguments: tuple[Any, ...]) -> None:
        self._newest = arguments[1]


def no_final_states_reason(target: Any, graph_batch_sizes: tuple[int, ...]) -> str | None:
    """Explains why a target's last hidden states cannot be kept; None if they can."""
    if graph_batch_sizes:
        return "a graph's replay does not hand them out (--disable-cuda-graph)"
    if not isinstance(getattr(target, "logits_processor", None), torch.nn.Module):
        return f"{type(target).__name__} has no logits_processor"
    return None
