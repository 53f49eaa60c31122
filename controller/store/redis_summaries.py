"""Keeps the summaries of all sidecars in Redis: an expiring text for each, and an index by time.

    {tag}:fleet             sorted set: source by the time of its last write (Redis's clock)
    {tag}:fleet:SOURCE      the text

All reads are bounded: invalid source names and overlong texts never leave Redis.  After a failure,
Redis is not called for a while (see `_ask`), so that callers do not wait for it repeatedly.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import redis.exceptions

from controller.store.interface import StoreUnavailableError, Summaries, Summary
from controller.store.redis_errors import error_text
from controller.store.redis_replies import (
    decode_integer,
    decode_text,
    ignore_reply,
    require_list,
    split_rows,
)
from controller.store.redis_scripts import NOW

# Lifetime of a text: a sidecar that died is listed as silent for this time.
KEPT_SECONDS: Final = 300.0
# Most sources that are kept; those with the oldest writes are removed first.
SOURCES_MAX: Final = 10_000
# Most bytes of one text, of the texts of one reply, and of all texts of one `read`.
TEXT_BYTES_MAX: Final = 512 * 1024
_ANSWER_BYTES_MAX = 2 * 1024 * 1024
_READ_BYTES_MAX = 16 * 1024 * 1024
# Texts that are requested at a time.
_TEXTS = 100
# Shortest and longest pause after a failure; it doubles with each further failure.
_PAUSE_SECONDS = (0.5, 5.0)

_INDEX = (
    NOW
    + """
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'none' and kind ~= 'zset' then
  return redis.error_reply('key ' .. KEYS[1] .. ' is a ' .. kind
    .. ', not a zset; rename or delete it')
end
"""
)

# KEYS 1 index, 2 the source's text.  ARGV 1 source, 2 text, 3 its lifetime in ms, 4 number of
# sources kept, 5 prefix of texts.
_PUT = (
    _INDEX
    + """
local kept = tonumber(ARGV[3])
redis.call('SET', KEYS[2], ARGV[2], 'PX', kept)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now - kept))
-- Entries from the future: the clock was ahead, or another client wrote them.
redis.call('ZREMRANGEBYSCORE', KEYS[1], string.format('(%.0f', now), '+inf')
redis.call('ZADD', KEYS[1], string.format('%.0f', now), ARGV[1])
redis.call('PEXPIRE', KEYS[1], kept)
local extra = redis.call('ZCARD', KEYS[1]) - tonumber(ARGV[4])
if extra > 0 then
  for _, old in ipairs(redis.call('ZRANGE', KEYS[1], 0, extra - 1)) do
    redis.call('DEL', ARGV[5] .. old)
    redis.call('ZREM', KEYS[1], old)
  end
end
return 1
"""
)

# KEYS 1 index, 2 the source's text.  ARGV 1 source.
_REMOVE = """
redis.call('DEL', KEYS[2])
redis.call('ZREM', KEYS[1], ARGV[1])
return 1
"""

# KEYS 1 index.  ARGV 1 most sources to read.
# -> {number of invalid members; for each source: its name, its age in milliseconds}
_SOURCES = (
    _INDEX
    + """
