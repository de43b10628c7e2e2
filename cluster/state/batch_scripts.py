"""The changes of cluster/state/batch_store.py, each of them one script in Redis."""

from __future__ import annotations

from cluster.state.job_scripts import NOW, OWNED
from cluster.state.redis_store import EVEN_IF_FULL

# Bytes and number of a tenant's files, answers of ended batches included.
_FILES = """
local function files_of(index, prefix)
  local total, files = 0, 0
  for _, id in ipairs(redis.call('ZRANGE', index, 0, -1)) do
    local bytes = redis.call('HGET', prefix .. id, 'bytes')
    if bytes then
      total = total + bytes
      files = files + 1
    else
      redis.call('ZREM', index, id)
    end
  end
  return total, files
end
"""
ADD_PIECE = """
redis.call('RPUSH', KEYS[1], ARGV[1])
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""
# The last argument: whether to add the file, or only to check whether there is room for it.
ADD_FILE = (
    NOW
    + _FILES
    + """
local id, filename, purpose, size, kept = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local total, files = files_of(KEYS[3], ARGV[8])
if total + size > tonumber(ARGV[6]) then redis.call('DEL', KEYS[2]) return 'bytes' end
if files + 1 > tonumber(ARGV[7]) then redis.call('DEL', KEYS[2]) return 'files' end
if ARGV[10] == '0' then return 'kept' end
if redis.call('PEXPIRE', KEYS[2], kept) == 0 then return 'gone' end
redis.call('HSET', KEYS[1], 'filename', filename, 'purpose', purpose, 'bytes', size, 'created', seconds,
           'expires', seconds + math.floor(kept / 1000))
