"""Converts the description of an engine between protobuf and the core's types, both ways.

The description has the drafters, the shapes of the models, and the capabilities lost since then.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

from google.protobuf.message import Message

from controller.core.engine_spec import (
    MAX_ARMS,
    MAX_REASON_CHARACTERS,
    Capabilities,
    Capability,
    DrafterSpec,
    EngineSpec,
    Fingerprint,
    LostCapability,
    Mixture,
    newly_lost,
    require_introduced,
)
from controller.core.errors import InvalidEngineError, InvalidLossError, error_field_prefix
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
from controller.util.text import timestamp_text
from controller.wire.field_mapping import message_of, numbers_of, value_of
from speculation.v1 import engine_pb2

# Characters of a text, or entries of a list.
_LENGTH_MAX = 4096
# The largest packet of the shim's link.
_INTRODUCTION_BYTES_MAX = 64 * 1024
# Every draft length and every capability may be reported as lost separately.
_LOST_CAPABILITIES_MAX = MAX_ARMS + len(Capability)
_KIND_TO_PROTO = numbers_of(DrafterKind, engine_pb2.DrafterKind, "DRAFTER_KIND_")
_KIND_FROM_PROTO = {number: kind for kind, number in _KIND_TO_PROTO.items()}
_CAPABILITY_TO_PROTO = numbers_of(Capability, engine_pb2.Capability, "CAPABILITY_")
_CAPABILITY_FROM_PROTO = {number: lost for lost, number in _CAPABILITY_TO_PROTO.items()}
_ATTENTION = {
    "grouped_query": GroupedQueryAttention,
    "latent": LatentAttention,
    "linear": LinearAttention,
}


def engine_from_proto(message: engine_pb2.EngineSpec) -> EngineSpec:
    """Converts an introduction.

    Raises InvalidEngineError if it contradicts itself or is too large.
    """
    if (size := message.ByteSize()) > _INTRODUCTION_BYTES_MAX:
        raise InvalidEngineError(
            f"the introduction has {size} bytes: at most {_INTRODUCTION_BYTES_MAX}"
        )
    _require_bounded(message)
    fingerprint = message.fingerprint
    spec = value_of(
        EngineSpec,
        message,
        # 0 means "unset" on the wire.  An engine that does not set it has one rank.
        fingerprint=value_of(
            Fingerprint,
            fingerprint,
            tensor_parallel_size=fingerprint.tensor_parallel_size or 1,
            data_parallel_size=fingerprint.data_parallel_size or 1,
        ),
        drafters=_drafters_from_proto(message.drafters),
        capabilities=value_of(Capabilities, message.capabilities),
        shape=model_shape_from_proto(message.shape) if message.HasField("shape") else None,
        lost=(),
    )
    with error_field_prefix("lost"):
        lost_capabilities = lost_capabilities_from_proto(message.lost)
        require_introduced(lost_capabilities, spec)
    return replace(spec, lost=newly_lost(spec, lost_capabilities)) if lost_capabilities else spec


def remove_unknown_drafters(message: engine_pb2.EngineSpec) -> frozenset[str]:
    """Removes drafters of kinds that this version does not know, and mixtures that use them.

    Also removes their lost capabilities.  If one of them is the learner, the engine is treated as
    one that cannot learn.  Returns their names.  The first drafter always stays, because the
    engine's safe draft length belongs to it.  A drafter of unspecified kind stays as well.
    """
    drafters = list(message.drafters)
    kept_drafters = [
        d for d in drafters if d is drafters[0] or not d.kind or d.kind in _KIND_FROM_PROTO
    ]
    if len(kept_drafters) == len(drafters):
        return frozenset()
    removed_names = _names(drafters) - _names(kept_drafters)
    kept_drafters = [
        d
        for d in kept_drafters
        if d is drafters[0] or not {d.mixture.main, d.mixture.free} & removed_names
    ]
    removed_names = _names(drafters) - _names(kept_drafters)
    kept_fields = engine_pb2.EngineSpec(
        drafters=kept_drafters,
        lost=[
            lost_capability
            for lost_capability in message.lost
            if lost_capability.drafter not in removed_names
        ],
    )
    message.ClearField("drafters")
    message.ClearField("lost")
    message.MergeFrom(kept_fields)
    capabilities = message.capabilities
    if capabilities.learner in removed_names:
        capabilities.learner = ""
        capabilities.can_update_online = capabilities.can_collect = (
            capabilities.can_take_versions
        ) = False
    return removed_names


def _names(drafters: Sequence[engine_pb2.Drafter]) -> frozenset[str]:
    """Returns the names of the drafters, without the empty name."""
    return frozenset(drafter.name for drafter in drafters) - {""}


def _require_bounded(message: Message) -> None:
    """Raises InvalidEngineError for a text or a list of an introduction that is too long.

    Introductions are kept, shown and compared.
    """
    for field, value in message.ListFields():
        length = len(value) if isinstance(value, Sequence) else 0
        if length > _LENGTH_MAX:
            raise InvalidEngineError(
                f"{field.name} has length {length}: at most {_LENGTH_MAX}", field_path=field.name
            )
        for item in value if length and not isinstance(value, str) else (value,):
            if isinstance(item, Message):
                with error_field_prefix(field.name):
                    _require_bounded(item)


def _drafters_from_proto(messages: Sequence[engine_pb2.Drafter]) -> tuple[DrafterSpec, ...]:
    drafters = []
    for index, message in enumerate(messages):
        with error_field_prefix(f"drafters[{index}]"):
            drafters.append(_drafter_from_proto(message))
    return tuple(drafters)


def _drafter_from_proto(message: engine_pb2.Drafter) -> DrafterSpec:
    kind = _KIND_FROM_PROTO.get(message.kind)
    if kind is None:
        raise InvalidEngineError(
            f"drafter {message.name!r}: kind {message.kind} is unspecified or unknown; the known "
            f"kinds are {', '.join(k.value for k in DrafterKind)}",
            field_path="kind",
        )
    return value_of(
        DrafterSpec,
        message,
        kind=kind,
        shape=drafter_shape_from_proto(message.shape, kind) if message.HasField("shape") else None,
        batch_limits=tuple((limit.gamma, limit.max_batch_size) for limit in message.batch_limits),
        mixture=value_of(Mixture, message.mixture) if message.HasField("mixture") else None,
    )


def fingerprint_to_proto(fingerprint: Fingerprint) -> engine_pb2.Fingerprint:
    """Converts the fingerprint, by which profiles are matched to engines."""
    return message_of(engine_pb2.Fingerprint, fingerprint)


def engine_to_proto(spec: EngineSpec) -> engine_pb2.EngineSpec:
    """Converts an engine's description back into its introduction."""
    return message_of(
        engine_pb2.EngineSpec,
        spec,
        fingerprint=fingerprint_to_proto(spec.fingerprint),
        drafters=map(_drafter_to_proto, spec.drafters),
        capabilities=message_of(engine_pb2.Capabilities, spec.capabilities),
        shape=None if spec.shape is None else _model_shape_to_proto(spec.shape),
        lost=map(lost_capability_to_proto, spec.lost),
    )


