"""Targets that emit hidden states for DFlash although SGLang's model does not: which, and how."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from engine_shim.common.errors import UnsupportedEngineError
from engine_shim.sglang.drafters import target_capture


class FusedNorm(nn.Module):
    """Norms the sum of both, and returns the sum as well."""

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return hidden, residual


class Layers(nn.Module):
    """The inner model: emits the inputs of the layers on its list."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace()
        self.embed_tokens = nn.Embedding(4, 2)
        self.layers = nn.ModuleList(nn.Identity() for _ in range(3))
        self.norm = FusedNorm()
        self.layers_to_capture: list[int] = []
        self.calls_norm = True

    def forward(self, hidden: torch.Tensor) -> Any:
        emitted = [hidden * 10**layer for layer in self.layers_to_capture]
        if self.calls_norm and hidden.shape[0]:
            hidden, _ = self.norm(hidden, hidden * 1000)
        return (hidden, emitted) if emitted else hidden


class LogitsProcessor(nn.Module):
    """Returns what it was given."""

    def forward(self, tokens: Any, hidden: Any, head: Any, batch: Any, aux: Any = None) -> Any:
        return tokens, hidden, head, batch, aux


class MiMoForCausalLM(nn.Module):
    """As SGLang's: what the layers return is passed on unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Layers()
        self.logits_processor = LogitsProcessor()

    def get_input_embeddings(self, input_ids: Any) -> Any:
        return self.model.embed_tokens(input_ids)

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.logits_processor("tokens", self.model(hidden), "head", "batch")


class Glm4MoeForCausalLM(MiMoForCausalLM):
    """Passes emitted states on by itself, for EAGLE3."""

    capture_aux_hidden_states = False


class OtherForCausalLM(MiMoForCausalLM):
    """A model of which nothing is known."""


class Ready(MiMoForCausalLM):
    """SGLang has what is needed."""

    def set_dflash_layers_to_capture(self, layers: list[int]) -> None:
        self.asked = layers


def test_a_mimo_hands_both_parts_to_its_head() -> None:
    model: Any = MiMoForCausalLM()
    target_capture.enable_block_capture(model)
    hidden = torch.ones(3, 2)
    assert model(hidden) == ("tokens", hidden, "head", "batch", None)
    model.set_dflash_layers_to_capture([0, 2])
    tokens, last, head, batch, aux = model(hidden)
    assert (tokens, head, batch) == ("tokens", "head", "batch")
    assert last is hidden
    # The output of layer k is the input of layer k + 1.
    assert [float(part[0, 0]) for part in aux] == [10.0, 1000.0]


def test_a_mimo_gives_its_embedding_when_asked_without_tokens() -> None:
    model: Any = MiMoForCausalLM()
    target_capture.enable_block_capture(model)
    assert model.get_input_embeddings() is model.model.embed_tokens


def test_a_model_that_does_so_for_eagle3_is_switched_to_it() -> None:
    model: Any = Glm4MoeForCausalLM()
    target_capture.enable_block_capture(model)
    model.set_dflash_layers_to_capture([1])
    assert model.capture_aux_hidden_states
    assert model.model.layers_to_capture == [2]


def test_a_model_that_has_it_is_left_alone() -> None:
    model = Ready()
    target_capture.enable_block_capture(model)
    model.set_dflash_layers_to_capture([1])
    assert model.asked == [1]
    assert model.model.layers_to_capture == []


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (OtherForCausalLM(), "OtherForCausalLM does not pass on what its layers emit"),
        (nn.Linear(1, 1), "Linear cannot emit the hidden states of its layers"),
    ],
)
def test_others_are_refused_with_a_reason(model: nn.Module, reason: str) -> None:
    with pytest.raises(UnsupportedEngineError, match=reason):
        target_capture.enable_block_capture(model)


def configure(model: Any, **arguments: Any) -> None:
    """As SGLang's function of this name, as far as DFlash goes."""
    model.set_dflash_layers_to_capture(arguments["dflash_target_layer_ids"])


def configured(layers: list[int]) -> tuple[Any, list[int]]:
    """A model that emits the outputs of these layers, and the layers that read them."""
    model: Any = MiMoForCausalLM()
    target_capture.enable_block_capture(model)
    return model, target_capture.configure_block_capture(
        configure, model=model, dflash_target_layer_ids=layers
    )


@pytest.mark.parametrize(
    ("layers", "values"), [([0, 2], [10.0, 1000.0]), ([2], [1000.0]), ([0, 1], [10.0, 100.0])]
)
def test_the_last_layers_output_is_what_the_final_norm_reads(
    layers: list[int], values: list[float]
) -> None:
    model, inputs = configured(layers)
    assert inputs == [layer + 1 for layer in layers]
    aux = model(torch.ones(3, 2))[-1]
    assert [float(part[0, 0]) for part in aux] == values


def test_the_last_layer_of_a_looped_target_is_that_of_its_last_loop() -> None:
    model: Any = MiMoForCausalLM()
    model.model.config.num_loops = 2
    target_capture.enable_block_capture(model)
    inputs = target_capture.configure_block_capture(
        configure, model=model, dflash_target_layer_ids=[2, 5]
    )
    # The third of six layers is emitted on entering the fourth, the sixth by the final norm.
    assert inputs == [3, 6]
    assert model.model.layers_to_capture == [3]
    aux = model(torch.ones(3, 2))[-1]
    assert [float(part[0, 0]) for part in aux] == [1000.0, 1000.0]


def test_no_tokens_have_no_last_output() -> None:
    model, _ = configured([0, 2])
    model(torch.ones(3, 2))
    aux = model(torch.ones(0, 2))[-1]
    assert [part.shape for part in aux] == [(0, 2), (0, 2)]


def test_a_model_without_a_final_norm_is_refused_if_its_last_layer_is_read() -> None:
    model: Any = MiMoForCausalLM()
    model.model.norm = None
    target_capture.enable_block_capture(model)
    with pytest.raises(UnsupportedEngineError, match="has no final norm"):
        target_capture.configure_block_capture(
            configure, model=model, dflash_target_layer_ids=[0, 2]
        )


def test_a_final_norm_that_is_not_called_is_an_error() -> None:
    model, _ = configured([0, 2])
    model.model.calls_norm = False
    with pytest.raises(UnsupportedEngineError, match="does not call its final norm"):
        model(torch.ones(3, 2))
