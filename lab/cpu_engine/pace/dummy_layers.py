"""Leaves out the arithmetic of dummy models' layers, whose outputs are noise.

Everything around it stays: embeddings, norms, heads, the drafters' serial passes, sampling, slots
of the caches, batching.  A step then leaves the machine more room below its pace.
"""

import importlib
from typing import Any

_ATTENTION = (
    ("sglang.srt.models.qwen3", "Qwen3Attention"),
    ("sglang.srt.models.qwen2", "Qwen2Attention"),
    ("sglang.srt.models.llama", "LlamaAttention"),
    ("sglang.srt.models.dflash", "DFlashAttention"),
)
_MLP = (
    ("sglang.srt.models.qwen2", "Qwen2MLP"),
    ("sglang.srt.models.llama", "LlamaMLP"),
    ("sglang.srt.models.dflash", "DFlashMLP"),
)


def leave_out() -> None:
    """Replaces the forward passes of attention and MLP in this process."""
    for module, name in _ATTENTION:
        getattr(importlib.import_module(module), name).forward = _attend
    for module, name in _MLP:
        getattr(importlib.import_module(module), name).forward = _through


def _attend(layer: Any, positions: Any, hidden_states: Any, forward_batch: Any, **_: Any) -> Any:
    del positions, forward_batch
    # An EAGLE3 drafter's is twice as wide as what it returns.
    return hidden_states[..., : layer.hidden_size]


def _through(layer: Any, states: Any, *_: Any, **__: Any) -> Any:
    del layer
    return states
