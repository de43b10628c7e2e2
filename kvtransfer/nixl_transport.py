"""A Transport over NIXL and UCX. Every NIXL call of the project is in this file.

One thread owns the agent and makes all its calls, because NIXL is not thread-safe and a read over shared memory copies
inside the call. NIXL's own progress thread stays off: it polls without rest, one core per agent. The owner thread
drives progress instead: almost without pause while reads are in flight, every SERVING_PAUSE while a transfer from here
is open, and every IDLE_PAUSE otherwise, which is what lets a peer wire up at any time. No call of it waits for the
network, so peers connect concurrently and one that does not answer delays no other.

Why no late write can happen. `release_xfer_handle` on an active read does not stop it, and neither does
`remove_remote_agent`: measured over TCP, the bytes still land when progress goes on. So a read that is cancelled or has
failed posts nothing more and waits until what is in flight is done or has failed; over shared memory that is at once,
because the copy is synchronous. If a hung peer keeps it in flight for longer than GRACE, the agent is destroyed, and
with it the UCX worker, its connections and the memory registration that any write needs; a new agent takes its place.
Reads from other peers pause for that and go on. The reader is told of the failure before that wait (`failing`).

What fails is one read; its connection is then made anew as soon as nothing is in flight over it. When a batch stalls,
the peer is silent and all its reads fail; it takes no others until that batch has ended.

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
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np

from kvtransfer.blocks import Peer, ReadStats, Region, agent_name, check_compatible
from kvtransfer.reads import Flight, Read, Remote
from kvtransfer.transport import STALL, Pair, batches, check_pairs, settle
from kvtransfer.ucx_log import ucx_log
from tandem.errors import IncompatibleLayout, InternalError, TandemError, TransferFailed, Unavailable, WorkerLost

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

# The owner thread's clock advances by at most this much in one round, so that a process which was stopped or starved
# for seconds looks at its sockets before it takes its peers for silent.
ROUND_LIMIT = 0.1

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


class NixlTransport:
    """See Transport. Raises Unavailable when no NIXL agent can be started here."""

    kind = "nixl"

    def __init__(self, region: Region, worker_id: str, incarnation: str, layout_hash: str) -> None:
        self.region = region
        self.layout_hash = layout_hash
        self.broken: TandemError | None = None
        self.on_broken: Callable[[], object] | None = None
        self.last_round_at = time.monotonic()
        self._worker_id, self._incarnation = worker_id, incarnation
        self._name = agent_name(worker_id, incarnation)
        self._scratch = np.zeros(WARM_UP_BYTES, dtype=np.uint8)

        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._commands: deque[Callable[[], None]] = deque()
        self._serving = 0
        self._closing = False
        self._connecting: dict[str, asyncio.Task[None]] = {}
        self._metadata = b""
        self._links: dict[str, str] = {}

        # Of the owner thread alone.
        self._nixl: Any = None
        self._agent: Any = None
        self._registered: list[Any] = []
        self._local_dlist: Any = None
        self._errors: tuple[type[Exception], ...] = ()
        self._remotes: dict[str, Remote] = {}
        # Seconds of rounds; see ROUND_LIMIT.
        self._now = 0.0
        self._details = False

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
            attempt = asyncio.create_task(self._connect(peer))
            self._connecting[peer.agent_name] = attempt
            attempt.add_done_callback(lambda task: self._connected(peer, task))
        done, _ = await asyncio.wait([attempt], timeout=timeout)
        if not done:
            raise TransferFailed(f"connecting to {peer.worker_id} took longer than {timeout} s")
        await attempt

    async def read(
        self,
        peer: Peer,
        pairs: Sequence[Pair],
        stall: float,
        failing: Callable[[TandemError], None] | None = None,
    ) -> ReadStats:
        check_compatible(self.region, self.layout_hash, peer, self.kind)
        check_pairs(self.region, peer, pairs)
        started = time.monotonic()
        read = Read(peer, deque(batches(pairs, self.region.block_bytes)), stall)
        if failing is not None:
            read.failing = partial(_tell, asyncio.get_running_loop(), failing)
        await self._perform(read)
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
        if not self._closing and self.broken is None:
            self._submit(lambda: self._lose(peer.agent_name, f"{peer.agent_name} was forgotten"))

    def close(self) -> None:
        with self._lock:
            self._closing = True
        self._wake.set()
        self._thread.join(CLOSE_TIMEOUT)
        if self._thread.is_alive():
            raise InternalError(f"the NIXL agent {self._name} did not stop within {CLOSE_TIMEOUT:.0f} s")
        if self._agent is not None:
            raise InternalError(f"the NIXL agent {self._name} could not be destroyed")

    async def _connect(self, peer: Peer) -> None:
        if await self._call(lambda: self._introduce(peer)):
            # Twice: wire-up may replace the endpoint's configuration, and only then is the choice of transport final.
            await self._perform(Read(peer, deque([[], []]), STALL, warm_up=True))

    def _connected(self, peer: Peer, attempt: asyncio.Task[None]) -> None:
        self._connecting.pop(peer.agent_name, None)
        if not attempt.cancelled() and attempt.exception() is not None:
            log.info("connecting to %s: %s", peer.agent_name, attempt.exception())

    async def _perform(self, read: Read) -> None:
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
        return await asyncio.wrap_future(result)

    def _submit(self, command: Callable[[], None]) -> None:
        with self._lock:
            if not self._closing and self.broken is None:
                self._commands.append(command)
                self._wake.set()
                return
        if self.broken is not None:
            raise TransferFailed(f"the KV transport of {self._worker_id} is broken: {self.broken.message}")
        raise WorkerLost(f"{self._name} is closed")

    # The owner thread, from here on.

    def _run(self, started: Future[None]) -> None:
        try:
            self._start_agent()
        except Exception as error:  # noqa: BLE001, it reaches the caller
            failure = Unavailable(f"no NIXL agent can be started: {error!r}")
            failure.__cause__ = error
            started.set_exception(failure)
            return
        started.set_result(None)
        try:
            while not self._closing:
                self._round()
            self._end()
        except Exception as error:
            log.exception("the owner thread of the NIXL agent %s failed", self._name)
            self._break(InternalError(f"the owner thread of the NIXL agent {self._name} failed: {error!r}"))
        finally:
            ucx_log.drop(self._name)

    def _break(self, error: InternalError) -> None:
        with self._lock:
            self.broken = error
        if self.on_broken is not None:
            self.on_broken()
        for remote in self._remotes.values():
            for read in remote.reads:
                read.give_up(TransferFailed(error.message), self._now)
        # If this raises, the reads do not end: their memory may still be written.
        self._destroy_agent()
        self._finish_all(TransferFailed(f"the KV transport of {self._worker_id} is broken: {error.message}"))

    def _round(self) -> None:
        self._tick()
        self._wake.clear()
        while self._commands:
            self._commands.popleft()()
        started, calls = time.perf_counter(), 1
        reads = [read for remote in self._remotes.values() for read in remote.reads]
        if reads:
            worked, calls = self._progress_reads(), len(reads)
            pause = SERVING_PAUSE if all(read.warm_up for read in reads) else READING_PAUSE
        else:
            worked = bool(self._agent.get_new_notifs())
            pause = SERVING_PAUSE if self._serving else IDLE_PAUSE
        self._tidy()
        if self._details and not any(read.warm_up for read in reads):
            self._set_details(False)
        if not worked and time.perf_counter() - started < WORKING_CALL * calls:
            self._wake.wait(pause)

    def _tick(self) -> None:
        now = time.monotonic()
        self._now += min(now - self.last_round_at, ROUND_LIMIT)
        self.last_round_at = now

    def _end(self) -> None:
        """Stops all reads as after a cancellation, then gives everything back."""
        for remote in self._remotes.values():
            for read in remote.reads:
                read.give_up(WorkerLost(f"{self._name} was closed"), self._now)
        until = time.monotonic() + CLOSE_GRACE
        while any(remote.reads for remote in self._remotes.values()) and time.monotonic() < until:
            self._tick()
            if not self._progress_reads():
                self._wake.wait(READING_PAUSE)
        self._destroy_agent()
        self._finish_all(WorkerLost(f"{self._name} was closed"))

    def _finish_all(self, error: TandemError) -> None:
        """Answers everybody who still waits; only after the agent is gone."""
        for remote in self._remotes.values():
            reads, remote.reads = remote.reads, []
            for read in reads:
                read.done.set_exception(read.error or error)
        with self._lock:
            commands, self._commands = self._commands, deque()
        # They run against no agent: reads are refused by _accept, the rest touch only dictionaries.
        for command in commands:
            command()

    def _accept(self, read: Read) -> None:
        name = read.peer.agent_name
        remote = self._remotes.get(name)
        if self._agent is None:
            read.done.set_exception(WorkerLost(f"{self._name} is closed"))
        elif remote is None or remote.lost or remote.peer != read.peer:
            read.done.set_exception(WorkerLost(f"{name} is not connected"))
        elif remote.silent:
            read.done.set_exception(TransferFailed(f"{name} has been silent and its last reads are still in flight"))
        else:
            remote.reads.append(read)

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
        for remote in self._remotes.values():
            for read in remote.reads:
                steps += [flight.handle.release for flight in read.flights]
                read.requeue()
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
            ucx_log.drop_endpoint(remote.endpoint)
            remote.unmet()
        self._registered.clear()
        self._local_dlist = self._agent = None

    def _replace_agent(self, why: str) -> None:
        """The last resort against a write that cannot be called back. Reads from other peers start again."""
        log.warning("replacing the NIXL agent %s: %s", self._name, why)
        self._destroy_agent()
        ucx_log.drop(self._name)
        for remote in self._remotes.values():
            for read in [read for read in remote.reads if read.error is not None]:
                remote.reads.remove(read)
                read.done.set_exception(read.error)
        self._start_agent()

    def _progress_reads(self) -> bool:
        """One turn for every peer that is read from. Says whether anything was posted or has ended."""
        remotes = [remote for remote in self._remotes.values() if remote.reads]
        overdue = [remote for remote in remotes if remote.overdue(self._now, GRACE)]
        worked = False
        for remote in remotes:
            worked |= self._progress(remote, may_post=not overdue)
        stuck = [remote for remote in overdue if remote.overdue(self._now, GRACE)]
        others = any(read.error is None and read.flights for remote in remotes for read in remote.reads)
        if stuck and (not others or stuck[0].overdue(self._now, GRACE + LET_OUT)):
            self._replace_agent(f"a read from {stuck[0].peer.agent_name} could not be ended")
        return worked

    def _progress(self, remote: Remote, may_post: bool) -> bool:
        worked = False
        for read in remote.reads:
            worked |= self._collect(remote, read)
            if read.cancelled:
                read.stop(WorkerLost("the reader went away"), self._now)
        if not remote.silent and remote.stalled(self._now):
            self._silence(remote)
        if remote.renew and not remote.in_flight:
            self._remove(remote)
        if may_post and (turn := remote.next_read()) is not None:
            self._post(remote, turn)
            worked = True
        for read in [read for read in remote.reads if not read.todo and not read.flights]:
            remote.reads.remove(read)
            self._settle(remote, read)
            worked = True
        return worked

    def _silence(self, remote: Remote) -> None:
        """A posted batch did not end in time. What is in flight keeps its memory until it has ended."""
        name = remote.peer.agent_name
        remote.fail()
        for read in remote.reads:
            read.give_up(TransferFailed(f"{name} sent nothing for {read.stall} s"), self._now)
            if read.warm_up:
                self._collect(remote, read)
        remote.silent = remote.in_flight > 0

    def _settle(self, remote: Remote, read: Read) -> None:
        if read.error is not None:
            read.done.set_exception(read.error)
            return
        if read.warm_up:
            remote.ready = True
            if self.region.memory == "dram" or self.region.spare_block is not None:
                name = ucx_log.transport(self._name, remote.endpoint, self.region.block_bytes)
                self._links[remote.peer.agent_name] = f"nixl:ucx:{name or 'unknown'}"
        read.done.set_result(None)

    def _collect(self, remote: Remote, read: Read) -> bool:
        """Takes what has ended, well or not, out of the flights."""
        landed = [flight for flight in read.flights if self._landed(remote, read, flight)]
        if read.warm_up and read.error is not None:
            landed = list(read.flights)
        for flight in landed:
            read.flights.remove(flight)
            self._release(flight.handle)
        return bool(landed)

    def _landed(self, remote: Remote, read: Read, flight: Flight) -> bool:
        try:
            state = self._agent.check_xfer_state(flight.handle)
        except self._errors as error:
            # UCX ends all requests of an endpoint that failed, so this one is over too.
            self._failed(remote, read, f": {error}")
            return True
        if state == "ERR":
            self._failed(remote, read)
        return bool(state != "PROC")

    def _failed(self, remote: Remote, read: Read, why: str = "") -> None:
        read.stop(TransferFailed(f"reading from {remote.peer.agent_name} failed{why}"), self._now)
        remote.fail()

    def _post(self, remote: Remote, read: Read) -> None:
        pairs = read.todo.popleft()
        handle = None
        try:
            if remote.dlist is None:
                self._meet(remote)
            handle = self._warm_up(read.peer) if read.warm_up else self._blocks(remote, pairs)
            state = self._agent.transfer(handle)
        except TandemError as error:
            read.stop(error, self._now)
        except self._errors as error:
            if handle is not None:
                self._release(handle)
            self._failed(remote, read, f": {error}")
        else:
            read.flights.append(Flight(handle, pairs, self._now))
            if state != "PROC":
                self._collect(remote, read)

    def _blocks(self, remote: Remote, pairs: list[Pair]) -> Any:
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
        """Puts the peer in place of any other incarnation of its worker. False if it is connected already."""
        for name, remote in self._remotes.items():
            if remote.peer.worker_id == peer.worker_id and remote.peer != peer:
                self._lose(name, f"{name} was replaced by {peer.agent_name}")
        self._tidy()
        known = self._remotes.get(peer.agent_name)
        if known is not None and (known.lost or known.silent):
            raise TransferFailed(f"{peer.agent_name} is still being read; try again", retry_after=1.0)
        if known is None:
            known = self._remotes[peer.agent_name] = Remote(peer)
        return not known.ready

    def _meet(self, remote: Remote) -> None:
        """Tells the agent about the peer. Raises IncompatibleLayout if it cannot be read as described."""
        peer = remote.peer
        self._set_details(True)
        name = self._agent.add_remote_agent(peer.metadata)
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

    def _set_details(self, wanted: bool) -> None:
        if self._details != wanted:
            self._details = wanted
            ucx_log.details(wanted)

    def _blocks_dlist(self, name: str, region: Region | Peer) -> Any:
        row = (region.address, region.block_bytes, _device(region), region.block_bytes, region.num_blocks)
        return self._agent.prep_xfer_dlist(name, np.array([row], dtype=np.uint64), region.memory.upper())

    def _lose(self, name: str, why: str) -> None:
        """Stops all reads from a peer; it is removed when the last of them has ended."""
        remote = self._remotes.get(name)
        if remote is not None:
            remote.lost = True
            for read in remote.reads:
                read.give_up(WorkerLost(why), self._now)

    def _tidy(self) -> None:
        """Removes peers that were lost, and connections that failed, when nothing is in flight over them."""
        for name, remote in list(self._remotes.items()):
            if (remote.lost or remote.renew) and not remote.in_flight:
                self._remove(remote)
            if remote.lost and not remote.reads:
                del self._remotes[name]
                self._links.pop(name, None)

    def _remove(self, remote: Remote) -> None:
        dlist, name = remote.dlist, remote.peer.agent_name
        ucx_log.drop_endpoint(remote.endpoint)
        remote.unmet()
        if dlist is None:
            return
        try:
            dlist.release()
            self._agent.remove_remote_agent(name)
        except self._errors as error:
            log.warning("the NIXL agent %s could not remove %s: %s", self._name, name, error)


def _device(region: Region | Peer) -> int:
    """NIXL counts host memory as device 0."""
    return region.device if region.memory == "vram" else 0


def _tell(loop: asyncio.AbstractEventLoop, failing: Callable[[TandemError], None], error: TandemError) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody is waiting any more
        loop.call_soon_threadsafe(failing, error)
