"""The journal of jobs on a real Valkey: who may change what, and what watchers receive."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from typing import Any

import pytest

from cluster.state import stream_watches
from cluster.state.embedded_valkey import EmbeddedValkey
from cluster.state.job_journal import (
    OWN_BYTES,
    READ_CONNECTIONS,
    WRITE_CONNECTIONS,
    Asked,
    Entry,
    JobJournal,
    JobRecord,
    JobState,
    Kept,
)
from cluster.state.stream_watches import MAX_TAIL_ENTRIES, READ_BLOCK_S, StreamWatches
from services.router.preprocess.validation import MAX_N
from tandem.errors import Busy, NotFound, PreconditionFailed, TooLarge, Unavailable

SOON_S = 10.0


@pytest.fixture
async def kept(valkey: EmbeddedValkey) -> AsyncIterator[JobJournal]:
    journal = JobJournal(valkey.url, "test", lease_s=6.0, kept_s=60.0, most=2000, most_bytes=1 << 26, most_each=1500)
    yield journal
    await journal.close()


def asked(*names: str, digest: str = "d") -> list[Asked]:
    return [Asked(name, b"request of " + name.encode(), digest) for name in names]


async def connections(journal: JobJournal) -> int:
    """The number of open connections at the server, of all clients."""
    async with journal._reads.connection() as client:
        return len(await client.client_list())


async def until_end(journal: JobJournal, name: str) -> list[bytes]:
    found: list[Entry] = []
    async with aclosing(journal.watch(name, idle_s=60.0)) as pages:
        async for entries in pages:
            found += entries
            if found and found[-1].ended:
                break
    return [entry.event for entry in found[:-1]]


# ---- what is kept


async def test_an_ended_job_cannot_be_changed(kept: JobJournal) -> None:
    """Not even its owner can change it: whatever follows the end is refused, and the stream stays the same."""
    await kept.submit(asked("/job"))
    assert await kept.append("/job", 1, 0, 2, b"first") is Kept.KEPT
    assert await kept.end("/job", 1, JobState.FINISHED, b"last") is Kept.KEPT
    before = await kept.entries("/job")
    assert await kept.append("/job", 1, 2, 3, b"late") is Kept.LOST
    assert await kept.end("/job", 1, JobState.FAILED) is Kept.LOST
    assert await kept.renew([("/job", 1)]) == [Kept.LOST]
    assert await kept.entries("/job") == before
    assert (await kept.get("/job")).state is JobState.FINISHED


async def test_of_one_call_all_jobs_are_kept_or_none(kept: JobJournal) -> None:
    """If one job of a call cannot be stored, none of those before it is."""
    await kept.submit(asked("/b", digest="other"))
    with pytest.raises(PreconditionFailed) as differs:
        await kept.submit(asked("/a", "/b", "/c"))
    assert differs.value.reason == "JOB_DIFFERS"
    small = JobJournal(kept_url(kept), "test", lease_s=6.0, kept_s=60.0, most=3, most_bytes=1 << 26)
    with pytest.raises(Busy) as full:
        await small.submit(asked("/a", "/c", "/d"))
    assert (full.value.reason, full.value.retry_after) == ("JOBS_FULL", 5.0)
    assert await small.submit(asked("/a", "/b", "/c", digest="other")) == [True, False, True]
    assert await small.submit(asked("/a", "/b", "/c", digest="other")) == [False, False, False]
    await small.close()


async def test_one_id_twice_in_one_call_is_one_job(kept: JobJournal) -> None:
    """The same request twice is one job; two different requests with one id are refused before either is stored."""
    assert await kept.submit(asked("/a", "/a")) == [True, False]
    with pytest.raises(PreconditionFailed):
        await kept.submit([*asked("/b"), *asked("/b", digest="other")])
    assert await kept.submit(asked("/b")) == [True]


async def test_open_jobs_of_a_tenant_are_bounded(kept: JobJournal) -> None:
    """Ended jobs do not count, other tenants have their own bound, and names with the same prefix are different
    tenants."""
    few = JobJournal(kept_url(kept), "test", lease_s=6.0, kept_s=60.0, most=100, most_bytes=1 << 26, most_each=2)
    await few.submit(asked("ann/1", "ann/2"), "ann")
    with pytest.raises(Busy) as full:
        await few.submit(asked("ann/3"), "ann")
    assert (full.value.reason, full.value.retry_after) == ("TENANT_JOBS", 5.0)
    await few.submit(asked("anna/1", "anna/2"), "anna")
    await few.submit(asked("an/1", "an/2"), "an")
    await few.submit(asked(*(f"/{number}" for number in range(5))))  # without a tenant, as where no keys are required
    await few.end("ann/1", 1, JobState.FINISHED)
    await few.submit(asked("ann/3"), "ann")
    await few.close()


async def test_more_jobs_than_may_ever_be_open_are_not_told_to_come_back(kept: JobJournal) -> None:
    """A line of a batch would wait for them until the batch expires. Jobs that are stored already are not refused,
    and do not count with new ones in the same call."""
    few = JobJournal(kept_url(kept), "test", lease_s=6.0, kept_s=60.0, most=3, most_bytes=1 << 26, most_each=2)
    for count, tenant in ((3, "ann"), (4, "")):
        with pytest.raises(TooLarge, match=f"{count} new jobs"):
            await few.submit(asked(*(f"{tenant}/{number}" for number in range(count))), tenant)
    await few.submit(asked("ann/1", "ann/2"), "ann")
    with pytest.raises(Busy):
        await few.submit(asked("ann/3", "ann/4"), "ann")
    await kept.submit(asked("bob/1", "bob/2", "bob/3"), "bob")
    assert await few.submit(asked("bob/1", "bob/2", "bob/3"), "bob") == [False] * 3
    with pytest.raises(Busy):
        await few.submit(asked("bob/1", "bob/2", "bob/3", "bob/4"), "bob")
    await few.close()


async def test_the_open_jobs_of_a_tenant_are_bounded_in_bytes(few: JobJournal) -> None:
    """Their requests together, also where no keys are required. Ended and known jobs do not count, and other tenants
    have their own bound. The control: with a byte less there is room."""
    most = 2 * (OWN_BYTES + 1000)
    for tenant in ("ann", ""):
        large, more = Asked(f"{tenant}/1", b"x" * (most - 500), "d"), Asked(f"{tenant}/2", b"x" * 501, "d")
        await few.submit([large], tenant)
        assert await few.submit([large], tenant) == [False]
        with pytest.raises(Busy, match="max_tenant_job_mib") as full:
            await few.submit([more], tenant)
        assert (full.value.reason, full.value.retry_after) == ("TENANT_JOBS", 5.0)
        assert await few.submit([Asked(f"{tenant}/3", b"x" * 500, "d")], tenant) == [True]
        await few.submit([Asked(f"{tenant}anna/1", b"x" * most, "d")], f"{tenant}anna")
        await few.end(f"{tenant}/1", 1, JobState.FINISHED)
        assert await few.submit([more], tenant) == [True]
    with pytest.raises(TooLarge, match=f"{most + 1} bytes of new jobs"):
        await few.submit([Asked("bob/1", b"x" * most, "d"), Asked("bob/2", b"x", "d")], "bob")


async def test_open_jobs_are_found_by_the_beginning_of_their_ids(kept: JobJournal) -> None:
    """Wherever there are gaps, neither those that have ended nor those of longer or other names."""
    await kept.submit(asked("ann/b-0", "ann/b-1-1", "ann/b-1-2", "ann/b-ü", "ann/b", "ann/bb-0", "ann/b.0", "bob/b-0"))
    await kept.end("ann/b-1-1", 1, JobState.FINISHED)
    assert await kept.open_with("ann/b-") == ["ann/b-0", "ann/b-1-2", "ann/b-ü"]
    assert await kept.open_with("ann/c") == []


async def test_a_job_may_be_named_as_the_stream_of_another(kept: JobJournal) -> None:
    """An id is never the key of another job."""
    names = ["/x", "/x:events", "/events:/x", "/{x}"]
    await kept.submit(asked(*names))
    for name in names:
        assert await kept.append(name, 1, 0, 1, name.encode()) is Kept.KEPT
        assert await kept.end(name, 1, JobState.FINISHED) is Kept.KEPT
    for name in names:
        assert [entry.event for entry in await kept.entries(name)] == [name.encode(), b""]
        assert (await kept.get(name)).request == b"request of " + name.encode()


async def test_all_leases_are_renewed_at_once(kept: JobJournal, monkeypatch: pytest.MonkeyPatch) -> None:
    """600 jobs are renewed in two calls, with a result for each: a slow registry does not cost the last one its
    lease."""
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


async def test_only_an_ended_job_can_be_forgotten_before_its_time(kept: JobJournal) -> None:
    """A forgotten job leaves nothing; forgetting one that does not exist is no error."""
    await kept.submit(asked("/job"))
    await kept.append("/job", 1, 0, 1, b"first")
    assert await kept.forget("/job")
    assert await kept.entries("/job")
    await kept.end("/job", 1, JobState.FINISHED)
    assert await kept.forget("/job")
    assert not await kept.entries("/job")
    with pytest.raises(NotFound):
        await kept.get("/job")
    assert not await kept.forget("/job")


@pytest.fixture
async def few(kept: JobJournal) -> AsyncIterator[JobJournal]:
    """With room for the ended jobs of two requests of 1000 bytes."""
    most_bytes = 2 * (OWN_BYTES + 1000)
    journal = JobJournal(kept_url(kept), "test", lease_s=6.0, kept_s=60.0, most=100, most_bytes=most_bytes)
    yield journal
    await journal.close()


async def ended(journal: JobJournal, *names: str, request: int = 1000, more: bytes = b"") -> None:
    """Submits and ends jobs with a request of that many bytes; `more`: their only event."""
    for name in names:
        await journal.submit([Asked(name, b"x" * request, "d")])
        assert not more or await journal.append(name, 1, 0, 1, more) is Kept.KEPT
        assert await journal.end(name, 1, JobState.FINISHED) is Kept.KEPT


async def known(journal: JobJournal, *names: str) -> list[str]:
    """Those of the jobs that are kept; of the others no event is left."""
    found: list[str] = []
    for name in names:
        with suppress(NotFound):
            found.append((await journal.get(name)).job_id)
        assert found[-1:] == [name] or not await journal.entries(name)
    return found


async def test_ended_jobs_of_a_tenant_are_bounded_together(few: JobJournal) -> None:
    """The oldest ended jobs make room for a newer one. Jobs that have not ended and those of other tenants, whose names
    may have the same prefix, are never forgotten for it."""
    await few.submit(asked("ann/open"))
    await few.append("ann/open", 1, 0, 1, b"x" * 10_000)
    await ended(few, "anna/1", "an/1", "/1", *(f"ann/{number}" for number in range(5)))
    assert await known(few, *(f"ann/{number}" for number in range(5))) == ["ann/3", "ann/4"]
    assert await known(few, "ann/open", "anna/1", "an/1", "/1") == ["ann/open", "anna/1", "an/1", "/1"]
    assert await few.append("ann/open", 1, 1, 2, b"more") is Kept.KEPT


@pytest.mark.parametrize("where", ["request", "event", "last event", "error"])
@pytest.mark.parametrize("size", [900, 1100])
async def test_all_content_of_an_ended_job_counts(few: JobJournal, where: str, size: int) -> None:
    """Its request, its events and its error. The control: with 900 bytes there is room for it, with 1,100 there is
    none."""
    await ended(few, "ann/1")
    await few.submit([Asked("ann/2", b"x" * size if where == "request" else b"", "d")])
    if where == "event":
        await few.append("ann/2", 1, 0, 1, b"x" * (size // 2))
        await few.append("ann/2", 1, 1, 2, b"x" * (size // 2))
    event, error = b"x" * size if where == "last event" else b"", Busy("x" * (size - 100)) if where == "error" else None
    await few.end("ann/2", 1, JobState.FAILED if error else JobState.FINISHED, event, error)
    assert await known(few, "ann/1", "ann/2") == (["ann/1", "ann/2"] if size < 1000 else ["ann/2"])


async def test_the_job_that_ended_last_is_kept_whatever_its_size(few: JobJournal) -> None:
    """Its watchers get its end; the next job that ends takes its room."""
    await few.submit(asked("ann/large"))
    watcher = asyncio.create_task(until_end(few, "ann/large"))
    await reading(few, 1)
    await few.append("ann/large", 1, 0, 1, b"x" * 20_000)
    await few.end("ann/large", 1, JobState.FINISHED, b"last")
    async with asyncio.timeout(SOON_S):
        assert await watcher == [b"x" * 20_000, b"last"]
    await ended(few, "ann/next")
    assert await known(few, "ann/large", "ann/next") == ["ann/next"]


async def test_a_job_that_is_forgotten_frees_its_room(few: JobJournal) -> None:
    """Batches remove the jobs of their lines, which then count no more."""
    await ended(few, "ann/1", "ann/2")
    assert await few.forget("ann/2")
    await ended(few, "ann/3")
    assert await known(few, "ann/1", "ann/3") == ["ann/1", "ann/3"]


async def test_an_expired_job_that_was_submitted_again_stays(few: JobJournal) -> None:
    """A name may be used again after job_kept_s: the job of that name which has not ended is not taken for the expired
    one when room is needed, and counts once when it ends."""
    brief = JobJournal(kept_url(few), "test", lease_s=6.0, kept_s=0.5, most=100, most_bytes=1 << 26)
    await ended(brief, "ann/again")
    await ended(few, "ann/0")
    await asyncio.sleep(0.6)
    await few.submit(asked("ann/again"))
    await ended(few, "ann/1", "ann/2", "ann/3")
    assert (await few.get("ann/again")).state is JobState.OPEN
    await few.end("ann/again", 1, JobState.FINISHED)
    assert await known(few, "ann/2", "ann/3", "ann/again") == ["ann/3", "ann/again"]
    await brief.close()


async def test_the_bytes_of_ended_jobs_are_those_of_the_kept_ones(kept: JobJournal) -> None:
    """Neither those of expired jobs count, nor those of jobs that were removed. What is known of them expires with the
    last one."""
    brief = JobJournal(kept_url(kept), "test", lease_s=6.0, kept_s=0.5, most=100, most_bytes=1 << 26)
    await ended(brief, "ann/brief")
    await ended(kept, "ann/1", request=900)
    await asyncio.sleep(0.6)
    await ended(kept, "ann/2", request=900)
    await kept.forget("ann/2")
    index, sizes = kept._ended("ann/")[2:]
    async with kept._reads.connection() as client:
        assert await client.zrange(index, 0, -1) == [b"ann/1"]
        assert await client.hgetall(sizes) == dict.fromkeys([b"", b"ann/1"], b"%d" % (OWN_BYTES + 900))
        assert all([30_000 < await client.pttl(key) <= 60_000 for key in (index, sizes)])
    await brief.close()


async def test_a_released_job_can_be_claimed_at_once(kept: JobJournal) -> None:
    """A released job is claimed without waiting for its lease to expire."""
    await kept.submit(asked("/job"))
    assert await kept.claim() is None
    await kept.release([("/job", 1)])
    record = await kept.claim()
    assert record is not None
    assert (record.job_id, record.generation) == ("/job", 2)


async def test_a_job_whose_lease_has_ended_stays_its_owners_until_another_claims_it(
    kept: JobJournal, valkey: EmbeddedValkey
) -> None:
    """A router that was stopped for longer than a lease continues its jobs if no other router claimed them; after a
    claim it can change nothing of them."""
    late = JobJournal(valkey.url, "test", lease_s=0.0, kept_s=60.0, most=2000, most_bytes=1 << 26, most_each=1500)
    await late.submit(asked("/job"))
    assert await late.append("/job", 1, 0, 1, b"one") is Kept.KEPT
    assert await kept.renew([("/job", 1)]) == [Kept.KEPT]
    assert await kept.claim() is None, "renewed, it is not free"
    assert await late.renew([("/job", 1)]) == [Kept.KEPT]
    record = await kept.claim()
    assert record is not None
    assert (record.generation, record.tokens) == (2, 1)
    assert await late.renew([("/job", 1)]) == [Kept.LOST]
    assert await late.append("/job", 1, 1, 2, b"late") is Kept.LOST
    assert await late.end("/job", 1, JobState.FINISHED) is Kept.LOST
    assert await kept.append("/job", 2, 1, 2, b"two") is Kept.KEPT
    assert [entry.event for entry in await kept.entries("/job")] == [b"one", b"two"]
    await late.close()


async def test_a_lease_from_a_clock_that_was_ahead_lasts_no_longer(kept: JobJournal, valkey: EmbeddedValkey) -> None:
    """After the server's clock was set back, or a server whose clock is behind took over, a living owner renews its
    leases, and the jobs of a dead router are claimed after one more lease."""
    other = JobJournal(valkey.url, "test", lease_s=0.4, kept_s=60.0, most=2000, most_bytes=1 << 26)
    await kept.submit(asked("/dead", "/owned"))
    async with kept._reads.connection() as client:
        for name in ("/dead", "/owned"):
            await client.zincrby(kept._open[0], 600_000, name)
    assert await other.claim() is None, "its owner may live"
    assert await kept.renew([("/owned", 1)]) == [Kept.KEPT]
    await asyncio.sleep(1.5 * other.lease_s)
    record = await other.claim()
    assert record is not None
    assert (record.job_id, record.generation) == ("/dead", 2)
    await other.close()


async def test_each_completion_of_a_job_has_its_own_place(kept: JobJournal) -> None:
    """The tokens of each completion are stored at its own next position; the record counts them all."""
    await kept.submit(asked("/job"))
    assert await kept.append("/job", 1, 0, 2, b"a") is Kept.KEPT
    assert await kept.append("/job", 1, 0, 3, b"b", choice=1) is Kept.KEPT
    assert await kept.append("/job", 1, 0, 4, b"c", choice=2) is Kept.KEPT
    assert await kept.append("/job", 1, 2, 2, b"a has ended") is Kept.KEPT
    assert await kept.append("/job", 1, 1, 4, b"late") is Kept.GAP
    assert await kept.append("/job", 1, 2, 4, b"late", choice=1) is Kept.GAP
    assert await kept.append("/job", 2, 2, 4, b"not its owner") is Kept.LOST
    record = await kept.get("/job")
    assert record == JobRecord("/job", b"request of /job", JobState.OPEN, 1, 9, None)
    assert [entry.event for entry in await kept.entries("/job")] == [b"a", b"b", b"c", b"a has ended"]


async def test_the_status_of_a_job_is_all_that_is_kept_of_it_but_the_request(kept: JobJournal) -> None:
    """With the tokens of as many completions as a job may have, and its error."""
    await kept.submit(asked("/job"))
    for choice in range(MAX_N):
        await kept.append("/job", 1, 0, 2, b"", choice)
    await kept.end("/job", 1, JobState.FAILED, error=Busy("too much"))
    record = await kept.get("/job")
    assert (record.request, record.tokens) == (b"request of /job", 2 * MAX_N)
    status = await kept.status("/job")
    assert (status.request, status.state, status.generation, status.tokens) == (b"", JobState.FAILED, 1, 2 * MAX_N)
    assert isinstance(status.error, Busy)
    with pytest.raises(NotFound):
        await kept.status("/another")


async def test_the_error_of_a_job_is_kept_whole(kept: JobJournal) -> None:
    """A later reader gets the same class and reason."""
    await kept.submit(asked("/job"))
    error = Busy("no room", reason="TENANT_TOKENS", field="text", bound="less", retry_after=1.5)
    assert await kept.end("/job", 1, JobState.FAILED, error=error) is Kept.KEPT
    record = await kept.get("/job")
    assert record.state is JobState.FAILED
    assert type(record.error) is Busy
    assert {**vars(record.error)} == {**vars(error)}
    assert [(entry.event, entry.ended) for entry in await kept.entries("/job")] == [(b"", JobState.FAILED)]


async def test_whose_job_is_cancelled_hears_of_it(kept: JobJournal) -> None:
    """The owner sees the cancellation when it stores its next token. A job that has ended stays the same, and an
    unknown one is not found."""
    await kept.submit(asked("/job", "/over"))
    await kept.end("/over", 1, JobState.FINISHED)
    async with kept._reads.connection() as client:
        assert 30_000 < await client.pttl(kept._job("/over")) <= 60_000, "it can be asked for as long as is said"
    for name in ("/job", "/over"):
        await kept.cancel(name)
    assert await kept.append("/job", 1, 0, 1, b"late") is Kept.CANCELLED
    assert (await kept.get("/over")).state is JobState.FINISHED
    for call in (kept.cancel, kept.get):
        with pytest.raises(NotFound) as unknown:
            await call("/nobody's")
        assert (unknown.value.reason, unknown.value.field) == ("NO_SUCH_JOB", "job_id")


async def test_an_ended_job_is_forgotten_after_a_while(kept: JobJournal) -> None:
    """Its stream expires as well. An open job whose record has expired cannot be claimed."""
    brief = JobJournal(kept_url(kept), "test", lease_s=6.0, kept_s=0.05, most=3, most_bytes=1 << 26)
    await brief.submit(asked("/job", "/gone", "/left"))
    await brief.append("/job", 1, 0, 1, b"first")
    await brief.end("/job", 1, JobState.FINISHED)
    async with asyncio.timeout(SOON_S):
        while True:
            if not await brief.entries("/job"):
                break
            await asyncio.sleep(0.01)
    with pytest.raises(NotFound):
        await brief.get("/job")
    async with brief._writes.connection() as client:
        await client.delete(brief._job("/gone"))
    await brief.release([("/left", 1)])
    async with brief._writes.connection() as client:
        await client.zadd(brief._open[0], {"/gone": 0})
    record = await brief.claim()
    assert record is not None
    assert (record.job_id, record.generation) == ("/left", 2)
    assert await brief.submit(asked("/a", "/b")) == [True, True], "neither is open any more"
    await brief.close()


async def test_a_full_server_keeps_continues_and_ends_jobs_and_stores_no_new_ones(kept: JobJournal) -> None:
    """Open jobs may fill it. They go on, are watched, claimed, cancelled and ended, which frees memory; the control is
    a new job, which is refused."""
    await kept.submit(asked("/runs", "/waits", "/runs:none"))
    async with kept._writes.connection() as client:
        await client.config_set("maxmemory", 1)
    with pytest.raises(Unavailable, match="maxmemory") as full:
        await kept.submit(asked("/new"))
    assert full.value.reason == "REGISTRY_FULL", "it answers, so those who have begun something wait"
    watchers = [asyncio.create_task(until_end(kept, "/runs"))]
    await reading(kept, 1)
    watchers.append(asyncio.create_task(until_end(kept, "/waits")))
    await reading(kept, 2)
    assert await kept.renew([("/runs", 1)]) == [Kept.KEPT]
    assert await kept.append("/runs", 1, 0, 1, b"token") is Kept.KEPT
    assert await kept.end("/runs", 1, JobState.FINISHED, b"last") is Kept.KEPT
    await kept.cancel("/waits")
    await kept.release([("/waits", 1)])
    record = await kept.claim()
    assert record is not None
    assert record.job_id == "/waits"
    assert await kept.append("/waits", 2, 0, 1, b"token") is Kept.CANCELLED
    assert await kept.end("/waits", 2, JobState.CANCELLED) is Kept.KEPT
    async with asyncio.timeout(SOON_S):
        assert await asyncio.gather(*watchers) == [[b"token", b"last"], []]
    assert (await kept.get("/runs:none")).state is JobState.OPEN, "no job is removed for it"


async def test_a_job_that_no_router_continues_is_forgotten(kept: JobJournal) -> None:
    """As after an upgrade to another model, whose cluster has another name: it expires, with its tokens, when no router
    could have been running it for as long as ended jobs are kept."""
    await kept.submit(asked("/job", "/new"), timeout_s=100.0)
    await kept.append("/job", 1, 0, 1, b"token")
    async with kept._writes.connection() as client:
        left = {key: await client.pttl(key) for key in await client.keys("*")}
    assert {key for key, ms in left.items() if ms < 0} == {key.encode() for key in kept._open}
    assert {ms for ms in left.values() if ms > 0 and not 100_000 < ms <= 160_000} == set()
    assert len(left) == 5


# ---- watchers


async def test_who_watches_a_silent_job_hears_that_it_is_silent(kept: JobJournal) -> None:
    """A watcher of a silent job is woken after each interval that it names, once it has what was stored before, so that
    it can check whether its client is still there."""
    await kept.submit(asked("/job"))
    for number in range(3):
        await kept.append("/job", 1, number, number + 1, b"before")
    async with aclosing(kept.watch("/job", idle_s=0.01)) as pages, asyncio.timeout(SOON_S):
        assert [len(await anext(pages)) for _ in range(3)] == [3, 0, 0]
        await kept.append("/job", 1, 3, 4, b"at last")
        while not (found := await anext(pages)):
            pass
        assert [entry.event for entry in found] == [b"at last"]


async def test_a_watcher_that_waits_keeps_nothing_of_what_came(kept: JobJournal) -> None:
    """A thousand may wait, and an entry may be megabytes."""
    await kept.submit(asked("/job"))
    async with aclosing(kept.watch("/job", idle_s=60.0)) as pages, asyncio.timeout(SOON_S):
        first = asyncio.create_task(anext(pages))
        await reading(kept, 1)
        await kept.append("/job", 1, 0, 1, b"event")
        page = await first
        before = sys.getrefcount(page)
        more = asyncio.create_task(anext(pages))
        await asyncio.sleep(0)
        while_it_waits = sys.getrefcount(page)
        more.cancel()
        await asyncio.wait({more})
    assert while_it_waits < before


async def test_watchers_share_connections(kept: JobJournal) -> None:
    """1,000 watchers of 1,000 jobs, with two on some, use as many connections as 10 watchers, and all get all
    entries."""
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
    assert await connections(kept) <= before + WRITE_CONNECTIONS + READ_CONNECTIONS
    for first in range(0, 1000, 50):
        await asyncio.gather(*(kept.end(name, 1, JobState.FINISHED) for name in names[first : first + 50]))
    async with asyncio.timeout(30):
        found = await asyncio.gather(*watchers)
    for name, events in zip([*names, *names[:20]], found, strict=True):
        assert events == [b"0 of " + name.encode()]
    assert not kept._watches._streams


async def test_a_slow_watcher_holds_up_nobody_and_misses_nothing(kept: JobJournal) -> None:
    """When more entries arrive than a slow watcher's buffer holds, the other watcher gets them first, and the slow one
    gets all of them in the end."""
    await kept.submit(asked("/job"))
    slow = kept.watch("/job", idle_s=60.0)
    taking = asyncio.create_task(anext(slow))
    await reading(kept, 1)
    quick = asyncio.create_task(until_end(kept, "/job"))
    count = 3 * MAX_TAIL_ENTRIES
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


async def test_a_watcher_that_catches_up_gets_nothing_twice(kept: JobJournal, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watcher that got several entries at once and fell behind continues after the last of them."""
    monkeypatch.setattr(stream_watches, "MAX_TAIL_ENTRIES", 4)
    await kept.submit(asked("/job"))
    async with aclosing(kept.watch("/job", idle_s=0.01)) as pages, asyncio.timeout(SOON_S):
        assert await anext(pages) == []
        ((tail,),) = [stream.tails for stream in kept._watches._streams.values()]
        for number in range(3):
            await kept.append("/job", 1, number, number + 1, str(number).encode())
        await until(lambda: len(tail._entries) == 3)
        found = await anext(pages)
        for number in range(3, 10):
            await kept.append("/job", 1, number, number + 1, str(number).encode())
        await until(lambda: tail.behind)
        while len(found) < 10:
            found += await anext(pages)
        assert [entry.event for entry in found] == [str(number).encode() for number in range(10)]
        assert await anext(pages) == []


