"""The Lua scripts that change overrides atomically inside Redis.

Redis does not roll back a script that fails.  Each script therefore first checks everything that
could make it fail: the type and value of every key, and (from Redis 7 on) the right to use every
command.  A wrong key is reported as an error that begins with REFUSED; nothing was changed then.
An audit record is written before the entry that it belongs to.

All keys have the same hash tag, so that a cluster keeps them on one node.  Times are Redis's own
(milliseconds of TIME).  The key of an entry lives a minute longer than the entry, so that its end
can still be recorded, and then expires even if no sidecar is left.  An invalid entry, written by
another client, counts as absent and can be overwritten.  The size of all replies is bounded.  If an
entry was created later than now, Redis's clock went back (or a server with another clock took
over): its time to live then starts again.

KEYS  1 revision (counter)   2 live (sorted set: id by end)   3 tombstones (sorted set "traces")
      4 audit (stream)       ARGV 1 is the prefix of entry keys, ARGV 2 the channel for news
"""

from typing import Final

from controller.store.interface import LIVE_ENTRIES_MAX
from controller.store.redis_replies import NUMBER_MAX, TIME_MAX

# Prefix of errors after which nothing was changed.
REFUSED: Final = "REFUSED "
# Bytes of one entry's JSON; an override with the longest texts takes 8 KiB.
ENTRY_BYTES_MAX: Final = 64 * 1024
# Ids of live entries, and of tombstones, that one FETCH examines: those that end last.
_EXAMINED_MAX: Final = 5000
# Live entries that one FETCH returns, the newest; this sidecar may not be able to use some.
_RETURNED_MAX: Final = 2 * LIVE_ENTRIES_MAX
# Bytes of the live entries, and of the tombstones, that one FETCH returns.
_RETURNED_BYTES_MAX: Final = 4 * 1024 * 1024
# Ids of unreadable entries that one FETCH names.
_NAMED_MAX: Final = 20
# The counter is raised to an entry's revision only below this value, so that revisions remain for
# later changes.
_REVISION_MAX: Final = NUMBER_MAX // 2

# Redis's clock, in milliseconds.
NOW: Final = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
"""

_COMMON = (
    NOW + f"local ENTRY_BYTES_MAX, LIVE_MAX = {ENTRY_BYTES_MAX}, {LIVE_ENTRIES_MAX}\n"
    f"local TIME_MAX, REVISION_MAX = {TIME_MAX:.0f}, {_REVISION_MAX}\n"
    + """
local prefix, channel = ARGV[1], ARGV[2]
local GRACE, TOMBSTONE, AUDIT_MAX = 60000, 604800000, 100000

local KINDS = {'string', 'zset', 'zset', 'stream'}
-- Redis's time of the newest audit record.
local recorded = 0

-- What is wrong with the keys, or nil.
local function trouble()
  for i, kind in ipairs(KINDS) do
    local found = redis.call('TYPE', KEYS[i]).ok
    if found ~= 'none' and found ~= kind then
      return 'key ' .. KEYS[i] .. ' is a ' .. found .. ', not a ' .. kind
        .. '; rename or delete it'
    end
  end
  local text = redis.call('GET', KEYS[1]) or '0'
  local number = tonumber(text)
  if not string.match(text, '^%d+$') or number >= 2^53 then
    return 'key ' .. KEYS[1] .. ' is not a counter below 2^53; set it to the highest revision, '
      .. 'or delete it'
  end
  local last = redis.call('XREVRANGE', KEYS[4], '+', '-', 'COUNT', 1)[1]
  recorded = last and tonumber(string.match(last[1], '^%d+')) or 0
  if recorded >= 2^53 then
    return 'key ' .. KEYS[4] .. ' has a record of the far future and accepts no others; rename or '
      .. 'delete it'
  end
  if redis.acl_check_cmd then
    local commands = {{'INCR', KEYS[1]}, {'XADD', KEYS[4], '*', 'a', 'b'}, {'SET', prefix, ''},
      {'ZADD', KEYS[2], '0', 'a'}, {'ZREM', KEYS[3], 'a'}, {'ZRANGEBYSCORE', KEYS[2], '0', '0'},
      {'ZREMRANGEBYSCORE', KEYS[3], '0', '0'}, {'ZSCORE', KEYS[2], 'a'}}
    for _, command in ipairs(commands) do
      if not redis.acl_check_cmd(unpack(command)) then
        return 'this user may not use ' .. command[1]
      end
    end
  end
  return nil
end

local function refused(text)
  return redis.error_reply('REFUSED ' .. text)
end

-- The JSON of an entry.  cjson would cut whole numbers to 14 digits.
local function text_of(entry)
  return string.format('{"revision":%.0f,"created":%.3f,"body":%s,"ended":%s}', entry.revision,
    entry.created, cjson.encode(entry.body), cjson.encode(entry.ended))
end

