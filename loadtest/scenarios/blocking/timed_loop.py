"""A launcher for `cluster.local_cluster.LocalCluster` whose routers note how long callbacks hold their event loop.

A router appends a JSON line to the file LOADTEST_LOOP for each callback that takes NOTED_S or more of its thread: `at`
on the monotonic clock, `cpu_s` of the thread itself, `wall_s` with what the thread waited for (other processes, the
GIL), `collecting_s` of garbage, and `what`: the coroutines that the callback has led to. Workers start as usual.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from time import monotonic, perf_counter, thread_time
from typing import Any

from services import launch
from services.launch import Service, prepare
from tandem.settings import Settings

__all__ = ["LAUNCHER", "VARIABLE", "prepare", "start"]

LAUNCHER = "loadtest.scenarios.blocking.timed_loop"
VARIABLE = "LOADTEST_LOOP"
NOTED_S = 0.005
MAX_CHAIN = 3  # coroutines that are named, the innermost ones


async def start(
    role: str, settings: Settings, worker_id: str, say: Callable[[str], None] = lambda line: None, engine: Any = None
) -> Service:
    service = await launch.start(role, settings, worker_id, say, engine)
    if role == "router":
        note_callbacks(Path(os.environ[VARIABLE]))
    return service


def note_callbacks(path: Path) -> Callable[[], None]:
    """Of every event loop of this process, from now on. Returns what ends it."""
    plain = asyncio.Handle._run
    collected = _Collections()

    def run(self: asyncio.Handle) -> None:
        wall, cpu, collecting = perf_counter(), thread_time(), collected.seconds
        plain(self)
        took = thread_time() - cpu
        if took < NOTED_S:
            return
        about = {
            "at": monotonic(),
            "cpu_s": took,
            "wall_s": perf_counter() - wall,
            "collecting_s": collected.seconds - collecting,
            "what": _what(self),
        }
        with path.open("a") as file:
            file.write(json.dumps(about) + "\n")

    def end() -> None:
        asyncio.Handle._run = plain  # type: ignore[method-assign]
        collected.end()

    asyncio.Handle._run = run  # type: ignore[method-assign]
    return end


class _Collections:
    """Seconds of all collections of garbage."""

    def __init__(self) -> None:
        self.seconds = self._began = 0.0
        gc.callbacks.append(self._note)

    def end(self) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._began = perf_counter()
        else:
            self.seconds += perf_counter() - self._began


def _what(handle: asyncio.Handle) -> str:
    callback = handle._callback  # type: ignore[attr-defined]
    owner = getattr(callback, "__self__", None)
    if not isinstance(owner, asyncio.Task):
        return str(getattr(callback, "__qualname__", repr(callback)))[:200]
    names = list[str]()
    inner: Any = owner.get_coro()
    while inner is not None:
        names.append(getattr(inner, "__qualname__", type(inner).__name__))
        inner = getattr(inner, "cr_await", None) or getattr(inner, "ag_await", None)
    return " > ".join(names[-MAX_CHAIN:])