def _drafter_to_proto(drafter: DrafterSpec) -> engine_pb2.Drafter:
    return message_of(
        engine_pb2.Drafter,
        drafter,
        kind=_KIND_TO_PROTO[drafter.kind],
        shape=None if drafter.shape is None else _drafter_shape_to_proto(drafter.shape),
        batch_limits=[
            engine_pb2.BatchLimit(gamma=gamma, max_batch_size=largest)
            for gamma, largest in drafter.batch_limits
        ],
        mixture=(
            None if drafter.mixture is None else message_of(engine_pb2.Mixture, drafter.mixture)
        ),
    )


def lost_capability_to_proto(lost_capability: LostCapability) -> engine_pb2.LostCapability:
    """Converts a lost capability."""
    return message_of(
        engine_pb2.LostCapability,
        lost_capability,
        capability=_CAPABILITY_TO_PROTO[lost_capability.capability],
        lost_at_unix_seconds=lost_capability.lost_at,
    )


def lost_capability_from_proto(message: engine_pb2.LostCapability) -> LostCapability | None:
    """Returns None for an unknown capability.  Raises InvalidLossError.

    The reason is truncated and made printable.  A time in the future (clocks differ) becomes now.
    """
    capability = _CAPABILITY_FROM_PROTO.get(message.capability)
    if capability is None:
        return None
    reason = "".join(c if c.isprintable() else " " for c in message.reason[:MAX_REASON_CHARACTERS])
    return LostCapability(
        capability,
        message.drafter,
        tuple(sorted(set(message.gammas))),
        reason,
        min(message.lost_at_unix_seconds, time.time()),
    )


