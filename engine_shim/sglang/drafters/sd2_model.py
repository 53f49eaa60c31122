"""The SD2 drafter as a model that SGLang serves, beside SGLang's own.

An independent language model that travels the road of an EAGLE3 drafter: SGLang hands that the
verifier's hidden states, and carries what it returns from one draft step to the next.  What this
one returns is its steering vector, so that all drafts of a round are steered by the last verified
position.  Equations: engine_shim.training.sd2.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.runtime_context import get_parallel
from torch import nn
from torch.nn import functional

from engine_shim.steering.errors import UnsupportedEngineError
from engine_shim.training.sd2 import SD2_ARCHITECTURE


class Sd2Mlp(nn.Module):
    """An MLP of SGLang with Eq. 2's bias; steering: g of each row, set before every pass."""

    def __init__(self, plain: Any, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = plain.gate_up_proj
        self.down_proj = plain.down_proj
        self.steer = nn.Linear(width, inner, bias=False)
        self.steering: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, forward_batch: Any = None) -> torch.Tensor:
        """[rows, hidden] in and out."""
        gate_up, _ = self.gate_up_proj(x)
        gate, up = gate_up.chunk(2, dim=-1)
        if self.steering is not None:
            up = up + self.steer(self.steering)
        output, _ = self.down_proj(functional.silu(gate) * up, forward_batch=forward_batch)
        return output


class Sd2ForCausalLM(Qwen3ForCausalLM):
    """Qwen3 with steering; its embedding and head are its own."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        if get_parallel().tp_size > 1:
            raise UnsupportedEngineError("an SD2 drafter runs on one rank only")
        layers = config.eagle_config["eagle_aux_hidden_state_layer_ids"]
        width = config.hidden_size
        self.mix = nn.Linear(len(layers) * width, width, bias=False)
        for layer in self.model.layers:
            layer.mlp = Sd2Mlp(layer.mlp, width, config.intermediate_size)
        # As SGLang asks of a drafter: its tokens are the target's.
        self.hot_token_id = None

    def set_embed(self, embed: torch.Tensor) -> None:
        """The target's embedding, which this drafter has no use for."""

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
        given = forward_batch.spec_info.hidden_states
        width = self.config.hidden_size
        steering = given if given.shape[-1] == width else self._steering(given)
        for layer in self.model.layers:
            layer.mlp.steering = steering
        hidden = self.model(input_ids, positions, forward_batch, input_embeds)
        return self.logits_processor(input_ids, hidden, self.lm_head, forward_batch, [steering])

    def _steering(self, features: torch.Tensor) -> torch.Tensor:
        mixed = self.mix(features)
        return functional.layer_norm(mixed, (mixed.shape[-1],))


def register() -> None:
    """Lets SGLang of this process find the class by its checkpoint's architecture."""
    ModelRegistry.models[SD2_ARCHITECTURE] = Sd2ForCausalLM
