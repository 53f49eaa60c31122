"""Calculates the device memory of one further draft length, in bytes.

SGLang builds a set of attention backends for each draft length: one that verifies (the target's),
one that reads what was verified (the drafter's), and one for each further draft pass.  Their
allocations were read from the source of SGLang 0.5.23 (`layers/attention/*_backend.py`), and the
sizes of the wrappers from FlashInfer 0.7.2, which that version requires.  Buffers of a few numbers
for each request are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

MIB: Final = 2**20
# FlashInfer's integer workspace, which every wrapper has of its own, and the lengths buffer of a
# paged wrapper.
WRAPPER: Final = 8 * MIB
LENGTHS: Final = 32768 * 4
# TensorRT-LLM allocates counters for at least so many rows.
COUNTED_ROWS: Final = 8192
# More than any GPU has on which these backends run (a B200 has 148).  The real number is unknown
# here, because this may run on a machine without a GPU.
MULTIPROCESSORS: Final = 160
# Rows of the partial results of Triton's persistent decode kernel, for each multiprocessor.
LEAN_ROWS: Final = 16
# Tokens to which the block tables of latent attention are rounded up; tokens in FlashMLA's blocks.
TABLE_TOKENS: Final = 4096
FLASHMLA_BLOCK: Final = 64
# Width of the outputs that TensorRT-LLM's latent attention unpads.
UNPADDED: Final = 512

# SGLang's rule for the graphs of one sequence, in MiB.
GRAPH_MIB_PER_SEQUENCE: Final = 2


class Place(Enum):
    """The task of a backend instance for a draft length."""

    VERIFY = auto()
    EXTEND = auto()
    STEP = auto()


@dataclass(frozen=True, slots=True)
class Attention:
    """Describes one model's attention, for one rank.

    latent: whether it is multi-head latent attention; context: longest sequence in tokens; page:
    tokens of a KV cache page; heads, all_heads: query heads on one rank and on all; value_size:
    numbers of a cached value (of the latent, for latent attention); kv_splits: partial results of
    a token in Triton's kernel; cache_numbers: numbers of a cached latent; cache_bytes: bytes of one
    cached number; requests: most requests at once; workspace: bytes of FlashInfer's workspace;
    windowed: whether layers with a sliding window have their own pool.
    """

    latent: bool
    context: int
    page: int
    heads: int
    all_heads: int
    value_size: int
    kv_splits: int
    cache_numbers: int
    cache_bytes: int
    requests: int
    workspace: int
    windowed: bool

    @property
    def pages(self) -> int:
        """Returns the pages of the longest sequence."""
        return -(-self.context // self.page)


@dataclass(frozen=True, slots=True)
class Use:
    """Describes a backend instance.

    batches: batch sizes for which graphs are captured; () without graphs.
    """

    place: Place
    gamma: int
    batches: Sequence[int]

    @property
    def batch(self) -> int:
        """Returns the largest batch that is captured."""
        return max(self.batches, default=0)

    @property
    def tokens(self) -> int:
        """Returns the tokens of the largest pass that is captured."""
        return self.batch * self.width

    @property
    def width(self) -> int:
        """Returns the tokens of one sequence in a pass."""
        return 1 if self.place is Place.STEP else self.gamma + 1


@dataclass(frozen=True, slots=True)
class Size:
    """Allocations in bytes.  built: with or without graphs; captured: for graphs only."""

    built: int = 0
    captured: int = 0


@dataclass(frozen=True, slots=True)
class Backend:
    """Describes one of SGLang's backends.

    size: allocations of one instance; index_bytes: bytes of a context token's index, in the rows
    that the passes of a draft share; exact: whether `size` follows SGLang's source and is not an
    approximation.
    """

    size: Callable[[Attention, Use], Size]
    index_bytes: int = 0
    exact: bool = True


def backend(name: str, model: Attention) -> Backend:
    """Returns a backend by SGLang's name; an approximation for unknown backends."""
    if model.latent and name == "flashinfer":
        return _FLASHINFER_LATENT
    return _BACKENDS.get(name, _UNREAD)


