"""The engine's own thread, and how asyncio code talks to it.

Everything that touches an Engine happens on this thread: it is built here, then come steps while there is work, and
between steps the calls that others submitted. Progress of one step goes to each event loop in one wake-up, however
many sequences it moved.

Built here, because OpenMP gives each thread that computes helpers of its own. A second such thread would leave its
helpers behind, and with more of them than cores they all sleep after each operator instead of looking out for the next
one: steps on two cores then took twice as long.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from time import monotonic
from typing import Any, TypeVar

import structlog

from engine.engine import Engine, Progress
from engine.sequence import Sampling, Sequence
from tandem.errors import InternalError, PreconditionFailed, TandemError

log = structlog.get_logger(__name__)
T = TypeVar("T")
Take = Callable[[list["Timed"]], bool]  # what happened; True: nothing else is wanted


class Timed:
    """Progress with the time at which its step began and ended (monotonic seconds)."""

    __slots__ = ("ended", "progress", "started")

    def __init__(self, progress: Progress, started: float, ended: float) -> None:
        self.progress = progress
        self.started = started
        self.ended = ended


class Watch:
    """One reader of one sequence's progress, on the event loop that made it. Bounded by the sequence's own length."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: list[Timed] = []
        self._take: Take | None = None
        self._wake = asyncio.Event()  # something is ready, it has failed, or nothing else is wanted
        self._error: Exception | None = None

    async def next(self) -> list[Timed]:
        """Everything that happened since the last call; waits if that is nothing. Raises if the engine broke."""
        while not self._ready:
            if self._error:
                raise self._error
            self._wake.clear()
            await self._wake.wait()
        items, self._ready = self._ready, []
        return items

    async def follow(self, take: Take) -> None:
        """Has `take` called with what happens from here on, until it says that nothing else is wanted. It runs where
        steps come in, so who follows is not woken for each. Raises what it raises, or if the engine broke."""
        if self._ready and take(await self.next()):
            return
        if self._error is None:
            self._wake.clear()
            self._take = take
            try:
                await self._wake.wait()
            finally:
                self._take = None
        if self._error:
            raise self._error

    def _push(self, items: list[Timed]) -> None:
        if self._take is None:
            self._ready.extend(items)
            self._wake.set()
        elif not self._wake.is_set():
            try:
                if self._take(items):
                    self._wake.set()
            except Exception as error:  # belongs to who follows
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self._take is None or not self._wake.is_set():  # not when nothing else was wanted
            self._error = error
            self._wake.set()


