"""The last verified positions of each running request, with the target's likeliest tokens.

`Readback` copies what steps have verified to the host, in order and without waiting for the device:

put      copies a step on the device, and from there to the host on a side stream
taken    yields the steps that have arrived: at once on a CPU, one or two steps later on a GPU
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from engine_shim.sglang.api import transfer
from engine_shim.sglang.learning.verified_step import Verification, likeliest
from engine_shim.sglang.training.exchange import SPANS, RingRows, RingShape

# Shorter windows teach little, because drafting from them differs from drafting in the engine.
LEAST: Final = 8

# Steps that may be on their way to the host at once.
_SLOTS: Final = 4
# The most requests of a step whose lengths are read back, from the first one on.
JUDGED: Final = 256


@dataclass(slots=True)
class _Window:
    """One request's window in a ring, by positions.

    ring: index of the ring.  start: start of the window.  canvas, end: start and end of the newest
    step's positions.  gained: end of the tokens that the request has gained, where its next step
    starts.  stale: from this position on the trainer's copy is outdated.
    """

    ring: int
    start: int
    canvas: int
    end: int
    gained: int
    stale: int

    @property
    def known(self) -> int:
        """Returns the number of positions before the newest step."""
        return self.canvas - self.start


class Windows:
    """Keeps the windows of as many requests as there are rings.

    A step writes its own rows into the rings.  `write` copies the rows since its last call into
    the trainer's rings.  The cost of both does not depend on the length of the window.
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
            self._rings = shape.made()

    def clear(self) -> None:
        """Forgets all requests."""
        self._windows.clear()
        self._newest = []

    def reserve(self, request_ids: list[str], undrafted: Sequence[int] = ()) -> list[int]:
        """Gives rings to new requests; returns the rows of the batch that have one.

        undrafted: rows that must not be drafted for, which are not used for training.
        """
        silent = set(undrafted)
        teaching = [row for row in range(len(request_ids)) if row not in silent]
        self._make_room([request_ids[row] for row in teaching])
        return [row for row in teaching if request_ids[row] in self._windows]

    def add(self, found: HostRound) -> bool:
        """Adds what a step has verified; returns whether there is a round to learn from.

        Raises ValueError if the rings have no room for the step.
        """
        facts = found.facts
        width = facts.gamma + 1
        if width > self._shape.positions - self._length:
            raise ValueError(
                f"a step of {width} positions does not fit behind a window of {self._length} "
                f"in a ring of {self._shape.positions}"
            )
        moved: list[_Window] = []
        held: list[int] = []
        for place, row in enumerate(facts.kept):
            rid = facts.request_ids[row]
            # Its ring may have been given to another request in the meantime.
            if rid in self._windows:
                moved.append(self._extended(rid, found.starts[row], width, found.accepted[row]))
                held.append(place)
        self._newest = [window for window in moved if window.known >= LEAST]
        if found.rows is not None and moved:
            with torch.inference_mode(False), torch.no_grad():
                self._keep(found.rows, held, moved)
        return bool(self._newest)

    def write(self, tensors: Mapping[str, Tensor], gamma: int) -> int:
        """Updates the trainer's rings, and writes there which rows form the newest round.

        Returns the number of requests in the round.
        """
        chosen = [window for window in self._newest if window.end - window.canvas == gamma + 1]
        if not chosen:
            return 0
        rings: list[int] = []
        positions: list[int] = []
        for window in chosen:
            new = range(max(window.stale, window.start), window.end)
            rings += [window.ring] * len(new)
            positions += new
            window.stale = window.end
        at = torch.tensor(rings), torch.tensor(positions) % self._shape.positions
        for name, ring in self._rings._asdict().items():
            tensors[name][at] = ring[at]
        spans = [(window.ring, window.start, window.end) for window in chosen]
        tensors[SPANS][: len(spans)] = torch.tensor(spans)
        return len(spans)

    def _make_room(self, request_ids: list[str]) -> None:
        """Gives new requests free rings first, then those of requests that left longest ago."""
        running = set(request_ids)
        new = [rid for rid in request_ids if rid not in self._windows]
        if not new:
            return
        gone = [rid for rid in self._windows if rid not in running]
        taken = {window.ring for window in self._windows.values()}
        free = [ring for ring in range(self._shape.requests) if ring not in taken]
        for rid in new:
            if not free and gone:
                free.append(self._windows.pop(gone.pop(0)).ring)
            if not free:
                return
            # `gained` is -1, so the next step starts the window.
            self._windows[rid] = _Window(free.pop(0), 0, 0, 0, gained=-1, stale=0)

    def _extended(self, rid: str, start: int, width: int, accepted: int) -> _Window:
        window = self._windows.pop(rid)
        # Inserted again, so that the order of the windows is that of their last step.
        self._windows[rid] = window
        if window.gained != start:
            # The window is new, or steps of the request were not observed.
            window.start = window.stale = start
        window.start = max(window.start, start - self._length)
        window.canvas, window.end, window.gained = start, start + width, start + accepted
        window.stale = min(window.stale, start)
        return window

    def _keep(self, rows: RingRows, held: list[int], windows: list[_Window]) -> None:
        """Copies these rows of a round into the rings of their windows."""
        chosen = torch.tensor(held)
        width = rows.tokens.shape[1]
        firsts = torch.tensor([window.canvas for window in windows])[:, None]
        at = (
            torch.tensor([window.ring for window in windows])[:, None],
            (firsts + torch.arange(width)) % self._shape.positions,
        )
        for ring, part in zip(self._rings, rows, strict=True):
            ring[at] = part if len(held) == len(part) else part[chosen]


