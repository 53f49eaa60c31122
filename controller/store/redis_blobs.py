"""Keeps blobs in Redis: a hash per name with a field per source, and an index of names by time."""

import json
import re
from collections.abc import Sequence
from typing import Any, Final

from controller.core.errors import MALFORMED_JSON_ERRORS
from controller.store.interface import BLOB_NAMES_MAX, Blob, BlobKind, SkippedEntries, require_text
from controller.store.redis_audit import RedisCaller
from controller.store.redis_replies import (
    decode_integer,
    decode_text,
    ignore_reply,
    require_list,
    require_time,
    split_rows,
    to_printable,
)
from controller.store.redis_scripts import NOW

# KEYS 1 the name's hash, 2 the index.  ARGV 1 source, 2 text, 3 name, 4 number of sources kept, 5
# their lifetime in ms (-1: unlimited), 6 number of names kept, 7 prefix of hashes.
_PUT = (
    NOW
    + """
for i, kind in ipairs({'hash', 'zset'}) do
  local found = redis.call('TYPE', KEYS[i]).ok
  if found ~= 'none' and found ~= kind then
    return redis.error_reply('REFUSED key ' .. KEYS[i] .. ' is a ' .. found .. ', not a ' .. kind
      .. '; rename or delete it')
  end
end
local function put_at(text)
  local fine, item = pcall(cjson.decode, text)
  return fine and type(item) == 'table' and tonumber(item.at) or 0
end
redis.call('HSET', KEYS[1], ARGV[1], cjson.encode({at = now, text = ARGV[2]}))
if tonumber(ARGV[5]) >= 0 then redis.call('PEXPIRE', KEYS[1], ARGV[5]) end
local flat, times = redis.call('HGETALL', KEYS[1]), {}
for i = 1, #flat, 2 do times[#times + 1] = {put_at(flat[i + 1]), flat[i]} end
table.sort(times, function(a, b) return a[1] > b[1] or (a[1] == b[1] and a[2] == ARGV[1]) end)
for i = tonumber(ARGV[4]) + 1, #times do redis.call('HDEL', KEYS[1], times[i][2]) end
redis.call('ZADD', KEYS[2], string.format('%.0f', now), ARGV[3])
local extra = redis.call('ZCARD', KEYS[2]) - tonumber(ARGV[6])
if extra > 0 then
  for _, old in ipairs(redis.call('ZRANGE', KEYS[2], 0, extra - 1)) do
    redis.call('DEL', ARGV[7] .. old)
    redis.call('ZREM', KEYS[2], old)
  end
end
return 1
"""
)

# KEYS 1 the name's hash.  ARGV 1 most sources to read, 2 most bytes of all their texts.
# -> {now, number of items left out because of their size or number, flat: source, text}
_ITEMS = (
    NOW
    + """
local sources, left, left_out, all = redis.pcall('HKEYS', KEYS[1]), tonumber(ARGV[2]), 0, {}
if sources.err then return {string.format('%.0f', now), 1, {}} end
for i, source in ipairs(sources) do
  local size = redis.call('HSTRLEN', KEYS[1], source) + #source
  if i > tonumber(ARGV[1]) or size > left then
    left_out = left_out + 1
  else
    left = left - size
    all[#all + 1] = source
    all[#all + 1] = redis.call('HGET', KEYS[1], source)
  end
end
return {string.format('%.0f', now), left_out, all}
"""
)

# KEYS 1 the index.  ARGV 1 most names to read.  -> the names, the one last put first.
_NAMES = """
local names = redis.pcall('ZREVRANGE', KEYS[1], 0, tonumber(ARGV[1]) - 1)
return names.err and {} or names
"""

# Most bytes of the items of one name.
_ITEMS_BYTES_MAX: Final = 16 * 1024 * 1024
# Most sources that are read for one name; some may not be valid.
_SOURCES_READ: Final = 64
_HEXADECIMAL = re.compile(rb"[0-9a-f]{1,64}")


class RedisBlobStore:
    """Keeps blobs in Redis.  tag: the prefix of all keys."""

    def __init__(self, client: Any, ask: RedisCaller, tag: str, skipped: SkippedEntries) -> None:
        self._client = client
        self._skipped = skipped
        self._ask = ask
        self._tag = tag

    async def put(self, kind: BlobKind, name: str, source: str, text: str) -> None:
        """Implements the method of the store interface."""
        milliseconds = -1 if kind.seconds is None else round(1000 * kind.seconds)
        values = (
            source,
            text,
            name,
            kind.sources,
            milliseconds,
            BLOB_NAMES_MAX,
            self._key(kind, ""),
        )
        await self._ask(
            lambda: self._client.eval(
                _PUT, 2, self._key(kind, name), self._index(kind), *map(str, values)
            ),
            ignore_reply,
            writes=True,
        )

    async def items(self, kind: BlobKind, name: str) -> Sequence[Blob]:
        """Implements the store interface; counts and skips unreadable items."""
        key, blobs, names = self._key(kind, name), [], []
        now, left_out, rows = await self._ask(
            lambda: self._client.eval(_ITEMS, 1, key, str(_SOURCES_READ), str(_ITEMS_BYTES_MAX)),
            _read_items_reply,
        )
        for source, body in rows:
            try:
                item = _decode_blob(source, body, now)
            except MALFORMED_JSON_ERRORS:
                names.append(to_printable(source))
                continue
            if kind.seconds is None or item.age_seconds < kind.seconds:
                blobs.append(item)
        count = len(names) + left_out
        self._skipped.add(kind.name, names, f"not what a sidecar puts under {name}", count)
        return sorted(blobs, key=lambda item: item.age_seconds)

    async def names(self, kind: BlobKind) -> Sequence[str]:
        """Implements the store interface; counts and skips invalid names."""
        reply = await self._ask(
            lambda: self._client.eval(_NAMES, 1, self._index(kind), str(BLOB_NAMES_MAX)),
            require_list,
        )
        good = [name.decode() for name in reply if isinstance(name, bytes) and _is_name(name)]
        bad = [
            to_printable(name) for name in reply if not (isinstance(name, bytes) and _is_name(name))
        ]
        self._skipped.add(kind.name, bad, "not a name")
        return good

    def _key(self, kind: BlobKind, name: str) -> str:
        return f"{self._tag}:{kind.name}:{name}"

    def _index(self, kind: BlobKind) -> str:
        return f"{self._tag}:{kind.name}"


def _is_name(name: bytes) -> bool:
    return _HEXADECIMAL.fullmatch(name) is not None


def _read_items_reply(reply: Any) -> tuple[int, int, Sequence[tuple[Any, ...]]]:
    """Decodes the reply of _ITEMS.  Raises one of MALFORMED."""
    now, left_out, flat = require_list(reply, 3)
    return decode_integer(now), decode_integer(left_out), split_rows(flat, 2)


def _decode_blob(source: Any, body: Any, now: int) -> Blob:
    """Decodes an item.  now: Redis's clock in milliseconds.  Raises one of MALFORMED."""
    value = json.loads(decode_text(body))
    if not _is_name(source):
        raise TypeError("must be a source")
    age = now / 1000 - require_time(value["at"] / 1000)
    return Blob(source.decode(), require_text(value["text"]), max(0.0, age))
