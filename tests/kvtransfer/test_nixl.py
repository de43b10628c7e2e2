"""Promises that need real processes: death, restart, hangs, progress, and what remains after the end."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtransfer.backends import nixl_owner, nixl_reads
from kvtransfer.backends.nixl_reads import NixlReads
from kvtransfer.backends.reads import BATCHES_IN_FLIGHT
from kvtransfer.factory import make_transport
from kvtransfer.receiver import Receiver
from kvtransfer.transport import BATCH_BYTES, STALL_S
from kvtransfer.types import ReadyBlock, Region, Ticket
from tandem.errors import InternalError, TransferFailed, Unavailable, WorkerLost
from tests.kvtransfer.conftest import LAYOUT
from tests.support.stopwatch import Stopwatch
from tests.support.waiting import until

MIB = 1 << 20
TCP = {"UCX_TLS": "tcp"}


def becomes_true(condition, seconds=10.0):
    """Waits for an effect of another process; returns whether it occurred."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def segments(pid):
    """Shared memory that this process has made and somebody still has. It has no name in /dev/shm: UCX takes System
    V's, or removes the name at once."""
    lines = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    return {shmid for _, shmid, _, _, made_by, *_ in map(str.split, lines) if int(made_by) == pid}


async def in_flight(transport):
    """Returns when a read over an asynchronous transport has been posted."""
    await until(lambda: any(remote.in_flight for remote in transport._owner.reads.remotes.values()), 10)


async def test_link_names_each_transport(nixl_source, worker, pages):
    """After connect alone, `link` is cma for a peer on this host, tcp for one that supports nothing else, and cma for a
    third one that shares the endpoint configuration of the first; before connect it is unknown."""
    near, far, near2, sink = nixl_source, worker("far", env=TCP), worker("near2"), pages("nixl")
    for source, link in ((near, "nixl:ucx:cma"), (far, "nixl:ucx:tcp"), (near2, "nixl:ucx:cma")):
        assert sink.transport.link(source.peer) == "nixl:ucx:unknown"
        await sink.transport.connect(source.peer, 10)
        assert sink.transport.link(source.peer) == link
        assert (await sink.transport.read(source.peer, [(0, 0)], 10)).transport == link


async def test_the_first_bytes_from_a_new_peer_land_in_the_spare_block(nixl_source):
    """Connecting reads a few bytes to learn the link, and writes to no block that may be in use."""
    array = np.full((4, 4096), 7, dtype=np.uint8)
    region = Region(array.ctypes.data, 4, 4096, keepalive=array, spare_block=2)
    transport = make_transport("nixl", region, "sink", "1", LAYOUT)
    try:
        await transport.connect(nixl_source.peer, 10)
    finally:
        transport.close()
    assert [bool((block == 7).all()) for block in array] == [True, True, False, True]


async def test_link_names_the_transport_of_a_pod_with_a_long_name(worker, pages):
    """UCX truncates the names of workers in its log, and the names of Kubernetes' pods are longer than its limit."""
    pod, incarnation = "production-tandem-decode-7d9f8b6c5-x2x4q", "f" * 16
    source, sink = worker(pod.replace("decode", "prefill"), incarnation), pages("nixl", pod, incarnation)
    await sink.transport.connect(source.peer, 10)
    assert sink.transport.link(source.peer) == "nixl:ucx:cma"


async def test_tcp_read_completes_while_the_source_only_polls(tcp_source, pages, monkeypatch, expected):
    """Over TCP, the source's progress in serving() is sufficient, without any call there."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    sink = pages("nixl", num_blocks=17, block_bytes=MIB)
    await sink.transport.connect(tcp_source.peer, 10)
    stats = await sink.transport.read(tcp_source.peer, [(b, 16 - b) for b in range(17)], 10)
    assert stats.transport == "nixl:ucx:tcp"
    assert all((sink.array[16 - b] == expected(b, MIB)).all() for b in range(17))


async def test_a_source_killed_mid_read_fails_it_within_two_seconds(worker, pages, monkeypatch):
    """SIGKILL while bytes are in flight over TCP ends the read with TransferFailed, and the next one as quickly: the
    link cannot know whether the worker died."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    source, sink = worker(block_bytes=MIB, env=TCP), pages("nixl", block_bytes=MIB)
    await sink.transport.connect(source.peer, 10)
    source.signal(signal.SIGSTOP)
    read = asyncio.create_task(sink.transport.read(source.peer, [(b, b) for b in range(16)], 30))
    await in_flight(sink.transport)
    killed = Stopwatch()
    source.signal(signal.SIGKILL)
    with pytest.raises(TransferFailed):
        await read
    with pytest.raises(TransferFailed):
        await sink.transport.read(source.peer, [(0, 0)], 30)
    assert killed.within(2)


