"""Captures the hidden states for two drafters in one pass of the target.

EAGLE3 and DFlash read the outputs of different target layers, and SGLang's two settings for them
overwrite each other.  Here the target emits the union, in layer order, and each drafter gets its
own columns.  A drafter that reads the last hidden state (EAGLE, MTP) gets it as an additional
group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.aux_hidden_states import pack_aux_hidden_states

from engine_shim.common.errors import UnsupportedEngineError
from engine_shim.sglang.drafters import dflash_checkpoint, target_capture
from engine_shim.sglang.drafters.dflash_checkpoint import draft_config


class SharedCapture:
    """Divides the columns of what the target emits between the drafters.

    model_path, revision: of the DFlash checkpoint.
    """

    def __init__(self, model_path: str, revision: str | None) -> None:
        self._model_path = model_path
        self._revision = revision
        self._config: ModelConfig | None = None
        self._hidden_size = 0
        # Groups of columns that each drafter reads; on the target's device after it was built.
        self._own_groups = torch.empty(0, dtype=torch.int64)
        self._block_groups = torch.empty(0, dtype=torch.int64)
        self._appends_last = False

    @property
    def block_config(self) -> ModelConfig:
        """Returns the configuration of the DFlash checkpoint; only after the target was built."""
        assert self._config is not None
        return self._config

    def around_resolve(self, original: Callable[..., Any], **arguments: Any) -> Any:
        """Wraps `resolve_spec_aux_hidden_state_config`, to add the DFlash layers."""
        capture_config = original(**arguments)
        if arguments["is_draft_worker"] or not arguments["spec_algorithm"].is_eagle():
            return capture_config
        self._config = draft_config(arguments["server_args"], self._model_path, self._revision)
        target = arguments["model_config"]
        layers = emit_for_block(capture_config, self._config, target)
        # SGLang sizes the KV cache by the drafter's layers: both drafters' count.
        capture_config.eagle_draft_num_layers = (
            capture_config.eagle_draft_num_layers or 0
        ) + layers
        self._hidden_size = target.hidden_size
        return capture_config

    def around_configure(
        self, original: Callable[..., None], *, model: Any, **arguments: Any
    ) -> None:
        """Wraps `configure_aux_hidden_state_capture`, to set the union of both drafters.

        Raises UnsupportedEngineError for a target that cannot emit what DFlash reads.
        """
        if self._config is None or not arguments["dflash_use_aux_hidden_state"]:
            original(model=model, **arguments)
            return
        target_capture.enable_block_capture(model)
        holder = target_capture.find_capture_holder(model)
        holder.layers_to_capture = []
        original(model=model, **{**arguments, "dflash_use_aux_hidden_state": False})
        own_layers = sorted(holder.layers_to_capture)
        block_arguments = {**arguments, "eagle_use_aux_hidden_state": False}
        block_layers = target_capture.configure_block_capture(
            original, model=model, **block_arguments
        )
        union = sorted({*own_layers, *block_layers})
        # The last layer's output is added to what the layers emit.
        holder.layers_to_capture = [
            layer for layer in union if layer < target_capture.emittable_layer_count(holder)
        ]
        own_groups = [union.index(layer) for layer in own_layers]
        self._appends_last = not own_groups
        device = next(model.parameters()).device
        self._own_groups = torch.tensor(own_groups or [len(union)], device=device)
        self._block_groups = torch.tensor(
            [union.index(layer) for layer in block_layers], device=device
        )

    def around_store(
        self, original: Callable[..., Any], processor: Any, hidden: Any, before_norm: Any,
        aux: Any, *arguments: Any,
    ) -> Any:  # fmt: skip
        """Wraps `LogitsProcessor._get_hidden_states_to_store`, to add the last hidden state."""
        mode = arguments[-1].capture_hidden_mode
        if self._appends_last and aux is not None and mode.is_full():
            # SGLang would store only one of both.  A model may return its last state before a norm.
            last_hidden = hidden if before_norm is None else before_norm
            return torch.cat([pack_aux_hidden_states(aux), last_hidden], dim=-1)
        return original(processor, hidden, before_norm, aux, *arguments)

    def split(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Splits [rows, groups * H] into the columns of the engine's own drafter and DFlash's."""
        groups = hidden.view(hidden.shape[0], -1, self._hidden_size)
        # Indexing with a list would copy the list to the device, and wait for that.
        return (
            groups.index_select(1, self._own_groups).flatten(1),
            groups.index_select(1, self._block_groups).flatten(1),
        )


def emit_for_block(capture_config: Any, block: ModelConfig, target: ModelConfig) -> int:
    """Makes a target emit what a DFlash checkpoint reads; returns the drafter's number of layers.

    capture_config: SGLang's `SpecAuxHiddenStateConfig`.  The start has already checked that the
    checkpoint fits the target.  Raises UnsupportedEngineError for a config without its number of
    layers.
    """
    layers = dflash_checkpoint.block_config(block).layers
    if layers is None:
        raise UnsupportedEngineError(f"{block.model_path}: its config has no num_hidden_layers")
    capture_config.dflash_use_aux_hidden_state = True
    capture_config.dflash_target_layer_ids = list(dflash_checkpoint.feature_layers(block, target))
    return layers
