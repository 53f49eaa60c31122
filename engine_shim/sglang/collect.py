"""Training signals of what an engine serves (the COLLECT regime): copied, cut up, handed on.

    after_verify    copies what the round has verified; a run of SEGMENT positions of a request
                    becomes a signal, which a thread writes to the store

A run ends early when its request leaves, is retracted, or went on unseen; one shorter than LEAST is
not kept.  Nothing here waits: what the writer has no room for is dropped and counted.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from engine_shim.sglang.windows import Rows, verified
from engine_shim.training.signals import Signal, SignalStore, SignalWriter

if TYPE_CHECKING:
    from engine_shim.sglang.settings import PluginSettings

# Positions of one signal, and the fewest that are worth a file.
SEGMENT: Final = 256
LEAST: Final = 32

_log = logging.getLogger(__name__)


def cannot_collect_reason(worker: Any) -> str | None:
    """Why the rounds of this `EAGLEWorkerV2` cannot be collected; None when they can."""
    model = worker.draft_worker.draft_runner.model
    if type(model).__name__ != "LlamaForCausalLMEagle3":
        return f"{type(model).__name__} has no trainer: EAGLE3 drafters only"
    return None


@dataclass(slots=True)
class _Run:
    """Of one request: `rows` from position `start` on."""

    start: int
    rows: list[Rows]
    length: int = 0
    accepted: int = 0
    drafted: int = 0

    @property
    def end(self) -> int:
        return self.start + self.length

    def signal(self) -> Signal:
        parts = {
            name: torch.cat([getattr(rows, name) for rows in self.rows])
            for name in ("tokens", "features", "top_tokens", "top_logs")
        }
        return Signal(
            parts["tokens"],
            parts["features"].to(torch.bfloat16),
            parts["top_tokens"].to(torch.int32),
            parts["top_logs"],
            self.start,
            self.accepted,
            self.drafted,
        )


class Collector:
    """One engine's.  Raises OSError where the folder cannot be made."""

    def __init__(self, settings: PluginSettings) -> None:
        store = SignalStore(Path(settings.signals_folder), settings.signals_megabytes << 20)
        self._writer = SignalWriter(store)
        self._top = settings.signals_top
        self._runs: dict[str, _Run] = {}
        self._why = ""

    def after_verify(self, batch: Any, result: Any, *, collecting: bool) -> None:
        """Before a step's draft-extend, as SGLang calls that."""
        if not collecting or self._why:
            if self._runs:
                self._end_runs(set())
            return
        accepted: list[int] = result.accept_lens.tolist()
        starts: list[int] = batch.seq_lens.tolist()
        with torch.inference_mode(False), torch.no_grad():
            for row, canvas in enumerate(verified(batch, result, self._top)):
                gained = canvas.cut(0, accepted[row])
                self._extend(batch.reqs[row].rid, starts[row], gained, len(canvas) - 1)
            self._end_runs({request.rid for request in batch.reqs})

    def status(self) -> dict[str, Any]:
        """The writer's counters, and the requests that a run is open of."""
        found = asdict(self._writer.counters)
        if self._why:
            found["state"] = self._why
        return {**found, "open": len(self._runs)}

    def close(self, why: str = "closed") -> None:
        """Writes what there is; from then on nothing is collected."""
        if not self._why:
            self._end_runs(set())
            self._why = why
            self._writer.close()

    def _extend(self, rid: str, start: int, gained: Rows, drafted: int) -> None:
        run = self._runs.get(rid)
        if run is None or run.end != start:
            if run is not None:
                self._hand_over(run)
            run = self._runs[rid] = _Run(start, [])
        run.rows.append(gained)
        run.length += len(gained)
        run.accepted += len(gained) - 1
        run.drafted += drafted
        if run.length >= SEGMENT:
            del self._runs[rid]
            self._hand_over(run)

    def _end_runs(self, running: set[str]) -> None:
        for rid in [rid for rid in self._runs if rid not in running]:
            self._hand_over(self._runs.pop(rid))

    def _hand_over(self, run: _Run) -> None:
        if run.length >= LEAST:
            self._writer.put(run.signal())
