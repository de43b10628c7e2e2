"""Connections to Redis or Valkey: the forms of URLs, the number of connections of a client, and its errors.

    redis:// rediss:// unix://                     one server
    redis+sentinel://HOST:PORT,HOST:PORT/SERVICE   the master of SERVICE, as these sentinels know it
    redis+cluster://HOST:PORT,HOST:PORT            Redis Cluster, found through any of these nodes
    rediss+sentinel:// rediss+cluster://           the same over TLS

Each accepts USER:PASSWORD@ before the host and the options of redis-py after `?`, such as ssl_ca_certs;
sentinel_username and sentinel_password are separate credentials for sentinels. Messages never contain the URL: it may
contain a password.

All keys of one Tandem cluster contain `{<cluster>}`, so Redis Cluster keeps them in one slot. Scripts over several keys
and one blocking read over many streams need that. One cluster's load therefore stays on one node; several clusters
spread over the nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import redis.asyncio as redis
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
)

from tandem.errors import NotFound, SettingsError, Unavailable
from tandem.tenancy.tenant_slots import TenantSlots

CALL_TIMEOUT_S = 2.0
HEALTH_CHECK_S = 30
SINGLE_SERVER_SCHEMES = ("redis", "rediss", "unix")
MULTI_SERVER_SCHEMES = ("redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
FAILURES = (RedisError, RedisClusterException)
EVEN_IF_FULL = "redis.call('DEL', string.match(KEYS[1], '^.-}') .. ':none')\n"
"""Begins a script that a server without free memory must run. It refuses a script only at its first write, and this
one, of a key that never exists, takes no memory. For what keeps, continues or ends something, not for what begins."""


class RedisStore:
    """A client with at most `most` connections (to each node, of a Redis Cluster). Calls beyond that wait their turn
    within their own time limit. Tenants take turns, and a named one has at most half of the connections; calls without
    a tenant, as for leases, take turns with the tenants."""

    def __init__(self, url: str, *, most: int) -> None:
        """Raises SettingsError when the URL is not one of the forms above."""
        self.client: Any = _client(url, most)
        self._turns = TenantSlots(most, max(1, most // 2))
        self._scripts: dict[str, Any] = {}

    async def close(self) -> None:
        await self.client.aclose()

    @asynccontextmanager
    async def connection(self, more_s: float = 0.0, tenant: str = "") -> AsyncIterator[Any]:
        """The client, for one call that may take CALL_TIMEOUT_S and `more_s` seconds. Raises Unavailable."""
        with answering():
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S + more_s), self._turns.slot(tenant):
                    yield self.client
            except TimeoutError as error:
                raise RedisError("no answer in time") from error
            except ReadOnlyError:
                # It is a replica now, and answers on. New connections find the master to which its name leads.
                if isinstance(self.client, redis.Redis):
                    await self.client.connection_pool.disconnect(inuse_connections=False)
                raise

    async def run(self, script: str, keys: Sequence[str], args: Sequence[Any], tenant: str = "") -> Any:
        """The script's answer. Raises Unavailable."""
        registered = self._scripts.get(script)
        if registered is None:
            registered = self._scripts[script] = self.client.register_script(script)
        async with self.connection(tenant=tenant):
            return await registered(keys=list(keys), args=list(args))

    async def memory(self) -> tuple[int, int] | None:
        """Bytes that the server uses, and its maxmemory (0: no limit). None without the right to call INFO, and for
        Redis Cluster, whose nodes differ. Raises Unavailable."""
        async with self.connection() as client:
            if isinstance(client, redis.RedisCluster):
                return None
            try:
                about = await client.info("memory")
            except NoPermissionError:
                return None
        return int(about.get("used_memory", 0)), int(about.get("maxmemory", 0))

    async def xread(self, streams: Mapping[str, str], count: int, block_s: float = 0.0) -> list[Any]:
        """New entries of each stream after the given id: [(stream, [(id, fields)])]. All streams are in one slot."""
        block = ("BLOCK", max(1, int(block_s * 1000))) if block_s else ()
        command = ("XREAD", "COUNT", count, *block, "STREAMS", *streams, *streams.values())
        async with self.connection(block_s) as client:
            more = {}
            if isinstance(client, redis.RedisCluster):  # otherwise it asks a server for the keys of each XREAD
                await client.initialize()
                more["target_nodes"] = client.get_node_from_key(next(iter(streams)))
            return await client.execute_command(*command, **more) or []


def no_such(kind: str, name: str, kept: str, field: str | None = None) -> NotFound:
    """The error for an id that is not stored. `kept` says how long ids of this kind are."""
    return NotFound(
        f"there is no {kind} {name!r:.140}; {kept}",
        reason=f"NO_SUCH_{kind.upper()}",
        field=field or f"{kind}_id",
        bound=f"the id of a {kind} that is kept",
    )


