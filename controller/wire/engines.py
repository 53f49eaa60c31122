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

# Characters of a text, or entries of a list.
_LENGTH_MAX = 4096
# The largest packet of the shim's link.
_INTRODUCTION_BYTES = 64 * 1024
# Every draft length and every capability may be reported as lost separately.
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
    """Converts an introduction.

    Raises InvalidEngineError if it contradicts itself or is too large.
    """
    if (size := message.ByteSize()) > _INTRODUCTION_BYTES:
        raise InvalidEngineError(
            f"the introduction has {size} bytes: at most {_INTRODUCTION_BYTES}"
        )
    _bound(message)
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
    with within("lost"):
        lost = all_lost_from_proto(message.lost)
        require_known(lost, spec)
    return replace(spec, lost=added(spec, lost)) if lost else spec


def leave_out_unknown(message: engine_pb2.EngineSpec) -> frozenset[str]:
    """Removes drafters of kinds that this version does not know, and mixtures that use them.

    Also removes their lost capabilities.  If one of them is the learner, the engine is treated as
    one that cannot learn.  Returns their names.  The first drafter always stays, because the
    engine's safe draft length belongs to it.  A drafter of unspecified kind stays as well.
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
    """Returns the names of the drafters, without the empty name."""
    return frozenset(drafter.name for drafter in drafters) - {""}


def _bound(message: Message) -> None:
    """Raises InvalidEngineError for a text or a list of an introduction that is too long.

    Introductions are kept, shown and compared.
    """
    for field, value in message.ListFields():
        length = len(value) if isinstance(value, Sequence) else 0
        if length > _LENGTH_MAX:
            raise InvalidEngineError(
                f"{field.name} has length {length}: at most {_LENGTH_MAX}", field_path=field.name
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
    """Converts a lost capability."""
    return message_of(
        engine_pb2.LostCapability,
        loss,
        capability=_CAPABILITY_TO_PROTO[loss.capability],
        lost_at_unix_seconds=loss.lost_at,
    )


def lost_from_proto(message: engine_pb2.LostCapability) -> LostCapability | None:
    """Returns None for an unknown capability.  Raises InvalidLossError.

    The reason is truncated and made printable.  A time in the future (clocks differ) becomes now.
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
    """Returns the lost capabilities that are known.  Raises InvalidLossError, also for too many."""
    if len(messages) > _LOSSES_MAX:
        raise InvalidLossError(
            f"{len(messages)} lost capabilities are reported: at most {_LOSSES_MAX}"
        )
    found = map(lost_from_proto, messages)
    return tuple(loss for loss in found if loss is not None)


def lost_text(message: engine_pb2.LostCapability) -> str:
    """Returns one line for people: what was lost, since when, and why."""
    loss = lost_from_proto(message)
    if loss is None:
        return f"a capability that this version does not know: {message.reason}"
    return f"{loss.what} lost since {moment_text(loss.lost_at)}: {loss.reason}"


def model_shape_from_proto(message: engine_pb2.ModelShape) -> ModelShape:
    """Converts a model's shape.  Raises InvalidEngineError for impossible numbers."""
    try:
        attention = tuple((_attention_from_proto(part), part.layers) for part in message.attention)
        return value_of(ModelShape, message, attention=attention, experts=_experts(message))
    except InvalidShapeError as error:
        raise InvalidEngineError(f"shape: {error}", field_path="shape") from error


def drafter_shape_from_proto(message: engine_pb2.DrafterShape, kind: DrafterKind) -> DrafterShape:
    """Converts a drafter's shape.  Raises InvalidEngineError for impossible numbers."""
    try:
        return value_of(DrafterShape, message, kind=kind, experts=_experts(message))
    except InvalidShapeError as error:
        raise InvalidEngineError(f"drafter shape: {error}", field_path="shape") from error


def _attention_from_proto(message: engine_pb2.AttentionShape) -> Attention:
    which = message.WhichOneof("kind")
    if which is None:
        raise InvalidShapeError("the attention of a layer has an unknown kind")
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
