"""Makes a target emit the hidden states that a DFlash drafter reads, if SGLang's model does not.

SGLang calls `set_dflash_layers_to_capture` of a target.  Several models with their own MTP head
lack it: some have the equivalent for EAGLE3 (GLM-4.5, LongCat), and MiMo's layers can emit their
inputs, but its outer model does not pass them on.

A model emits the inputs of layers, so the output of its last layer is missing.  Some models emit
that as well, most do not (Llama, Qwen).  Here it is taken from the final norm of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.layers.aux_hidden_states import pack_aux_hidden_states
from torch import nn

from engine_shim.common.errors import UnsupportedEngineError
from engine_shim.sglang.drafters.dflash_checkpoint import loop_count

# Models whose `forward` passes on unchanged what the layers return, one tensor or two parts.
_PASS_THROUGH_MODELS = frozenset({"MiMoForCausalLM"})


def find_capture_holder(model: nn.Module) -> Any:
    """Returns the part of a target that keeps the list of layers to emit.

    Entry i is emitted as the input of layer i.  Raises UnsupportedEngineError if no part does.
    """
    holder = next((part for part in model.modules() if hasattr(part, "layers_to_capture")), None)
    if holder is None:
        raise UnsupportedEngineError(
            f"{type(model).__name__} cannot emit the hidden states of its layers: a DFlash drafter "
            "has nothing to read"
        )
    return holder


def emittable_layer_count(holder: Any) -> int:
    """Returns how many layers a target runs; a looped target counts them once for each loop."""
    return len(holder.layers) * loop_count(getattr(holder, "config", None))


def around_configure(original: Callable[..., None], *, model: Any, **arguments: Any) -> None:
    """Wraps `configure_aux_hidden_state_capture` where DFlash is the only drafter.

    Raises UnsupportedEngineError for a target that cannot emit what DFlash reads.
    """
    if arguments["dflash_use_aux_hidden_state"]:
        enable_block_capture(model)
        configure_block_capture(original, model=model, **arguments)
    else:
        original(model=model, **arguments)


def configure_block_capture(
    original: Callable[..., None], *, model: Any, dflash_target_layer_ids: Sequence[int],
    **arguments: Any,
) -> list[int]:  # fmt: skip
    """Makes a target emit what DFlash reads; returns the layers whose inputs are emitted.

    The layer number after the last one stands for the last layer's output, which the final norm
    provides.  Raises UnsupportedEngineError for a target whose final norm is unknown.
    """
    holder = find_capture_holder(model)
    layer_count = emittable_layer_count(holder)
    inner_layers = [layer for layer in dflash_target_layer_ids if layer != layer_count - 1]
    holder.layers_to_capture = []
    original(model=model, dflash_target_layer_ids=inner_layers, **arguments)
    inputs = sorted(holder.layers_to_capture)
    if len(inner_layers) < len(dflash_target_layer_ids):
        _emit_last_output(model, holder)
        inputs.append(layer_count)
    return inputs


def enable_block_capture(model: Any) -> None:
    """Gives a target `set_dflash_layers_to_capture` if it lacks it.

    Raises UnsupportedEngineError if it is unknown how the target can emit hidden states.
    """
    if hasattr(model, "set_dflash_layers_to_capture"):
        return
    holder, name = find_capture_holder(model), type(model).__name__
    has_capture_flag = hasattr(model, "capture_aux_hidden_states")
    if not has_capture_flag:
        if name not in _PASS_THROUGH_MODELS:
            raise UnsupportedEngineError(
                f"{name} does not pass on what its layers emit, and how to change that is unknown: "
                "a DFlash drafter has nothing to read"
            )
        model.logits_processor.register_forward_pre_hook(_add_emitted_states)
        # DFlash embeds its block with what SGLang's method returns without an argument.
        model.get_input_embeddings = lambda: holder.embed_tokens

    def set_layers(layers: Sequence[int]) -> None:
        if has_capture_flag:
            model.capture_aux_hidden_states = True
        # The output of a layer is the input of the next one.
        holder.layers_to_capture = [layer + 1 for layer in layers]

    model.set_dflash_layers_to_capture = set_layers


def _add_emitted_states(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Passes both parts of what the layers have returned to `LogitsProcessor.forward`."""
    tokens, returned, *remaining = arguments
    if not isinstance(returned, tuple):
        return None
    hidden, emitted = returned
    return (tokens, hidden, *remaining, emitted)


def _emit_last_output(model: nn.Module, holder: Any) -> None:
    """Appends the last layer's output, the input of the final norm, to what the layers emit.

    Raises UnsupportedEngineError for layers without a final norm.
    """
    norm = getattr(holder, "norm", None)
    if not isinstance(norm, nn.Module):
        raise UnsupportedEngineError(
            f"{type(model).__name__} has no final norm, before which the output of its last layer "
            "could be read: use a DFlash drafter whose target_layer_ids leave out the last layer"
        )
    last_outputs: list[torch.Tensor] = []

    def store_last_output(_: nn.Module, arguments: tuple[Any, ...], result: Any) -> None:
        # A fused norm adds the residual to the layer's output, and returns the sum as well.  The
        # next pass may overwrite that memory, so it is copied.
        last_outputs[:] = [(result[1] if isinstance(result, tuple) else arguments[0]).clone()]

    def append_last_output(_: nn.Module, _arguments: tuple[Any, ...], result: Any) -> Any:
        hidden, emitted = result if isinstance(result, tuple) else (result, [])
        if not last_outputs and hidden.shape[0]:
            raise UnsupportedEngineError(
                f"{type(model).__name__} does not call its final norm, so that the output of its "
                "last layer is unknown: use a DFlash drafter whose target_layer_ids leave it out"
            )
        # SGLang skips the norm if there are no tokens.
        last_output = last_outputs.pop() if last_outputs else hidden
        emitted_before = [pack_aux_hidden_states(emitted)] if len(emitted) else []
        return hidden, [*emitted_before, last_output]

    norm.register_forward_hook(store_last_output)
    holder.register_forward_hook(append_last_output)
