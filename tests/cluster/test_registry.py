"""The registry on a real Valkey: what is written comes back, expires, wakes others, and fails in our words."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cluster.registry import Heartbeat, Registry, State, WorkerRecord
from cluster.valkey import EmbeddedValkey
from tandem.errors import Unavailable

RECORD = WorkerRecord("decode-0", "decode", State.READY, pid=1, incarnation="a1", address="127.0.0.1:5")
SOON_S = 5.0


async def workers_once(registry: Registry, wanted: int) -> list[WorkerRecord]:
    """The workers as soon as there are so many, looked at after every change."""
    async with asyncio.timeout(SOON_S):
        async for _ in registry.changes(every_s=0.05):
            try:
                found = await registry.workers()
            except Unavailable:  # the first call after a restart finds its connection broken
                continue
            if len(found) == wanted:
                return found
    raise AssertionError("changes() ended")


async def test_a_record_comes_back_as_it_was_written(registry: Registry) -> None:
    """Every field survives, and the beat carries the time."""
    await registry.beat(RECORD)
    [found] = await registry.workers()
    assert replace(found, beat=0.0) == RECORD
    assert found.age() < SOON_S


async def test_a_worker_that_stops_beating_is_forgotten(valkey: EmbeddedValkey) -> None:
    """A dead worker's record vanishes by itself after the ttl."""
    registry = Registry(valkey.url, "test", ttl_s=0.2)
    await registry.beat(RECORD)
    assert len(await registry.workers()) == 1
    assert await workers_once(registry, 0) == []
    await registry.close()


async def test_a_heartbeat_outlives_the_ttl_and_withdraws_at_the_end(valkey: EmbeddedValkey) -> None:
    """A record is kept while its worker beats, and gone at once when it stops."""
    registry = Registry(valkey.url, "test", ttl_s=0.3)
    heartbeat = Heartbeat(registry, lambda: RECORD, interval_s=0.05)
    await heartbeat.start()
    first = (await registry.workers())[0].beat
    async with asyncio.timeout(SOON_S):
        async for _ in registry.changes(every_s=0.05):
            [found] = await registry.workers()  # never absent in between
            if found.beat > first + 3 * registry.ttl_s:
                break
    await heartbeat.stop()
    assert await registry.workers() == []
    await registry.close()


async def test_wanted_sizes_come_back(registry: Registry) -> None:
    """A role that is set again is replaced, others stay."""
    await registry.want({"decode": 2, "prefill": 1})
    await registry.want({"decode": 3})
    assert await registry.wanted() == {"decode": 3, "prefill": 1}


async def test_a_change_wakes_those_who_wait(registry: Registry) -> None:
    """An announced change arrives long before the interval."""
    changes = registry.changes(every_s=60.0)
    async with asyncio.timeout(SOON_S):
        await anext(changes)  # at once
        await anext(changes)  # subscribed
        waiting = asyncio.create_task(anext(changes))
        await registry.want({"decode": 2})
        await waiting
    await changes.aclose()


async def test_clusters_on_one_server_do_not_see_each_other(valkey: EmbeddedValkey, registry: Registry) -> None:
    """The cluster's name is part of every key."""
    other = Registry(valkey.url, "other", ttl_s=5.0)
    await registry.beat(RECORD)
    await registry.want({"decode": 1})
    assert await other.workers() == []
    assert await other.wanted() == {}
    await other.close()


async def test_a_stopped_server_is_unavailable_and_a_restarted_one_is_used_again(
    valkey: EmbeddedValkey, registry: Registry
) -> None:
    """Losing the registry is an error of the tree, and passes when it is back, without a new connection by hand."""
    await registry.beat(RECORD)
    valkey.stop()
    with pytest.raises(Unavailable, match="registry"):
        await registry.workers()
    valkey.start()
    assert await workers_once(registry, 0) == []  # nothing was kept on disk
    await registry.beat(RECORD)
    assert len(await registry.workers()) == 1


async def test_a_heartbeat_survives_a_restart_of_the_server(valkey: EmbeddedValkey, registry: Registry) -> None:
    """Workers come back into an empty registry by themselves."""
    heartbeat = Heartbeat(registry, lambda: RECORD, interval_s=0.05)
    await heartbeat.start()
    valkey.stop()
    valkey.start()
    assert len(await workers_once(registry, 1)) == 1
    await heartbeat.stop()


async def test_a_heartbeat_stops_while_the_server_is_away(valkey: EmbeddedValkey, registry: Registry) -> None:
    """A worker's end never waits for a registry that is gone: the client library may lose a cancellation."""
    valkey.stop()
    for _ in range(20):
        beating = asyncio.create_task(Heartbeat(registry, lambda: RECORD, interval_s=0.0)._run())
        await asyncio.sleep(0)
        beating.cancel()
        done, _ = await asyncio.wait({beating}, timeout=SOON_S)
        assert done


async def test_changes_survive_a_restart_of_the_server(valkey: EmbeddedValkey, registry: Registry) -> None:
    """A follower keeps being woken after the server was away."""
    changes = registry.changes(every_s=0.1)
    async with asyncio.timeout(SOON_S):
        await anext(changes)
        await anext(changes)
        valkey.stop()
        await anext(changes)
        valkey.start()
        await registry.want({"decode": 4})
        while await registry.wanted() != {"decode": 4}:
            await anext(changes)
    await changes.aclose()
