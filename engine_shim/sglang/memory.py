"""Calculates what one further draft length takes on the device, in bytes.

SGLang builds a set of attention backends for each draft length: one that verifies (the target's),
one that reads what was verified (the drafter's), and one for each further pass that drafts.  What
these allocate and keep was read off SGLang 0.5.23 (`layers/attention/*_backend.py`), and the
wrappers' sizes off FlashInfer 0.7.2, which that version requires.  What takes a few numbers for
each request is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

MIB: Final = 2**20
# FlashInfer's integer workspace, which every wrapper has for itself, and a paged wrapper's lengths.
WRAPPER: Final = 8 * MIB
LENGTHS: Final = 32768 * 4
# Rows for which TensorRT-LLM's counters are allocated at least.
COUNTED_ROWS: Final = 8192
# More than any GPU has that these backends run on (a B200 has 148): none may be available here.
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
    """Names what an instance of a backend does for a draft length."""

    VERIFY = auto()
    EXTEND = auto()
    STEP = auto()


@dataclass(frozen=True, slots=True)
class Attention:
    """Describes one model's attention, for one rank.

    latent: it is multi-head latent attention; context: longest sequence in tokens; page: tokens of
    one; heads, all_heads: of queries on one rank and on all; value_size: numbers of a value as the
    cache has it, for latent attention the latent's; kv_splits: partial results that Triton keeps of
    a token; cache_numbers, cache_bytes: of a latent and of one number; requests: most at once;
    workspace: bytes of FlashInfer's; windowed: layers with a sliding window have a pool of their
    own.
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
        """Pages of the longest sequence."""
        return -(-self.context // self.page)


@dataclass(frozen=True, slots=True)
class Use:
    """Describes an instance.  batches: sizes that graphs are captured for; () without graphs."""

    place: Place
    gamma: int
    batches: Sequence[int]

    @property
    def batch(self) -> int:
        """The largest batch that is captured."""
        return max(self.batches, default=0)

    @property
    def tokens(self) -> int:
        """Tokens of the largest pass that is captured."""
        return self.batch * self.width

    @property
    def width(self) -> int:
        """Tokens of one sequence in a pass."""
        return 1 if self.place is Place.STEP else self.gamma + 1


@dataclass(frozen=True, slots=True)
class Size:
    """Describes sizes in bytes.  built: with or without graphs; captured: for graphs only."""

    built: int = 0
    captured: int = 0


@dataclass(frozen=True, slots=True)
class Backend:
    """Describes one of SGLang's backends.

    size: of one instance; index_bytes: of a context token's index, in the rows that the passes of a
    draft share; exact: read off line by line, not approximated.
    """

    size: Callable[[Attention, Use], Size]
    index_bytes: int = 0
    exact: bool = True


def backend(name: str, model: Attention) -> Backend:
    """Returns a backend by SGLang's name; for those that were not read, an approximation."""
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
    # Rows of the widest pass, whatever the place; heads are not divided by the ranks.
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
    """Counts page tables of single tokens, and leaves out the metadata of its kernels."""
    return Size(0, use.tokens * model.context * 4)


def _unread(model: Attention, use: Use) -> Size:
    """Takes it to be like FlashAttention with pages of one token."""
    return Size(0, 4 * use.batch * model.context * 4 * _pools(model))


def _pools(model: Attention) -> int:
    """Counts a second pool's tables as if they were as large as the first one's."""
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
