"""Copies what steps have verified, and prefills have read.

The copies stay on the device until a thread has read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from engine_shim.sglang.learning.likeliest import likeliest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_shim.sglang.learning.verified_step import PromptPass, Verification

# What is kept of a row is of the types that a signal has.
_TOKENS: Final = torch.int64
_STATES: Final = torch.bfloat16
_TOP_BYTES: Final = 4 + 4  # an int32 token and its float32 log-probability
# Positions of a prompt that are kept, its last ones.
PROMPT: Final = 256


@dataclass(frozen=True, slots=True)
class Canvas:
    """Holds what a step has verified, of B requests with gamma + 1 rows each, one behind the other.

    drafted: the learning drafter's own drafts of each request.  undrafted: the requests, by their
    place, that must not be drafted for.  accepted: int [B], tokens that each
    request gained, bonus included.  starts: int [B], each request's position of its first row.
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
    """Returns what `canvas_of` would allocate for its result, from the shapes alone."""
    width = found.features.shape[1] + (0 if final is None else final.shape[1])
    top = min(top, found.logits.shape[1])
    row = _TOKENS.itemsize + width * _STATES.itemsize + top * _TOP_BYTES
    requests = found.result.accept_lens.nbytes + found.batch.seq_lens.nbytes
    return len(found.features) * row + requests


def canvas_of(found: Verification, top: int, final: Tensor | None) -> Canvas:
    """Copies what a step has verified, since SGLang will write into its own buffers again.

    Intermediate results take `likeliest.WORKING_BYTES` for a moment.  Waits for no device.
    """
    with torch.inference_mode(False), torch.no_grad():
        top_tokens, top_logs = likeliest(found.logits, top)
        return Canvas(
            found.request_ids,
            # A draft of another drafter says nothing of this one.
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
    """Holds the ends of what a prefill has read of its requests' prompts, one behind the other.

    starts: each request's position of its first row here.  lengths: rows of each.  unfinished: the
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
    """Returns what `prompt_canvas_of` would allocate for its result, from the shapes alone."""
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
    """Limits the bytes that canvases hold on the device.

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
        """Reserves `size` bytes; returns False, and reserves none, where there is no room."""
        if self.held + size > self.limit:
            return False
        self._kept += size
        return True

    def release(self, size: int) -> None:
        """Gives back what the engine's thread has dropped."""
        self._kept -= size

    def were_read(self, size: int) -> None:
        """Gives back what the reading thread has read and dropped."""
        self._read += size
