"""The decode side of a transfer: it accepts only what is provably what the source announced."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from contextlib import asynccontextmanager

import numpy as np
import pytest

import kvtransfer.receiver
from kvtransfer.receiver import Receiver
from kvtransfer.sender import Sender
from kvtransfer.types import Offer, ReadyBlock, Ticket, digest, digests
from tandem.errors import DataLoss, InternalError, InvalidRequest, StaleTransfer, TransferFailed, WorkerLost
from tests.support.memory import block_view
from tests.support.waiting import until

COUNT = 8
CONTEXTS = {index: f"chain {index}".encode() for index in range(COUNT)}
# Sequence index -> block in the source and in the sink, both out of order.
THERE = {index: (index * 5 + 3) % 16 for index in range(COUNT)}
HERE = {index: (index * 3 + 1) % 16 for index in range(COUNT)}


def ready(index, *, seed=None, block=None):
    """An announcement of a block that holds the pattern of `seed`, by default of the block's number."""
    block = THERE[index] if block is None else block
    bytes_there = np.random.default_rng(block if seed is None else seed).integers(0, 256, 4096, dtype=np.uint8)
    return ReadyBlock(index, block, digest(bytes_there.tobytes(), CONTEXTS[index]))


def digests_of(region):
    return digests(lambda blocks: [block_view(region, block) for block in blocks])


def receiver_of(sink, peer, *, transport=None, stall=10.0, ticket=None, **changes):
    expected = {index: (CONTEXTS[index], HERE[index]) for index in CONTEXTS}
    arguments = {"expected": expected, "digest_blocks": digests_of(sink.region), **changes}
    ticket = ticket or Ticket("t", 1, peer.incarnation)
    return Receiver(transport or sink.transport, peer, ticket, stall=stall, **arguments)


@asynccontextmanager
async def receiving(*arguments, **named):
    receiver = receiver_of(*arguments, **named)
    try:
        yield receiver
    finally:
        await receiver.abort()


@pytest.fixture
def here(pages):
    """A source in this process that tests may change, each block filled with its own pattern."""
    made = pages("inprocess", "source")
    for block in range(16):
        made.fill(block, block)
    return made


@pytest.fixture
async def there(here, pages):
    """A sink that is connected to `here`."""
    made = pages("inprocess", "sink")
    await made.transport.connect(here.peer, 10)
    return made


async def test_a_whole_transfer_lands_in_the_reserved_blocks(source, sink, expected):
    """Announced in any order and in parts, every block lands where it was reserved, and the statistics are right."""
    await sink.transport.connect(source.peer, 10)
    began = time.monotonic()
    async with receiving(sink, source.peer) as receiver:
        await receiver.add([ready(5), ready(0), ready(7)])
        await receiver.add([])
        await receiver.add([ready(index) for index in (1, 2, 3, 4, 6)])
        stats = await receiver.finish()
    for index in range(COUNT):
        assert (sink.array[HERE[index]] == expected(THERE[index], 4096)).all()
    assert (stats.blocks, stats.bytes) == (COUNT, COUNT * 4096)
    assert 0 < stats.seconds <= time.monotonic() - began
    assert stats.transport == sink.transport.link(source.peer)


async def test_the_statistics_name_the_transport_of_the_reads(here, there, monkeypatch):
    """A pair may change its transport between the last read and the end of the transfer."""
    used = there.transport.link(here.peer)
    async with receiving(there, here.peer) as receiver:
        await receiver.add([ready(index) for index in range(COUNT)])
        await until(lambda: len(receiver._landed) == COUNT, 10)
        monkeypatch.setattr(there.transport, "link", lambda _: "another")
        assert (await receiver.finish()).transport == used
    async with receiving(there, here.peer, expected={}) as receiver:
        assert (await receiver.finish()).transport == "another"


async def test_an_empty_transfer_is_complete(here, there):
    """If the decode worker's own cache has every block, there is nothing to wait for."""
    async with receiving(there, here.peer, expected={}) as receiver:
        stats = await receiver.finish()
    assert (stats.blocks, stats.bytes) == (0, 0)