class EngineLoop:
    engine: Engine

    def __init__(self, make: Callable[[], Engine]) -> None:
        """`await built()` before anything else."""
        self.broken: TandemError | None = None
        self.on_broken: Callable[[], object] | None = None  # called once, on the engine thread
        self.after_turn: Callable[[], object] | None = None  # called after each turn, on the engine thread
        # Likewise after each step: prompt tokens, streams and seconds of it.
        self.after_step: Callable[[int, int, float], object] | None = None
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._watches: dict[str, Watch] = {}
        self._stopping = False
        self._stuck = False  # the last step could not run anything; only a call can change that
        self._built: Future[None] = Future()
        self._built.set_running_or_notify_cancel()  # who waits for it can be cancelled, the thread cannot
        self._thread = threading.Thread(target=self._run, args=(make,), name="engine", daemon=True)
        self._thread.start()

    async def built(self) -> None:
        """Until the engine is there. Raises what `make` raises."""
        await asyncio.wrap_future(self._built)

    def stop(self, timeout: float = 10.0) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout)

    async def call(self, what: Callable[[], T]) -> T:
        """Run `what` on the engine thread, between two steps, in the order of submission.

        It runs even if the caller is cancelled meanwhile: what was begun can only be undone by a later call, and a
        clean-up that a second cancellation could skip would leak blocks.
        """
        return await asyncio.wrap_future(self.submit(what))

    def submit(self, what: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        with self._wake:
            if self.broken or self._stopping:
                future.set_exception(self.broken or InternalError("the engine has stopped"))
                return future
            self._calls.append((what, future))
            self._wake.notify()
        return future

    async def compiled(self, sampling: Sampling) -> Any:
        """What a Sequence with this sampling needs as its `grammar`; None without one. Not on the engine's thread.

        Raises InvalidRequest for a grammar that is none or too complex, PreconditionFailed, Busy.
        """
        if sampling.grammar is None:
            return None
        if self.engine.grammars is None:
            raise PreconditionFailed("this engine was built without grammars")
        return await asyncio.wrap_future(self.engine.grammars.compile(sampling.grammar))

    async def add(self, sequence: Sequence) -> Watch:
        """Start a sequence and watch it."""
        watch = Watch()

        def start() -> None:
            self.engine.add(sequence)
            self._watches[sequence.id] = watch

        await self.call(start)
        return watch

    async def join(self, sequence: Sequence, first_token: int | None) -> Watch:
        """Let a reserved sequence run and watch it; a first token that ends it shows as one Progress."""
        watch = Watch()

        def start() -> None:
            if sequence.id not in self.engine.sequences:
                raise InternalError(f"{sequence.id} was dropped before it could run")
            finish = self.engine.join(sequence, first_token)
            if finish is None:
                self._watches[sequence.id] = watch
            else:
                now = monotonic()
                ended = [Timed(Progress(sequence, sequence.done, None, finish), now, now)]
                watch._loop.call_soon_threadsafe(watch._push, ended)

        await self.call(start)
        return watch

    async def drop(self, sequence_id: str) -> None:
        """End a sequence and free its blocks, between two steps. Safe to call twice."""

        def end() -> None:
            self._watches.pop(sequence_id, None)
            self.engine.drop(sequence_id)

        await self.call(end)

    # ---- on the engine thread

    def _run(self, make: Callable[[], Engine]) -> None:
        try:
            self.engine = make()
        except Exception as error:  # belongs to who waits for it
            self._built.set_exception(error)
            return
        self._built.set_result(None)
        try:
            while self._turn():
                pass
        except Exception as error:  # the engine's state is unknown now: nobody may be served from it
            incident = uuid.uuid4().hex[:12]
            log.exception("engine.broken", incident=incident)
            self._break(InternalError(f"the engine broke (incident {incident}): {type(error).__name__}"))

    def _turn(self) -> bool:
        with self._wake:
            while not (self._calls or self._stopping or (self.engine.scheduler.has_work and not self._stuck)):
                self._wake.wait()
            calls = list(self._calls)
            self._calls.clear()
            if self._stopping:
                for _, future in calls:
                    future.set_exception(InternalError("the engine has stopped"))
                return False
        self._stuck = self._stuck and not calls
        for what, future in calls:
            try:
                future.set_result(what())
            except Exception as error:  # belongs to the caller, who gets it
                future.set_exception(error)
        if self.engine.scheduler.has_work:
            started = monotonic()
            progress = self.engine.step()
            ended = monotonic()
            self._stuck = not progress
            if progress:
                self.engine.pace.learn(self.engine.prompt_tokens, self.engine.streams, ended - started)
                if self.after_step:
                    self.after_step(self.engine.prompt_tokens, self.engine.streams, ended - started)
            self._deliver(progress, started, ended)
        if self.after_turn:
            self.after_turn()
        return True

    def _deliver(self, progress: list[Progress], started: float, ended: float) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Watch, Timed]]] = {}
        for item in progress:
            watch = self._watches.get(item.sequence.id)
            if watch is None:
                continue
            if item.error is not None:
                del self._watches[item.sequence.id]
                watch._loop.call_soon_threadsafe(watch._fail, item.error)  # after what was pushed in earlier steps
                continue
            by_loop.setdefault(watch._loop, []).append((watch, Timed(item, started, ended)))
            if item.finish is not None:
                del self._watches[item.sequence.id]
        for loop, items in by_loop.items():
            loop.call_soon_threadsafe(_push_all, items)

    def _break(self, error: TandemError) -> None:
        with self._wake:
            self.broken = error
            calls = list(self._calls)
            self._calls.clear()
        for _, future in calls:
            future.set_exception(error)
        for watch in self._watches.values():
            watch._loop.call_soon_threadsafe(watch._fail, error)
        self._watches.clear()
        if self.on_broken:
            self.on_broken()


def _push_all(items: list[tuple[Watch, Timed]]) -> None:
    for watch, timed in items:
        watch._push([timed])
