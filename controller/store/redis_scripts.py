"""Defines in Lua what must happen in one step inside Redis.

A script that fails half-way leaves what it has written.  So each one first checks everything that
could stop it: the type and value of every key, and (from Redis 7 on) the right to every command.
A key that is wrong is reported as an error beginning with REFUSED, and nothing was changed then.
An audit record is written before the entry that it belongs to.

All keys carry one hash tag, so that a cluster keeps them together.  Times are Redis's own
(milliseconds of TIME); an entry's key lives a minute longer than the entry, so that its end can
still be recorded, and then vanishes by itself even if no sidecar is left.  An invalid entry, which
somebody else wrote, counts as absent: it can be written again, and stops nobody.  An entry
that was created later than now shows that Redis's clock went back (or that another server with
another clock took over): it gets the time to live that it was granted, from now on.

KEYS  1 revision (counter)   2 live (sorted set: id by end)   3 tombstones (sorted set "traces")
      4 audit (stream)       ARGV 1 is the prefix of entry keys, ARGV 2 the channel for news
"""

# What an error begins with after which nothing was changed.
REFUSED = "REFUSED "

_COMMON = """
local prefix, channel = ARGV[1], ARGV[2]
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local GRACE, TOMBSTONE, AUDIT_MAX = 60000, 604800000, 100000

local KINDS = {'string', 'zset', 'zset', 'stream'}
-- When the newest audit record was made, by the clock of then.
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

local function keep(id, entry, ends)
  local text = cjson.encode(entry)
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

local function text_at(key)
  local text = redis.pcall('GET', key)
  return type(text) == 'string' and text or nil
end

local function text_of(id)
  return text_at(prefix .. id)
end

local function found(id)
  local text = text_of(id)
  local fine, entry = pcall(cjson.decode, text)
  local right = text and fine and type(entry) == 'table'
    and type(entry.revision) == 'number' and entry.revision >= 0 and entry.revision < 2^53
    and type(entry.created) == 'number' and entry.created >= 0 and entry.created < 2^53
    and type(entry.body) == 'string' and type(entry.ended) == 'string'
  return right and entry or nil
end

local function ends_at(id, entry)
  local score = redis.call('ZSCORE', entry.ended ~= '' and KEYS[3] or KEYS[2], id)
  if not score or score == 'inf' then return -1 end
  return tonumber(score)
end

-- Entries of a clock that was ahead, as if they had been created now.
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

# ARGV 3 id, 4 body ('' ends it), 5 milliseconds (-1: no end), 6 expected revision, 7 who (JSON).
# -> {1, entry JSON, remaining ms} or, on a conflict, {0, entry JSON or '', remaining ms}.
WRITE = (
    _COMMON
    + """
local wrong = trouble()
if wrong then return refused(wrong) end
redis.call('INCRBY', KEYS[1], 0)  -- refused first thing where memory is out or writes are
run_out()
local id, body, ms, expected, who = ARGV[3], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]),
  cjson.decode(ARGV[7])
local before = found(id)
if (before and before.revision or 0) ~= expected then
  if not before then return {0, '', 0} end
  local ends = ends_at(id, before)
  return {0, cjson.encode(before), ends < 0 and -1 or math.max(0, ends - now)}
end
local after = {revision = redis.call('INCR', KEYS[1]), body = body, created = now / 1000,
  ended = body == '' and 'cleared' or ''}
if body == '' then ms = TOMBSTONE end
local action = body == '' and 'clear' or (before and 'replace' or 'set')
record(action, id, who, before and before.body or '', body)
keep(id, after, ms < 0 and -1 or now + ms)
redis.pcall('PUBLISH', channel, after.revision)
return {1, cjson.encode(after), ms}
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

# -> {what keeps this Redis from taking writes, or ''; revision; and of every entry: id, JSON,
#     remaining ms or -1}
FETCH = (
    _COMMON
    + """
local wrong = trouble()
if not wrong and run_out() then redis.pcall('PUBLISH', channel, redis.call('GET', KEYS[1])) end
local all = {wrong or '', text_at(KEYS[1]) or '0'}
for _, key in ipairs({KEYS[2], KEYS[3]}) do
  local members = redis.pcall('ZRANGE', key, 0, -1, 'WITHSCORES')
  for i = 1, #members, 2 do
    local text = text_of(members[i])
    if text then
      local ends = members[i + 1]
      all[#all + 1] = members[i]
      all[#all + 1] = text
      all[#all + 1] = ends == 'inf' and '-1'
        or string.format('%.0f', math.max(0, tonumber(ends) - now))
    elseif not wrong then
      redis.call('ZREM', key, members[i])
    end
  end
end
return all
"""
)

# ARGV 3: JSON list of {id, revision, body, created, ended, ms}: what a sidecar knows and this Redis
# has lost.  The higher revision stays; of two with the same the larger body.
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