@pytest.mark.parametrize("kind", ["nixl"])
async def test_blocks_move_while_the_source_still_fills_later_ones(worker, sink, expected):
    """The first chunk has landed before the second one is computed."""
    source = worker()
    await sink.transport.connect(source.peer, 10)
    async with receiving(sink, source.peer) as receiver:
        for index in range(COUNT):
            assert not sink.array[HERE[index]].any()
            source.fill(THERE[index], THERE[index])
            await receiver.add([ready(index)])
            await until(lambda at=index: (sink.array[HERE[at]] == expected(THERE[at], 4096)).all(), 10)
        assert (await receiver.finish()).blocks == COUNT


@pytest.mark.parametrize("kind", ["nixl"])
async def test_a_byte_changed_at_the_source_after_its_announcement_is_refused(worker, sink):
    """Blocks that the source reused too early are never accepted as what it announced."""
    source = worker()
    for block in range(16):
        source.fill(block, block)
    await sink.transport.connect(source.peer, 10)
    source.flip(THERE[3])
    async with receiving(sink, source.peer) as receiver:
        await receiver.add([ready(index) for index in range(COUNT)])
        with pytest.raises(DataLoss, match="block index 3"):
            await receiver.finish()


def flip_after_landing(there, index):
    async def after(pairs):
        if HERE[index] in [local for _, local in pairs]:
            there.flip(HERE[index])

    return after


async def test_a_byte_changed_after_landing_is_refused(here, there, faulty):
    """A write to a landed block, from any cause, is detected."""
    transport = faulty(there.transport)
    transport.after = flip_after_landing(there, 6)
    async with receiving(there, here.peer, transport=transport) as receiver:
        await receiver.add([ready(index) for index in range(COUNT)])
        with pytest.raises(DataLoss, match="block index 6"):
            await receiver.finish()


async def test_without_verification_the_same_byte_is_accepted(here, there, faulty, monkeypatch):
    """Control: with the digest check switched off, the corruption above is accepted."""
    monkeypatch.setattr(kvtransfer.receiver.Receiver, "_first_wrong", lambda self, blocks: None)
    transport = faulty(there.transport)
    transport.after = flip_after_landing(there, 6)
    async with receiving(there, here.peer, transport=transport) as receiver:
        await receiver.add([ready(index) for index in range(COUNT)])
        assert (await receiver.finish()).blocks == COUNT


async def test_right_bytes_in_the_wrong_place_are_refused(here, there):
    """A digest binds bytes to their context: two swapped blocks, or another prompt's block, do not match."""
    swapped = [ready(0), ready(1)]
    swapped = [dataclasses.replace(swapped[1], index=0), dataclasses.replace(swapped[0], index=1)]
    async with receiving(there, here.peer) as receiver:
        await receiver.add(swapped)
        with pytest.raises(DataLoss):
            await receiver.finish()


@pytest.mark.parametrize(
    ("blocks", "reason"),
    [
        ([*range(COUNT), 0], "DUPLICATE_BLOCK"),
        ([*range(COUNT - 1)], "MISSING_BLOCK"),
        ([], "MISSING_BLOCK"),
    ],
)
async def test_every_block_must_be_announced_exactly_once(here, there, blocks, reason):
    """A missing and a repeated block are both DataLoss."""
    async with receiving(there, here.peer) as receiver:
        with pytest.raises(DataLoss) as caught:
            for index in blocks:
                await receiver.add([ready(index)])
            await receiver.finish()
    assert caught.value.reason == reason


async def test_blocks_that_nobody_asked_for_are_refused(here, there):
    """An unknown index or a block outside the source's region is refused before anything is read for it."""
    async with receiving(there, here.peer) as receiver:
        with pytest.raises(DataLoss) as caught:
            await receiver.add([ReadyBlock(COUNT, 0, b"")])
    assert caught.value.reason == "UNEXPECTED_BLOCK"
    async with receiving(there, here.peer) as receiver:
        with pytest.raises(DataLoss) as caught:
            await receiver.add([ready(0, block=16)])
    assert caught.value.reason == "BLOCK_OUT_OF_RANGE"
    assert not there.array.any()


async def test_an_error_in_one_announcement_dooms_the_transfer(here, there):
    """After a refused announcement `finish` fails, even if all expected blocks arrived as well."""
    async with receiving(there, here.peer) as receiver:
        await receiver.add([ready(index) for index in range(COUNT)])
        with pytest.raises(DataLoss):
            await receiver.add([ready(0)])
        with pytest.raises(DataLoss):
            await receiver.finish()


