"""Routers exchange their totals through the registry."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio as redis

from cluster.state.embedded_valkey import EmbeddedValkey
from cluster.state.router_samples import RouterSamples


@pytest.fixture
async def samples(valkey: EmbeddedValkey) -> AsyncIterator[Any]:
    made: list[RouterSamples] = []
    name = f"t{secrets.token_hex(4)}"

    def make(url: str = valkey.url, ttl_s: int = 60) -> RouterSamples:
        made.append(RouterSamples(url, name, ttl_s=ttl_s))
        return made[-1]

    yield make
    for one in made:
        await one.close()


async def test_each_router_gets_the_latest_sample_of_all(samples: Any) -> None:
    """A router gets the latest sample of every router, its own included, with the memory use of the registry's
    server."""
    one, other = samples(), samples()
    assert await one.exchange("router-0", {"ok": 1}) == {"router-0": {"ok": 1}}
    assert await other.exchange("router-1", {"ok": 5}) == {"router-0": {"ok": 1}, "router-1": {"ok": 5}}
    assert await one.exchange("router-0", {"ok": 2}) == {"router-0": {"ok": 2}, "router-1": {"ok": 5}}
    used, most = one.memory
    assert used > 100_000
    assert most == 0


async def test_a_full_server_does_not_hide_the_routers(samples: Any, valkey: EmbeddedValkey) -> None:
    """Operators look at the dashboard then."""
    async with redis.from_url(valkey.url) as client:
        await client.config_set("maxmemory", 1)
    one, other = samples(), samples()
    await one.exchange("router-0", {"ok": 1})
    assert await other.exchange("router-1", {"ok": 5}) == {"router-0": {"ok": 1}, "router-1": {"ok": 5}}


async def test_a_router_that_is_gone_is_left_out_and_removed(samples: Any, valkey: EmbeddedValkey) -> None:
    """A sample expires by the server's clock, also one of a clock that was ahead; one that cannot be read is
    skipped."""
    one = samples()
    await one.exchange("router-0", {})
    async with redis.Redis.from_url(valkey.url) as client:
        now = (await client.time())[0]
        strange = {"gone": "1000 {}", "ahead": f"{now + 600} {{}}", "broken": "no", "odd": f"{now} {{"}
        await client.hset(one._key, mapping=strange)
        assert await one.exchange("router-0", {"ok": 1}) == {"router-0": {"ok": 1}}
        assert set(await client.hkeys(one._key)) == {b"router-0", b"odd"}
        assert 0 < await client.ttl(one._key) <= 60


async def test_a_user_who_may_not_ask_for_the_memory_still_has_samples(samples: Any, valkey: EmbeddedValkey) -> None:
    """The documented rights do not include INFO."""
    name = f"u{secrets.token_hex(4)}"
    rights = ["~tandem:*", "&tandem:*", "+@read", "+@write", "+@scripting", "+@pubsub", "+@connection", "-@dangerous"]
    async with redis.Redis.from_url(valkey.url) as client:
        await client.execute_command("ACL", "SETUSER", name, "on", ">secret", *rights, "+time")
        try:
            one = samples(valkey.url.replace("://", f"://{name}:secret@"))
            assert await one.exchange("router-0", {"ok": 1}) == {"router-0": {"ok": 1}}
            assert one.memory is None
        finally:
            await client.execute_command("ACL", "DELUSER", name)
