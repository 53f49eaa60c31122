"""SGLang 0.5.21."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

INTERNAL_STATE: Final = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"


def internal_state(output: Any, _: tuple[Any, ...]) -> dict[str, Any]:
    """As in 0.5.23."""
    state: dict[str, Any] = output.internal_state
    return state


def has_attention_dp(view: Any) -> bool:
    """As in 0.5.23."""
    return bool(view.enable_dp_attention)


def draft_scope(draft: Any) -> AbstractContextManager[Any]:
    """As in 0.5.23."""
    scope: AbstractContextManager[Any] = draft.draft_tp_context(
        draft.draft_runner.tp_group, owns_attention=draft.draft_owns_attention
    )
    return scope


def lie_like(draft: Any, block_worker: Any) -> None:
    """As in 0.5.23."""
    draft.draft_tp_context = block_worker.draft_tp_context
    draft.draft_owns_attention = block_worker.draft_owns_attention


def with_draft_config(_: Any, __: Any) -> AbstractContextManager[None]:
    """As in 0.5.23; here a target knows nothing of its drafter's."""
    return nullcontext()
