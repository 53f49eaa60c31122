"""Describes where SGLang 0.5.22 differs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from engine_shim.sglang.api.versions import v0_5_23 as newer

INTERNAL_STATE: Final = newer.INTERNAL_STATE
internal_state = newer.internal_state
attention_ranks = newer.attention_ranks
has_attention_dp = newer.has_attention_dp
override_draft_config = newer.override_draft_config

# The hooks on each rank's requests and on the gathered sizes are untested with this version.
STEERS_ATTENTION_DP: Final = False


def is_attention_dp_enabled() -> bool:
    """Returns False, because an engine with it was refused."""
    return False


def disabled_attention_dp() -> AbstractContextManager[None]:
    """Changes nothing, because data-parallel attention is refused."""
    return nullcontext()


def draft_scope(draft: Any) -> AbstractContextManager[Any]:
    """Does what 0.5.23's does."""
    from sglang.srt.speculative.spec_utils import draft_tp_context

    scope: AbstractContextManager[Any] = draft_tp_context(draft.draft_owns_attention)
    return scope


def match_memory_layout(draft: Any, block_worker: Any) -> None:
    """Does what 0.5.23's does."""
    draft.draft_owns_attention = block_worker.draft_owns_attention
