"""The last verified positions of each running request, and what the target said of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from engine_shim.sglang.training.rings import SPANS, RingRows, RingShape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from engine_shim.sglang.learning.readback import HostRound

# A shorter one teaches little, and drafting from it is nothing like drafting in the engine.
LEAST: Final = 8


@dataclass(slots=True)
class _Window:
    """Describes one request's part of a ring, by positions.

    ring: its number.  start: of the window.  canvas: of the newest step's canvas, `end` behind it.
    gained: behind the last token that the request has gained, where its next canvas begins.
    stale: from here on the trainer's copy differs.
    """

    ring: int
    start: int
    canvas: int
    end: int
    gained: int
    stale: int

    @property
    def known(self) -> int:
        """Positions before the newest canvas."""
        return self.canvas - self.start


class Windows:
    """Keeps the windows of as many requests as there are rings.

    A step writes its own rows into the rings, `write` the rows that are new since it was last
    called into the trainer's copy of the rings.  What both do does not grow with the window.
    """

    def __init__(self, shape: RingShape, length: int) -> None:
        """Makes empty windows.

        length: positions kept of a request; the rings have room for a canvas more.
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

        undrafted: rows that must not be drafted for, which teach nothing.
        """
        silent = set(undrafted)
        teaching = [row for row in range(len(request_ids)) if row not in silent]
        self._make_room([request_ids[row] for row in teaching])
        return [row for row in teaching if request_ids[row] in self._windows]

    def add(self, found: HostRound) -> bool:
        """Adds what a step has verified; True when there is a round to learn from.

        Raises ValueError for a canvas that the rings have no room for.
        """
        facts = found.facts
        width = facts.gamma + 1
        if width > self._shape.positions - self._length:
            raise ValueError(
                f"a canvas of {width} positions does not fit behind a window of {self._length} "
                f"in a ring of {self._shape.positions}"
            )
        moved: list[_Window] = []
        held: list[int] = []
        for place, row in enumerate(facts.kept):
            rid = facts.request_ids[row]
            # Its ring may have gone to another request meanwhile.
            if rid in self._windows:
                moved.append(self._extended(rid, found.starts[row], width, found.accepted[row]))
                held.append(place)
        self._newest = [window for window in moved if window.known >= LEAST]
        if found.rows is not None and moved:
            with torch.inference_mode(False), torch.no_grad():
                self._keep(found.rows, held, moved)
        return bool(self._newest)

    def write(self, tensors: Mapping[str, Tensor], gamma: int) -> int:
        """Brings the trainer's copy up to date, and says there which rows are the newest round.

        Returns the number of its requests.
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
        """Gives rings to new requests, as many as there are, those unseen for longest first."""
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
            # It stands before any position, so the step that follows begins it.
            self._windows[rid] = _Window(free.pop(0), 0, 0, 0, gained=-1, stale=0)

    def _extended(self, rid: str, start: int, width: int, accepted: int) -> _Window:
        window = self._windows.pop(rid)
        # Now it is the one that was seen last.
        self._windows[rid] = window
        if window.gained != start:
            # New, or steps of it were not seen.
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
