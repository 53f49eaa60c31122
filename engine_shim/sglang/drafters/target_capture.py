"""Has a target emit the hidden states that drafters read, where SGLang's model does not.

SGLang asks a target for `set_dflash_layers_to_capture`.  Several models that have an MTP head of
their own lack it: some offer the same for EAGLE3 (GLM-4.5, LongCat), and MiMo's layers can emit
their inputs, but its outer model does not pass them on.

A model emits the inputs of layers, so that the output of its last layer is missing.  Several models
emit that as well, most do not (Llama, Qwen): here the final norm of any model gives it.

EAGLE3 and DFlash read the outputs of different target layers, and SGLang's two settings for them
overwrite each other.  With both drafters the target emits the union in one pass, in layer order,
and each drafter gets its own columns; a drafter that reads the last hidden state (EAGLE, MTP) gets
it as one more group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.aux_hidden_states import pack_aux_hidden_states
from torch import nn

from engine_shim.common.errors import UnsupportedEngineError
from engine_shim.sglang.drafters import dflash_checkpoint
from engine_shim.sglang.drafters.dflash_checkpoint import draft_config, loops

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


def emittable(holder: Any) -> int:
    """Returns how many layers a target runs: a looped one counts its layers once for each loop."""
    return len(holder.layers) * loops(getattr(holder, "config", None))


def around_configure(original: Callable[..., None], *, model: Any, **arguments: Any) -> None:
    """Wraps `configure_aux_hidden_state_capture` where DFlash is the only drafter.

    Raises UnsupportedEngineError for a target that cannot emit what DFlash reads.
    """
    if arguments["dflash_use_aux_hidden_state"]:
        enable(model)
        configure_block(original, model=model, **arguments)
    else:
        original(model=model, **arguments)


def configure_block(
    original: Callable[..., None], *, model: Any, dflash_target_layer_ids: Sequence[int],
    **arguments: Any,
) -> list[int]:  # fmt: skip
    """Has a target emit what DFlash reads; returns the layers of which that is the input.

    A layer behind the last one stands for the last one's output, which the final norm gives.
    Raises UnsupportedEngineError for a target whose final norm is unknown.
    """
    holder = holder_of(model)
    count = emittable(holder)
    others = [layer for layer in dflash_target_layer_ids if layer != count - 1]
    holder.layers_to_capture = []
    original(model=model, dflash_target_layer_ids=others, **arguments)
    inputs = sorted(holder.layers_to_capture)
    if len(others) < len(dflash_target_layer_ids):
        _emit_last(model, holder)
        inputs.append(count)
    return inputs


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


def _emit_last(model: nn.Module, holder: Any) -> None:
    """Has the layers return, behind what they emit, the last one's output: what is normed at last.

    Raises UnsupportedEngineError for layers without a final norm.
    """
    norm = getattr(holder, "norm", None)
    if not isinstance(norm, nn.Module):
        raise UnsupportedEngineError(
            f"{type(model).__name__} has no final norm, before which the output of its last layer "
            "could be read: use a DFlash drafter whose target_layer_ids leave out the last layer"
        )
    normed: list[torch.Tensor] = []

    def keep(_: nn.Module, arguments: tuple[Any, ...], result: Any) -> None:
        # A fused norm adds the residual to what the layer gives, and returns the sum as well.  It
        # may lie where the next pass writes.
        normed[:] = [(result[1] if isinstance(result, tuple) else arguments[0]).clone()]

    def append(_: nn.Module, _arguments: tuple[Any, ...], result: Any) -> Any:
        hidden, emitted = result if isinstance(result, tuple) else (result, [])
        if not normed and hidden.shape[0]:
            raise UnsupportedEngineError(
                f"{type(model).__name__} does not call its final norm, so that the output of its "
                "last layer is unknown: use a DFlash drafter whose target_layer_ids leave it out"
            )
        # SGLang skips the norm of no tokens.
        last = normed.pop() if normed else hidden
        before = [pack_aux_hidden_states(emitted)] if len(emitted) else []
        return hidden, [*before, last]

    norm.register_forward_hook(keep)
    holder.register_forward_hook(append)


class SharedCapture:
    """Divides the columns of what the target emits between the drafters.

    model_path, revision: of the DFlash checkpoint.
    """

    def __init__(self, model_path: str, revision: str | None) -> None:
        self._model_path = model_path
        self._revision = revision
        self._config: ModelConfig | None = None
        self._hidden_size = 0
        # Groups of columns that each drafter reads, on the target's device once that was built.
        self._own = torch.empty(0, dtype=torch.int64)
        self._block = torch.empty(0, dtype=torch.int64)
        self._appends_last = False

    @property
    def block_config(self) -> ModelConfig:
        """Returns the configuration of the DFlash checkpoint, once the target was built."""
        assert self._config is not None
        return self._config

    def around_resolve(self, original: Callable[..., Any], **arguments: Any) -> Any:
        """Wraps `resolve_spec_aux_hidden_state_config`, to add the DFlash layers."""
        found = original(**arguments)
        if arguments["is_draft_worker"] or not arguments["spec_algorithm"].is_eagle():
            return found
        self._config = draft_config(arguments["server_args"], self._model_path, self._revision)
        target = arguments["model_config"]
        layers = emit_for_block(found, self._config, target)
        # SGLang sizes the KV cache by the drafter's layers: both drafters' count.
        found.eagle_draft_num_layers = (found.eagle_draft_num_layers or 0) + layers
        self._hidden_size = target.hidden_size
        return found

    def around_configure(
        self, original: Callable[..., None], *, model: Any, **arguments: Any
    ) -> None:
        """Wraps `configure_aux_hidden_state_capture`, to set the union of both drafters.

        Raises UnsupportedEngineError for a target that cannot emit what DFlash reads.
        """
        if self._config is None or not arguments["dflash_use_aux_hidden_state"]:
            original(model=model, **arguments)
            return
        enable(model)
        holder = holder_of(model)
        holder.layers_to_capture = []
        original(model=model, **{**arguments, "dflash_use_aux_hidden_state": False})
        wanted_own = sorted(holder.layers_to_capture)
        only_block = {**arguments, "eagle_use_aux_hidden_state": False}
        wanted_block = configure_block(original, model=model, **only_block)
        union = sorted({*wanted_own, *wanted_block})
        # The last layer's output is added to what the layers emit.
        holder.layers_to_capture = [layer for layer in union if layer < emittable(holder)]
        own = [union.index(layer) for layer in wanted_own]
        self._appends_last = not own
        device = next(model.parameters()).device
        self._own = torch.tensor(own or [len(union)], device=device)
        self._block = torch.tensor([union.index(layer) for layer in wanted_block], device=device)

    def around_store(
        self, original: Callable[..., Any], processor: Any, hidden: Any, before_norm: Any,
        aux: Any, *rest: Any,
    ) -> Any:  # fmt: skip
        """Wraps `LogitsProcessor._get_hidden_states_to_store`, to add the last hidden state."""
        mode = rest[-1].capture_hidden_mode
        if self._appends_last and aux is not None and mode.is_full():
            # SGLang would store either of them, and a model may say that its last one is another.
            last = hidden if before_norm is None else before_norm
            return torch.cat([pack_aux_hidden_states(aux), last], dim=-1)
        return original(processor, hidden, before_norm, aux, *rest)

    def split(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, groups * H] to what the engine's own drafter reads, and what DFlash reads."""
        groups = hidden.view(hidden.shape[0], -1, self._hidden_size)
        # Indexing with a list would copy the list to the device, and wait for that.
        return (
            groups.index_select(1, self._own).flatten(1),
            groups.index_select(1, self._block).flatten(1),
        )


def emit_for_block(found: Any, block: ModelConfig, target: ModelConfig) -> int:
    """Has a target emit what a DFlash checkpoint reads; the drafter's number of layers.

    found: SGLang's `SpecAuxHiddenStateConfig`.  Whether the checkpoint fits the target was checked
    before the target was built.  Raises UnsupportedEngineError for a config without its layers.
    """
    layers = dflash_checkpoint.block_config(block).layers
    if layers is None:
        raise UnsupportedEngineError(f"{block.model_path}: its config has no num_hidden_layers")
    found.dflash_use_aux_hidden_state = True
    found.dflash_target_layer_ids = list(dflash_checkpoint.emitted_layers(block, target))
    return layers