async def test_a_source_killed_between_shared_memory_reads_fails_the_next_within_two_seconds(worker, pages):
    """SIGKILL during a series of reads over cma fails the next one with TransferFailed."""
    source, sink = worker(), pages("nixl")
    await sink.transport.connect(source.peer, 10)
    reads = 0
    killed: Stopwatch | None = None
    with pytest.raises(TransferFailed):
        while not killed or killed.within(5):
            await sink.transport.read(source.peer, [(b, b) for b in range(16)], 30)
            reads += 1
            if reads == 50:
                source.signal(signal.SIGKILL)
                killed = Stopwatch()
    assert killed
    assert killed.within(2)


async def test_connecting_to_a_dead_worker_is_refused(worker, pages):
    """Connecting with the metadata of an ended process raises TransferFailed and does not hang."""
    source, sink = worker(), pages("nixl")
    peer = source.peer
    source.end()
    with pytest.raises(TransferFailed):
        await sink.transport.connect(peer, 10)


async def test_connecting_to_a_hung_worker_ends_in_time_and_can_be_repeated(worker, pages, monkeypatch):
    """Connecting to a source that does not answer ends at its timeout; when the source continues, connecting
    succeeds."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    source, sink = worker(env=TCP), pages("nixl")
    peer = source.peer
    source.signal(signal.SIGSTOP)
    for _ in range(2):
        watch = Stopwatch()
        with pytest.raises(TransferFailed):
            await sink.transport.connect(peer, 0.3)
        assert watch.within(2)
    source.signal(signal.SIGCONT)
    await sink.transport.connect(peer, 10)
    await sink.transport.read(peer, [(0, 0)], 10)
    assert sink.transport.link(peer) == "nixl:ucx:tcp"


async def test_peers_that_do_not_answer_delay_no_other(worker, pages, monkeypatch):
    """With eight silent peers, twelve healthy ones whose connects started later are connected before those have
    failed."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    silent, healthy = worker("silent", env=TCP, agents=8), worker("healthy", env=TCP, agents=12)
    sink, refused, met = pages("nixl"), silent.peers, healthy.peers
    silent.signal(signal.SIGSTOP)
    watch = Stopwatch()
    failing = [asyncio.create_task(sink.transport.connect(peer, 30)) for peer in refused]
    await asyncio.gather(*(sink.transport.connect(peer, 30) for peer in met))
    assert not any(task.done() for task in failing)
    assert {sink.transport.link(peer) for peer in met} == {"nixl:ucx:tcp"}
    for task in failing:
        with pytest.raises(TransferFailed):
            await task
    assert watch.within(STALL_S + 2)


