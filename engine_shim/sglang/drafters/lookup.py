"""Prompt lookup on the device: searches a request's own tokens for its newest tokens.

Drafts the tokens that followed the latest earlier occurrence of the longest suffix of 2 to 5 tokens
(prompt lookup decoding, Saxena 2023).  With the overlap schedule the host is one step behind, so
each request's tokens are kept in a buffer on the device.  Nothing here waits for the device.  The
operations have fixed shapes for a given batch size, draft length and width, and can be captured in
a graph.

A request is compared only with its own tokens, never with those of other requests, not even of
earlier ones in the same row.  Otherwise the time of a step could reveal the text of others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from engine_shim.sglang.api.transfer import to_device

# Lengths of suffixes that are looked up.
LEAST_MATCH: Final = 2
LONGEST_MATCH: Final = 5
# The narrowest part of the buffer that is searched; the width is doubled until it suffices.
_WIDTH_LEAST: Final = 256
# Marks unknown tokens, and the padding before a request's first token, with which a suffix can be
# compared at any position.
_UNKNOWN: Final = -1
_NOTHING: Final = -2
_FRONT: Final = LONGEST_MATCH - 1
# Device memory that a search may take in addition to the buffer; larger batches are searched in
# parts.  A token takes up to 38 bytes at the peak.
_WORK_BYTES: Final = 64 << 20
_BYTES_A_TOKEN: Final = 40
_HELD_BYTES: Final = 4
# Attributes of SGLang's request: a unique number (clients choose request ids and may repeat one),
# and the row into which the request was read.
_NUMBER: Final = "speculation_number"
_ROW: Final = "speculation_row"


def _ids(tokens: Sequence[int]) -> np.ndarray:
    """Copies token ids, because SGLang's array cannot grow while another object has a view."""
    return np.array(tokens, dtype=np.int64)


