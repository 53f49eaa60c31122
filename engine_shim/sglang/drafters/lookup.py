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
MIN_MATCH_TOKENS: Final = 2
MAX_MATCH_TOKENS: Final = 5
# The narrowest part of the buffer that is searched; the width is doubled until it suffices.
_MIN_SEARCH_WIDTH: Final = 256
# Marks unknown tokens, and the padding before a request's first token, with which a suffix can be
# compared at any position.
_UNKNOWN_TOKEN: Final = -1
_UNMATCHABLE_TOKEN: Final = -2
_PADDING_TOKENS: Final = MAX_MATCH_TOKENS - 1
# Device memory that a search may take in addition to the buffer; larger batches are searched in
# parts.  A token takes up to 38 bytes at the peak.
_MAX_SEARCH_BYTES: Final = 64 << 20
_SEARCH_BYTES_PER_TOKEN: Final = 40
_TOKEN_BYTES: Final = 4
# Attributes of SGLang's request: a unique number (clients choose request ids and may repeat one),
# and the row into which the request was read.
_NUMBER_ATTRIBUTE: Final = "speculation_number"
_ROW_ATTRIBUTE: Final = "speculation_row"


def _copy_ids(tokens: Sequence[int]) -> np.ndarray:
    """Copies token ids, because SGLang's array cannot grow while another object has a view."""
    return np.array(tokens, dtype=np.int64)


