"""SGLang 0.5.23, the reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

# Fills in a scheduler's state for `/server_info`; the hook runs after its speculation part.
INTERNAL_STATE: Final = (
    "sglang.srt.managers.scheduler_components.internal_state"
    ".SchedulerInternalStateController._add_speculative"
)


def internal_state(_: None, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Returns the state that a call of INTERNAL_STATE with these arguments has filled in."""
    state: dict[str, Any] = arguments[1]
    return state


# Whether the plugin can steer data-parallel attention.
STEERS_ATTENTION_DP: Final = True


def is_attention_dp_enabled() -> bool:
    """Whether the engine of this process has data-parallel attention."""
    from sglang.srt.runtime_context import get_parallel

    return bool(get_parallel().attn_dp_enabled)


@contextmanager
def disabled_attention_dp() -> Iterator[None]:
    """Makes SGLang resolve adaptive speculation, inside the block, as without attention DP."""
    from sglang.srt.speculative import adaptive_spec_params

    module: Any = adaptive_spec_params
    original = module.attn_dp_enabled_of
    module.attn_dp_enabled_of = lambda _: False
    try:
        yield
    finally:
        module.attn_dp_enabled_of = original


def attention_ranks(view: Any) -> int:
    """Returns how many ranks share the heads of a layer, by a configuration under resolution."""
    ranks: int = view.tp_size // max(1, view.attn_dp_size)
    return ranks


def has_attention_dp(view: Any) -> bool:
    """Whether a resolved configuration has data-parallel attention."""
    from sglang.srt.runtime_context import attn_dp_enabled_of

    return bool(attn_dp_enabled_of(view))


def draft_scope(draft: Any) -> AbstractContextManager[Any]:
    """Returns the ranks' scope of an `EagleDraftWorker`, for passes of its model."""
    from sglang.srt.speculative.spec_utils import draft_tp_context

    scope: AbstractContextManager[Any] = draft_tp_context(draft.parallel_layout)
    return scope


def match_memory_layout(draft: Any, block_worker: Any) -> None:
    """Gives a draft worker the rank layout of a `DFlashWorkerV2`."""
    draft.parallel_layout = block_worker.draft_parallel_layout


@contextmanager
def override_draft_config(target_runner: Any, config: Any) -> Iterator[None]:
    """Gives a target this `ModelConfig` as its drafter's, inside the block."""
    aux = target_runner.spec_aux_config
    saved, aux.draft_model_config = aux.draft_model_config, config
    try:
        yield
    finally:
        aux.draft_model_config = saved
