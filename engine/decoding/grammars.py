"""Compiles grammars in the background, and remembers them.

    compile ─▶ a tenant's in their order, one at a time ─▶ Compiled
                └─▶ one that takes longer than QUICK_CPU_S goes on beside the next ones, up to COMPILE_CPU_S

So a grammar that is slow to compile, or is never done, does not hold up others; and no number of them holds up those of
another tenant.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from sys import getsizeof

from engine.decoding.native_thread import LeftBehind, NativeCall
from engine.decoding.structured_output import Compiled, Vocabulary, compile_spec, refusal, vocabulary
from tandem.errors import Busy, InvalidRequest, TandemError
from tandem.sampling import GrammarSpec

COMPILE_CPU_S = 5.0
QUICK_CPU_S = 0.25  # after which others are compiled beside it
MAX_GRAMMAR_BYTES = 64 * 2**20
CACHE_BYTES = 256 * 2**20
ENTRY_BYTES = 4096  # that an entry takes beside its text and what xgrammar counts; a small one takes 1.3 KiB (measured)
CACHE_REFUSED = 256
MAX_LEFT_BEHIND = 2  # threads of a tenant in calls that may never end; with more, its grammars are refused here
MOST_BESIDE = MAX_LEFT_BEHIND + 1  # such threads, and those of grammars that take long, beside one that begins


class Line:
    """The grammars of a tenant that are compiled, or wait for it."""

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(1 + MOST_BESIDE, "grammar")
        self.turn = threading.Lock()  # held to begin one
        self.asked = 0  # as many use it; at 0 it and its threads end
        self.going = 0  # begun and not ended


class Grammars:
    """Compiles grammars for one vocabulary, and remembers them."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._vocabulary: Vocabulary | None = None  # loaded on first use
        # Least recently used first, with the bytes that each takes.
        self._compiled: OrderedDict[GrammarSpec, tuple[Compiled, int]] = OrderedDict()
        self._bytes = 0  # that all of these take
        self._refused: OrderedDict[GrammarSpec, TandemError] = OrderedDict()
        self._lock = threading.Lock()
        self._lines: defaultdict[str, Line] = defaultdict(Line)  # by tenant
        self._waiting: dict[GrammarSpec, list[Future[Compiled]]] = {}  # for those that are being compiled
        self.left_behind = LeftBehind()

    def compile(self, spec: GrammarSpec, tenant: str = "") -> Future[Compiled]:
        """Raises InvalidRequest, PreconditionFailed (no tokenizer), Busy."""
        done: Future[Compiled] = Future()
        with self._lock:
            # Also one that is compiled already: it may be the one whose masks take too long, again and again. One that
            # was refused is refused, so that the router sends it nowhere else.
            if spec not in self._refused and (stuck := self._stuck(tenant)):
                done.set_exception(stuck)
                return done
            known = self._compiled.get(spec)
            if known is not None:
                self._compiled.move_to_end(spec)
                done.set_result(known[0])
                return done
            line = self._lines[tenant]
            line.asked += 1
        line.executor.submit(self._compile, spec, done, line, tenant)
        return done

    def _compile(self, spec: GrammarSpec, done: Future[Compiled], line: Line, tenant: str) -> None:
        try:
            self._in_turn(spec, done, line, tenant)
        finally:
            with self._lock:
                line.asked -= 1
                if not line.asked:
                    del self._lines[tenant]
                    line.executor.shutdown(wait=False)

    def _in_turn(self, spec: GrammarSpec, done: Future[Compiled], line: Line, tenant: str) -> None:
        """They begin one at a time. One that takes long lets others begin, unless too many go on beside them."""
        with line.turn:
            if not done.set_running_or_notify_cancel() or self._answered(spec, done):
                return
            try:
                call = self._begin(spec, tenant)
            except Exception as error:  # raised to the callers
                self._answer(spec, error)
                return
            with self._lock:
                line.going += 1
            beside = not call.ends_within(QUICK_CPU_S) and line.going + self.left_behind.count(tenant) <= MOST_BESIDE
            if not beside:
                self._end(spec, call, line, tenant)
        if beside:
            self._end(spec, call, line, tenant)

    def _answered(self, spec: GrammarSpec, done: Future[Compiled]) -> bool:
        """Whether it is answered from memory, or with what comes of the same grammar, which is being compiled. If not,
        the caller is the one who compiles it."""
        with self._lock:
            if spec in self._compiled:
                done.set_result(self._compiled[spec][0])
            elif spec in self._refused:
                done.set_exception(self._refused[spec])
            elif spec in self._waiting:
                self._waiting[spec].append(done)
            else:
                self._waiting[spec] = [done]
                return False
            return True

    def _stuck(self, tenant: str) -> Busy | None:
        """What a tenant is told whose threads in calls that do not end are too many."""
        if self.left_behind.count(tenant) <= MAX_LEFT_BEHIND:
            return None
        return Busy(
            "this worker still computes grammars of this tenant that it has abandoned; `tandem drain` restarts it",
            reason="GRAMMARS_STUCK",
            retry_after=5.0,
        )

    def _begin(self, spec: GrammarSpec, tenant: str) -> NativeCall[Compiled]:
        if stuck := self._stuck(tenant):
            raise stuck
        known = self._vocabulary = self._vocabulary or vocabulary(self._folder, self._vocab_size, self._eos)
        return NativeCall("grammar-compile", lambda: compile_spec(spec, known))

    def _end(self, spec: GrammarSpec, call: NativeCall[Compiled], line: Line, tenant: str) -> None:
        """Waits for what comes of it, and answers."""
        try:
            self._answer(spec, self._bounded(spec, call, tenant))
        except Exception as error:  # raised to the callers
            self._answer(spec, error)
        finally:
            with self._lock:
                line.going -= 1

    def _answer(self, spec: GrammarSpec, found: Compiled | Exception) -> None:
        """Remembers what came of it, and answers those who wait for it."""
        with self._lock:
            if isinstance(found, InvalidRequest):
                self._refused[spec] = found
                while len(self._refused) > CACHE_REFUSED:
                    self._refused.popitem(last=False)
            elif not isinstance(found, Exception):
                size = found.memory_size_bytes + getsizeof(spec.text) + ENTRY_BYTES
                self._compiled[spec] = found, size
                self._bytes += size
                while self._bytes > CACHE_BYTES:
                    self._bytes -= self._compiled.popitem(last=False)[1][1]
            waiting = self._waiting.pop(spec)
        for done in waiting:
            if isinstance(found, Exception):
                done.set_exception(found)
            else:
                done.set_result(found)

    def _bounded(self, spec: GrammarSpec, call: NativeCall[Compiled], tenant: str) -> Compiled:
        if not call.ends_within(COMPILE_CPU_S):
            self.left_behind.add(call.thread, tenant)
            raise InvalidRequest(
                f"{spec.field} takes too long to compile; make it smaller",
                reason="GRAMMAR_TOO_COMPLEX",
                field=spec.field,
                bound=f"{COMPILE_CPU_S:g} s of CPU time",
            )
        call.thread.leave()
        try:
            found = call.result.result()
        except (RuntimeError, ValueError) as error:  # what xgrammar raises for whatever it does not like
            raise refusal(spec, error) from error
        if found.memory_size_bytes > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(
                f"{spec.field} needs {found.memory_size_bytes} bytes when compiled",
                reason="GRAMMAR_TOO_COMPLEX",
                field=spec.field,
                bound=f"at most {MAX_GRAMMAR_BYTES} bytes",
            )
        return found
