"""Rank 0's side of a worker of several ranks: starts the other ranks, sends them every step, and detects their end.

    start ─▶ the others load their part, with rank 0 loading its own ─▶ joined ─▶ pages, step, step, ... ─▶ close

The others are processes of this worker (engine/follower.py) and end with it. Rank 0 alone has the scheduler, the block
pool, sampling and the network; all ranks share the memory of the pages, so a block has the heads of all ranks. A rank
that dies or stops ends the group: `together` raises Unavailable and `on_lost` is called, within two seconds.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from engine.attention.forward_context import Batch
from engine.core.kv_layout import KvLayout
from engine.kv.kv_cache import KvCache
from engine.parallel import rank_messages
from engine.parallel.rank_group import RankGroup, group_memory, mapped, shared_file
from engine.parallel.rank_memory import RankMemory
from engine.parallel.rank_messages import ADAPTER, CAPTURE, FREE, LOAD, PAGES, READY, STEP
from tandem.errors import CheckpointRefused, TandemError, Unavailable

log = logging.getLogger(__name__)

ROOT = Path(__file__).parents[2]
RANK_PROCESS = "engine.rank_process"
WATCH_S = 0.25  # between two checks of the beats
STALE_S = 1.5  # without a beat after the first, while this process runs: stopped
START_S = 120.0  # until the first beat, because the process imports libraries
JOIN_S = 900.0  # for the slowest rank to have loaded its part, after rank 0 has
END_S = 2.0  # for a rank to end by itself
SEND_S = 10.0  # for a rank to take a message


RANK_LOST = "RANK_LOST"  # the reason of an error: a rank other than 0 has ended or stopped


class Ranks:
    """The other ranks of one worker, from rank 0's point of view. Not thread-safe, but for `lost` and `close`."""

    def __init__(self, size: int, load: dict[str, Any]) -> None:
        """Starts them. `load` are the arguments of engine.follower; JSON. Raises SettingsError, OSError."""
        memory = group_memory(size)
        self._connections: list[socket.socket] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self.lost: Unavailable | None = None
        self.on_lost: Callable[[TandemError], object] | None = None  # called once, on the thread that noticed
        self._numbers: weakref.WeakKeyDictionary[KvCache, int] = weakref.WeakKeyDictionary()
        self._made = 0  # pages, ever
        self._gone: list[int] = []  # freed pages that the other ranks do not know of yet
        self._joined = False
        self.memory: list[RankMemory] = []  # of each other rank, once they have joined
        self._ended = threading.Event()
        try:
            self.group = RankGroup(0, size, memory)
            for rank in range(1, size):
                ours, process = start_rank(rank, size, memory)
                ours.settimeout(SEND_S)
                self._connections.append(ours)
                self._processes.append(process)
                rank_messages.send(ours, LOAD, rank_messages.of_json(load))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(memory)
        self._watcher = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._watcher.start()

    def wait_joined(self) -> None:
        """Waits until every rank has loaded and checked its part. Raises CheckpointRefused with a rank's reason,
        Unavailable if a rank ended without one."""
        if (why := self._reports(JOIN_S)) is not None:
            raise why
        self._joined = True

    def why_not_loaded(self) -> TandemError:
        """The first reason of a rank, or an error for a rank that ended without one."""
        return self._reports(END_S) or self._ended_silently()

    def _reports(self, timeout: float) -> TandemError | None:
        """Waits `timeout` seconds for each rank's report of its load: the first error, None if there is none."""
        worst: TandemError | None = None
        for rank, connection in enumerate(self._connections, 1):
            connection.settimeout(timeout if worst is None else END_S)
            try:
                kind, content, _ = rank_messages.receive(connection)
            except (EOFError, OSError):
                worst = worst or self._ended_silently()
                continue
            connection.settimeout(SEND_S)
            if kind != READY:
                return CheckpointRefused(f"rank {rank}: {rank_messages.from_json(content)['why']}")
            self.memory.append(RankMemory(**rank_messages.from_json(content)))
        return worst

    def _ended_silently(self) -> TandemError:
        return self.lost or Unavailable("a rank ended while it loaded its part", reason=RANK_LOST)

    # ---- pages and steps

    def share_pages(self, num_blocks: int, layout: KvLayout) -> torch.Tensor:
        """Zeroed memory for pages, uint8 `[num_blocks * block_bytes]`, which the other ranks have, too."""
        nbytes = num_blocks * layout.block_bytes
        file = shared_file(nbytes)
        try:
            memory = mapped(file, nbytes).zero_()  # touches every page, before a rank counts on it
            self._made += 1
            about = {"number": self._made, "num_blocks": num_blocks, "block_size": layout.block_size}
            self._tell(PAGES, rank_messages.of_json(about), [file])
        finally:
            os.close(file)
        return memory

    def know(self, pages: KvCache) -> None:
        """Associates the pages with the memory that was shared last."""
        self._numbers[pages] = self._made
        weakref.finalize(pages, self._gone.append, self._made).atexit = False

    def capture(self, pages: KvCache, spare: int, max_running: int) -> None:
        """Makes the other ranks capture decode steps over these pages together with this one; all succeed or none."""
        about = {"number": self._numbers[pages], "spare": spare, "max_running": max_running}
        self._tell(CAPTURE, rank_messages.of_json(about))

    def together(
        self, pages: KvCache, batch: Batch, captured: bool, marks: Sequence[int]
    ) -> AbstractContextManager[None]:
        """Makes the other ranks run this step while rank 0 runs it inside. Raises Unavailable if a rank is lost, and
        for every error of rank 0, because the others are then in the middle of a step and the group ends. `on_lost`
        does not receive such an error: the step's sequences may be the cause."""
        if gone := [self._gone.pop() for _ in range(len(self._gone))]:
            self._tell(FREE, rank_messages.of_json({"numbers": gone}))
        self._tell(STEP, rank_messages.of_step(self._numbers[pages], batch, captured, marks))
        return self._inside()

    def fill(self, slot: int, about: dict[str, Any], content: bytes) -> AbstractContextManager[None]:
        """Makes the other ranks put an adapter into a slot while rank 0 does it inside; the other arguments are what
        engine.runner.lora.sent returns. Raises as `together`."""
        file = shared_file(len(content))
        try:
            with open(file, "wb", closefd=False) as memory:
                memory.write(content)
            self._tell(ADAPTER, rank_messages.of_json({"slot": slot, "bytes": len(content), "adapter": about}), [file])
        finally:
            os.close(file)
        return self._inside()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self.group.broken:
                self._lose(f"a step was not finished: {error}")
            elif self.lost is None:
                self.lost = Unavailable(f"a step of rank 0 failed: {error}", reason="RANK_0_FAILED")
                self.group.break_off()
            assert self.lost is not None
            raise self.lost from error

    def _tell(self, kind: int, content: bytes, files: list[int] | None = None) -> None:
        if self.lost:
            raise self.lost
        for rank, connection in enumerate(self._connections, 1):
            try:
                rank_messages.send(connection, kind, content, files or ())
            except OSError as error:
                self._lose(f"rank {rank} takes no message: {error}")
                assert self.lost is not None
                raise self.lost from error

    # ---- their end

    def _lose(self, why: str) -> None:
        if self.lost is None and not self._ended.is_set():
            self.lost = Unavailable(f"a rank of this worker is lost: {why}", reason=RANK_LOST)
            log.error("ranks.lost: %s", why)
            self.group.break_off()
            if self.on_lost:
                self.on_lost(self.lost)
        elif self.lost is None:
            self.lost = Unavailable("the ranks of this worker have ended", reason=RANK_LOST)

    def _watch(self) -> None:
        """Detects ended ranks at once, and frozen ones by their beats, also while no step runs."""
        poll = select.poll()
        ranks: dict[int, int] = {}
        for rank, process in enumerate(self._processes, 1):
            with suppress(OSError):  # it has ended already, as `poll` of the process shows
                ranks[os.pidfd_open(process.pid)] = rank
        for file in ranks:
            poll.register(file, select.POLLIN)
        beats, silent, last = self.group.beats(), [0.0] * self.group.size, monotonic()
        while not self._ended.is_set():
            ended = [ranks[file] for file, _ in poll.poll(WATCH_S * 1000)]
            ended += [rank for rank, process in enumerate(self._processes, 1) if process.poll() is not None]
            if ended and not self._ended.is_set():
                self._lose(f"rank {ended[0]} has ended with status {self._processes[ended[0] - 1].wait()}")
                break
            now, seen = monotonic(), self.group.beats()
            lived, last = min(now - last, 2 * WATCH_S), now  # time in which this process was stopped does not count
            silent = [
                quiet + lived if before == after else 0.0
                for quiet, before, after in zip(silent, beats, seen, strict=True)
            ]
            beats = seen
            stopped = [r for r, count in enumerate(seen) if silent[r] > (STALE_S if count else START_S)]
            if stopped:
                self._lose(f"rank {stopped[0]} has shown no sign of life for {silent[stopped[0]]:.1f} s")
                break
        for file in ranks:
            os.close(file)

    def close(self) -> None:
        """Ends the other ranks. Repeatable."""
        self._ended.set()
        if hasattr(self, "group") and (self.lost is not None or not self._joined):
            self.group.break_off()  # a rank may be in the middle of a step, or of its load
        for connection in self._connections:
            connection.close()  # a rank without a step ends then
        deadline = monotonic() + END_S
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.01, deadline - monotonic()))
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()
        if hasattr(self, "_watcher") and threading.current_thread() is not self._watcher:
            self._watcher.join(4 * WATCH_S)
        if hasattr(self, "group"):
            self.group.close()


def start_rank(rank: int, size: int, memory: int) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Another rank's process, and this side of its connection."""
    ours, its = socket.socketpair()
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", RANK_PROCESS, *map(str, (its.fileno(), memory, rank, size, os.getpid()))],
            pass_fds=(its.fileno(), memory),
            stdin=subprocess.DEVNULL,
            stdout=2,  # a worker's stdout has a defined format
            env=os.environ | {"PYTHONPATH": path},
        )
    except BaseException:
        ours.close()
        raise
    finally:
        its.close()
    return ours, process
