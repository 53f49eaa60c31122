"""Converts the description of an engine between protobuf and the core's types, both ways."""

from collections.abc import Sequence
from dataclasses import replace

from google.protobuf.message import Message

from controller.core.capabilities import added, require_known
from controller.core.engine_spec import Capabilities, DrafterSpec, EngineSpec, Fingerprint, Mixture
from controller.core.errors import InvalidEngineError, within
from controller.core.model_shapes import DrafterKind
from controller.wire.capabilities import all_lost_from_proto, lost_to_proto
from controller.wire.field_mapping import message_of, value_of
from controller.wire.model_shapes import (
    drafter_shape_from_proto,
    drafter_shape_to_proto,
    model_shape_from_proto,
    model_shape_to_proto,
)
from speculation.v1 import engine_pb2

# Characters, or entries.
_LENGTH_MAX = 4096
# What fits in a packet of the shim's link.
_INTRODUCTION_BYTES = 64 * 1024
_KIND_TO_PROTO = {
    DrafterKind.MTP: engine_pb2.DRAFTER_KIND_MTP,
    DrafterKind.DFLASH: engine_pb2.DRAFTER_KIND_DFLASH,
    DrafterKind.STANDALONE: engine_pb2.DRAFTER_KIND_STANDALONE,
    DrafterKind.NGRAM: engine_pb2.DRAFTER_KIND_NGRAM,
    DrafterKind.MIXTURE: engine_pb2.DRAFTER_KIND_MIXTURE,
}
_KIND_FROM_PROTO = {value: kind for kind, value in _KIND_TO_PROTO.items()}


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
    """Removes drafters of kinds that this version does not know, with their losses.

    Returns their names.  The first drafter stays whatever it is, since the engine's safe draft
    length is of it, and so does one of unspecified kind.
    """
    unknown = [
        drafter
        for drafter in message.drafters[1:]
        if drafter.kind and drafter.kind not in _KIND_FROM_PROTO
    ]
    for drafter in unknown:
        message.drafters.remove(drafter)
    names = {drafter.name for drafter in unknown} - {drafter.name for drafter in message.drafters}
    for loss in [loss for loss in message.lost if loss.drafter in names]:
        message.lost.remove(loss)
    return frozenset(names)


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
        shape=None if spec.shape is None else model_shape_to_proto(spec.shape),
        lost=map(lost_to_proto, spec.lost),
    )


def _drafter_to_proto(drafter: DrafterSpec) -> engine_pb2.Drafter:
    return message_of(
        engine_pb2.Drafter,
        drafter,
        kind=_KIND_TO_PROTO[drafter.kind],
        shape=None if drafter.shape is None else drafter_shape_to_proto(drafter.shape),
        batch_limits=[
            engine_pb2.BatchLimit(gamma=gamma, max_batch_size=largest)
            for gamma, largest in drafter.batch_limits
        ],
        mixture=(
            None if drafter.mixture is None else message_of(engine_pb2.Mixture, drafter.mixture)
        ),
    )
