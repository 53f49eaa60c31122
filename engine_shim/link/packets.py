"""The packets on the socket pair between an engine and its agent.

Every packet begins with a version byte and a kind byte; numbers are little-endian.  Both ends are
started from one installation, so the version only guards against a mixed one: another version is
refused, never guessed at.

  HELLO   engine -> agent   the introduction: a serialized proto IntroduceRequest
  REPORT  engine -> agent   one decode step, 66 + 4 * (gamma + 1) bytes
  PLAN    agent -> engine   a table over batch sizes, 40 + 21 * rows bytes
  EVENT   agent -> engine   how the sidecar is doing
  LOST    engine -> agent   something that the engine can no longer do: a proto LostCapability

Encoders raise `struct.error` for numbers that do not fit; decoders raise PacketError for anything
that is not a whole, well-formed packet.  Drafters go by their index in the introduction.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

from engine_shim.link.errors import PacketError

VERSION: Final = 4
HELLO: Final = 1
REPORT: Final = 2
PLAN: Final = 3
EVENT: Final = 4
LOST: Final = 5

MAX_GAMMA: Final = 64
MAX_ROWS: Final = 512
MAX_HELLO_BYTES: Final = 64 * 1024
MAX_EVENT_TEXT_BYTES: Final = 256
MAX_LOST_BYTES: Final = 1024

# Flags of a step report; as in proto StepFlags.
AFTER_GAP: Final = 1
EAGER_FALLBACK: Final = 2
FIRST_USE: Final = 4
UNSTEERED: Final = 8
SWITCHED: Final = 16
UPDATING: Final = 32
DRAFTER_RESET: Final = 64
ALL_FLAGS: Final = 127

Buffer: TypeAlias = bytes | bytearray | memoryview

_HEAD: Final = struct.Struct("<BB")
_REPORT_HEAD: Final = "<BBBBHIIIQQdQQfI"
_REPORTS: Final = tuple(struct.Struct(f"{_REPORT_HEAD}{g + 1}I") for g in range(MAX_GAMMA + 1))
_REPORT_FIXED: Final = struct.Struct(_REPORT_HEAD)
_PLAN_HEAD: Final = struct.Struct("<BBHIQqIBII")
_ROW: Final = struct.Struct("<IBBBBBIQ")
_EVENT_HEAD: Final = struct.Struct("<BBBH")
_ASLEEP: Final = 1
_HAS_PROBE: Final = 2

MAX_PLAN_BYTES: Final = _PLAN_HEAD.size + MAX_ROWS * _ROW.size


class SidecarState(IntEnum):
    """Names the state of the agent's conversation with the sidecar."""

    UNKNOWN = 0  # no word from the agent yet
    STEERING = 1  # a session is open
    AWAY = 2  # cannot be reached, or the session broke off; the agent keeps trying
    REFUSED = 3  # the sidecar refused the introduction; the text says why


class ReportPacket(NamedTuple):
    """One decode step; units as in proto StepReport.

    `plan_epoch`, `probe_id` and `session` are those of the StepChoice that the step ran; `session`
    is 0 when the engine did not say.  `dropped_before`: reports lost at the socket since the last
    one sent, counted by the link.
    """

    step: int
    batch_size: int
    kv_tokens: int
    drafter_index: int
    gamma: int
    accepted_counts: Sequence[int]
    step_seconds: float
    flags: int
    plan_epoch: int
    probe_id: int
    session: int = 0
    update_seconds: float = 0.0
    draft_version: int = 0
    dropped_before: int = 0


class ProbeEntry(NamedTuple):
    """Another arm for `steps` steps in the bucket of its row."""

    probe_id: int
    drafter_index: int
    gamma: int
    steps: int


class RowEntry(NamedTuple):
    """The choice for batch sizes up to `max_batch_size` (and above the previous row's)."""

    max_batch_size: int
    drafter_index: int
    gamma: int
    asleep: bool
    probe: ProbeEntry | None


class PlanPacket(NamedTuple):
    """A plan as the engine uses it.

    `session` tags the sidecar session (epochs and probe identifiers count within one).
    `arrival_ns`: CLOCK_MONOTONIC when the agent received it; the lease counts from there.
    `regime_mode`, `regime_stride`: as in proto Regime; `draft_version`: as in proto Plan.
    """

    session: int
    epoch: int
    arrival_ns: int
    lease_ms: int
    regime_mode: int
    regime_stride: int
    rows: tuple[RowEntry, ...]
    draft_version: int = 0


