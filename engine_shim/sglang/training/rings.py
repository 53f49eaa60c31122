"""Holds the verified positions of running requests in rings, and makes rounds of them.

The row of position p is p modulo the length of the ring.  A step therefore writes its own rows and
moves no others, and engine and trainer agree on where a position is without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from engine_shim.sglang.training.exchange import Layout
from engine_shim.sglang.training.online import Round

# The tensor that says which rows are a round: ring, first position and end of each request.
SPANS: Final = "spans"


class RingRows(NamedTuple):
    """Rows of the rings, or the rings themselves.

    tokens: int64 [..., T].  features: [..., T, width], in the type of the target's hidden states.
    top_tokens: int64 [..., T, top].  top_logs: float32 [..., T, top].
    """

    tokens: Tensor
    features: Tensor
    top_tokens: Tensor
    top_logs: Tensor


@dataclass(frozen=True, slots=True)
class RingShape:
    """Sizes of the rings.

    requests: rings.  positions: rows of one.  width: numbers of the features of a position.  top:
    the target's likeliest tokens of a position.  dtype: of the features, by its name in torch.
    """

    requests: int
    positions: int
    width: int
    top: int
    dtype: str = "float32"

    def layouts(self) -> dict[str, Layout]:
        """Describes the tensors that an engine shares with its trainer."""
        size = self.requests, self.positions
        return {
            "tokens": Layout(size, "int64"),
            "features": Layout((*size, self.width), self.dtype),
            "top_tokens": Layout((*size, self.top), "int64"),
            "top_logs": Layout((*size, self.top), "float32"),
            SPANS: Layout((self.requests, 3), "int64"),
        }

    def made(self) -> RingRows:
        """Makes empty rings."""
        layouts = self.layouts()
        return RingRows(
            *(
                torch.zeros(layouts[name].shape, dtype=getattr(torch, layouts[name].dtype))
                for name in RingRows._fields
            )
        )

    @property
    def bytes(self) -> int:
        """The size of all rings together."""
        return sum(layout.bytes for layout in self.layouts().values())


def read_round(tensors: Mapping[str, Tensor], requests: int) -> Round:
    """Makes a round of copies, right-aligned, of the first `requests` entries of the spans."""
    rings, starts, ends = tensors[SPANS][:requests].unbind(-1)
    longest = int((ends - starts).max())
    positions = ends[:, None] - longest + torch.arange(longest)
    valid = positions >= starts[:, None]
    at = rings[:, None], positions % tensors["tokens"].shape[1]
    found = [tensors[name][at] for name in RingRows._fields]
    for part in found:
        # What an earlier request has left there may be no number.
        part[~valid] = 0
    tokens, features, top_tokens, top_logs = found
    return Round(
        tokens,
        features.float(),
        top_tokens,
        top_logs,
        taught=valid,
        valid=valid,
        positions=torch.where(valid, positions, 0),
    )
