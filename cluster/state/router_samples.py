"""Each router's latest totals, so that every router can show all. The Redis key of samples is in this file:

    tandem:{<cluster>}:samples     hash: router's id -> unix seconds of the server's clock, JSON; expires

A router writes its sample and reads those of the others in one call, every few seconds. Only the dashboard depends on
them.
"""

from __future__ import annotations

import json
from typing import Any

from cluster.state.redis_store import EVEN_IF_FULL, RedisStore

MAX_CONNECTIONS = 2
EXCHANGE = (
    EVEN_IF_FULL
    + """
local now = tonumber(redis.call('TIME')[1])
redis.call('HSET', KEYS[1], ARGV[1], now .. ' ' .. ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
local found, all = {}, redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local at, text = string.match(all[i + 1], '^(%d+) (.*)$')
  if not at or math.abs(now - at) > tonumber(ARGV[3]) then  -- in the future: of a clock that was ahead
    redis.call('HDEL', KEYS[1], all[i])
  else
    found[#found + 1], found[#found + 2] = all[i], text
  end
end
return found
"""
)


class RouterSamples:
    """Every call is bounded and raises Unavailable when Redis does not answer."""

    def __init__(self, url: str, cluster: str, *, ttl_s: int) -> None:
        """A router without a sample for `ttl_s` seconds is left out."""
        self._ttl_s = ttl_s
        self._key = f"tandem:{{{cluster}}}:samples"
        self._store = RedisStore(url, most=MAX_CONNECTIONS)
        self.memory: tuple[int, int] | None = None
        """Bytes that the registry's server has in use, and its maxmemory (0: none), at the latest exchange; None where
        that is not known."""

    async def close(self) -> None:
        await self._store.close()

    async def exchange(self, router: str, sample: dict[str, Any]) -> dict[str, Any]:
        """Writes this router's sample; returns the latest one of each router, by id. One that is not JSON is left
        out."""
        text = json.dumps(sample, separators=(",", ":"))
        self.memory = None
        self.memory = await self._store.memory()
        found = await self._store.run(EXCHANGE, [self._key], [router, text, self._ttl_s])
        samples: dict[str, Any] = {}
        for name, value in zip(found[::2], found[1::2], strict=True):
            try:
                samples[name.decode()] = json.loads(value)
            except ValueError:
                continue
        return samples
