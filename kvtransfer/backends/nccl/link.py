"""One link of a pair. Its thread forms the process group, authenticates the other side, and moves batches in the order
in which they were submitted. SinkLink receives, SourceLink sends.

    submit ─▶ queue ─▶ begin: SendBlocks, receive into staging ─▶ wait ─▶ finish: scatter into the blocks ─▶ done
                              (the source: gather into staging, send)

Only `finish` writes into blocks, and only for a batch that was not given up: a late message reaches only staging. A
failed link and its staging are never used again; the next link has a new process group, thread and epoch.
"""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import itertools
import logging
import mmap
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from kvtransfer.backends.nccl import group as groups
from kvtransfer.backends.nccl.group import SINK, SOURCE, PairStore
from kvtransfer.transport import BATCH_BYTES, STALL_S
from kvtransfer.types import LinkEntry, LinkMessage, Region, SendBlocks
from tandem.errors import TandemError, TransferFailed

log = logging.getLogger(__name__)

# Batches in flight on a link: one is gathered or scattered while the other moves. Each has BATCH_BYTES of staging.
IN_FLIGHT = 2

SECRET_BYTES = 32  # the source sends the first half, the decode worker the second


class Pages:
    """A region as rows of bytes, in host or device memory."""

    def __init__(self, region: Region) -> None:
        self._region = region
        on_host = region.memory == "dram"
        self.device = torch.device("cpu") if on_host else torch.device("cuda", region.device)
        self.batch_blocks = max(1, BATCH_BYTES // region.block_bytes)

    def staging(self) -> torch.Tensor:
        """[batch_blocks, block_bytes]. Host staging is a separate mapping, because malloc would keep the memory of an
        ended link's thread."""
        shape = self.batch_blocks, self._region.block_bytes
        if self.device.type != "cpu":
            return torch.empty(shape, dtype=torch.uint8, device=self.device)
        return torch.frombuffer(mmap.mmap(-1, shape[0] * shape[1]), dtype=torch.uint8).view(shape)

    def gather(self, blocks: Sequence[int], staging: torch.Tensor) -> None:
        if self.device.type == "cpu":
            self._copy(blocks, staging, to_staging=True)
        else:  # not run on a GPU
            torch.index_select(self._tensor(), 0, torch.tensor(blocks, device=self.device), out=staging)
            torch.cuda.current_stream(self.device).synchronize()

    def scatter(self, staging: torch.Tensor, blocks: Sequence[int]) -> None:
        if self.device.type == "cpu":
            self._copy(blocks, staging, to_staging=False)
        else:  # not run on a GPU
            self._tensor().index_copy_(0, torch.tensor(blocks, device=self.device), staging)
            torch.cuda.current_stream(self.device).synchronize()

    def _copy(self, blocks: Sequence[int], staging: torch.Tensor, *, to_staging: bool) -> None:
        """By memmove, which releases the GIL; torch would start threads for it."""
        size = self._region.block_bytes
        for row, block in enumerate(blocks):
            ours, theirs = staging.data_ptr() + row * size, self._region.address + block * size
            ctypes.memmove(*((ours, theirs) if to_staging else (theirs, ours)), size)

    def _tensor(self) -> torch.Tensor:
        """The blocks in device memory, [num_blocks, block_bytes] uint8."""
        pages = self._region.keepalive
        assert isinstance(pages, torch.Tensor)
        return pages


class Batch:
    """Blocks that move as one message; `local` is empty at the source. The first caller of `claim` determines how the
    batch ends."""

    def __init__(self, remote: Sequence[int], local: Sequence[int], stall: float) -> None:
        self.remote, self.local, self.stall = tuple(remote), tuple(local), stall
        self.done: Future[None] = Future()
        self.done.set_running_or_notify_cancel()  # a reader that goes away calls `give_up`
        self.claimed = False
        self._lock = threading.Lock()

    def claim(self) -> bool:
        with self._lock:
            first, self.claimed = not self.claimed, True
        return first

    def give_up(self) -> bool:
        """Prevents any later write to its local blocks. False if they are being written, or the batch has ended: then
        await `done`."""
        if not self.claim():
            return False
        self.done.set_result(None)
        return True


class PairLink(ABC):
    """`tell` sends a message to the other side; `on_end` is called once, when the link has ended. Both are called on
    the link's thread or on the caller's thread of `end`, and must not block. `ready` is done when the link can be used
    or has ended; `error` is the reason of its end."""

    rank: int

    def __init__(
        self,
        name: str,
        pages: Pages,
        host: str,
        secret: bytes,
        tell: Callable[[LinkMessage], None],
        on_end: Callable[[TandemError], None],
    ) -> None:
        self.name = name
        self.error: TandemError | None = None
        self.ready: Future[None] = Future()
        self.store = PairStore(lambda key, value: tell(LinkEntry(key, value)), STALL_S)
        self._pages, self._host, self._secret = pages, host, secret
        self._tell, self._on_end = tell, on_end
        self._numbers = itertools.count(1)
        self._queue: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: set[Batch] = set()  # submitted, and not ended
        self._touching = threading.Lock()  # held while the region is read or written
        self._staging: list[torch.Tensor] = []  # unused
        # Kept until the group is aborted: memory that is free earlier may get another use while NCCL writes into it.
        self._flying: deque[tuple[Batch, torch.Tensor, Any, float]] = deque()
        self._thread = threading.Thread(target=self._run, name=f"kv link {name}", daemon=True)

    # ---- any thread

    def start(self) -> None:
        self._thread.start()

    def submit(self, batch: Batch) -> None:
        """Raises the link's error if the link has ended."""
        with self._lock:
            if self.error is None:
                self._open.add(batch)
                self._queue.put(batch)
                return
        raise type(self.error)(self.error.message)

    @property
    def waiting(self) -> int:
        """Batches that have not ended."""
        return len(self._open)

    def end(self, error: TandemError) -> None:
        """Fails every batch whose blocks are not being written at this moment, and ends the thread. Repeatable."""
        error = error.with_traceback(None)  # its frames would keep the process group alive
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            batches, self._open = self._open, set()
            self._answer_ready()
        for batch in batches:
            if batch.claim():
                batch.done.set_exception(error)
        self.store.close()
        self._queue.put(None)
        self._on_end(error)

    def settled(self, seconds: float) -> bool:
        """Call after `end`. Returns when the region is not read or written any more, and whether the thread has ended
        within `seconds`. A thread that waits for a frozen peer ends with that wait, and can reach only staging."""
        with self._touching:
            pass
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    # ---- the thread

    def _run(self) -> None:
        group = None
        try:
            group = groups.open_group(self.store, self.rank, self._pages.device, self._host, STALL_S)
            self._greet(group)
            with self._lock:
                self._answer_ready()
            self._move(group)
        except TandemError as error:
            self.end(error)
        except (RuntimeError, TimeoutError) as error:  # what torch raises
            self.end(TransferFailed(f"the link {self.name} failed: {_first_line(error)}"))
        except Exception as error:
            log.exception("a bug in the link %s", self.name)
            self.end(TransferFailed(f"the link {self.name} failed: {error!r}"))
        finally:
            if group is not None:
                with contextlib.suppress(RuntimeError):
                    groups.abort(group, self._pages.device)
            self._staging.clear()
            self._flying.clear()

    def _greet(self, group: Any) -> None:
        """Each side sends its half of the secret over the new connection. Raises TransferFailed if the other half is
        wrong."""
        half = SECRET_BYTES // 2
        halves = {SOURCE: self._secret[:half], SINK: self._secret[half:]}
        other = SINK if self.rank == SOURCE else SOURCE
        ours = torch.tensor(list(halves[self.rank]), dtype=torch.uint8, device=self._pages.device)
        theirs = torch.zeros_like(ours)
        # The ranks send and receive in turn, because NCCL executes operations in the order of the calls.
        turns = [lambda: group.send([ours], other, 0), lambda: group.recv([theirs], other, 0)]
        for turn in turns if self.rank == SOURCE else reversed(turns):
            groups.wait(turn(), self._pages.device, STALL_S)
        if not hmac.compare_digest(bytes(theirs.tolist()), halves[other]):
            raise TransferFailed(f"the link {self.name}: somebody else answers on the connection")

    def _move(self, group: Any) -> None:
        flying = self._flying
        while True:
            if len(flying) < IN_FLIGHT:
                try:
                    batch = self._queue.get(block=not flying)
                except queue.Empty:
                    pass
                else:
                    if batch is None:
                        return
                    staging = self._staging.pop() if self._staging else self._pages.staging()
                    if (work := self._begin(batch, staging[: len(batch.remote)], group)) is None:
                        self._staging.append(staging)
                    else:
                        flying.append((batch, staging, work, time.monotonic() + batch.stall))
                    continue
            batch, staging, work, until = flying[0]
            groups.wait(work, self._pages.device, until - time.monotonic())
            self._finish(batch, staging[: len(batch.remote)])
            self._staging.append(staging)
            flying.popleft()

    @abstractmethod
    def _begin(self, batch: Batch, staging: torch.Tensor, group: Any) -> Any | None:
        """Starts to move the batch; None if it is not needed any more."""

    @abstractmethod
    def _finish(self, batch: Batch, staging: torch.Tensor) -> None:
        """Called when the batch has moved."""

    def _answer_ready(self) -> None:
        if not self.ready.done():
            self.ready.set_result(None)

    def _ended(self, batch: Batch) -> None:
        with self._lock:
            self._open.discard(batch)


class SinkLink(PairLink):
    """The decode worker's side, which decides what moves next."""

    rank = SINK

    def _begin(self, batch: Batch, staging: torch.Tensor, group: Any) -> Any | None:
        if batch.claimed:
            self._ended(batch)
            return None
        number = next(self._numbers)
        self._tell(SendBlocks(number, batch.remote, batch.stall))
        return group.recv([staging], SOURCE, number)

    def _finish(self, batch: Batch, staging: torch.Tensor) -> None:
        landed = False
        with self._touching:
            if self.error is None and batch.claim():
                try:
                    self._pages.scatter(staging, batch.local)
                except BaseException as error:  # of the device; only the owner of the claim may end the batch
                    batch.done.set_exception(TransferFailed(f"a batch could not be written: {_first_line(error)}"))
                    raise
                landed = True
        self._ended(batch)
        if landed:
            batch.done.set_result(None)


class SourceLink(PairLink):
    """The prefill worker's side, which sends the requested batches."""

    rank = SOURCE

    def _begin(self, batch: Batch, staging: torch.Tensor, group: Any) -> Any | None:
        with self._touching:
            if self.error is not None:
                return None
            self._pages.gather(batch.remote, staging)
        return group.send([staging], SINK, next(self._numbers))

    def _finish(self, batch: Batch, staging: torch.Tensor) -> None:
        self._ended(batch)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [repr(error)])[0]
