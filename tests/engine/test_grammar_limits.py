"""A grammar costs no other request its stream: what compiling and masks may take, and what is left of them."""

from __future__ import annotations

import math
import os
import threading
import time
from sys import getsizeof
from typing import Any

import pytest
import torch

import engine.decoding.structured_output
from engine.core.sequence import Sequence
from engine.decoding import grammars as grammars_module
from engine.decoding.grammars import Grammars
from engine.decoding.sampler import choose
from engine.decoding.structured_output import Compiled, Masks, Matcher, compile_spec
from tandem.errors import Busy, InternalError, InvalidRequest, TandemError
from tandem.sampling import GrammarSpec
from tests.support.byte_grammars import (
    DEMO,
    VOCAB,
    compiled,
    matcher_of,
    sequence,
    step,
)
from tests.support.waiting import wait_until


def test_masks_are_filled_while_the_caller_does_something_else() -> None:
    """`begin` returns at once; `wait` waits. The control: nothing is filled before the thread may go on."""
    one = sequence(GrammarSpec("regex", "[ab]"))
    go, fill = threading.Event(), matcher_of(one)

    class Held(Matcher):
        def fill(self, *arguments: Any) -> None:
            assert go.wait(600)
            fill.fill(*arguments)

    one.matcher = Held(one.grammar, one.stop_ids)
    masks = Masks()
    filling = masks.begin([one], VOCAB)
    assert filling is not None
    assert int(filling.bits[0, 97 // 32]) == 0, "nothing is allowed before it is filled"
    go.set()
    filling.wait()
    assert int(filling.bits[0, 97 // 32]) != 0
    masks.thread().leave()
    assert masks.begin([sequence(None)], VOCAB) is None


def test_a_grammar_that_does_not_end_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request gets a status, its neighbours their masks, and later steps another thread. CPU time decides: a thread
    that merely waits, because the machine is busy, is waited for."""
    monkeypatch.setattr(engine.decoding.structured_output, "MASK_CPU_S", 0.2)
    spec = GrammarSpec("regex", "[ab]")
    slow, late, good = sequence(spec), sequence(spec), sequence(spec)
    go = threading.Event()

    class Spins(Matcher):
        def fill(self, *arguments: Any) -> None:
            while not go.is_set():
                pass

    class Sleeps(Matcher):
        def fill(self, *arguments: Any) -> None:
            go.wait(0.5)
            Matcher.fill(self, *arguments)

    slow.matcher, slow.tenant = Spins(slow.grammar, slow.stop_ids), "slow"
    late.matcher = Sleeps(late.grammar, late.stop_ids)
    masks = Masks()
    filling = masks.begin([late, slow, good], VOCAB)
    choices = choose(torch.zeros(3, VOCAB), [late, slow, good], filling)
    assert [choice.token in b"ab" if choice.token else None for choice in choices] == [True, None, True]
    assert isinstance(choices[1].error, InvalidRequest)
    assert choices[1].error.reason == "GRAMMAR_TOO_COMPLEX"
    assert (masks.left_behind.count("slow"), masks.left_behind.count("")) == (1, 0)
    assert {os.getpriority(os.PRIO_PROCESS, thread.native_id) for thread in masks.left_behind.threads} == {19}
    assert choose(torch.zeros(1, VOCAB), [good], masks.begin([good], VOCAB))[0].token in b"ab"
    go.set()
    masks.thread().leave()
    for thread in masks.left_behind.threads:
        thread.join(600)
    assert masks.left_behind.count("slow") == 0


def test_a_row_that_ends_as_its_thread_is_left_gives_no_other_row_to_two_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that was too slow went on with the next row, beside the one that took over: a token of that request
    was matched twice."""
    monkeypatch.setattr(engine.decoding.structured_output, "MASK_CPU_S", 0.2)
    spec = GrammarSpec("regex", "[ab]+")
    slow, good = sequence(spec), sequence(spec)
    go, fills = threading.Event(), list[str]()

    class Spins(Matcher):
        def fill(self, *arguments: Any) -> None:
            while not go.is_set():
                pass

    class Counts(Matcher):
        def fill(self, *arguments: Any) -> None:
            fills.append(threading.current_thread().name)
            Matcher.fill(self, *arguments)

    slow.matcher, good.matcher = Spins(slow.grammar, slow.stop_ids), Counts(good.grammar, good.stop_ids)
    masks = Masks()
    leave = masks.leave

    def leave_late(tenant: str) -> None:
        left = masks.thread()
        go.set()
        leave(tenant)
        left.join(600)  # it does all that it would do

    monkeypatch.setattr(masks, "leave", leave_late)
    choices = choose(torch.zeros(2, VOCAB), [slow, good], masks.begin([slow, good], VOCAB))
    assert [choice.token in b"ab" if choice.token else None for choice in choices] == [None, True]
    assert len(fills) == 1
    masks.thread().leave()


def cpu_until_it_fails(
    monkeypatch: pytest.MonkeyPatch, at_once: float, each: float, most: float = math.inf
) -> tuple[float, int]:
    """CPU seconds that a hostile request's masks take over its life, or until they are `most`, and its tokens; a good
    one gets all of its own."""
    monkeypatch.setattr(engine.decoding.structured_output, "MASK_CPU_S", at_once)
    monkeypatch.setattr(engine.decoding.structured_output, "TOKEN_CPU_S", each)
    hostile = sequence(GrammarSpec("regex", "(a*)*(a*)*(aa|a)*(a|aa)*" * 8))  # compiles in a millisecond
    good, masks = sequence(GrammarSpec("regex", "a+")), Masks()
    compiled(hostile.sampling.grammar)
    began, failed = time.process_time(), dict[int, TandemError]()
    while not failed and time.process_time() - began < most:
        filling = masks.begin([hostile, good], VOCAB)
        assert filling is not None
        filling.wait()
        assert int(filling.bits[1, 97 // 32]) != 0
        if not (failed := filling.failed):
            hostile.tokens.append(97)
            good.tokens.append(97)
    taken = time.process_time() - began
    masks.thread().leave()
    assert all((row, error.reason) == (0, "GRAMMAR_TOO_COMPLEX") for row, error in failed.items())
    for thread in masks.left_behind.threads:
        thread.join(60)
    return taken, hostile.generated


def test_a_grammar_that_grows_slower_does_not_slow_down_the_others_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """All wait for its masks, so that the time counts over its tokens. The control: with a limit for each token alone,
    it stays just below that for dozens of tokens."""
    taken, tokens = cpu_until_it_fails(monkeypatch, 0.1, 0.002)
    assert taken < 0.1 + 0.002 * tokens + 0.3  # a call under way is left within 50 ms or so
    alone, longer = cpu_until_it_fails(monkeypatch, 0.1, 0.1, most=4 * taken)
    assert alone >= 4 * taken
    assert longer > tokens


@pytest.mark.parametrize(
    ("masks_s", "fails_at"),
    [
        ([0.9] + [0.018] * 3000, None),  # a long text under a large grammar, on a slow machine
        ([0.5, 0.5], None),
        ([0.6, 0.6], 1),
        ([0.0001] * 3000 + [0.9, 0.9], 3001),  # what was not used for long is not saved up
        ([0.0001] * 3000 + [1.1], 3000),
    ],
)
def test_the_time_of_a_request_s_masks_is_filled_up_by_its_tokens(
    monkeypatch: pytest.MonkeyPatch, masks_s: list[float], fails_at: int | None
) -> None:
    """Up to a second at once, and 20 ms for each token in the long run."""
    clock = [1e6]
    monkeypatch.setattr(engine.decoding.structured_output, "thread_time", lambda: clock[0])
    one, masks, failed = sequence(GrammarSpec("regex", "a+")), Masks(), None

    class Takes(Matcher):
        def fill(self, *arguments: Any) -> None:
            clock[0] += masks_s[one.generated]
            Matcher.fill(self, *arguments)

    one.matcher = Takes(one.grammar, one.stop_ids)
    for place in range(len(masks_s)):
        filling = masks.begin([one], VOCAB)
        assert filling is not None
        if filling.wait().failed:
            failed = place
            break
        one.tokens.append(97)
    masks.thread().leave()
    assert failed == fails_at


def test_a_resumed_request_has_the_time_to_match_its_tokens_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are all matched before its first mask on another worker."""
    clock = [1e6]
    monkeypatch.setattr(engine.decoding.structured_output, "thread_time", lambda: clock[0])
    resumed, masks = sequence(GrammarSpec("regex", "a+"), "a" * 500), Masks()

    class Takes(Matcher):
        def fill(self, *arguments: Any) -> None:
            clock[0] += 0.018 * resumed.generated
            Matcher.fill(self, *arguments)

    resumed.matcher = Takes(resumed.grammar, resumed.stop_ids)
    assert choose(torch.zeros(1, VOCAB), [resumed], masks.begin([resumed], VOCAB))[0].token == 97
    masks.thread().leave()


def test_a_matcher_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a state, so that a token is matched once."""
    made: list[Sequence] = []
    new = Matcher.of
    monkeypatch.setattr(Matcher, "of", lambda one: (made.append(one), new(one))[1])
    one, masks = sequence(GrammarSpec("regex", "[ab]+")), Masks()
    for _ in range(3):
        choose(torch.zeros(1, VOCAB), [one], masks.begin([one], VOCAB))
        one.tokens.append(97)
    assert made == [one]
    assert one.matcher.matched == len(one.tokens) - 1
    masks.thread().leave()


def threads_inside_one_matcher(monkeypatch: pytest.MonkeyPatch, *, kept: bool) -> int:
    """How many are at once, when the step whose masks were slow has failed and its sequence is retried. `kept`: the
    sequence keeps its matcher, as it did."""
    monkeypatch.setattr(engine.decoding.structured_output, "MASK_CPU_S", 0.2)
    one = sequence(GrammarSpec("regex", "[ab]+"))
    go, inside = threading.Event(), set[int]()

    class Spins(Matcher):
        def fill(self, *arguments: Any) -> None:
            inside.add(threading.get_ident())
            while not go.is_set():
                pass

    one.matcher = slow = Spins(one.grammar, one.stop_ids)
    masks = Masks()
    for _ in range(2):  # what the failed step learns of its rows is lost with it
        filling = masks.begin([one], VOCAB)
        assert filling is not None
        filling.wait()
        one.matcher = slow if kept else one.matcher
    go.set()
    masks.thread().leave()
    for thread in masks.left_behind.threads:
        thread.join(60)
    assert kept or one.matcher is not slow, "nor does it come back with its thread"
    return len(inside)


def test_a_matcher_that_was_left_with_its_thread_serves_no_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads inside one native matcher are a data race: it may crash the worker, or allow wrong tokens. The
    control: they were two."""
    assert threads_inside_one_matcher(monkeypatch, kept=False) == 1
    assert threads_inside_one_matcher(monkeypatch, kept=True) == 2


def test_a_wait_that_fails_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watchdog allows a step more time only while it waits for its masks."""
    masks = Masks()
    filling = masks.begin([sequence(GrammarSpec("regex", "[ab]"))], VOCAB)
    assert filling is not None

    def fails(_: float) -> bool:
        assert masks.waits == 1
        raise RuntimeError("the wait fails")

    monkeypatch.setattr(filling._ended, "wait", fails)
    with pytest.raises(RuntimeError, match="the wait fails"):
        filling.wait()
    assert masks.waits == 2
    masks.thread().leave()


def test_a_bug_on_the_masks_thread_is_not_an_unmasked_token() -> None:
    """Its row fails, and no other; the next step is not affected."""

    class Broken(Matcher):
        def fill(self, *arguments: Any) -> None:
            raise TypeError("a bug")

    spec = GrammarSpec("regex", "[ab]")
    good, bad, after = sequence(spec), sequence(spec), sequence(spec)
    bad.matcher = Broken(bad.grammar, bad.stop_ids)
    masks = Masks()
    first, second, third = choose(torch.zeros(3, VOCAB), [good, bad, after], masks.begin([good, bad, after], VOCAB))
    assert first.token in b"ab"
    assert third.token in b"ab"
    assert second.token is None
    assert isinstance(second.error, InternalError)
    assert choose(torch.zeros(1, VOCAB), [after], masks.begin([after], VOCAB))[0].token in b"ab"
    masks.thread().leave()


def test_a_mask_does_not_hide_logits_that_are_no_numbers() -> None:
    """Neither where the grammar excludes the token, nor where it would be blamed for a dead end; and a mask that failed
    itself does not hide it either."""
    spec = GrammarSpec("regex", "[ab]")
    logits = torch.zeros(4, VOCAB)
    logits[0, 120], logits[1], logits[2, 120] = math.nan, -math.inf, math.nan
    rows = [sequence(spec) for _ in range(4)]
    broken = sequence(spec, "x")  # does not fit its grammar
    reasons = [choice.error and choice.error.reason for choice in step([rows[0], rows[1], broken, rows[3]], logits)]
    assert reasons == ["LOGITS_NOT_FINITE"] * 3 + [None]


def test_compiling_is_bounded_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that takes too long is refused, at once when it comes again; the next one is compiled."""
    grammars = Grammars(DEMO, 2048, [0])
    hostile = GrammarSpec("regex", "(a*)*(a*)*(a|b)*(a|aa)*" * 70)  # 1.6 s on a Zen 4
    first = grammars.compile(GrammarSpec("regex", "a+")).result(600)
    assert grammars.compile(GrammarSpec("regex", "a+")).result(0) is first, "from the cache"
    monkeypatch.setattr(grammars_module, "COMPILE_CPU_S", 0.05)
    with pytest.raises(InvalidRequest) as caught:
        grammars.compile(hostile).result(600)
    assert (caught.value.reason, caught.value.field) == ("GRAMMAR_TOO_COMPLEX", "sampling.grammar.regex")
    monkeypatch.setattr(grammars, "_bounded", lambda *_: pytest.fail("it was compiled again"))
    with pytest.raises(InvalidRequest):
        grammars.compile(hostile).result(600)
    monkeypatch.undo()
    assert grammars.compile(GrammarSpec("regex", "b+")).result(600) is not first
    for thread in grammars.left_behind.threads:
        thread.join(600)


class Slow:
    """Grammars of capital letters take CPU time until `go` is set; `begun` has all in the order in which they begin."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.go = threading.Event()

    def compile(self, spec: GrammarSpec, known: Any) -> Any:
        self.begun.append(spec.text)
        while spec.text.isupper() and not self.go.is_set():
            sum(range(1000))
        return compile_spec(spec, known)


def test_grammars_that_are_slow_to_compile_hold_up_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of them go on beside the next ones, and the same one again waits for what comes of it. A fourth is waited
    for, so that no more threads compile. The control: when none goes on beside others, one holds up all."""
    grammars, slow = Grammars(DEMO, 2048, [0]), Slow()
    monkeypatch.setattr(grammars_module, "compile_spec", slow.compile)
    monkeypatch.setattr(grammars_module, "COMPILE_CPU_S", 600.0)
    monkeypatch.setattr(grammars_module, "QUICK_CPU_S", 0.01)
    slow_ones = [grammars.compile(GrammarSpec("regex", text)) for text in ("A", "B", "A", "C")]
    assert grammars.compile(GrammarSpec("regex", "d")).result(600)
    assert not any(one.done() for one in slow_ones)
    fourth, later = grammars.compile(GrammarSpec("regex", "E")), grammars.compile(GrammarSpec("regex", "f"))
    with pytest.raises(TimeoutError):
        later.result(0.3)
    slow.go.set()
    assert slow_ones[0].result(600) is slow_ones[2].result(600)
    assert all(one.result(600) for one in (*slow_ones, fourth, later))
    assert sorted(slow.begun) == ["A", "B", "C", "E", "d", "f"]
    slow.go.clear()
    monkeypatch.setattr(grammars_module, "QUICK_CPU_S", 600.0)
    alone, after = grammars.compile(GrammarSpec("regex", "G")), grammars.compile(GrammarSpec("regex", "h"))
    with pytest.raises(TimeoutError):
        after.result(0.3)
    slow.go.set()
    assert alone.result(600)
    assert after.result(600)


def test_a_tenant_whose_grammars_are_compiled_has_no_threads() -> None:
    """A worker serves more tenants than it should have threads for."""
    grammars, before = Grammars(DEMO, 2048, [0]), set(threading.enumerate())
    for tenant in range(8):
        grammars.compile(GrammarSpec("regex", f"[a-{'bcdefghi'[tenant]}]+"), f"tenant-{tenant}").result(600)
    wait_until(lambda: not {*threading.enumerate()} - before, 10, lambda: grammars._lines)


def test_a_tenant_s_grammars_hold_up_no_other_tenant(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Neither those that are slow, nor those that never end, after which its own are refused. The same grammar is
    compiled once for all tenants."""
    grammars, slow = Grammars(DEMO, 2048, [0]), Slow()
    request.addfinalizer(slow.go.set)
    monkeypatch.setattr(grammars_module, "compile_spec", slow.compile)
    monkeypatch.setattr(grammars_module, "COMPILE_CPU_S", 600.0)
    monkeypatch.setattr(grammars_module, "QUICK_CPU_S", 0.01)
    slow_ones = [grammars.compile(GrammarSpec("regex", text), "slow") for text in ("A", "B", "C", "E")]
    behind = grammars.compile(GrammarSpec("regex", "d"), "slow")
    with pytest.raises(TimeoutError):
        behind.result(0.3)
    assert grammars.compile(GrammarSpec("regex", "e"), "other").result(600)
    shared = grammars.compile(GrammarSpec("regex", "A"), "other")
    slow.go.set()
    assert all(one.result(600) for one in (*slow_ones, behind))
    assert shared.result(600) is slow_ones[0].result(0)
    assert sorted(slow.begun) == ["A", "B", "C", "E", "d", "e"]
    slow.go.clear()
    monkeypatch.setattr(grammars_module, "COMPILE_CPU_S", 0.02)
    for text in ("X", "Y", "Z"):
        with pytest.raises(InvalidRequest, match="too long to compile"):
            grammars.compile(GrammarSpec("regex", text), "slow").result(600)
    with pytest.raises(Busy, match="of this tenant"):
        grammars.compile(GrammarSpec("regex", "x"), "slow").result(600)
    monkeypatch.setattr(grammars_module, "COMPILE_CPU_S", 600.0)
    assert grammars.compile(GrammarSpec("regex", "x"), "other").result(600)
    slow.go.set()
    for thread in grammars.left_behind.threads:
        thread.join(600)


def test_a_bug_while_compiling_is_an_answer_and_not_a_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request gets the error, and the next grammar is compiled."""
    grammars = Grammars(DEMO, 2048, [0])
    monkeypatch.setattr(grammars_module, "compile_spec", lambda *_: [][1])
    with pytest.raises(IndexError):
        grammars.compile(GrammarSpec("regex", "a")).result(600)
    monkeypatch.undo()
    assert grammars.compile(GrammarSpec("regex", "a")).result(600)


def test_bad_grammars_name_their_field() -> None:
    """What the library rejects is the client's error."""
    grammars = Grammars(DEMO, 2048, [0])
    for kind, text in [
        ("regex", "(a"),
        ("regex", "(?=a)b"),
        ("ebnf", "x ::= y"),
        ("ebnf", "root ::= ["),
        ("json_schema", "{"),
    ]:
        with pytest.raises(InvalidRequest) as caught:
            grammars.compile(GrammarSpec(kind, text)).result(600)
        assert caught.value.field == f"sampling.grammar.{kind}"
        assert ".cc:" not in caught.value.message


def test_a_large_grammar_and_a_worker_full_of_stuck_ones_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded too; and with too many stuck threads the router is sent to another worker."""
    grammars = Grammars(DEMO, 2048, [0])
    monkeypatch.setattr(grammars_module, "MAX_GRAMMAR_BYTES", 100)
    with pytest.raises(InvalidRequest, match="bytes"):
        grammars.compile(GrammarSpec("regex", "abc")).result(600)
    monkeypatch.setattr(grammars.left_behind, "count", lambda _: 3)
    with pytest.raises(Busy):
        grammars.compile(GrammarSpec("regex", "abcd")).result(600)


def test_a_tenant_whose_grammars_are_stuck_gets_none_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar whose masks never end is one that compiles: from the cache it cost a thread with each request. Other
    tenants get it, and a grammar that was refused is refused as before."""
    grammars, spec, bad = Grammars(DEMO, 2048, [0]), GrammarSpec("regex", "abc"), GrammarSpec("regex", "(a")
    found = grammars.compile(spec, "stuck").result(60)
    with pytest.raises(InvalidRequest):
        grammars.compile(bad, "stuck").result(60)
    monkeypatch.setattr(grammars.left_behind, "count", lambda tenant: 3 if tenant == "stuck" else 0)
    with pytest.raises(Busy) as caught:
        grammars.compile(spec, "stuck").result(60)
    assert caught.value.reason == "GRAMMARS_STUCK"
    with pytest.raises(InvalidRequest):
        grammars.compile(bad, "stuck").result(60)
    assert grammars.compile(spec, "other").result(60) is found
    monkeypatch.setattr(grammars.left_behind, "count", lambda _: 2)
    assert grammars.compile(spec, "stuck").result(60) is found, "the control: two threads are no reason"


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used grammar is evicted first."""
    grammars = Grammars(DEMO, 2048, [0])
    specs = [GrammarSpec("regex", f"{letter}+") for letter in "abc"]
    a = grammars.compile(specs[0]).result(600)
    b = grammars.compile(specs[1]).result(600)
    c = Grammars(DEMO, 2048, [0]).compile(specs[2]).result(600)
    limit = a.memory_size_bytes + max(b.memory_size_bytes, c.memory_size_bytes)
    limit += 2 * (grammars_module.ENTRY_BYTES + getsizeof(specs[0].text))
    monkeypatch.setattr(grammars_module, "CACHE_BYTES", limit)
    assert grammars.compile(specs[0]).result(600) is a
    grammars.compile(specs[2]).result(600)
    assert grammars.compile(specs[0]).result(600) is a
    assert grammars.compile(specs[1]).result(600) is not b


def test_the_texts_of_grammars_count_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text may be far longer than what comes of it, and one character can make each of its characters take four
    bytes."""
    padded = [GrammarSpec("ebnf", f'# \U0001f600{letter * 60_000}\nroot ::= "{letter}"\n') for letter in "ab"]
    for texts, kept in ((3, True), (1, False)):
        grammars = Grammars(DEMO, 2048, [0])
        first = grammars.compile(padded[0]).result(600)
        monkeypatch.setattr(grammars_module, "CACHE_BYTES", texts * 4 * 60_000 + 100_000)
        grammars.compile(padded[1]).result(600)
        assert (grammars.compile(padded[0]).result(600) is first) is kept, texts


def test_a_new_grammar_costs_no_look_at_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many the cache has: the event loop waits for its lock."""
    grammars, size, asked = Grammars(DEMO, 2048, [0]), Compiled.memory_size_bytes, list[object]()
    for letter in "abcdefgh":
        grammars.compile(GrammarSpec("regex", f"{letter}+")).result(600)

    def counted(one: Compiled) -> int:
        asked.append(one)
        return size.fget(one)

    monkeypatch.setattr(Compiled, "memory_size_bytes", property(counted))
    grammars.compile(GrammarSpec("regex", "z+")).result(600)
    assert len(set(map(id, asked))) == 1


def test_repetitions_of_rules_are_not_written_out() -> None:
    """The router bounds the repetitions of a regular expression, and not those of EBNF: xgrammar counts them while it
    matches."""
    found = Grammars(DEMO, 2048, [0]).compile(GrammarSpec("ebnf", 'root ::= ((("a"{9999}){9999}){9999})'))
    assert found.result(600).memory_size_bytes < 2**20
