"""Training signals of what an engine serves (the COLLECT regime): copied, read, written.

    after_verify    copies the round's canvas where it lies; every ROUNDS rounds, or sooner where
                    they hold CANVAS_BYTES, all of them go to a thread
    _read           which makes signals of them (`runs`) and hands those to the writer's

Nothing here waits, for a device either: what the threads have no room for is dropped and counted.
"""

from __future__ import annotations

import logging
import queue
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from engine_shim.sglang.api import sglang_api
from engine_shim.sglang.api.errors import UnsupportedEngineError
from engine_shim.sglang.learning.signal_runs import Canvas, SignalRuns
from engine_shim.sglang.learning.student import LEARN
from engine_shim.training.signals import SignalStore, SignalWriter

if TYPE_CHECKING:
    from engine_shim.sglang.api.settings import PluginSettings
    from engine_shim.sglang.learning.verified_step import Verification

# Canvases that are read together, what they may hold of the device's memory, and how many such
# batches may wait.
ROUNDS: Final = 16
CANVAS_BYTES: Final = 32 << 20
_BATCHES: Final = 2
_CLOSE_SECONDS: Final = 10.0

_log = logging.getLogger(__name__)


def cannot_collect_reason(worker: Any) -> str | None:
    """Explains why the rounds of this `EAGLEWorkerV2` cannot be collected; None when they can."""
    kind = type(worker.draft_worker.draft_runner.model).__name__
    if kind not in LEARN:
        return f"{kind} has no trainer: drafters of {', '.join(LEARN)} only"
    return None


@dataclass(frozen=True, slots=True)
class _Batch:
    """Holds canvases in order.

    ends: every run is over then.  ready: once they have been copied.
    """

    canvases: list[Canvas]
    ends: bool
    ready: torch.Event | None


class SignalCollector:
    """Collects the signals of one engine.  Raises OSError where the folder cannot be made.

    over: why nothing is collected any longer; "" while something is.
    """

    def __init__(self, settings: PluginSettings, target: Any) -> None:
        """Opens the store.  target: the model that verifies."""
        store = SignalStore(Path(settings.signals_folder), settings.signals_megabytes << 20)
        self._writer = SignalWriter(store)
        self._runs = SignalRuns(settings.signals_top)
        self._final = FinalStates(target) if settings.signals_final_states else None
        self._canvases: list[Canvas] = []
        self._held = 0
        # SignalRuns may go on in the next round.
        self._open = False
        self._unread = 0
        self.over = ""
        self._queue: queue.Queue[_Batch | None] = queue.Queue(_BATCHES)
        self._thread = threading.Thread(target=self._run, name="speculation-canvases", daemon=True)
        self._thread.start()

    def after_verify(self, found: Verification, *, collecting: bool) -> None:
        """Before a step's draft-extend, as SGLang calls that."""
        if self.over:
            self._forget()
            return
        if not collecting:
            if self._open:
                self._open = not self._put(ends=True)
            return
        self._open = True
        self._canvases.append(self._copied(found))
        self._held += self._canvases[-1].nbytes
        full = len(self._canvases) >= ROUNDS or self._held >= CANVAS_BYTES
        if full and not self._put(ends=False):
            self._unread += len(self._canvases)
            self._forget()

    def status(self) -> dict[str, Any]:
        """The writer's counters and what waits for it.

        open: collecting has begun and its last signals are not with the writer yet.  unread: rounds
        that were dropped since too many waited to be read.
        """
        found = asdict(self._writer.counters)
        if self.over:
            found["state"] = self.over
        is_open = (self._open and not self.over) or self._queue.unfinished_tasks > 0
        return {
            **found, "waiting": self._writer.waiting, "open": is_open, "unread": self._unread,
        }  # fmt: skip

    def give_up(self, why: str) -> None:
        """Ends the collection after an error; what has not been read yet is left."""
        self.over = why
        self._forget()
        self._put(ends=True)

    def close(self) -> None:
        """Writes what there is, for some seconds at most."""
        with suppress(queue.Full):
            if self._open:
                self._queue.put(self._batch(ends=True), timeout=_CLOSE_SECONDS)
            self._queue.put(None, timeout=_CLOSE_SECONDS)
            self._thread.join(_CLOSE_SECONDS)
        self.over = self.over or "closed"
        self._writer.close()

    def _copied(self, found: Verification) -> Canvas:
        """SGLang writes into its own again."""
        with torch.inference_mode(False), torch.no_grad():
            return Canvas(
                found.request_ids,
                # A draft of another drafter says nothing of this one.
                found.gamma if found.by_learner else 0,
                found.result.accept_lens.clone(),
                found.batch.seq_lens.clone(),
                found.tokens.clone(),
                found.features.clone(),
                found.logits.clone(),
                None if self._final is None else self._final.of(len(found.tokens)).clone(),
            )

    def _batch(self, *, ends: bool) -> _Batch:
        ready = None
        if self._canvases and (device := self._canvases[-1].logits.device).type != "cpu":
            ready = torch.get_device_module(device).current_stream(device).record_event()
        return _Batch(self._canvases, ends, ready)

    def _put(self, *, ends: bool) -> bool:
        """False while too much waits to be read."""
        try:
            self._queue.put_nowait(self._batch(ends=ends))
        except queue.Full:
            return False
        self._forget()
        return True

    def _forget(self) -> None:
        self._canvases, self._held = [], 0

    def _run(self) -> None:
        reads = True
        while (batch := self._queue.get()) is not None:
            try:
                if reads:
                    self._read(batch)
            except Exception as error:  # noqa: BLE001 - out of memory, say
                _log.exception("training signals are kept no more")
                self.over = f"{type(error).__name__}: {error}"
                reads = False
            self._queue.task_done()

    def _read(self, batch: _Batch) -> None:
        if batch.ready is not None:
            batch.ready.synchronize()
        signals = self._runs.read(batch.canvases) if batch.canvases else []
        if batch.ends:
            signals += self._runs.end()
        for signal in signals:
            self._writer.put(signal)