def lost_capabilities_from_proto(
    messages: Sequence[engine_pb2.LostCapability],
) -> tuple[LostCapability, ...]:
    """Returns the lost capabilities that are known.  Raises InvalidLossError, also for too many."""
    if len(messages) > _LOST_CAPABILITIES_MAX:
        raise InvalidLossError(
            f"{len(messages)} lost capabilities are reported: at most {_LOST_CAPABILITIES_MAX}"
        )
    lost_capabilities = map(lost_capability_from_proto, messages)
    return tuple(
        lost_capability for lost_capability in lost_capabilities if lost_capability is not None
    )


def lost_capability_text(message: engine_pb2.LostCapability) -> str:
    """Returns one line for people: what was lost, since when, and why."""
    lost_capability = lost_capability_from_proto(message)
    if lost_capability is None:
        return f"a capability that this version does not know: {message.reason}"
    lost_since = timestamp_text(lost_capability.lost_at)
    return f"{lost_capability.description} lost since {lost_since}: {lost_capability.reason}"


def model_shape_from_proto(message: engine_pb2.ModelShape) -> ModelShape:
    """Converts a model's shape.  Raises InvalidEngineError for impossible numbers."""
    try:
        attention = tuple((_attention_from_proto(part), part.layers) for part in message.attention)
        return value_of(
            ModelShape, message, attention=attention, experts=_experts_from_proto(message)
        )
    except InvalidShapeError as error:
        raise InvalidEngineError(f"shape: {error}", field_path="shape") from error


def drafter_shape_from_proto(message: engine_pb2.DrafterShape, kind: DrafterKind) -> DrafterShape:
    """Converts a drafter's shape.  Raises InvalidEngineError for impossible numbers."""
    try:
        return value_of(DrafterShape, message, kind=kind, experts=_experts_from_proto(message))
    except InvalidShapeError as error:
        raise InvalidEngineError(f"drafter shape: {error}", field_path="shape") from error


def _attention_from_proto(message: engine_pb2.AttentionShape) -> Attention:
    which = message.WhichOneof("kind")
    if which is None:
        raise InvalidShapeError("the attention of a layer has an unknown kind")
    attention: Attention = value_of(_ATTENTION[which], getattr(message, which))
    return attention


def _experts_from_proto(message: engine_pb2.ModelShape | engine_pb2.DrafterShape) -> Experts | None:
    return value_of(Experts, message.experts) if message.HasField("experts") else None


def _model_shape_to_proto(shape: ModelShape) -> engine_pb2.ModelShape:
    attention = [_attention_to_proto(kind, layers) for kind, layers in shape.attention]
    experts = _experts_to_proto(shape.experts)
    return message_of(engine_pb2.ModelShape, shape, attention=attention, experts=experts)


def _drafter_shape_to_proto(shape: DrafterShape) -> engine_pb2.DrafterShape:
    return message_of(engine_pb2.DrafterShape, shape, experts=_experts_to_proto(shape.experts))


def _attention_to_proto(kind: Attention, layers: int) -> engine_pb2.AttentionShape:
    message = engine_pb2.AttentionShape(layers=layers)
    which = next(
        name for name, attention_class in _ATTENTION.items() if isinstance(kind, attention_class)
    )
    shape_message = getattr(message, which)
    shape_message.CopyFrom(message_of(type(shape_message), kind))
    return message


def _experts_to_proto(experts: Experts | None) -> engine_pb2.ExpertShape | None:
    return None if experts is None else message_of(engine_pb2.ExpertShape, experts)