def test_a_ticket_of_another_life_is_refused(here, pages):
    """A ticket from before the source's restart never reads the memory of the new incarnation."""
    sink = pages("inprocess", "sink")
    with pytest.raises(StaleTransfer):
        receiver_of(sink, here.peer, ticket=Ticket("t", 1, "an earlier life"))


def test_every_expected_index_has_its_own_local_block(here, pages):
    """Two blocks that land in one place would overwrite each other."""
    sink = pages("inprocess", "sink")
    with pytest.raises(InvalidRequest):
        receiver_of(sink, here.peer, expected={index: (CONTEXTS[index], 0) for index in range(COUNT)})


async def test_a_lost_source_ends_the_transfer(here, there):
    """If the source is lost, `finish` raises WorkerLost."""
    peer = here.peer
    async with receiving(there, peer) as receiver:
        await receiver.add([ready(0)])
        here.transport.close()
        await asyncio.sleep(0)
        await receiver.add([ready(index) for index in range(1, COUNT)])
        with pytest.raises(WorkerLost):
            await receiver.finish()


def failing_every(count, transport):
    """Every `count`-th read fails before it has moved anything; `transport.reads` counts them all."""
    transport.reads = 0

    async def fail(pairs):
        transport.reads += 1
        if transport.reads % count == 0:
            raise TransferFailed("injected")

    transport.before = fail
    return transport


async def transfers_with_one_read_in_four_failing(here, there, faulty):
    """Runs ten receivers with four parts each; returns the number of repeated reads."""
    transport = failing_every(4, faulty(there.transport))
    for _ in range(10):
        there.array[:] = 0
        async with receiving(there, here.peer, transport=transport) as receiver:
            for index in range(0, COUNT, 2):
                await receiver.add([ready(index), ready(index + 1)])
            stats = await receiver.finish()
        assert stats.blocks == COUNT
        assert all((there.array[HERE[index]] == here.array[THERE[index]]).all() for index in range(COUNT))
    return transport.reads - 40


async def test_one_read_in_four_failing_costs_no_transfer(here, there, faulty):
    """A part whose read failed is read again, and verified like any other."""
    assert await transfers_with_one_read_in_four_failing(here, there, faulty) == 13


@pytest.mark.parametrize("kind", ["nixl"])
async def test_one_nixl_read_in_four_failing_at_its_post_costs_no_transfer(source, sink, monkeypatch, expected):
    """The same below the transport, where each failure also ends the connection."""
    await sink.transport.connect(source.peer, 10)
    agent, posts = sink.transport._owner.agent, 0
    post = agent.post

    def fail_every_fourth(handle):
        nonlocal posts
        posts += 1
        if posts % 4 == 0:
            raise agent.errors[0]("injected")
        return post(handle)

    monkeypatch.setattr(agent, "post", fail_every_fourth)
    for _ in range(5):
        sink.array[:] = 0
        async with receiving(sink, source.peer) as receiver:
            for index in range(0, COUNT, 2):
                await receiver.add([ready(index), ready(index + 1)])
            await receiver.finish()
        assert all((sink.array[HERE[index]] == expected(THERE[index], 4096)).all() for index in range(COUNT))
    assert posts == 20 + 6


async def test_with_one_attempt_the_same_faults_end_transfers(here, there, faulty, monkeypatch):
    """Control of the test above."""
    monkeypatch.setattr(kvtransfer.receiver, "READ_ATTEMPTS", 1)
    with pytest.raises(TransferFailed):
        await transfers_with_one_read_in_four_failing(here, there, faulty)


async def test_a_part_is_read_at_most_twice(here, there, faulty):
    """A source from which every read fails ends the receiver with TransferFailed."""
    transport = failing_every(1, faulty(there.transport))
    async with receiving(there, here.peer, transport=transport) as receiver:
        await receiver.add([ready(0)])
        with pytest.raises(TransferFailed):
            await receiver.finish()
    assert transport.reads == kvtransfer.receiver.READ_ATTEMPTS == 2


async def test_what_was_read_again_is_verified(here, there, faulty):
    """A byte that changes in the second read is detected as in the first, and not read a third time."""
    transport = failing_every(3, faulty(there.transport))
    transport.reads = 2
    transport.after = flip_after_landing(there, 0)
    async with receiving(there, here.peer, transport=transport) as receiver:
        await receiver.add([ready(0)])
        with pytest.raises(DataLoss, match="block index 0"):
            await receiver.finish()
    assert transport.reads == 4


