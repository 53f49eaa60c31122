"""The packets on the socket pair between an engine and its agent.

Every packet begins with a version byte and a kind byte; numbers are little-endian.  Both ends are
started from one installation, so the version only guards against a mixed one: another version is
refused, never guessed at.

  HELLO   engine -> agent   the introduction: a serialized proto IntroduceRequest
  REPORT  engine -> agent   one decode step, 78 + 4 * (gamma + 1) bytes, and for groups of rows and
                            for proposals 4 bytes each and 4 for each of their counts
  PLAN    agent -> engine   a table over batch sizes, 41 + 21 * rows bytes, and the rules of
                            mixtures, 12 bytes each and 4 for each match length
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

VERSION: Final = 7
HELLO: Final = 1
REPORT: Final = 2
PLAN: Final = 3
EVENT: Final = 4
LOST: Final = 5

MAX_GAMMA: Final = 64
MAX_ROWS: Final = 512
MAX_RULES: Final = 255
# Groups, proposals and classes of a report together.
MAX_PARTS: Final = 144
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
MIXED_CHOICE: Final = 128
ALL_FLAGS: Final = 255

Buffer: TypeAlias = bytes | bytearray | memoryview

_HEAD: Final = struct.Struct("<BB")
_REPORT_HEAD: Final = "<BBBBHIIIQQdQQfIIII"
_REPORTS: Final = tuple(struct.Struct(f"{_REPORT_HEAD}{g + 1}I") for g in range(MAX_GAMMA + 1))
_REPORT_FIXED: Final = struct.Struct(_REPORT_HEAD)
# Of a group, of proposals, or of a request class: which of them, drafter (of a class: the bytes of
# its label, which follow), match length (of a group: 1 if its requests had ended; of a class: 1 if
# censored counts follow), width.
_PART_HEAD: Final = struct.Struct("<BBBB")
_GROUP: Final = 0
_PROPOSALS: Final = 1
_CLASS: Final = 2
# In place of a drafter: rows that must not be drafted for.
NO_DRAFTER: Final = 255
MAX_LABEL_BYTES: Final = 255
_PLAN_HEAD: Final = struct.Struct("<BBHIQqIBIIB")
# Drafter, gamma, least match, match lengths, main_expected, ratio_weight.
_RULE_HEAD: Final = struct.Struct("<BBBBff")
_ROW: Final = struct.Struct("<IBBBBBIQ")
_EVENT_HEAD: Final = struct.Struct("<BBBH")
_ASLEEP: Final = 1
_HAS_PROBE: Final = 2

# Rules are for a handful of match lengths.
MAX_MATCH_LENGTHS: Final = 16
MAX_PLAN_BYTES: Final = (
    _PLAN_HEAD.size + MAX_ROWS * _ROW.size + MAX_RULES * (_RULE_HEAD.size + 4 * MAX_MATCH_LENGTHS)
)


class SidecarState(IntEnum):
    """Names the state of the agent's conversation with the sidecar."""

    UNKNOWN = 0  # no word from the agent yet
    STEERING = 1  # a session is open
    AWAY = 2  # cannot be reached, or the session broke off; the agent keeps trying
    REFUSED = 3  # the sidecar refused the introduction; the text says why


class GroupEntry(NamedTuple):
    """Rows of a step in which the same was verified: gamma + 1 counts.

    ended: the engine threw their tokens away, as proto RowGroup has it.
    """

    drafter_index: int
    gamma: int
    accepted_counts: Sequence[int]
    ended: bool = False


class ProposalsEntry(NamedTuple):
    """Counts what a drafter's proposals would have given; counts as in proto ProposalCounts."""

    drafter_index: int
    match_length: int
    accepted_counts: Sequence[int]
    censored_counts: Sequence[int]


class ClassEntry(NamedTuple):
    """A request class's part of a step: gamma + 1 counts, and gamma censored ones or none."""

    label: str
    accepted_counts: Sequence[int]
    censored_counts: Sequence[int] = ()