local members = redis.call('ZREVRANGE', KEYS[1], 0, tonumber(ARGV[1]) - 1, 'WITHSCORES')
local all = {0}
for i = 1, #members, 2 do
  local age = now - tonumber(members[i + 1])
  if string.match(members[i], '^%x+$') and #members[i] <= 32 and age < 2^53 then
    all[#all + 1] = members[i]
    all[#all + 1] = string.format('%.0f', math.max(0, age))
  else
    all[1] = all[1] + 1
  end
end
return all
"""
)

# KEYS: texts.  ARGV 1 most bytes of a text, 2 most bytes of all texts.
# -> for each: the text, 0 if missing, -1 for a wrong type or size, -2 if it does not fit
_GET = """
local left, all = tonumber(ARGV[2]), {}
for i, key in ipairs(KEYS) do
  local size = redis.pcall('STRLEN', key)
  if type(size) ~= 'number' or size > tonumber(ARGV[1]) then
    all[i] = -1
  elseif size == 0 then
    all[i] = 0
  elseif size > left then
    all[i] = -2
  else
    left = left - size
    all[i] = redis.call('GET', key)
  end
end
return all
"""
_REFUSED, _NO_ROOM = -1, -2

_T = TypeVar("_T")


class RedisSummaries:
    """Keeps summaries in Redis.

    tag: the prefix of all keys.  redacted: removes secrets from a text.  timeout_seconds: for one
    command.
    """

    def __init__(
        self,
        client: Any,
        tag: str,
        redacted: Callable[[str], str],
        timeout_seconds: float,
        kept_seconds: float = KEPT_SECONDS,
    ) -> None:
        self._client = client
        self._index = f"{tag}:fleet"
        self._redacted = redacted
        self._timeout_seconds = timeout_seconds
        self._kept_seconds = kept_seconds
        self._fault = ""
        self._pause_seconds = 0.0
        self._again_at = 0.0

    async def put(self, source: str, body: bytes) -> None:
        """Implements the method of the store interface."""
        milliseconds = round(1000 * self._kept_seconds)
        await self._ask(
            lambda: self._client.eval(
                _PUT, 2, self._index, self._key(source),
                source, body, milliseconds, SOURCES_MAX, self._key(""),
            ),
            ignore_reply,
        )  # fmt: skip

    async def remove(self, source: str) -> None:
        """Implements the method of the store interface."""
        await self._ask(
            lambda: self._client.eval(_REMOVE, 2, self._index, self._key(source), source),
            ignore_reply,
        )

    async def read(self) -> Summaries:
        """Implements the method of the store interface."""
        bad, ages = await self._ask(
            lambda: self._client.eval(_SOURCES, 1, self._index, SOURCES_MAX), _read_sources_reply
        )
        summaries: list[Summary] = []
        pending, room = list(ages), _READ_BYTES_MAX
        # Each reply has space for at least one text, so that `pending` shrinks.
        while pending and room >= TEXT_BYTES_MAX:
            batch, pending = pending[:_TEXTS], pending[_TEXTS:]
            texts = dict(zip(batch, await self._texts(batch, room), strict=True))
            late = [source for source in batch if texts[source] == _NO_ROOM]
            if late == batch:
                raise StoreUnavailableError("its reply cannot be read: it has room for no text")
            pending = late + pending
            bad += sum(text == _REFUSED for text in texts.values())
            for source, text in texts.items():
                if isinstance(text, bytes):
                    room -= len(text)
                    summaries.append(Summary(source, text, ages[source]))
        return Summaries(summaries, bad, left_out=len(pending))

    async def _texts(self, sources: Sequence[str], room: int) -> Sequence[bytes | int]:
        keys = map(self._key, sources)
        most = (TEXT_BYTES_MAX, min(room, _ANSWER_BYTES_MAX))
        return await self._ask(
            lambda: self._client.eval(_GET, len(sources), *keys, *most),
            lambda reply: _read_texts_reply(reply, len(sources)),
        )

    def _key(self, source: str) -> str:
        return f"{self._index}:{source}"

    async def _ask(self, command: Callable[[], Awaitable[Any]], read: Callable[[Any], _T]) -> _T:
        """Asks Redis, unless it failed a moment ago: it is tried again after a pause."""
        if (wait := self._again_at - time.monotonic()) > 0:
            raise StoreUnavailableError(f"{self._fault}; it is asked again in {wait:.1f} s")
        try:
            # The client's own timeout comes first, unless a reply arrives slowly in parts.
            async with asyncio.timeout(2 * self._timeout_seconds):
                answer = read(await command())
        except Exception as error:  # also whatever a reply makes the client raise
            is_timeout = isinstance(error, TimeoutError | redis.exceptions.TimeoutError)
            self._fault = (
                "does not answer in time" if is_timeout else error_text(error, self._redacted)
            )
            shortest_pause, longest_pause = _PAUSE_SECONDS
            self._pause_seconds = min(max(shortest_pause, 2 * self._pause_seconds), longest_pause)
            self._again_at = time.monotonic() + self._pause_seconds
            raise StoreUnavailableError(self._fault) from error
        self._pause_seconds = 0.0
        return answer


def _read_sources_reply(reply: Any) -> tuple[int, dict[str, float]]:
    """Decodes the reply of _SOURCES: (invalid, age in seconds by source).  Raises MALFORMED."""
    refused, *flat = require_list(reply)
    if not all(isinstance(name, bytes) and name.isalnum() for name in flat[::2]):
        raise ValueError("sources must be hexadecimal digits")
    ages = {decode_text(name): decode_integer(age) / 1000 for name, age in split_rows(flat, 2)}
    return decode_integer(refused), ages


def _read_texts_reply(reply: Any, count: int) -> Sequence[bytes | int]:
    """Decodes the reply of _GET.  Raises one of MALFORMED."""
    texts = require_list(reply, count)
    if not all(isinstance(text, bytes | int) for text in texts):
        raise TypeError("must be texts and numbers")
    return texts
