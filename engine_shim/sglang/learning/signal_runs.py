"""Makes training signals from copies of many rounds: consecutive positions of each request.

It uses neither SGLang nor threads.

    SignalRuns.read   extends every run by the copies; ends runs of SEGMENT verified positions
    SignalRuns.end    ends every run

A run starts with the end of its request's prompt, if a prefill has just read it.  It ends early if
its request leaves, is retracted, or continued unobserved.  A run of fewer than LEAST verified
positions makes no signal.

A `Canvas` is a copy of what a step has verified, a `PromptCanvas` of what a prefill has read.  The
copies stay on the device until a thread has read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Final

import torch
from torch import Tensor

from engine_shim.sglang.learning.verified_step import PromptPass, Verification, likeliest
from engine_shim.sglang.training.signals import Signal

# The most verified positions of one signal, and the fewest.
SEGMENT: Final = 256
LEAST: Final = 32

# Rows are kept in the types of a signal.
_TOKENS: Final = torch.int64
_STATES: Final = torch.bfloat16
_TOP_BYTES: Final = 4 + 4  # an int32 token and its float32 log-probability
# Positions of a prompt that are kept, its last ones.
PROMPT: Final = 256


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The last positions of a prompt before `end`, as far as they were computed.

    tensors: on the host, by the names of a signal.  is_whole: whether no chunk follows.
    """

    end: int
    tensors: dict[str, Tensor]
    is_whole: bool

    @property
    def length(self) -> int:
        """Returns the number of positions."""
        return len(self.tensors["tokens"])

    def behind(self, before: _Prompt | None) -> _Prompt:
        """Returns this chunk, joined to the one before it if it directly follows that."""
        if before is None or before.end != self.end - self.length:
            return self
        both = {
            name: torch.cat([before.tensors[name], part])[-PROMPT:]
            for name, part in self.tensors.items()
        }
        return replace(self, tensors=both)


@dataclass(slots=True)
class _SignalRun:
    """Collects the positions of one request, from position `start` on.

    prompt: the positions before `start`, if there are any.  places: indices of its rows in the
    concatenated copies, until they are read.  accepted, tried: as in a signal.
    """

    start: int
    prompt: _Prompt | None = None
    parts: list[dict[str, Tensor]] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    length: int = 0
    accepted: int = 0
    tried: int = 0

    def add(self, first: int, gained: int, drafted: int) -> None:
        """Adds the `gained` rows from row `first` on."""
        self.places.extend(range(first, first + gained))
        self.length += gained
        if drafted:
            self.accepted += gained - 1
            self.tried += min(gained, drafted)

    def signal(self) -> Signal:
        before = self.prompt
        tensors = {
            name: torch.cat([
                *([before.tensors[name]] if before is not None and name in before.tensors else []),
                *(part[name] for part in self.parts),
            ])
            for name in self.parts[0]
        }  # fmt: skip
        context = 0 if before is None else before.length
        return Signal(
            **tensors, start=self.start - context, accepted=self.accepted, tried=self.tried,
            context=context,
        )  # fmt: skip


