"""Steps that a DFlash drafter has not read yet.

What it reads of a step goes into its cache position by position, and nothing needs it before it
drafts.  While another drafter drafts, or none, the steps are kept and read in bulk: far cheaper
for each position.  A kept step knows the cache slots it belongs to, so it has to be read before any
of them can be another request's: before the next forward, once a request has left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from engine_shim.sglang.missed import MAX_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

# Where SGLang has rows written that belong to nobody.
_NOWHERE = 0


class Rows(NamedTuple):
    """hidden: [rows, H]; slots, positions: int64[rows].  What was not accepted goes nowhere."""

    hidden: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor


class UnreadSteps:
    """`max_steps` and `max_bytes` of hidden states fill it; 0 steps: nothing is ever kept."""

    def __init__(self, max_steps: int, max_bytes: int = MAX_BYTES) -> None:
        self.max_steps = max_steps
        self._max_bytes = max_bytes
        self._steps: list[Rows] = []
        self._bytes = 0
        self._request_ids: list[str] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, request_ids: Sequence[str], step: Rows, accepted: torch.Tensor) -> None:
        """One more step; accepted: [B] rows of each request that count."""
        width = step.hidden.shape[0] // len(accepted)
        counts = torch.arange(width, device=accepted.device) < accepted[:, None]
        slots = torch.where(counts.flatten(), step.slots, _NOWHERE)
        self._steps.append(step._replace(slots=slots))
        self._bytes += step.hidden.nbytes
        self._request_ids = list(request_ids)

    def are_due(self, request_ids: Sequence[str]) -> bool:
        """Whether they must be read before a decode step of these requests."""
        if not self._steps:
            return False
        full = len(self._steps) >= self.max_steps or self._bytes >= self._max_bytes
        return full or self._request_ids != list(request_ids)

    def take(self) -> Rows:
        """All of them, and they are read."""
        rows = Rows(*(torch.cat(columns) for columns in zip(*self._steps, strict=True)))
        self._steps.clear()
        self._bytes = 0
        return rows


class LazyReader:
    """When a drafter reads: at once while it drafts, else as late as can be.

    keeps_steps: how many it may leave unread; 0: it reads all at once.  block: the `BlockDrafter`.
    """

    def __init__(self, keeps_steps: int) -> None:
        self._unread = UnreadSteps(keeps_steps)

    def before_prefill(self, block: Any) -> None:
        """Slots may change hands now."""
        if len(self._unread):
            self._read(block)

    def before_step(self, block: Any, batch: Any, *, drafts: bool) -> None:
        """drafts: it drafts the decode step that begins."""
        if not len(self._unread):
            return
        if drafts or self._unread.are_due([request.rid for request in batch.reqs]):
            self._read(block)

    def after_step(
        self, block: Any, batch: Any, result: Any, hidden: torch.Tensor, kv_loc_plan: Any, *,
        drafts: bool,
    ) -> None:  # fmt: skip
        """drafts: it drafted the step that was verified, and may draft the next one."""
        if drafts or self._unread.max_steps == 0:
            block.read_step(batch, result, hidden, kv_loc_plan)
        else:
            step = block.rows_of(batch, hidden, kv_loc_plan)
            self._unread.add([request.rid for request in batch.reqs], step, result.accept_lens)

    def _read(self, block: Any) -> None:
        rows = self._unread.take()
        block.read(rows.hidden, rows.slots, rows.positions)