class WeightChanges(NamedTuple):
    """Counts of the changes of a drafter's weights (see `OnlineCounters`); identifies weights."""

    updates: int = 0
    restored: int = 0
    resets: int = 0
    replaced: int = 0


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Holds what the host knows about a step when it is launched.

    request_ids: of B requests.  gamma: drafts of each.  drafted: whether the learner drafted them.
    undrafted: rows that must not be drafted for.  weights: those that served.  kept: the R rows of
    the batch that are read back.
    """

    request_ids: list[str]
    gamma: int
    drafted: bool
    undrafted: Sequence[int]
    weights: WeightChanges
    kept: list[int]


@dataclass(frozen=True, slots=True)
class HostRound:
    """Holds on the host what a step has verified.

    accepted, starts: for the first `JUDGED` requests, the tokens that each gained, bonus included,
    and the position of its first verified token.  rows: the rows that are read back, [R, gamma + 1,
    ...]; None if R is 0.
    """

    facts: StepFacts
    accepted: list[int]
    starts: list[int]
    rows: RingRows | None


class _Slot:
    """Host memory for one step."""

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
    """A step on its way to the host.

    lengths: accepted tokens and starts.  there: event of its arrival; None on a CPU.
    """

    facts: StepFacts
    lengths: tuple[Tensor, ...]
    rows: RingRows | None
    slot: _Slot | None = None
    there: torch.Event | None = None

    @property
    def is_there(self) -> bool:
        """Whether the copy to the host has ended."""
        return self.there is None or self.there.query()


class Readback:
    """Reads back the steps of one engine.

    dropped: number of steps that found no free slot, because the device was too far behind.
    """

    def __init__(self, shape: RingShape, canvas: int, side: transfer.SideStream | None) -> None:
        """Allocates `_SLOTS` slots.

        shape: of the rings for the rows; a step keeps at most as many requests as there are rings.
        canvas: most positions of a step.  side: of the device; None on a CPU.
        """
        self.dropped = 0
        self._shape = shape
        self._side = side
        self._free = (
            [] if side is None else [_Slot(shape, canvas, side.device) for _ in range(_SLOTS)]
        )
        self._coming: deque[_Coming] = deque()

    def put(self, found: Verification, kept: list[int], weights: WeightChanges) -> None:
        """Reads a step back.

        kept: rows of the batch to read back, among the first `JUDGED`.  weights: those that serve.
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
        """Yields the steps that have arrived; each is valid until the next iteration."""
        while self._coming and self._coming[0].is_there:
            one = self._coming.popleft()
            accepted_cpu, starts_cpu = one.lengths
            yield HostRound(one.facts, accepted_cpu.tolist(), starts_cpu.tolist(), one.rows)
            if one.slot is not None:
                self._free.append(one.slot)

    def _rows(self, found: Verification, kept: list[int]) -> RingRows:
        """Copies these rows of the batch, because SGLang reuses its buffers."""
        with torch.inference_mode(False), torch.no_grad():
            size, width = len(found.request_ids), found.gamma + 1
            tokens, features = found.tokens.view(size, width), found.features.view(size, width, -1)
            logits = found.logits.view(size, width, -1)
            # If all rows are kept, they need no selection.
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
