"""Converts the answers of the store of overrides into messages of the contract."""

import functools

from google.protobuf import json_format

from controller.store.interface import AuditRecord, Health
from speculation.v1 import policy_pb2


def health_to_proto(health: Health) -> policy_pb2.StoreStatus:
    """Converts the state of the store."""
    return policy_pb2.StoreStatus(
        ok=health.ok,
        detail=health.detail,
        since_seconds=health.since_seconds,
        unusable=[f"{name}: {reason}" for name, reason in sorted(health.unusable.items())],
        unusable_count=health.unusable_count,
    )


def audit_to_proto(record: AuditRecord) -> policy_pb2.AuditRecord:
    """Converts one record; a body that can no longer be read is left out."""
    message = policy_pb2.AuditRecord(
        sequence=record.sequence,
        at=record.at,
        action=record.action,
        override_id=record.subject,
        author=record.author,
        reason=record.reason,
        origin=record.origin,
    )
    for body, part in ((record.before, message.before), (record.after, message.after)):
        if body and (data := _override_bytes(body)):
            part.ParseFromString(data)
    return message


@functools.lru_cache(maxsize=2048)
def _override_bytes(body: str) -> bytes:
    """The message in a body, serialized; empty for one that cannot be read.

    Parsing JSON takes a hundred times as long as parsing this, and every body stands in at least
    two records.
    """
    message = policy_pb2.Override()
    try:
        json_format.Parse(body, message, ignore_unknown_fields=True)
    except json_format.ParseError:
        return b""
    return message.SerializeToString()
