"""The changes of cluster/state/job_journal.py, each of them one script in Redis."""

from __future__ import annotations

from cluster.state.redis_store import EVEN_IF_FULL

NOW = """
local clock = redis.call('TIME')
local seconds = tonumber(clock[1])
local now = seconds * 1000 + math.floor(clock[2] / 1000)
"""
OWNED = """
local owner = redis.call('HMGET', KEYS[1], 'generation', 'state', 'cancelled')
if owner[1] ~= ARGV[1] or owner[2] ~= 'open' then return 'lost' end
"""
SUBMIT = (
    NOW
    + """
local fresh, new, bytes, answers = {}, 0, 0, {'kept'}
for i = 1, #KEYS - 2 do
  local id, request, digest = ARGV[3 * i + 5], ARGV[3 * i + 6], ARGV[3 * i + 7]
  local known = fresh[id] or redis.call('HGET', KEYS[i + 2], 'digest')
  if known and known ~= digest then return {'other', id} end
  answers[i + 1] = known and 'known' or 'new'
  if not known then
    fresh[id] = digest
    new = new + 1
    bytes = bytes + #request
  end
end
if new > 0 and redis.call('ZCARD', KEYS[1]) + new > tonumber(ARGV[2]) then return {'full', tostring(new)} end
if new > 0 and ARGV[4] ~= '' then
  local open = redis.call('ZLEXCOUNT', KEYS[2], '[' .. ARGV[4] .. '/', '(' .. ARGV[4] .. '0')
  if open + new > tonumber(ARGV[3]) then return {'full for it', tostring(new)} end
end
if new > 0 then
  local all = bytes
  for _, id in ipairs(redis.call('ZRANGEBYLEX', KEYS[2], '[' .. ARGV[4] .. '/', '(' .. ARGV[4] .. '0')) do
    all = all + redis.call('HSTRLEN', ARGV[6] .. id, 'request')
  end
  if all > tonumber(ARGV[5]) then return {'bytes', tostring(bytes)} end
end
for i = 1, #KEYS - 2 do
  if answers[i + 1] == 'new' then
    local id, request, digest = ARGV[3 * i + 5], ARGV[3 * i + 6], ARGV[3 * i + 7]
    redis.call('HSET', KEYS[i + 2], 'request', request, 'digest', digest, 'state', 'open', 'generation', 1, 'tokens', 0)
    redis.call('PEXPIRE', KEYS[i + 2], ARGV[7])
    redis.call('ZADD', KEYS[1], now + ARGV[1], id)
    redis.call('ZADD', KEYS[2], 0, id)
  end
end
return answers
"""
)
APPEND = (
    EVEN_IF_FULL
    + OWNED
    + """
if owner[3] then return 'cancelled' end
if (redis.call('HGET', KEYS[1], ARGV[5]) or '0') ~= ARGV[2] then return 'gap' end
redis.call('XADD', KEYS[2], '*', 'event', ARGV[4])
redis.call('HSET', KEYS[1], ARGV[5], ARGV[3])
redis.call('HINCRBY', KEYS[1], 'bytes', #ARGV[4])
local left = redis.call('PTTL', KEYS[1])  -- -1 if somebody took its expiry away: with that, PEXPIRE would delete
if left > 0 then redis.call('PEXPIRE', KEYS[2], left) end
return 'kept'
"""
)
END = (
    EVEN_IF_FULL
    + NOW
    + OWNED
    + """
local id, kept, most, own = ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[10])
local total = tonumber(redis.call('HGET', KEYS[4], '') or '0')
local function forget(old)
  total = total - tonumber(redis.call('HGET', KEYS[4], old) or '0')
  redis.call('HDEL', KEYS[4], old)
  redis.call('ZREM', KEYS[3], old)
  if redis.call('HGET', ARGV[8] .. old, 'state') ~= 'open' then  -- otherwise it has expired, and was submitted again
    redis.call('DEL', ARGV[8] .. old, ARGV[9] .. old)
  end
end
local size = own + redis.call('HSTRLEN', KEYS[1], 'request') + #ARGV[3] + #ARGV[4]
size = size + tonumber(redis.call('HGET', KEYS[1], 'bytes') or '0')
forget(id)
for _, old in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', now, 'LIMIT', 0, ARGV[11])) do forget(old) end
while total + size > most do
  local oldest = redis.call('ZRANGE', KEYS[3], 0, 0)[1]
  if not oldest then break end
  forget(oldest)
end
if ARGV[3] ~= '' then redis.call('XADD', KEYS[2], '*', 'event', ARGV[3]) end
redis.call('HSET', KEYS[1], 'state', ARGV[2], 'error', ARGV[4])
redis.call('ZREM', KEYS[5], id)
redis.call('ZREM', KEYS[6], id)
redis.call('XADD', KEYS[2], '*', 'end', ARGV[2])
redis.call('ZADD', KEYS[3], now + kept, id)
redis.call('HSET', KEYS[4], id, size, '', total + size)
for i = 1, 4 do redis.call('PEXPIRE', KEYS[i], kept) end
return 'kept'
"""
)
RENEW = (
    EVEN_IF_FULL
    + NOW
    + """
local answers = {}
for i = 2, #KEYS do
  local id, generation = ARGV[2 * i - 2], ARGV[2 * i - 1]
  local job = redis.call('HMGET', KEYS[i], 'generation', 'state', 'cancelled')
  if job[1] ~= generation or job[2] ~= 'open' then
    answers[i - 1] = 'lost'
  else
    redis.call('ZADD', KEYS[1], now + ARGV[1], id)
    answers[i - 1] = job[3] and 'cancelled' or 'kept'
  end
end
return answers
"""
)
CLAIM = (
    EVEN_IF_FULL
    + NOW
    + """
for _, far in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now + ARGV[2], '+inf', 'LIMIT', 0, 100)) do
  redis.call('ZADD', KEYS[1], now + ARGV[2], far)  -- of a clock that was ahead: its owner renews it, or is gone
end
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, 1)[1]
if not due then return false end
local key = ARGV[1] .. due
if redis.call('HGET', key, 'state') ~= 'open' then
  redis.call('ZREM', KEYS[1], due)
  redis.call('ZREM', KEYS[2], due)
  return {due, '0'}
end
redis.call('ZADD', KEYS[1], now + ARGV[2], due)
return {due, tostring(redis.call('HINCRBY', key, 'generation', 1))}
"""
)
CANCEL = (
    EVEN_IF_FULL
    + """
if redis.call('HGET', KEYS[1], 'state') == 'open' then redis.call('HSET', KEYS[1], 'cancelled', 1) end
return redis.call('EXISTS', KEYS[1])
"""
)
FORGET = """
local state = redis.call('HGET', KEYS[1], 'state')
if state and state ~= 'open' then
  redis.call('DEL', KEYS[1], KEYS[2])
  local size = redis.call('HGET', KEYS[4], ARGV[1])
  if size then
    redis.call('HINCRBY', KEYS[4], '', -size)
    redis.call('HDEL', KEYS[4], ARGV[1])
    redis.call('ZREM', KEYS[3], ARGV[1])
  end
end
return state and 1 or 0
"""
