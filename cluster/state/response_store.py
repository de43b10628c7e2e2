"""Stored responses that clients may read again or continue, on any router. All Redis keys of responses are in this
file:

    tandem:{<cluster>}:response:<tenant>/<id>     hash: `input`, JSON of the conversation's items before the answer, and
                                                  `response`, the response object as JSON; expires
    tandem:{<cluster>}:responses:<tenant>         sorted set: id of each -> when it expires, in ms
    tandem:{<cluster>}:response-bytes:<tenant>    hash: id of each -> its bytes; under the empty name, those of all

No tenant's name contains `/`. A response has the whole conversation before it, so it can be continued after the earlier
ones have expired or been deleted. Times are the server's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cluster.state.job_scripts import NOW
from cluster.state.redis_store import RedisStore, no_such
from tandem.errors import NotFound, TooLarge

KEPT = "responses are forgotten after response_ttl_s, or sooner if newer ones need the room"
MAX_CONNECTIONS = 8
OWN_BYTES = 512  # that a response takes in addition to its content
EXPIRED_PER_SCRIPT = 64  # expired responses whose entries one script removes

PUT = (
    NOW
    + """
local id, ttl, most, size, prefix = ARGV[1], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7]
local total = tonumber(redis.call('HGET', KEYS[3], '') or '0')
local function forget(old)
  total = total - tonumber(redis.call('HGET', KEYS[3], old) or '0')
  redis.call('HDEL', KEYS[3], old)
  redis.call('ZREM', KEYS[2], old)
  redis.call('DEL', prefix .. old)
end
for _, old in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, ARGV[8])) do forget(old) end
while total + size > most do
  local oldest = redis.call('ZRANGE', KEYS[2], 0, 0)[1]
  if not oldest then break end
  forget(oldest)
end
redis.call('HSET', KEYS[1], 'input', ARGV[2], 'response', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ttl)
redis.call('ZADD', KEYS[2], now + ttl, id)
redis.call('HSET', KEYS[3], id, size, '', total + size)
redis.call('PEXPIRE', KEYS[2], ttl)
redis.call('PEXPIRE', KEYS[3], ttl)
return 'kept'
"""
)
DELETE = """
local known = redis.call('DEL', KEYS[1])
local size = redis.call('HGET', KEYS[3], ARGV[1])
if size then
  redis.call('HINCRBY', KEYS[3], '', -size)
  redis.call('HDEL', KEYS[3], ARGV[1])
  redis.call('ZREM', KEYS[2], ARGV[1])
end
return known
"""
SIZE = """
local size = 0
for _, name in ipairs(ARGV) do size = size + redis.call('HSTRLEN', KEYS[1], name) end
return size
"""

Count = Callable[[int], Awaitable[None]]  # of the bytes that are about to be read; what it raises prevents that


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """As JSON: the items before the answer, and the response object, whose `output` has the answer's items."""

    input: bytes
    response: bytes

    @property
    def size(self) -> int:
        return len(self.input) + len(self.response)


class ResponseStore:
    """Every call is bounded and raises Unavailable when Redis does not answer."""

    def __init__(self, url: str, cluster: str, *, ttl_s: float, most_bytes: int) -> None:
        """`ttl_s`: how long a response is kept; `most_bytes`: of all responses of one tenant, beyond which the oldest
        ones are removed."""
        self._ttl_ms, self._most = int(ttl_s * 1000), most_bytes
        self._prefix = f"tandem:{{{cluster}}}"
        self._store = RedisStore(url, most=MAX_CONNECTIONS)

    async def close(self) -> None:
        await self._store.close()

    async def check(self, tenant: str) -> None:
        """Raises Unavailable while nothing could be stored."""
        async with self._store.connection(tenant=tenant) as client:
            await client.ping()

    def check_size(self, content: int) -> int:
        """The bytes that a response takes whose conversation and object have `content` bytes together. Raises TooLarge
        if they exceed the tenant's total limit."""
        size = content + OWN_BYTES
        if size > self._most:
            raise TooLarge(
                f"the response and its conversation have {size} bytes, over {self._most}: send `store` false",
                reason="RESPONSE_TOO_LARGE",
                field="store",
                bound=f"false for conversations over {self._most} bytes (max_tenant_response_mib)",
            )
        return size

    async def put(self, tenant: str, response_id: str, input_items: bytes, response: bytes) -> None:
        """Raises TooLarge as `check_size` does."""
        size = self.check_size(len(input_items) + len(response))
        prefix = self._key(tenant, "")
        more = [self._ttl_ms, self._most, size, prefix, EXPIRED_PER_SCRIPT]
        args = [response_id, input_items, response, *more]
        await self._store.run(PUT, self._keys(tenant, response_id), args, tenant)

    async def size(self, tenant: str, response_id: str, *names: str) -> int:
        """The bytes of these parts, without reading them. Raises NotFound."""
        if size := int(await self._store.run(SIZE, [self._key(tenant, response_id)], names, tenant)):
            return size
        raise no_response(response_id)

    async def get(self, tenant: str, response_id: str, count: Count) -> StoredResponse:
        """Raises NotFound."""
        return StoredResponse(*await self._fields(tenant, response_id, count, "input", "response"))

    async def input(self, tenant: str, response_id: str, count: Count) -> bytes:
        """The items before the answer alone. Raises NotFound."""
        return (await self._fields(tenant, response_id, count, "input"))[0]

    async def response(self, tenant: str, response_id: str, count: Count) -> bytes:
        """The response object alone. Raises NotFound."""
        return (await self._fields(tenant, response_id, count, "response"))[0]

    async def delete(self, tenant: str, response_id: str) -> None:
        """Raises NotFound."""
        if not int(await self._store.run(DELETE, self._keys(tenant, response_id), [response_id], tenant)):
            raise no_response(response_id)

    async def _fields(self, tenant: str, response_id: str, count: Count, *names: str) -> list[bytes]:
        await count(await self.size(tenant, response_id, *names))
        async with self._store.connection(tenant=tenant) as client:
            found: list[bytes | None] = await client.hmget(self._key(tenant, response_id), names)
        known = [value for value in found if value is not None]
        if len(known) < len(names):
            raise no_response(response_id)
        return known

    def _key(self, tenant: str, response_id: str) -> str:
        return f"{self._prefix}:response:{tenant}/{response_id}"

    def _keys(self, tenant: str, response_id: str) -> list[str]:
        about = [f"{self._prefix}:responses:{tenant}", f"{self._prefix}:response-bytes:{tenant}"]
        return [self._key(tenant, response_id), *about]


def no_response(response_id: str) -> NotFound:
    """The error for an id that is not stored."""
    return no_such("response", response_id, KEPT)
