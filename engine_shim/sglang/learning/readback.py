"""Brings what steps have verified to the host, in order, without waiting for the device.

put      copies a step's canvases on the device, and from there to the host on a side stream
taken    hands out what has arrived: on a CPU the step itself, on a GPU one or two steps later
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from engine_shim.sglang.api import transfer
from engine_shim.sglang.learning.likeliest import likeliest
from engine_shim.sglang.training.rings import RingRows, RingShape

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine_shim.sglang.learning.verified_step import Verification

# Steps that may be on their way at once.
_SLOTS: Final = 4
# Requests of a step that are read back, from the first one on.
JUDGED: Final = 256


class WeightChanges(NamedTuple):
    """Counts changes of a drafter's weights (see `OnlineCounters`), and so names those in use."""

    updates: int = 0
    restored: int = 0
    resets: int = 0
    replaced: int = 0


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Holds what the host knows of a step as it is launched.

    request_ids: B of them.  gamma: drafts of each.  drafted: the learner drafted them.  undrafted:
    rows that must not be drafted for.  weights: that served.  kept: R rows of the batch whose
    canvases are wanted.
    """

    request_ids: list[str]
    gamma: int
    drafted: bool
    undrafted: Sequence[int]
    weights: WeightChanges
    kept: list[int]


@dataclass(frozen=True, slots=True)
class HostRound:
    """Holds what a step has verified, on the host.

    accepted, starts: of the first `JUDGED` requests, tokens that each gained, bonus included, and
    the position of its canvas's first token.  rows: the canvases that were wanted, [R, gamma + 1,
    ...]; None of none.
    """

    facts: StepFacts
    accepted: list[int]
    starts: list[int]
    rows: RingRows | None


class _Slot:
    """Memory of the host for one step."""

    def __init__(self, shape: RingShape, canvas: int, device: torch.device) -> None:
        layouts = shape.layouts()
        self._lengths = transfer.host_buffer((2 * JUDGED,), torch.int64, device)
        self._rows = [
            transfer.host_buffer(
                (shape.requests * canvas, *layouts[name].shape[2:]),
                getattr(torch, layouts[name].dtype),
                device,
            )
            for name in RingRows._fields
        ]

    def lengths(self, like: Tensor) -> Tensor:
        """Returns the part of the memory that these lengths need."""
        return self._lengths[: like.numel()].view(like.shape)

    def rows(self, like: RingRows) -> RingRows:
        """Returns the part of the memory that these rows need."""
        rooms = zip(self._rows, like, strict=True)
        return RingRows(*(room[: like.tokens.numel()].view(part.shape) for room, part in rooms))


@dataclass(frozen=True, slots=True)
class _Coming:
    """A step on its way.

    lengths: accepted tokens and starts.  there: once it has arrived; None where it was never away.
    """

    facts: StepFacts
    lengths: tuple[Tensor, ...]
    rows: RingRows | None
    slot: _Slot | None = None
    there: torch.Event | None = None

    @property
    def is_there(self) -> bool:
        return self.there is None or self.there.query()


class Readback:
    """Reads back the steps of one engine.

    dropped: steps that found no room, because the device is further behind than it should be.
    """

    def __init__(self, shape: RingShape, canvas: int, side: transfer.SideStream | None) -> None:
        """Makes room for `_SLOTS` steps.

        shape: of the rings that the rows are for; its requests are the most that a step keeps.
        canvas: positions of the longest one.  side: of the device; None: the host has everything.
        """
        self.dropped = 0
        self._shape = shape
        self._side = side
        self._free = (
            [] if side is None else [_Slot(shape, canvas, side.device) for _ in range(_SLOTS)]
        )
        self._coming: deque[_Coming] = deque()

    def put(self, found: Verification, kept: list[int], weights: WeightChanges) -> None:
        """Takes a step.  kept: rows of the batch whose canvases are wanted, of the first `JUDGED`.

        weights: that serve.
        """
        if self._side is not None and not self._free:
            self.dropped += 1
            return
        drafted = found.gamma > 0 and found.by_learner
        facts = StepFacts(
            found.request_ids, found.gamma, drafted, found.undrafted, weights, list(kept)
        )
        lengths = found.result.accept_lens[:JUDGED], found.batch.seq_lens[:JUDGED]
        rows = self._rows(found, kept) if kept else None
        if self._side is None:
            self._coming.append(_Coming(facts, lengths, rows))
        else:
            self._send(self._side, facts, lengths, rows)

    def _send(
        self,
        side: transfer.SideStream,
        facts: StepFacts,
        lengths: tuple[Tensor, ...],
        rows: RingRows | None,
    ) -> None:
        """Copies a step into a slot, on the side stream."""
        slot = self._free.pop()
        with torch.inference_mode(False), torch.no_grad():
            both = torch.stack([part.long() for part in lengths])
            held = None if rows is None else slot.rows(rows)
            pairs = [(slot.lengths(both), both)]
            if rows is not None and held is not None:
                pairs += zip(held, rows, strict=True)
            there = side.copy(pairs)
        self._coming.append(_Coming(facts, pairs[0][0].unbind(), held, slot, there))

    def taken(self) -> Iterator[HostRound]:
        """Yields the steps that have arrived; each is valid until the next one is asked for."""
        while self._coming and self._coming[0].is_there:
            one = self._coming.popleft()
            accepted_cpu, starts_cpu = one.lengths
            yield HostRound(one.facts, accepted_cpu.tolist(), starts_cpu.tolist(), one.rows)
            if one.slot is not None:
                self._free.append(one.slot)

    def _rows(self, found: Verification, kept: list[int]) -> RingRows:
        """Copies these rows of the batch: SGLang writes into its buffers again."""
        with torch.inference_mode(False), torch.no_grad():
            size, width = len(found.request_ids), found.gamma + 1
            tokens, features = found.tokens.view(size, width), found.features.view(size, width, -1)
            logits = found.logits.view(size, width, -1)
            # The whole batch is not gathered first.
            if len(kept) < size:
                chosen = transfer.to_device(kept, tokens.device)
                tokens, features, logits = tokens[chosen], features[chosen], logits[chosen]
            top_tokens, top_logs = likeliest(logits.flatten(0, 1), self._shape.top)
            return RingRows(
                tokens.to(torch.int64, copy=True),
                features.to(getattr(torch, self._shape.dtype), copy=True),
                top_tokens.view(len(kept), width, -1).long(),
                top_logs.view(len(kept), width, -1),
            )
