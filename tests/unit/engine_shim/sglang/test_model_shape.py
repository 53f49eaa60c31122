"""Shapes of models that no CPU here runs: modules with SGLang's names, weighed as SGLang's are."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from controller.core.model_shapes import DrafterKind
from controller.wire.engines import drafter_shape_from_proto, model_shape_from_proto
from engine_shim.sglang.engine_description import set_shapes
from speculation.v1 import engine_pb2


class RadixAttention(nn.Module):
    def __init__(self, layer_id: int, heads: int = 8, kv_heads: int = 2, dim: int = 16) -> None:
        super().__init__()
        self.layer_id, self.head_dim, self.is_cross_attention = layer_id, dim, False
        self.tp_q_head_num, self.tp_k_head_num = heads, kv_heads


class VocabParallelEmbedding(nn.Embedding):
    pass


class ParallelLMHead(VocabParallelEmbedding):
    pass


class FusedMoE(nn.Module):
    def __init__(self, experts: int, top_k: int, fused_shared: int = 0, width: int = 4) -> None:
        super().__init__()
        self.num_experts, self.top_k = experts + fused_shared, top_k + fused_shared
        self.num_fused_shared_experts = fused_shared
        self.w13_weight = nn.Parameter(torch.zeros(self.num_experts, 2 * width, 32))
        self.w2_weight = nn.Parameter(torch.zeros(self.num_experts, 32, width))


def model(*blocks: nn.Module) -> nn.Module:
    return nn.ModuleDict(
        {
            "embed_tokens": VocabParallelEmbedding(100, 32),
            "lm_head": ParallelLMHead(100, 32),
            "layers": nn.ModuleList(blocks),
        }
    )


def block(
    layer: int, mlp: nn.Module | None = None, attention: nn.Module | None = None
) -> nn.Module:
    mlp = mlp if mlp is not None else nn.Linear(32, 64, bias=False)
    attention = attention if attention is not None else RadixAttention(layer)
    return nn.ModuleList([nn.Linear(32, 32, bias=False), attention, mlp])


def runner(module: nn.Module, layers: int = 2, **config: Any) -> Any:
    defaults = {
        "hidden_size": 32,
        "vocab_size": 100,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "attention_arch": SimpleNamespace(name="MHA"),
        "quantization": None,
        "is_multimodal": False,
        "is_draft_model": False,
    }
    return SimpleNamespace(
        model=module.to(torch.bfloat16),
        model_config=SimpleNamespace(**(defaults | config)),
        kv_cache_dtype=torch.bfloat16,
    )


DRAFT = model(block(0))


def shapes_of(target: Any, draft: Any = None, ranks: int = 1) -> engine_pb2.EngineSpec:
    spec = engine_pb2.EngineSpec(drafters=[engine_pb2.Drafter(name="eagle")])
    spec.fingerprint.tensor_parallel_size = ranks
    set_shapes(spec, target, [draft or runner(DRAFT, 1, is_draft_model=True)])
    return spec


def test_a_dense_model_is_its_layers_without_embedding_and_head() -> None:
    spec = shapes_of(runner(model(block(0), block(1))))
    shape = model_shape_from_proto(spec.shape)
    assert shape.dense_params == 2 * (32 * 32 + 32 * 64)
    assert shape.head_params == 3200
    assert (shape.bytes_per_weight, shape.bytes_per_kv) == (2.0, 2.0)
    drafter = drafter_shape_from_proto(spec.drafters[0].shape, DrafterKind.MTP)
    # Its head is read in every pass.
    assert drafter.dense_params == 32 * 32 + 32 * 64 + 3200
    assert drafter.kv_bytes_per_token == 2 * 2 * 2 * 16


def test_of_several_ranks_each_holds_a_share() -> None:
    def shard() -> nn.Module:
        return block(0, FusedMoE(16, 2, width=2), RadixAttention(0, heads=4, kv_heads=1))

    target = runner(model(shard()), 1)
    spec = shapes_of(target, ranks=2)
    alone, both = (model_shape_from_proto(s.shape) for s in (shapes_of(target), spec))
    assert both.dense_params == 2 * alone.dense_params
    assert both.kv_bytes_per_token == 2 * alone.kv_bytes_per_token == 2 * 2 * 2 * 16
    assert both.experts is not None
    assert both.experts.params_per_expert == 3 * 4 * 32
    # A head that is borrowed is no share.
    drafter = drafter_shape_from_proto(spec.drafters[0].shape, DrafterKind.MTP)
    assert drafter.dense_params == 2 * (32 * 32 + 32 * 64 + 3200)


def test_experts_are_counted_apart() -> None:
    blocks = [block(0), *(block(i, FusedMoE(16, 2, fused_shared=1)) for i in (1, 2))]
    shape = model_shape_from_proto(shapes_of(runner(model(*blocks), 3)).shape)
    assert shape.experts is not None
    assert (shape.experts.layers, shape.experts.experts) == (2, 16)
    assert (shape.experts.experts_per_token, shape.experts.shared) == (2, 1)
    assert shape.experts.params_per_expert == 3 * 4 * 32
    assert shape.dense_params == 3 * 32 * 32 + 32 * 64


def test_latent_attention_is_one_layer_however_many_forms_it_is_held_in() -> None:
    forms = nn.ModuleList([RadixAttention(0, 8, 1, 40), RadixAttention(0, 8, 8, 16)])
    target = runner(
        model(block(0, attention=forms)), 1,
        attention_arch=SimpleNamespace(name="MLA"), kv_lora_rank=32, qk_rope_head_dim=8,
    )  # fmt: skip
    shape = model_shape_from_proto(shapes_of(target).shape)
    assert [layers for _, layers in shape.attention] == [1]
    assert shape.kv_bytes_per_token == 2 * 40


def test_layers_of_different_heads_are_told_apart() -> None:
    blocks = [block(i, attention=RadixAttention(i, 8, 2 if i else 8, 16)) for i in range(3)]
    shape = model_shape_from_proto(shapes_of(runner(model(*blocks), 3)).shape)
    assert sorted(layers for _, layers in shape.attention) == [1, 2]


def test_a_borrowed_head_is_read_all_the_same() -> None:
    bare = nn.ModuleDict({"embed_tokens": VocabParallelEmbedding(100, 32), "layer": block(0)})
    draft = runner(bare, 1, is_draft_model=True)
    spec = shapes_of(runner(model(block(0), block(1))), draft)
    assert spec.drafters[0].shape.dense_params == 32 * 32 + 32 * 64 + 3200


@pytest.mark.parametrize(
    "target",
    [
        # The second layer keeps a state, not keys and values.
        runner(model(block(0), block(1, attention=nn.Identity()))),
        runner(model(block(0), block(1)), quantization="gptq_marlin"),
        runner(model(block(0), block(1)), is_multimodal=True),
        runner(model(block(0, FusedMoE(16, 2)), block(1, FusedMoE(8, 2)))),
        SimpleNamespace(),
    ],
    ids=["linear-attention", "packed", "multimodal", "uneven-experts", "unlike-anything"],
)
def test_what_is_not_certain_is_not_told(target: Any) -> None:
    spec = shapes_of(target)
    assert not spec.HasField("shape")
    assert not spec.drafters[0].HasField("shape")
