"""The changes of cluster/state/registry.py, each of them one script in Redis.

Those of workers have the keys workers, beats, versions and version; their first arguments are the channel and a name
for a new epoch. If the server's clock was set back, each first corrects when the records expire; then it removes what
has expired.
"""

from __future__ import annotations

from cluster.state.redis_store import EVEN_IF_FULL

_BEGIN = (
    EVEN_IF_FULL
    + """
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local last = tonumber(redis.call('HGET', KEYS[4], 'clock') or '0')
if now < last then  -- it was set back, or a server whose clock is behind took over: what is left of each ttl stays
  for _, id in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do redis.call('ZINCRBY', KEYS[2], now - last, id) end
  redis.call('HSET', KEYS[4], 'clock', now)
end
redis.call('HSETNX', KEYS[4], 'epoch', ARGV[2])
local function changed(id)
  redis.call('ZADD', KEYS[3], redis.call('HINCRBY', KEYS[4], 'number', 1), id)
end
local function removed(id)
  redis.call('HDEL', KEYS[1], id)
  redis.call('ZREM', KEYS[2], id)
  changed(id)
  if redis.call('ZCARD', KEYS[3]) > redis.call('HLEN', KEYS[1]) + 1000 then  -- a new epoch forgets who is gone
    redis.call('DEL', KEYS[3])
    redis.call('HSET', KEYS[4], 'epoch', ARGV[2])
  end
end
local expired = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, 1000)
for _, id in ipairs(expired) do removed(id) end
if #expired > 0 then redis.call('PUBLISH', ARGV[1], 'workers') end
"""
)
BEAT = (
    _BEGIN
    + """
local id, incarnation, born = ARGV[3], ARGV[4], tonumber(ARGV[5])
local value = incarnation .. ' ' .. ARGV[5] .. ' ' .. ARGV[6]
local old = redis.call('HGET', KEYS[1], id)
if old then
  local other, began = string.match(old, '^(%S*) (%S+) ')
  began = tonumber(began)
  if other ~= incarnation and (began > born or (began == born and other > incarnation)) then return 'superseded' end
end
if old ~= value then
  redis.call('HSET', KEYS[1], id, value)
  changed(id)
end
redis.call('ZADD', KEYS[2], now + ARGV[7], id)
redis.call('HSET', KEYS[4], 'clock', now)
if ARGV[8] == '1' then redis.call('PUBLISH', ARGV[1], 'workers') end
return 'kept'
"""
)
WITHDRAW = (
    _BEGIN
    + """
local old = redis.call('HGET', KEYS[1], ARGV[3])
if not old or string.match(old, '^(%S*) ') ~= ARGV[4] then return 0 end
removed(ARGV[3])
redis.call('PUBLISH', ARGV[1], 'workers')
return 1
"""
)
CHANGES = (
    _BEGIN
    + """
local epoch, number = unpack(redis.call('HMGET', KEYS[4], 'epoch', 'number'))
number = tonumber(number or 0)
if epoch == ARGV[3] and tonumber(ARGV[4]) <= number then
  local ids = redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. ARGV[4], '+inf')
  if #ids <= 1000 then
    local found = {}
    if #ids > 0 then
      for i, value in ipairs(redis.call('HMGET', KEYS[1], unpack(ids))) do
        found[2 * i - 1], found[2 * i] = ids[i], value
      end
    end
    return {epoch, number, 0, now, found, {}}
  end
end
return {epoch, number, 1, now, redis.call('HGETALL', KEYS[1]), redis.call('ZRANGE', KEYS[2], 0, -1, 'WITHSCORES')}
"""
)
# Of the others the first argument is the channel, if they change what is announced there.
SET_WANTED = (
    EVEN_IF_FULL
    + """
if #ARGV > 1 then redis.call('HSET', KEYS[1], unpack(ARGV, 2)) end
redis.call('PUBLISH', ARGV[1], 'wanted')
return 1
"""
)
KEEP_WANTED = (
    EVEN_IF_FULL
    + """
local kept = 0
for i = 2, #ARGV, 2 do kept = kept + redis.call('HSETNX', KEYS[1], ARGV[i], ARGV[i + 1]) end
if kept > 0 then redis.call('PUBLISH', ARGV[1], 'wanted') end
return kept
"""
)
PUBLISH_SCALING = EVEN_IF_FULL + "return redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])"
ACQUIRE_LEASE = (
    EVEN_IF_FULL
    + """
local holder = redis.call('GET', KEYS[1])
local ours = ARGV[2] .. '/'
if not holder or holder == ARGV[1] or (ARGV[2] ~= '' and string.sub(holder, 1, #ours) == ours) then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
  holder = ARGV[1]
end
-- Longer: of a server whose clock was ahead.
if redis.call('PTTL', KEYS[1]) > tonumber(ARGV[3]) then redis.call('PEXPIRE', KEYS[1], ARGV[3]) end
return {holder, redis.call('PTTL', KEYS[1])}
"""
)
RELEASE_LEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""
