"""The promises of every transport."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading

import pytest

from kvtransfer.backends.nccl.transport import NcclTransport
from kvtransfer.backends.nixl_transport import NixlTransport
from kvtransfer.factory import make_transport
from kvtransfer.transport import measure_link, settle
from tandem.errors import IncompatibleLayout, InvalidRequest, SettingsError, WorkerLost


async def test_bytes_arrive_equal_in_any_block_order(source, sink, expected):
    """Every remote block arrives complete in the local block that was named for it."""
    remote = list(range(16))
    random.Random(7).shuffle(remote)
    await sink.transport.connect(source.peer, 10)
    stats = await sink.transport.read(source.peer, list(zip(remote, range(16), strict=True)), 10)
    for local, block in enumerate(remote):
        assert (sink.array[local] == expected(block, 4096)).all()
    assert stats.bytes == 16 * 4096
    assert stats.seconds > 0


async def test_only_the_named_blocks_are_written(source, sink, expected):
    """A read writes to no local block that it does not name."""
    sink.array[:] = 7
    await sink.transport.connect(source.peer, 10)
    await sink.transport.read(source.peer, [(3, 9)], 10)
    assert (sink.array[9] == expected(3, 4096)).all()
    assert (sink.array[[b for b in range(16) if b != 9]] == 7).all()


async def test_an_empty_read_is_done_at_once(source, sink):
    """Reading nothing succeeds."""
    await sink.transport.connect(source.peer, 10)
    assert (await sink.transport.read(source.peer, [], 10)).bytes == 0


@pytest.mark.parametrize(
    ("pairs", "field"),
    [
        ([(16, 0)], "remote_block"),
        ([(-1, 0)], "remote_block"),
        ([(0, 16)], "local_block"),
        ([(0, -1)], "local_block"),
        ([(0, 3), (1, 3)], "local_block"),
    ],
)
async def test_block_ids_out_of_range_are_refused_on_both_sides(source, sink, pairs, field):
    """No byte moves for an id that does not exist, or if a local block is named twice."""
    await sink.transport.connect(source.peer, 10)
    with pytest.raises(InvalidRequest) as caught:
        await sink.transport.read(source.peer, [(5, 5), *pairs], 10)
    assert caught.value.field == field
    assert not sink.array.any()


@pytest.mark.parametrize(
    "change", [{"layout_hash": "other"}, {"block_bytes": 2048}, {"transport": "other", "also": ()}]
)
async def test_another_layout_is_refused_before_any_byte_moves(source, sink, change):
    """Pages with another meaning are never read, neither by connect nor by read."""
    peer = dataclasses.replace(source.peer, **change)
    with pytest.raises(IncompatibleLayout):
        await sink.transport.connect(peer, 10)
    with pytest.raises(IncompatibleLayout):
        await sink.transport.read(peer, [(0, 0)], 10)
    assert not sink.array.any()


async def test_concurrent_connects_share_one_attempt(source, sink, kind, monkeypatch):
    """Eight concurrent callers are all connected, and connecting again does no harm. Within a process there is nothing
    to attempt."""
    attempts = []
    for transport, attempt in ((NixlTransport, "_connect"), (NcclTransport, "_begin")):
        begin = getattr(transport, attempt)
        monkeypatch.setattr(transport, attempt, lambda *given, begin=begin: attempts.append(given) or begin(*given))
    await asyncio.gather(*(sink.transport.connect(source.peer, 10) for _ in range(8)))
    assert len(attempts) == (0 if kind == "inprocess" else 1)
    await sink.transport.connect(source.peer, 10)
    await sink.transport.read(source.peer, [(0, 0)], 10)


async def test_who_waits_for_the_end_of_a_read_leaves_cancelled_and_only_then():
    """A wait for the end of a read ends only with the read, and then as cancelled, however often it was cancelled
    meanwhile; an error of the read itself is not raised again."""
    read = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(settle(read, "the read"))
    for _ in range(2):
        await asyncio.sleep(0)
        waiting.cancel()
    done, _ = await asyncio.wait([waiting], timeout=0.05)
    assert not done
    read.set_exception(WorkerLost("gone"))
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await settle(read, "the read")  # not cancelled, so it returns


async def test_a_cancelled_read_within_a_process_ends_after_its_copy(pages):
    """When the read has returned its memory may be freed, so nothing may be written later."""
    source, sink = pages("inprocess", "source"), pages("inprocess", "sink")
    await sink.transport.connect(source.peer, 10)
    copying, go_on = threading.Event(), threading.Event()
    copy = sink.transport._copy

    def slow(*given):
        copying.set()
        assert go_on.wait(30)
        copy(*given)

    sink.transport._copy = slow
    read = asyncio.create_task(sink.transport.read(source.peer, [(0, 0)], 10))
    assert await asyncio.to_thread(copying.wait, 30)
    read.cancel()
    done, _ = await asyncio.wait([read], timeout=0.05)
    assert not done
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await read


async def test_reads_at_once_do_not_mix(source, sink, expected):
    """Sixteen concurrent reads each land in their own block."""
    await sink.transport.connect(source.peer, 10)
    await asyncio.gather(*(sink.transport.read(source.peer, [(15 - b, b)], 10) for b in range(16)))
    for block in range(16):
        assert (sink.array[block] == expected(15 - block, 4096)).all()


async def test_a_peer_that_was_forgotten_must_be_connected_again(source, sink):
    """After `forget` a read fails; after another connect it succeeds."""
    await sink.transport.connect(source.peer, 10)
    sink.transport.forget(source.peer)
    with pytest.raises(WorkerLost):
        await sink.transport.read(source.peer, [(0, 0)], 10)
    await sink.transport.connect(source.peer, 10)
    await sink.transport.read(source.peer, [(0, 0)], 10)


async def test_a_closed_transport_refuses_and_closes_twice(source, sink):
    """After close every call fails with WorkerLost; close may be repeated."""
    await sink.transport.connect(source.peer, 10)
    sink.transport.close()
    sink.transport.close()
    with pytest.raises(WorkerLost):
        await sink.transport.read(source.peer, [(0, 0)], 10)
    with pytest.raises(WorkerLost):
        await sink.transport.connect(source.peer, 10)
    sink.transport.forget(source.peer)


async def test_measure_link_gives_bytes_per_second(source, sink):
    """The probe reads into the given blocks only and returns a positive rate."""
    sink.array[:] = 7
    assert await measure_link(sink.transport, source.peer, [1, 2]) > 0
    assert (sink.array[[0, *range(3, 16)]] == 7).all()
    with pytest.raises(InvalidRequest):
        await measure_link(sink.transport, source.peer, [])


async def test_a_source_that_closed_is_lost(pages):
    """In one process too, a peer that has closed raises WorkerLost and never yields old bytes."""
    source, sink = pages("inprocess", "source"), pages("inprocess", "sink")
    peer = source.peer
    await sink.transport.connect(peer, 10)
    source.transport.close()
    with pytest.raises(WorkerLost):
        await sink.transport.read(peer, [(0, 0)], 10)


def test_an_unknown_kind_is_a_settings_error(pages):
    """The factory names the kinds that it knows."""
    region = pages("inprocess").region
    with pytest.raises(SettingsError):
        make_transport("carrier-pigeon", region, "w", "1", "l")