class ReportPacket(NamedTuple):
    """One decode step; units as in proto StepReport.

    `plan_epoch`, `probe_id` and `session` are those of the StepChoice that the step ran; `session`
    is 0 when the engine did not say.  `dropped_before`: reports lost at the socket since the last
    one sent, counted by the link.  `delivered_tokens`: None when the engine does not say.
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
    prefill_tokens: int = 0
    groups: Sequence[GroupEntry] = ()
    proposals: Sequence[ProposalsEntry] = ()
    classes: Sequence[ClassEntry] = ()
    learnt_from: int | None = None
    delivered_tokens: int | None = None


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


class RuleEntry(NamedTuple):
    """The rule of a mixture at one draft length, as proto MixtureRule has it."""

    drafter_index: int
    gamma: int
    main_expected: float
    free_expected: tuple[float, ...]
    least_match: int
    ratio_weight: float


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
    rules: tuple[RuleEntry, ...] = ()


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
        session, update_seconds, draft_version, dropped, prefill_tokens, groups, proposals,
        classes, learnt_from, delivered,
    ) = report  # fmt: skip
    packed = _REPORTS[gamma].pack(
        VERSION, REPORT, drafter, gamma, flags, session, dropped, batch_size, step, kv_tokens,
        seconds, epoch, probe, update_seconds, draft_version, prefill_tokens,
        0 if learnt_from is None else learnt_from + 1, 0 if delivered is None else delivered + 1,
        *accepted_counts,
    )  # fmt: skip
    if not groups and not proposals and not classes:
        return packed
    parts = [packed]
    for group in groups:
        parts.append(_PART_HEAD.pack(_GROUP, group.drafter_index, group.ended, group.gamma))
        parts.append(struct.pack(f"<{group.gamma + 1}I", *group.accepted_counts))
    for entry in proposals:
        width = len(entry.accepted_counts) - 1
        parts.append(_PART_HEAD.pack(_PROPOSALS, entry.drafter_index, entry.match_length, width))
        counts = (*entry.accepted_counts, *(entry.censored_counts or (0,) * width))
        parts.append(struct.pack(f"<{2 * width + 1}I", *counts))
    for part in classes:
        label = part.label.encode()[:MAX_LABEL_BYTES]
        counts = (*part.accepted_counts, *part.censored_counts)
        is_censored = len(part.censored_counts) > 0
        parts.append(_PART_HEAD.pack(_CLASS, len(label), is_censored, gamma) + label)
        parts.append(struct.pack(f"<{gamma + 1 + gamma * is_censored}I", *counts))
    return b"".join(parts)


def decode_report(data: Buffer) -> ReportPacket:
    """Unpacks a report.  Raises PacketError."""
    _require(data, REPORT, _REPORT_FIXED.size)
    gamma = data[3]
    if gamma > MAX_GAMMA:
        raise PacketError(f"report: gamma {gamma}, limit {MAX_GAMMA}")
    layout = _REPORTS[gamma]
    if len(data) < layout.size:
        raise PacketError(f"report: {len(data)} bytes, gamma {gamma} needs {layout.size}")
    (
        _, _, drafter, gamma, flags, session, dropped, batch_size, step, kv_tokens,
        seconds, epoch, probe, update_seconds, draft_version, prefill_tokens, learnt,
        delivered, *accepted_counts,
    ) = layout.unpack_from(data)  # fmt: skip
    parts = _Parts()
    if len(data) > layout.size:
        parts.take(data, layout.size)
    return ReportPacket(
        step, batch_size, kv_tokens, drafter, gamma, tuple(accepted_counts), seconds, flags, epoch,
        probe, session, update_seconds, draft_version, dropped, prefill_tokens,
        tuple(parts.groups), tuple(parts.proposals), tuple(parts.classes),
        learnt - 1 if learnt else None, delivered - 1 if delivered else None,
    )  # fmt: skip


class _Parts:
    """Holds what follows the counts of a report."""

    def __init__(self) -> None:
        self.groups: list[GroupEntry] = []
        self.proposals: list[ProposalsEntry] = []
        self.classes: list[ClassEntry] = []

    def take(self, data: Buffer, offset: int) -> None:
        """Unpacks all parts from an offset on.  Raises PacketError."""
        taken = 0
        try:
            while offset < len(data):
                if (taken := taken + 1) > MAX_PARTS:
                    raise PacketError(f"report: more than {MAX_PARTS} parts")
                offset = self._take_one(data, offset)
        except (struct.error, UnicodeDecodeError) as error:
            raise PacketError(f"report: a part is cut off: {error}") from error

    def _take_one(self, data: Buffer, offset: int) -> int:
        kind, drafter, match_length, width = _PART_HEAD.unpack_from(data, offset)
        offset += _PART_HEAD.size
        if kind > _CLASS or width > MAX_GAMMA:
            raise PacketError(f"report: a part of kind {kind} and width {width}")
        label = ""
        if kind == _CLASS:
            label = bytes(data[offset : offset + drafter]).decode()
            offset += drafter
        is_censored = kind == _PROPOSALS or (kind == _CLASS and match_length)
        count: int = 2 * width + 1 if is_censored else width + 1
        counts = struct.unpack_from(f"<{count}I", data, offset)
        exact, censored = counts[: width + 1], counts[width + 1 :]
        if kind == _GROUP:
            self.groups.append(GroupEntry(drafter, width, exact, bool(match_length)))
        elif kind == _CLASS:
            self.classes.append(ClassEntry(label, exact, censored))
        else:
            self.proposals.append(ProposalsEntry(drafter, match_length, exact, censored))
        end: int = offset + 4 * count
        return end


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
        len(plan.rules),
    )
    rows = b"".join(_encode_row(row) for row in plan.rows)
    return head + rows + b"".join(_encode_rule(rule) for rule in plan.rules)


def _encode_rule(rule: RuleEntry) -> bytes:
    free = rule.free_expected
    head = _RULE_HEAD.pack(
        rule.drafter_index,
        rule.gamma,
        rule.least_match,
        len(free),
        rule.main_expected,
        rule.ratio_weight,
    )
    return head + struct.pack(f"<{len(free)}f", *free)


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
    _, _, count, session, epoch, arrival_ns, lease_ms, mode, stride, version, rule_count = head
    if not 1 <= count <= MAX_ROWS:
        raise PacketError(f"plan: {count} rows leave 1..{MAX_ROWS}")
    end = _PLAN_HEAD.size + count * _ROW.size
    if len(data) < end or (len(data) > end and not rule_count):
        raise PacketError(f"plan: {len(data)} bytes do not hold {count} rows")
    if lease_ms < 1:
        raise PacketError("plan: a lease of 0 ms")
    rows = _rows(bytes(data[_PLAN_HEAD.size : end]))
    rules = _rules(bytes(data[end:]), rule_count) if rule_count else ()
    return PlanPacket(session, epoch, arrival_ns, lease_ms, mode, stride, rows, version, rules)


# As with the rows: a renewed plan has the same ones.
@lru_cache(maxsize=4)
def _rules(data: bytes, count: int) -> tuple[RuleEntry, ...]:
    rules, offset = [], 0
    try:
        for _ in range(count):
            drafter, gamma, least, lengths, main, weight = _RULE_HEAD.unpack_from(data, offset)
            offset += _RULE_HEAD.size
            free = struct.unpack_from(f"<{lengths}f", data, offset)
            offset += 4 * lengths
            rule = RuleEntry(drafter, gamma, main, free, least, weight)
            if why := rule_fault(rule):
                raise PacketError(f"plan: {why}")
            rules.append(rule)
    except struct.error as error:
        raise PacketError(f"plan: a rule is cut off: {error}") from error
    if offset != len(data):
        raise PacketError(f"plan: {len(data) - offset} bytes after {count} rules")
    return tuple(rules)


def rule_fault(rule: RuleEntry) -> str:
    """Returns what is wrong with a rule; "" if nothing is."""
    numbers = (rule.main_expected, rule.ratio_weight, *rule.free_expected)
    if not 1 <= rule.gamma <= MAX_GAMMA or not 1 <= rule.least_match <= MAX_GAMMA:
        return f"a rule of gamma {rule.gamma} for matches of {rule.least_match} tokens"
    if not 1 <= len(rule.free_expected) <= MAX_MATCH_LENGTHS:
        return f"a rule for {len(rule.free_expected)} match lengths"
    if not all(0 <= n <= MAX_GAMMA for n in numbers) or rule.ratio_weight > 1:
        return f"a rule with the numbers {numbers}"
    return ""


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
