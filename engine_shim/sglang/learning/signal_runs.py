"""Makes training signals from copies of many rounds: consecutive positions of each request.

It uses neither SGLang nor threads.

    SignalRuns.read      extends every run by the copies; ends runs of SEGMENT_POSITIONS verified
                         positions
    SignalRuns.end_runs  ends every run

A run starts with the end of its request's prompt, if a prefill has just read it.  It ends early if
its request leaves, is retracted, or continued unobserved.  A run of fewer than MIN_POSITIONS
verified positions makes no signal.

A `VerifiedStepCopy` is a copy of what a step has verified, a `PromptCopy` of what a prefill has
read.  The copies stay on the device until a thread has read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Final

import torch
from torch import Tensor

from engine_shim.sglang.learning.verified_step import PromptPass, Verification, likeliest_tokens
from engine_shim.sglang.training.signals import Signal

# The most verified positions of one signal, and the fewest.
SEGMENT_POSITIONS: Final = 256
MIN_POSITIONS: Final = 32

# Rows are kept in the types of a signal.
_TOKEN_DTYPE: Final = torch.int64
_STATE_DTYPE: Final = torch.bfloat16
_TOP_TOKEN_BYTES: Final = 4 + 4  # an int32 token and its float32 log-probability
# Positions of a prompt that are kept, its last ones.
PROMPT_POSITIONS: Final = 256


@dataclass(frozen=True, slots=True)
class _PromptEnd:
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

    def join_previous(self, previous: _PromptEnd | None) -> _PromptEnd:
        """Returns this chunk, joined to the one before it if it directly follows that."""
        if previous is None or previous.end != self.end - self.length:
            return self
        joined = {
            name: torch.cat([previous.tensors[name], part])[-PROMPT_POSITIONS:]
            for name, part in self.tensors.items()
        }
        return replace(self, tensors=joined)


@dataclass(slots=True)
class _SignalRun:
    """Collects the positions of one request, from position `start` on.

    prompt: the positions before `start`, if there are any.  row_indices: indices of its rows in the
    concatenated copies, until they are read.  accepted, tried: as in a signal.
    """

    start: int
    prompt: _PromptEnd | None = None
    parts: list[dict[str, Tensor]] = field(default_factory=list)
    row_indices: list[int] = field(default_factory=list)
    length: int = 0
    accepted: int = 0
    tried: int = 0

    def add_rows(self, first_row: int, row_count: int, draft_count: int) -> None:
        """Adds the `row_count` rows from row `first_row` on."""
        self.row_indices.extend(range(first_row, first_row + row_count))
        self.length += row_count
        if draft_count:
            self.accepted += row_count - 1
            self.tried += min(row_count, draft_count)

    def to_signal(self) -> Signal:
        prompt = self.prompt
        tensors = {
            name: torch.cat([
                *([prompt.tensors[name]] if prompt is not None and name in prompt.tensors else []),
                *(part[name] for part in self.parts),
            ])
            for name in self.parts[0]
        }  # fmt: skip
        context = 0 if prompt is None else prompt.length
        return Signal(
            **tensors, start=self.start - context, accepted=self.accepted, tried=self.tried,
            context=context,
        )  # fmt: skip


class SignalRuns:
    """The runs of all requests."""

    def __init__(self) -> None:
        self._runs: dict[str, _SignalRun] = {}
        self._ended_runs: list[_SignalRun] = []
        # Prompts of requests that have not verified anything yet.
        self._prompts: dict[str, _PromptEnd] = {}

    def read(self, copies: Sequence[VerifiedStepCopy | PromptCopy]) -> list[Signal]:
        """Reads copies in order; returns the signals that they complete."""
        first_row = 0
        step_copies: list[VerifiedStepCopy] = []
        for step_copy in copies:
            if isinstance(step_copy, PromptCopy):
                self._store_prompts(step_copy)
                continue
            step_copies.append(step_copy)
            requests = zip(
                step_copy.request_ids,
                step_copy.starts.tolist(),
                step_copy.accepted.tolist(),
                strict=True,
            )
            for index, (rid, start, accepted) in enumerate(requests):
                if index not in step_copy.undrafted_rows:
                    self._find_run(rid, start).add_rows(first_row, accepted, step_copy.draft_count)
                    if self._runs[rid].length >= SEGMENT_POSITIONS:
                        self._ended_runs.append(self._runs.pop(rid))
                first_row += step_copy.rows_per_request
            for rid in self._runs.keys() - set(step_copy.request_ids):
                self._ended_runs.append(self._runs.pop(rid))
            # Requests of the other prompts have ended after their first token or were aborted.
            self._prompts = {
                rid: prompt for rid, prompt in self._prompts.items() if not prompt.is_whole
            }
        if step_copies:
            self._read_rows(step_copies)
        return self._take_signals()

    def end_runs(self) -> list[Signal]:
        """Ends all runs; returns their signals."""
        self._ended_runs += self._runs.values()
        self._runs.clear()
        self._prompts.clear()
        return self._take_signals()

    def _store_prompts(self, prompt_copy: PromptCopy) -> None:
        """Copies the ends of prompts to the host, until their requests verify something."""
        parts = {
            name: tensor.to("cpu").split(prompt_copy.lengths)
            for name, tensor in (
                ("tokens", prompt_copy.tokens), ("features", prompt_copy.features),
                ("final", prompt_copy.final)
            )
            if tensor is not None
        }  # fmt: skip
        # SGLang reads one prompt at a time in chunks, so an unfinished other one was abandoned.
        self._prompts = {
            rid: prompt
            for rid, prompt in self._prompts.items()
            if prompt.is_whole or rid in prompt_copy.request_ids
        }
        for index, rid in enumerate(prompt_copy.request_ids):
            end = prompt_copy.starts[index] + prompt_copy.lengths[index]
            tensors = {name: pieces[index] for name, pieces in parts.items()}
            prompt = _PromptEnd(end, tensors, rid not in prompt_copy.unfinished)
            self._prompts[rid] = prompt.join_previous(self._prompts.get(rid))

    def _find_run(self, rid: str, start: int) -> _SignalRun:
        """Returns the request's run; a new one if steps of it were not observed."""
        run = self._runs.get(rid)
        if run is None or run.start + run.length != start:
            if run is not None:
                self._ended_runs.append(run)
            prompt = self._prompts.pop(rid, None)
            follows = prompt is not None and prompt.length > 0 and prompt.end == start
            run = self._runs[rid] = _SignalRun(start, prompt if follows else None)
        return run

    def _read_rows(self, step_copies: Sequence[VerifiedStepCopy]) -> None:
        """Adds its rows to each run; nothing else of the copies is kept."""
        runs = [run for run in (*self._ended_runs, *self._runs.values()) if run.row_indices]
        tensors = _read(step_copies, list(chain.from_iterable(run.row_indices for run in runs)))
        lengths = [len(run.row_indices) for run in runs]
        parts = {name: tensor.split(lengths) for name, tensor in tensors.items()}
        for index, run in enumerate(runs):
            run.parts.append({name: pieces[index] for name, pieces in parts.items()})
            run.row_indices = []

    def _take_signals(self) -> list[Signal]:
        ended_runs, self._ended_runs = self._ended_runs, []
        return [run.to_signal() for run in ended_runs if run.length >= MIN_POSITIONS]