async def test_an_error_is_reported_while_the_read_still_holds_the_blocks(here, there, faulty):
    """When the transport says that a read is failing, finish and add raise at once; abort waits for the read's end."""
    transport, safe = faulty(there.transport), asyncio.Event()

    async def read(peer, pairs, stall, failing):
        failing(TransferFailed("silent"))
        while not safe.is_set():  # like a read that cannot be cancelled
            try:
                await safe.wait()
            except asyncio.CancelledError:
                continue
        raise TransferFailed("silent")

    transport.read = read
    receiver = receiver_of(there, here.peer, transport=transport)
    await receiver.add([ready(0)])
    with pytest.raises(TransferFailed):
        await asyncio.wait_for(receiver.finish(), 5)
    with pytest.raises(TransferFailed):
        await receiver.add([ready(1)])
    aborted = asyncio.create_task(receiver.abort())
    done, _ = await asyncio.wait([aborted], timeout=0.1)
    assert not done
    safe.set()
    await asyncio.wait_for(aborted, 5)


async def test_a_bug_under_the_receiver_is_an_internal_error(here, there, faulty):
    """An unforeseen exception is neither swallowed nor reported as a missing block."""

    async def buggy(pairs):
        raise ZeroDivisionError

    transport = faulty(there.transport)
    transport.before = buggy
    async with receiving(there, here.peer, transport=transport) as receiver:
        await receiver.add([ready(0)])
        with pytest.raises(InternalError):
            await receiver.finish()


async def test_abort_waits_for_digests_that_are_being_made(here, there):
    """Computing digests may also write the blocks, so abort does not return before it has ended."""
    begun, go, ended = threading.Event(), threading.Event(), threading.Event()

    def slowly(blocks):
        begun.set()
        assert go.wait(10)
        ended.set()
        return [b""] * len(blocks)

    receiver = receiver_of(there, here.peer, digest_blocks=slowly)
    await receiver.add([ready(0)])
    assert await asyncio.to_thread(begun.wait, 10)
    aborted = asyncio.create_task(receiver.abort())
    done, _ = await asyncio.wait([aborted], timeout=0.1)
    assert not done
    go.set()
    await asyncio.wait_for(aborted, 5)
    assert ended.is_set()


async def test_abort_leaves_the_local_blocks_alone_afterwards(here, there, faulty):
    """When abort has returned, nothing of the transfer is written any more; no further call is accepted."""
    held = asyncio.Event()

    async def hold(pairs):
        if HERE[1] in [local for _, local in pairs]:
            held.set()
            await asyncio.Event().wait()

    transport = faulty(there.transport)
    transport.before = hold
    receiver = receiver_of(there, here.peer, transport=transport)
    await receiver.add([ready(0)])
    await receiver.add([ready(1)])
    await asyncio.wait_for(held.wait(), 10)
    await receiver.abort()
    await receiver.abort()
    there.array[:] = 7
    assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert (there.array == 7).all()
    for call in (receiver.add([ready(2)]), receiver.finish()):
        with pytest.raises(StaleTransfer):
            await call


async def test_a_cancelled_finish_still_aborts(here, there, faulty):
    """A caller that is cancelled in finish ends the reads by abort."""

    async def hold(pairs):
        await asyncio.Event().wait()

    transport = faulty(there.transport)
    transport.before = hold
    entered = asyncio.Event()

    async def run():
        async with receiving(there, here.peer, transport=transport) as receiver:
            await receiver.add([ready(0)])
            entered.set()
            await receiver.finish()

    task = asyncio.create_task(run())
    await asyncio.wait_for(entered.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not [one for one in asyncio.all_tasks() if one is not asyncio.current_task()]


async def test_sender_and_receiver_agree(here, there):
    """The receiver accepts what the sender announces, and the release then returns the source's blocks."""
    book = Sender(here.peer.incarnation, digests_of(here.region))
    ticket = book.open("t")
    async with receiving(there, here.peer, ticket=ticket) as receiver:
        for chunk in (range(0, 3), range(3, COUNT)):
            offers = [Offer(index, THERE[index], CONTEXTS[index]) for index in chunk]
            await receiver.add(await asyncio.to_thread(book.announce, ticket, offers))
        await receiver.finish()
    assert book.release(ticket) == tuple(THERE[index] for index in range(COUNT))
