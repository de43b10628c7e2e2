"""The registry on a real Valkey: records are read as written, expire, wake followers, and fail with errors of the
tree."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace
from time import time
from typing import Any

import pytest
import redis.asyncio as redis
from structlog.testing import capture_logs

from cluster.state import heartbeat as heartbeats
from cluster.state import redis_store
from cluster.state.embedded_valkey import EmbeddedValkey
from cluster.state.heartbeat import Heartbeat
from cluster.state.registry import SCALING_TTL_S, RecordReader, Registry, State, WorkerRecord
from services.worker_liveness import WorkerLiveness
from tandem.errors import PreconditionFailed, Unavailable
from tandem.tasks import end

RECORD = WorkerRecord("decode-0", "decode", State.READY, pid=1, incarnation="a1", address="127.0.0.1:5")
RECORD_JSON = json.dumps(asdict(RECORD))
SOON_S = 30.0


async def workers_once(registry: Registry, wanted: int) -> list[WorkerRecord]:
    """The workers as soon as there are that many, checked after every change."""
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
    """Every field is kept, and the heartbeat has the time."""
    await registry.beat(RECORD)
    [found] = await registry.workers()
    assert replace(found, beat=0.0) == RECORD
    assert time() - found.beat < SOON_S


def test_what_a_record_does_not_say_is_not_known() -> None:
    """Fields that a worker of an older version does not write are unknown: rates, bytes of a token, load."""
    needed = ("worker_id", "role", "state", "pid", "incarnation", "address")
    text = json.dumps({name: value for name, value in asdict(RECORD).items() if name in needed})
    found = WorkerRecord.parse(text)
    assert replace(found, beat=RECORD.beat) == RECORD
    assert (found.step_s, found.kv_token_bytes, found.running, found.waiting) == (0.0, 0.0, 0, 0)


UNREADABLE = {
    "no JSON": RECORD_JSON[:-1],
    "no object": "[]",
    "a field that is missing": '{"worker_id": "decode-9"}',
    "a field of another type": RECORD_JSON.replace('"running": 0', '"running": null'),
    "no text": b"\xff\xfe",
}


@pytest.mark.parametrize("value", UNREADABLE.values(), ids=UNREADABLE)
async def test_a_record_that_cannot_be_read_hides_no_other_worker(
    registry: Registry, valkey: EmbeddedValkey, value: str | bytes
) -> None:
    """During an upgrade some workers write records that older processes cannot read. A view keeps the others, and
    follows later changes."""
    view = WorkerLiveness(registry, refresh_s=5.0)
    async with redis.Redis.from_url(valkey.url) as others, asyncio.timeout(SOON_S):
        await registry.beat(RECORD)
        await view.start()
        with capture_logs() as logs:
            await registry.beat(replace(RECORD, worker_id="decode-9"))
            raw = value if isinstance(value, bytes) else value.encode()
            await others.hset("tandem:{test}:workers", "decode-9", b"a1 0.0 " + raw)
            await view.refresh()
            async for workers in view.updates():
                await registry.beat(replace(RECORD, worker_id="decode-1"), announce=True)
                if set(workers) == {"decode-0", "decode-1"}:
                    break
    assert {entry["worker"] for entry in logs if entry["event"] == "registry.unreadable_record"} == {"decode-9"}
    await view.stop()


async def test_a_worker_that_stops_beating_is_forgotten(valkey: EmbeddedValkey, registry: Registry) -> None:
    """A dead worker's record vanishes by itself after the ttl."""
    await registry.beat(RECORD)
    assert len(await registry.workers()) == 1
    short = Registry(valkey.url, "test", ttl_s=0.2)
    await short.beat(RECORD)  # its last beat
    assert await workers_once(registry, 0) == []
    await short.close()


@pytest.mark.parametrize("writes", [False, True])
async def test_a_record_from_a_clock_that_was_ahead_expires_as_others_do(
    valkey: EmbeddedValkey, registry: Registry, writes: bool
) -> None:
    """After the server's clock was set back, or a server whose clock is behind took over, no worker is alive in the
    future: a dead one's record expires after its ttl, whether workers write first or a reader reads. A living one's
    stays."""
    short = Registry(valkey.url, "test", ttl_s=2.0)
    await short.beat(RECORD)  # its last beat
    beats, version = registry._keys[1], registry._keys[3]
    async with registry._store.connection() as client:
        await client.zincrby(beats, 600_000, "decode-0")
        await client.hincrby(version, "clock", 600_000)
    other = replace(RECORD, worker_id="decode-1", incarnation="c3")
    if writes:
        await registry.beat(other)
    found = (await short.changes_since()).records.get("decode-0")
    assert found is None or found.beat <= time()
    await registry.beat(other)
    assert [one.worker_id for one in await workers_once(registry, 1)] == ["decode-1"]
    await short.close()