async def test_those_who_watch_hear_why_their_router_leaves(kept: JobJournal) -> None:
    """Otherwise they would wait for a router that has left."""
    await kept.submit(asked("/job"))
    watcher = asyncio.create_task(until_end(kept, "/job"))
    await reading(kept, 1)
    kept.end_watches(Unavailable("leaving", reason="DRAINING"))
    with pytest.raises(Unavailable, match="leaving"):
        async with asyncio.timeout(SOON_S):
            await watcher


async def test_watchers_hear_at_once_that_the_journal_is_away(kept: JobJournal, valkey: EmbeddedValkey) -> None:
    """All watchers get the error at once, and can watch again when the journal is back."""
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


async def test_a_new_watcher_does_not_wait_for_the_read_that_runs(kept: JobJournal) -> None:
    """A new watcher does not wait for the blocking read on other jobs, which takes seconds."""
    await kept.submit(asked("/silent", "/job"))
    silent = asyncio.create_task(until_end(kept, "/silent"))
    await reading(kept, 1)
    watcher = asyncio.create_task(until_end(kept, "/job"))
    await reading(kept, 2)
    async with asyncio.timeout(0.8 * READ_BLOCK_S):
        await kept.append("/job", 1, 0, 1, b"now")
        await kept.end("/job", 1, JobState.FINISHED)
        assert await watcher == [b"now"]
    silent.cancel()


