"""Time for assertions on a machine that others use, too."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, thread_time

_TASKS = Path("/proc/self/task")


def _waited_for_a_core() -> dict[str, float]:
    """Seconds for which each thread of this process was ready to run and another process had the core."""
    waited = {}
    for task in _TASKS.iterdir():
        try:
            waited[task.name] = int((task / "schedstat").read_text().split()[1]) / 1e9
        except (OSError, IndexError):  # the thread has just ended, or the kernel does not count it
            continue
    return waited


class Stopwatch:
    """Started when made. Its time is that of a machine which nobody else uses: what the threads of this process waited
    for a core does not count."""

    def __init__(self) -> None:
        self._began, self._waited = monotonic(), _waited_for_a_core()

    @property
    def seconds(self) -> float:
        now = _waited_for_a_core()  # of a thread that has ended since, not even what it waited before is known
        waited = sum(max(0.0, seconds - self._waited.get(thread, 0.0)) for thread, seconds in now.items())
        return max(0.0, monotonic() - self._began - waited)

    def within(self, seconds: float) -> bool:
        return monotonic() - self._began < seconds or self.seconds < seconds


@contextmanager
def no_collection() -> Iterator[None]:
    """Python's garbage collector is off in the block. A full collection takes as long as what earlier tests left is
    large, and is work of whichever thread it falls into."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class ThreadTime:
    """A block's processor time in this thread, without a collection."""

    seconds: float

    def __enter__(self) -> ThreadTime:
        gc.disable()
        self._began = thread_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = thread_time() - self._began
        gc.enable()