class EventPacket(NamedTuple):
    """A change in the conversation with the sidecar; `code` is a gRPC status code or 0."""

    state: SidecarState
    code: int
    text: str


def kind_of(data: Buffer) -> int:
    """Kind of a packet.  Raises PacketError when it is too short or of another version."""
    if len(data) < _HEAD.size:
        raise PacketError(f"a packet of {len(data)} bytes is too short to be one")
    version, kind = data[0], data[1]
    if version != VERSION:
        raise PacketError(f"packet version {version}, this end speaks {VERSION}: mixed install?")
    if not HELLO <= kind <= LOST:
        raise PacketError(f"unknown packet kind {kind}")
    return kind


def _require(data: Buffer, kind: int, at_least: int) -> None:
    found = kind_of(data)
    if found != kind:
        raise PacketError(f"packet kind {found} where {kind} was expected")
    if len(data) < at_least:
        raise PacketError(f"packet kind {kind}: {len(data)} bytes, at least {at_least} needed")


def encode_hello(introduction: bytes) -> bytes:
    """Packs the introduction.  Raises PacketError when it is too large for one packet."""
    if len(introduction) > MAX_HELLO_BYTES:
        raise PacketError(f"introduction of {len(introduction)} bytes, limit {MAX_HELLO_BYTES}")
    return _HEAD.pack(VERSION, HELLO) + introduction


def decode_hello(data: Buffer) -> bytes:
    """The serialized IntroduceRequest (its content is for protobuf to judge)."""
    _require(data, HELLO, _HEAD.size)
    return bytes(data[_HEAD.size :])


def encode_report(report: ReportPacket) -> bytes:
    """Raises struct.error or IndexError for what fits no packet (all other checks: the sidecar)."""
    # Unpacked at once: a look-up of each field by name would cost the engine more.
    (
        step, batch_size, kv_tokens, drafter, gamma, accepted_counts, seconds, flags, epoch, probe,
        session, update_seconds, draft_version, dropped,
    ) = report  # fmt: skip
    return _REPORTS[gamma].pack(
        VERSION, REPORT, drafter, gamma, flags, session, dropped, batch_size, step, kv_tokens,
        seconds, epoch, probe, update_seconds, draft_version, *accepted_counts,
    )  # fmt: skip


def decode_report(data: Buffer) -> ReportPacket:
    """Unpacks a report.  Raises PacketError."""
    _require(data, REPORT, _REPORT_FIXED.size)
    gamma = data[3]
    if gamma > MAX_GAMMA:
        raise PacketError(f"report: gamma {gamma}, limit {MAX_GAMMA}")
    layout = _REPORTS[gamma]
    if len(data) != layout.size:
        raise PacketError(f"report: {len(data)} bytes, gamma {gamma} needs {layout.size}")
    (
        _, _, drafter, gamma, flags, session, dropped, batch_size, step, kv_tokens,
        seconds, epoch, probe, update_seconds, draft_version, *accepted_counts,
    ) = layout.unpack(data)  # fmt: skip
    return ReportPacket(
        step, batch_size, kv_tokens, drafter, gamma, tuple(accepted_counts), seconds, flags, epoch,
        probe, session, update_seconds, draft_version, dropped,
    )  # fmt: skip


def encode_plan(plan: PlanPacket) -> bytes:
    """Raises struct.error for numbers that do not fit."""
    head = _PLAN_HEAD.pack(
        VERSION,
        PLAN,
        len(plan.rows),
        plan.session,
        plan.epoch,
        plan.arrival_ns,
        plan.lease_ms,
        plan.regime_mode,
        plan.regime_stride,
        plan.draft_version,
    )
    return head + b"".join(_encode_row(row) for row in plan.rows)


def _encode_row(row: RowEntry) -> bytes:
    flags = _ASLEEP if row.asleep else 0
    if row.probe is None:
        return _ROW.pack(row.max_batch_size, row.drafter_index, row.gamma, flags, 0, 0, 0, 0)
    probe = row.probe
    return _ROW.pack(
        row.max_batch_size,
        row.drafter_index,
        row.gamma,
        flags | _HAS_PROBE,
        probe.drafter_index,
        probe.gamma,
        probe.steps,
        probe.probe_id,
    )


