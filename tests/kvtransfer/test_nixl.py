"""What only real processes show: death, restart, hanging, progress, and what is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest

from kvtransfer import nixl_transport
from kvtransfer.nixl_transport import NixlTransport
from tandem.errors import DeadlineExceeded, WorkerLost

MIB = 1 << 20
TCP = {"UCX_TLS": "tcp"}


def becomes_true(condition, seconds=10.0):
    """Waits for something that another process does; says whether it came true."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def segments():
    return {name for name in os.listdir("/dev/shm") if "ucx" in name}


async def in_flight(transport):
    """Returns when a read over an asynchronous transport has been posted."""
    end = time.monotonic() + 10
    while not any(read.flights for read in transport._reads):
        assert time.monotonic() < end
        await asyncio.sleep(0.001)


async def test_link_names_each_transport(nixl_source, worker, pages):
    """After connect alone link says cma for a peer on this host, tcp for one that speaks nothing else, and cma for a
    third, though that one shares the first one's endpoint configuration; before, it does not guess."""
    near, far, near2, sink = nixl_source, worker("far", env=TCP), worker("near2"), pages("nixl")
    for source, link in ((near, "nixl:ucx:cma"), (far, "nixl:ucx:tcp"), (near2, "nixl:ucx:cma")):
        assert sink.transport.link(source.peer) == "nixl:ucx:unknown"
        await sink.transport.connect(source.peer, 10)
        assert sink.transport.link(source.peer) == link
        assert (await sink.transport.read(source.peer, [(0, 0)], 10)).transport == link


async def test_tcp_read_completes_while_the_source_only_polls(tcp_source, pages, monkeypatch, expected):
    """Over TCP the source's progress in serving() is enough; nobody there calls anything."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    sink = pages("nixl", num_blocks=17, block_bytes=MIB)
    await sink.transport.connect(tcp_source.peer, 10)
    stats = await sink.transport.read(tcp_source.peer, [(b, 16 - b) for b in range(17)], 10)
    assert stats.transport == "nixl:ucx:tcp"
    assert all((sink.array[16 - b] == expected(b, MIB)).all() for b in range(17))


async def test_a_source_killed_mid_read_is_lost_within_two_seconds(worker, pages, monkeypatch):
    """SIGKILL while bytes are in flight over TCP ends the read with WorkerLost, and the next read at once."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    source, sink = worker(block_bytes=MIB, env=TCP), pages("nixl", block_bytes=MIB)
    await sink.transport.connect(source.peer, 10)
    source.signal(signal.SIGSTOP)
    read = asyncio.create_task(sink.transport.read(source.peer, [(b, b) for b in range(16)], 30))
    await in_flight(sink.transport)
    killed = time.monotonic()
    source.signal(signal.SIGKILL)
    with pytest.raises(WorkerLost):
        await read
    assert time.monotonic() - killed < 2
    with pytest.raises(WorkerLost):
        await sink.transport.read(source.peer, [(0, 0)], 30)


async def test_a_source_killed_between_shared_memory_reads_is_lost_within_two_seconds(worker, pages):
    """SIGKILL under a stream of reads over cma turns the next of them into WorkerLost."""
    source, sink = worker(), pages("nixl")
    await sink.transport.connect(source.peer, 10)
    reads = 0
    killed = 0.0
    with pytest.raises(WorkerLost):
        while not killed or time.monotonic() < killed + 5:
            await sink.transport.read(source.peer, [(b, b) for b in range(16)], 30)
            reads += 1
            if reads == 50:
                source.signal(signal.SIGKILL)
                killed = time.monotonic()
    assert killed
    assert time.monotonic() - killed < 2


async def test_connecting_to_a_dead_worker_is_refused(worker, pages):
    """Metadata of a process that is gone leads to WorkerLost, not to a hang."""
    source, sink = worker(), pages("nixl")
    peer = source.peer
    source.end()
    with pytest.raises(WorkerLost):
        await sink.transport.connect(peer, 10)


