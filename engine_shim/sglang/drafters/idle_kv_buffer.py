"""The steps that a sleeping drafter has missed: a bounded buffer over all requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

# Catching up has a prefill's shape, and SGLang's default for those is a chunk of 8192 tokens.
MAX_POSITIONS: Final = 8192
# On the device: twice as much while a catch-up sorts it.
MAX_BYTES: Final = 256 * 2**20


class BacklogStep(NamedTuple):
    """One step that the drafter slept through; a row for each request.

    tokens: int[B], what the target chose (for position + 1); hidden: [B, H], its hidden states
    at the position that it read, in the form the drafter takes.  Both are on the device.  known:
    the positions as the host knew them, which may each be up to `slack` too small while the step
    before was not read back.
    """

    request_ids: list[str]
    tokens: torch.Tensor
    hidden: torch.Tensor
    known: list[int]
    slack: int = 0


class BacklogRows(NamedTuple):
    """Describes what the requests of one batch have missed, request after request.

    rows: their indices in the batch; starts, lengths: the first missed position and how many there
    are; order: rows of the concatenated buffer, in the order of the catch-up.
    cold: requests whose missed positions do not lead up to the present, so that their drafter
    starts from nothing.  unread: positions of those, and of requests that have left.
    """

    rows: list[int]
    starts: list[int]
    lengths: list[int]
    order: list[int]
    cold: int
    unread: int


class BacklogSteps:
    """The buffer is full with `max_steps` steps, `max_positions` rows, or `max_bytes` of them."""

    def __init__(
        self, max_steps: int, max_positions: int = MAX_POSITIONS, max_bytes: int = MAX_BYTES
    ) -> None:
        self._max_steps = max_steps
        self._max_positions = max_positions
        self._max_bytes = max_bytes
        self._steps: list[BacklogStep] = []
        self._positions = 0
        # Of rows of the present steps, which are all of one size.
        self._most_rows = max_positions
        # Request -> index of the first step that still counts for it.
        self._valid_from: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._steps)

    def is_full_for(self, batch_size: int) -> bool:
        """True when one more step of this size would not fit."""
        if not self._steps:
            return False
        too_many = self._positions + batch_size > self._most_rows
        return too_many or len(self._steps) >= self._max_steps

    def add(self, step: BacklogStep) -> None:
        """One more missed step."""
        if not self._steps:
            row_bytes = step.hidden.nbytes // len(step.request_ids)
            self._most_rows = min(self._max_positions, self._max_bytes // row_bytes)
        self._steps.append(step)
        self._positions += len(step.request_ids)

    def forget(self, request_ids: Sequence[str]) -> None:
        """These requests were prefilled, and the drafter with them: it has missed nothing."""
        if self._steps:
            for request_id in request_ids:
                self._valid_from[request_id] = len(self._steps)

    def clear(self) -> None:
        """Forgets all steps."""
        self._steps.clear()
        self._valid_from.clear()
        self._positions = 0

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens (int64) and hidden states of the whole buffer, step after step."""
        steps = self._steps
        return (
            torch.cat([step.tokens for step in steps]).to(torch.int64),
            torch.cat([step.hidden for step in steps]),
        )

    @property
    def newest_ids(self) -> frozenset[str]:
        """The requests of the newest step; none when the buffer is empty."""
        return frozenset(self._steps[-1].request_ids if self._steps else ())

    def of_batch(self, request_ids: Sequence[str], lengths: Sequence[int]) -> BacklogRows:
        """Describes what each request of a batch has missed; `lengths`: its context lengths now.

        A step at gamma = 0 adds one token to each request, so the missed positions are the last
        ones, unless a request went on unseen: then the oldest of them is not where the host saw it.
        """
        backlog: dict[str, list[int]] = {request_id: [] for request_id in request_ids}
        oldest: dict[str, tuple[int, int]] = {}
        cold = unread = base = 0
        for index, step in enumerate(self._steps):
            for row, request_id in enumerate(step.request_ids, base):
                if self._valid_from.get(request_id, 0) > index:
                    continue
                if request_id in backlog:
                    backlog[request_id].append(row)
                    oldest.setdefault(request_id, (step.known[row - base], step.slack))
                else:
                    unread += 1
            base += len(step.request_ids)
        found = BacklogRows([], [], [], [], 0, 0)
        for row, (request_id, length) in enumerate(zip(request_ids, lengths, strict=True)):
            order = backlog[request_id]
            if not order:
                continue
            start, (known, slack) = length - len(order), oldest[request_id]
            if not known <= start <= known + slack:
                cold += 1
                unread += len(order)
                continue
            found.rows.append(row)
            found.starts.append(start)
            found.lengths.append(len(order))
            found.order.extend(order)
        return found._replace(cold=cold, unread=unread)
