"""Links over torch.distributed, with Gloo: the promises of this transport alone. The common ones are in
test_transport.py. Both sides are in this process unless a test needs a process that can be stopped or killed."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch

from kvtransfer.backends.nccl import group as groups
from kvtransfer.backends.nccl import link as links_module
from kvtransfer.backends.nccl import transport as nccl
from kvtransfer.backends.nccl.link import Batch, PairLink, SourceLink
from kvtransfer.factory import make_transport
from kvtransfer.types import LinkEntry, LinkMessage, LinkOpen, Peer, SendBlocks
from loadtest.microbench import link_failures
from tandem.errors import (
    IncompatibleLayout,
    InvalidRequest,
    PreconditionFailed,
    SettingsError,
    StaleTransfer,
    TransferFailed,
    WorkerLost,
)
from tests.kvtransfer.conftest import Pages, dialling
from tests.support.stopwatch import Stopwatch

ALL = [(block, block) for block in range(16)]
MIB = 1 << 20


class Pair:
    """A source and a sink in this process. `change` may alter each message to the source, or drop it by returning None;
    `sent` has the messages that were sent."""

    def __init__(self, make: Callable[..., Pages], block_bytes: int = 4096) -> None:
        self.source = make("nccl", "source", block_bytes=block_bytes)
        self.sink = make("nccl", "sink", block_bytes=block_bytes)
        for block in range(16):
            self.source.fill(block, block)
        self.sent: list[LinkMessage] = []
        self.change: Callable[[LinkMessage], LinkMessage | None] = lambda message: message
        self.sink.transport.dial = self._dial

    @property
    def peer(self) -> Peer:
        return self.source.peer

    @property
    def epochs(self) -> list[int]:
        return [message.epoch for message in self.sent if isinstance(message, LinkOpen)]

    async def connect(self) -> None:
        await self.sink.transport.connect(self.peer, 10)

    async def read(self, pairs: list[tuple[int, int]] = ALL, stall: float = 10.0) -> None:
        await self.sink.transport.read(self.peer, pairs, stall)

    def arrived(self) -> bool:
        return bool((self.sink.array == self.source.array).all())

    def _dial(self, peer: Peer, messages: AsyncIterator[LinkMessage]) -> AsyncGenerator[LinkMessage, None]:
        return self.source.transport.answer(self._passed(messages))

    async def _passed(self, messages: AsyncIterator[LinkMessage]) -> AsyncGenerator[LinkMessage, None]:
        async for message in messages:
            if (changed := self.change(message)) is not None:
                self.sent.append(changed)
                yield changed


@pytest.fixture
async def pair(pages: Callable[..., Pages]) -> AsyncIterator[Pair]:
    made = Pair(pages)
    yield made
    made.sink.transport.close()
    made.source.transport.close()


class Gate:
    """Sources send nothing while the gate is closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        self._open.set()
        self.waiting = threading.Event()
        begin = SourceLink._begin

        def held(link: SourceLink, *arguments: Any) -> Any:
            self.waiting.set()
            self._open.wait(30)
            return begin(link, *arguments)

        monkeypatch.setattr(SourceLink, "_begin", held)

    def shut(self) -> None:
        self.waiting.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def reached(self) -> None:
        assert await asyncio.to_thread(self.waiting.wait, 10)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open()


