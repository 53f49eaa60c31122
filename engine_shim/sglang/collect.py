"""Training signals of what an engine serves (the COLLECT regime): copied, cut up, handed on.

    after_verify    copies what the round has verified; a run of SEGMENT positions of a request
                    becomes a signal, which a thread writes to the store

A run ends early when its request leaves, is retracted, or went on unseen; one shorter than LEAST is
not kept.  Nothing here waits: what the writer has no room for is dropped and counted.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from engine_shim.sglang.student import LEARN
from engine_shim.sglang.windows import Rows
from engine_shim.training.signals import Signal, SignalStore, SignalWriter

if TYPE_CHECKING:
    from engine_shim.sglang.settings import PluginSettings
    from engine_shim.sglang.verification import Verification

# Positions of one signal, and the fewest that are worth a file.
SEGMENT: Final = 256
LEAST: Final = 32

_log = logging.getLogger(__name__)


def cannot_collect_reason(worker: Any) -> str | None:
    """Why the rounds of this `EAGLEWorkerV2` cannot be collected; None when they can."""
    kind = type(worker.draft_worker.draft_runner.model).__name__
    if kind not in LEARN:
        return f"{kind} has no trainer: drafters of {', '.join(LEARN)} only"
    return None


@dataclass(slots=True)
class _Run:
    """Of one request: `rows` from position `start` on; accepted, tried: as a signal has them."""

    start: int
    rows: list[Rows]
    finals: list[torch.Tensor] = field(default_factory=list)
    length: int = 0
    accepted: int = 0
    tried: int = 0

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
            parts["features"],
            parts["top_tokens"].to(torch.int32),
            parts["top_logs"],
            self.start,
            self.accepted,
            self.tried,
            torch.cat(self.finals) if self.finals else None,
        )


class Collector:
    """One engine's.  Raises OSError where the folder cannot be made."""

    def __init__(self, settings: PluginSettings, target: Any) -> None:
        """target: the model that verifies."""
        store = SignalStore(Path(settings.signals_folder), settings.signals_megabytes << 20)
        self._writer = SignalWriter(store)
        self._top = settings.signals_top
        self._runs: dict[str, _Run] = {}
        self._why = ""
        self._final = FinalStates(target) if settings.signals_final_states else None

    def after_verify(self, found: Verification, *, collecting: bool) -> None:
        """Before a step's draft-extend, as SGLang calls that."""
        if not collecting or self._why:
            if self._runs:
                self._end_runs(set())
            return
        # A draft of another drafter says nothing of this one.
        drafted = found.gamma if found.by_learner else 0
        gained = _gained(found, self._top)
        finals = self._finals(found.accepted, found.gamma + 1)
        for row, (rid, start) in enumerate(zip(found.request_ids, found.starts, strict=True)):
            run = self._extend(rid, start, gained[row], drafted)
            if finals is not None:
                run.finals.append(finals[row])
            if run.length >= SEGMENT:
                del self._runs[rid]
                self._hand_over(run)
        self._end_runs(set(found.request_ids))

    def status(self) -> dict[str, Any]:
        """The writer's counters, what waits for it, and the requests that a run is open of."""
        found = asdict(self._writer.counters)
        if self._why:
            found["state"] = self._why
        return {**found, "waiting": self._writer.waiting, "open": len(self._runs)}

    def close(self, why: str = "closed") -> None:
        """Writes what there is; from then on nothing is collected."""
        if not self._why:
            self._end_runs(set())
            self._why = why
            self._writer.close()

    def _finals(self, accepted: list[int], width: int) -> tuple[torch.Tensor, ...] | None:
        if self._final is None:
            return None
        states = self._final.newest
        if states is None or states.shape[0] != width * len(accepted):
            raise RuntimeError("the target's last hidden states are not those of this round")
        with torch.inference_mode(False), torch.no_grad():
            at = torch.tensor(_accepted_rows(accepted, width), device=states.device)
            return states[at].to("cpu", torch.bfloat16).split(accepted)

    def _extend(self, rid: str, start: int, gained: Rows, drafted: int) -> _Run:
        run = self._runs.get(rid)
        if run is None or run.end != start:
            if run is not None:
                self._hand_over(run)
            run = self._runs[rid] = _Run(start, [])
        run.rows.append(gained)
        run.length += len(gained)
        if drafted:
            run.accepted += len(gained) - 1
            run.tried += min(len(gained), drafted)
        return run

    def _end_runs(self, running: set[str]) -> None:
        for rid in [rid for rid in self._runs if rid not in running]:
            self._hand_over(self._runs.pop(rid))

    def _hand_over(self, run: _Run) -> None:
        if run.length >= LEAST:
            self._writer.put(run.signal())


def _gained(found: Verification, top: int) -> list[Rows]:
    """What each request has gained: copies, of the rows that were accepted and no others."""
    accepted = found.accepted
    with torch.inference_mode(False), torch.no_grad():
        at = torch.tensor(_accepted_rows(accepted, found.gamma + 1), device=found.features.device)
        logits = found.logits[at].float()
        top_logits, top_tokens = logits.topk(min(top, logits.shape[-1]), dim=-1)
        parts = (
            found.tokens[at].to("cpu", torch.int64),
            found.features[at].to("cpu", torch.bfloat16),
            top_tokens.cpu(),
            (top_logits - logits.logsumexp(-1, keepdim=True)).cpu(),
        )
        return [Rows(*pieces) for pieces in zip(*(p.split(accepted) for p in parts), strict=True)]


def _accepted_rows(accepted: list[int], width: int) -> list[int]:
    """Their places in tensors of `width` rows a request."""
    return [row * width + k for row, length in enumerate(accepted) for k in range(length)]


class FinalStates:
    """newest: the target's last hidden states of its newest pass, [rows, hidden], after its norm.

    SGLang keeps them nowhere: they are read off as its head gets them, where no graph replays.
    """

    def __init__(self, target: Any) -> None:
        self.newest: torch.Tensor | None = None
        target.logits_processor.register_forward_pre_hook(self._take)

    def _take(self, _: Any, arguments: tuple[Any, ...]) -> None:
        self.newest = arguments[1]


def no_final_states_reason(target: Any, graph_batch_sizes: tuple[int, ...]) -> str | None:
    """Why a target's last hidden states cannot be kept; None when they can."""
    if graph_batch_sizes:
        return "a graph's replay does not hand them out (--disable-cuda-graph)"
    if not isinstance(getattr(target, "logits_processor", None), torch.nn.Module):
        return f"{type(target).__name__} has no logits_processor"
    return None