async def test_a_heartbeat_outlives_the_ttl_and_withdraws_at_the_end(valkey: EmbeddedValkey) -> None:
    """A record is kept while its worker beats, and gone at once when it stops."""
    registry = Registry(valkey.url, "test", ttl_s=3.0)
    heartbeat = Heartbeat(registry, lambda: RECORD, interval_s=0.05)
    await heartbeat.start()
    first = (await registry.workers())[0].beat
    async with asyncio.timeout(SOON_S):
        async for _ in registry.changes(every_s=0.05):
            [found] = await registry.workers()  # never absent in between
            if found.beat > first + 1.2 * registry.ttl_s:
                break
    await heartbeat.stop()
    assert await registry.workers() == []
    await registry.close()


async def test_a_full_server_takes_what_workers_and_supervisors_write(registry: Registry) -> None:
    """Jobs and files may fill it: workers start and leave nevertheless, and pools change their sizes. The control is
    another write, which is refused."""
    async with registry._store.connection() as client:
        await client.config_set("maxmemory", 1)
    with pytest.raises(Unavailable, match="maxmemory"):
        await registry.run("other", "return redis.call('SET', KEYS[1], 1)", [])
    assert await registry.workers() == []
    assert await registry.beat(RECORD)
    assert [one.worker_id for one in await registry.workers()] == ["decode-0"]
    assert await registry.withdraw(RECORD.worker_id, RECORD.incarnation)
    await registry.keep_wanted({"decode": 1})
    await registry.set_wanted({"prefill": 2})
    assert await registry.wanted() == {"decode": 1, "prefill": 2}
    await registry.publish_scaling("{}")
    assert (await registry.acquire_lease("one/h:1/x", "one"))[0] == "one/h:1/x"


async def test_wanted_sizes_come_back(registry: Registry) -> None:
    """A role that is set again is replaced, and others stay."""
    await registry.set_wanted({"decode": 2, "prefill": 1})
    await registry.set_wanted({"decode": 3})
    assert await registry.wanted() == {"decode": 3, "prefill": 1}
    await registry.keep_wanted({"decode": 7, "router": 2})  # what has a size keeps it
    assert await registry.wanted() == {"decode": 3, "prefill": 1, "router": 2}


async def test_the_autoscalers_verdicts_come_back_and_expire(registry: Registry, valkey: EmbeddedValkey) -> None:
    """The decisions of an autoscaler that has ended expire at the server."""
    assert await registry.scaling() is None
    await registry.publish_scaling("prefill 2: 3 wait")
    assert await registry.scaling() == "prefill 2: 3 wait"
    async with redis.Redis.from_url(valkey.url) as client:
        [key] = [key async for key in client.scan_iter("*autoscale*")]
        assert 0 < await client.pttl(key) <= SCALING_TTL_S * 1000


