"""Converts the description of an engine between protobuf and the core's types, both ways."""

from collections.abc import Sequence
from dataclasses import replace

from google.protobuf.message import Message

from controller.core.capabilities import added, require_known
from controller.core.engine_spec import Capabilities, DrafterSpec, EngineSpec, Fingerprint
from controller.core.errors import InvalidEngineError
from controller.core.model_shapes import DrafterKind
from controller.wire.capabilities import all_lost_from_proto, lost_to_proto
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
}
_KIND_FROM_PROTO = {value: kind for kind, value in _KIND_TO_PROTO.items()}


def engine_from_proto(message: engine_pb2.EngineSpec) -> EngineSpec:
    """Raises InvalidEngineError if the introduction contradicts itself, or is endless."""
    if (size := message.ByteSize()) > _INTRODUCTION_BYTES:
        raise InvalidEngineError(
            f"the introduction has {size} bytes: {_INTRODUCTION_BYTES} at most"
        )
    _bound(message)
    fingerprint, able = message.fingerprint, message.capabilities
    spec = EngineSpec(
        engine_id=message.engine_id,
        fingerprint=Fingerprint(
            target_model=fingerprint.target_model,
            target_revision=fingerprint.target_revision,
            engine=fingerprint.engine,
            engine_version=fingerprint.engine_version,
            device=fingerprint.device,
            dtype=fingerprint.dtype,
            quantization=fingerprint.quantization,
            # 0 is "not said" on the wire, and an engine that does not say runs on one.
            tensor_parallel_size=fingerprint.tensor_parallel_size or 1,
            data_parallel_size=fingerprint.data_parallel_size or 1,
            attention_backend=fingerprint.attention_backend,
            graph_batch_sizes=tuple(fingerprint.graph_batch_sizes),
            shim_version=fingerprint.shim_version,
        ),
        drafters=tuple(_drafter_from_proto(drafter) for drafter in message.drafters),
        max_batch_size=message.max_batch_size,
        capabilities=Capabilities(
            can_sleep=able.can_sleep,
            can_switch_drafter=able.can_switch_drafter,
            can_update_online=able.can_update_online,
            can_collect=able.can_collect,
            overlap_steps=able.overlap_steps,
            drafters_follow=able.drafters_follow,
            catch_up_steps=able.catch_up_steps,
            can_take_versions=able.can_take_versions,
        ),
        shape=model_shape_from_proto(message.shape) if message.HasField("shape") else None,
        safe_gamma=message.safe_gamma if message.HasField("safe_gamma") else None,
    )
    lost = all_lost_from_proto(message.lost)
    require_known(lost, spec)
    return replace(spec, lost=added(spec, lost)) if lost else spec


def _bound(message: Message) -> None:
    """An introduction is kept, shown and compared: none of its texts and lists may be endless."""
    for field, value in message.ListFields():
        length = len(value) if isinstance(value, Sequence) else 0
        if length > _LENGTH_MAX:
            raise InvalidEngineError(f"{field.name} is {length} long: {_LENGTH_MAX} at most")
        for part in value if length and not isinstance(value, str) else (value,):
            if isinstance(part, Message):
                _bound(part)


def _drafter_from_proto(message: engine_pb2.Drafter) -> DrafterSpec:
    kind = _KIND_FROM_PROTO.get(message.kind)
    if kind is None:
        raise InvalidEngineError(
            f"drafter {message.name!r}: kind {message.kind} is unspecified or not known here; "
            f"known are {', '.join(k.value for k in DrafterKind)}"
        )
    return DrafterSpec(
        message.name,
        kind,
        tuple(message.gammas),
        message.model,
        message.revision,
        drafter_shape_from_proto(message.shape, kind) if message.HasField("shape") else None,
        tuple((limit.gamma, limit.max_batch_size) for limit in message.batch_limits),
    )


def fingerprint_to_proto(fingerprint: Fingerprint) -> engine_pb2.Fingerprint:
    """What profiles belong to."""
    return engine_pb2.Fingerprint(
        target_model=fingerprint.target_model,
        target_revision=fingerprint.target_revision,
        engine=fingerprint.engine,
        engine_version=fingerprint.engine_version,
        device=fingerprint.device,
        dtype=fingerprint.dtype,
        quantization=fingerprint.quantization,
        tensor_parallel_size=fingerprint.tensor_parallel_size,
        data_parallel_size=fingerprint.data_parallel_size,
        attention_backend=fingerprint.attention_backend,
        graph_batch_sizes=fingerprint.graph_batch_sizes,
        shim_version=fingerprint.shim_version,
    )


def engine_to_proto(spec: EngineSpec) -> engine_pb2.EngineSpec:
    """The introduction as it came."""
    able = spec.capabilities
    return engine_pb2.EngineSpec(
        engine_id=spec.engine_id,
        fingerprint=fingerprint_to_proto(spec.fingerprint),
        drafters=[
            engine_pb2.Drafter(
                name=drafter.name,
                kind=_KIND_TO_PROTO[drafter.kind],
                gammas=drafter.gammas,
                model=drafter.model,
                revision=drafter.revision,
                shape=None if drafter.shape is None else drafter_shape_to_proto(drafter.shape),
                batch_limits=[
                    engine_pb2.BatchLimit(gamma=gamma, max_batch_size=largest)
                    for gamma, largest in drafter.batch_limits
                ],
            )
            for drafter in spec.drafters
        ],
        max_batch_size=spec.max_batch_size,
        capabilities=engine_pb2.Capabilities(
            can_sleep=able.can_sleep,
            can_switch_drafter=able.can_switch_drafter,
            can_update_online=able.can_update_online,
            can_collect=able.can_collect,
            overlap_steps=able.overlap_steps,
            drafters_follow=able.drafters_follow,
            catch_up_steps=able.catch_up_steps,
            can_take_versions=able.can_take_versions,
        ),
        shape=None if spec.shape is None else model_shape_to_proto(spec.shape),
        safe_gamma=spec.safe_gamma,
        lost=map(lost_to_proto, spec.lost),
    )
