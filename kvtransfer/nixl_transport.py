"""A Transport over NIXL and UCX. Every NIXL call of the project is in this file.

One thread owns the agent and makes all its calls, because NIXL is not thread-safe and a read over shared memory copies
inside the call. NIXL's own progress thread stays off: it polls without rest, one core per agent. The owner thread
drives progress instead: almost without pause while reads are in flight, every SERVING_PAUSE while a transfer from here
is open, and every IDLE_PAUSE otherwise, which is what lets a peer wire up at any time.

Why no late write can happen. `release_xfer_handle` on an active read does not stop it, and neither does
`remove_remote_agent`: measured over TCP, the bytes still land when progress goes on. So a read that is cancelled or out
of time posts nothing more and waits until what is in flight is done or has failed; over shared memory that is at once,
because the copy is synchronous. If a hung peer keeps it in flight for longer than GRACE, the agent is destroyed, and
with it the UCX worker, its connections and the memory registration that any write needs; a new agent takes its place.
Reads from other peers pause for that and go on.

What remains (UCX over TCP only, measured): a source that finds a read request in its socket whose reader has gone away
meanwhile dies of "Fatal: unexpected error: Endpoint timeout". It takes a source that made no progress at that time,
which is why GRACE is long, why a reader that closes ends its reads first, and why other reads are let out before the
agent is replaced. Over shared memory no request is ever sent.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from kvtransfer.blocks import Peer, ReadStats, Region, agent_name, check_compatible
from kvtransfer.transport import Pair, batches, check_pairs, settle
from kvtransfer.ucx_log import ucx_log
from tandem.errors import DeadlineExceeded, IncompatibleLayout, InternalError, TandemError, Unavailable, WorkerLost

log = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds between two rounds of progress.
READING_PAUSE = 50e-6
SERVING_PAUSE = 500e-6

# Links over which the reader copies by itself: the kernel for cma and xpmem, shared memory, CUDA's own. Everything
# else, RDMA included until it has been tried, asks the source to make progress.
ONE_SIDED = frozenset({"cma", "xpmem", "knem", "cuda_ipc"})
IDLE_PAUSE = 20e-3

# A call that drives progress takes 1.5 us when there is nothing to do; one that took longer than this moved bytes, and
# the next should follow at once.
WORKING_CALL = 20e-6

# Seconds that a stopped read may stay in flight before the agent is replaced, and those that the reads of others are
# then given to land.
GRACE = 10.0
LET_OUT = 2.0

# Seconds that reads may still take when the transport is closed.
CLOSE_GRACE = 1.0

# Posted transfers per read: the next one is on its way while the last one lands.
DEPTH = 2

START_TIMEOUT = 60.0
CLOSE_TIMEOUT = 10.0
WARM_UP_BYTES = 64


def _load_nixl() -> Any:
    """The NIXL module, without what importing it does to the process's logging."""
    raise_exceptions = logging.raiseExceptions
    import nixl._api as nixl_api

    logging.raiseExceptions = raise_exceptions
    nixl_logger = logging.getLogger("nixl")
    # It logs to stdout by default, which belongs to the user's own output.
    nixl_logger.handlers.clear()
    nixl_logger.propagate = True
    nixl_logger.setLevel(logging.WARNING)
    return nixl_api


@dataclass(eq=False)
class _Remote:
    """A peer that was connected. `dlist` is None until the present agent has met it."""

    peer: Peer
    dlist: Any = None
    # Read tables in the log before the first read from it, and UCX's name for the connection.
    tables_before: int = 0
    endpoint: str = ""
    # The present agent is not the one that it was connected with, and its reads may bring tables at any time.
    met_again: bool = False


@dataclass(eq=False)
class _Flight:
    """One posted transfer."""

    handle: Any
    pairs: list[Pair]


@dataclass(eq=False)
class _Read:
    """One call of `read`, or a warm-up. Owned by the owner thread, but for `cancelled`."""

    peer: Peer
    todo: deque[list[Pair]]
    deadline: float
    # Reads a few bytes into memory that is never used for anything: a late write there does no harm.
    warm_up: bool = False
    done: Future[None] = field(default_factory=Future)
    flights: list[_Flight] = field(default_factory=list)
    cancelled: bool = False
    # Why it posts nothing more, and since when.
    error: TandemError | None = None
    stopped_at: float = 0.0

    def stop(self, error: TandemError) -> None:
        if self.error is None:
            self.error, self.stopped_at = error, time.monotonic()
            self.todo.clear()


