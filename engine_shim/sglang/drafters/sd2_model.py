"""SD2 drafters as models that SGLang serves, beside SGLang's own.

An SD2 drafter is an independent language model that SGLang runs like an EAGLE3 drafter.  SGLang
gives such a drafter the verifier's hidden states, and passes the hidden states that it returns from
one draft step to the next.  This drafter returns its steering vector there, so that all drafts of a
round are steered by the last verified position.  SGLang passes vectors of the drafter's width;
`around_carried_width` changes that to the verifier's width, which the steering vector has.
Equations: trainer.sd2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.qwen2 import Qwen2ForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.runtime_context import get_parallel
from torch import nn
from torch.nn import functional

from engine_shim.common.errors import UnsupportedEngineError
from engine_shim.sglang.training import drafter_config
from engine_shim.sglang.training.blocks import SD2_FAMILIES


class Sd2Mlp(nn.Module):
    """An MLP of SGLang with the bias of Eq. 2.

    steering: g of each row, set before every pass.
    """

    def __init__(self, plain_mlp: Any, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = plain_mlp.gate_up_proj
        self.down_proj = plain_mlp.down_proj
        self.steer = nn.Linear(width, inner, bias=False)
        self.steering: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, forward_batch: Any = None) -> torch.Tensor:
        """Maps [rows, hidden] to the same shape."""
        gate_up, _ = self.gate_up_proj(x)
        gate, up = gate_up.chunk(2, dim=-1)
        if self.steering is not None:
            up = up + self.steer(self.steering)
        inner = functional.silu(gate) * up
        # In some versions of SGLang, Llama and Qwen models pass no batch.
        batch_argument = {} if forward_batch is None else {"forward_batch": forward_batch}
        output, _ = self.down_proj(inner, **batch_argument)
        return output


class SteeredModel(nn.Module):
    """Mixin that makes one of SGLang's models a steered one with its own embedding and head."""

    config: Any
    model: Any
    lm_head: Any
    logits_processor: Any

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        if get_parallel().tp_size > 1:
            raise UnsupportedEngineError("an SD2 drafter runs on one rank only")
        layers = feature_layers(config.to_dict())
        self.target_width = carried_width(config)
        self.mix = nn.Linear(len(layers) * self.target_width, self.target_width, bias=False)
        for layer in self.model.layers:
            layer.mlp = Sd2Mlp(layer.mlp, self.target_width, config.intermediate_size)
        # SGLang reads this of a drafter; None: its token ids are the target's.
        self.hot_token_id = None

    def set_embed(self, embed: torch.Tensor) -> None:
        """Ignores the target's embedding, because this drafter has its own."""

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        input_embeds: torch.Tensor | None = None,
        **_: Any,
    ) -> Any:
        """Runs the model as SGLang calls it; returns the steering vectors as its hidden states."""
        hidden_states = forward_batch.spec_info.hidden_states
        steering = (
            hidden_states
            if hidden_states.shape[-1] == self.target_width
            else self._steering(hidden_states)
        )
        for layer in self.model.layers:
            layer.mlp.steering = steering
        hidden = self.model(input_ids, positions, forward_batch, input_embeds)
        return self.logits_processor(input_ids, hidden, self.lm_head, forward_batch, [steering])

    def _steering(self, features: torch.Tensor) -> torch.Tensor:
        mixed = self.mix(features)
        return functional.layer_norm(mixed, (mixed.shape[-1],))


class SteeredLlamaForCausalLM(SteeredModel, LlamaForCausalLM):
    """A steered Llama."""


class SteeredQwen2ForCausalLM(SteeredModel, Qwen2ForCausalLM):
    """A steered Qwen2."""


class SteeredQwen3ForCausalLM(SteeredModel, Qwen3ForCausalLM):
    """A steered Qwen3."""


_MODEL_CLASSES: Final = (SteeredLlamaForCausalLM, SteeredQwen2ForCausalLM, SteeredQwen3ForCausalLM)


def register() -> None:
    """Adds the classes to SGLang's registry in this process."""
    for model in _MODEL_CLASSES:
        ModelRegistry.models[model.__name__] = model


def feature_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the verifier's layers that a drafter reads.  Raises UnsupportedEngineError."""
    try:
        layers = drafter_config.read_eagle3(config).captured_layers
    except drafter_config.DrafterConfigError as error:
        raise UnsupportedEngineError(f"an SD2 drafter: {error}") from error
    if not layers:
        raise UnsupportedEngineError(f"an SD2 drafter's {drafter_config.NO_EAGLE_LAYERS}")
    return layers


def carried_width(config: Any) -> int:
    """Returns the width of the verifier's hidden states, by a drafter's config."""
    return getattr(config, "target_hidden_size", None) or int(config.hidden_size)


def around_carried_width(
    original: Callable[..., tuple[int, int | None]], config: Any, *sizes: Any
) -> tuple[int, int | None]:
    """Wraps the function `resolve_spec_hidden_size`, for the width passed between draft steps."""
    width, flattened = original(config, *sizes)
    if SD2_FAMILIES.keys() & set(getattr(config, "architectures", None) or ()):
        width = carried_width(config)
    return width, flattened
