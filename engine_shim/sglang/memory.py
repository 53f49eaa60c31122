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
WRAPPER_BYTES: Final = 8 * MIB
LENGTHS_BYTES: Final = 32768 * 4
# TensorRT-LLM allocates counters for at least this number of rows.
MIN_COUNTER_ROWS: Final = 8192
# More than any GPU has on which these backends run (a B200 has 148).  The real number is unknown
# here, because this may run on a machine without a GPU.
MULTIPROCESSORS: Final = 160
# Rows of the partial results of Triton's persistent decode kernel, for each multiprocessor.
PERSISTENT_KERNEL_ROWS: Final = 16
# Tokens to which the block tables of latent attention are rounded up; tokens in FlashMLA's blocks.
TABLE_MULTIPLE_TOKENS: Final = 4096
FLASHMLA_BLOCK_TOKENS: Final = 64
# Width of the outputs that TensorRT-LLM's latent attention unpads.
UNPADDED_WIDTH: Final = 512

# SGLang's rule for the graphs of one sequence, in MiB.
GRAPH_MIB_PER_SEQUENCE: Final = 2


class BackendRole(Enum):
    """The task of a backend instance for a draft length."""

    VERIFY = auto()
    EXTEND = auto()
    STEP = auto()


@dataclass(frozen=True, slots=True)
class Attention:
    """Describes one model's attention, for one rank.

    is_latent: whether it is multi-head latent attention; context_tokens: longest sequence;
    page_tokens: tokens of a KV cache page; rank_heads, total_heads: query heads on one rank and on
    all; value_size: numbers of a cached value (of the latent, for latent attention); kv_splits:
    partial results of a token in Triton's kernel; latent_values: numbers of a cached latent;
    bytes_per_value: bytes of one cached number; max_requests: most requests at once;
    workspace_bytes: of FlashInfer's workspace; has_sliding_window: whether layers with a sliding
    window have their own pool.
    """

    is_latent: bool
    context_tokens: int
    page_tokens: int
    rank_heads: int
    total_heads: int
    value_size: int
    kv_splits: int
    latent_values: int
    bytes_per_value: int
    max_requests: int
    workspace_bytes: int
    has_sliding_window: bool

    @property
    def pages(self) -> int:
        """Returns the pages of the longest sequence."""
        return -(-self.context_tokens // self.page_tokens)


@dataclass(frozen=True, slots=True)
class BackendUse:
    """Describes a backend instance.

    graph_batches: batch sizes for which graphs are captured; () without graphs.
    """

    role: BackendRole
    gamma: int
    graph_batches: Sequence[int]

    @property
    def max_batch(self) -> int:
        """Returns the largest batch that is captured."""
        return max(self.graph_batches, default=0)

    @property
    def max_pass_tokens(self) -> int:
        """Returns the tokens of the largest pass that is captured."""
        return self.max_batch * self.tokens_per_sequence

    @property
    def tokens_per_sequence(self) -> int:
        """Returns the tokens of one sequence in a pass."""
        return 1 if self.role is BackendRole.STEP else self.gamma + 1


@dataclass(frozen=True, slots=True)
class BackendBytes:
    """Allocations in bytes.  base_bytes: with or without graphs; graph_bytes: for graphs only."""

    base_bytes: int = 0
    graph_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Backend:
    """Describes one of SGLang's backends.

    compute_bytes: allocations of one instance; index_bytes: bytes per context token of the KV index
    buffer that all passes of a draft share; is_exact: whether `compute_bytes` follows SGLang's
    source and is not an approximation.
    """

    compute_bytes: Callable[[Attention, BackendUse], BackendBytes]
    index_bytes: int = 0
    is_exact: bool = True


def find_backend(name: str, model: Attention) -> Backend:
    """Returns a backend by SGLang's name; an approximation for unknown backends."""
    if model.is_latent and name == "flashinfer":
        return _FLASHINFER_LATENT
    return _BACKENDS.get(name, _APPROXIMATED)


def _flashinfer(model: Attention, use: BackendUse) -> BackendBytes:
    base_bytes = _wrapper_bytes(model, use)
    if use.role is BackendRole.STEP:
        return BackendBytes(base_bytes, len(use.graph_batches) * WRAPPER_BYTES)
    if use.role is BackendRole.VERIFY:
        base_bytes += model.workspace_bytes
    # Indices (int32) and a mask (uint8) of every token, and a wrapper for every graph.
    pools = _pool_count(model)
    table_bytes = use.max_pass_tokens * model.context_tokens * (4 * pools + 1)
    return BackendBytes(
        base_bytes, table_bytes + len(use.graph_batches) * pools * (WRAPPER_BYTES + LENGTHS_BYTES)
    )


def _wrapper_bytes(model: Attention, use: BackendUse) -> int:
    if use.role is BackendRole.STEP:  # ragged prefill and decoding
        return 2 * WRAPPER_BYTES
    # Ragged prefill; paged prefill, verification and decoding, twice with a sliding window.
    return WRAPPER_BYTES + _pool_count(model) * (3 * WRAPPER_BYTES + 2 * LENGTHS_BYTES)


def _flashinfer_latent(model: Attention, use: BackendUse) -> BackendBytes:
    if use.role is BackendRole.STEP:
        return BackendBytes(2 * WRAPPER_BYTES, len(use.graph_batches) * WRAPPER_BYTES)
    base_bytes = 4 * WRAPPER_BYTES
    if use.role is BackendRole.EXTEND:  # SGLang captures no graph of it
        return BackendBytes(base_bytes)
    return BackendBytes(
        base_bytes,
        use.max_batch * model.context_tokens * 4 + len(use.graph_batches) * WRAPPER_BYTES,
    )


def _triton(model: Attention, use: BackendUse) -> BackendBytes:
    if not use.graph_batches:
        return BackendBytes()
    # Values and a weight, in float32.
    values = model.value_size + 1
    graph_bytes = use.max_pass_tokens * model.rank_heads * model.kv_splits * values * 4
    graph_bytes += MULTIPROCESSORS * (PERSISTENT_KERNEL_ROWS * (values + 1) + 1) * 4
    if use.role is not BackendRole.STEP:
        graph_bytes += use.max_pass_tokens * model.context_tokens * 8
    if use.role is BackendRole.VERIFY:
        graph_bytes += use.max_pass_tokens * (model.context_tokens + use.tokens_per_sequence)
    return BackendBytes(0, graph_bytes * _pool_count(model))


def _flash_attention(model: Attention, use: BackendUse) -> BackendBytes:
    if not use.graph_batches:
        return BackendBytes()
    # Page tables for decoding, drafting, verification and reading; int64 indices for three.
    return BackendBytes(
        0, 4 * use.max_batch * model.pages * 4 * _pool_count(model) + 3 * model.pages * 8
    )


def _trtllm_mha(model: Attention, use: BackendUse) -> BackendBytes:
    # Rows of the widest pass for every task; heads are not divided by the ranks.
    counters = _counter_bytes((model.max_requests + 1) * (use.gamma + 1), model.total_heads)
    table_bytes = 4 * use.max_batch * model.pages * 4 * _pool_count(model)
    # It extends FlashInfer's backend, whose wrappers it has and does not use.
    return BackendBytes(_wrapper_bytes(model, use) + counters, table_bytes)


def _trtllm_latent(model: Attention, use: BackendUse) -> BackendBytes:
    # Inherited wrappers: ragged prefill, and outside of drafting paged prefill.
    inherited = WRAPPER_BYTES if use.role is BackendRole.STEP else 2 * WRAPPER_BYTES
    base_bytes = inherited + _counter_bytes(model.max_requests, model.rank_heads)
    blocks = (
        -(-model.context_tokens // TABLE_MULTIPLE_TOKENS)
        * TABLE_MULTIPLE_TOKENS
        // model.page_tokens
    )
    # Padded queries and unpadded outputs.
    values = use.max_pass_tokens * model.rank_heads * (model.latent_values + UNPADDED_WIDTH)
    graph_bytes = use.max_batch * blocks * 4 + values * model.bytes_per_value
    if use.role is not BackendRole.STEP:
        graph_bytes += use.max_batch * model.context_tokens * 4
    return BackendBytes(base_bytes, graph_bytes)


def _flashmla(model: Attention, use: BackendUse) -> BackendBytes:
    inherited = WRAPPER_BYTES if use.role is BackendRole.STEP else 2 * WRAPPER_BYTES
    blocks = (model.context_tokens + FLASHMLA_BLOCK_TOKENS) // FLASHMLA_BLOCK_TOKENS
    return BackendBytes(inherited, use.max_batch * blocks * 4)


def _sparse(model: Attention, use: BackendUse) -> BackendBytes:
    """Counts page tables with pages of one token; leaves out the metadata of the kernels."""
    return BackendBytes(0, use.max_pass_tokens * model.context_tokens * 4)


def _approximate(model: Attention, use: BackendUse) -> BackendBytes:
    """Approximates a backend by FlashAttention with pages of one token."""
    return BackendBytes(0, 4 * use.max_batch * model.context_tokens * 4 * _pool_count(model))


def _pool_count(model: Attention) -> int:
    """Returns the number of pools; the tables of a second one count as large as the first's."""
    return 2 if model.has_sliding_window else 1


def _counter_bytes(rows: int, heads: int) -> int:
    return -(-max(MIN_COUNTER_ROWS, rows) * heads // 8) * 8 * 4


_FLASHINFER_LATENT: Final = Backend(_flashinfer_latent, index_bytes=4)
_APPROXIMATED: Final = Backend(_approximate, is_exact=False)
_BACKENDS: Final = {
    "flashinfer": Backend(_flashinfer, index_bytes=4),
    "triton": Backend(_triton, index_bytes=8),
    "fa3": Backend(_flash_attention),
    "fa4": Backend(_flash_attention),
    "trtllm_mha": Backend(_trtllm_mha),
    "trtllm_mla": Backend(_trtllm_latent, index_bytes=4),
    "cutedsl_mla": Backend(_trtllm_latent, index_bytes=4),
    "flashmla": Backend(_flashmla),
    "dsa": Backend(_sparse, is_exact=False),
    "nsa": Backend(_sparse, is_exact=False),
}


@dataclass(frozen=True, slots=True)
class DrafterAttention:
    """Describes a drafter's attention.

    extend_backend, step_backend: names of the backends that read verified tokens and that draft.
    """

    model: Attention
    extend_backend: str
    step_backend: str


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Describes the attention of an engine's models.

    backend_names: names of the target's backends; graph_backend_names: names of those with captured
    graphs.  drafter: None if all draft lengths share one backend of the drafter, as with DFlash.
    """

    target: Attention
    backend_names: tuple[str, ...]
    graph_backend_names: tuple[str, ...]
    drafter: DrafterAttention | None = None

    @property
    def description(self) -> str:
        """Returns the names of the backends as text for logs and the command line."""
        parts = [f"{'+'.join(self.backend_names)} (target)"]
        if self.drafter is not None:
            names = dict.fromkeys((self.drafter.extend_backend, self.drafter.step_backend))
            parts.append(f"{'+'.join(names)} (drafter)")
        return ", ".join(parts)

    @property
    def is_exact(self) -> bool:
        """Whether all sizes follow SGLang's source, and none is approximated."""
        backends = [(name, self.target) for name in self.backend_names]
        if self.drafter is not None:
            model = self.drafter.model
            backends += [(self.drafter.extend_backend, model), (self.drafter.step_backend, model)]
        return all(
            find_backend(name, model).is_exact and not model.has_sliding_window
            for name, model in backends
        )


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
    def total_mib(self) -> float:
        """Returns the sum, in MiB."""
        return self.graphs + self.backends + self.tables


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted device memory of the draft lengths but the first, and of the plugin's own parts.

    start_gamma: the first draft length.  parts_mib: MiB by purpose.
    """

    shape: AttentionShape
    start_gamma: int
    reserves: tuple[Reserve, ...]
    parts_mib: Mapping[str, float] = field(default_factory=dict)

    @property
    def total_mib(self) -> float:
        """Returns the sum of all parts, in MiB."""
        return sum(row.total_mib for row in self.reserves) + sum(self.parts_mib.values())

    def __str__(self) -> str:
        """Returns one sentence for the log."""
        per_length = ", ".join(f"{row.gamma}: {row.total_mib:.0f}" for row in self.reserves)
        parts = "".join(f", and {size:.1f} for {name}" for name, size in self.parts_mib.items())
        return (
            f"{self.total_mib:.0f} MiB are kept free for the draft lengths other than "
            f"{self.start_gamma} (MiB by length: {per_length}{parts}), for the attention backends "
            f"{self.shape.description}"
            f"{'' if self.shape.is_exact else ', whose sizes are approximated'}"
        )


def predict_reserve(gamma: int, batches: Sequence[int], shape: AttentionShape) -> Reserve:
    """Returns the memory of a draft length.

    batches: batch sizes for which its graphs are captured, () for none.
    """
    sizes = [*_target_sizes(gamma, batches, shape), *_drafter_sizes(gamma, batches, shape.drafter)]
    max_batch_size = max(batches, default=0)
    return Reserve(
        gamma,
        max_batch_size,
        float(GRAPH_MIB_PER_SEQUENCE * max_batch_size),
        sum(size.base_bytes for size in sizes) / MIB,
        sum(size.graph_bytes for size in sizes) / MIB,
    )


def _target_sizes(gamma: int, batches: Sequence[int], shape: AttentionShape) -> list[BackendBytes]:
    return [
        find_backend(name, shape.target).compute_bytes(
            shape.target,
            BackendUse(
                BackendRole.VERIFY, gamma, batches if name in shape.graph_backend_names else ()
            ),
        )
        for name in shape.backend_names
    ]


def draft_pass_bytes(
    name: str, gamma: int, batches: Sequence[int], model: Attention
) -> BackendBytes:
    """Returns the allocations of a draft's passes after the first, which is the draft-extend."""
    if gamma <= 1:
        return BackendBytes()
    step_backend, use = find_backend(name, model), BackendUse(BackendRole.STEP, gamma, batches)
    index_bytes = gamma * use.max_batch * model.context_tokens * step_backend.index_bytes
    pass_bytes = step_backend.compute_bytes(model, use)
    return BackendBytes(
        (gamma - 1) * pass_bytes.base_bytes, index_bytes + (gamma - 1) * pass_bytes.graph_bytes
    )


def _drafter_sizes(
    gamma: int, batches: Sequence[int], drafter: DrafterAttention | None
) -> list[BackendBytes]:
    if drafter is None:
        return []
    model, use = drafter.model, BackendUse(BackendRole.EXTEND, gamma, batches)
    extend = find_backend(drafter.extend_backend, model).compute_bytes(model, use)
    return [extend, draft_pass_bytes(drafter.step_backend, gamma, batches, model)]