async def test_a_wake_is_heard_after_a_restart_with_a_clock_that_is_behind(
    kept: JobJournal, valkey: EmbeddedValkey
) -> None:
    """Its id is earlier than that of the last wake before the restart."""
    await kept.submit(asked("/before"))
    before = asyncio.create_task(until_end(kept, "/before"))
    await reading(kept, 1)
    kept._watches._woken = f"{2**48}-0"  # the server's clock was far ahead
    valkey.stop()
    with pytest.raises(Unavailable):
        await before
    valkey.start()
    await test_a_new_watcher_does_not_wait_for_the_read_that_runs(kept)


async def test_control_without_the_wake_it_waits(kept: JobJournal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: the wake entry ends the running read above."""
    await kept.submit(asked("/silent", "/job"))
    silent = asyncio.create_task(until_end(kept, "/silent"))
    await reading(kept, 1)

    async def nothing(self: StreamWatches) -> None:
        pass

    monkeypatch.setattr(StreamWatches, "_read_now", nothing)
    watcher = asyncio.create_task(until_end(kept, "/job"))
    await kept.append("/job", 1, 0, 1, b"now")
    done, _ = await asyncio.wait({watcher}, timeout=1.0)
    assert not done
    silent.cancel()
    watcher.cancel()


# ---- small things


def kept_url(journal: JobJournal) -> str:
    return f"unix://{journal._reads.client.connection_pool.connection_kwargs['path']}"


async def reading(journal: JobJournal, streams: int) -> None:
    """Waits until the single blocking read waits for that many streams."""
    watches = journal._watches
    await until(lambda: len(watches._streams) >= streams and watches._reading)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SOON_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)