redis.call('PEXPIRE', KEYS[1], kept)
redis.call('ZADD', KEYS[3], now, id)
redis.call('PEXPIRE', KEYS[3], ARGV[9])
return 'kept'
"""
)
# A page: the pieces from the place ARGV[1] on, at most ARGV[3] of them, with at most ARGV[2] bytes together. A first
# piece with more bytes than that is a page of its own.
PAGE = """
local found, size, most = {}, 0, tonumber(ARGV[2])
while #found < tonumber(ARGV[3]) do
  local piece = redis.call('LINDEX', KEYS[1], ARGV[1] + #found)
  if not piece or (#found > 0 and size + #piece > most) then break end
  found[#found + 1] = piece
  size = size + #piece
end
return found
"""
DELETE_FILE = """
redis.call('DEL', KEYS[2])
redis.call('ZREM', KEYS[3], ARGV[1])
return redis.call('DEL', KEYS[1])
"""
# -1: the item that the page follows does not exist.
LIST = """
local prefix, after, limit, found = ARGV[1], ARGV[2], tonumber(ARGV[3]), {}
local passed = after == ''
for _, id in ipairs(redis.call(ARGV[4] == '1' and 'ZREVRANGE' or 'ZRANGE', KEYS[1], 0, -1)) do
  if passed then
    local fields = redis.call('HGETALL', prefix .. id)
    if #fields == 0 then
      redis.call('ZREM', KEYS[1], id)
    elseif ARGV[5] == '' or redis.call('HGET', prefix .. id, 'purpose') == ARGV[5] then
      if #found == limit then return {1, found} end
      found[#found + 1] = {id, fields}
    end
  elseif id == after then
    passed = true
  end
end
if not passed then return {-1, {}} end
return {0, found}
"""
CREATE = (
    NOW
    + _FILES
    + """
local bytes = redis.call('HGET', KEYS[4], 'bytes')
if not bytes then return 'no file' end
if files_of(KEYS[7], ARGV[8]) > tonumber(ARGV[9]) then return 'bytes' end
local open, kept = 0, 0
for _, other in ipairs(redis.call('ZRANGE', KEYS[5], 0, -1)) do
  local state = redis.call('HGET', ARGV[5] .. other, 'state')
  if not state then
    redis.call('ZREM', KEYS[5], other)
  else
    kept = kept + 1
    if state == 'open' then open = open + 1 end
  end
end
if open >= tonumber(ARGV[3]) then return 'open' end
if kept >= tonumber(ARGV[4]) then return 'kept' end
redis.call('COPY', KEYS[3], KEYS[2])
redis.call('PEXPIRE', KEYS[2], 2000 * ARGV[7])  -- twice its window, for clusters that no router belongs to any more
redis.call('HSET', KEYS[1], 'state', 'open', 'generation', 0, 'status', 'validating', 'input_bytes', bytes,
           'created_at', seconds, 'expires_at', seconds + ARGV[7])
for i = 10, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('PEXPIRE', KEYS[1], 2000 * ARGV[7])
redis.call('ZADD', KEYS[5], now, ARGV[1])
redis.call('PEXPIRE', KEYS[5], ARGV[6])
redis.call('ZADD', KEYS[6], now, ARGV[2])
return 'created'
"""
)
CANCEL = (
    EVEN_IF_FULL
    + NOW
    + """
local about = redis.call('HMGET', KEYS[1], 'state', 'cancelled', 'status')
if not about[1] then return 'unknown' end
if about[1] ~= 'open' then return about[3] end
if not about[2] then
  redis.call('HSET', KEYS[1], 'cancelled', 1, 'status', 'cancelling', 'cancelling_at', seconds)
end
return 'open'
"""
)
BEGIN = (
    EVEN_IF_FULL
    + NOW
    + OWNED
    + """
if not owner[3] then
  redis.call('HSET', KEYS[1], 'status', ARGV[2])
  redis.call('HSETNX', KEYS[1], ARGV[2] .. '_at', seconds)
end
for i = 3, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
return 'kept'
"""
)
ADD_RESULTS = (
    EVEN_IF_FULL
    + OWNED
    + """
local most = tonumber(ARGV[3])
for i = 4, #ARGV, 7 do
  local line, kind, text = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if redis.call('GETBIT', KEYS[2], line) == 0 then
    local used = tonumber(redis.call('HGET', KEYS[1], kind .. '_bytes') or '0') + #text
    if kind == 'completed' and used > tonumber(ARGV[2]) then return 'full' end
    redis.call('SETBIT', KEYS[2], line, 1)
    for at = 1, #text, most do
      redis.call('RPUSH', kind == 'completed' and KEYS[3] or KEYS[4], text:sub(at, at + most - 1))
    end
    redis.call('HINCRBY', KEYS[1], kind, 1)
    redis.call('HSET', KEYS[1], kind .. '_bytes', used)
    for at, name in ipairs({'input_tokens', 'cached_tokens', 'output_tokens', 'reasoning_tokens'}) do
      redis.call('HINCRBY', KEYS[1], name, ARGV[i + 2 + at])
    end
  end
end
local left = redis.call('PTTL', KEYS[1])  -- -1 if somebody took its expiry away: with that, PEXPIRE would delete
for at = 2, 4 do if left > 0 then redis.call('PEXPIRE', KEYS[at], left) end end
return 'kept'
"""
)
END = (
    EVEN_IF_FULL
    + NOW
    + OWNED
    + """
local status, kept = ARGV[3], tonumber(ARGV[6])
local lines = tonumber(redis.call('HGET', KEYS[1], 'total') or '0')
if status == 'completed' and redis.call('BITCOUNT', KEYS[3]) < lines then return 'lost' end  -- the next owner goes on
for at, kind in ipairs({'output', 'error'}) do
  local file, content, id = KEYS[4 + 2 * at], KEYS[5 + 2 * at], ARGV[7 + at]
  local bytes = redis.call('HGET', KEYS[1], (kind == 'output' and 'completed' or 'failed') .. '_bytes')
  if bytes then
    redis.call('HSET', file, 'filename', ARGV[7] .. '_' .. kind .. '.jsonl', 'purpose', 'batch_output', 'bytes', bytes,
               'created', seconds, 'expires', seconds + math.floor(kept / 1000))
    redis.call('PEXPIRE', file, kept)
    redis.call('PEXPIRE', content, kept)
    redis.call('ZADD', KEYS[5], now, id)
    redis.call('HSET', KEYS[1], kind .. '_file_id', id)
  end
end
redis.call('HSET', KEYS[1], 'state', 'ended', 'status', status, status .. '_at', seconds, 'errors', ARGV[4])
redis.call('DEL', KEYS[2], KEYS[3])
redis.call('ZREM', KEYS[4], ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[5])
return 'kept'
"""
)