local function keep(id, entry, ends)
  local text = text_of(entry)
  if ends < 0 then
    redis.call('SET', prefix .. id, text)
  else
    redis.call('SET', prefix .. id, text, 'PX', math.max(1, ends - now + GRACE))
  end
  local here, there = KEYS[2], KEYS[3]
  if entry.ended ~= '' then here, there = KEYS[3], KEYS[2] end
  redis.call('ZREM', there, id)
  redis.call('ZADD', here, ends < 0 and '+inf' or string.format('%.0f', ends), id)
end

local function record(action, id, who, before, after)
  redis.call('XADD', KEYS[4], 'MAXLEN', '~', AUDIT_MAX, '*',
    'at', string.format('%.3f', now / 1000), 'action', action, 'subject', id,
    'author', who.author, 'reason', who.reason,
    'origin', who.origin, 'before', before, 'after', after)
end

-- The text of a key, or nil if it is missing or too long.
local function text_at(key)
  local size = redis.pcall('STRLEN', key)
  if type(size) ~= 'number' or size == 0 or size > ENTRY_BYTES_MAX then return nil end
  return redis.call('GET', key)
end

local function is_utf8(text)
  if not string.find(text, '[\\128-\\255]') then return true end
  local tail = '[\\128-\\191]'
  -- Overlong forms, surrogates, and code points beyond the last one.
  for _, wrong in ipairs({'\\224[\\128-\\159]', '\\237[\\160-\\191]', '\\240[\\128-\\143]',
      '\\244[\\144-\\191]'}) do
    if string.find(text, wrong) then return false end
  end
  for _, sequence in ipairs({'[%z\\1-\\127]+', '[\\194-\\223]' .. tail,
      '[\\224-\\239]' .. tail .. tail, '[\\240-\\244]' .. tail .. tail .. tail}) do
    text = string.gsub(text, sequence, '')
  end
  return text == ''
end

-- The entry; nil for one that cannot be read.
local function found(id)
  local text = text_at(prefix .. id)
  local fine, entry = pcall(cjson.decode, text)
  local right = text and fine and type(entry) == 'table' and is_utf8(id)
    and type(entry.revision) == 'number' and entry.revision >= 0 and entry.revision < 2^53
    and entry.revision % 1 == 0
    and type(entry.created) == 'number' and entry.created >= 0 and entry.created <= TIME_MAX
    and type(entry.body) == 'string' and type(entry.ended) == 'string'
    and is_utf8(entry.body) and is_utf8(entry.ended)
  if right then return entry end
end

-- If the counter was deleted or set back, the next revision would be an old one, and sidecars would
-- mistake that change for a loss and undo it.
local function raise_counter(revision)
  if revision < REVISION_MAX and tonumber(redis.call('GET', KEYS[1]) or '0') < revision then
    redis.pcall('SET', KEYS[1], string.format('%.0f', revision))
  end
end

local function is_full()
  if redis.call('ZCARD', KEYS[2]) < LIVE_MAX then return false end
  local count = 0
  for _, id in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
    local entry = found(id)
    if entry and entry.ended == '' then count = count + 1 end
    if count == LIVE_MAX then return true end
  end
  return false
end

local function ends_at(id, entry)
  local score = redis.call('ZSCORE', entry.ended ~= '' and KEYS[3] or KEYS[2], id)
  if not score or score == 'inf' then return -1 end
  return tonumber(score)
end

-- Redates entries from the future, after the clock went back, as if they had been created now.
local function set_right()
  for _, key in ipairs({KEYS[2], KEYS[3]}) do
    for _, id in ipairs(redis.call('ZRANGE', key, 0, -1)) do
      local entry = found(id)
      if entry and entry.created * 1000 > now then
        local ends = ends_at(id, entry)
        if ends >= 0 then ends = now + math.max(0, ends - entry.created * 1000) end
        entry.created = now / 1000
        keep(id, entry, ends)
      end
    end
  end
end

local function run_out()
  local changed = false
  if recorded > now then set_right() end
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', string.format('%.0f', now))) do
    local entry = found(id)
    local before = entry and entry.body or ''
    local after = {revision = redis.call('INCR', KEYS[1]), body = '', created = now / 1000,
      ended = 'expired'}
    record('expire', id, {author = '', reason = 'its time was up', origin = 'redis'}, before, '')
    keep(id, after, now + TOMBSTONE)
    changed = true
  end
  redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', string.format('%.0f', now))
  return changed
end
"""
)

# ARGV 3 id, 4 body ('' ends it), 5 milliseconds (-1: no end), 6 expected revision, 7 who (JSON).
# -> {WRITTEN, entry JSON, remaining ms}, {CONFLICT, entry JSON or '', remaining ms} or {FULL}.
CONFLICT, WRITTEN, FULL = 0, 1, 2
WRITE = (
    _COMMON
    + """
