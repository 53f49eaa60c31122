"""The last verified positions of each running request, and what the target said of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from engine_shim.sglang.learning.likeliest import likeliest
from engine_shim.training.exchange import Layout
from engine_shim.training.online import Round

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine_shim.sglang.learning.verified_step import Verification

# A shorter one teaches little, and drafting from it is nothing like drafting in the engine.
LEAST: Final = 8
# Windows of requests that have left are forgotten once there are so many.
_MOST: Final = 256


@dataclass(slots=True)
class Rows:
    """tokens int64 [n], features [n, width], top_tokens and top_logs [n, top]."""

    tokens: Tensor
    features: Tensor
    top_tokens: Tensor
    top_logs: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, first: int, last: int) -> Rows:
        """Returns the rows from `first` to before `last`."""
        at = slice(first, last)
        return Rows(self.tokens[at], self.features[at], self.top_tokens[at], self.top_logs[at])

    def joined(self, other: Rows) -> Rows:
        """These, and the others behind them."""
        return Rows(
            torch.cat([self.tokens, other.tokens]),
            torch.cat([self.features, other.features]),
            torch.cat([self.top_tokens, other.top_tokens]),
            torch.cat([self.top_logs, other.top_logs]),
        )


@dataclass(slots=True)
class _Window:
    """Holds one request: `rows` from position `start` on, and behind them the step's `canvas`.

    accepted: how many of the canvas's rows the request has gained, the first one included.
    """

    start: int
    rows: Rows
    canvas: Rows
    accepted: int

    @property
    def end(self) -> int:
        """The position that the next canvas begins at."""
        return self.start + len(self.rows) + self.accepted


def verified(found: Verification, top: int) -> list[Rows]:
    """Returns by request what a step has verified: the canvas's gamma + 1 positions.

    The tensors are copies: SGLang writes into its own again.
    """
    size, width = len(found.request_ids), found.gamma + 1
    with torch.inference_mode(False), torch.no_grad():
        top_tokens, top_logs = likeliest(found.logits, top)
        canvas = (
            found.tokens.view(size, width).to(torch.int64, copy=True),
            found.features.to(torch.float32, copy=True).view(size, width, -1),
            top_tokens.to(torch.int64).view(size, width, -1),
            top_logs.view(size, width, -1),
        )
        return [Rows(*(part[row] for part in canvas)) for row in range(size)]


class Windows:
    """Keeps all requests' windows.

    length: positions kept of a request; top: the target's likeliest tokens kept of each.
    """

    def __init__(self, length: int, top: int) -> None:
        self._length = length
        self._top = top
        self._windows: dict[str, _Window] = {}
        self._newest: list[str] = []

    def layouts(self, size: tuple[int, int], width: int, vocabulary: int) -> dict[str, Layout]:
        """Describes what `write` fills.  size: requests and positions; width: of the features."""
        top = min(self._top, vocabulary)
        return {
            "tokens": Layout(size, "int64"),
            "features": Layout((*size, width), "float32"),
            "top_tokens": Layout((*size, top), "int64"),
            "top_logs": Layout((*size, top), "float32"),
            "taught": Layout(size, "bool"),
            "valid": Layout(size, "bool"),
            "positions": Layout(size, "int64"),
        }

    def clear(self) -> None:
        """Forgets all requests."""
        self._windows.clear()
        self._newest = []

    def add(self, found: Verification, starts: list[int], accepted: list[int]) -> bool:
        """Adds what a step has verified; True when there is a round to learn from.

        starts: each request's position of the canvas's first token; accepted: tokens that each
        request gained, bonus included.
        """
        canvases = verified(found, self._top)
        with torch.inference_mode(False), torch.no_grad():
            self._newest = []
            rows = zip(found.request_ids, starts, canvases, accepted, strict=True)
            for index, row in enumerate(rows):
                if index not in found.undrafted:
                    self._extend(*row)
        for rid in list(self._windows)[: max(0, len(self._windows) - _MOST)]:
            del self._windows[rid]
        return bool(self._newest)

    def write(self, tensors: Mapping[str, Tensor], most: int, gamma: int) -> tuple[int, int]:
        """The newest round, right-aligned, as `Round` has it; its requests and positions."""
        chosen = [self._windows[rid] for rid in self._newest[:most]]
        chosen = [window for window in chosen if len(window.canvas) == gamma + 1]
        if not chosen:
            return 0, 0
        longest = max(len(window.rows) + len(window.canvas) for window in chosen)
        for name in ("valid", "taught"):
            tensors[name][: len(chosen), -longest:] = False
        for name in ("tokens", "positions", "top_tokens", "top_logs", "features"):
            tensors[name][: len(chosen), -longest:] = 0
        for row, window in enumerate(chosen):
            found = window.rows.joined(window.canvas)
            count = len(found)
            told = Round(
                found.tokens,
                found.features,
                found.top_tokens,
                found.top_logs,
                taught=torch.ones(count, dtype=torch.bool),
                valid=torch.ones(count, dtype=torch.bool),
                positions=torch.arange(window.start, window.start + count),
            )
            for name, part in told._asdict().items():
                tensors[name][row, -count:] = part
        return len(chosen), longest

    def _extend(self, rid: str, start: int, canvas: Rows, accepted: int) -> None:
        before = self._windows.pop(rid, None)
        if before is None or before.end != start:
            # New, or steps of it were not seen.
            before = _Window(start, canvas.cut(0, 0), canvas.cut(0, 0), 0)
        rows = before.rows.joined(before.canvas.cut(0, before.accepted))
        gone = max(0, len(rows) - self._length)
        rows = rows.cut(gone, len(rows))
        self._windows[rid] = _Window(before.start + gone, rows, canvas, accepted)
        if len(rows) >= LEAST:
            self._newest.append(rid)
