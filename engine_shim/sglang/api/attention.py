"""Reads from SGLang's configuration what its attention backends allocate for a draft length."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

from engine_shim.sglang.api import sglang_api, versions
from engine_shim.sglang.memory import (
    MIB,
    MULTIPROCESSORS,
    Attention,
    AttentionShape,
    DrafterAttention,
)

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

_version_api: Any = versions.module_for(versions.sglang_version())
_log = logging.getLogger(__name__)

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
LARGE_WORKSPACE_MIB: Final = 512
DETERMINISTIC_WORKSPACE_MIB: Final = 2048
# Page sizes that a backend accepts; SGLang replaces any other page size by the last one.
ACCEPTED_PAGE_SIZES: Final = {
    "flashmla": (64,),
    "trtllm_mla": (32, 64),
    "cutedsl_mla": (32, 64),
    "trtllm_mha": (16, 32, 128, 64),
}
FA4_PAGE_SIZE: Final = 128
# The fewest tokens of one of Triton's partial results for latent attention, and the tokens of one
# in a deterministic engine.
LATENT_SPLIT_TOKENS: Final = 32
DETERMINISTIC_SPLIT_TOKENS: Final = 256


def attention_shape(args: ServerArgs, *, has_drafter_backends: bool) -> AttentionShape:
    """Returns the attention shape of an engine with these arguments.

    has_drafter_backends: whether each draft length has its own backends of the drafter.  If SGLang
    has not chosen a backend yet, its default is taken.
    """
    from sglang.srt.arg_groups import model_override_base as base

    view = sglang_api.resolving_args(args)
    model: Any = base.model_config_of(args)
    backend_pair = base.attention_backends_of(view)
    if None in backend_pair:
        default = base.get_default_attn_backend(args, bool(base.use_mla_backend(args)), model)
        backend_pair = tuple(name or default for name in backend_pair)
    prefill, decode = backend_pair
    verifies_as_prefill = view.speculative_attention_mode != "decode"
    backend_names = tuple(dict.fromkeys((prefill, decode)))
    draft_backend = view.speculative_draft_attention_backend
    draft_model = _draft_model(args, view, model) if has_drafter_backends else model
    workspace = _workspace_bytes(view, (model, draft_model))
    page_tokens = _settled_page_tokens(view, backend_names, is_latent(model))
    drafter = DrafterAttention(
        _attention(view, draft_model, page_tokens, workspace),
        draft_backend or (prefill if verifies_as_prefill else decode),
        draft_backend or decode,
    )
    return AttentionShape(
        _attention(view, model, page_tokens, workspace),
        backend_names,
        backend_names if verifies_as_prefill else (decode,),
        drafter if has_drafter_backends else None,
    )


def is_latent(model: Any) -> bool:
    """Whether a `ModelConfig` describes multi-head latent attention."""
    return bool(model.attention_arch.name == "MLA")


def _draft_model(args: ServerArgs, view: Any, target: Any) -> Any:
    """Returns the drafter's `ModelConfig`; the target's, which is larger, if it cannot be read."""
    from sglang.srt.configs.model_config import ModelConfig

    try:
        return ModelConfig.from_server_args(
            args,
            model_path=view.speculative_draft_model_path or view.model_path,
            model_revision=view.speculative_draft_model_revision,
            is_draft_model=True,
            context_length=target.context_len,
        )
    except Exception as error:  # noqa: BLE001 - SGLang reports it when it loads the drafter
        _log.warning(
            "the drafter's configuration is unreadable (%r): its memory is estimated with the "
            "target's shape",
            error,
        )
        return target


def _attention(view: Any, model: Any, page: int, workspace: int) -> Attention:
    latent, ranks = is_latent(model), _version_api.attention_ranks(view)
    heads = model.get_max_num_attention_heads()
    return Attention(
        is_latent=latent,
        context_tokens=model.context_len,
        page_tokens=page,
        rank_heads=max(1, heads // ranks),
        total_heads=heads,
        value_size=model.kv_lora_rank if latent else model.v_head_dim,
        kv_splits=_kv_splits(view, model, latent=latent),
        latent_values=model.kv_lora_rank + model.qk_rope_head_dim if latent else 0,
        bytes_per_value=1 if view.kv_cache_dtype.startswith("fp8") else model.dtype.itemsize,
        max_requests=sglang_api.max_requests(view),
        workspace_bytes=workspace,
        has_sliding_window=bool(model.is_hybrid_swa),
    )


def _settled_page_tokens(view: Any, names: tuple[str, ...], latent: bool) -> int:
    """Returns the page size that SGLang will choose after it has sized its memory."""
    page: int = view.page_size or 1
    for name in names:
        accepted = ACCEPTED_PAGE_SIZES.get(
            name, (FA4_PAGE_SIZE,) if name == "fa4" and not latent else ()
        )
        if accepted and page not in accepted:
            page = accepted[-1]
    return page


def _kv_splits(view: Any, model: Any, *, latent: bool) -> int:
    """Returns the number of partial results of a token in Triton's kernel, by SGLang's rules."""
    splits: int = view.triton_attention_num_kv_splits
    if latent:
        ceiling = min(MULTIPROCESSORS, -(-model.context_len // LATENT_SPLIT_TOKENS))
        splits = max(splits, 1 << (ceiling - 1).bit_length())
    tile = view.triton_attention_split_tile_size
    if view.enable_deterministic_inference:
        tile = DETERMINISTIC_SPLIT_TOKENS
    return -(-model.context_len // tile) if tile else splits


def _workspace_bytes(view: Any, models: tuple[Any, ...]) -> int:
    """Returns the bytes of one FlashInfer workspace, by the rules of SGLang's backend."""
    from sglang.srt.environ import envs

    if view.enable_deterministic_inference:
        return DETERMINISTIC_WORKSPACE_MIB * MIB
    names = {name for model in models for name in model.hf_config.architectures or ()}
    if LARGE_WORKSPACE & names:
        return LARGE_WORKSPACE_MIB * MIB
    return int(envs.SGLANG_FLASHINFER_WORKSPACE_SIZE.get())