async def test_an_attempt_with_a_replaced_agents_metadata_is_not_joined(worker, pages, monkeypatch, expected):
    """A peer whose agent was replaced has the same name and other metadata. Its connect starts a new attempt and does
    not join the waiting one to the former agent, which then fails."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    former, latter, sink = worker(env=TCP), worker(env=TCP), pages("nixl")
    assert former.peer.agent_name == latter.peer.agent_name
    latter.fill(3, 3)
    former.signal(signal.SIGSTOP)
    waiting = asyncio.create_task(sink.transport.connect(former.peer, 30))
    await in_flight(sink.transport)
    await asyncio.wait_for(sink.transport.connect(latter.peer, 30), STALL_S / 2)
    with pytest.raises(WorkerLost):
        await waiting
    await sink.transport.read(latter.peer, [(3, 3)], 10)
    assert (sink.array[3] == expected(3, 4096)).all()


async def test_a_restarted_source_works_at_once_and_its_old_life_does_not(worker, pages, expected):
    """A source with the same worker id and a new incarnation is connected next to the old incarnation, which its owner
    then forgets."""
    first, sink = worker(incarnation="1"), pages("nixl")
    await sink.transport.connect(first.peer, 10)
    await sink.transport.read(first.peer, [(0, 0)], 10)
    first.signal(signal.SIGKILL)
    second = worker(incarnation="2")
    second.fill(0, 42)
    await sink.transport.connect(second.peer, 10)
    await sink.transport.read(second.peer, [(0, 0)], 10)
    assert (sink.array[0] == expected(42, 4096)).all()
    sink.transport.forget(first.peer)
    with pytest.raises(WorkerLost):
        await sink.transport.read(first.peer, [(0, 0)], 10)
    await sink.transport.read(second.peer, [(0, 0)], 10)


async def test_a_read_of_many_batches_is_whole_when_it_returns(worker, pages, expected):
    """Over shared memory, where a batch is complete when it has been posted, a read does not return before its last
    batch."""
    count = (BATCHES_IN_FLIGHT + 2) * BATCH_BYTES // MIB + 1
    source, sink = worker(num_blocks=count, block_bytes=MIB), pages("nixl", num_blocks=count, block_bytes=MIB)
    for block in range(count):
        source.fill(block, block)
    await sink.transport.connect(source.peer, 10)
    await sink.transport.read(source.peer, [(b, count - 1 - b) for b in range(count)], 10)
    assert all((sink.array[count - 1 - b] == expected(b, MIB)).all() for b in range(count))


def error_at_post(agent):
    raise agent.errors[0]("injected")


def error_in_flight(agent):
    return "ERR"


@pytest.mark.parametrize("fault", [error_at_post, error_in_flight])
async def test_after_a_failed_transfer_the_peer_can_be_read_again(nixl_source, pages, monkeypatch, expected, fault):
    """An error of one transfer fails that read alone, with TransferFailed; the next read reconnects."""
    sink = pages("nixl")
    await sink.transport.connect(nixl_source.peer, 10)
    agent, faulty = sink.transport._owner.agent, [fault]
    post = agent.post
    monkeypatch.setattr(agent, "post", lambda handle: faulty.pop()(agent) if faulty else post(handle))
    with pytest.raises(TransferFailed):
        await sink.transport.read(nixl_source.peer, [(1, 1)], 10)
    assert not faulty
    await sink.transport.read(nixl_source.peer, [(2, 2)], 10)
    assert (sink.array[2] == expected(2, 4096)).all()
    await sink.transport.connect(nixl_source.peer, 10)
    assert sink.transport.link(nixl_source.peer) == "nixl:ucx:cma"


async def half_posted(worker, pages, monkeypatch, watched_s):
    """Posts a read whose source stands still, though posting it raises, as when one of its descriptors cannot be posted
    any more; once the read has ended, the source goes on. Says whether the reader was told, and whether anything was
    written after the read's end, for so long."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr(nixl_reads, "ABORT_GRACE_S", 0.3)
    source, sink = worker(block_bytes=MIB, env=TCP), pages("nixl", block_bytes=MIB)
    source.fill(0, 1)
    source.serve()
    await sink.transport.connect(source.peer, 10)
    source.signal(signal.SIGSTOP)
    agent = sink.transport._owner.agent
    post = agent.post

    def post_in_part(handle):
        post(handle)
        raise nixl_error(agent, "nixlBackendError")("injected: a later descriptor failed")

    monkeypatch.setattr(agent, "post", post_in_part)
    failed = asyncio.get_running_loop().create_future()
    read = asyncio.create_task(
        sink.transport.read(source.peer, [(b, b) for b in range(16)], 30, failing=failed.set_result)
    )
    with pytest.raises(TransferFailed, match="injected"):
        await read
    monkeypatch.undo()
    told = failed.done()
    sink.array[:] = 7
    source.signal(signal.SIGCONT)
    becomes_true(lambda: (sink.array != 7).any(), watched_s)
    return told, bool((sink.array != 7).any())


def nixl_error(agent, name):
    return next(error for error in agent.errors if error.__name__ == name)


async def test_a_read_that_was_posted_in_part_never_writes_again(worker, pages, monkeypatch):
    """Its reader learns of the error at once, and has its memory back when nothing can be written any more."""
    assert await half_posted(worker, pages, monkeypatch, 1.0) == (True, False)


async def test_control_memory_that_is_given_back_after_a_failed_post_is_written(worker, pages, monkeypatch):
    """Control of the test above: the handle is released as if nothing had been posted."""
    monkeypatch.setattr(NixlReads, "_may_be_in_flight", lambda self, remote, error: False)
    assert await half_posted(worker, pages, monkeypatch, 30.0) == (False, True)