def decode_plan(data: Buffer) -> PlanPacket:
    """Unpacks a plan.  Raises PacketError, also for an impossible table."""
    _require(data, PLAN, _PLAN_HEAD.size)
    head = _PLAN_HEAD.unpack_from(data)
    _, _, count, session, epoch, arrival_ns, lease_ms, mode, stride, version = head
    if not 1 <= count <= MAX_ROWS:
        raise PacketError(f"plan: {count} rows leave 1..{MAX_ROWS}")
    if len(data) != _PLAN_HEAD.size + count * _ROW.size:
        raise PacketError(f"plan: {len(data)} bytes do not hold {count} rows")
    if lease_ms < 1:
        raise PacketError("plan: a lease of 0 ms")
    rows = _rows(bytes(data[_PLAN_HEAD.size :]))
    return PlanPacket(session, epoch, arrival_ns, lease_ms, mode, stride, rows, version)


# A renewed plan has the rows of the one before it: the engine's thread need not read them again.
@lru_cache(maxsize=4)
def _rows(data: bytes) -> tuple[RowEntry, ...]:
    rows = []
    previous = 0
    for size, drafter, gamma, flags, *probe in _ROW.iter_unpack(data):
        if size <= previous:
            raise PacketError(f"plan: max_batch_size {size} after {previous} does not ascend")
        if gamma > MAX_GAMMA or flags > (_ASLEEP | _HAS_PROBE):
            raise PacketError(f"plan: row with gamma {gamma}, flags {flags}")
        entry = _probe(*probe) if flags & _HAS_PROBE else None
        if flags & _ASLEEP and gamma and (entry is None or entry.gamma):
            raise PacketError(f"plan: gamma {gamma} with the drafter asleep")
        rows.append(RowEntry(size, drafter, gamma, flags & _ASLEEP != 0, entry))
        previous = size
    return tuple(rows)


def _probe(drafter_index: int, gamma: int, steps: int, probe_id: int) -> ProbeEntry:
    if gamma > MAX_GAMMA or steps < 1 or probe_id < 1:
        raise PacketError(f"plan: probe {probe_id} with gamma {gamma} for {steps} steps")
    return ProbeEntry(probe_id, drafter_index, gamma, steps)


def encode_lost(lost_capability: bytes) -> bytes:
    """Packs a loss.  Raises PacketError when it is too large."""
    if len(lost_capability) > MAX_LOST_BYTES:
        raise PacketError(f"a loss of {len(lost_capability)} bytes, limit {MAX_LOST_BYTES}")
    return _HEAD.pack(VERSION, LOST) + lost_capability


def decode_lost(data: Buffer) -> bytes:
    """The serialized LostCapability (its content is for protobuf to judge).  Raises PacketError."""
    _require(data, LOST, _HEAD.size)
    if len(data) > _HEAD.size + MAX_LOST_BYTES:
        raise PacketError(f"loss: {len(data)} bytes are too many")
    return bytes(data[_HEAD.size :])


def encode_event(state: SidecarState, code: int, text: str) -> bytes:
    """`text` is cut to MAX_EVENT_TEXT_BYTES bytes of UTF-8."""
    raw = text.encode("utf-8", "replace")[:MAX_EVENT_TEXT_BYTES]
    return _EVENT_HEAD.pack(VERSION, EVENT, state, code) + raw


def decode_event(data: Buffer) -> EventPacket:
    """Unpacks an event.  Raises PacketError.  A character that was cut in two is left out."""
    _require(data, EVENT, _EVENT_HEAD.size)
    _, _, state, code = _EVENT_HEAD.unpack_from(data)
    if len(data) > _EVENT_HEAD.size + MAX_EVENT_TEXT_BYTES:
        raise PacketError(f"event: {len(data)} bytes are too many")
    if state not in SidecarState.__members__.values():
        raise PacketError(f"event: unknown state {state}")
    text = bytes(data[_EVENT_HEAD.size :]).decode("utf-8", "ignore")
    return EventPacket(SidecarState(state), code, text)
