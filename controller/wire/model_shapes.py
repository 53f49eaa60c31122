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
from controller.wire.field_mapping import message_of, value_of
from speculation.v1 import engine_pb2

_ATTENTION = {
    "grouped_query": GroupedQueryAttention,
    "latent": LatentAttention,
    "linear": LinearAttention,
}


def model_shape_from_proto(message: engine_pb2.ModelShape) -> ModelShape:
    """Raises InvalidEngineError for numbers that cannot be."""
    try:
        attention = tuple((_attention_from_proto(part), part.layers) for part in message.attention)
        return value_of(ModelShape, message, attention=attention, experts=_experts(message))
    except InvalidShapeError as error:
        raise InvalidEngineError(f"shape: {error}", field_path="shape") from error


def drafter_shape_from_proto(message: engine_pb2.DrafterShape, kind: DrafterKind) -> DrafterShape:
    """Raises InvalidEngineError for numbers that cannot be."""
    try:
        return value_of(DrafterShape, message, kind=kind, experts=_experts(message))
    except InvalidShapeError as error:
        raise InvalidEngineError(f"drafter shape: {error}", field_path="shape") from error


def _attention_from_proto(message: engine_pb2.AttentionShape) -> Attention:
    which = message.WhichOneof("kind")
    if which is None:
        raise InvalidShapeError("a layer's attention is of no kind that is known here")
    found: Attention = value_of(_ATTENTION[which], getattr(message, which))
    return found


def _experts(message: engine_pb2.ModelShape | engine_pb2.DrafterShape) -> Experts | None:
    return value_of(Experts, message.experts) if message.HasField("experts") else None


def model_shape_to_proto(shape: ModelShape) -> engine_pb2.ModelShape:
    """Returns the shape as it came."""
    attention = [_attention_to_proto(kind, layers) for kind, layers in shape.attention]
    experts = _experts_to_proto(shape.experts)
    return message_of(engine_pb2.ModelShape, shape, attention=attention, experts=experts)


def drafter_shape_to_proto(shape: DrafterShape) -> engine_pb2.DrafterShape:
    """Returns the shape as it came."""
    return message_of(engine_pb2.DrafterShape, shape, experts=_experts_to_proto(shape.experts))


def _attention_to_proto(kind: Attention, layers: int) -> engine_pb2.AttentionShape:
    message = engine_pb2.AttentionShape(layers=layers)
    which = next(name for name, known in _ATTENTION.items() if isinstance(kind, known))
    part = getattr(message, which)
    part.CopyFrom(message_of(type(part), kind))
    return message


def _experts_to_proto(experts: Experts | None) -> engine_pb2.ExpertShape | None:
    return None if experts is None else message_of(engine_pb2.ExpertShape, experts)