async def test_the_reader_of_a_silent_source_learns_of_it_before_its_memory_is_safe(
    worker, pages, monkeypatch, expected
):
    """`failing` is called when the batch stalls. The read ends later, and until then the source accepts no other; when
    the source continues, it can be connected and read again."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    source, sink = worker(block_bytes=MIB, env=TCP), pages("nixl", block_bytes=MIB)
    source.fill(3, 3)
    await sink.transport.connect(source.peer, 10)
    source.signal(signal.SIGSTOP)
    failed = asyncio.get_running_loop().create_future()
    read = asyncio.create_task(
        sink.transport.read(source.peer, [(b, b) for b in range(16)], 0.3, failing=failed.set_result)
    )
    assert isinstance(await asyncio.wait_for(failed, 10), TransferFailed)
    assert not read.done()
    for refused in (sink.transport.read(source.peer, [(0, 0)], 10), sink.transport.connect(source.peer, 10)):
        with pytest.raises(TransferFailed):
            await asyncio.wait_for(refused, 5)
    source.signal(signal.SIGCONT)
    with pytest.raises(TransferFailed):
        await read
    await sink.transport.connect(source.peer, 10)
    await sink.transport.read(source.peer, [(3, 3)], 10)
    assert (sink.array[3] == expected(3, MIB)).all()


async def test_a_receiver_of_a_silent_source_fails_while_its_blocks_stay_reserved(worker, pages, monkeypatch):
    """`finish` raises when the batch stalls; `abort` returns when the source has continued and nothing can be written
    any more."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    source, sink = worker(block_bytes=MIB, env=TCP), pages("nixl", block_bytes=MIB)
    await sink.transport.connect(source.peer, 10)
    source.signal(signal.SIGSTOP)
    blocks = {index: (b"", index) for index in range(8)}
    receiver = Receiver(
        sink.transport, source.peer, Ticket("t", 1, "1"), blocks, lambda blocks: [b"" for _ in blocks], 0.5
    )
    watch = Stopwatch()
    await receiver.add([ReadyBlock(index, index, b"") for index in blocks])
    with pytest.raises(TransferFailed):
        await receiver.finish()
    assert watch.within(2)
    aborted = asyncio.create_task(receiver.abort())
    done, _ = await asyncio.wait([aborted], timeout=0.2)
    assert not done
    source.signal(signal.SIGCONT)
    await asyncio.wait_for(aborted, 5)


async def test_a_read_may_take_longer_than_its_stall(worker, pages, monkeypatch, expected):
    """Only a batch has a time limit: a source that pauses at each batch fails no read."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr("kvtransfer.transport.BATCH_BYTES", MIB)
    source, sink = worker(block_bytes=MIB, env=TCP), pages("nixl", block_bytes=MIB)
    source.fill(15, 15)
    await sink.transport.connect(source.peer, 10)
    post, go_on = NixlReads._post, threading.Timer(0, lambda: None)

    def post_while_stopped(self, remote, read):
        nonlocal go_on
        source.signal(signal.SIGSTOP)
        post(self, remote, read)
        go_on.cancel()
        go_on = threading.Timer(0.6, source.signal, [signal.SIGCONT])
        go_on.start()

    monkeypatch.setattr(NixlReads, "_post", post_while_stopped)
    began, stall = time.monotonic(), 4.0
    await sink.transport.read(source.peer, [(b, b) for b in range(16)], stall)
    assert time.monotonic() - began > stall
    assert (sink.array[15] == expected(15, MIB)).all()
    go_on.join()


async def test_a_reader_that_stood_still_does_not_take_its_source_for_silent(worker, pages, monkeypatch, expected):
    """Time in which the owner thread made no rounds does not count, because the bytes may have arrived meanwhile."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr("kvtransfer.transport.BATCH_BYTES", 16 * MIB)  # more than the sockets can buffer
    source, sink = worker(block_bytes=MIB, env=TCP), pages("nixl", num_blocks=16, block_bytes=MIB)
    source.fill(15, 15)
    await sink.transport.connect(source.peer, 10)
    source.signal(signal.SIGSTOP)
    stall = 2.0  # a busy machine's time for the bytes, and for this thread to see that they are in flight
    read = asyncio.create_task(sink.transport.read(source.peer, [(b, b) for b in range(16)], stall))
    await in_flight(sink.transport)
    sink.transport._owner.submit(lambda: (time.sleep(1.25 * stall), source.signal(signal.SIGCONT)))  # the fault
    await read
    assert (sink.array[15] == expected(15, MIB)).all()


