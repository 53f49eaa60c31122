"""Makes training signals of the canvases of many rounds: each request's positions, one by one.

Nothing of SGLang, and no thread.

    SignalRuns.read   extends every run as far as the canvases do; ends those of SEGMENT positions
    SignalRuns.end    ends every run

A run ends early when its request leaves, is retracted, or went on unseen; one shorter than LEAST is
no signal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from engine_shim.training.signals import Signal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_shim.sglang.learning.canvases import Canvas

# Positions of one signal, and the fewest that are worth a file.
SEGMENT: Final = 256
LEAST: Final = 32


@dataclass(slots=True)
class _SignalRun:
    """Follows one request, from position `start` on: what was read, and what is to be.

    places: of its rows in the canvases, one behind the other, until they are read.  accepted,
    tried: as a signal has them.
    """

    start: int
    parts: list[dict[str, Tensor]] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    length: int = 0
    accepted: int = 0
    tried: int = 0

    def add(self, first: int, gained: int, drafted: int) -> None:
        """The `gained` rows from `first` on."""
        self.places.extend(range(first, first + gained))
        self.length += gained
        if drafted:
            self.accepted += gained - 1
            self.tried += min(gained, drafted)

    def signal(self) -> Signal:
        tensors = {name: torch.cat([part[name] for part in self.parts]) for name in self.parts[0]}
        return Signal(**tensors, start=self.start, accepted=self.accepted, tried=self.tried)


class SignalRuns:
    """Follows all requests."""

    def __init__(self) -> None:
        self._runs: dict[str, _SignalRun] = {}
        self._over: list[_SignalRun] = []

    def read(self, canvases: Sequence[Canvas]) -> list[Signal]:
        """One after the other, at least one; the signals that they complete."""
        first = 0
        for canvas in canvases:
            found = zip(
                canvas.request_ids, canvas.starts.tolist(), canvas.accepted.tolist(), strict=True
            )
            for index, (rid, start, accepted) in enumerate(found):
                if index not in canvas.undrafted:
                    self._run(rid, start).add(first, accepted, canvas.drafted)
                    if self._runs[rid].length >= SEGMENT:
                        self._over.append(self._runs.pop(rid))
                first += canvas.rows
            for rid in self._runs.keys() - set(canvas.request_ids):
                self._over.append(self._runs.pop(rid))
        self._gather(canvases)
        return self._signals()

    def end(self) -> list[Signal]:
        """The signals of what there is."""
        self._over += self._runs.values()
        self._runs.clear()
        return self._signals()

    def _run(self, rid: str, start: int) -> _SignalRun:
        """Returns the request's run; a new one where steps of it were not seen."""
        run = self._runs.get(rid)
        if run is None or run.start + run.length != start:
            if run is not None:
                self._over.append(run)
            run = self._runs[rid] = _SignalRun(start)
        return run

    def _gather(self, canvases: Sequence[Canvas]) -> None:
        """Each run's rows become a part of it; nothing else of the canvases is kept."""
        runs = [run for run in (*self._over, *self._runs.values()) if run.places]
        tensors = _read(canvases, list(chain.from_iterable(run.places for run in runs)))
        lengths = [len(run.places) for run in runs]
        parts = {name: tensor.split(lengths) for name, tensor in tensors.items()}
        for index, run in enumerate(runs):
            run.parts.append({name: pieces[index] for name, pieces in parts.items()})
            run.places = []

    def _signals(self) -> list[Signal]:
        over, self._over = self._over, []
        return [run.signal() for run in over if run.length >= LEAST]


def _read(canvases: Sequence[Canvas], rows: list[int]) -> dict[str, Tensor]:
    """Returns these rows of the canvases, as a signal has them.  Waits for the device.

    Canvases are brought to the host whole: picking rows takes no memory of the device.
    """
    names = ["tokens", "features", "top_tokens", "top_logs"]
    if canvases[0].final is not None:
        names.append("final")
    at = torch.tensor(rows)
    with torch.inference_mode(False), torch.no_grad():
        return {
            name: torch.cat([getattr(canvas, name).to("cpu") for canvas in canvases])[at]
            for name in names
        }
