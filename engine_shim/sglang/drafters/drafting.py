"""Switches the plugin's own drafters off after their first error, and builds verifications."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from sglang.srt.speculative.eagle_worker_common import build_eagle_verify_input

from engine_shim.link.lost_capabilities import error_reason
from engine_shim.sglang.api import ranks

Result = TypeVar("Result")

_log = logging.getLogger(__name__)


class OptionalPart:
    """Base of optional parts of an engine, which are switched off after their first error.

    failure_reason: why the part no longer works; "" while it does.
    """

    def __init__(self, failure_message: str) -> None:
        """Takes the log message for the first error."""
        self.failure_reason, self._failure_message = "", failure_message

    def attempt(self, part: Callable[[], Result]) -> Result | None:
        """Runs a part of the work; returns None if this or an earlier part has failed.

        After the first error no part runs.  With several ranks the error is raised,
        because the other ranks would continue.
        """
        if not self.failure_reason:
            try:
                return part()
            except Exception as error:
                if ranks.has_other_ranks():
                    raise
                self.failure_reason = error_reason(error)
                _log.exception("%s", self._failure_message)
        return None


def fits_draft_worker(draft: Any, batch: Any) -> bool:
    """Whether a batch is no larger than the constant tensors of a draft worker allow."""
    return bool(batch.seq_lens.shape[0] <= draft._topk1_parents_prealloc.shape[0])


def build_verification(draft: Any, batch: Any, tokens: torch.Tensor) -> Any:
    """Returns the `EagleVerifyInput` of tokens [B, gamma] for each request.

    draft: the `EagleDraftWorker` (or its replacement), set to gamma.
    """
    gamma, batch_size = draft.speculative_num_steps, batch.seq_lens.shape[0]
    return build_eagle_verify_input(
        batch,
        batch.spec_info,
        draft._topk1_parents_prealloc[:batch_size],
        draft._topk1_score_indices_prealloc[:batch_size],
        tokens.contiguous(),
        None,
        target_worker=draft.target_worker,
        topk=1,
        num_steps=gamma,
        num_draft_tokens=gamma + 1,
        tree_mask_mode=draft.tree_mask_mode,
        device=draft.device,
    )