class SignalRuns:
    """The runs of all requests."""

    def __init__(self) -> None:
        self._runs: dict[str, _SignalRun] = {}
        self._over: list[_SignalRun] = []
        # Prompts of requests that have not verified anything yet.
        self._prompts: dict[str, _Prompt] = {}

    def read(self, canvases: Sequence[Canvas | PromptCanvas]) -> list[Signal]:
        """Reads copies in order; returns the signals that they complete."""
        first = 0
        verified: list[Canvas] = []
        for canvas in canvases:
            if isinstance(canvas, PromptCanvas):
                self._keep_prompts(canvas)
                continue
            verified.append(canvas)
            found = zip(
                canvas.request_ids, canvas.starts.tolist(), canvas.accepted.tolist(), strict=True
            )
            for index, (rid, start, accepted) in enumerate(found):
                if index not in canvas.undrafted:
                    self._run(rid, start).add(first, accepted, canvas.drafted)
                    if self._runs[rid].length >= SEGMENT:
                        self._over.append(self._runs.pop(rid))
                first += canvas.rows
            for rid in self._runs.keys() - set(canvas.request_ids):
                self._over.append(self._runs.pop(rid))
            # Requests of the other prompts have ended after their first token or were aborted.
            self._prompts = {
                rid: prompt for rid, prompt in self._prompts.items() if not prompt.is_whole
            }
        if verified:
            self._gather(verified)
        return self._signals()

    def end(self) -> list[Signal]:
        """Ends all runs; returns their signals."""
        self._over += self._runs.values()
        self._runs.clear()
        self._prompts.clear()
        return self._signals()

    def _keep_prompts(self, canvas: PromptCanvas) -> None:
        """Copies the ends of prompts to the host, until their requests verify something."""
        parts = {
            name: tensor.to("cpu").split(canvas.lengths)
            for name, tensor in (
                ("tokens", canvas.tokens), ("features", canvas.features), ("final", canvas.final)
            )
            if tensor is not None
        }  # fmt: skip
        # SGLang reads one prompt at a time in chunks, so an unfinished other one was abandoned.
        self._prompts = {
            rid: prompt
            for rid, prompt in self._prompts.items()
            if prompt.is_whole or rid in canvas.request_ids
        }
        for index, rid in enumerate(canvas.request_ids):
            end = canvas.starts[index] + canvas.lengths[index]
            tensors = {name: pieces[index] for name, pieces in parts.items()}
            prompt = _Prompt(end, tensors, rid not in canvas.unfinished)
            self._prompts[rid] = prompt.behind(self._prompts.get(rid))

    def _run(self, rid: str, start: int) -> _SignalRun:
        """Returns the request's run; a new one if steps of it were not observed."""
        run = self._runs.get(rid)
        if run is None or run.start + run.length != start:
            if run is not None:
                self._over.append(run)
            prompt = self._prompts.pop(rid, None)
            follows = prompt is not None and prompt.length > 0 and prompt.end == start
            run = self._runs[rid] = _SignalRun(start, prompt if follows else None)
        return run

    def _gather(self, canvases: Sequence[Canvas]) -> None:
        """Adds its rows to each run; nothing else of the copies is kept."""
        runs = [run for run in (*self._over, *self._runs.values()) if run.places]
        tensors = _read(canvases, list(chain.from_iterable(run.places for run in runs)))
        lengths = [len(run.places) for run in runs]
        parts = {name: tensor.split(lengths) for name, tensor in tensors.items()}
        for index, run in enumerate(runs):
            run.parts.append({name: pieces[index] for name, pieces in parts.items()})
            run.places = []

    def _signals(self) -> list[Signal]:
        over, self._over = self._over, []
        return [run.signal() for run in over if run.length >= LEAST]


def _read(canvases: Sequence[Canvas], rows: list[int]) -> dict[str, Tensor]:
    """Returns these rows of the copies, in a signal's types.  Waits for the device.

    Each copy is moved to the host as a whole, so that selecting rows takes no device memory.
    """
    names = ["tokens", "features", "top_tokens", "top_logs"]
    if canvases[0].final is not None:
        names.append("final")
    at = torch.tensor(rows)
    with torch.inference_mode(False), torch.no_grad():
        return {
            name: torch.cat([getattr(canvas, name).to("cpu") for canvas in canvases])[at]
            for name in names
        }


@dataclass(frozen=True, slots=True)
class Canvas:
    """Copy of what a step has verified: B requests with gamma + 1 rows each, in order.

    drafted: number of the learning drafter's own drafts of each request.  undrafted: indices of
    requests that must not be drafted for.  accepted: int [B], tokens that each request gained,
    bonus included.  starts: int [B], position of each request's first row.
    tokens: int64 [rows].  features: bfloat16 [rows, width].  top_tokens: int32 [rows, top], the
    target's likeliest successors, and top_logs: float32 [rows, top], their log-probabilities.
    final: bfloat16 [rows, hidden], where the last hidden states were asked for.
    """

    request_ids: list[str]
    drafted: int
    accepted: Tensor
    starts: Tensor
    tokens: Tensor
    features: Tensor
    top_tokens: Tensor
    top_logs: Tensor
    final: Tensor | None = None
    undrafted: Sequence[int] = ()

    @property
    def rows(self) -> int:
        """Returns the rows of each request."""
        return len(self.tokens) // len(self.request_ids)


