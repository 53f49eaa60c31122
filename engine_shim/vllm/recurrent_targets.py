"""Refuses targets with recurrent layers where vLLM corrupts their state.

Before 0.32, a row without drafts that follows one with accepted drafts reads the wrong state slot:
vLLM uses the first slot instead of the slot of the last accepted token, and its output is wrong
from there on (vllm-project/vllm issues 39273, 40875 and 56531; read in `gdn_attn.py`,
`gpu/model_states/mamba_hybrid.py` and `gpu_model_runner.py`).  Engines that draft for every row are
not affected.  Steering creates such rows: at a draft length of 0, and for requests that must not be
drafted for.  Structured output and sequences at the length limit create them as well, so no choice
of SPECULATION_GAMMAS avoids the error.

In layers of Mamba-1 the state is wrong in every version: neither model runner tells them how many
drafts were accepted, so rejected drafts stay in their state (read in `mamba1_attn.py`,
`mamba_mixer.py` and the two files above, of 0.31 to 0.33).
"""

from __future__ import annotations

import re
from typing import Any, Final

from engine_shim.common.checks import Check, make_check
from engine_shim.common.errors import UnsupportedEngineError
from engine_shim.vllm import vllm_api

# The first version that reads the right state in rows without drafts.
_FIXED_VERSION: Final = "0.32"
_VERSION: Final = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?(?P<suffix>.*)")
_ATTENTION_KINDS: Final = frozenset({"attention", "full_attention"})
# Kinds of layers with a state, and the configuration fields that list the kinds of layers.
_RECURRENT_KINDS: Final = frozenset(
    {"conv", "hybrid", "hybrid_sliding", "linear_attention", "mamba", "recurrent"}
)
_LAYER_LIST_FIELDS: Final = ("layer_types", "layers_block_type")
# Base class of the cache specs of all recurrent layers, and the type name of Mamba-1.
_STATE_SPEC: Final = "MambaSpec"
_MAMBA_1: Final = "MAMBA1"
# Model types in `config.json` whose recurrent layers are Mamba-1.
_MAMBA_1_MODELS: Final = frozenset({"falcon_mamba", "jamba", "mamba"})


def recurrent_check(model: Any) -> Check:
    """Checks a `ModelConfig` against the installed version of vLLM."""
    layer_kind = "recurrent" if is_recurrent(model) else "attention only"
    is_state_corrupted = layer_kind == "recurrent" and corrupts_state(vllm_api.vllm_version())
    model_type = getattr(getattr(model, "hf_config", None), "model_type", "")
    obstacles = {
        _mamba_1_obstacle(): model_type in _MAMBA_1_MODELS,
        _corrupted_state_obstacle(): is_state_corrupted,
    }
    return make_check("layers of the target", layer_kind, obstacles)


def require_correct_state(kv_cache_config: Any) -> None:
    """Raises UnsupportedEngineError if vLLM's caches contain a recurrent state that it corrupts.

    The caches show this even if the model's configuration does not.
    """
    groups = getattr(kv_cache_config, "kv_cache_groups", ())
    state_specs = [spec for group in groups for spec in _recurrent_specs(group)]
    if any(
        getattr(getattr(state_spec, "mamba_type", None), "name", "") == _MAMBA_1
        for state_spec in state_specs
    ):
        raise UnsupportedEngineError(_mamba_1_obstacle())
    if state_specs and corrupts_state(vllm_api.vllm_version()):
        raise UnsupportedEngineError(_corrupted_state_obstacle())


def is_recurrent(model: Any) -> bool:
    """Whether a `ModelConfig` has recurrent layers.

    Both vLLM's model class and the model's own list of layers are checked, because Transformers
    runs a model for which vLLM has no class (Bamba, RecurrentGemma).
    """
    if getattr(model, "is_hybrid", False) or getattr(model, "is_attention_free", False):
        return True
    layer_kinds = _layer_kinds(model)
    if not _RECURRENT_KINDS.isdisjoint(layer_kinds):
        return True
    # A small Granite 4 has the class of the hybrid models, but only attention layers.
    has_attention_only = bool(layer_kinds) and _ATTENTION_KINDS.issuperset(layer_kinds)
    return bool(getattr(model, "has_inner_state", False)) and not has_attention_only


def _layer_kinds(model: Any) -> set[str]:
    """Returns the kinds of layers that a configuration lists, those of its text model included."""
    configs = (getattr(model, name, None) for name in ("hf_config", "hf_text_config"))
    return {
        str(kind)
        for config in configs
        for name in _LAYER_LIST_FIELDS
        for kind in getattr(config, name, ()) or ()
    }


def corrupts_state(version: str) -> bool:
    """Whether this version reads the wrong state; True for an unknown version.

    A pre-release (`0.32.0rc1`, `0.32.0.dev7`) may lack the fix of its release.
    """
    version_match = _VERSION.match(version)
    if version_match is None:
        return True
    major, minor, patch = (int(part or 0) for part in version_match.groups()[:3])
    is_release = version_match["suffix"] == "" or version_match["suffix"].startswith(".post")
    return (major, minor, patch, is_release) < (0, 32, 0, True)


def _recurrent_specs(group: Any) -> list[Any]:
    """Returns the cache specs of recurrent layers in a cache group of vLLM."""
    spec = group.kv_cache_spec
    # Layers of one kind but several sizes share a group.
    parts = getattr(spec, "kv_cache_specs", None) or {"": spec}
    return [
        part
        for part in parts.values()
        if any(base.__name__ == _STATE_SPEC for base in type(part).__mro__)
    ]


def _corrupted_state_obstacle() -> str:
    return (
        f"the target has recurrent layers, and vLLM {_version_text()} reads the wrong recurrent "
        "state "
        "in a row without drafts that follows accepted ones, so that answers are silently wrong "
        f"(vLLM issues 39273, 40875, 56531; fixed in {_FIXED_VERSION}). Steering creates such "
        "rows, with "
        f"and without 0 in SPECULATION_GAMMAS. Use vLLM {_FIXED_VERSION} or newer, or unset "
        "SPECULATION_SIDECAR"
    )


def _mamba_1_obstacle() -> str:
    return (
        f"the target has layers of Mamba-1, and vLLM {_version_text()} does not tell them how many "
        "drafts were accepted: rejected ones stay in their recurrent state, so that answers are "
        "silently wrong, with steering and without it. No fixed version is known. Serve this "
        "target without --speculative-config, and unset SPECULATION_SIDECAR"
    )


def _version_text() -> str:
    return vllm_api.vllm_version() or "of unknown version"
