"""Converts the description of an engine between protobuf and the core's types, both ways.

Its drafters, the shapes of its models, and what it has lost since.
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
    added,
    require_known,
)
from controller.core.errors import InvalidEngineError, InvalidLossError, within
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
from controller.util.text import moment_text
from controller.wire.field_mapping import message_of, numbers_of, value_of
from speculation.v1 import engine_pb2

# Characters, or entries.
_LENGTH_MAX = 4096
# What fits in a packet of the shim's link.
_INTRODUCTION_BYTES = 64 * 1024
# Every draft length and every capability, each for itself.
_LOSSES_MAX = MAX_ARMS + len(Capability)
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
    """Raises InvalidEngineError if the introduction contradicts itself, or is endless."""
    if (size := message.ByteSize()) > _INTRODUCTION_BYTES:
        raise InvalidEngineError(
            f"the introduction has {size} bytes: {_INTRODUCTION_BYTES} at most"
        )
    _bound(message)
    fingerprint = message.fingerprint
    spec = value_of(
        EngineSpec,
        message,
        # 0 is "not said" on the wire, and an engine that does not say runs on one.
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
    with within("lost"):
        lost = all_lost_from_proto(message.lost)
        require_known(lost, spec)
    return replace(spec, lost=added(spec, lost)) if lost else spec


def leave_out_unknown(message: engine_pb2.EngineSpec) -> frozenset[str]:
    """Removes drafters of kinds that this version does not know, and mixtures that use them.

    Their losses go with them.  Where one of them is the learner, the engine learns nothing here.
    Returns their names.  The first drafter stays whatever it is, since the engine's safe draft
    length is of it, and so does one of unspecified kind.
    """
    drafters = list(message.drafters)
    kept = [d for d in drafters if d is drafters[0] or not d.kind or d.kind in _KIND_FROM_PROTO]
    if len(kept) == len(drafters):
        return frozenset()
    gone = _names(drafters) - _names(kept)
    kept = [d for d in kept if d is drafters[0] or not {d.mixture.main, d.mixture.free} & gone]
    gone = _names(drafters) - _names(kept)
    rest = engine_pb2.EngineSpec(
        drafters=kept, lost=[loss for loss in message.lost if loss.drafter not in gone]
    )
    message.ClearField("drafters")
    message.ClearField("lost")
    message.MergeFrom(rest)
    able = message.capabilities
    if able.learner in gone:
        able.learner = ""
        able.can_update_online = able.can_collect = able.can_take_versions = False
    return gone


def _names(drafters: Sequence[engine_pb2.Drafter]) -> frozenset[str]:
    """Returns the names of those that have one."""
    return frozenset(drafter.name for drafter in drafters) - {""}


def _bound(message: Message) -> None:
    """An introduction is kept, shown and compared: none of its texts and lists may be endless."""
    for field, value in message.ListFields():
        length = len(value) if isinstance(value, Sequence) else 0
        if length > _LENGTH_MAX:
            raise InvalidEngineError(
                f"{field.name} is {length} long: {_LENGTH_MAX} at most", field_path=field.name
            )
        for part in value if length and not isinstance(value, str) else (value,):
            if isinstance(part, Message):
                with within(field.name):
                    _bound(part)


def _drafters_from_proto(messages: Sequence[engine_pb2.Drafter]) -> tuple[DrafterSpec, ...]:
    found = []
    for number, message in enumerate(messages):
        with within(f"drafters[{number}]"):
            found.append(_drafter_from_proto(message))
    return tuple(found)


def _drafter_from_proto(message: engine_pb2.Drafter) -> DrafterSpec:
    kind = _KIND_FROM_PROTO.get(message.kind)
    if kind is None:
        raise InvalidEngineError(
            f"drafter {message.name!r}: kind {message.kind} is unspecified or not known here; "
            f"known are {', '.join(k.value for k in DrafterKind)}",
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
    """Converts the identity to which profiles belong."""
    return message_of(engine_pb2.Fingerprint, fingerprint)


def engine_to_proto(spec: EngineSpec) -> engine_pb2.EngineSpec:
    """The introduction as it came."""
    return message_of(
        engine_pb2.EngineSpec,
        spec,
        fingerprint=fingerprint_to_proto(spec.fingerprint),
        drafters=map(_drafter_to_proto, spec.drafters),
        capabilities=message_of(engine_pb2.Capabilities, spec.capabilities),
        shape=None if spec.shape is None else _model_shape_to_proto(spec.shape),
        lost=map(lost_to_proto, spec.lost),
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


def lost_to_proto(loss: LostCapability) -> engine_pb2.LostCapability:
    """The loss as it was reported."""
    return message_of(
        engine_pb2.LostCapability,
        loss,
        capability=_CAPABILITY_TO_PROTO[loss.capability],
        lost_at_unix_seconds=loss.lost_at,
    )


def lost_from_proto(message: engine_pb2.LostCapability) -> LostCapability | None:
    """None for a capability that is not known here.  Raises InvalidLossError.

    The reason is cut and made printable.  A time in the future (clocks differ) becomes now.
    """
    capability = _CAPABILITY_FROM_PROTO.get(message.capability)
    if capability is None:
        return None
    words = "".join(c if c.isprintable() else " " for c in message.reason[:MAX_REASON_CHARACTERS])
    return LostCapability(
        capability,
        message.drafter,
        tuple(sorted(set(message.gammas))),
        words,
        min(message.lost_at_unix_seconds, time.time()),
    )


def all_lost_from_proto(
    messages: Sequence[engine_pb2.LostCapability],
) -> tuple[LostCapability, ...]:
    """Returns the losses that are known here.  Raises InvalidLossError, also for too many."""
    if len(messages) > _LOSSES_MAX:
        raise InvalidLossError(f"{len(messages)} losses are reported, {_LOSSES_MAX} at most")
    found = map(lost_from_proto, messages)
    return tuple(loss for loss in found if loss is not None)


def lost_text(message: engine_pb2.LostCapability) -> str:
    """One line for people: what was lost, since when, and why."""
    loss = lost_from_proto(message)
    if loss is None:
        return f"a capability that this version does not know: {message.reason}"
    return f"{loss.what} lost since {moment_text(loss.lost_at)}: {loss.reason}"


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


def _model_shape_to_proto(shape: ModelShape) -> engine_pb2.ModelShape:
    attention = [_attention_to_proto(kind, layers) for kind, layers in shape.attention]
    experts = _experts_to_proto(shape.experts)
    return message_of(engine_pb2.ModelShape, shape, attention=attention, experts=experts)


def _drafter_shape_to_proto(shape: DrafterShape) -> engine_pb2.DrafterShape:
    return message_of(engine_pb2.DrafterShape, shape, experts=_experts_to_proto(shape.experts))


def _attention_to_proto(kind: Attention, layers: int) -> engine_pb2.AttentionShape:
    message = engine_pb2.AttentionShape(layers=layers)
    which = next(name for name, known in _ATTENTION.items() if isinstance(kind, known))
    part = getattr(message, which)
    part.CopyFrom(message_of(type(part), kind))
    return message


def _experts_to_proto(experts: Experts | None) -> engine_pb2.ExpertShape | None:
    return None if experts is None else message_of(engine_pb2.ExpertShape, experts)
