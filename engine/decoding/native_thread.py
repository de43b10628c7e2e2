"""Threads for native calls that cannot be interrupted, and may never end."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import SimpleQueue
from time import clock_gettime, pthread_getcpuclockid
from typing import Generic, TypeVar

POLL_S = 0.05
LOWEST = 19  # nice
T = TypeVar("T")


class NativeThread(threading.Thread):
    """Runs native calls, one after another. Its clock counts their CPU time in seconds."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.start()
        self._clock = pthread_getcpuclockid(self.ident or 0)

    def submit(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def cpu_s(self) -> float:
        """Only while it runs: ask before `leave`."""
        return clock_gettime(self._clock)

    def leave(self) -> None:
        """It ends when its call does, if that ever happens."""
        self._work.put(None)

    def stand_back(self) -> None:
        """From now on it gets what is left of the processor. There is no way back."""
        assert self.native_id is not None, "it was started"
        with suppress(ProcessLookupError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, self.native_id, LOWEST)

    def run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class LeftBehind:
    """The threads of a process that were left in a call, and whose request it was."""

    def __init__(self) -> None:
        self.threads: dict[NativeThread, str] = {}
        self._lock = threading.Lock()

    def add(self, thread: NativeThread, tenant: str) -> None:
        thread.stand_back()
        thread.leave()
        with self._lock:
            self.threads[thread] = tenant

    def count(self, tenant: str) -> int:
        with self._lock:
            self.threads = {thread: whose for thread, whose in self.threads.items() if thread.is_alive()}
            return sum(whose == tenant for whose in self.threads.values())


class NativeCall(Generic[T]):
    """A call on a thread of its own."""

    def __init__(self, name: str, work: Callable[[], T]) -> None:
        self.result: Future[T] = Future()
        self.thread = NativeThread(name)
        self.thread.submit(lambda: self._run(work))

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self.result.set_result(work())
        except Exception as error:  # the future raises it
            self.result.set_exception(error)

    def ends_within(self, cpu_s: float) -> bool:
        """Waits until the call has ended, or has taken so much CPU time since it began."""
        while not wait((self.result,), POLL_S).done:
            if self.thread.cpu_s() > cpu_s:
                return False
        return True
