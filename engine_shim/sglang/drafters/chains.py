"""Has SGLang verify chains of tokens, whoever proposed them."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.speculative.eagle_worker_common import build_eagle_verify_input


def fits(draft: Any, batch: Any) -> bool:
    """Whether a batch is no larger than the constant tensors of a draft worker allow."""
    return bool(batch.seq_lens.shape[0] <= draft._topk1_parents_prealloc.shape[0])


def verification_of(draft: Any, batch: Any, tokens: torch.Tensor) -> Any:
    """Returns the `EagleVerifyInput` of tokens [B, gamma] for each request.

    draft: the `EagleDraftWorker` (or what stands for it), set to gamma.
    """
    gamma, size = draft.speculative_num_steps, batch.seq_lens.shape[0]
    return build_eagle_verify_input(
        batch,
        batch.spec_info,
        draft._topk1_parents_prealloc[:size],
        draft._topk1_score_indices_prealloc[:size],
        tokens.contiguous(),
        None,
        target_worker=draft.target_worker,
        topk=1,
        num_steps=gamma,
        num_draft_tokens=gamma + 1,
        tree_mask_mode=draft.tree_mask_mode,
        device=draft.device,
    )
