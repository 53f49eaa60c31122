"""Converts the state of the store of overrides, and pages of the audit, into messages."""

import asyncio
import functools
import re
from collections.abc import Sequence

from google.protobuf import json_format

from controller.service.net.errors import InvalidQuestionError
from controller.store.interface import AuditRecord, Health
from controller.wire.field_mapping import message_of
from speculation.v1 import policy_pb2

_LIMIT_DEFAULT, _LIMIT_MAX = 100, 1000
# Bytes of a page.  Answers that slow clients have not read stay in memory, each of them twice.
BYTES_MAX = 512 * 1024
# Records between two yields to the event loop.
_SLICE = 10
# A sequence number of the database, or of Redis, which has a dash.
_SEQUENCE = re.compile(r"[0-9]{1,19}(-[0-9]{1,19})?")


def health_to_proto(health: Health) -> policy_pb2.StoreStatus:
    """Converts the state of the store."""
    unusable = [f"{name}: {reason}" for name, reason in sorted(health.unusable.items())]
    return message_of(policy_pb2.StoreStatus, health, unusable=unusable)


def audit_to_proto(record: AuditRecord) -> policy_pb2.AuditRecord:
    """Converts one record; a body that can no longer be read is left out."""
    message = message_of(
        policy_pb2.AuditRecord, record, override_id=record.subject, before=None, after=None
    )
    for body, override_message in ((record.before, message.before), (record.after, message.after)):
        if body and (data := _override_bytes(body)):
            override_message.ParseFromString(data)
    return message


@functools.lru_cache(maxsize=2048)
def _override_bytes(body: str) -> bytes:
    """Returns the message in a body, serialized; empty for a body that cannot be read.

    Parsing JSON takes a hundred times as long as parsing this, and every body occurs in at least
    two records.
    """
    message = policy_pb2.Override()
    try:
        json_format.Parse(body, message, ignore_unknown_fields=True)
    except json_format.ParseError:
        return b""
    return message.SerializeToString()


def page_limit(request: policy_pb2.QueryAuditRequest) -> int:
    """Returns the limit of records in a page.  Raises InvalidQuestionError."""
    limit = request.limit or _LIMIT_DEFAULT
    if limit > _LIMIT_MAX:
        raise InvalidQuestionError(
            f"limit {limit} is above {_LIMIT_MAX}: request several pages", field_path="limit"
        )
    return limit


def page_position(request: policy_pb2.QueryAuditRequest) -> str:
    """Returns the sequence number before which the page begins; empty for the newest page.

    Raises InvalidQuestionError.
    """
    token, before = request.page_token, request.before_sequence
    if token and before and token != before:
        raise InvalidQuestionError(
            "page_token and before_sequence contradict each other: set one of them only",
            field_path="page_token",
        )
    for name, text in (("page_token", token), ("before_sequence", before)):
        if text and not _SEQUENCE.fullmatch(text):
            raise InvalidQuestionError(
                f"{name} {text[:40]!r} is not a sequence number", field_path=name
            )
    return token or before


async def audit_page(records: Sequence[AuditRecord], limit: int) -> policy_pb2.QueryAuditResponse:
    """Fills a page with the first records, up to the limit and the page's bytes.

    It yields to the event loop between slices.
    """
    response = policy_pb2.QueryAuditResponse()
    bytes_left = BYTES_MAX
    for number, record in enumerate(records[:limit]):
        row = audit_to_proto(record)
        bytes_left -= row.ByteSize()
        if bytes_left < 0 and number:
            break
        response.records.append(row)
        if number % _SLICE == _SLICE - 1:
            await asyncio.sleep(0)
    if len(response.records) < len(records):
        response.next_page_token = response.records[-1].sequence
    return response
