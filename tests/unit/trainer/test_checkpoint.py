"""Model folders: names and shapes as published, and nothing lost on the way back."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from engine_shim.sglang.training.blocks import DecoderShape
from engine_shim.sglang.training.chain import Eagle3Shape, Eagle3Student
from engine_shim.sglang.training.dflash import DFlashShape, DFlashStudent
from lab.cpu_engine.models.targets import (
    Qwen3Target,
    save_target,
)
from trainer.checkpoint import load_dflash, load_eagle3, save_dflash, save_eagle3

SHAPE = DecoderShape(
    hidden=48, heads=6, kv_heads=2, head_dim=16, mlp=64, layers=2, vocabulary=97, max_positions=128
)


def test_a_draft_comes_back_as_its_bfloat16_rounding(tmp_path: Path) -> None:
    student = Eagle3Student(Eagle3Shape(SHAPE.replace_layers(1), (0, 3, 5)), torch.randn(97, 48))
    save_eagle3(student, tmp_path)
    back = load_eagle3(tmp_path, student.embedding)
    assert back.shape == student.shape
    assert set(back.state_dict()) == set(student.state_dict())
    for name, tensor in student.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor.bfloat16().float()), name


def test_a_draft_file_holds_exactly_the_published_names_and_shapes(tmp_path: Path) -> None:
    save_eagle3(
        Eagle3Student(Eagle3Shape(SHAPE.replace_layers(1), (0, 3, 5)), torch.randn(97, 48)),
        tmp_path,
    )
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    assert shapes == {
        "fc.weight": (48, 3 * 48),
        "midlayer.input_layernorm.weight": (48,),
        "midlayer.hidden_norm.weight": (48,),
        "midlayer.post_attention_layernorm.weight": (48,),
        "midlayer.self_attn.q_proj.weight": (6 * 16, 2 * 48),
        "midlayer.self_attn.k_proj.weight": (2 * 16, 2 * 48),
        "midlayer.self_attn.v_proj.weight": (2 * 16, 2 * 48),
        "midlayer.self_attn.o_proj.weight": (48, 6 * 16),
        "midlayer.mlp.gate_proj.weight": (64, 48),
        "midlayer.mlp.up_proj.weight": (64, 48),
        "midlayer.mlp.down_proj.weight": (48, 64),
        "norm.weight": (48,),
        "lm_head.weight": (97, 48),
        "d2t": (97,),
        "t2d": (97,),
    }


def test_a_dflash_draft_comes_back_as_its_bfloat16_rounding(tmp_path: Path) -> None:
    shape = DFlashShape(SHAPE, (0, 3, 5), block=4, mask_token=7)
    student = DFlashStudent(shape, torch.randn(97, 48))
    save_dflash(student, tmp_path)
    back = load_dflash(tmp_path, student.embedding)
    assert back.shape == shape
    for name, tensor in student.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor.bfloat16().float()), name


def test_a_dflash_file_holds_exactly_the_published_names(tmp_path: Path) -> None:
    shape = DFlashShape(SHAPE.replace_layers(1), (0, 3, 5), block=4, mask_token=7)
    save_dflash(DFlashStudent(shape, torch.randn(97, 48)), tmp_path)
    layer = "layers.0"
    assert set(load_file(tmp_path / "model.safetensors")) == {
        "fc.weight", "hidden_norm.weight", "norm.weight",
        f"{layer}.input_layernorm.weight", f"{layer}.post_attention_layernorm.weight",
        *(f"{layer}.self_attn.{name}_proj.weight" for name in "qkvo"),
        f"{layer}.self_attn.q_norm.weight", f"{layer}.self_attn.k_norm.weight",
        *(f"{layer}.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    }  # fmt: skip
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["block_size"] == 4
    assert config["dflash_config"] == {"target_layer_ids": [0, 3, 5], "mask_token_id": 7}


def test_draft_tokens_are_target_tokens(tmp_path: Path) -> None:
    save_eagle3(
        Eagle3Student(Eagle3Shape(SHAPE.replace_layers(1), (0, 3)), torch.randn(97, 48)), tmp_path
    )
    maps = load_file(tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config["draft_vocab_size"] == config["vocab_size"] == 97
    assert torch.equal(maps["d2t"], torch.zeros(97, dtype=torch.int64))
    assert bool(maps["t2d"].all())


def test_weights_can_be_read_by_every_user(tmp_path: Path) -> None:
    save_target(Qwen3Target(SHAPE), tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o444 == 0o444