def _flashinfer(model: Attention, use: Use) -> Size:
    built = _wrappers(model, use)
    if use.place is Place.STEP:
        return Size(built, len(use.batches) * WRAPPER)
    if use.place is Place.VERIFY:
        built += model.workspace
    # Indices (int32) and a mask (uint8) of every token, and a wrapper for every graph.
    sets = _pools(model)
    tables = use.tokens * model.context * (4 * sets + 1)
    return Size(built, tables + len(use.batches) * sets * (WRAPPER + LENGTHS))


def _wrappers(model: Attention, use: Use) -> int:
    if use.place is Place.STEP:  # ragged prefill and decoding
        return 2 * WRAPPER
    # Ragged prefill; paged prefill, verification and decoding, twice with a sliding window.
    return WRAPPER + _pools(model) * (3 * WRAPPER + 2 * LENGTHS)


def _flashinfer_latent(model: Attention, use: Use) -> Size:
    if use.place is Place.STEP:
        return Size(2 * WRAPPER, len(use.batches) * WRAPPER)
    built = 4 * WRAPPER
    if use.place is Place.EXTEND:  # SGLang captures no graph of it
        return Size(built)
    return Size(built, use.batch * model.context * 4 + len(use.batches) * WRAPPER)


def _triton(model: Attention, use: Use) -> Size:
    if not use.batches:
        return Size()
    # Values and a weight, in float32.
    numbers = model.value_size + 1
    captured = use.tokens * model.heads * model.kv_splits * numbers * 4
    captured += MULTIPROCESSORS * (LEAN_ROWS * (numbers + 1) + 1) * 4
    if use.place is not Place.STEP:
        captured += use.tokens * model.context * 8
    if use.place is Place.VERIFY:
        captured += use.tokens * (model.context + use.width)
    return Size(0, captured * _pools(model))


def _flash_attention(model: Attention, use: Use) -> Size:
    if not use.batches:
        return Size()
    # Page tables for decoding, drafting, verification and reading; int64 indices for three.
    return Size(0, 4 * use.batch * model.pages * 4 * _pools(model) + 3 * model.pages * 8)


def _trtllm_mha(model: Attention, use: Use) -> Size:
    # Rows of the widest pass for every task; heads are not divided by the ranks.
    counters = _counters((model.requests + 1) * (use.gamma + 1), model.all_heads)
    tables = 4 * use.batch * model.pages * 4 * _pools(model)
    # It extends FlashInfer's backend, whose wrappers it has and does not use.
    return Size(_wrappers(model, use) + counters, tables)