def canvas_bytes(found: Verification, top: int, final: Tensor | None) -> int:
    """Returns the bytes that the result of `canvas_of` would take, from the shapes alone."""
    width = found.features.shape[1] + (0 if final is None else final.shape[1])
    top = min(top, found.logits.shape[1])
    row = _TOKENS.itemsize + width * _STATES.itemsize + top * _TOP_BYTES
    requests = found.result.accept_lens.nbytes + found.batch.seq_lens.nbytes
    return len(found.features) * row + requests


def canvas_of(found: Verification, top: int, final: Tensor | None) -> Canvas:
    """Copies what a step has verified, because SGLang reuses its buffers.

    Intermediate results briefly take `verified_step.WORKING_BYTES`.  Does not wait for the device.
    """
    with torch.inference_mode(False), torch.no_grad():
        top_tokens, top_logs = likeliest(found.logits, top)
        return Canvas(
            found.request_ids,
            # Drafts of another drafter are no evidence about this one.
            found.gamma if found.by_learner else 0,
            found.result.accept_lens.clone(),
            found.batch.seq_lens.clone(),
            found.tokens.to(_TOKENS, copy=True),
            found.features.to(_STATES, copy=True),
            top_tokens,
            top_logs,
            None if final is None else final.to(_STATES, copy=True),
            found.undrafted,
        )


@dataclass(frozen=True, slots=True)
class PromptCanvas:
    """Copy of the ends of the prompts that a prefill has read, one after the other.

    starts: position of each request's first row here.  lengths: rows of each.  unfinished: the
    requests whose prompts have further chunks.  tokens, features, final: as in `Canvas`.
    """

    request_ids: list[str]
    starts: list[int]
    lengths: list[int]
    unfinished: frozenset[str]
    tokens: Tensor
    features: Tensor
    final: Tensor | None = None


def prompt_bytes(found: PromptPass, final: Tensor | None) -> int:
    """Returns the bytes that the result of `prompt_canvas_of` would take, from the shapes alone."""
    width = found.features.shape[1] + (0 if final is None else final.shape[1])
    rows = sum(min(length, PROMPT) for length in found.lengths)
    return rows * (_TOKENS.itemsize + width * _STATES.itemsize)


def prompt_canvas_of(found: PromptPass, final: Tensor | None) -> PromptCanvas:
    """Copies the last `PROMPT` positions that a prefill has read of each request."""
    ends = list(accumulate(found.lengths))
    lengths = [min(length, PROMPT) for length in found.lengths]

    def copied(tensor: Tensor, kind: torch.dtype) -> Tensor:
        pieces = zip(ends, lengths, strict=True)
        return torch.cat([tensor[end - length : end].to(kind) for end, length in pieces])

    with torch.inference_mode(False), torch.no_grad():
        return PromptCanvas(
            found.request_ids,
            [
                start + read - kept
                for start, read, kept in zip(found.starts, found.lengths, lengths, strict=True)
            ],
            lengths,
            found.unfinished,
            copied(found.tokens, _TOKENS),
            copied(found.features, _STATES),
            None if final is None else copied(final, _STATES),
        )


class DeviceBudget:
    """Limits the bytes that copies take on the device.

    The engine's thread reserves and releases, and the reading thread reports what it has read.
    Each number has one writer, so that neither thread waits for the other.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._kept = 0
        self._read = 0

    @property
    def held(self) -> int:
        """Returns the bytes that are reserved now."""
        return self._kept - self._read

    def reserve(self, size: int) -> bool:
        """Reserves `size` bytes; returns False and reserves nothing if there is no room."""
        if self.held + size > self.limit:
            return False
        self._kept += size
        return True

    def release(self, size: int) -> None:
        """Releases bytes that the engine's thread has dropped."""
        self._kept -= size

    def were_read(self, size: int) -> None:
        """Releases bytes that the reading thread has read and dropped."""
        self._read += size
