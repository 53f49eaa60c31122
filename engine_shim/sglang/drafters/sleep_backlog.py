"""A bounded buffer of the steps that a sleeping drafter has missed, over all requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

# Catching up has a prefill's shape, and SGLang's default for those is a chunk of 8192 tokens.
MAX_POSITIONS: Final = 8192
# Device memory of the buffer; a catch-up needs as much again while it sorts the rows.
MAX_BYTES: Final = 256 * 2**20


@dataclass(slots=True, eq=False)
class BacklogStep:
    """One step that the drafter slept through; `width` rows for each request.

    tokens: int[B * width], what the target chose (for position + 1); hidden: [B * width, H], its
    hidden states at the positions that it read, in the form that the drafter reads.  Both are on
    the device.  known_starts: the first position of each request as the host knew it; it may be up
    to `slack` too small if the previous step was not read back.  counts: how many of a request's
    rows the target has accepted; None until the host has read that back.  In a step without drafts,
    each count is 1.  is_read: the drafter was awake and has read the step; it is stored because
    earlier steps are still missed.
    """

    request_ids: list[str]
    tokens: torch.Tensor
    hidden: torch.Tensor
    known_starts: list[int]
    slack: int = 0
    width: int = 1
    counts: list[int] | None = None
    is_read: bool = False

    def __post_init__(self) -> None:
        """Fills in the counts of a step without drafts."""
        if self.width == 1 and self.counts is None:
            self.counts = [1] * len(self.request_ids)


class BacklogRows(NamedTuple):
    """Describes what the requests of one batch have missed, request after request.

    rows: indices of the requests in the batch; starts, lengths: first missed position and number of
    missed positions of each; order: rows of the concatenated buffer, in the order of the catch-up.
    cold: number of requests whose missed positions do not end at their context length, so that they
    draft without them.  unread: missed positions of those, and of requests that have left.
    """

    rows: list[int]
    starts: list[int]
    lengths: list[int]
    order: list[int]
    cold: int
    unread: int


class SleepBacklog:
    """Stores up to `max_steps` steps, `max_positions` rows or `max_bytes` bytes."""

    def __init__(
        self, max_steps: int, max_positions: int = MAX_POSITIONS, max_bytes: int = MAX_BYTES
    ) -> None:
        self._max_steps = max_steps
        self._max_positions = max_positions
        self._max_bytes = max_bytes
        self._steps: list[BacklogStep] = []
        self._positions = 0
        # Limit for the rows of the stored steps, which all have one size.
        self._max_rows = max_positions
        # Request -> number of the first step that counts for it.
        self._valid_from: dict[str, int] = {}
        # Number of steps that were removed from the buffer.
        self._removed_steps = 0

    def __len__(self) -> int:
        return len(self._steps)

    def is_full_for(self, rows: int) -> bool:
        """Returns whether one more step of `rows` rows would not fit."""
        if not self._steps:
            return False
        too_many = self._positions + rows > self._max_rows
        return too_many or len(self._steps) >= self._max_steps

    def add(self, step: BacklogStep) -> None:
        """Adds a missed step, or a step that was read after missed ones."""
        if not self._steps:
            row_bytes = step.hidden.nbytes // step.hidden.shape[0]
            self._max_rows = min(self._max_positions, self._max_bytes // row_bytes)
        self._steps.append(step)
        self._positions += step.hidden.shape[0]

    def forget_requests(self, request_ids: Sequence[str]) -> None:
        """Drops the backlog of requests that were prefilled, because the drafter read them, too."""
        if self._steps:
            for request_id in request_ids:
                self._valid_from[request_id] = self._removed_steps + len(self._steps)

    def clear(self) -> None:
        """Forgets all steps."""
        self._steps.clear()
        self._valid_from.clear()
        self._positions = self._removed_steps = 0

    @property
    def newest(self) -> BacklogStep | None:
        """The newest step; None when the buffer is empty."""
        return self._steps[-1] if self._steps else None

    def take_counted(self) -> CountedBacklog:
        """Removes and returns the oldest steps, up to the first without known counts.

        The remaining steps are dropped if the drafter has read all of them.
        """
        counted = len(self._steps)
        while counted and self._steps[counted - 1].counts is None:
            counted -= 1
        counted_steps, self._steps = self._steps[:counted], self._steps[counted:]
        part = CountedBacklog(
            counted_steps, self._removed_steps, dict(self._valid_from), is_latest=not self._steps
        )
        self._removed_steps += counted
        self._positions -= sum(step.hidden.shape[0] for step in counted_steps)
        if all(step.is_read for step in self._steps):
            self.clear()
        return part


class CountedBacklog:
    """The steps that a catch-up reads.

    first_number: number of the first one.  valid_from: request -> number of the first step that
    counts.  is_latest: whether no later step remains in the buffer.
    """

    def __init__(
        self,
        steps: Sequence[BacklogStep],
        first_number: int,
        valid_from: Mapping[str, int],
        *,
        is_latest: bool,
    ) -> None:
        self._steps, self._first_number, self._valid_from = steps, first_number, valid_from
        self.is_latest = is_latest

    def concatenate(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns tokens (int64) and hidden states of all these steps, step after step."""
        return (
            torch.cat([step.tokens for step in self._steps]).to(torch.int64),
            torch.cat([step.hidden for step in self._steps]),
        )

    def batch_rows(self, request_ids: Sequence[str], lengths: Sequence[int]) -> BacklogRows:
        """Describes what each request of a batch has missed.

        lengths: the context lengths after these steps.  The missed positions of a request end
        there, unless the request continued unobserved.  Then its oldest step did not start where
        the host saw it, and the request counts as cold.
        """
        backlog: dict[str, list[int]] = {request_id: [] for request_id in request_ids}
        oldest: dict[str, tuple[int, int]] = {}
        cold = unread = step_offset = 0
        for number, step in enumerate(self._steps, self._first_number):
            assert step.counts is not None
            for request_index, (request_id, count) in enumerate(
                zip(step.request_ids, step.counts, strict=True)
            ):
                if self._valid_from.get(request_id, 0) > number:
                    continue
                if request_id not in backlog:
                    unread += 0 if step.is_read else count
                else:
                    first_row = step_offset + request_index * step.width
                    backlog[request_id] += range(first_row, first_row + count)
                    oldest.setdefault(request_id, (step.known_starts[request_index], step.slack))
            step_offset += len(step.request_ids) * step.width
        missed_rows = BacklogRows([], [], [], [], 0, 0)
        for row, (request_id, length) in enumerate(zip(request_ids, lengths, strict=True)):
            order = backlog[request_id]
            if not order:
                continue
            start = length - len(order)
            known_start, slack = oldest[request_id]
            if not known_start <= start <= known_start + slack:
                cold += 1
                unread += len(order)
                continue
            missed_rows.rows.append(row)
            missed_rows.starts.append(start)
            missed_rows.lengths.append(len(order))
            missed_rows.order.extend(order)
        return missed_rows._replace(cold=cold, unread=unread)
