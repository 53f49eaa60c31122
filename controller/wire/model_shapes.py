"""Model and drafter shapes between proto and core."""

from controller.core.errors import InvalidEngineError
from controller.core.model_shapes import (
    Attention,
    DrafterKind,
    DrafterShape,
    Experts,
    GroupedQueryAttention,
    InvalidShapeError,
    LatentAttention,
    LinearAttention,
    ModelShape,
)
from speculation.v1 import engine_pb2


def model_shape_from_proto(message: engine_pb2.ModelShape) -> ModelShape:
    """Raises InvalidEngineError for numbers that cannot be."""
    try:
        return ModelShape(
            message.hidden_size,
            message.vocabulary_size,
            tuple((_attention_from_proto(layer), layer.layers) for layer in message.attention),
            message.dense_params,
            _experts_from_proto(message.experts) if message.HasField("experts") else None,
            message.bytes_per_weight,
            message.bytes_per_kv,
        )
    except InvalidShapeError as error:
        raise InvalidEngineError(f"shape: {error}") from error


def drafter_shape_from_proto(message: engine_pb2.DrafterShape, kind: DrafterKind) -> DrafterShape:
    """Raises InvalidEngineError for numbers that cannot be."""
    try:
        return DrafterShape(
            kind,
            message.dense_params,
            _experts_from_proto(message.experts) if message.HasField("experts") else None,
            message.block_size,
            message.bytes_per_weight,
            message.kv_bytes_per_token,
        )
    except InvalidShapeError as error:
        raise InvalidEngineError(f"drafter shape: {error}") from error


def _attention_from_proto(message: engine_pb2.AttentionShape) -> Attention:
    which = message.WhichOneof("kind")
    if which == "grouped_query":
        full = message.grouped_query
        return GroupedQueryAttention(full.query_heads, full.kv_heads, full.head_dim)
    if which == "latent":
        latent = message.latent
        return LatentAttention(latent.query_heads, latent.latent_dim, latent.rope_dim)
    if which == "linear":
        return LinearAttention(message.linear.state_bytes, message.linear.token_flops)
    raise InvalidShapeError("a layer's attention is of no kind that is known here")


def _experts_from_proto(message: engine_pb2.ExpertShape) -> Experts:
    return Experts(
        message.layers,
        message.experts,
        message.experts_per_token,
        message.shared,
        message.params_per_expert,
    )


def model_shape_to_proto(shape: ModelShape) -> engine_pb2.ModelShape:
    """The shape as it came."""
    return engine_pb2.ModelShape(
        hidden_size=shape.hidden_size,
        vocabulary_size=shape.vocabulary_size,
        attention=[_attention_to_proto(kind, layers) for kind, layers in shape.attention],
        dense_params=shape.dense_params,
        experts=None if shape.experts is None else _experts_to_proto(shape.experts),
        bytes_per_weight=shape.bytes_per_weight,
        bytes_per_kv=shape.bytes_per_kv,
    )


def drafter_shape_to_proto(shape: DrafterShape) -> engine_pb2.DrafterShape:
    """The shape as it came."""
    return engine_pb2.DrafterShape(
        dense_params=shape.dense_params,
        experts=None if shape.experts is None else _experts_to_proto(shape.experts),
        block_size=shape.block_size,
        bytes_per_weight=shape.bytes_per_weight,
        kv_bytes_per_token=shape.kv_bytes_per_token,
    )


def _attention_to_proto(kind: Attention, layers: int) -> engine_pb2.AttentionShape:
    message = engine_pb2.AttentionShape(layers=layers)
    if isinstance(kind, GroupedQueryAttention):
        message.grouped_query.query_heads = kind.query_heads
        message.grouped_query.kv_heads = kind.kv_heads
        message.grouped_query.head_dim = kind.head_dim
    elif isinstance(kind, LatentAttention):
        message.latent.query_heads = kind.query_heads
        message.latent.latent_dim = kind.latent_dim
        message.latent.rope_dim = kind.rope_dim
    else:
        message.linear.state_bytes = kind.state_bytes
        message.linear.token_flops = kind.token_flops
    return message


def _experts_to_proto(experts: Experts) -> engine_pb2.ExpertShape:
    return engine_pb2.ExpertShape(
        layers=experts.layers,
        experts=experts.experts,
        experts_per_token=experts.experts_per_token,
        shared=experts.shared,
        params_per_expert=experts.params_per_expert,
    )