class NixlTransport:
    """See Transport. Raises Unavailable when no NIXL agent can be started here."""

    kind = "nixl"

    def __init__(self, region: Region, worker_id: str, incarnation: str, layout_hash: str) -> None:
        self.region = region
        self.layout_hash = layout_hash
        self._worker_id, self._incarnation = worker_id, incarnation
        self._name = agent_name(worker_id, incarnation)
        self._scratch = np.zeros(WARM_UP_BYTES, dtype=np.uint8)

        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._commands: deque[Callable[[], None]] = deque()
        self._serving = 0
        self._closing = False
        self._broken: Exception | None = None
        self._connecting: dict[str, asyncio.Task[None]] = {}
        # One peer at a time, so that what the log says while it is held is about that peer.
        self._introductions = asyncio.Lock()
        self._metadata = b""
        self._links: dict[str, str] = {}

        # Of the owner thread alone.
        self._nixl: Any = None
        self._agent: Any = None
        self._registered: list[Any] = []
        self._local_dlist: Any = None
        self._errors: tuple[type[Exception], ...] = ()
        self._remotes: dict[str, _Remote] = {}
        self._lost: set[str] = set()
        self._reads: list[_Read] = []

        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name=f"nixl {self._name}", daemon=True)
        self._thread.start()
        try:
            started.result(START_TIMEOUT)
        except FutureTimeout as error:
            self._closing = True
            raise Unavailable(f"the NIXL agent did not start within {START_TIMEOUT:.0f} s") from error

    # Any thread.

    def peer(self) -> Peer:
        region = self.region
        return Peer(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            agent_name=self._name,
            metadata=self._metadata,
            layout_hash=self.layout_hash,
            address=region.address,
            num_blocks=region.num_blocks,
            block_bytes=region.block_bytes,
            device=region.device,
            memory=region.memory,
            transport=self.kind,
        )

    async def connect(self, peer: Peer, timeout: float) -> None:
        check_compatible(self.region, self.layout_hash, peer, self.kind)
        attempt = self._connecting.get(peer.agent_name)
        if attempt is None:
            attempt = asyncio.create_task(self._connect(peer, timeout))
            self._connecting[peer.agent_name] = attempt
            attempt.add_done_callback(lambda task: self._connected(peer, task))
        done, _ = await asyncio.wait([attempt], timeout=timeout)
        if not done:
            raise DeadlineExceeded(f"connecting to {peer.worker_id} took longer than {timeout} s")
        await attempt

    async def read(self, peer: Peer, pairs: Sequence[Pair], timeout: float) -> ReadStats:
        check_compatible(self.region, self.layout_hash, peer, self.kind)
        check_pairs(self.region, peer, pairs)
        started = time.monotonic()
        await self._perform(_Read(peer, deque(batches(pairs, self.region.block_bytes)), started + timeout))
        return ReadStats(len(pairs) * self.region.block_bytes, time.monotonic() - started, self.link(peer))

    @contextmanager
    def serving(self) -> Iterator[None]:
        with self._lock:
            self._serving += 1
        self._wake.set()
        try:
            yield
        finally:
            with self._lock:
                self._serving -= 1

    def one_sided(self, peer: Peer) -> bool:
        return self.link(peer).rpartition(":")[2] in ONE_SIDED

    def link(self, peer: Peer) -> str:
        return self._links.get(peer.agent_name, "nixl:ucx:unknown")

    def forget(self, peer: Peer) -> None:
        if not self._closing:
            self._submit(lambda: self._lose(peer.agent_name, f"{peer.agent_name} was forgotten"))

    def close(self) -> None:
        with self._lock:
            self._closing = True
        self._wake.set()
        self._thread.join(CLOSE_TIMEOUT)
        if self._thread.is_alive():
            log.error("the NIXL agent %s did not stop within %.0f s", self._name, CLOSE_TIMEOUT)

    async def _connect(self, peer: Peer, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        async with self._introductions:
            if not await self._call(lambda: self._introduce(peer)):
                return
            # Twice: wire-up may replace the endpoint's configuration, and only then is the choice of transport final.
            await self._perform(_Read(peer, deque([[]]), deadline, warm_up=True))
            await self._perform(_Read(peer, deque([[]]), deadline, warm_up=True))

    def _connected(self, peer: Peer, attempt: asyncio.Task[None]) -> None:
        self._connecting.pop(peer.agent_name, None)
        if not attempt.cancelled() and attempt.exception() is not None:
            log.info("connecting to %s: %s", peer.agent_name, attempt.exception())

    async def _perform(self, read: _Read) -> None:
        read.done.set_running_or_notify_cancel()
        self._submit(lambda: self._accept(read))
        done = asyncio.wrap_future(read.done)
        try:
            await asyncio.shield(done)
        except asyncio.CancelledError:
            read.cancelled = True
            self._wake.set()
            await settle(done, f"a read from {read.peer.agent_name}")
            raise

    async def _call(self, function: Callable[[], T]) -> T:
        """Runs a short function in the owner thread."""
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(function())
            except Exception as error:  # noqa: BLE001, it reaches the caller
                result.set_exception(error)

        result.set_running_or_notify_cancel()
        self._submit(run)
        return await asyncio.wait_for(asyncio.wrap_future(result), START_TIMEOUT)

    def _submit(self, command: Callable[[], None]) -> None:
        with self._lock:
            if not self._closing and self._broken is None:
                self._commands.append(command)
                self._wake.set()
                return
        if self._broken is not None:
            raise InternalError(f"the NIXL agent {self._name} is broken: {self._broken!r}")
        raise WorkerLost(f"{self._name} is closed")

    # The owner thread, from here on.

    def _run(self, started: Future[None]) -> None:
        try:
            self._start_agent()
        except Exception as error:  # noqa: BLE001, it reaches the caller
            failure = Unavailable(f"no NIXL agent can be started: {error!r}")
            failure.__cause__ = error
            started.set_exception(failure)
            self._broken = error
            return
        started.set_result(None)
        try:
            while not self._closing:
                self._round()
            self._end()
        except Exception as error:
            log.exception("the owner thread of the NIXL agent %s failed", self._name)
            with self._lock:
                self._broken = error
            self._destroy_agent()
            self._finish_all(InternalError(f"the NIXL agent {self._name} failed: {error!r}"))
        finally:
            ucx_log.drop(self._name)

    def _round(self) -> None:
        self._wake.clear()
        while self._commands:
            self._commands.popleft()()
        started = time.perf_counter()
        if self._reads:
            worked = self._progress_reads()
            pause = READING_PAUSE
        else:
            worked = bool(self._agent.get_new_notifs())
            pause = SERVING_PAUSE if self._serving else IDLE_PAUSE
        self._remove_lost()
        if not worked and time.perf_counter() - started < WORKING_CALL:
            self._wake.wait(pause)

    def _end(self) -> None:
        """Stops all reads as after a cancellation, then gives everything back."""
        for read in self._reads:
            read.stop(WorkerLost(f"{self._name} was closed"))
        until = time.monotonic() + CLOSE_GRACE
        while self._reads and time.monotonic() < until:
            if not self._progress_reads():
                self._wake.wait(READING_PAUSE)
        self._destroy_agent()
        self._finish_all(WorkerLost(f"{self._name} was closed"))

    def _finish_all(self, error: TandemError) -> None:
        """Answers everybody who still waits; only after the agent is gone."""
        reads, self._reads = self._reads, []
        for read in reads:
            read.done.set_exception(read.error or error)
        with self._lock:
            commands, self._commands = self._commands, deque()
        # They run against no agent: reads are refused by _accept, the rest touch only dictionaries.
        for command in commands:
            command()

    def _accept(self, read: _Read) -> None:
        if self._agent is None:
            read.done.set_exception(WorkerLost(f"{self._name} is closed"))
        else:
            self._reads.append(read)

    def _start_agent(self) -> None:
        with ucx_log.capture():
            self._nixl = _load_nixl()
            config = self._nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
            self._errors = tuple(
                error
                for name, error in vars(self._nixl.nixlBind).items()
                if name.startswith("nixl") and name.endswith("Error")
            )
            self._agent = self._nixl.nixl_agent(self._name, config)
            self._agent.create_backend("UCX", {"engine_config": "PROTO_INFO=y"})
        region, scratch = self.region, self._scratch.ctypes.data
        memory = region.memory.upper()
        self._registered = [
            self._agent.register_memory([(region.address, region.nbytes, _device(region), "")], memory),
            self._agent.register_memory([(scratch, WARM_UP_BYTES, 0, "")], "DRAM"),
        ]
        self._metadata = self._agent.get_agent_metadata()
        self._local_dlist = self._blocks_dlist("NIXL_INIT_AGENT", region)

    def _destroy_agent(self) -> None:
        """Releases handles, lists, peers and memory in that order, then the agent, which ends its UCX worker."""
        agent = self._agent
        if agent is None:
            return
        steps: list[Callable[[], object]] = []
        for read in self._reads:
            steps += [flight.handle.release for flight in read.flights]
            read.flights.clear()
        known = {name: remote for name, remote in self._remotes.items() if remote.dlist is not None}
        steps += [remote.dlist.release for remote in known.values()]
        if self._local_dlist is not None:
            steps.append(self._local_dlist.release)
        steps += [partial(agent.remove_remote_agent, name) for name in known]
        steps += [partial(agent.deregister_memory, memory) for memory in self._registered]
        for step in steps:
            try:
                step()
            except Exception as error:  # noqa: BLE001, the destructor takes what one step left behind
                log.warning("closing the NIXL agent %s: %r", self._name, error)
        # Handles and lists hold the agent too, so every reference has to go before the worker does.
        steps.clear()
        for remote in self._remotes.values():
            remote.dlist, remote.met_again = None, True
        self._registered.clear()
        self._local_dlist = self._agent = None

    def _replace_agent(self, why: str) -> None:
        """The last resort against a write that cannot be called back. Reads from other peers start again."""
        log.warning("replacing the NIXL agent %s: %s", self._name, why)
        for read in self._reads:
            if read.error is None:
                read.todo.extendleft(flight.pairs for flight in read.flights)
        self._destroy_agent()
        stopped = [read for read in self._reads if read.error is not None]
        self._reads = [read for read in self._reads if read.error is None]
        for read in stopped:
            read.done.set_exception(read.error)
        self._start_agent()

    def _progress_reads(self) -> bool:
        """One turn for every read. Says whether anything was posted or has ended."""
        worked = False
        now = time.monotonic()
        overdue = [read for read in self._reads if read.error is not None and now > read.stopped_at + GRACE]
        for read in list(self._reads):
            worked |= self._collect(read)
            if read.cancelled:
                read.stop(WorkerLost("the reader went away"))
            if now > read.deadline:
                read.stop(DeadlineExceeded(f"reading from {read.peer.worker_id} took too long"))
            if read.todo and len(read.flights) < DEPTH and not overdue:
                self._post(read)
                worked = True
            if not read.todo and not read.flights:
                self._settle(read)
                worked = True
        waiting_for = [read for read in overdue if read.flights]
        others = [read for read in self._reads if read.error is None and read.flights]
        if waiting_for and (not others or now > waiting_for[0].stopped_at + GRACE + LET_OUT):
            self._replace_agent(f"a read from {waiting_for[0].peer.agent_name} could not be ended")
        return worked

    def _settle(self, read: _Read) -> None:
        self._reads.remove(read)
        if read.error is not None:
            if read.warm_up:
                self._lose(read.peer.agent_name, f"{read.peer.agent_name} was never connected")
            read.done.set_exception(read.error)
            return
        if read.warm_up and (self.region.memory == "dram" or self.region.spare_block is not None):
            self._learn_link(self._remotes[read.peer.agent_name])
        read.done.set_result(None)

    def _learn_link(self, remote: _Remote) -> None:
        before = None if any(one.met_again for one in self._remotes.values()) else remote.tables_before
        name = ucx_log.transport(self._name, remote.endpoint, before, self.region.block_bytes)
        self._links[remote.peer.agent_name] = f"nixl:ucx:{name or 'unknown'}"

    def _collect(self, read: _Read) -> bool:
        """Takes what has ended, well or not, out of the flights."""
        landed = [flight for flight in read.flights if self._landed(read, flight)]
        if read.warm_up and read.error is not None:
            landed = list(read.flights)
        for flight in landed:
            read.flights.remove(flight)
            self._release(flight.handle)
        return bool(landed)

    def _landed(self, read: _Read, flight: _Flight) -> bool:
        try:
            state = self._agent.check_xfer_state(flight.handle)
        except self._errors as error:
            # UCX ends all requests of an endpoint that failed, so this one is over too.
            self._lose(read.peer.agent_name, f"reading from {read.peer.agent_name} failed: {error}")
            return True
        if state == "ERR":
            self._lose(read.peer.agent_name, f"reading from {read.peer.agent_name} failed")
        return bool(state != "PROC")

    def _post(self, read: _Read) -> None:
        pairs = read.todo.popleft()
        remote = self._remotes.get(read.peer.agent_name)
        if remote is None or remote.peer != read.peer or read.peer.agent_name in self._lost:
            read.stop(WorkerLost(f"{read.peer.agent_name} is not connected"))
            return
        try:
            if remote.dlist is None:
                self._meet(remote)
            handle = self._warm_up(read.peer) if read.warm_up else self._blocks(remote, pairs)
            state = self._agent.transfer(handle)
        except TandemError as error:
            read.stop(error)
        except self._errors as error:
            self._lose(read.peer.agent_name, f"reading from {read.peer.agent_name} failed: {error}")
        else:
            read.flights.append(_Flight(handle, pairs))
            if state != "PROC":
                self._collect(read)

    def _blocks(self, remote: _Remote, pairs: list[Pair]) -> Any:
        ids = np.array(pairs, dtype=np.int32)
        local, theirs = np.ascontiguousarray(ids[:, 1]), np.ascontiguousarray(ids[:, 0])
        return self._agent.make_prepped_xfer("READ", self._local_dlist, local, remote.dlist, theirs)

    def _warm_up(self, peer: Peer) -> Any:
        size = min(WARM_UP_BYTES, peer.block_bytes)
        region = self.region
        if region.spare_block is None:
            ours = self._agent.get_xfer_descs([(self._scratch.ctypes.data, size, 0)], "DRAM")
        else:
            spare = region.address + region.spare_block * region.block_bytes
            ours = self._agent.get_xfer_descs([(spare, size, _device(region))], region.memory.upper())
        theirs = self._agent.get_xfer_descs([(peer.address, size, _device(peer))], peer.memory.upper())
        return self._agent.initialize_xfer("READ", ours, theirs, peer.agent_name)

    def _release(self, handle: Any) -> None:
        try:
            handle.release()
        except self._errors as error:
            log.warning("releasing a read of the NIXL agent %s: %s", self._name, error)

    def _introduce(self, peer: Peer) -> bool:
        """Puts the peer in place of any other life of its worker. False if it is known already."""
        known = self._remotes.get(peer.agent_name)
        if known is not None and known.peer == peer and peer.agent_name not in self._lost:
            return False
        for name, remote in self._remotes.items():
            if remote.peer.worker_id == peer.worker_id:
                self._lose(name, f"{name} was replaced by {peer.agent_name}")
        self._remove_lost()
        if peer.agent_name in self._remotes:
            raise WorkerLost(f"{peer.agent_name} has changed and is still being read; try again", retry_after=1.0)
        self._remotes[peer.agent_name] = _Remote(peer)
        return True

    def _meet(self, remote: _Remote) -> None:
        """Tells the agent about the peer. Raises WorkerLost or IncompatibleLayout if it cannot be read as described."""
        peer = remote.peer
        remote.tables_before = ucx_log.tables(self._name)
        ucx_log.details(True)
        try:
            name = self._agent.add_remote_agent(peer.metadata)
        finally:
            ucx_log.details(False)
        remote.endpoint = ucx_log.new_endpoint()
        name = name.decode() if isinstance(name, bytes) else name
        if name != peer.agent_name:
            self._agent.remove_remote_agent(name)
            raise IncompatibleLayout(f"the metadata of {peer.agent_name} is {name}'s", field="metadata")
        try:
            remote.dlist = self._blocks_dlist(name, peer)
        except self._errors as error:
            self._agent.remove_remote_agent(name)
            raise IncompatibleLayout(f"{name} has no memory where it says: {error}", field="address") from error

    def _blocks_dlist(self, name: str, region: Region | Peer) -> Any:
        row = (region.address, region.block_bytes, _device(region), region.block_bytes, region.num_blocks)
        return self._agent.prep_xfer_dlist(name, np.array([row], dtype=np.uint64), region.memory.upper())

    def _lose(self, name: str, why: str) -> None:
        """Stops all reads from a peer; it is removed when the last of them has ended."""
        for read in self._reads:
            if read.peer.agent_name == name:
                read.stop(WorkerLost(why))
        if name in self._remotes:
            self._lost.add(name)

    def _remove_lost(self) -> None:
        for name in self._lost - {read.peer.agent_name for read in self._reads}:
            self._lost.remove(name)
            self._links.pop(name, None)
            remote = self._remotes.pop(name)
            if remote.dlist is None:
                continue
            try:
                remote.dlist.release()
                self._agent.remove_remote_agent(name)
            except self._errors as error:
                log.warning("the NIXL agent %s could not remove %s: %s", self._name, name, error)


def _device(region: Region | Peer) -> int:
    """NIXL counts host memory as device 0."""
    return region.device if region.memory == "vram" else 0
