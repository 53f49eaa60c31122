"""Encodes and decodes the packets on the socket pair between an engine and its agent.

A packet contains one message of the contract.

  engine -> agent   first an IntroduceRequest; then a type byte followed by a StepReport, which the
                    agent forwards without parsing it, or by a SteerRequest without reports
  agent -> engine   the arrival time from the sidecar (8 bytes), then an AgentMessage

Both ends are started from one installation.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from hashlib import blake2b
from typing import Final, NamedTuple, TypeAlias

from google.protobuf.internal import api_implementation
from google.protobuf.message import DecodeError, Message

from engine_shim.link.errors import PacketError
from speculation.v1 import link_pb2
from speculation.v1.engine_pb2 import StepReport
from speculation.v1.link_pb2 import AgentMessage, LinkState
from speculation.v1.plan_pb2 import Plan
from speculation.v1.service_pb2 import IntroduceRequest, SteerRequest

MAX_GAMMA: Final = 64
# Enough for an introduction or a plan; the kernel's socket buffer holds three of them.
MAX_PACKET_BYTES: Final = 64 * 1024
# Less than the smallest message limit that a sidecar can be configured with.
MAX_REPORT_BYTES: Final = 60 * 1024
# Limit of a state's text.
MAX_TEXT_BYTES: Final = 256
PURE_PYTHON_VARIABLE: Final = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"

Buffer: TypeAlias = bytes | bytearray | memoryview

# The first byte of a packet from the engine, after its introduction.
REPORT: Final = b"\x01"
REQUEST: Final = b"\x02"
_ARRIVAL_STRUCT: Final = struct.Struct("<q")
# The tag of SteerRequest.reports: a length-delimited field (wire type 2).
_REPORT_TAG: Final = SteerRequest.REPORTS_FIELD_NUMBER << 3 | 2
_DIGEST_BYTES: Final = 8
_NON_TABLE_FIELDS: Final = tuple(
    field.name for field in Plan.DESCRIPTOR.fields if field.name not in {"rows", "rules"}
)


class SidecarState(IntEnum):
    """State of the agent's connection to the sidecar, as in proto SidecarState."""

    UNKNOWN = link_pb2.SIDECAR_STATE_UNSPECIFIED
    STEERING = link_pb2.SIDECAR_STATE_STEERING
    AWAY = link_pb2.SIDECAR_STATE_AWAY
    REFUSED = link_pb2.SIDECAR_STATE_REFUSED


class ArrivedPlan(NamedTuple):
    """A plan as the agent forwards it.

    `arrival_ns`: CLOCK_MONOTONIC when the agent received it; the lease counts from there.
    `table_digest`: as in proto AgentMessage.
    """

    plan: Plan
    arrival_ns: int
    table_digest: int = 0


def slow_protobuf_reason() -> str:
    """Returns why protobuf is too slow for an engine's thread; "" if it is fast enough."""
    if api_implementation.Type() != "python":
        return ""
    return (
        "protobuf runs as pure Python, which takes 20 times as long in each step: unset "
        f"{PURE_PYTHON_VARIABLE}, or install a protobuf with its compiled part"
    )


def encode_report_field(report: bytes) -> bytes:
    """Returns a serialized StepReport as an entry of SteerRequest.reports.

    The entries of a message may follow each other, and its other fields, in any order.
    """
    encoded, length = bytearray((_REPORT_TAG,)), len(report)
    while length > 0x7F:
        encoded.append(length & 0x7F | 0x80)
        length >>= 7
    encoded.append(length)
    return bytes(encoded) + report


def is_readable_report(report: bytes) -> bool:
    """Whether a sidecar can parse a report; an invalid one would invalidate its whole message."""
    try:
        StepReport.FromString(report)
    except DecodeError:
        return False
    return True


def table_digest(plan: Plan) -> int:
    """Returns a hash of the plan's rows and rules; never 0."""
    table: Message = Plan()
    table.CopyFrom(plan)
    for name in _NON_TABLE_FIELDS:
        table.ClearField(name)
    content = table.SerializeToString(deterministic=True)
    return int.from_bytes(blake2b(content, digest_size=_DIGEST_BYTES).digest(), "little") or 1


def read_introduction(packet: bytes) -> IntroduceRequest:
    """Reads the engine's first packet.  Raises PacketError if it is not an introduction."""
    try:
        request = IntroduceRequest.FromString(packet)
    except DecodeError as error:
        raise PacketError(f"the first packet is not an introduction: {error}") from error
    if not request.HasField("engine"):
        raise PacketError("the first packet introduces no engine")
    return request


def read_request(packet: bytes) -> SteerRequest:
    """Reads a SteerRequest packet from the engine.  Raises PacketError for any other packet."""
    try:
        request = SteerRequest.FromString(packet[1:])
    except DecodeError as error:
        raise PacketError(f"{len(packet)} bytes are not a SteerRequest: {error}") from error
    if packet[:1] != REQUEST or request.reports:
        raise PacketError(f"{len(packet)} bytes are neither a report nor a lost capability")
    return request


def encode_plan(arrived: ArrivedPlan) -> bytes:
    """Encodes a plan.  Raises PacketError if it is too large."""
    message = AgentMessage(plan=arrived.plan, table_digest=arrived.table_digest)
    packet = _encode_packet(message, arrived.arrival_ns)
    if len(packet) > MAX_PACKET_BYTES:
        raise PacketError(f"plan {arrived.plan.epoch}: {len(packet)} bytes")
    return packet


def encode_state(state: SidecarState, code: int, text: str) -> bytes:
    """Encodes a state.  `text` is cut to MAX_TEXT_BYTES bytes of UTF-8, at a character."""
    text = text.encode("utf-8", "replace")[:MAX_TEXT_BYTES].decode("utf-8", "ignore")
    link_state = LinkState(state=link_pb2.SidecarState.ValueType(state), code=code, text=text)
    return _encode_packet(AgentMessage(state=link_state), 0)


def _encode_packet(message: AgentMessage, arrival_ns: int) -> bytes:
    return _ARRIVAL_STRUCT.pack(arrival_ns) + message.SerializeToString()


def read_packet(packet: Buffer) -> ArrivedPlan | LinkState:
    """Reads a packet from the agent.  Raises PacketError if it is malformed."""
    if len(packet) > MAX_PACKET_BYTES:
        raise PacketError(f"a packet of more than {MAX_PACKET_BYTES} bytes")
    try:
        (arrival_ns,) = _ARRIVAL_STRUCT.unpack_from(packet)
        message = AgentMessage.FromString(bytes(packet[_ARRIVAL_STRUCT.size :]))
    except (struct.error, DecodeError) as error:
        raise PacketError(f"a packet of {len(packet)} bytes is not a message: {error}") from error
    content = message.WhichOneof("content")
    if content == "plan":
        return ArrivedPlan(message.plan, arrival_ns, message.table_digest)
    if content != "state":
        raise PacketError(f"a packet of {len(packet)} bytes has no content")
    return message.state