async def becomes_true(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    watch = Stopwatch()
    while not condition():
        if not watch.within(seconds):
            return False
        await asyncio.sleep(0.005)
    return True


def links() -> list[str]:
    """The threads of links."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("kv link")]


# ---- no late write


async def late_write(pair: Pair, gate: Gate) -> bool:
    """Cancels a read whose blocks are in flight, refills the local ones, lets the source continue, and reads others.
    Returns whether anything was written to the blocks of the cancelled read."""
    await pair.connect()
    gate.shut()
    reading = asyncio.create_task(pair.read(ALL[:8]))
    await gate.reached()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    pair.sink.array[:] = 7
    gate.open()
    await pair.read(ALL[8:])
    assert (pair.sink.array[8:] == pair.source.array[8:]).all()
    return not (pair.sink.array[:8] == 7).all()


async def test_a_cancelled_read_returns_at_once_and_never_writes(pair: Pair, gate: Gate) -> None:
    """The message of a cancelled read arrives later on the same link and ends in staging; the following reads get their
    own bytes."""
    assert not await late_write(pair, gate)
    assert pair.epochs == [1]


async def test_control_without_the_claim_a_late_message_is_written(
    pair: Pair, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control of the test above: a link that does not check whether a batch was given up writes to blocks that are
    free."""
    monkeypatch.setattr(Batch, "give_up", lambda batch: True)
    assert await late_write(pair, gate)


async def test_a_read_that_is_cancelled_before_its_turn_is_never_asked_for(pair: Pair, gate: Gate) -> None:
    """A read that is cancelled before its SendBlocks is dropped; the source receives no request."""
    await pair.connect()
    gate.shut()
    first = [asyncio.create_task(pair.read([(block, block)])) for block in (0, 1)]
    await gate.reached()
    dropped = asyncio.create_task(pair.read([(5, 5)]))
    await asyncio.sleep(0)
    dropped.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dropped
    gate.open()
    await asyncio.gather(*first)
    await pair.read([(6, 6)])
    asked = [message.blocks for message in pair.sent if isinstance(message, SendBlocks)]
    assert sorted(asked) == [(0,), (1,), (6,)]


def held_scatter(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Writes of arrived batches: one has begun, and it may go on."""
    began, go = threading.Event(), threading.Event()
    scatter = nccl.Pages.scatter

    def held(*arguments: Any) -> None:
        began.set()
        go.wait(10)
        scatter(*arguments)

    monkeypatch.setattr(nccl.Pages, "scatter", held)
    return began, go


async def test_a_read_is_given_back_only_after_a_write_that_has_begun(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that is cancelled during the scatter returns only when the scatter has ended."""
    began, go = held_scatter(monkeypatch)
    await pair.connect()
    reading = asyncio.create_task(pair.read())
    assert await asyncio.to_thread(began.wait, 10)
    reading.cancel()
    done, _ = await asyncio.wait([reading], timeout=0.1)
    assert not done
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
    pair.sink.array[:] = 7
    await pair.sink.transport.connect(pair.peer, 10)
    assert (pair.sink.array == 7).all()


async def test_a_read_that_is_cancelled_twice_leaves_no_later_batch(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second cancellation ends the wait for the batch that is being written; the others were given up before."""
    began, go = held_scatter(monkeypatch)
    monkeypatch.setattr(nccl, "batches", lambda pairs, size: [[one] for one in pairs])
    await pair.connect()
    reading = asyncio.create_task(pair.read())
    assert await asyncio.to_thread(began.wait, 10)
    for _ in range(2):
        reading.cancel()
        await asyncio.wait([reading], timeout=0.05)
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
    pair.sink.array[:] = 7
    await pair.read([(0, 0)])  # the link's thread has passed all batches of the first read
    assert (pair.sink.array[1:] == 7).all()


async def test_a_read_that_is_cancelled_twice_awaits_every_batch_that_is_being_written(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both cancellations come in the middle of the first of two batches: the read ends after the second one."""
    began, go = held_scatter(monkeypatch)
    held, second, written = nccl.Pages.scatter, threading.Event(), list[int]()
    monkeypatch.setattr(nccl, "batches", lambda pairs, size: [[one] for one in pairs])
    monkeypatch.setattr(nccl.Batch, "give_up", lambda batch: False)  # each is being written

    def scatter(*arguments: Any) -> None:
        if written:
            assert second.wait(10)
        held(*arguments)
        written.append(1)

    monkeypatch.setattr(nccl.Pages, "scatter", scatter)
    await pair.connect()
    reading = asyncio.create_task(pair.read([(0, 0), (1, 1)]))
    assert await asyncio.to_thread(began.wait, 10)
    for _ in range(2):
        reading.cancel()
        await asyncio.wait([reading], timeout=0.05)
    go.set()
    await asyncio.wait([reading], timeout=0.2)
    assert not reading.done()
    second.set()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert len(written) == 2


async def test_a_batch_that_cannot_be_written_fails_its_read(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device may be out of memory at that moment. The link ends, and the read does not wait for it."""

    def failing(*_: Any) -> None:
        raise RuntimeError("out of memory")

    await pair.connect()
    monkeypatch.setattr(nccl.Pages, "scatter", failing)
    with pytest.raises(TransferFailed, match="out of memory"):
        await asyncio.wait_for(pair.read(), 5)


# ---- sources that do not answer


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_source_that_stands_still_or_dies_fails_its_reads_in_time(
    worker: Any, pages: Any, number: signal.Signals
) -> None:
    """Reads from a killed source fail at once, reads from a stopped one after the read's stall limit. When the source
    continues, the next read makes another link, and nothing of the former one is written."""
    source = worker(num_blocks=17, block_bytes=MIB, kind="nccl")
    sink = pages("nccl", num_blocks=17, block_bytes=MIB)
    source.fill(16, 16)
    async with dialling(sink, source):
        await sink.transport.connect(source.peer, 10)
        await sink.transport.read(source.peer, ALL, 10)
        source.signal(signal.SIGSTOP)
        watch = Stopwatch()
        reading = asyncio.create_task(sink.transport.read(source.peer, ALL, 0.5 if number == signal.SIGSTOP else 30))
        await asyncio.sleep(0)
        source.signal(number)
        with pytest.raises(TransferFailed):
            await reading
        assert watch.within(3.0)
        sink.array[:] = 7
        if number == signal.SIGKILL:
            with pytest.raises(TransferFailed):
                await sink.transport.connect(source.peer, 10)
        else:
            source.signal(signal.SIGCONT)
            await sink.transport.read(source.peer, [(16, 16)], 10)
            assert sink.array[16].any()
            assert not (sink.array[16] == 7).all()
        assert (sink.array[:16] == 7).all()


async def test_a_source_that_never_makes_its_half_fails_the_connect_in_time(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides stop waiting for the other side's process group after a time limit."""
    with monkeypatch.context() as patch:
        for module in ("transport", "link"):
            patch.setattr(f"kvtransfer.backends.nccl.{module}.STALL_S", 0.3)
        pair.change = lambda message: None if isinstance(message, LinkEntry) else message
        with pytest.raises(TransferFailed):
            await pair.connect()
        assert await becomes_true(lambda: not links())
    pair.change = lambda message: message
    await pair.connect()
    await pair.read()
    assert pair.arrived()


async def test_what_a_late_message_may_reach_is_kept_until_the_group_is_aborted(
    pair: Pair, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that was freed earlier would get another use while NCCL still writes into it."""
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    staging, abort = links_module.Pages.staging, groups.abort

    def remembered(pages: links_module.Pages) -> torch.Tensor:
        tensor = staging(pages)
        made.append(weakref.ref(tensor))
        return tensor

    def counted(group: Any, device: torch.device) -> None:
        alive.append(sum(one() is not None for one in made))
        abort(group, device)

    monkeypatch.setattr(links_module.Pages, "staging", remembered)
    monkeypatch.setattr(groups, "abort", counted)
    await pair.connect()
    gate.shut()
    with pytest.raises(TransferFailed):
        await pair.read(stall=0.3)
    assert await becomes_true(lambda: bool(alive))
    assert alive[0] == len(made) > 0
    assert await becomes_true(lambda: sum(one() is not None for one in made) < alive[0])
    gate.open()


async def test_all_reads_of_a_link_that_fails_end_and_the_next_makes_another(pair: Pair, gate: Gate) -> None:
    """When a link fails, all its reads end; the process and the transport continue, and the next link has the next
    epoch."""
    await pair.connect()
    gate.shut()
    reads = [asyncio.create_task(pair.read([(block, block)], 0.3)) for block in range(6)]
    for read in reads:
        with pytest.raises(TransferFailed):
            await read
    gate.open()
    await pair.read()
    assert pair.arrived()
    assert pair.epochs == [1, 2]
    assert pair.sink.transport.broken is None


async def test_reads_of_one_link_take_turns(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short read that was submitted after a long one does not wait for the end of the long one."""
    monkeypatch.setattr("kvtransfer.transport.BATCH_BYTES", 4096)
    await pair.connect()
    await asyncio.gather(pair.read(ALL[:15]), pair.read([(15, 15)]))
    asked = [message.blocks[0] for message in pair.sent if isinstance(message, SendBlocks)]
    assert asked.index(15) < 6
    assert pair.arrived()


# ---- who may make a link


async def answers(pair: Pair, *messages: LinkMessage) -> list[LinkMessage]:
    """The source's answers to these messages, until it ends the link."""

    async def given() -> AsyncGenerator[LinkMessage, None]:
        for message in messages:
            yield message

    return [answer async for answer in pair.source.transport.answer(given())]


def opening(**changed: Any) -> LinkOpen:
    return replace(LinkOpen("sink", "1", "1", "layout-1", 1, bytes(32)), **changed)


@pytest.mark.parametrize(
    ("messages", "refused"),
    [
        ([], InvalidRequest),
        ([LinkEntry("0", b"")], InvalidRequest),
        ([opening(secret=b"short")], InvalidRequest),
        ([opening(source_incarnation="2")], StaleTransfer),
        ([opening(layout_hash="other")], IncompatibleLayout),
        ([opening(), opening()], InvalidRequest),
        ([opening(), LinkEntry("k", bytes(nccl.MAX_ENTRY_BYTES))], InvalidRequest),
        ([opening(), *(LinkEntry(str(n), b"") for n in range(nccl.MAX_ENTRIES + 1))], InvalidRequest),
        ([opening(), SendBlocks(1, (16,), 1.0)], InvalidRequest),
        ([opening(), SendBlocks(1, (), 1.0)], InvalidRequest),
        ([opening(), SendBlocks(1, (0,) * 2000, 1.0)], InvalidRequest),
        ([opening(), *(SendBlocks(n, (0,), 1.0) for n in range(nccl.MAX_WAITING + 1))], InvalidRequest),
    ],
)
async def test_what_no_decode_worker_sends_ends_the_link(
    pair: Pair, messages: list[LinkMessage], refused: type[Exception]
) -> None:
    """Messages that a decode worker never sends end the link at a bounded cost, without harm to other links."""
    with pytest.raises(refused):
        await answers(pair, *messages)
    await pair.connect()
    await pair.read()
    assert pair.arrived()


async def test_a_link_of_an_earlier_epoch_is_refused_and_a_later_one_takes_its_place(pair: Pair) -> None:
    """A delayed message cannot end the link that is in use."""
    await pair.connect()
    with pytest.raises(StaleTransfer):
        await answers(pair, opening())
    await pair.read()
    assert pair.epochs == [1]
    pair.change = lambda message: replace(message, epoch=9) if isinstance(message, LinkOpen) else message
    pair.sink.transport.forget(pair.peer)
    await pair.connect()
    await pair.read()
    assert pair.arrived()


async def test_a_stranger_on_the_data_connection_gets_and_gives_no_block(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer on the data connection must know the secret that was sent over gRPC. In the control, without that check, a
    stranger is served."""

    def strange(message: LinkMessage) -> LinkMessage:
        return replace(message, secret=bytes(32)) if isinstance(message, LinkOpen) else message

    pair.change = strange
    with pytest.raises(TransferFailed, match="somebody else"):
        await pair.connect()
    with pytest.raises(TransferFailed):
        await pair.read()
    assert not pair.sink.array.any()
    monkeypatch.setattr(PairLink, "_greet", lambda link, group: None)
    await pair.connect()
    await pair.read()
    assert pair.arrived()


async def test_links_listen_on_the_workers_own_address_alone(pages: Any) -> None:
    """A link listens only on the worker's own address, and an address that is not of this machine is refused with the
    name of the setting."""
    region = pages("inprocess").region
    made = make_transport("nccl", region, "w", "1", "layout-1", "127.0.0.2")
    other = make_transport("nccl", region, "v", "1", "layout-1", "127.0.0.2")
    made.dial = lambda peer, messages: other.answer(messages)
    before = listening()
    await made.connect(other.peer(), 10)
    assert {host for host, _ in listening() - before} == {"127.0.0.2"}
    made.close()
    other.close()
    with pytest.raises(SettingsError) as refused:
        make_transport("nccl", region, "w", "1", "layout-1", "192.0.2.1")
    assert refused.value.field == "advertise_host"


def listening() -> set[tuple[str, int]]:
    """The addresses on which this process listens."""
    found = psutil.Process().net_connections(kind="tcp")
    return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}


async def test_a_transport_without_links_refuses_them(pages: Any) -> None:
    """A decode worker that dials a worker with another transport gets the reason."""
    pair = Pair(pages)
    pair.source = pages("inprocess", "source")
    with pytest.raises(PreconditionFailed):
        await answers(pair, opening())


# ---- what remains


async def test_nothing_is_left_after_close_on_either_side(pair: Pair) -> None:
    """After close, no thread and no open file remains; reads in flight end with WorkerLost."""
    files = len(os.listdir("/proc/self/fd"))
    await pair.connect()
    await pair.read()
    assert len(links()) == 2
    pair.sink.transport.close()
    pair.source.transport.close()
    with pytest.raises(WorkerLost):
        await pair.read()
    assert await becomes_true(lambda: not links() and len(os.listdir("/proc/self/fd")) <= files)


async def test_failed_links_leave_nothing() -> None:
    """Links that have failed leave no file and no thread behind: two of each kind of failure here, 500 in `python -m
    loadtest links`, which also measures memory. That of this process depends on the tests before."""
    (first, last), _ = await link_failures.repeat(2 * len(link_failures.KINDS))
    for then, now in zip(first, last, strict=True):
        assert not now.leaks(then), (then, now)


# ---- the device decides


def test_devices_use_nccl_and_hosts_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV on a GPU uses NCCL and KV in host memory Gloo; a torch without NCCL is refused at the start, not at the first
    link."""
    assert [groups.backend_of(torch.device(name)) for name in ("cuda", "cpu")] == ["nccl", "gloo"]
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(SettingsError):
        groups.check_host(torch.device("cuda", 0), "127.0.0.1")


def test_work_of_nccl_that_never_ends_is_given_up_in_time() -> None:
    """NCCL has no wait with a time limit, so the link polls (with a stand-in: this has not run on a GPU)."""

    class Never:
        def is_completed(self) -> bool:
            return False

    watch = Stopwatch()
    with pytest.raises(TransferFailed):
        groups.wait(Never(), torch.device("cuda", 0), 0.05)
    assert watch.within(2.0)


def test_a_store_passes_on_what_is_set_and_waits_for_what_is_told() -> None:
    """A store sends the keys that are set here, waits for those of the other side, and ends every wait when its link
    ends."""
    told: list[tuple[str, bytes]] = []
    store = groups.PairStore(lambda key, value: told.append((key, value)), 5.0)
    store.set("a", b"1")
    assert told == [("a", b"1")]
    threading.Timer(0.05, store.put, ["b", b"2"]).start()
    assert store.get("b") == b"2"
    assert store.check(["a", "b"])
    assert not store.check(["c"])
    threading.Timer(0.05, store.close).start()
    with pytest.raises(TimeoutError):
        store.get("c")