async def late_write(worker, other, pages, expected, end_read, watched_s=1.0):
    """Posts a read from a stopped source over TCP, ends it, fills the local blocks anew, lets the source go on, makes
    progress with reads from another. Says whether anything was written into the local blocks after the end, for so
    long."""
    source = worker(num_blocks=17, block_bytes=MIB, env=TCP)
    sink = pages("nixl", num_blocks=17, block_bytes=MIB)
    source.serve()
    await sink.transport.connect(source.peer, 10)
    await sink.transport.connect(other.peer, 10)
    source.signal(signal.SIGSTOP)
    await end_read(sink.transport, source.peer, [(b, b) for b in range(16)])
    sink.array[:] = 7
    source.signal(signal.SIGCONT)
    until = time.monotonic() + watched_s
    await sink.transport.read(other.peer, [(16, 16)], 10)
    while (sink.array[:16] == 7).all() and time.monotonic() < until:
        await sink.transport.read(other.peer, [(16, 16)], 10)
    assert (sink.array[16] == expected(16, MIB)).all()
    return not (sink.array[:16] == 7).all()


async def cancelled_read(transport, peer, pairs):
    read = asyncio.create_task(transport.read(peer, pairs, 30))
    await in_flight(transport)
    read.cancel()
    with pytest.raises(asyncio.CancelledError):
        await read


async def expired_read(transport, peer, pairs):
    with pytest.raises(TransferFailed):
        await transport.read(peer, pairs, 0.2)


@pytest.mark.parametrize("end_read", [cancelled_read, expired_read])
async def test_a_read_that_ended_never_writes_again(worker, tcp_source, pages, monkeypatch, expected, end_read):
    """Neither after a cancellation nor after a timeout can a hung source that continues write to the local blocks."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr(nixl_reads, "ABORT_GRACE_S", 0.3)
    assert not await late_write(worker, tcp_source, pages, expected, end_read)


async def test_without_the_replaced_agent_a_late_write_happens(worker, tcp_source, pages, monkeypatch, expected):
    """Control of the test above: if only the handles are released, the bytes land in blocks that were freed."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr(nixl_reads, "ABORT_GRACE_S", 0.3)

    def only_release(self, why):
        for remote in self.remotes.values():
            for read in [read for read in remote.reads if read.error is not None]:
                for flight in read.flights:
                    flight.handle.release()
                read.flights.clear()

    monkeypatch.setattr(NixlReads, "_replace_agent", only_release)
    assert await late_write(worker, tcp_source, pages, expected, cancelled_read, 30.0)


