"""Calculates what one further draft length takes on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from engine_shim.sglang.attention_memory import MIB, Attention, Place, Size, Use, backend

# SGLang's rule for the graphs of one sequence, in MiB.
GRAPH_MIB_PER_SEQUENCE: Final = 2


@dataclass(frozen=True, slots=True)
class DrafterAttention:
    """Describes a drafter's attention.  extend, steps: names of backends, to read and to draft."""

    model: Attention
    extend: str
    steps: str


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Describes the attention of an engine's models.

    built: names of the target's backends; captured: of those that graphs are captured with.
    drafter: None where draft lengths share one backend of the drafter, as with DFlash.
    """

    target: Attention
    built: tuple[str, ...]
    captured: tuple[str, ...]
    drafter: DrafterAttention | None = None

    @property
    def names(self) -> str:
        """The backends in words, for people."""
        words = [f"{'+'.join(self.built)} (target)"]
        if self.drafter is not None:
            names = dict.fromkeys((self.drafter.extend, self.drafter.steps))
            words.append(f"{'+'.join(names)} (drafter)")
        return ", ".join(words)

    @property
    def exact(self) -> bool:
        """Whether all sizes were read off the source, and none is approximated."""
        found = [(name, self.target) for name in self.built]
        if self.drafter is not None:
            model = self.drafter.model
            found += [(self.drafter.extend, model), (self.drafter.steps, model)]
        return all(backend(name, model).exact and not model.windowed for name, model in found)


@dataclass(frozen=True, slots=True)
class Reserve:
    """Describes what one draft length takes, in MiB.

    batch: the largest one with a graph, 0 without graphs.  backends: what attention backends
    allocate with or without graphs; tables: what they allocate for graphs.
    """

    gamma: int
    batch: int
    graphs: float
    backends: float
    tables: float

    @property
    def total(self) -> float:
        """The sum, in MiB."""
        return self.graphs + self.backends + self.tables


@dataclass(frozen=True, slots=True)
class Prediction:
    """Describes what the draft lengths beside the first take, and the plugin's own parts.

    start: the first draft length.  parts: MiB by what they are for.
    """

    shape: AttentionShape
    start: int
    reserves: tuple[Reserve, ...]
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Sum over all of it, in MiB."""
        return sum(row.total for row in self.reserves) + sum(self.parts.values())

    def __str__(self) -> str:
        """One sentence for the log."""
        each = ", ".join(f"{row.gamma}: {row.total:.0f}" for row in self.reserves)
        parts = "".join(f", and {size:.1f} for {name}" for name, size in self.parts.items())
        return (
            f"{self.total:.0f} MiB are left for the draft lengths beside {self.start} (MiB by "
            f"length: {each}{parts}), for the attention backends {self.shape.names}"
            f"{'' if self.shape.exact else ', whose sizes are approximated'}"
        )


def reserve(gamma: int, batches: Sequence[int], shape: AttentionShape) -> Reserve:
    """Returns what a draft length takes whose graphs are captured for these batch sizes.

    () where none are captured.
    """
    sizes = [*_of_target(gamma, batches, shape), *_of_drafter(gamma, batches, shape.drafter)]
    batch = max(batches, default=0)
    return Reserve(
        gamma,
        batch,
        float(GRAPH_MIB_PER_SEQUENCE * batch),
        sum(size.built for size in sizes) / MIB,
        sum(size.captured for size in sizes) / MIB,
    )


def _of_target(gamma: int, batches: Sequence[int], shape: AttentionShape) -> list[Size]:
    return [
        backend(name, shape.target).size(
            shape.target, Use(Place.VERIFY, gamma, batches if name in shape.captured else ())
        )
        for name in shape.built
    ]


def draft_passes(name: str, gamma: int, batches: Sequence[int], model: Attention) -> Size:
    """Returns what the further passes of a draft take; the first one is that which reads."""
    if gamma <= 1:
        return Size()
    steps, use = backend(name, model), Use(Place.STEP, gamma, batches)
    rows = gamma * use.batch * model.context * steps.index_bytes
    each = steps.size(model, use)
    return Size((gamma - 1) * each.built, rows + (gamma - 1) * each.captured)


def _of_drafter(gamma: int, batches: Sequence[int], drafter: DrafterAttention | None) -> list[Size]:
    if drafter is None:
        return []
    model, use = drafter.model, Use(Place.EXTEND, gamma, batches)
    extend = backend(drafter.extend, model).size(model, use)
    return [extend, draft_passes(drafter.steps, gamma, batches, model)]