def _most_rows(width: int) -> int:
    """Returns how many rows are searched at once."""
    return max(1, _WORK_BYTES // (_BYTES_A_TOKEN * width))


class Proposal(NamedTuple):
    """Drafts of B requests.

    tokens: int64 [B, gamma].  match: int64 [B], length of the matched suffix in tokens; 0: no
    match, and the tokens are only padding.
    """

    tokens: torch.Tensor
    match: torch.Tensor


def device_bytes(rows: int, width: int) -> int:
    """Returns the device memory of a `TokenHistory` of this shape and of its searches."""
    return rows * (_FRONT + width) * _HELD_BYTES + max(_WORK_BYTES, _BYTES_A_TOKEN * width)


class TokenHistory:
    """Holds the tokens of all running requests: int32 [rows, width] on the device.

    rows: rows of SGLang's request pool.  width: the longest context plus the widest step.
    vocabulary: tokens of the target; other ids, which stand for parts of images, are never
    proposed.
    """

    def __init__(self, rows: int, width: int, vocabulary: int, device: torch.device | str) -> None:
        self.width, self._vocabulary = width, vocabulary
        self._numbers = count(1)
        shape = rows, _FRONT + width
        self._tokens = torch.full(shape, _UNKNOWN, dtype=torch.int32, device=device)
        self._offsets = torch.arange(width, dtype=torch.int32, device=device)
        self._back = torch.arange(-_FRONT, 1, device=device)
        # The agreement of the five tokens as a bit field, the newest token in the highest bit; and
        # for each bit field the number of agreeing tokens before the first difference.
        self._bits = 2 ** torch.arange(LONGEST_MATCH, dtype=torch.uint8, device=device)
        lengths = [f"{bits:0{LONGEST_MATCH}b}".find("0") for bits in range(2**LONGEST_MATCH)]
        lengths[-1] = LONGEST_MATCH
        self._lengths = to_device(lengths, device, torch.int32)
        # By row: the number of the request in it, and how many of its tokens the host has written.
        self._held: dict[int, tuple[int, int]] = {}

    @property
    def bytes(self) -> int:
        """Returns the device memory of the buffer, in bytes."""
        return self._tokens.nbytes

    def read_prompt(self, requests: Sequence[Any]) -> list[int]:
        """Writes the prompts (or the next parts of them) of a prefill's requests.

        Returns the rows that now belong to another request.
        """
        return self._read([(r, _ids(r.get_fill_ids())) for r in requests])

    def meet(self, requests: Sequence[Any]) -> list[int]:
        """Writes the known tokens of requests that decode without a prefill in this engine.

        Returns the rows that now belong to another request.
        """
        held = self._held
        news = [
            r
            for r in requests
            if held.get(r.kv.req_pool_idx, (0, 0))[0] != getattr(r, _NUMBER, None)
        ]
        if not news:
            return []
        return self._read(
            [(r, np.concatenate((_ids(r.origin_input_ids), _ids(r.output_ids)))) for r in news]
        )

    def _read(self, prompts: Sequence[tuple[Any, np.ndarray]]) -> list[int]:
        fresh: list[int] = []
        parts: list[np.ndarray] = []
        for request, known in prompts:
            row, length = request.kv.req_pool_idx, min(len(known), self.width)
            number = getattr(request, _NUMBER, 0)
            if not number:
                number = next(self._numbers)
                setattr(request, _NUMBER, number)
            before = getattr(request, _ROW, row)
            if before != row and self._held.get(before, (0, 0))[0] == number:
                # If the request returns to that row, the tokens there are outdated.
                del self._held[before]
            setattr(request, _ROW, row)
            owner, written = self._held.get(row, (0, 0))
            if owner != number or written > length:
                fresh.append(row)
                written = 0
            if written < length:
                places = np.arange(_FRONT + written, _FRONT + length)
                parts.append(np.stack((np.full_like(places, row), places, known[written:length])))
            self._held[row] = (number, length)
        device = self._tokens.device
        if fresh:
            self._tokens.index_fill_(0, to_device(fresh, device), _UNKNOWN)
        if parts:
            found = to_device(np.concatenate(parts, axis=1), device)
            is_token = (found[2] >= 0) & (found[2] < self._vocabulary)
            ids = torch.where(is_token, found[2], _UNKNOWN)
            self._tokens[found[0], found[1]] = ids.to(torch.int32)
        return fresh

    def add(self, rows: torch.Tensor, begins: torch.Tensor, tokens: torch.Tensor) -> None:
        """Writes tokens [B, n] of requests, from the positions `begins` [B] on.

        Values after a request's newest token are never read, so they may be arbitrary.
        """
        places = begins[:, None] + self._offsets[: tokens.shape[1]]
        places = places.clamp_(max=self.width - 1).add_(_FRONT)
        self._tokens[rows[:, None], places] = tokens.to(torch.int32)

    def propose(
        self, rows: torch.Tensor, newest: torch.Tensor, gamma: int, furthest: Sequence[int]
    ) -> Proposal:
        """Looks up B requests.

        rows: [B].  newest: [B], the position of each request's newest token.  furthest: the host's
        upper bound of each of these positions.
        """
        width = self._width_for(max(furthest) + 1)
        if len(furthest) <= _most_rows(width):
            return self._search(rows, newest, gamma, width)
        # Longest requests first, so that few rows are searched with a large width.
        order = sorted(range(len(furthest)), key=furthest.__getitem__, reverse=True)
        places = [0] * len(order)
        for place, row in enumerate(order):
            places[row] = place
        device = self._tokens.device
        sorted_rows, sorted_newest = (part[to_device(order, device)] for part in (rows, newest))
        found: list[Proposal] = []
        first = 0
        while first < len(order):
            width = self._width_for(furthest[order[first]] + 1)
            at = slice(first, first + _most_rows(width))
            found.append(self._search(sorted_rows[at], sorted_newest[at], gamma, width))
            first = at.stop
        back = to_device(places, device)
        return Proposal(*(torch.cat(parts)[back] for parts in zip(*found, strict=True)))

    def _search(self, rows: torch.Tensor, newest: torch.Tensor, gamma: int, width: int) -> Proposal:
        held = self._tokens[:, : _FRONT + width].index_select(0, rows)
        newest = newest.to(torch.int64).clamp(max=width - 1)[:, None]
        suffix = held.gather(1, newest + _FRONT + self._back)
        # Unknown tokens match nothing, not even other unknown tokens.
        suffix = suffix.masked_fill(suffix < 0, _NOTHING)
        same = held.unfold(1, LONGEST_MATCH, 1) == suffix[:, None]
        length = self._lengths[(same * self._bits).sum(dim=2, dtype=torch.int32)]
        # Orders by the length of the match, then by its position, in one number.
        places = self._offsets[:width]
        score = length * width + places
        ends = (length >= LEAST_MATCH) & (places < newest)
        best = score.masked_fill_(~ends, 0).amax(dim=1, keepdim=True).to(torch.int64)
        match, end = best // width, best % width
        # If the match reaches the newest token, the copied text repeats from its beginning.
        period = (newest - end).clamp_(min=1)
        ahead = end + 1 + self._offsets[:gamma].to(torch.int64) % period
        tokens = held.gather(1, ahead.clamp_(max=width - 1).add_(_FRONT)).to(torch.int64)
        return Proposal(tokens.clamp_(0, self._vocabulary - 1), match[:, 0])

    def _width_for(self, length: int) -> int:
        width = _WIDTH_LEAST
        while width < length:
            width *= 2
        return min(width, self.width)
