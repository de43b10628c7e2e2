"""The engine's own thread, and how asyncio code talks to it.

Everything that touches an Engine happens on this thread: its construction, steps while there is work, and submitted
calls between steps. The progress of one step reaches each event loop in one wake-up, for all sequences.

The engine is built here because OpenMP gives each computing thread its own helper threads. A second computing thread
would leave its helpers running, and with more helpers than cores they all sleep after each operator instead of
spinning: steps on two cores then took twice as long.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from time import monotonic
from typing import Any, NamedTuple, TypeVar

import structlog

from engine.core.progress import Progress
from engine.core.sequence import Sequence
from engine.decoding.speculative import Drafting
from engine.engine import Engine
from engine.parallel.leader import RANK_LOST
from tandem.errors import InternalError, PreconditionFailed, StepFailed, TandemError, Unavailable
from tandem.sampling import Sampling

log = structlog.get_logger(__name__)
T = TypeVar("T")
Take = Callable[[list["StepOutput"]], bool]  # receives outputs; returns True when it wants no more


class StepOutput(NamedTuple):
    """Progress with the time at which its step began and ended (monotonic seconds)."""

    progress: Progress
    started: float
    ended: float


class SequenceStream:
    """One reader of one sequence's progress, on the event loop that made it. Bounded by the sequence's own length."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ready: list[StepOutput] = []
        self._take: Take | None = None
        self._wake = asyncio.Event()  # an output is ready, it has failed, or no more is wanted
        self._error: Exception | None = None

    async def next(self) -> list[StepOutput]:
        """Everything that happened since the last call; waits if that is nothing. Raises if the engine broke."""
        while not self._ready:
            if self._error:
                raise self._error
            self._wake.clear()
            await self._wake.wait()
        items, self._ready = self._ready, []
        return items

    async def follow(self, take: Take) -> None:
        """Calls `take` with all further outputs until it returns True. `take` runs where steps arrive, so the caller is
        not woken for each. Raises the errors of `take`, or of an engine that broke."""
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

    def _push(self, items: list[StepOutput]) -> None:
        if self._take is None:
            self._ready.extend(items)
            self._wake.set()
        elif not self._wake.is_set():
            try:
                if self._take(items):
                    self._wake.set()
            except Exception as error:  # raised by `follow`
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self._take is None or not self._wake.is_set():  # not after the last wanted output
            self._error = error
            self._wake.set()


LEAST_STEP_S = 2.0  # minimum time after which a step counts as hung
TIMES = 10.0  # times the expected duration
UNKNOWN_S = 60.0  # for a step while the engine has not measured any
SHORT_CONTEXT = 4096  # tokens; attention to longer contexts makes a step longer than its number of tokens suggests
EXPANDING = 0.1  # share of a prompt token's computation: about the maximum for expanding the latent of one token
GRAMMAR_S, GRAMMAR_TOKEN_S = 5.0, 0.05  # for each sequence with a mask, and for each token that it has to match first
BY_A_STEP = ("ENGINE_BROKEN", "ENGINE_STUCK")  # reasons that the step's sequences may have caused
SHARED_STEP_FAILED = "SHARED_STEP_FAILED"  # reason of a StepFailed: which of several sequences is at fault is not known
CALL_S = 30.0  # for a call between two steps; loading an adapter takes longest


class UnderWay(NamedTuple):
    """The current work of the engine's thread."""

    # Each piece of work has its own: a step, each forward of its drafter, its wait for masks.
    number: tuple[int, int, int]
    most_s: float  # it is hung if it takes longer


