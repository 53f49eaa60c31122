"""Has a target emit the hidden states that a DFlash drafter reads, where SGLang's model does not.

SGLang asks a target for `set_dflash_layers_to_capture`.  Several models that have an MTP head of
their own lack it: some offer the same for EAGLE3 (GLM-4.5, LongCat), and MiMo's layers can emit
their inputs, but its outer model does not pass them on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from engine_shim.steering.errors import UnsupportedEngineError

# Models whose `forward` hands on what the layers return as it is, be it one tensor or two parts.
_HANDS_ON = frozenset({"MiMoForCausalLM"})


def holder_of(model: nn.Module) -> Any:
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


def around_configure(original: Callable[..., None], *, model: Any, **arguments: Any) -> None:
    """Wraps `configure_aux_hidden_state_capture` where DFlash is the only drafter.

    Raises UnsupportedEngineError for a target that cannot emit what DFlash reads.
    """
    if arguments["dflash_use_aux_hidden_state"]:
        enable(model)
    original(model=model, **arguments)


def enable(model: Any) -> None:
    """Gives a target `set_dflash_layers_to_capture` if it lacks it.

    Raises UnsupportedEngineError for a target of which it is unknown how.
    """
    if hasattr(model, "set_dflash_layers_to_capture"):
        return
    holder, name = holder_of(model), type(model).__name__
    passes_on = hasattr(model, "capture_aux_hidden_states")
    if not passes_on:
        if name not in _HANDS_ON:
            raise UnsupportedEngineError(
                f"{name} does not pass on what its layers emit, and how it could is unknown: a "
                "DFlash drafter has nothing to read"
            )
        model.logits_processor.register_forward_pre_hook(_pass_on)
        # DFlash embeds its block with what SGLang's method returns without an argument.
        model.get_input_embeddings = lambda: holder.embed_tokens

    def set_layers(layers: Sequence[int]) -> None:
        if passes_on:
            model.capture_aux_hidden_states = True
        # The output of a layer is the input of the next one.
        holder.layers_to_capture = [layer + 1 for layer in layers]

    model.set_dflash_layers_to_capture = set_layers


def _pass_on(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Gives `LogitsProcessor.forward` both parts of what the layers have returned."""
    tokens, returned, *rest = arguments
    if not isinstance(returned, tuple):
        return None
    hidden, emitted = returned
    return (tokens, hidden, *rest, emitted)
