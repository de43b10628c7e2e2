"""The thread that owns a NIXL agent and makes all its calls, because NIXL is not thread-safe and a read over shared
memory copies inside the call.

NIXL's own progress thread stays off: it polls continuously and takes one core per agent. The owner thread drives
progress instead: almost without pause while reads are in flight, every SERVING_PAUSE_S while a transfer from this
region is open, and every IDLE_PAUSE_S otherwise, so that a peer can connect at any time. No call on it waits for the
network, so peers connect concurrently and a silent one delays no other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager

from kvtransfer.backends.nixl_agent import NixlAgent
from kvtransfer.backends.nixl_reads import START_TIMEOUT_S, NixlReads, RoundClock
from kvtransfer.backends.ucx_log import ucx_log
from kvtransfer.types import Region
from tandem.errors import InternalError, TandemError, TransferFailed, Unavailable, WorkerLost

log = logging.getLogger(__name__)

# Seconds between two rounds of progress.
READING_PAUSE_S = 50e-6
SERVING_PAUSE_S = 500e-6
IDLE_PAUSE_S = 20e-3

LOG_READ_S = 10.0  # seconds between two reads of UCX's log

# A call that drives progress takes 1.5 us when there is nothing to do; one that took longer than this moved bytes, and
# the next should follow at once.
BUSY_CALL_S = 20e-6

# Seconds that running reads may take when the transport is closed.
CLOSE_GRACE_S = 1.0
CLOSE_TIMEOUT_S = 10.0


class OwnerThread:
    """`on_broken` is called on the thread when it has failed, before any read ends."""

    def __init__(self, name: str, worker_id: str, region: Region, on_broken: Callable[[TandemError], None]) -> None:
        self.agent = NixlAgent(name, region)
        self.clock = RoundClock()
        self.reads = NixlReads(self.agent, self.clock)  # only for this thread, except `links`
        self.closing = False
        self.broken: TandemError | None = None
        self._name, self._worker_id = name, worker_id
        self._on_broken = on_broken
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._commands: deque[Callable[[], None]] = deque()
        self._serving = 0
        self._log_read_at = 0.0  # by the clock
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name=f"nixl {name}", daemon=True)

    # ---- any thread

    def start(self) -> None:
        """Waits until the agent has started. Raises Unavailable."""
        self._thread.start()
        try:
            self._started.result(START_TIMEOUT_S)
        except FutureTimeout as error:
            self.closing = True
            raise Unavailable(f"the NIXL agent did not start within {START_TIMEOUT_S:.0f} s") from error

    def submit(self, command: Callable[[], None]) -> None:
        """Runs a short function on the thread. Raises TransferFailed if the thread is broken, WorkerLost if it is
        closed."""
        with self._lock:
            if not self.closing and self.broken is None:
                self._commands.append(command)
                self._wake.set()
                return
        if self.broken is not None:
            raise TransferFailed(f"the KV transport of {self._worker_id} is broken: {self.broken.message}")
        raise WorkerLost(f"{self._name} is closed")

    def wake(self) -> None:
        """Starts the next round at once."""
        self._wake.set()

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

    def close(self) -> None:
        """Raises InternalError when the thread or the agent does not end."""
        with self._lock:
            self.closing = True
        self._wake.set()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            raise InternalError(f"the NIXL agent {self._name} did not stop within {CLOSE_TIMEOUT_S:.0f} s")
        if self.agent.started:
            raise InternalError(f"the NIXL agent {self._name} could not be destroyed")

    # ---- the thread

    def _run(self) -> None:
        try:
            if self.agent.region.memory == "vram":
                _enter_device(self.agent.region.device)
            self.agent.start()
        except Exception as error:  # noqa: BLE001, the caller receives it
            failure = Unavailable(f"no NIXL agent can be started: {error!r}")
            failure.__cause__ = error
            self._started.set_exception(failure)
            return
        self._started.set_result(None)
        try:
            while not self.closing:
                self._round()
            self._end()
        except Exception as error:
            log.exception("the owner thread of the NIXL agent %s failed", self._name)
            self._break(InternalError(f"the owner thread of the NIXL agent {self._name} failed: {error!r}"))
        finally:
            ucx_log.drop(self._name)

    def _round(self) -> None:
        self.clock.tick()
        self._wake.clear()
        while self._commands:
            self._commands.popleft()()
            self.clock.tick()
        if self.clock.now - self._log_read_at >= LOG_READ_S:
            self._log_read_at = self.clock.now
            ucx_log.read()
        started, calls = time.perf_counter(), 1
        reads = self.reads.all()
        if reads:
            worked, calls = self.reads.progress(), len(reads)
            pause = SERVING_PAUSE_S if all(read.warm_up for read in reads) else READING_PAUSE_S
        else:
            worked = self.agent.progress()
            pause = SERVING_PAUSE_S if self._serving else IDLE_PAUSE_S
        self.reads.tidy()
        if not any(read.warm_up for read in reads):
            self.agent.set_details(False)
        if not worked and time.perf_counter() - started < BUSY_CALL_S * calls:
            self._wake.wait(pause)

    def _end(self) -> None:
        """Stops all reads like cancelled ones, then releases everything."""
        self.reads.give_up(WorkerLost, f"{self._name} was closed")
        until = time.monotonic() + CLOSE_GRACE_S
        while self.reads.all() and time.monotonic() < until:
            self.clock.tick()
            if not self.reads.progress():
                self._wake.wait(READING_PAUSE_S)
        self._finish(WorkerLost(f"{self._name} was closed"))

    def _break(self, error: InternalError) -> None:
        with self._lock:
            self.broken = error
        self._on_broken(error)
        self.reads.give_up(TransferFailed, error.message)
        self._finish(TransferFailed(f"the KV transport of {self._worker_id} is broken: {error.message}"))

    def _finish(self, error: TandemError) -> None:
        """Ends the agent and the reads, then runs the remaining submitted calls."""
        self.reads.end(error)
        with self._lock:
            commands, self._commands = self._commands, deque()
        # They run without an agent: `accept` refuses reads, the others touch only dictionaries.
        for command in commands:
            command()


def _enter_device(index: int) -> None:
    """Selects the pages' GPU for this thread, which creates the thread's CUDA context. UCX uses the context of the
    thread that registers and reads; without one it does not find the fast links of CUDA memory (from the sources of
    NIXL 1.5 and UCX)."""
    import torch  # imported here, because KV in host memory does not need it

    torch.cuda.set_device(index)
