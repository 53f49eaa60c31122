"""Reads the audit in Redis: a stream whose records are checked, since any client can write them."""

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

from controller.core.errors import MALFORMED_JSON_ERRORS
from controller.store.interface import AUDIT_RECORDS_MAX, AuditRecord, SkippedEntries
from controller.store.redis_replies import (
    decode_integer,
    decode_text,
    require_list,
    require_time,
    split_rows,
    to_printable,
)

# Records that one script call examines, bytes of one record, and bytes that one call returns.
_PAGE: Final = 500
_RECORD_BYTES_MAX: Final = 256 * 1024
_BYTES_MAX: Final = 4 * 1024 * 1024
# Readable records that one query examines, and its script calls, at most.
_SEARCHED_MAX: Final = 10_000
_LOOKS_MAX: Final = (AUDIT_RECORDS_MAX + _SEARCHED_MAX) // _PAGE

# KEYS 1 the stream.  ARGV 1 the newest id to examine, as in XREVRANGE.
# -> {number of examined ids; the oldest of them, or ''; number of unreadable records; flat, for
#     every record: id, at, action, subject, author, reason, origin, before, after}
_LOOK_SCRIPT = (
    f"local PAGE, RECORD_MAX, BYTES_MAX = {_PAGE}, {_RECORD_BYTES_MAX}, {_BYTES_MAX}\n"
    """
local names = {'at', 'action', 'subject', 'author', 'reason', 'origin', 'before', 'after'}
local looked, last, unreadable, bytes, all = 0, '', 0, BYTES_MAX, {}
for _, record in ipairs(redis.call('XREVRANGE', KEYS[1], ARGV[1], '-', 'COUNT', PAGE)) do
  local fields, size = {}, 0
  for i = 1, #record[2], 2 do
    fields[record[2][i]] = record[2][i + 1]
    size = size + #record[2][i] + #record[2][i + 1]
  end
  local whole = #record[2] == 2 * #names and size <= RECORD_MAX
  for _, name in ipairs(names) do whole = whole and fields[name] end
  if whole and size > bytes then break end
  looked, last = looked + 1, record[1]
  if whole then
    bytes = bytes - size
    all[#all + 1] = record[1]
    for _, name in ipairs(names) do all[#all + 1] = fields[name] end
  else
    unreadable = unreadable + 1
  end
end
return {looked, last, unreadable, all}
"""
)

_T = TypeVar("_T")


class RedisCaller(Protocol):
    """Sends a command to Redis and decodes the reply.  Raises StoreUnavailableError."""

    async def __call__(
        self,
        command: Callable[[], Awaitable[Any]],
        read: Callable[[Any], _T],
        *,
        writes: bool = False,
    ) -> _T:
        """Returns the result of `read`, which raises one of MALFORMED for a malformed reply."""


class RedisAudit:
    """Reads the audit.  key: of the stream."""

    def __init__(self, client: Any, ask: RedisCaller, key: str, skipped: SkippedEntries) -> None:
        self._client = client
        self._ask = ask
        self._key = key
        self._skipped = skipped

    async def query(self, limit: int, subject: str, before: str) -> Sequence[AuditRecord]:
        """Returns the newest records first; see `Store.audit`.

        It searches at most the newest 10,000.  Unreadable records are counted and skipped.
        """
        end = f"({before}" if before else "+"
        matching: list[AuditRecord] = []
        readable = 0
        for _ in range(_LOOKS_MAX):
            call = functools.partial(self._client.eval, _LOOK_SCRIPT, 1, self._key, end)
            looked, last, unreadable, rows = await self._ask(call, _read_look_reply)
            records = self._decode_records(rows, unreadable)
            matching += [record for record in records if subject in {"", record.subject}]
            readable += len(records)
            if not looked or len(matching) >= limit or readable >= _SEARCHED_MAX:
                break
            end = f"({last}"
        return matching[:limit]

    def _decode_records(
        self, rows: Sequence[tuple[Any, ...]], unreadable: int
    ) -> list[AuditRecord]:
        """Decodes each row separately.  unreadable: number of records that the script left out."""
        records, names = [], []
        for row in rows:
            try:
                records.append(_decode_record(row))
            except MALFORMED_JSON_ERRORS:
                names.append(to_printable(row[0]))
        self._skipped.add("audit", names, "not a record of the audit", len(names) + unreadable)
        return records


def _read_look_reply(reply: Any) -> tuple[int, str, int, Sequence[tuple[Any, ...]]]:
    """Decodes the reply of the script.  Raises one of MALFORMED."""
    looked, last, unreadable, flat = require_list(reply, 4)
    return (
        decode_integer(looked),
        decode_text(last),
        decode_integer(unreadable),
        split_rows(flat, 9),
    )


def _decode_record(row: Sequence[Any]) -> AuditRecord:
    """Decodes a record.  Raises one of MALFORMED."""
    sequence, wall_seconds, *texts = map(decode_text, row)
    return AuditRecord(sequence, require_time(float(wall_seconds)), *texts)
