"""The journal of jobs on a real Valkey: who may change what, and what watchers get."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from cluster.journal import READS, WRITES, Asked, Entry, JobState, Journal, Kept
from cluster.valkey import EmbeddedValkey
from cluster.watches import HELD, Watches
from tandem.errors import Busy, PreconditionFailed, Unavailable

SOON_S = 10.0


@pytest.fixture
async def kept(valkey: EmbeddedValkey) -> AsyncIterator[Journal]:
    journal = Journal(valkey.url, "test", lease_s=6.0, kept_s=60.0, most=2000, most_each=1500)
    yield journal
    await journal.close()


def asked(*names: str, digest: str = "d") -> list[Asked]:
    return [Asked(name, b"request of " + name.encode(), digest) for name in names]


async def connections(journal: Journal) -> int:
    """That all clients have open at the server."""
    async with journal._reads.turn() as client:
        return len(await client.client_list())


async def until_end(journal: Journal, name: str) -> list[bytes]:
    found: list[Entry] = []
    async with aclosing(journal.watch(name, idle_s=60.0)) as pages:
        async for entries in pages:
            found += entries
            if found and found[-1].ended:
                break
    return [entry.event for entry in found[:-1]]


# ---- what is kept


async def test_an_ended_job_cannot_be_changed(kept: Journal) -> None:
    """Not by its owner either: whatever comes behind the end is refused, and the stream stays as it is."""
    await kept.submit(asked("/job"))
    assert await kept.append("/job", 1, 0, 2, b"first") is Kept.KEPT
    assert await kept.end("/job", 1, JobState.FINISHED, b"last") is Kept.KEPT
    before = await kept.all("/job")
    assert await kept.append("/job", 1, 2, 3, b"late") is Kept.LOST
    assert await kept.end("/job", 1, JobState.FAILED) is Kept.LOST
    assert await kept.renew([("/job", 1)]) == [Kept.LOST]
    assert await kept.all("/job") == before
    assert (await kept.get("/job")).state is JobState.FINISHED


async def test_of_one_call_all_jobs_are_kept_or_none(kept: Journal) -> None:
    """A job in the middle that cannot be kept leaves nothing of those before it."""
    await kept.submit(asked("/b", digest="other"))
    with pytest.raises(PreconditionFailed) as differs:
        await kept.submit(asked("/a", "/b", "/c"))
    assert differs.value.reason == "JOB_DIFFERS"
    small = Journal(kept_url(kept), "test", lease_s=6.0, kept_s=60.0, most=3)
    with pytest.raises(Busy) as full:
        await small.submit(asked("/a", "/c", "/d"))
    assert full.value.reason == "JOBS_FULL"
    assert await small.submit(asked("/a", "/b", "/c", digest="other")) == [True, False, True]
    assert await small.submit(asked("/a", "/b", "/c", digest="other")) == [False, False, False]
    await small.close()


async def test_one_id_twice_in_one_call_is_one_job(kept: Journal) -> None:
    """The same request is one job; two different ones are refused before either is kept."""
    assert await kept.submit(asked("/a", "/a")) == [True, False]
    with pytest.raises(PreconditionFailed):
        await kept.submit([*asked("/b"), *asked("/b", digest="other")])
    assert await kept.submit(asked("/b")) == [True]


async def test_open_jobs_of_a_tenant_are_bounded(kept: Journal) -> None:
    """Ended ones make room, other tenants have room, and names that begin alike are different tenants."""
    few = Journal(kept_url(kept), "test", lease_s=6.0, kept_s=60.0, most=100, most_each=2)
    await few.submit(asked("ann/1", "ann/2"), "ann")
    with pytest.raises(Busy) as full:
        await few.submit(asked("ann/3"), "ann")
    assert full.value.reason == "TENANT_JOBS"
    await few.submit(asked("anna/1", "anna/2"), "anna")
    await few.submit(asked("an/1", "an/2"), "an")
    await few.submit(asked(*(f"/{number}" for number in range(5))))  # nobody's, where no keys are asked for
    await few.end("ann/1", 1, JobState.FINISHED)
    await few.submit(asked("ann/3"), "ann")
    await few.close()


async def test_a_job_may_be_named_as_the_stream_of_another(kept: Journal) -> None:
    """No id is the key of anything but its own job."""
    names = ["/x", "/x:events", "/events:/x", "/{x}"]
    await kept.submit(asked(*names))
    for name in names:
        assert await kept.append(name, 1, 0, 1, name.encode()) is Kept.KEPT
        assert await kept.end(name, 1, JobState.FINISHED) is Kept.KEPT
    for name in names:
        assert [entry.event for entry in await kept.all(name)] == [name.encode(), b""]
        assert (await kept.get(name)).request == b"request of " + name.encode()


async def test_all_leases_are_renewed_at_once(kept: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """600 jobs, each told for itself, in two calls: a slow registry does not cost the last of them its lease."""
    names = [f"/{number}" for number in range(600)]
    await kept.submit(asked(*names))
    await kept.cancel("/7")
    await kept.end("/8", 1, JobState.FINISHED)
    calls, run = [], kept._writes.run

    async def counted(*args: Any) -> Any:
        calls.append(args)
        return await run(*args)

    monkeypatch.setattr(kept._writes, "run", counted)
    found = await kept.renew([(name, 2 if name == "/9" else 1) for name in names])
    assert len(calls) == 2
    assert {name: one for name, one in zip(names, found, strict=True) if one is not Kept.KEPT} == {
        "/7": Kept.CANCELLED,
        "/8": Kept.LOST,
        "/9": Kept.LOST,
    }


async def test_a_released_job_can_be_claimed_at_once(kept: Journal) -> None:
    """Its lease would have lasted seconds."""
    await kept.submit(asked("/job"))
    assert await kept.claim() is None
    await kept.release([("/job", 1)])
    record = await kept.claim()
    assert record is not None
    assert (record.job_id, record.generation) == ("/job", 2)


# ---- watchers


async def test_watchers_share_connections(kept: Journal) -> None:
    """1,000 of them on 1,000 jobs, and two on each of some, hold as many connections as 10; all get all."""
    names = [f"/{number}" for number in range(1000)]
    await kept.submit(asked(*names))
    few = [asyncio.create_task(until_end(kept, name)) for name in names[:10]]
    await reading(kept, 10)
    before = await connections(kept)
    watchers = [*few, *(asyncio.create_task(until_end(kept, name)) for name in [*names[10:], *names[:20]])]
    await reading(kept, 1000)
    for first in range(0, 1000, 50):
        await asyncio.gather(
            *(kept.append(name, 1, 0, 1, b"0 of " + name.encode()) for name in names[first : first + 50])
        )
    assert await connections(kept) <= before + WRITES + READS
    for first in range(0, 1000, 50):
        await asyncio.gather(*(kept.end(name, 1, JobState.FINISHED) for name in names[first : first + 50]))
    async with asyncio.timeout(30):
        found = await asyncio.gather(*watchers)
    for name, events in zip([*names, *names[:20]], found, strict=True):
        assert events == [b"0 of " + name.encode()]
    assert not kept._watches._streams


async def test_a_slow_watcher_holds_up_nobody_and_misses_nothing(kept: Journal) -> None:
    """More comes than its tail holds: the other one has everything first, and it has everything in the end."""
    await kept.submit(asked("/job"))
    slow = kept.watch("/job", idle_s=60.0)
    taking = asyncio.create_task(anext(slow))
    await reading(kept, 1)
    quick = asyncio.create_task(until_end(kept, "/job"))
    count = 3 * HELD
    for number in range(count):
        await kept.append("/job", 1, number, number + 1, str(number).encode())
    await kept.end("/job", 1, JobState.FINISHED)
    expected = [str(number).encode() for number in range(count)]
    async with asyncio.timeout(SOON_S):
        assert await quick == expected
        found = await taking
        async for entries in slow:
            found += entries
            if found[-1].ended:
                break
    assert [entry.event for entry in found[:-1]] == expected
    await slow.aclose()


async def test_watchers_hear_at_once_that_the_journal_is_away(kept: Journal, valkey: EmbeddedValkey) -> None:
    """All of them, and they can come back when it is there again."""
    await kept.submit(asked("/a", "/b"))
    watchers = [asyncio.create_task(until_end(kept, name)) for name in ("/a", "/b", "/b")]
    await reading(kept, 2)
    valkey.stop()
    async with asyncio.timeout(SOON_S):
        for watcher in watchers:
            with pytest.raises(Unavailable):
                await watcher
    valkey.start()
    await kept.submit(asked("/a"))
    watcher = asyncio.create_task(until_end(kept, "/a"))
    await kept.append("/a", 1, 0, 1, b"again")
    await kept.end("/a", 1, JobState.FINISHED)
    async with asyncio.timeout(SOON_S):
        assert await watcher == [b"again"]


async def test_a_new_watcher_does_not_wait_for_the_read_that_runs(kept: Journal) -> None:
    """The reader blocks for seconds on other jobs; it hears of another one at once."""
    await kept.submit(asked("/silent", "/job"))
    silent = asyncio.create_task(until_end(kept, "/silent"))
    await reading(kept, 1)
    watcher = asyncio.create_task(until_end(kept, "/job"))
    await reading(kept, 2)
    async with asyncio.timeout(1.0):
        await kept.append("/job", 1, 0, 1, b"now")
        await kept.end("/job", 1, JobState.FINISHED)
        assert await watcher == [b"now"]
    silent.cancel()


async def test_control_without_the_wake_it_waits(kept: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the promptness above is the wake entry's doing."""
    await kept.submit(asked("/silent", "/job"))
    silent = asyncio.create_task(until_end(kept, "/silent"))
    await reading(kept, 1)

    async def nothing(self: Watches) -> None:
        pass

    monkeypatch.setattr(Watches, "_read_now", nothing)
    watcher = asyncio.create_task(until_end(kept, "/job"))
    await kept.append("/job", 1, 0, 1, b"now")
    done, _ = await asyncio.wait({watcher}, timeout=1.0)
    assert not done
    silent.cancel()
    watcher.cancel()


# ---- small things


def kept_url(journal: Journal) -> str:
    return f"unix://{journal._reads.client.connection_pool.connection_kwargs['path']}"


async def reading(journal: Journal, streams: int) -> None:
    """Until the one read waits for so many."""
    async with asyncio.timeout(SOON_S):
        while True:
            if len(journal._watches._streams) >= streams and journal._watches._reading:
                return
            await asyncio.sleep(0.01)