def _client(url: str, most: int) -> Any:
    scheme, _, rest = url.partition("://")
    if scheme not in (*SINGLE_SERVER_SCHEMES, *MULTI_SERVER_SCHEMES) or not rest:
        raise _bad_url("the scheme is unknown")
    options: dict[str, Any] = {
        "socket_connect_timeout": CALL_TIMEOUT_S,
        "socket_timeout": None,  # `turn` bounds each call; some block on purpose
        "health_check_interval": HEALTH_CHECK_S,
        "max_connections": most + 2,
        "driver_info": None,  # otherwise each new connection reads redis-py's version from its files
    }
    plain, _, kind = scheme.partition("+")
    try:
        if not kind:
            return redis.Redis.from_url(url, **options)
        return _of_many(plain, kind, rest, options)
    except SettingsError:
        raise
    except (ValueError, TypeError) as error:
        raise _bad_url("it cannot be read") from error


class _Cluster(redis.RedisCluster):
    async def _execute_command(self, target_node: Any, *args: Any, **more: Any) -> Any:
        """redis-py has None for a node without slots, to which a slot may be moving, and calls its methods."""
        try:
            return await super()._execute_command(target_node, *args, **more)
        except AttributeError as error:
            raise RedisError("the slot of this cluster's keys moves to a new node") from error


def _of_many(plain: str, kind: str, rest: str, options: dict[str, Any]) -> Any:
    """A client for Sentinel or Redis Cluster."""
    parts = urlsplit(f"{plain}://{rest}")
    login, _, hosts = parts.netloc.rpartition("@")
    addresses = [_address(host, 26379 if kind == "sentinel" else 6379) for host in hosts.split(",")]
    path = [unquote(part) for part in parts.path.strip("/").split("/") if part]
    query = dict(parse_qsl(parts.query))
    logins = {name: query.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    database = "/" + path[1] if kind == "sentinel" and len(path) > 1 else ""
    parsed = parse_url(f"{plain}://{login}{'@' if login else ''}localhost{database}?{urlencode(query)}")
    connection = {name: value for name, value in parsed.items() if name not in ("host", "port", "connection_class")}
    tls = {name: value for name, value in connection.items() if name.startswith("ssl_")}
    if plain == "rediss":
        connection["ssl"] = tls["ssl"] = True
    if kind == "cluster":
        if path:
            raise _bad_url("Redis Cluster has one database")
        # No retries, as with the other servers: a script whose answer was lost may have run, and most add something.
        return _Cluster(
            startup_nodes=[ClusterNode(*address) for address in addresses],
            retry=Retry(NoBackoff(), 0),
            **{**options, **connection},
        )
    if not path:
        raise _bad_url("the name of the Sentinel service is missing after the hosts")
    # A call must reach the last one although all others are lost: by default, redis-py asks each of them eleven times.
    each_s = CALL_TIMEOUT_S / (len(addresses) + 1)
    bounded = {"socket_timeout": each_s, "socket_connect_timeout": each_s, "retry": Retry(NoBackoff(), 0)}
    sentinel: Any = redis.Sentinel(addresses, sentinel_kwargs={**bounded, **tls, **logins})  # type: ignore[no-untyped-call]
    return sentinel.master_for(path[0], **{**options, **connection})


def _address(text: str, port: int) -> tuple[str, int]:
    host, colon, number = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    host, number = (host, number) if colon else (text, str(port))
    if not host or not number.isdigit():
        raise _bad_url("a host is missing or a port is not a number")
    return host.strip("[]"), int(number)


def _bad_url(why: str) -> SettingsError:
    forms = "redis://, rediss://, unix://, redis+sentinel://HOST:PORT,.../SERVICE or redis+cluster://HOST:PORT,..."
    return SettingsError(f"the URL of the registry: {why}", field="redis", bound=forms)


@contextmanager
def answering() -> Iterator[None]:
    try:
        yield
    except OutOfMemoryError as error:  # it answers, so what has begun may wait until it has memory
        raise_lost_cancel()
        raise Unavailable(f"the registry is full: {error}", reason="REGISTRY_FULL", retry_after=5.0) from error
    except FAILURES as error:
        raise_lost_cancel()
        raise Unavailable(
            f"the registry does not answer: {error}", reason="REGISTRY_UNREACHABLE", retry_after=1.0
        ) from error
    raise_lost_cancel()


def raise_lost_cancel() -> None:
    """The client writes inside asyncio.wait_for, which in Python 3.11 loses a cancellation that arrives just when the
    write ends; the caller that cancelled it would wait for ever."""
    task = asyncio.current_task()
    if task and task.cancelling():
        raise asyncio.CancelledError
