"""Holds what one pass of the target has computed, and what a step reports of online updates.

The target's likeliest tokens are computed from its logits in a bounded amount of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

# Device memory for intermediate results; it always suffices for at least one row.
MAX_WORKING_BYTES: Final = 64 << 20
_FLOAT32_BYTES: Final = 4


class UpdateStatus(NamedTuple):
    """Holds what a step has to report of online updates.

    updating: an update was being computed during the step, or was applied before it.  reset: before
    the step the drafter's weights were rolled back or replaced.  seconds: duration of the applied
    update, or 0.  version: of the serving drafter, 0 as loaded.  learnt_from: as in proto
    StepReport.
    """

    updating: bool = False
    reset: bool = False
    seconds: float = 0.0
    version: int = 0
    learnt_from: int | None = None


# The status of a step without updates.
NO_UPDATE: Final = UpdateStatus()


@dataclass(frozen=True)
class Verification:
    """The gamma + 1 verified positions of each of B requests, in SGLang's own buffers.

    No property waits for the device.

    batch, result: as SGLang passes them to `_draft_extend_for_decode`.  features: [B * (gamma + 1),
    width], the target's hidden states that the learning drafter reads.  by_learner: whether that
    drafter drafted this step, if anything was drafted.  undrafted: rows that must not be drafted
    for.  Their positions hold filler tokens, so they are used neither for training nor for
    acceptance.
    """

    batch: Any
    result: Any
    features: torch.Tensor
    by_learner: bool = True
    undrafted: Sequence[int] = ()

    @property
    def request_ids(self) -> list[str]:
        """Returns the ids of the B requests."""
        return [request.rid for request in self.batch.reqs]

    @property
    def gamma(self) -> int:
        """Returns the number of drafts of each request."""
        return self.features.shape[0] // len(self.batch.reqs) - 1

    @property
    def tokens(self) -> torch.Tensor:
        """Returns the verified tokens, int64 [B * (gamma + 1)]."""
        token_ids: torch.Tensor = self.batch.spec_info.draft_token.view(-1)
        return token_ids

    @property
    def logits(self) -> torch.Tensor:
        """Returns the target's logits, [B * (gamma + 1), vocabulary]."""
        target_logits: torch.Tensor = self.result.logits_output.next_token_logits
        return target_logits


@dataclass(frozen=True)
class PromptPass:
    """Holds what a prefill has read of B prompts, in SGLang's own buffers.

    Nothing here waits for the device.  Positions from the prefix cache are not computed, so they
    are not contained.

    starts, lengths: position of the first row and number of rows, for each request.  unfinished:
    the requests whose prompts have further chunks.  tokens: int64 [rows].  features: [rows, width],
    the target's hidden states that the learning drafter reads.
    """

    request_ids: list[str]
    starts: list[int]
    lengths: list[int]
    unfinished: frozenset[str]
    tokens: torch.Tensor
    features: torch.Tensor


def make_prompt_pass(
    batch: Any,
    tokens: torch.Tensor,
    features: torch.Tensor | None,
) -> PromptPass | None:
    """Describes a prefilled `ScheduleBatch`; None if a prompt has other inputs than tokens.

    tokens: its `input_ids` from before the drafter's part, which replaces them.  features: [rows,
    width], the hidden states that the learning drafter reads; None if SGLang keeps no hidden
    states.
    """
    if features is None or any(request.multimodal_inputs is not None for request in batch.reqs):
        return None
    lengths = list(batch.extend_lens)
    if sum(lengths) != len(tokens) or len(features) != len(tokens):
        return None
    unfinished = batch.chunked_req
    return PromptPass(
        [request.rid for request in batch.reqs],
        list(batch.prefix_lens),
        lengths,
        frozenset() if unfinished is None else frozenset({unfinished.rid}),
        tokens,
        features,
    )


def likeliest_tokens(logits: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Returns the likeliest tokens, int32 [rows, top], and their log-probabilities, float32 (nats).

    logits: [rows, vocabulary], of any floating type.  `top` is limited to the vocabulary.  Does not
    wait for the device: the number of passes follows from the shape.
    """
    rows, vocabulary = logits.shape
    top = min(top, vocabulary)
    tokens = torch.empty((rows, top), dtype=torch.int32, device=logits.device)
    logs = torch.empty((rows, top), dtype=torch.float32, device=logits.device)
    # `logsumexp` and `log_softmax` of all rows, and a conversion of all logits, would take as much
    # memory as the logits in float32.
    copies = 1 if logits.dtype is torch.float32 else 2
    step = max(1, MAX_WORKING_BYTES // (copies * _FLOAT32_BYTES * vocabulary))
    for first in range(0, rows, step):
        row_slice = slice(first, first + step)
        part = logits[row_slice].float()
        top_logits, top_indices = part.topk(top, dim=-1)
        maximum = top_logits[:, :1]
        total = torch.sub(part, maximum).exp_().sum(dim=-1, keepdim=True)
        tokens[row_slice] = top_indices
        logs[row_slice] = top_logits - maximum - total.log()
    return tokens, logs
