"""Counts what the loaded models weigh from their modules: the sidecar's costs until a profile.

Only what is certain is reported.  A model with layers that are no plain or latent attention, with
weights packed by quantization, or of several modalities has no shape here, and the sidecar says
that it guesses.  A rank of several holds its share of each model, and all shares are alike; with
data-parallel attention they are not, and there is no shape.
Nothing of this can keep an engine from starting.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from speculation.v1 import engine_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

_log = logging.getLogger(__name__)

# One number is one weight in these; others pack several.
_PLAIN_QUANTIZATION = ("", "fp8")


def set_shapes(
    spec: engine_pb2.EngineSpec, target_runner: Any, draft_runners: Sequence[Any]
) -> None:
    """Adds the shapes of target and drafters to an introduction, where all are known."""
    if spec.fingerprint.data_parallel_size > 1:
        _log.info("the models' shapes stay unknown to the sidecar: ranks hold unlike shares")
        return
    ranks = max(1, spec.fingerprint.tensor_parallel_size)
    try:
        target = _model_shape(target_runner, ranks)
        shapes = [_drafter_shape(runner, ranks) for runner in draft_runners]
    except Exception as error:  # noqa: BLE001  # whatever a model looks like, the engine starts
        _log.warning("the models' shapes stay unknown to the sidecar: %r", error)
        return
    known = [shape for shape in shapes if shape is not None]
    if target is None or len(known) < len(shapes):
        return
    spec.shape.CopyFrom(target)
    for drafter, shape in zip(spec.drafters, known, strict=True):
        drafter.shape.CopyFrom(shape)


def _model_shape(runner: Any, ranks: int) -> engine_pb2.ModelShape | None:
    config = runner.model_config
    attention = _attention(runner, ranks)
    weights = _Weights(runner, ranks)
    if attention is None or not weights.known or config.is_multimodal:
        return None
    return engine_pb2.ModelShape(
        hidden_size=config.hidden_size,
        vocabulary_size=config.vocab_size,
        attention=attention,
        dense_params=weights.dense,
        experts=weights.experts,
        bytes_per_weight=weights.bytes_each,
        bytes_per_kv=runner.kv_cache_dtype.itemsize,
    )


def _drafter_shape(runner: Any, ranks: int) -> engine_pb2.DrafterShape | None:
    attention, weights = _attention(runner, ranks), _Weights(runner, ranks)
    if attention is None or not weights.known:
        return None
    # A head that is borrowed from the target, or tied to the embedding, is read all the same.
    head = weights.head or runner.model_config.hidden_size * runner.model_config.vocab_size
    return engine_pb2.DrafterShape(
        dense_params=weights.dense + head,
        experts=weights.experts,
        bytes_per_weight=weights.bytes_each,
        kv_bytes_per_token=runner.kv_cache_dtype.itemsize * sum(map(_cached, attention)),
    )


class _Weights:
    """Counts of a model's parameters, by what reads them; `runner` holds one of `ranks` shares.

    known: they can be relied on.  dense: everything but embedding, head and routed experts.
    head: the LM head's own.
    """

    def __init__(self, runner: Any, ranks: int) -> None:
        self.dense = self.head = number = size = 0
        self.experts: engine_pb2.ExpertShape | None = None
        moe: list[Any] = []
        seen: set[int] = set()
        for module in runner.model.modules():
            kinds = {base.__name__ for base in type(module).__mro__}
            own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
            seen.update(map(id, own))
            count = ranks * sum(p.numel() for p in own)
            if "ParallelLMHead" in kinds:
                self.head += count
                continue
            if "VocabParallelEmbedding" in kinds:
                continue
            number += count
            size += ranks * sum(p.numel() * p.element_size() for p in own)
            if "FusedMoE" in kinds:
                moe.append(module)
            else:
                self.dense += count
        self.bytes_each = size / number if number else 0.0
        self.known = number > 0 and (runner.model_config.quantization or "") in _PLAIN_QUANTIZATION
        if moe:
            self.experts = _experts(moe, ranks)
            self.known = self.known and self.experts is not None


def _experts(layers: Sequence[Any], ranks: int) -> engine_pb2.ExpertShape | None:
    """Describes MoE layers that are all alike; None when they are not."""
    kinds = {
        (
            moe.num_experts - moe.num_fused_shared_experts,
            moe.top_k - moe.num_fused_shared_experts,
            moe.num_fused_shared_experts,
            ranks * sum(p.numel() for p in moe.parameters(recurse=False)) // moe.num_experts,
        )
        for moe in layers
    }
    if len(kinds) > 1:
        return None
    routed, per_token, shared, params = kinds.pop()
    return engine_pb2.ExpertShape(
        layers=len(layers),
        experts=routed,
        experts_per_token=per_token,
        shared=shared,
        params_per_expert=params,
    )


def _attention(runner: Any, ranks: int) -> list[engine_pb2.AttentionShape] | None:
    """Layers by kind; None where a layer keeps something else than keys and values."""
    layers = {
        module.layer_id: module
        for module in runner.model.modules()
        if type(module).__name__ == "RadixAttention" and not module.is_cross_attention
    }
    config = runner.model_config
    if not layers or (len(layers) < config.num_hidden_layers and not config.is_draft_model):
        return None
    if config.attention_arch.name == "MLA":
        latent = engine_pb2.LatentAttention(
            query_heads=config.num_attention_heads,
            latent_dim=config.kv_lora_rank,
            rope_dim=config.qk_rope_head_dim,
        )
        return [engine_pb2.AttentionShape(layers=len(layers), latent=latent)]
    found: dict[tuple[int, int, int], int] = {}
    for module in layers.values():
        heads = ranks * module.tp_q_head_num, ranks * module.tp_k_head_num
        kind = (*heads, module.head_dim)
        found[kind] = found.get(kind, 0) + 1
    return [
        engine_pb2.AttentionShape(
            layers=count,
            grouped_query=engine_pb2.GroupedQueryAttention(
                query_heads=query, kv_heads=kv, head_dim=dim
            ),
        )
        for (query, kv, dim), count in found.items()
    ]


def _cached(layers: engine_pb2.AttentionShape) -> int:
    """Numbers in the cache per context token."""
    if layers.HasField("latent"):
        return layers.layers * (layers.latent.latent_dim + layers.latent.rope_dim)
    full = layers.grouped_query
    return layers.layers * 2 * full.kv_heads * full.head_dim
