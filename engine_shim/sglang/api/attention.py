"""Reads from SGLang's configuration what its attention backends allocate for graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from engine_shim.sglang.api import versions
from engine_shim.sglang.graph_memory import FLASHINFER, MIB, AttentionShape

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

_differs: Any = versions.module_for(versions.sglang_version())

# Models for which SGLang's FlashInfer backend enlarges its workspace.
LARGE_WORKSPACE: Final = frozenset(
    {
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "MiMoForCausalLM",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
    }
)
LARGE_MIB: Final = 512
DETERMINISTIC_MIB: Final = 2048


def attention_shape(args: ServerArgs) -> AttentionShape:
    """Returns the shape under these arguments; meant for after the speculation step.

    Where SGLang has not chosen a backend yet, it is asked for its default.
    """
    from sglang.srt.arg_groups import model_override_base as base
    from sglang.srt.arg_groups.overrides import resolving_view

    view: Any = resolving_view(args)
    model: Any = base.model_config_of(args)
    has_mla = bool(base.use_mla_backend(args))
    pair = base.attention_backends_of(view)
    if None in pair:
        default = base.get_default_attn_backend(args, has_mla, model)
        pair = tuple(name or default for name in pair)
    # Different ones are both built: the one that allocates most counts.
    target = FLASHINFER if FLASHINFER in pair else pair[0]
    return AttentionShape(
        target=target,
        draft=view.speculative_draft_attention_backend or target,
        context=model.context_len,
        # MLA backends share one workspace.
        workspace_bytes=0 if has_mla else _workspace_bytes(view, model),
        heads=max(1, model.num_attention_heads // _differs.attention_ranks(view)),
        value_size=model.v_head_dim,
        kv_splits=view.triton_attention_num_kv_splits,
    )


def _workspace_bytes(view: Any, model: Any) -> int:
    """Returns the bytes of one FlashInfer workspace, by the rules of SGLang's backend."""
    from sglang.srt.environ import envs

    if view.enable_deterministic_inference:
        return DETERMINISTIC_MIB * MIB
    if LARGE_WORKSPACE & set(model.hf_config.architectures or ()):
        return LARGE_MIB * MIB
    return int(envs.SGLANG_FLASHINFER_WORKSPACE_SIZE.get())
