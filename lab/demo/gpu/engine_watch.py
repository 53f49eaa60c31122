"""Draws acceptance and logs passes in an engine whose steps take what they take.

SGLang calls `register` as a plugin of this demo's engines.  The draws are those of the paced
engines: they depend on the request, the position and the drafter alone, so every policy gets the
same draws.

With the overlap schedule a step is launched before the last one's tokens have been read back, and
nothing here may wait for the device.  It need not: a step gains what is drawn here, so positions
are known when a step is launched.  A step's end is the moment at which SGLang has read its tokens.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from lab.cpu_engine.pace.acceptance import DrawnAcceptance, RequestId, accept
from lab.cpu_engine.pace.shim_watch import ShimWatch, draft_length, steering_of
from lab.cpu_engine.pace.step_costs import OWN
from lab.cpu_engine.pace.step_log import LoggedRequest, LoggedStep, StepLog

VARIABLE = "LAB_DEMO_WATCH"
_SCHEDULER = "sglang.srt.managers.scheduler"
# What this module notes on requests and results of SGLang's.
_FIRST_TOKEN, _LAUNCH, _END = "watched_first_token", "watched_launch", "watched_end"

Curves = Mapping[str, Mapping[str, Sequence[float]]]


def settings(log: Path, curves: Curves) -> dict[str, str]:
    """Makes the variable of an engine.

    log: an absolute path.  curves: class -> drafter -> conditional acceptance.
    """
    return {VARIABLE: json.dumps({"log": str(log), "curves": curves})}


def register() -> None:
    """Installs the watch; SGLang calls this in each of its processes.

    Ends a scheduler whose log cannot be written: SGLang would only log an exception, and accept
    nothing.
    """
    text = os.environ.get(VARIABLE)
    if not text or _SCHEDULER not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.speculative import spec_utils

    try:
        configuration = json.loads(text)
        watch = EngineWatch(
            StepLog(Path(configuration["log"])), DrawnAcceptance(configuration["curves"])
        )
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"{VARIABLE}: {error}") from error
    # Any length above 0 has SGLang ask; the answer is drawn.
    spec_utils.SIMULATE_ACC_LEN = 1.0
    spec_utils.generate_simulated_accept_index = watch.accept
    scheduler = f"{_SCHEDULER}.Scheduler"
    for name in ("run_batch", "process_batch_result", "on_idle"):
        HookRegistry.register(
            f"{scheduler}.{name}", getattr(watch, f"around_{name}"), HookType.AROUND
        )
    if os.environ.get("SPECULATION_SIDECAR"):
        watch.shim.wrap_hooks()


@dataclass(slots=True)
class _Row:
    """Follows a request.

    accepted_counts: accepted drafts by position.  position: of the first draft of the next step.
    """

    kind: str
    accepted_counts: Sequence[int]
    position: int

    def draw(self) -> int:
        return (
            self.accepted_counts[self.position]
            if 0 <= self.position < len(self.accepted_counts)
            else 0
        )


@dataclass(frozen=True, slots=True)
class _Launch:
    """Holds what is known when a pass is launched.

    gains: tokens of each sequence; empty in a prefill.
    """

    requests: Sequence[Any]
    seconds: float
    gains: Sequence[int]
    step: Mapping[str, Any]


class EngineWatch:
    """Follows the passes of one engine, in its scheduler's process."""

    def __init__(self, log: StepLog, acceptance: DrawnAcceptance) -> None:
        self._log = log
        self._acceptance = acceptance
        self.shim = ShimWatch()
        # Written when the engine is idle, so that no step waits for the file.
        self._entries: list[LoggedStep | LoggedRequest] = []
        self._rows: dict[str, _Row] = {}
        self._running: Sequence[_Row] = ()
        self._gains: list[int] = []
        self._ended = 0.0

    def around_on_idle(self, original: Callable[..., Any], scheduler: Any, *args: Any) -> Any:
        """Writes what has come since the last time (wraps `Scheduler.on_idle`)."""
        self._rows.clear()
        for entry in self._entries:
            self._log.add(entry)
        self._entries.clear()
        self._log.flush()
        return original(scheduler, *args)

    def around_run_batch(
        self, original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Wraps `Scheduler.run_batch`, which returns before the device is done."""
        launched = perf_counter()
        requests, mode = list(batch.reqs), batch.forward_mode
        is_prefill = mode.is_extend()
        if not (is_prefill or mode.is_decode()):
            return original(scheduler, batch, *args, **kwargs)
        self._running = rows = [self._row(request) for request in requests]
        self._gains = []
        self.shim.begin()
        read = int(batch.extend_num_tokens or 0) if is_prefill else 0
        result = original(scheduler, batch, *args, **kwargs)
        step = {
            "launched": launched,
            "batch_size": len(rows),
            "kv_tokens": sum([len(r.origin_input_ids) + len(r.output_ids) for r in requests]),
            "kinds": dict(Counter([row.kind for row in rows])),
            "used_seconds": perf_counter() - launched,
            "shim_seconds": self.shim.take_seconds(),
        }
        gains: Sequence[int] = ()
        if is_prefill:
            for row, request in zip(rows, requests, strict=True):
                # Its last chunk gives one token.
                row.position = len(request.output_ids)
            step["tokens"] = read
        else:
            gains = self._gains or [1] * len(rows)
            for row, gain in zip(rows, gains, strict=True):
                row.position += gain
            gamma = draft_length(scheduler, result)
            step |= {
                "drafter": "" if gamma is None else OWN,
                "gamma": gamma or 0,
                "asleep": self.shim.asleep,
                "accepted": sum(gains) - len(rows),
                **steering_of(result),
            }
        setattr(result, _LAUNCH, _Launch(requests, launched, gains, step))
        return result

    def around_process_batch_result(
        self, original: Callable[..., Any], scheduler: Any, batch: Any, result: Any
    ) -> Any:
        """Wraps the method in which `Scheduler` reads a pass's tokens."""
        launch: _Launch | None = getattr(result, _LAUNCH, None)
        if launch is None:
            return original(scheduler, batch, result)
        lengths_before = [_length(request) for request in launch.requests]
        answer = original(scheduler, batch, result)
        ended = perf_counter()
        # It began when the device was free, not when it was launched.
        pass_start, self._ended = max(launch.seconds, self._ended), ended
        step = dict(launch.step)
        if launch.gains:
            lengths_after = [_length(request) for request in launch.requests]
            step["tokens"] = sum(lengths_after) - sum(lengths_before)
        self._entries.append(
            LoggedStep(began=pass_start, ended=ended, due=ended, seconds=ended - pass_start, **step)
        )
        for request in launch.requests:
            self._note(request, ended)
        return answer

    def accept(
        self, accept_index: Any, predict: Any, num_correct_drafts: Any, spec_steps: int, **_: Any
    ) -> Any:
        """Replaces SGLang's `spec_utils.generate_simulated_accept_index`."""
        lengths = [row.draw() for row in self._running]
        self._gains = [min(length, spec_steps) + 1 for length in lengths]
        return accept(accept_index, predict, num_correct_drafts, lengths, spec_steps)

    def _row(self, request: Any) -> _Row:
        row = self._rows.get(request.rid)
        if row is None:
            request_id = RequestId.parse(request.rid)
            accepted_counts: list[int] = []
            if request_id is not None and request_id.kind in self._acceptance.kinds:
                accepted_counts = self._acceptance.accepted(request_id, OWN).tolist()
            kind = "" if request_id is None else request_id.kind
            row = self._rows[request.rid] = _Row(kind, accepted_counts, len(request.output_ids) - 1)
        return row

    def _note(self, request: Any, ended: float) -> None:
        """Notes a request's first token, and its end."""
        if not hasattr(request, _FIRST_TOKEN):
            if not request.output_ids:
                return  # a chunk of a prompt gives no token
            setattr(request, _FIRST_TOKEN, ended)
        if request.finished() and not hasattr(request, _END):
            setattr(request, _END, True)
            first = getattr(request, _FIRST_TOKEN)
            self._entries.append(LoggedRequest(request.rid, first, ended, _length(request)))


def _length(request: Any) -> int:
    """Tokens of an answer, without those behind its end."""
    finished: int | None = request.finished_len
    return len(request.output_ids) if finished is None else finished
