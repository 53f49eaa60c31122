"""The last verified positions of each running request, with the target's likeliest tokens.

`Readback` copies what steps have verified to the host, in order and without waiting for the device:

put               copies a step on the device, and from there to the host on a side stream
arrived_rounds    yields the steps that have arrived: at once on a CPU, one or two steps later on
                  a GPU
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from engine_shim.sglang.api import transfer
from engine_shim.sglang.learning.verified_step import Verification, likeliest_tokens
from engine_shim.sglang.training.exchange import SPANS, RingRows, RingShape

# Shorter windows teach little, because drafting from them differs from drafting in the engine.
MIN_WINDOW_POSITIONS: Final = 8

# Steps that may be on their way to the host at once.
_READBACK_SLOTS: Final = 4
# The most requests of a step whose lengths are read back, from the first one on.
MAX_JUDGED_REQUESTS: Final = 256


@dataclass(slots=True)
class _Window:
    """One request's window in a ring, by positions.

    ring: index of the ring.  start: start of the window.  step_start, step_end: start and end of
    the newest step's positions.  next_start: end of the tokens that the request has gained, where
    its next step starts.  stale_from: from this position on the trainer's copy is outdated.
    """

    ring: int
    start: int
    step_start: int
    step_end: int
    next_start: int
    stale_from: int

    @property
    def context_length(self) -> int:
        """Returns the number of positions before the newest step."""
        return self.step_start - self.start


class RequestWindows:
    """Keeps the windows of as many requests as there are rings.

    A step writes its own rows into the rings.  `write_round` copies the rows since its last call
    into the trainer's rings.  The cost of both does not depend on the length of the window.
    """

    def __init__(self, shape: RingShape, length: int) -> None:
        """Makes empty windows.

        length: positions kept of a request; the rings have room for one more step.
        """
        self._length = length
        self._shape = shape
        self._windows: dict[str, _Window] = {}
        self._newest: list[_Window] = []
        with torch.inference_mode(False):
            self._rings = shape.make_rings()

    def clear(self) -> None:
        """Forgets all requests."""
        self._windows.clear()
        self._newest = []

    def reserve_rings(self, request_ids: list[str], undrafted: Sequence[int] = ()) -> list[int]:
        """Gives rings to new requests; returns the rows of the batch that have one.

        undrafted: rows that must not be drafted for, which are not used for training.
        """
        excluded_rows = set(undrafted)
        teaching_rows = [row for row in range(len(request_ids)) if row not in excluded_rows]
        self._assign_rings([request_ids[row] for row in teaching_rows])
        return [row for row in teaching_rows if request_ids[row] in self._windows]

    def add_round(self, host_round: HostRound) -> bool:
        """Adds what a step has verified; returns whether there is a round to learn from.

        Raises ValueError if the rings have no room for the step.
        """
        facts = host_round.facts
        width = facts.gamma + 1
        if width > self._shape.positions - self._length:
            raise ValueError(
                f"a step of {width} positions does not fit behind a window of {self._length} "
                f"in a ring of {self._shape.positions}"
            )
        updated_windows: list[_Window] = []
        row_indices: list[int] = []
        for kept_index, row in enumerate(facts.kept_rows):
            rid = facts.request_ids[row]
            # Its ring may have been given to another request in the meantime.
            if rid in self._windows:
                updated_windows.append(
                    self._extend_window(
                        rid, host_round.starts[row], width, host_round.accepted[row]
                    )
                )
                row_indices.append(kept_index)
        self._newest = [
            window for window in updated_windows if window.context_length >= MIN_WINDOW_POSITIONS
        ]
        if host_round.rows is not None and updated_windows:
            with torch.inference_mode(False), torch.no_grad():
                self._store_rows(host_round.rows, row_indices, updated_windows)
        return bool(self._newest)

    def write_round(self, tensors: Mapping[str, Tensor], gamma: int) -> int:
        """Updates the trainer's rings, and writes there which rows form the newest round.

        Returns the number of requests in the round.
        """
        round_windows = [
            window for window in self._newest if window.step_end - window.step_start == gamma + 1
        ]
        if not round_windows:
            return 0
        rings: list[int] = []
        positions: list[int] = []
        for window in round_windows:
            new_positions = range(max(window.stale_from, window.start), window.step_end)
            rings += [window.ring] * len(new_positions)
            positions += new_positions
            window.stale_from = window.step_end
        index = torch.tensor(rings), torch.tensor(positions) % self._shape.positions
        for name, ring in self._rings._asdict().items():
            tensors[name][index] = ring[index]
        spans = [(window.ring, window.start, window.step_end) for window in round_windows]
        tensors[SPANS][: len(spans)] = torch.tensor(spans)
        return len(spans)

    def _assign_rings(self, request_ids: list[str]) -> None:
        """Gives new requests free rings first, then those of requests that left longest ago."""
        running = set(request_ids)
        new_requests = [rid for rid in request_ids if rid not in self._windows]
        if not new_requests:
            return
        departed = [rid for rid in self._windows if rid not in running]
        used_rings = {window.ring for window in self._windows.values()}
        free_rings = [ring for ring in range(self._shape.requests) if ring not in used_rings]
        for rid in new_requests:
            if not free_rings and departed:
                free_rings.append(self._windows.pop(departed.pop(0)).ring)
            if not free_rings:
                return
            # `next_start` is -1, so the next step starts the window.
            self._windows[rid] = _Window(free_rings.pop(0), 0, 0, 0, next_start=-1, stale_from=0)

    def _extend_window(self, rid: str, start: int, width: int, accepted: int) -> _Window:
        window = self._windows.pop(rid)
        # Inserted again, so that the order of the windows is that of their last step.
        self._windows[rid] = window
        if window.next_start != start:
            # The window is new, or steps of the request were not observed.
            window.start = window.stale_from = start
        window.start = max(window.start, start - self._length)
        window.step_start, window.step_end, window.next_start = (
            start,
            start + width,
            start + accepted,
        )
        window.stale_from = min(window.stale_from, start)
        return window

    def _store_rows(self, rows: RingRows, row_indices: list[int], windows: list[_Window]) -> None:
        """Copies these rows of a round into the rings of their windows."""
        chosen = torch.tensor(row_indices)
        width = rows.tokens.shape[1]
        firsts = torch.tensor([window.step_start for window in windows])[:, None]
        index = (
            torch.tensor([window.ring for window in windows])[:, None],
            (firsts + torch.arange(width)) % self._shape.positions,
        )
        for ring, part in zip(self._rings, rows, strict=True):
            ring[index] = part if len(row_indices) == len(part) else part[chosen]


class WeightChanges(NamedTuple):
    """Counts of the changes of a drafter's weights (see `OnlineCounters`); identifies weights."""

    updates: int = 0
    restored: int = 0
    resets: int = 0
    replaced: int = 0


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Holds what the host knows about a step when it is launched.

    request_ids: of B requests.  gamma: drafts of each.  is_by_learner: whether the learner drafted
    them. undrafted_rows: rows that must not be drafted for.  weight_changes: identifies the weights
    that served.  kept_rows: the R rows of the batch that are read back.
    """

    request_ids: list[str]
    gamma: int
    is_by_learner: bool
    undrafted_rows: Sequence[int]
    weight_changes: WeightChanges
    kept_rows: list[int]


@dataclass(frozen=True, slots=True)
class HostRound:
    """Holds on the host what a step has verified.

    accepted, starts: for the first `MAX_JUDGED_REQUESTS` requests, the tokens that each gained,
    bonus included, and the position of its first verified token.  rows: the rows that are read
    back, [R, gamma + 1, ...]; None if R is 0.
    """

    facts: StepFacts
    accepted: list[int]
    starts: list[int]
    rows: RingRows | None


class _HostSlot:
    """Host memory for one step."""

    def __init__(self, shape: RingShape, step_positions: int, device: torch.device) -> None:
        layouts = shape.layouts()
        self._counts_and_starts = transfer.host_buffer(
            (2 * MAX_JUDGED_REQUESTS,), torch.int64, device
        )
        self._row_buffers = [
            transfer.host_buffer(
                (shape.requests * step_positions, *layouts[name].shape[2:]),
                getattr(torch, layouts[name].dtype),
                device,
            )
            for name in RingRows._fields
        ]

    def counts_and_starts(self, source: Tensor) -> Tensor:
        """Returns the part of the memory that these lengths need."""
        return self._counts_and_starts[: source.numel()].view(source.shape)

    def rows(self, source: RingRows) -> RingRows:
        """Returns the part of the memory that these rows need."""
        pairs = zip(self._row_buffers, source, strict=True)
        return RingRows(
            *(buffer[: source.tokens.numel()].view(part.shape) for buffer, part in pairs)
        )


@dataclass(frozen=True, slots=True)
class _PendingStep:
    """A step on its way to the host.

    counts_and_starts: accepted tokens and starts.  copy_done: event of its arrival; None on a CPU.
    """

    facts: StepFacts
    counts_and_starts: tuple[Tensor, ...]
    rows: RingRows | None
    slot: _HostSlot | None = None
    copy_done: torch.Event | None = None

    @property
    def has_arrived(self) -> bool:
        """Whether the copy to the host has ended."""
        return self.copy_done is None or self.copy_done.query()


class Readback:
    """Reads back the steps of one engine.

    dropped: number of steps that found no free slot, because the device was too far behind.
    """

    def __init__(
        self, shape: RingShape, step_positions: int, side: transfer.SideStream | None
    ) -> None:
        """Allocates `_READBACK_SLOTS` slots.

        shape: of the rings for the rows; a step keeps at most as many requests as there are rings.
        step_positions: most positions of a step.  side: of the device; None on a CPU.
        """
        self.dropped = 0
        self._shape = shape
        self._side_stream = side
        self._free_slots = (
            []
            if side is None
            else [_HostSlot(shape, step_positions, side.device) for _ in range(_READBACK_SLOTS)]
        )
        self._pending: deque[_PendingStep] = deque()

    def put(
        self, verification: Verification, kept_rows: list[int], weight_changes: WeightChanges
    ) -> None:
        """Reads a step back.

        kept_rows: rows of the batch to read back, among the first `MAX_JUDGED_REQUESTS`.
        weight_changes: identifies the weights that serve.
        """
        if self._side_stream is not None and not self._free_slots:
            self.dropped += 1
            return
        is_by_learner = verification.gamma > 0 and verification.by_learner
        facts = StepFacts(
            verification.request_ids,
            verification.gamma,
            is_by_learner,
            verification.undrafted,
            weight_changes,
            list(kept_rows),
        )
        counts_and_starts = (
            verification.result.accept_lens[:MAX_JUDGED_REQUESTS],
            verification.batch.seq_lens[:MAX_JUDGED_REQUESTS],
        )
        rows = self._copy_rows(verification, kept_rows) if kept_rows else None
        if self._side_stream is None:
            self._pending.append(_PendingStep(facts, counts_and_starts, rows))
        else:
            self._copy_to_host(self._side_stream, facts, counts_and_starts, rows)

    def _copy_to_host(
        self,
        side: transfer.SideStream,
        facts: StepFacts,
        counts_and_starts: tuple[Tensor, ...],
        rows: RingRows | None,
    ) -> None:
        """Copies a step into a slot, on the side stream."""
        slot = self._free_slots.pop()
        with torch.inference_mode(False), torch.no_grad():
            length_stack = torch.stack([part.long() for part in counts_and_starts])
            slot_rows = None if rows is None else slot.rows(rows)
            pairs = [(slot.counts_and_starts(length_stack), length_stack)]
            if rows is not None and slot_rows is not None:
                pairs += zip(slot_rows, rows, strict=True)
            copy_done = side.copy(pairs)
        self._pending.append(_PendingStep(facts, pairs[0][0].unbind(), slot_rows, slot, copy_done))

    def arrived_rounds(self) -> Iterator[HostRound]:
        """Yields the steps that have arrived; each is valid until the next iteration."""
        while self._pending and self._pending[0].has_arrived:
            pending_step = self._pending.popleft()
            accepted_cpu, starts_cpu = pending_step.counts_and_starts
            yield HostRound(
                pending_step.facts, accepted_cpu.tolist(), starts_cpu.tolist(), pending_step.rows
            )
            if pending_step.slot is not None:
                self._free_slots.append(pending_step.slot)

    def _copy_rows(self, verification: Verification, kept_rows: list[int]) -> RingRows:
        """Copies these rows of the batch, because SGLang reuses its buffers."""
        with torch.inference_mode(False), torch.no_grad():
            batch_size, width = len(verification.request_ids), verification.gamma + 1
            tokens, features = (
                verification.tokens.view(batch_size, width),
                verification.features.view(batch_size, width, -1),
            )
            logits = verification.logits.view(batch_size, width, -1)
            # If all rows are kept, they need no selection.
            if len(kept_rows) < batch_size:
                row_index = transfer.to_device(kept_rows, tokens.device)
                tokens, features, logits = tokens[row_index], features[row_index], logits[row_index]
            top_tokens, top_logprobs = likeliest_tokens(logits.flatten(0, 1), self._shape.top)
            return RingRows(
                tokens.to(torch.int64, copy=True),
                features.to(getattr(torch, self._shape.dtype), copy=True),
                top_tokens.view(len(kept_rows), width, -1).long(),
                top_logprobs.view(len(kept_rows), width, -1),
            )