async def test_connecting_to_a_hung_worker_ends_in_time_and_can_be_repeated(worker, pages, monkeypatch):
    """A source that does not answer costs its timeout and no more; once it goes on, connecting works."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    source, sink = worker(env=TCP), pages("nixl")
    peer = source.peer
    source.signal(signal.SIGSTOP)
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            await sink.transport.connect(peer, 0.3)
        assert time.monotonic() - began < 2
    source.signal(signal.SIGCONT)
    await sink.transport.connect(peer, 10)
    await sink.transport.read(peer, [(0, 0)], 10)
    assert sink.transport.link(peer) == "nixl:ucx:tcp"


async def test_a_restarted_source_works_at_once_and_its_old_life_does_not(worker, pages, expected):
    """Same worker id, new incarnation: connect forgets the old life, and a read by the old Peer is refused."""
    first, sink = worker(incarnation="1"), pages("nixl")
    await sink.transport.connect(first.peer, 10)
    await sink.transport.read(first.peer, [(0, 0)], 10)
    first.signal(signal.SIGKILL)
    second = worker(incarnation="2")
    second.fill(0, 42)
    await sink.transport.connect(second.peer, 10)
    await sink.transport.read(second.peer, [(0, 0)], 10)
    assert (sink.array[0] == expected(42, 4096)).all()
    with pytest.raises(WorkerLost):
        await sink.transport.read(first.peer, [(0, 0)], 10)
    await sink.transport.read(second.peer, [(0, 0)], 10)


async def late_write(worker, other, pages, expected, end_read):
    """Posts a read from a stopped source over TCP, ends it, fills the local blocks anew, lets the source go on, makes
    progress with reads from another. Says whether anything was written into the local blocks after the end."""
    source = worker(num_blocks=17, block_bytes=MIB, env=TCP)
    sink = pages("nixl", num_blocks=17, block_bytes=MIB)
    source.serve()
    await sink.transport.connect(source.peer, 10)
    await sink.transport.connect(other.peer, 10)
    source.signal(signal.SIGSTOP)
    await end_read(sink.transport, source.peer, [(b, b) for b in range(16)])
    sink.array[:] = 7
    source.signal(signal.SIGCONT)
    until = time.monotonic() + 1
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
    with pytest.raises(DeadlineExceeded):
        await transport.read(peer, pairs, 0.2)


@pytest.mark.parametrize("end_read", [cancelled_read, expired_read])
async def test_a_read_that_ended_never_writes_again(worker, tcp_source, pages, monkeypatch, expected, end_read):
    """Neither after a cancellation nor after a timeout can a hung source, once it goes on, reach the local blocks."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr(nixl_transport, "GRACE", 0.3)
    assert not await late_write(worker, tcp_source, pages, expected, end_read)


async def test_without_the_replaced_agent_a_late_write_happens(worker, tcp_source, pages, monkeypatch, expected):
    """The control of the test above: releasing the handles alone lets the bytes land in blocks that were given back."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr(nixl_transport, "GRACE", 0.3)

    def only_release(self, why):
        for read in [read for read in self._reads if read.error is not None]:
            for flight in read.flights:
                flight.handle.release()
            read.flights.clear()

    monkeypatch.setattr(NixlTransport, "_replace_agent", only_release)
    assert await late_write(worker, tcp_source, pages, expected, cancelled_read)


async def test_a_hung_source_costs_no_other_reader_its_read(worker, tcp_source, pages, monkeypatch, expected):
    """While one source hangs and its read is ended by force, reads from another go on and do that one no harm."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setattr(nixl_transport, "GRACE", 0.3)
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


async def test_an_idle_agent_uses_no_cpu(nixl_source):
    """Over one second an idle worker spends less than 5 % of a core."""
    source = nixl_source
    before, began = source.ask(cmd="cpu")["cpu"], time.monotonic()
    becomes_true(lambda: time.monotonic() > began + 1)
    assert source.ask(cmd="cpu")["cpu"] - before < 0.05 * (time.monotonic() - began)


def test_four_workers_starting_at_once_all_come_up(worker):
    """Concurrent starts do not hang."""
    started = [worker(f"w{i}") for i in range(4)]
    assert {w.peer.worker_id for w in started} == {"w0", "w1", "w2", "w3"}


async def test_nothing_is_left_after_close(worker, pages):
    """A closed transport leaves no thread, no open file and no shared memory segment, in either process."""
    before = segments()
    source, sink = worker(), pages("nixl")
    await sink.transport.connect(source.peer, 10)
    await sink.transport.read(source.peer, [(0, 0)], 10)
    assert source.exit()["threads"] == ["MainThread"]
    sockets = [link for link in open_files() if link.startswith("socket:")]
    sink.transport.close()
    assert len([link for link in open_files() if link.startswith("socket:")]) < len(sockets)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("nixl")]
    assert becomes_true(lambda: segments() <= before)


async def test_nothing_is_left_after_a_kill(worker, pages):
    """SIGKILL of a connected worker leaves no shared memory segment behind."""
    before = segments()
    source, sink = worker(), pages("nixl")
    await sink.transport.connect(source.peer, 10)
    source.end()
    sink.transport.close()
    assert becomes_true(lambda: segments() <= before)


def open_files() -> list[str]:
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue  # the descriptor of this very listing
    return names
