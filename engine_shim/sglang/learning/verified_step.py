"""Holds what one pass of the target has computed, and what a step reports of online updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class UpdateStatus(NamedTuple):
    """Holds what a step has to report of online updates.

    updating: one was being computed beside it, or landed before it.  reset: before it the drafter
    went back to earlier weights, or was given others.  seconds: of the one that landed, or 0.
    version: of the drafter that serves, 0 as loaded.  learnt_from: as in proto StepReport.
    """

    updating: bool = False
    reset: bool = False
    seconds: float = 0.0
    version: int = 0
    learnt_from: int | None = None


# Of a step without any.
NO_UPDATE: Final = UpdateStatus()


@dataclass(frozen=True)
class Verification:
    """A canvas of gamma + 1 positions of each of B requests, in SGLang's own buffers.

    Nothing of it waits for the device.

    batch, result: as SGLang hands them to `_draft_extend_for_decode`.  features: [B * (gamma + 1),
    width], the target's hidden states that the learning drafter reads.  by_learner: it drafted
    this step itself, if anything was drafted.  undrafted: rows that must not be drafted for: their
    canvases hold fillers, so that they teach nothing and show nothing of a drafter.
    """

    batch: Any
    result: Any
    features: torch.Tensor
    by_learner: bool = True
    undrafted: Sequence[int] = ()

    @property
    def request_ids(self) -> list[str]:
        """B of them."""
        return [request.rid for request in self.batch.reqs]

    @property
    def gamma(self) -> int:
        """Drafts of each request."""
        return self.features.shape[0] // len(self.batch.reqs) - 1

    @property
    def tokens(self) -> torch.Tensor:
        """int64 [B * (gamma + 1)], of the canvases."""
        found: torch.Tensor = self.batch.spec_info.draft_token.view(-1)
        return found

    @property
    def logits(self) -> torch.Tensor:
        """[B * (gamma + 1), vocabulary], the target's."""
        found: torch.Tensor = self.result.logits_output.next_token_logits
        return found


@dataclass(frozen=True)
class PromptPass:
    """Holds what a prefill has read of B prompts, in SGLang's own buffers.

    Nothing of it waits for the device.  Of positions that were found in the prefix cache nothing is
    computed, and nothing is here.

    starts, lengths: of each request, position of its first row, and its rows.  unfinished: the
    requests whose prompts have further chunks.  tokens: int64 [rows].  features: [rows, width],
    the target's hidden states that the learning drafter reads.
    """

    request_ids: list[str]
    starts: list[int]
    lengths: list[int]
    unfinished: frozenset[str]
    tokens: torch.Tensor
    features: torch.Tensor


def prompt_pass(
    batch: Any,
    tokens: torch.Tensor,
    features: torch.Tensor | None,
) -> PromptPass | None:
    """Makes it of a `ScheduleBatch` that was prefilled; None where a prompt is not tokens alone.

    tokens: its `input_ids` from before the drafter's part, which replaces them.  features: [rows,
    width], the hidden states that the learning drafter reads; None where SGLang keeps no
    hidden states.
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