def _max_search_rows(width: int) -> int:
    """Returns how many rows are searched at once."""
    return max(1, _MAX_SEARCH_BYTES // (_SEARCH_BYTES_PER_TOKEN * width))


class Proposal(NamedTuple):
    """Drafts of B requests.

    tokens: int64 [B, gamma].  match_length: int64 [B], length of the matched suffix in tokens; 0:
    no match, and the tokens are only padding.
    """

    tokens: torch.Tensor
    match_length: torch.Tensor


def device_bytes(rows: int, width: int) -> int:
    """Returns the device memory of a `TokenHistory` of this shape and of its searches."""
    return rows * (_PADDING_TOKENS + width) * _TOKEN_BYTES + max(
        _MAX_SEARCH_BYTES, _SEARCH_BYTES_PER_TOKEN * width
    )


class TokenHistory:
    """Holds the tokens of all running requests: int32 [rows, width] on the device.

    rows: rows of SGLang's request pool.  width: the longest context plus the widest step.
    vocabulary: tokens of the target; other ids, which stand for parts of images, are never
    proposed.
    """

    def __init__(self, rows: int, width: int, vocabulary: int, device: torch.device | str) -> None:
        self.width, self._vocabulary = width, vocabulary
        self._numbers = count(1)
        shape = rows, _PADDING_TOKENS + width
        self._tokens = torch.full(shape, _UNKNOWN_TOKEN, dtype=torch.int32, device=device)
        self._offsets = torch.arange(width, dtype=torch.int32, device=device)
        self._suffix_offsets = torch.arange(-_PADDING_TOKENS, 1, device=device)
        # The agreement of the five tokens as a bit field, the newest token in the highest bit; and
        # for each bit field the number of agreeing tokens before the first difference.
        self._bit_values = 2 ** torch.arange(MAX_MATCH_TOKENS, dtype=torch.uint8, device=device)
        lengths = [f"{bits:0{MAX_MATCH_TOKENS}b}".find("0") for bits in range(2**MAX_MATCH_TOKENS)]
        lengths[-1] = MAX_MATCH_TOKENS
        self._match_lengths = to_device(lengths, device, torch.int32)
        # By row: the number of the request in it, and how many of its tokens the host has written.
        self._row_owners: dict[int, tuple[int, int]] = {}

    @property
    def device_bytes(self) -> int:
        """Returns the device memory of the buffer, in bytes."""
        return self._tokens.nbytes

    def read_prompt(self, requests: Sequence[Any]) -> list[int]:
        """Writes the prompts (or the next parts of them) of a prefill's requests.

        Returns the rows that now belong to another request.
        """
        return self._write_prompts([(r, _copy_ids(r.get_fill_ids())) for r in requests])

    def read_running(self, requests: Sequence[Any]) -> list[int]:
        """Writes the known tokens of requests that decode without a prefill in this engine.

        Returns the rows that now belong to another request.
        """
        row_owners = self._row_owners
        new_requests = [
            r
            for r in requests
            if row_owners.get(r.kv.req_pool_idx, (0, 0))[0] != getattr(r, _NUMBER_ATTRIBUTE, None)
        ]
        if not new_requests:
            return []
        return self._write_prompts(
            [
                (r, np.concatenate((_copy_ids(r.origin_input_ids), _copy_ids(r.output_ids))))
                for r in new_requests
            ]
        )

    def _write_prompts(self, prompts: Sequence[tuple[Any, np.ndarray]]) -> list[int]:
        reassigned_rows: list[int] = []
        parts: list[np.ndarray] = []
        for request, token_ids in prompts:
            row, length = request.kv.req_pool_idx, min(len(token_ids), self.width)
            number = getattr(request, _NUMBER_ATTRIBUTE, 0)
            if not number:
                number = next(self._numbers)
                setattr(request, _NUMBER_ATTRIBUTE, number)
            previous_row = getattr(request, _ROW_ATTRIBUTE, row)
            if previous_row != row and self._row_owners.get(previous_row, (0, 0))[0] == number:
                # If the request returns to that row, the tokens there are outdated.
                del self._row_owners[previous_row]
            setattr(request, _ROW_ATTRIBUTE, row)
            owner, written = self._row_owners.get(row, (0, 0))
            if owner != number or written > length:
                reassigned_rows.append(row)
                written = 0
            if written < length:
                columns = np.arange(_PADDING_TOKENS + written, _PADDING_TOKENS + length)
                parts.append(
                    np.stack((np.full_like(columns, row), columns, token_ids[written:length]))
                )
            self._row_owners[row] = (number, length)
        device = self._tokens.device
        if reassigned_rows:
            self._tokens.index_fill_(0, to_device(reassigned_rows, device), _UNKNOWN_TOKEN)
        if parts:
            writes = to_device(np.concatenate(parts, axis=1), device)
            is_token = (writes[2] >= 0) & (writes[2] < self._vocabulary)
            ids = torch.where(is_token, writes[2], _UNKNOWN_TOKEN)
            self._tokens[writes[0], writes[1]] = ids.to(torch.int32)
        return reassigned_rows

    def add(self, rows: torch.Tensor, starts: torch.Tensor, tokens: torch.Tensor) -> None:
        """Writes tokens [B, n] of requests, from the positions `starts` [B] on.

        Values after a request's newest token are never read, so they may be arbitrary.
        """
        columns = starts[:, None] + self._offsets[: tokens.shape[1]]
        columns = columns.clamp_(max=self.width - 1).add_(_PADDING_TOKENS)
        self._tokens[rows[:, None], columns] = tokens.to(torch.int32)

    def propose(
        self, rows: torch.Tensor, newest: torch.Tensor, gamma: int, newest_bounds: Sequence[int]
    ) -> Proposal:
        """Looks up B requests.

        rows: [B].  newest: [B], the position of each request's newest token.  newest_bounds: the
        host's upper bound of each of these positions.
        """
        width = self._search_width(max(newest_bounds) + 1)
        if len(newest_bounds) <= _max_search_rows(width):
            return self._search(rows, newest, gamma, width)
        # Longest requests first, so that few rows are searched with a large width.
        order = sorted(range(len(newest_bounds)), key=newest_bounds.__getitem__, reverse=True)
        inverse_order = [0] * len(order)
        for sorted_index, row in enumerate(order):
            inverse_order[row] = sorted_index
        device = self._tokens.device
        sorted_rows, sorted_newest = (part[to_device(order, device)] for part in (rows, newest))
        proposals: list[Proposal] = []
        first = 0
        while first < len(order):
            width = self._search_width(newest_bounds[order[first]] + 1)
            batch_slice = slice(first, first + _max_search_rows(width))
            proposals.append(
                self._search(sorted_rows[batch_slice], sorted_newest[batch_slice], gamma, width)
            )
            first = batch_slice.stop
        original_order = to_device(inverse_order, device)
        return Proposal(
            *(torch.cat(parts)[original_order] for parts in zip(*proposals, strict=True))
        )

    def _search(self, rows: torch.Tensor, newest: torch.Tensor, gamma: int, width: int) -> Proposal:
        row_tokens = self._tokens[:, : _PADDING_TOKENS + width].index_select(0, rows)
        newest = newest.to(torch.int64).clamp(max=width - 1)[:, None]
        suffix = row_tokens.gather(1, newest + _PADDING_TOKENS + self._suffix_offsets)
        # Unknown tokens match nothing, not even other unknown tokens.
        suffix = suffix.masked_fill(suffix < 0, _UNMATCHABLE_TOKEN)
        matches = row_tokens.unfold(1, MAX_MATCH_TOKENS, 1) == suffix[:, None]
        length = self._match_lengths[(matches * self._bit_values).sum(dim=2, dtype=torch.int32)]
        # Orders by the length of the match, then by its position, in one number.
        positions = self._offsets[:width]
        score = length * width + positions
        is_match_end = (length >= MIN_MATCH_TOKENS) & (positions < newest)
        best = score.masked_fill_(~is_match_end, 0).amax(dim=1, keepdim=True).to(torch.int64)
        match, end = best // width, best % width
        # If the match reaches the newest token, the copied text repeats from its beginning.
        period = (newest - end).clamp_(min=1)
        draft_positions = end + 1 + self._offsets[:gamma].to(torch.int64) % period
        tokens = row_tokens.gather(
            1, draft_positions.clamp_(max=width - 1).add_(_PADDING_TOKENS)
        ).to(torch.int64)
        return Proposal(tokens.clamp_(0, self._vocabulary - 1), match[:, 0])

    def _search_width(self, length: int) -> int:
        width = _MIN_SEARCH_WIDTH
        while width < length:
            width *= 2
        return min(width, self.width)