def collector_for(worker: Any, runner: Any, settings: PluginSettings) -> SignalCollector:
    """Makes the collector of this `EAGLEWorkerV2`; runner: the target's.

    Raises UnsupportedEngineError, OSError for a folder that cannot be made.
    """
    reason = cannot_collect_reason(worker)
    if reason is not None:
        raise UnsupportedEngineError(f"SPECULATION_SIGNALS_FOLDER is set, but {reason}")
    if settings.signals_final_states:
        reason = no_final_states_reason(runner.model, sglang_api.graph_batch_sizes(runner))
        if reason is not None:
            raise UnsupportedEngineError(f"SPECULATION_SIGNALS_FINAL_STATES is set: {reason}")
    return SignalCollector(settings, runner.model)


class FinalStates:
    """The target's last hidden states of its newest pass, after its norm.

    SGLang keeps them nowhere: they are read off as its head gets them, where no graph replays.
    """

    def __init__(self, target: Any) -> None:
        self._newest: torch.Tensor | None = None
        target.logits_processor.register_forward_pre_hook(self._take)

    def of(self, rows: int) -> torch.Tensor:
        """Returns [rows, hidden].

        Raises RuntimeError where that pass had another number of them.
        """
        if self._newest is None or self._newest.shape[0] != rows:
            raise RuntimeError("the target's last hidden states are not those of this round")
        return self._newest

    def _take(self, _: Any, arguments: tuple[Any, ...]) -> None:
        self._newest = arguments[1]


def no_final_states_reason(target: Any, graph_batch_sizes: tuple[int, ...]) -> str | None:
    """Explains why a target's last hidden states cannot be kept; None when they can."""
    if graph_batch_sizes:
        return "a graph's replay does not hand them out (--disable-cuda-graph)"
    if not isinstance(getattr(target, "logits_processor", None), torch.nn.Module):
        return f"{type(target).__name__} has no logits_processor"
    return None