local wrong = trouble()
if wrong then return refused(wrong) end
redis.call('INCRBY', KEYS[1], 0)  -- fails if memory is exhausted or writes are disabled
run_out()
local id, body, ms, expected, who = ARGV[3], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]),
  cjson.decode(ARGV[7])
local before = found(id)
if (before and before.revision or 0) ~= expected then
  if not before then return {0, '', 0} end
  local ends = ends_at(id, before)
  return {0, text_of(before), ends < 0 and -1 or math.max(0, ends - now)}
end
if body ~= '' and not (before and before.ended == '') and is_full() then return {2} end
if before then raise_counter(before.revision) end
local after = {revision = redis.call('INCR', KEYS[1]), body = body, created = now / 1000,
  ended = body == '' and 'cleared' or ''}
if body == '' then ms = TOMBSTONE end
local action = body == '' and 'clear' or (before and 'replace' or 'set')
record(action, id, who, before and before.body or '', body)
keep(id, after, ms < 0 and -1 or now + ms)
redis.pcall('PUBLISH', channel, after.revision)
return {1, text_of(after), ms}
"""
)

# ARGV 3 action, 4 subject, 5 who (JSON).
RECORD = (
    _COMMON
    + """
local wrong = trouble()
if wrong then return refused(wrong) end
record(ARGV[3], ARGV[4], cjson.decode(ARGV[5]), '', '')
"""
)

# -> {why this Redis cannot be written, or ''; the counter; numbers of live entries and of
#     tombstones that are left out; number of unreadable entries; the ids of some of them; flat,
#     for every entry: id, JSON, remaining ms or -1}
FETCH = (
    _COMMON
    + f"local EXAMINED_MAX, RETURNED_MAX = {_EXAMINED_MAX}, {_RETURNED_MAX}\n"
    + f"local RETURNED_BYTES_MAX, NAMED_MAX = {_RETURNED_BYTES_MAX}, {_NAMED_MAX}\n"
    + """
local wrong = trouble()
if not wrong and run_out() then redis.pcall('PUBLISH', channel, redis.call('GET', KEYS[1])) end
local left_out, unreadable, names, all, top = {0, 0}, 0, {}, {}, 0
for i, key in ipairs({KEYS[2], KEYS[3]}) do
  local members = redis.pcall('ZREVRANGE', key, 0, EXAMINED_MAX - 1, 'WITHSCORES')
  local rows, count = {}, redis.pcall('ZCARD', key)
  if type(count) ~= 'number' then count = 0 end
  left_out[i] = count - #members / 2
  for j = 1, #members, 2 do
    local id, ends = members[j], members[j + 1]
    local entry = found(id)
    if entry then
      top = math.max(top, entry.revision)
      rows[#rows + 1] = {entry.revision, id, text_of(entry), ends == 'inf' and '-1'
        or string.format('%.0f', math.max(0, tonumber(ends) - now))}
    elseif redis.call('EXISTS', prefix .. id) == 1 then
      unreadable = unreadable + 1
      if #names < NAMED_MAX then names[#names + 1] = string.sub(id, 1, 256) end
    elseif not wrong then
      redis.call('ZREM', key, id)
    end
  end
  table.sort(rows, function(a, b) return a[1] > b[1] or (a[1] == b[1] and a[2] < b[2]) end)
  local bytes = RETURNED_BYTES_MAX
  for j, row in ipairs(rows) do
    bytes = bytes - #row[2] - #row[3]
    if bytes < 0 or (i == 1 and j > RETURNED_MAX) then
      left_out[i] = left_out[i] + 1
    else
      for k = 2, 4 do all[#all + 1] = row[k] end
    end
  end
end
if not wrong then raise_counter(top) end
return {wrong or '', text_at(KEYS[1]) or '0', left_out[1], left_out[2], unreadable, names, all}
"""
)

# ARGV 3: JSON list of {id, revision, body, created, ended, ms}: entries that a sidecar has and this
# Redis has lost.  The higher revision wins; at equal revisions, the larger body.
SEED = (
    _COMMON
    + """
local wrong = trouble()
if wrong then return refused(wrong) end
redis.call('INCRBY', KEYS[1], 0)
local news = 0
local top = tonumber(redis.call('GET', KEYS[1]) or '0')
for _, e in ipairs(cjson.decode(ARGV[3])) do
  local here = found(e.id)
  if not here or here.revision < e.revision
      or (here.revision == e.revision and here.body < e.body) then
    record('restore', e.id, {author = '', reason = 'the store had lost it', origin = 'sidecar'},
      here and here.body or '', e.body)
    keep(e.id, {revision = e.revision, body = e.body, created = math.min(e.created, now / 1000),
        ended = e.ended},
      e.ms < 0 and -1 or now + e.ms)
    news = news + 1
  end
  if e.revision > top then top = e.revision end
end
if news > 0 then
  redis.call('SET', KEYS[1], string.format('%.0f', top))
  redis.pcall('PUBLISH', channel, string.format('%.0f', top))
end
return news
"""
)
