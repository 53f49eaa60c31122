"""Describes where SGLang 0.5.21 differs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from engine_shim.sglang.api.versions import v0_5_22 as newer

# Data-parallel attention is refused.
STEERS_ATTENTION_DP: Final = newer.STEERS_ATTENTION_DP
is_attention_dp_enabled = newer.is_attention_dp_enabled
disabled_attention_dp = newer.disabled_attention_dp
INTERNAL_STATE: Final = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"


def internal_state(output: Any, _: tuple[Any, ...]) -> dict[str, Any]:
    """Does what 0.5.23's does."""
    state: dict[str, Any] = output.internal_state
    return state


def attention_ranks(view: Any) -> int:
    """Returns all ranks, because data-parallel attention is refused."""
    ranks: int = view.tp_size
    return ranks


def has_attention_dp(view: Any) -> bool:
    """Does what 0.5.23's does."""
    return bool(view.enable_dp_attention)


def draft_scope(draft: Any) -> AbstractContextManager[Any]:
    """Does what 0.5.23's does."""
    scope: AbstractContextManager[Any] = draft.draft_tp_context(
        draft.draft_runner.tp_group, owns_attention=draft.draft_owns_attention
    )
    return scope


def match_memory_layout(draft: Any, block_worker: Any) -> None:
    """Does what 0.5.23's does."""
    draft.draft_tp_context = block_worker.draft_tp_context
    draft.draft_owns_attention = block_worker.draft_owns_attention


def override_draft_config(_: Any, __: Any) -> AbstractContextManager[None]:
    """Changes nothing, because here a target does not know its drafter's configuration."""
    return nullcontext()
