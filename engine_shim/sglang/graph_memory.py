"""Calculates what one further draft length takes on the device, by attention backend.

The sizes are those that SGLang's attention backends allocate for each runtime state that it builds
(`init_cuda_graph_state` of flashinfer_backend.py, triton_backend.py, flashattention_backend.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MIB: Final = 2**20
# SGLang's rule for the graphs of one sequence, in MiB.
GRAPH_MIB_PER_SEQUENCE: Final = 2
FLASHINFER: Final = "flashinfer"
TRITON: Final = "triton"


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Describes what the sizes follow from.

    target, draft: names of the attention backends; context: longest sequence in tokens;
    workspace_bytes: of one FlashInfer backend; heads: of queries on one device; value_size: numbers
    of a head's value; kv_splits: partial results that Triton keeps of each token.
    """

    target: str
    draft: str
    context: int
    workspace_bytes: int
    heads: int
    value_size: int
    kv_splits: int


@dataclass(frozen=True, slots=True)
class Reserve:
    """Describes what one draft length takes, in MiB.  tables: masks, indices, results."""

    gamma: int
    batch: int
    graphs: float
    workspace: float
    tables: float

    @property
    def total(self) -> float:
        """The sum, in MiB."""
        return self.graphs + self.workspace + self.tables


def reserve(gamma: int, batch: int, shape: AttentionShape) -> Reserve:
    """Returns what a draft length takes whose graphs are captured up to a batch size.

    The backend itself is built without graphs, too, and with it FlashInfer's workspace.
    """
    tables = _verify_bytes(gamma, batch, shape) + _draft_bytes(gamma, batch, shape)
    return Reserve(
        gamma,
        batch,
        float(GRAPH_MIB_PER_SEQUENCE * batch),
        # Only the target's backend has a workspace of its own: the drafter's share one.
        shape.workspace_bytes / MIB if shape.target == FLASHINFER else 0.0,
        tables / MIB,
    )


def _verify_bytes(gamma: int, batch: int, shape: AttentionShape) -> int:
    """Returns the bytes of the target's backend, for `gamma + 1` tokens each."""
    tokens = batch * (gamma + 1)
    if shape.target == FLASHINFER:
        return tokens * shape.context * (4 + 1)  # indices (int32) and a mask (uint8)
    if shape.target == TRITON:
        mask = tokens * (shape.context + gamma + 1)
        return tokens * shape.context * 8 + mask + _partial_bytes(tokens, shape)
    return batch * shape.context * 4  # a page table with pages of one token


def _draft_bytes(gamma: int, batch: int, shape: AttentionShape) -> int:
    """Returns the bytes of the drafter's backends, one a step and one to catch up."""
    tokens = batch * (gamma + 1)
    steps = gamma if gamma > 1 else 0
    if shape.draft == FLASHINFER:
        return steps * batch * shape.context * 4 + tokens * shape.context * (4 + 1)
    if shape.draft == TRITON:
        indices = (steps * batch + tokens) * shape.context * 8
        passes = max(0, steps - 1) * batch + tokens
        return indices + _partial_bytes(passes, shape)
    return max(1, gamma) * batch * shape.context * 4


def _partial_bytes(tokens: int, shape: AttentionShape) -> int:
    """Returns the bytes of Triton's partial results: float32 values and a weight."""
    return tokens * shape.heads * shape.kv_splits * (shape.value_size + 1) * 4
