"""The audit in Redis: a stream, whose records anybody with Redis's password may have written."""

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

from controller.core.errors import MALFORMED
from controller.store.interface import AUDIT_KEPT, AuditRecord, SkippedEntries
from controller.store.redis_replies import list_of, number_of, rows_of, shown, text_of, time_of

# Records that one look goes through, bytes of one record, and bytes that one look returns.
_PAGE: Final = 500
_RECORD_BYTES_MAX: Final = 256 * 1024
_BYTES_MAX: Final = 4 * 1024 * 1024
# Readable records that one query goes through, and looks that it takes at most.
_SEARCHED_MAX: Final = 10_000
_LOOKS_MAX: Final = (AUDIT_KEPT + _SEARCHED_MAX) // _PAGE

# KEYS 1 the stream.  ARGV 1 the newest id to look at, as in XREVRANGE.
# -> {ids looked at; the oldest of them, or ''; of these, records that cannot be read; flat, of
#     every record: id, at, action, subject, author, reason, origin, before, after}
_LOOK = (
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


class Ask(Protocol):
    """Calls Redis for the store, and reads the reply; raises StoreUnavailableError."""

    async def __call__(
        self,
        command: Callable[[], Awaitable[Any]],
        read: Callable[[Any], _T],
        *,
        writes: bool = False,
    ) -> _T:
        """Returns what `read`, which raises one of MALFORMED for a wrong reply, makes of it."""


class RedisAudit:
    """Reads the audit.  key: of the stream."""

    def __init__(self, client: Any, ask: Ask, key: str, skipped: SkippedEntries) -> None:
        self._client = client
        self._ask = ask
        self._key = key
        self._skipped = skipped

    async def query(self, limit: int, subject: str, before: str) -> Sequence[AuditRecord]:
        """Returns the newest records first, as the store interface says.

        It searches the newest 10,000 at most.  Records that cannot be read are counted and left
        out; those behind them are found all the same.
        """
        end = f"({before}" if before else "+"
        found: list[AuditRecord] = []
        readable = 0
        for _ in range(_LOOKS_MAX):
            call = functools.partial(self._client.eval, _LOOK, 1, self._key, end)
            looked, last, unreadable, rows = await self._ask(call, _looked)
            records = self._records(rows, unreadable)
            found += [record for record in records if subject in {"", record.subject}]
            readable += len(records)
            if not looked or len(found) >= limit or readable >= _SEARCHED_MAX:
                break
            end = f"({last}"
        return found[:limit]

    def _records(self, rows: Sequence[tuple[Any, ...]], unreadable: int) -> list[AuditRecord]:
        """Reads each row on its own.  unreadable: those that Redis has left out."""
        found, names = [], []
        for row in rows:
            try:
                found.append(_record(row))
            except MALFORMED:
                names.append(shown(row[0]))
        self._skipped.add("audit", names, "not a record of the audit", len(names) + unreadable)
        return found


def _looked(reply: Any) -> tuple[int, str, int, Sequence[tuple[Any, ...]]]:
    """Reads the answer of the script.  Raises one of MALFORMED."""
    looked, last, unreadable, flat = list_of(reply, 4)
    return number_of(looked), text_of(last), number_of(unreadable), rows_of(flat, 9)


def _record(row: Sequence[Any]) -> AuditRecord:
    """Raises one of MALFORMED."""
    sequence, at, *texts = map(text_of, row)
    return AuditRecord(sequence, time_of(float(at)), *texts)
