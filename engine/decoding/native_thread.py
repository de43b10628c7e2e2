"""Threads for native calls that cannot be interrupted, and may never end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from time import clock_gettime, pthread_getcpuclockid


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

    def run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class LeftBehind:
    """The threads of a process that were left in a call."""

    def __init__(self) -> None:
        self.threads: list[NativeThread] = []

    def add(self, thread: NativeThread) -> None:
        thread.leave()
        self.threads.append(thread)

    def count(self) -> int:
        self.threads = [thread for thread in self.threads if thread.is_alive()]
        return len(self.threads)
