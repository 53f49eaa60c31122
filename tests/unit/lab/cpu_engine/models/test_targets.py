"""The target: the same function as transformers' Qwen3 and Qwen2, before and after it is grown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3ForCausalLM

from engine_shim.sglang.training.blocks import DecoderLayer, DecoderShape
from engine_shim.sglang.training.chain import MtpShape, MtpStudent
from lab.cpu_engine.models.targets import (
    Qwen2Target,
    Qwen3Target,
    grow,
    load_predictor,
    load_target,
    save_predictor,
    save_target,
)

SHAPE = DecoderShape(
    hidden=48, heads=6, kv_heads=2, head_dim=16, mlp=64, layers=3, vocabulary=97, max_positions=128
)


@pytest.fixture
def target() -> Qwen3Target:
    torch.manual_seed(3)
    random_target = Qwen3Target(SHAPE)
    with torch.no_grad():
        for parameter in random_target.parameters():
            # Gains away from one and large matrices: a forgotten norm or a swapped part must show.
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return random_target.eval()


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(SHAPE.vocabulary, (2, 40), generator=torch.Generator().manual_seed(4))


def test_forward_equals_transformers_on_the_saved_folder(
    target: Qwen3Target, tokens: Tensor, tmp_path: Path
) -> None:
    save_target(target, tmp_path)
    ours = load_target(tmp_path)
    theirs = Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


def test_a_mimos_layers_equal_transformers_qwen2(tokens: Tensor, tmp_path: Path) -> None:
    # Its heads are as wide as Qwen2's have to be.
    shape = replace(SHAPE, hidden=96)
    torch.manual_seed(3)
    qwen2_target = Qwen2Target(shape).eval()
    with torch.no_grad():
        for parameter in qwen2_target.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    save_target(qwen2_target, tmp_path)
    ours = load_target(tmp_path)
    assert isinstance(ours, Qwen2Target)
    config = Qwen2Config.from_pretrained(tmp_path)
    theirs = Qwen2ForCausalLM.from_pretrained(tmp_path, config=config, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


def test_features_are_the_outputs_of_the_named_layers(
    target: Qwen3Target, tokens: Tensor, tmp_path: Path
) -> None:
    save_target(target, tmp_path)
    ours = load_target(tmp_path)
    theirs = Qwen3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        _, features = ours.logits_and_features(tokens, (0, 1))
        states = theirs(
            tokens, output_hidden_states=True
        ).hidden_states  # the first is the embedding
    torch.testing.assert_close(features[0], states[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(features[1], states[2], rtol=1e-4, atol=1e-4)


def test_a_later_token_changes_no_earlier_logit(target: Qwen3Target, tokens: Tensor) -> None:
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % SHAPE.vocabulary
    before, after = target(tokens), target(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:])


def test_growing_nearly_keeps_the_function_when_layers_are_small_steps(
    target: Qwen3Target, tokens: Tensor
) -> None:
    with torch.no_grad():
        for layer in target.model.layers[1:]:
            assert isinstance(layer, DecoderLayer)
            layer.self_attn.o_proj.weight.mul_(0.05)
            layer.mlp.down_proj.weight.mul_(0.05)
    before = target(tokens)
    after = grow(target, 9)(tokens)
    assert (after - before).norm() < 0.02 * before.norm()


@pytest.mark.parametrize(("layers", "sources"), [(3, [0, 1, 2]), (6, [0, 1, 1, 1, 2, 2])])
def test_a_grown_layer_is_an_equal_part_of_its_source_and_the_first_stays_whole(
    target: Qwen3Target, layers: int, sources: list[int]
) -> None:
    grown = grow(target, layers)
    assert grown.shape.layers == len(grown.model.layers) == layers
    for layer, source in zip(grown.model.layers, sources, strict=True):
        assert isinstance(layer, DecoderLayer)
        origin = target.model.layers[source]
        assert isinstance(origin, DecoderLayer)
        parts = sources.count(source)
        torch.testing.assert_close(
            layer.self_attn.o_proj.weight * parts, origin.self_attn.o_proj.weight
        )
        torch.testing.assert_close(layer.mlp.down_proj.weight * parts, origin.mlp.down_proj.weight)
        assert torch.equal(layer.self_attn.qkv_proj.weight, origin.self_attn.qkv_proj.weight)


def test_growing_to_fewer_layers_is_refused(target: Qwen3Target) -> None:
    with pytest.raises(ValueError, match="cannot grow 3 layers to 2"):
        grow(target, 2)


def test_a_single_layer_has_nothing_to_split() -> None:
    with pytest.raises(ValueError, match="start from two or more"):
        grow(Qwen3Target(SHAPE.replace_layers(1)), 4)


def test_a_target_comes_back_as_its_bfloat16_rounding(tmp_path: Path) -> None:
    target = Qwen3Target(SHAPE)
    save_target(target, tmp_path)
    back = load_target(tmp_path)
    assert back.shape == SHAPE
    for name, tensor in target.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor.bfloat16().float()), name


def test_a_predictor_comes_back_from_the_folder_of_its_target(tmp_path: Path) -> None:
    target = Qwen2Target(SHAPE)
    save_target(target, tmp_path)
    student = MtpStudent(MtpShape(SHAPE.replace_layers(1)), target.model.embed_tokens.weight)
    save_predictor(student, tmp_path)
    back = load_predictor(tmp_path, student.embedding)
    assert back.shape == student.shape
    assert set(back.state_dict()) == set(student.state_dict())
    for name, tensor in student.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor.bfloat16().float()), name


def test_a_predictors_file_holds_exactly_the_published_names(tmp_path: Path) -> None:
    target = Qwen2Target(SHAPE)
    save_target(target, tmp_path)
    student = MtpStudent(MtpShape(SHAPE.replace_layers(1)), target.model.embed_tokens.weight)
    save_predictor(student, tmp_path)
    projections = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")
    biases = ("q_proj.bias", "k_proj.bias", "v_proj.bias")
    own = (
        "token_layernorm.weight", "hidden_layernorm.weight", "input_proj.weight",
        "final_layernorm.weight", "input_layernorm.weight", "post_attention_layernorm.weight",
        "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight",
        *(f"self_attn.{name}" for name in (*projections, *biases)),
    )  # fmt: skip
    assert set(load_file(tmp_path / "mtp.safetensors")) == {
        f"model.mtp_layers.0.{name}" for name in own
    }