def _read(step_copies: Sequence[VerifiedStepCopy], rows: list[int]) -> dict[str, Tensor]:
    """Returns these rows of the copies, in a signal's types.  Waits for the device.

    Each copy is moved to the host as a whole, so that selecting rows takes no device memory.
    """
    names = ["tokens", "features", "top_tokens", "top_logs"]
    if step_copies[0].final is not None:
        names.append("final")
    row_index = torch.tensor(rows)
    with torch.inference_mode(False), torch.no_grad():
        return {
            name: torch.cat([getattr(step_copy, name).to("cpu") for step_copy in step_copies])[
                row_index
            ]
            for name in names
        }


@dataclass(frozen=True, slots=True)
class VerifiedStepCopy:
    """Copy of what a step has verified: B requests with gamma + 1 rows each, in order.

    draft_count: number of the learning drafter's own drafts of each request.  undrafted_rows:
    indices of requests that must not be drafted for.  accepted: int [B], tokens that each request
    gained, bonus included.  starts: int [B], position of each request's first row. tokens: int64
    [rows].  features: bfloat16 [rows, width].  top_tokens: int32 [rows, top], the target's
    likeliest successors, and top_logs: float32 [rows, top], their log-probabilities. final:
    bfloat16 [rows, hidden], where the last hidden states were asked for.
    """

    request_ids: list[str]
    draft_count: int
    accepted: Tensor
    starts: Tensor
    tokens: Tensor
    features: Tensor
    top_tokens: Tensor
    top_logs: Tensor
    final: Tensor | None = None
    undrafted_rows: Sequence[int] = ()

    @property
    def rows_per_request(self) -> int:
        """Returns the rows of each request."""
        return len(self.tokens) // len(self.request_ids)