def _trtllm_latent(model: Attention, use: Use) -> Size:
    # Inherited wrappers: ragged prefill, and outside of drafting paged prefill.
    inherited = WRAPPER if use.place is Place.STEP else 2 * WRAPPER
    built = inherited + _counters(model.requests, model.heads)
    blocks = -(-model.context // TABLE_TOKENS) * TABLE_TOKENS // model.page
    # Padded queries and unpadded outputs.
    numbers = use.tokens * model.heads * (model.cache_numbers + UNPADDED)
    captured = use.batch * blocks * 4 + numbers * model.cache_bytes
    if use.place is not Place.STEP:
        captured += use.batch * model.context * 4
    return Size(built, captured)


def _flashmla(model: Attention, use: Use) -> Size:
    inherited = WRAPPER if use.place is Place.STEP else 2 * WRAPPER
    blocks = (model.context + FLASHMLA_BLOCK) // FLASHMLA_BLOCK
    return Size(inherited, use.batch * blocks * 4)


def _sparse(model: Attention, use: Use) -> Size:
    """Counts page tables with pages of one token; leaves out the metadata of the kernels."""
    return Size(0, use.tokens * model.context * 4)


def _unread(model: Attention, use: Use) -> Size:
    """Approximates a backend by FlashAttention with pages of one token."""
    return Size(0, 4 * use.batch * model.context * 4 * _pools(model))


def _pools(model: Attention) -> int:
    """Returns the number of pools; the tables of a second one count as large as the first's."""
    return 2 if model.windowed else 1


def _counters(rows: int, heads: int) -> int:
    return -(-max(COUNTED_ROWS, rows) * heads // 8) * 8 * 4


_FLASHINFER_LATENT: Final = Backend(_flashinfer_latent, index_bytes=4)
_UNREAD: Final = Backend(_unread, exact=False)
_BACKENDS: Final = {
    "flashinfer": Backend(_flashinfer, index_bytes=4),
    "triton": Backend(_triton, index_bytes=8),
    "fa3": Backend(_flash_attention),
    "fa4": Backend(_flash_attention),
    "trtllm_mha": Backend(_trtllm_mha),
    "trtllm_mla": Backend(_trtllm_latent, index_bytes=4),
    "cutedsl_mla": Backend(_trtllm_latent, index_bytes=4),
    "flashmla": Backend(_flashmla),
    "dsa": Backend(_sparse, exact=False),
    "nsa": Backend(_sparse, exact=False),
}


@dataclass(frozen=True, slots=True)
class DrafterAttention:
    """Describes a drafter's attention.

    extend, steps: names of the backends that read verified tokens and that draft.
    """

    model: Attention
    extend: str
    steps: str


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Describes the attention of an engine's models.

    built: names of the target's backends; captured: names of those with captured graphs.
    drafter: None if all draft lengths share one backend of the drafter, as with DFlash.
    """

    target: Attention
    built: tuple[str, ...]
    captured: tuple[str, ...]
    drafter: DrafterAttention | None = None

    @property
    def names(self) -> str:
        """Returns the names of the backends as text for logs and the command line."""
        words = [f"{'+'.join(self.built)} (target)"]
        if self.drafter is not None:
            names = dict.fromkeys((self.drafter.extend, self.drafter.steps))
            words.append(f"{'+'.join(names)} (drafter)")
        return ", ".join(words)

    @property
    def exact(self) -> bool:
        """Whether all sizes follow SGLang's source, and none is approximated."""
        found = [(name, self.target) for name in self.built]
        if self.drafter is not None:
            model = self.drafter.model
            found += [(self.drafter.extend, model), (self.drafter.steps, model)]
        return all(backend(name, model).exact and not model.windowed for name, model in found)


@dataclass(frozen=True, slots=True)
class Reserve:
    """Device memory of one draft length, in MiB.

    batch: the largest batch with a graph, 0 without graphs.  graphs: by SGLang's rule.  backends:
    allocations of attention backends with or without graphs; tables: their allocations for graphs.
    """

    gamma: int
    batch: int
    graphs: float
    backends: float
    tables: float

    @property
    def total(self) -> float:
        """Returns the sum, in MiB."""
        return self.graphs + self.backends + self.tables


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted device memory of the draft lengths but the first, and of the plugin's own parts.

    start: the first draft length.  parts: MiB by purpose.
    """

    shape: AttentionShape
    start: int
    reserves: tuple[Reserve, ...]
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Returns the sum of all parts, in MiB."""
        return sum(row.total for row in self.reserves) + sum(self.parts.values())

    def __str__(self) -> str:
        """Returns one sentence for the log."""
        each = ", ".join(f"{row.gamma}: {row.total:.0f}" for row in self.reserves)
        parts = "".join(f", and {size:.1f} for {name}" for name, size in self.parts.items())
        return (
            f"{self.total:.0f} MiB are left for the draft lengths beside {self.start} (MiB by "
            f"length: {each}{parts}), for the attention backends {self.shape.names}"
            f"{'' if self.shape.exact else ', whose sizes are approximated'}"
        )


def reserve(gamma: int, batches: Sequence[int], shape: AttentionShape) -> Reserve:
    """Returns the memory of a draft length.

    batches: batch sizes for which its graphs are captured, () for none.
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
    """Returns the allocations of a draft's passes after the first, which is the draft-extend."""
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