async def test_a_hung_source_costs_no_other_reader_its_read(worker, tcp_source, pages, monkeypatch, expected):
    """While one source hangs and its read is ended by replacing the agent, reads from another source continue and are
    correct."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr(nixl_reads, "ABORT_GRACE_S", 0.3)
    hung, sink = worker("hung", block_bytes=MIB, env=TCP), pages("nixl", num_blocks=32, block_bytes=MIB)
    await sink.transport.connect(hung.peer, 10)
    await sink.transport.connect(tcp_source.peer, 10)
    hung.signal(signal.SIGSTOP)
    lost = asyncio.create_task(expired_read(sink.transport, hung.peer, [(b, b) for b in range(16)]))
    while not lost.done():
        sink.array[16:] = 0
        await sink.transport.read(tcp_source.peer, [(b, 16 + b) for b in range(16)], 10)
        assert all((sink.array[16 + b] == expected(b, MIB)).all() for b in range(16))
    await lost
    assert tcp_source.process.poll() is None


async def test_a_transport_whose_thread_ended_says_so(nixl_source, pages):
    """An exception in the owner thread sets `broken`, calls `on_broken` and fails every later call at once."""
    sink, told = pages("nixl"), threading.Event()
    await sink.transport.connect(nixl_source.peer, 10)
    assert sink.transport.broken is None
    sink.transport.on_broken = told.set
    sink.transport._owner.submit(lambda: {}["missing"])
    assert await asyncio.to_thread(told.wait, 10)
    assert isinstance(sink.transport.broken, InternalError)
    for call in (sink.transport.read(nixl_source.peer, [(0, 0)], 10), sink.transport.connect(nixl_source.peer, 10)):
        with pytest.raises(TransferFailed, match="broken"):
            await asyncio.wait_for(call, 5)
    sink.transport.forget(nixl_source.peer)


async def test_a_thread_that_hangs_shows_in_what_is_under_way_and_refuses_to_close(pages, monkeypatch):
    """`under_way` changes while the thread runs and stays the same while it hangs; close then raises, because the pages
    may still be read and written, and succeeds when the thread has ended."""
    monkeypatch.setattr(nixl_owner, "CLOSE_TIMEOUT_S", 0.2)
    transport, go = pages("nixl").transport, threading.Event()
    before = transport.under_way
    assert becomes_true(lambda: transport.under_way != before)
    hanging = threading.Event()
    transport._owner.submit(lambda: (hanging.set(), go.wait(30)))
    assert hanging.wait(60)
    assert not becomes_true(lambda before=transport.under_way: transport.under_way != before, 0.2)
    with pytest.raises(InternalError):
        transport.close()
    go.set()
    transport._owner._thread.join(60)
    transport.close()


async def test_an_idle_agent_uses_no_cpu(nixl_source):
    """An idle worker uses less than 5 % of a core over one second."""
    source = nixl_source
    before, began = source.ask(cmd="cpu")["cpu"], time.monotonic()
    becomes_true(lambda: time.monotonic() > began + 1)
    assert source.ask(cmd="cpu")["cpu"] - before < 0.05 * (time.monotonic() - began)


def test_four_workers_starting_at_once_all_come_up(worker):
    """Concurrent starts do not hang."""
    started = [worker(f"w{i}") for i in range(4)]
    assert {w.peer.worker_id for w in started} == {"w0", "w1", "w2", "w3"}


async def test_nothing_is_left_after_close(worker, pages, monkeypatch):
    """A closed transport leaves no thread, no open file and no shared memory segment in either process. It waits for
    reads in flight, and only for those."""
    monkeypatch.setattr(nixl_owner, "CLOSE_GRACE_S", 5.0)
    others = segments(os.getpid())  # of other tests, until Python collects what a test left in a cycle
    source, sink = worker(), pages("nixl")
    await sink.transport.connect(source.peer, 10)
    await sink.transport.read(source.peer, [(0, 0)], 10)
    assert segments(source.process.pid)
    assert segments(os.getpid()) - others
    assert source.exit()["threads"] == ["MainThread"]
    sockets = [link for link in open_files() if link.startswith("socket:")]
    began = time.monotonic()
    sink.transport.close()
    assert time.monotonic() - began < nixl_owner.CLOSE_GRACE_S
    assert len([link for link in open_files() if link.startswith("socket:")]) < len(sockets)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("nixl")]
    assert becomes_true(lambda: not segments(source.process.pid) | segments(os.getpid()) - others)


async def test_nothing_is_left_after_a_kill(worker, pages):
    """SIGKILL of a connected worker leaves no shared memory segment behind."""
    source, sink = worker(), pages("nixl")
    await sink.transport.connect(source.peer, 10)
    killed = source.process.pid
    assert segments(killed)
    source.end()
    sink.transport.close()
    assert becomes_true(lambda: not segments(killed) | segments(os.getpid()))


def open_files() -> list[str]:
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue  # the descriptor of this listing
    return names


@pytest.mark.parametrize(("memory", "devices"), [("vram", [3]), ("dram", [])])
def test_the_owner_thread_enters_the_gpu_of_its_pages_before_the_agent_starts(monkeypatch, memory, devices):
    """UCX looks for the CUDA context of the thread that calls it. No GPU has run this: CUDA is a stand-in."""
    entered: list[tuple[str, int]] = []
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda index: entered.append((threading.current_thread().name, index))
    )
    owner = nixl_owner.OwnerThread("a", "worker", Region(4096, 1, 64, device=3, memory=memory), lambda _: None)
    seen: list[list[tuple[str, int]]] = []

    def start():
        seen.append(list(entered))
        raise RuntimeError("far enough")

    monkeypatch.setattr(owner.agent, "start", start)
    with pytest.raises(Unavailable, match="far enough"):
        owner.start()
    assert seen == [[("nixl a", index) for index in devices]]


def test_what_ucx_logs_is_read_also_while_no_peer_connects(monkeypatch):
    """Every 10 s: its warnings are not hours late, and do not fill the memory meanwhile."""
    owner = nixl_owner.OwnerThread("a", "worker", Region(4096, 1, 64, device=0, memory="dram"), lambda _: None)
    read: list[float] = []
    monkeypatch.setattr(nixl_owner.ucx_log, "read", lambda: read.append(owner.clock.now))
    monkeypatch.setattr(nixl_owner, "IDLE_PAUSE_S", 0.0)
    monkeypatch.setattr(owner.agent, "progress", lambda: False)
    monkeypatch.setattr(owner.agent, "set_details", lambda _: None)
    monkeypatch.setattr(owner.clock, "tick", lambda: setattr(owner.clock, "now", owner.clock.now + 1.0))
    for _ in range(35):
        owner._round()
    assert read == [10.0, 20.0, 30.0]
