"""The fleet's blob store: a hash for each name, a field for each source, and an index by time."""

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import structlog

from controller.core.errors import MALFORMED
from controller.store.interface import BLOB_NAMES, Blob, BlobKind

_log = structlog.get_logger(__name__)

_NOW = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
"""

# KEYS 1 the name's hash, 2 the index.  ARGV 1 source, 2 text, 3 name, 4 sources kept, 5 their
# milliseconds (-1: without an end), 6 names kept, 7 prefix of hashes.
_PUT = (
    _NOW
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

# -> the hash, flat, and now at its end.
_ITEMS = (
    _NOW
    + """
local flat = redis.call('HGETALL', KEYS[1])
flat[#flat + 1] = string.format('%.0f', now)
return flat
"""
)


class Ask(Protocol):
    """Calls Redis for the store; raises StoreUnavailableError."""

    async def __call__(self, command: Callable[[], Awaitable[Any]], *, writes: bool = False) -> Any:
        """Returns the answer of Redis."""
        ...


class RedisBlobStore:
    """Keeps blobs in Redis.  tag: the prefix of all keys."""

    def __init__(self, client: Any, ask: Ask, tag: str) -> None:
        self._client = client
        self._ask = ask
        self._tag = tag

    async def put(self, kind: BlobKind, name: str, source: str, text: str) -> None:
        """Implements the method of the store interface."""
        milliseconds = -1 if kind.seconds is None else round(1000 * kind.seconds)
        values = (source, text, name, kind.sources, milliseconds, BLOB_NAMES, self._key(kind, ""))
        await self._ask(
            lambda: self._client.eval(
                _PUT, 2, self._key(kind, name), self._index(kind), *map(str, values)
            ),
            writes=True,
        )

    async def items(self, kind: BlobKind, name: str) -> Sequence[Blob]:
        """Implements the store interface; logs and omits an item that cannot be read."""
        *flat, now = await self._ask(lambda: self._client.eval(_ITEMS, 1, self._key(kind, name)))
        found = []
        for source, body in zip(flat[::2], flat[1::2], strict=True):
            try:
                value = json.loads(body)
                age = max(0.0, (int(now) - float(value["at"])) / 1000)
                item = Blob(source, str(value["text"]), age)
            except MALFORMED as error:
                _log.warning("shelf_item_not_read", name=name, source=source, error=str(error))
                continue
            if kind.seconds is None or item.age_seconds < kind.seconds:
                found.append(item)
        return sorted(found, key=lambda item: item.age_seconds)

    async def names(self, kind: BlobKind) -> Sequence[str]:
        """Implements the method of the store interface."""
        found: Sequence[str] = await self._ask(
            lambda: self._client.zrange(self._index(kind), 0, -1, desc=True)
        )
        return found

    def _key(self, kind: BlobKind, name: str) -> str:
        return f"{self._tag}:{kind.name}:{name}"

    def _index(self, kind: BlobKind) -> str:
        return f"{self._tag}:{kind.name}"