async def test_many_records_are_read_some_at_a_time(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are parsed in slices, because the reader relays tokens on the same event loop. In the control, with a
    larger slice, nothing runs in between."""
    for number in range(9):
        await registry.beat(replace(RECORD, worker_id=f"decode-{number}"))
    turns, seen = 0, set[int]()
    read = RecordReader.read

    def counted(self: RecordReader, name: bytes, value: bytes, beat: float) -> WorkerRecord | None:
        seen.add(turns)
        return read(self, name, value, beat)

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(RecordReader, "read", counted)
    task = asyncio.create_task(others())
    try:
        for size, parts in ((3, 3), (100, 1)):
            monkeypatch.setattr("cluster.state.registry.RECORDS_PER_SLICE", size)
            seen.clear()
            assert len(await registry.workers()) == 9
            assert len(seen) == parts
    finally:
        await end(task)


async def test_a_change_wakes_those_who_wait(registry: Registry) -> None:
    """An announced change arrives long before the refresh interval."""
    changes = registry.changes(every_s=60.0)
    async with asyncio.timeout(SOON_S):
        await anext(changes)  # at once
        await anext(changes)  # subscribed
        waiting = asyncio.create_task(anext(changes))
        await registry.set_wanted({"decode": 2})
        await waiting
    await changes.aclose()


async def test_clusters_on_one_server_do_not_see_each_other(valkey: EmbeddedValkey, registry: Registry) -> None:
    """The cluster's name is part of every key."""
    other = Registry(valkey.url, "other", ttl_s=5.0)
    await registry.beat(RECORD)
    await registry.set_wanted({"decode": 1})
    assert await other.workers() == []
    assert await other.wanted() == {}
    await other.close()


async def test_a_stopped_server_is_unavailable_and_a_restarted_one_is_used_again(
    valkey: EmbeddedValkey, registry: Registry
) -> None:
    """A lost registry raises Unavailable, and works again when it is back, without a new connection by the caller."""
    await registry.beat(RECORD)
    valkey.stop()
    with pytest.raises(Unavailable, match="registry"):
        await registry.workers()
    valkey.start()
    assert await workers_once(registry, 0) == []  # nothing was kept on disk
    await registry.beat(RECORD)
    assert len(await registry.workers()) == 1


async def test_a_heartbeat_survives_a_restart_of_the_server(valkey: EmbeddedValkey, registry: Registry) -> None:
    """Workers write their records into an empty registry again."""
    heartbeat = Heartbeat(registry, lambda: RECORD, interval_s=0.05)
    await heartbeat.start()
    valkey.stop()
    valkey.start()
    assert len(await workers_once(registry, 1)) == 1
    await heartbeat.stop()


@pytest.mark.parametrize("patient", [True, False], ids=["patient", "control"])
async def test_a_heartbeat_begins_while_the_server_is_away(
    valkey: EmbeddedValkey, registry: Registry, monkeypatch: pytest.MonkeyPatch, patient: bool
) -> None:
    """A worker that has loaded tolerates a short absence of the registry. The control does not try again."""
    monkeypatch.setattr(heartbeats, "START_S", SOON_S if patient else 0.0)
    beat, failed = registry.beat, asyncio.Event()

    async def noted(*given: Any, **named: Any) -> bool:
        try:
            return await beat(*given, **named)
        except Unavailable:
            failed.set()
            raise

    monkeypatch.setattr(registry, "beat", noted)
    valkey.stop()
    first = Heartbeat(registry, lambda: RECORD, interval_s=0.05)
    starting = asyncio.create_task(first.start())
    async with asyncio.timeout(SOON_S):
        await failed.wait()
    valkey.start()
    if patient:
        await starting
        assert len(await registry.workers()) == 1
        await first.stop()
    else:
        with pytest.raises(Unavailable, match="registry"):
            await starting


async def test_a_heartbeat_stops_while_the_server_is_away(valkey: EmbeddedValkey, registry: Registry) -> None:
    """A worker's end never waits for a registry that does not answer: the client library may lose a cancellation."""
    valkey.stop()
    for _ in range(20):
        beating = asyncio.create_task(Heartbeat(registry, lambda: RECORD, interval_s=0.0)._run())
        await asyncio.sleep(0)
        beating.cancel()
        done, _ = await asyncio.wait({beating}, timeout=SOON_S)
        assert done


async def test_changes_survive_a_restart_of_the_server(valkey: EmbeddedValkey, registry: Registry) -> None:
    """A follower is still woken after the server was away."""
    changes = registry.changes(every_s=0.1)
    async with asyncio.timeout(SOON_S):
        await anext(changes)
        await anext(changes)
        valkey.stop()
        await anext(changes)
        valkey.start()
        await registry.set_wanted({"decode": 4})
        while await registry.wanted() != {"decode": 4}:
            await anext(changes)
    await changes.aclose()


# ---- whose record it is


async def test_changes_go_on_where_a_server_accepts_and_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that accepts connections and answers nothing, such as one whose host hangs, ends no reader: it is told
    to look again, so that it notices the loss, and connects again."""
    monkeypatch.setattr(redis_store, "CALL_TIMEOUT_S", 0.1)
    connected = 0

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connected
        connected += 1
        await reader.read()
        writer.close()

    server = await asyncio.start_server(mute, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    registry = Registry(f"redis://:secret@127.0.0.1:{port}", "test", ttl_s=60.0)
    async with asyncio.timeout(SOON_S):
        yields = 0
        async for _ in registry.changes(every_s=0.1):
            yields += 1
            if yields == 4:
                break
    assert connected >= 2
    await registry.close()
    server.close()


async def test_a_life_withdraws_its_own_record_only(registry: Registry) -> None:
    """The end of one incarnation never removes the record of another one with the same id."""
    await registry.beat(RECORD)
    assert not await registry.withdraw("decode-0", "b2")
    assert [one.incarnation for one in await registry.workers()] == ["a1"]
    assert await registry.withdraw("decode-0", "a1")
    assert await registry.workers() == []


async def test_of_two_lives_with_one_id_the_later_one_is_found(registry: Registry) -> None:
    """The record does not alternate between two incarnations, and the earlier one is found again when the later one
    ends."""
    older, newer = RECORD, replace(RECORD, incarnation="b2", address="127.0.0.1:6")
    assert await registry.beat(older, born=1.0)
    assert await registry.beat(newer, born=2.0)
    for _ in range(3):
        assert not await registry.beat(older, born=1.0)
        assert await registry.beat(newer, born=2.0)
        assert [one.incarnation for one in await registry.workers()] == ["b2"]
    await registry.withdraw("decode-0", "b2")
    assert await registry.beat(older, born=1.0)
    assert [one.incarnation for one in await registry.workers()] == ["a1"]


async def test_a_worker_does_not_start_behind_a_later_life_of_its_id(registry: Registry) -> None:
    """The error names the setting that two clusters share by mistake; the end of the refused heartbeat keeps the other
    record."""
    late = Heartbeat(registry, lambda: RECORD, interval_s=60.0)
    early = Heartbeat(registry, lambda: replace(RECORD, incarnation="b2"), interval_s=60.0)
    early._born = late._born - 1.0
    await late.start()
    with pytest.raises(PreconditionFailed) as refused:
        await early.start()
    assert (refused.value.reason, refused.value.field) == ("SUPERSEDED", "cluster")
    await early.stop()
    assert [one.incarnation for one in await registry.workers()] == ["a1"]
    await late.stop()
    assert await registry.workers() == []


# ---- what is reported to a reader


async def test_a_reader_is_told_what_has_changed_and_no_more(registry: Registry) -> None:
    """A heartbeat without a change is not reported; a change, a removal and an expiry are, once to each reader."""
    other = replace(RECORD, worker_id="decode-1", incarnation="c3")
    await registry.beat(RECORD)
    await registry.beat(other)
    first = await registry.changes_since()
    assert first.full
    assert set(first.records) == {"decode-0", "decode-1"}
    await registry.beat(RECORD)
    assert (await registry.changes_since(first.mark)).records == {}
    await registry.beat(replace(RECORD, running=1))
    second = await registry.changes_since(first.mark)
    assert not second.full
    assert {name: one and one.running for name, one in second.records.items()} == {"decode-0": 1}
    await registry.withdraw("decode-1", "c3")
    third = await registry.changes_since(second.mark)
    assert third.records == {"decode-1": None}
    assert (await registry.changes_since(third.mark)).records == {}
    assert set((await registry.changes_since(first.mark)).records) == {"decode-0", "decode-1"}


async def test_a_reader_hears_of_an_expired_record(valkey: EmbeddedValkey, registry: Registry) -> None:
    """A worker that stops beating is told as gone, to readers who know it."""
    await registry.beat(RECORD)
    mark = (await registry.changes_since()).mark
    short = Registry(valkey.url, "test", ttl_s=0.1)
    await short.beat(RECORD)  # its last beat
    await workers_once(registry, 0)
    assert (await registry.changes_since(mark)).records == {"decode-0": None}
    await short.close()


async def test_a_registry_that_lost_everything_tells_everything(registry: Registry) -> None:
    """Version numbers of an earlier content do not count: a reader with an old version gets all records."""
    await registry.beat(RECORD)
    await registry.beat(replace(RECORD, running=1))
    mark = (await registry.changes_since()).mark
    await registry._store.client.flushall()
    await registry.beat(replace(RECORD, worker_id="decode-7"))
    found = await registry.changes_since(mark)
    assert found.full
    assert set(found.records) == {"decode-7"}


async def test_control_a_server_that_lost_a_change_hides_the_next_one(registry: Registry) -> None:
    """Control: numbers alone do not show that a server took over without the last changes, so readers must read all
    records at times."""
    other = replace(RECORD, worker_id="decode-1", incarnation="c3")
    await registry.beat(RECORD)
    await registry.beat(other)
    mark = (await registry.changes_since()).mark
    await registry._store.client.hincrby(registry._keys[3], "number", -1)  # as a replica without the last change
    await registry.withdraw("decode-1", "c3")
    found = await registry.changes_since(mark)
    assert (found.full, found.records) == (False, {})
    assert set((await registry.changes_since()).records) == {"decode-0"}


async def test_ids_that_never_come_back_are_forgotten(registry: Registry) -> None:
    """Each pod has a new id: the entries of removed ones are bounded, and no reader misses a removal."""
    await registry.beat(RECORD)
    await registry.beat(replace(RECORD, worker_id="pod-x"))
    mark = (await registry.changes_since()).mark
    await registry.withdraw("pod-x", "a1")
    for number in range(1100):
        await registry.beat(replace(RECORD, worker_id=f"pod-{number}"))
        await registry.withdraw(f"pod-{number}", "a1")
    assert await registry._store.client.zcard(registry._keys[2]) <= 1002
    found = await registry.changes_since(mark)
    assert found.full
    assert set(found.records) == {"decode-0"}


async def test_a_record_of_a_newer_version_keeps_nobody_from_the_others(registry: Registry) -> None:
    """A worker with an unknown state gets no new requests; a record that cannot be read is skipped."""
    await registry.beat(RECORD)
    await registry.beat(replace(RECORD, worker_id="new", state="resting"))  # type: ignore[arg-type]
    await registry._store.client.hset(registry._keys[0], "broken", "x 0.0 {")
    found = {one.worker_id: one.state for one in await registry.workers()}
    assert found == {"decode-0": State.READY, "new": State.DRAINING}


RUNNING = replace(RECORD, sum_order="tile32", running=3, blocks_held=7, step_s=0.25, begun=9)
AS_STORED = b"a1 0.0 " + RECORD.text().encode()
LATER = {
    "other load": RUNNING.text(),
    "another state": replace(RUNNING, state=State.DRAINING).text(),
    "another life": replace(RUNNING, incarnation="b2", address="127.0.0.1:6").text(),
    "nothing new": RECORD.text(),
    "an older version's order of fields": json.dumps(dict(reversed(json.loads(RUNNING.text()).items()))),
    "a field of a newer version": RUNNING.text()[:-1] + ', "hurried": {"running": 1}}',
    "a field that is missing": RECORD.text().replace(', "begun": 0', ""),
    "a name that looks like the load": replace(RUNNING, model='x, "running": 5, "waiting": ').text(),
}


@pytest.mark.parametrize("text", LATER.values(), ids=LATER)
def test_a_known_workers_record_is_read_as_one_of_an_unknown_worker(text: str) -> None:
    """Parsing only the changed part gives the same record, for any change, and for the following record."""
    reader, value = RecordReader(), b"a1 0.0 " + text.encode()
    assert reader.read(b"decode-0", AS_STORED, 1.0) == replace(RECORD, beat=1.0)
    for beat in (2.0, 3.0):
        assert reader.read(b"decode-0", value, beat) == replace(WorkerRecord.parse(text), beat=beat)
    assert reader.read(b"decode-0", AS_STORED, 4.0) == replace(RECORD, beat=4.0)


def test_a_known_workers_record_that_cannot_be_read_is_left_out() -> None:
    """Load of a wrong type is an error as in any record, and the next valid record is read."""
    reader = RecordReader()
    reader.read(b"decode-0", AS_STORED, 1.0)
    assert reader.read(b"decode-0", AS_STORED.replace(b'"running": 0', b'"running": null'), 2.0) is None
    assert reader.read(b"decode-0", AS_STORED[:-1], 2.0) is None
    assert reader.read(b"decode-0", AS_STORED, 3.0) == replace(RECORD, beat=3.0)


def test_of_a_known_worker_only_the_load_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router reads a record of each worker every second. Parsed records of workers that have gone are dropped."""
    parsed: list[bytes] = []
    parse = WorkerRecord.parse
    monkeypatch.setattr(WorkerRecord, "parse", lambda text: parsed.append(text) or parse(text))
    reader = RecordReader()
    for running in range(5):
        reader.read(b"decode-0", b"a1 0.0 " + replace(RECORD, running=running).text().encode(), 1.0)
    assert len(parsed) == 1
    reader.keep_only({b"decode-1"})
    reader.read(b"decode-0", AS_STORED, 1.0)
    reader.read(b"decode-0", None, 1.0)
    reader.read(b"decode-0", AS_STORED, 1.0)
    assert len(parsed) == 3


async def test_announcements_that_come_together_wake_a_reader_once(registry: Registry) -> None:
    """A pool of 500 workers that changes at once does not cost each router 500 refreshes."""
    changes = registry.changes(every_s=60.0)
    async with asyncio.timeout(SOON_S):
        await anext(changes)
        await anext(changes)  # subscribed
        waiting = asyncio.create_task(anext(changes))
        async with registry._store.client.pipeline(transaction=True) as pipe:  # all 20 at the same moment
            for _ in range(20):
                pipe.publish(f"{registry._prefix}:changed", "workers")
            await pipe.execute()
        await waiting
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await anext(changes)
    await changes.aclose()