class EngineThread:
    engine: Engine

    def __init__(self, make: Callable[[], Engine]) -> None:
        """Await `built()` first."""
        self.broken: TandemError | None = None
        self.on_broken: Callable[[], object] | None = None  # see `tell`
        self.after_iteration: Callable[[], object] | None = None  # called after each iteration, on the engine thread
        # Likewise after each step: prompt tokens, streams and seconds of it.
        self.after_step: Callable[[int, int, float], object] | None = None
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._watches: dict[str, SequenceStream] = {}
        self._answering: list[Future[Any]] = []  # calls that were taken and are not all answered
        self._work = 0  # pieces of work that were begun
        self._doing = ""  # "calls", "step" or nothing
        self._ended = 0.0  # when the last step did
        self._stopping = False
        self._stuck = False  # the last step could not run anything; only a call can change that
        self._built: Future[None] = Future()
        self._built.set_running_or_notify_cancel()  # a waiter can be cancelled, the thread cannot
        self._thread = threading.Thread(target=self._run, args=(make,), name="engine", daemon=True)
        self._thread.start()

    async def built(self) -> None:
        """Waits until the engine is built. Raises the errors of `make`."""
        await asyncio.wrap_future(self._built)

    def tell(self, on_broken: Callable[[], object]) -> None:
        """`on_broken` is called once, on the thread that finds it. Raises the error of an engine that has broken
        already, as by the loss of a rank while no incarnation of its worker served."""
        self.on_broken = on_broken
        if self.broken:
            raise self.broken

    def stop(self, timeout: float = 10.0) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout)

    @property
    def under_way(self) -> UnderWay | None:
        """For a watchdog, on any thread; None while the engine waits for work."""
        doing, number = self._doing, self._work
        if not doing:
            return None
        waits = self.engine.masks.waits
        drafting = self.engine.speculation.drafter.under_way if self.engine.speculation else Drafting()
        most_s = CALL_S if doing == "calls" else self._most_s(waits % 2 == 1, drafting)
        return UnderWay((number, waits, drafting.number), most_s)

    def abandon(self, error: TandemError) -> None:
        """On any thread: all current and later callers of the engine's thread get `error`; its further results are
        dropped. If the running step is the reason, its sequences get StepFailed instead."""
        with self._wake:
            if self.broken:
                return
            self.broken = error
            self._wake.notify()
        self._fail_all(error)
        if self.on_broken:
            self.on_broken()

    async def call(self, what: Callable[[], T]) -> T:
        """Runs `what` on the engine thread, between two steps, in the order of submission.

        It runs even if the caller is cancelled meanwhile: a clean-up that a second cancellation could skip would leak
        blocks.
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

    async def compiled(self, sampling: Sampling, tenant: str) -> Any:
        """The compiled `grammar` for a tenant's Sequence with this sampling; None without one. Not on the engine's
        thread.

        Raises InvalidRequest for an invalid or too complex grammar, PreconditionFailed, Busy.
        """
        if sampling.grammar is None:
            return None
        if self.engine.grammars is None:
            raise PreconditionFailed("this engine was built without grammars")
        return await asyncio.wrap_future(self.engine.grammars.compile(sampling.grammar, tenant))

    async def add(self, sequence: Sequence) -> SequenceStream:
        """Starts a sequence and watches it."""
        watch = SequenceStream()

        def start() -> None:
            self.engine.add(sequence)
            self._watches[sequence.id] = watch

        await self.call(start)
        return watch

    async def join(self, sequence: Sequence, first_token: int | None) -> SequenceStream:
        """Lets a reserved sequence run and watches it."""
        watch = SequenceStream()

        def start() -> None:
            if sequence.id not in self.engine.sequences:
                raise InternalError(f"{sequence.id} was dropped before it could run")
            self.engine.join(sequence, first_token)
            self._watches[sequence.id] = watch

        await self.call(start)
        return watch

    async def drop(self, sequence_id: str) -> None:
        """Ends a sequence and frees its blocks, between two steps. Safe to call twice. An engine that broke frees
        nothing, and its error is not raised here: it would replace the request's own."""

        def end() -> None:
            self._watches.pop(sequence_id, None)
            self.engine.drop(sequence_id)

        try:
            await self.call(end)
        except TandemError:
            if self.broken is None:
                raise

    # ---- on the engine thread

    def _run(self, make: Callable[[], Engine]) -> None:
        try:
            self.engine = make()
            if self.engine.ranks is not None:
                self.engine.ranks.on_lost = self.abandon
        except Exception as error:  # raised to its waiter
            self._built.set_exception(error)
            return
        self._built.set_result(None)
        try:
            while self._iterate():
                pass
        except Exception as error:  # the engine's state is unknown: it must not serve any more
            if isinstance(error, Unavailable) and error.reason == RANK_LOST:  # `on_lost` may come later than this
                self.abandon(error)
            incident = uuid.uuid4().hex[:12]
            log.exception("engine.broken", incident=incident)
            message = f"the engine broke (incident {incident}): {type(error).__name__}"
            self.abandon(Unavailable(message, reason="ENGINE_BROKEN"))
        if self.broken:  # abandoned: fails calls that arrived since then
            self._fail_all(self.broken)
        if self.engine.ranks is not None:
            self.engine.ranks.close()

    def _iterate(self) -> bool:
        with self._wake:
            while not (self._calls or self._stopping or self.broken or (self.engine.has_work and not self._stuck)):
                self._wake.wait()
            if self.broken:
                return False
            calls = list(self._calls)
            self._calls.clear()
            if self._stopping:
                for _, future in calls:
                    future.set_exception(InternalError("the engine has stopped"))
                return False
            self._answering = [future for _, future in calls]
            self._begin("calls")
        self._stuck = self._stuck and not calls
        for what, future in calls:
            try:
                self._answer(future, what())
            except Exception as error:  # raised to the caller
                self._answer(future, error=error)
        if self.engine.has_work:
            self._begin("step")
            self._step()
        if self.after_iteration:
            self.after_iteration()
        self._doing = ""
        return True

    def _begin(self, doing: str) -> None:
        self._work += 1
        self._doing = doing

    def _answer(self, future: Future[Any], result: Any = None, error: Exception | None = None) -> None:
        with self._wake:
            if future.done():  # abandoned
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    def _step(self) -> None:
        engine, failures = self.engine, self.engine.failures
        # A step that is queued began when the one before it had ended.
        started = self._ended if engine.ahead.flight else monotonic()
        progress = engine.step()
        ended = self._ended = monotonic()
        self._stuck = not progress and not engine.retries
        if progress and engine.failures == failures:
            engine.pace.learn(engine.prompt_tokens, engine.streams, ended - started)
            if self.after_step:
                self.after_step(engine.prompt_tokens, engine.streams, ended - started)
        if self.broken is None:
            self._deliver(progress, started, ended)

    def _most_s(self, waiting: bool, drafting: Drafting) -> float:
        """Seconds after which the running step counts as hung. `waiting`: for its masks. Unmeasured work counts as
        prompt tokens, which cost at least as much: tokens that a drafter still has to compute, drafts to be verified,
        and latents that each step expands."""
        engine, plan = self.engine, list(self.engine.plan)
        if not engine.pace.step_s:
            return UNKNOWN_S
        contexts = [chunk.sequence.num_computed + chunk.tokens for chunk in plan]
        tokens = engine.prompt_tokens + drafting.tokens
        if engine.speculation:
            tokens += len(plan) * engine.speculation.tokens
        own_s = engine.pace.without_prompts(max(1, engine.streams)) + engine.pace.prompt_s(tokens)
        expected = own_s * (1 + max(contexts, default=0) / SHORT_CONTEXT)
        if engine.model.latent:
            expected += engine.pace.prompt_s(int(EXPANDING * sum(contexts)))
        masked = [chunk.sequence for chunk in plan if waiting and chunk.sequence.grammar is not None]
        matching = sum(
            len(sequence.tokens) - sequence.prompt_len for sequence in masked
        )  # at most: a matcher that exists goes on
        return max(LEAST_STEP_S, TIMES * expected) + GRAMMAR_S * len(masked) + GRAMMAR_TOKEN_S * matching

    def _deliver(self, progress: list[Progress], started: float, ended: float) -> None:
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[SequenceStream, StepOutput]]] = {}
        failed: list[tuple[SequenceStream, TandemError]] = []
        for item in progress:
            watch = self._watches.get(item.sequence.id)
            if watch is None:
                continue
            if item.error is not None:
                del self._watches[item.sequence.id]
                failed.append((watch, item.error))
                continue
            by_loop.setdefault(watch._loop, []).append((watch, StepOutput(item, started, ended)))
            if item.finish is not None:
                del self._watches[item.sequence.id]
        for loop, items in by_loop.items():
            loop.call_soon_threadsafe(_push_all, items)
        for watch, error in failed:  # after all outputs: drafts may have given some of this step
            watch._loop.call_soon_threadsafe(watch._fail, error)

    def _fail_all(self, error: TandemError) -> None:
        """Fails all callers that wait for an answer or for progress; on any thread, once no new calls are accepted."""
        with self._wake:
            waiting = [*self._answering, *(future for _, future in self._calls)]
            self._calls.clear()
        for future in waiting:
            self._answer(future, error=error)
        guilty = self._doing == "step" and error.reason in BY_A_STEP
        in_step = {chunk.sequence.id for chunk in self.engine.plan} if guilty else set()
        reason = StepFailed.default_reason if len(in_step) == 1 else SHARED_STEP_FAILED
        watches = dict(self._watches)
        self._watches.clear()
        for sequence_id, watch in watches.items():
            own = StepFailed(f"the step with this request failed: {error.message}", reason=reason)
            watch._loop.call_soon_threadsafe(watch._fail, own if sequence_id in in_step else error)


def _push_all(items: list[tuple[SequenceStream, StepOutput]]) -> None:
    for watch, timed in items:
        watch._push([timed])