def verified_step_bytes(verification: Verification, top: int, final: Tensor | None) -> int:
    """Returns the bytes of a result of `copy_verified_step`, from the shapes alone."""
    width = verification.features.shape[1] + (0 if final is None else final.shape[1])
    top = min(top, verification.logits.shape[1])
    row = _TOKEN_DTYPE.itemsize + width * _STATE_DTYPE.itemsize + top * _TOP_TOKEN_BYTES
    requests = verification.result.accept_lens.nbytes + verification.batch.seq_lens.nbytes
    return len(verification.features) * row + requests


def copy_verified_step(
    verification: Verification, top: int, final: Tensor | None
) -> VerifiedStepCopy:
    """Copies what a step has verified, because SGLang reuses its buffers.

    Intermediate results briefly take `verified_step.MAX_WORKING_BYTES`.  Does not wait for the
    device.
    """
    with torch.inference_mode(False), torch.no_grad():
        top_tokens, top_logprobs = likeliest_tokens(verification.logits, top)
        return VerifiedStepCopy(
            verification.request_ids,
            # Drafts of another drafter are no evidence about this one.
            verification.gamma if verification.by_learner else 0,
            verification.result.accept_lens.clone(),
            verification.batch.seq_lens.clone(),
            verification.tokens.to(_TOKEN_DTYPE, copy=True),
            verification.features.to(_STATE_DTYPE, copy=True),
            top_tokens,
            top_logprobs,
            None if final is None else final.to(_STATE_DTYPE, copy=True),
            verification.undrafted,
        )


@dataclass(frozen=True, slots=True)
class PromptCopy:
    """Copy of the ends of the prompts that a prefill has read, one after the other.

    starts: position of each request's first row here.  lengths: rows of each.  unfinished: the
    requests whose prompts have further chunks.  tokens, features, final: as in `VerifiedStepCopy`.
    """

    request_ids: list[str]
    starts: list[int]
    lengths: list[int]
    unfinished: frozenset[str]
    tokens: Tensor
    features: Tensor
    final: Tensor | None = None


def prompt_copy_bytes(prompt_pass: PromptPass, final: Tensor | None) -> int:
    """Returns the bytes that the result of `copy_prompts` would take, from the shapes alone."""
    width = prompt_pass.features.shape[1] + (0 if final is None else final.shape[1])
    rows = sum(min(length, PROMPT_POSITIONS) for length in prompt_pass.lengths)
    return rows * (_TOKEN_DTYPE.itemsize + width * _STATE_DTYPE.itemsize)


def copy_prompts(prompt_pass: PromptPass, final: Tensor | None) -> PromptCopy:
    """Copies the last `PROMPT_POSITIONS` positions that a prefill has read of each request."""
    ends = list(accumulate(prompt_pass.lengths))
    lengths = [min(length, PROMPT_POSITIONS) for length in prompt_pass.lengths]

    def copy_ends(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        pieces = zip(ends, lengths, strict=True)
        return torch.cat([tensor[end - length : end].to(dtype) for end, length in pieces])

    with torch.inference_mode(False), torch.no_grad():
        return PromptCopy(
            prompt_pass.request_ids,
            [
                start + read_rows - kept_rows
                for start, read_rows, kept_rows in zip(
                    prompt_pass.starts, prompt_pass.lengths, lengths, strict=True
                )
            ],
            lengths,
            prompt_pass.unfinished,
            copy_ends(prompt_pass.tokens, _TOKEN_DTYPE),
            copy_ends(prompt_pass.features, _STATE_DTYPE),
            None if final is None else copy_ends(final, _STATE_DTYPE),
        )


class DeviceBudget:
    """Limits the bytes that copies take on the device.

    The engine's thread reserves and releases, and the reading thread reports what it has read.
    Each number has one writer, so that neither thread waits for the other.
    """

    def __init__(self, limit: int) -> None:
        self.limit_bytes = limit
        self._reserved_bytes = 0
        self._read_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Returns the bytes that are reserved now."""
        return self._reserved_bytes - self._read_bytes

    def reserve(self, size_bytes: int) -> bool:
        """Reserves `size_bytes` bytes; returns False and reserves nothing if there is no room."""
        if self.used_bytes + size_bytes > self.limit_bytes:
            return False
        self._reserved_bytes += size_bytes
        return True

    def release(self, size_bytes: int) -> None:
        """Releases bytes that the engine's thread has dropped."""
        self._reserved_bytes -= size_bytes

    def release_read(self, size_bytes: int) -> None:
        """Releases bytes that the reading thread has read and dropped."""
        self._read_bytes += size_bytes
