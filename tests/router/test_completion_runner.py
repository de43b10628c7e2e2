"""How many attempts a completion may make, with workers that cannot be reached."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from time import monotonic
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from cluster.state.registry import State, WorkerRecord
from services.router.execution import completion_runner, poison_check, poison_requests, request_timeline
from services.router.execution.completion import RESTORED_TOKENS, Completion
from services.router.execution.completion_runner import CompletionRunner
from services.router.execution.detokenizer import Detokenizer
from services.router.execution.output_queue import OutputQueue
from services.router.execution.output_reader import OutputReader
from services.router.execution.poison_check import PoisonCheck
from services.router.execution.request_timeline import ReceiptLog, RequestTimeline
from services.router.execution.stream_mux import NOT_SENT
from services.router.execution.usage_meter import UsageMeter
from services.router.preprocess.request import Request, build_request
from services.router.preprocess.served_model import ModelFacts
from services.router.preprocess.tokenizer import Tokenizer
from services.router.routing.placement import Placement, RoutingConfig, WorkerSnapshot
from services.router.routing.request_scheduler import RequestScheduler
from services.worker_liveness import WorkerLiveness
from tandem.errors import Busy, DeadlineExceeded, NoWorker, ResumeFailed, TandemError, Unavailable, WorkerLost
from tandem.settings import Settings
from tandem.telemetry.metrics import RouterMetrics
from tandem.v1 import common_pb2, decode_pb2, generation_pb2
from tests.router.scheduling import once, seen, two
from tests.support.metric_values import values

DECODE = WorkerSnapshot("decode-0", "a", "h:1", "L", 0, 4, 64, 16, 1024)
MODEL = ModelFacts(context=64, vocab_size=100, eos_token_ids=())
_ANYTHING: Any = SimpleNamespace()
CALL_S = 1.0  # of one that is not answered


def nothing() -> None: ...


class Unreachable:
    """Stands for the scheduler, the prefix index, the shared streams and the poison check: one decode worker, which
    every call fails to reach after CALL_S of the clock."""

    def __init__(self, reason: str) -> None:
        self.now, self.calls, self._reason = 100.0, 0, reason

    def clock(self) -> float:
        return self.now

    @asynccontextmanager
    async def placed(self, *_: Any, **__: Any) -> AsyncIterator[Placement]:
        yield Placement(DECODE, None)

    @asynccontextmanager
    async def decode(self, *_: Any) -> AsyncIterator[Any]:
        self.calls += 1
        self.now += CALL_S
        raise WorkerLost("no connection", reason=self._reason)
        yield

    async def prompt(self, *_: Any) -> None: ...

    async def settle(self, *_: Any) -> bool:
        return False

    def cached(self, *_: Any) -> Any: ...

    def rejected(self, *_: Any, **__: Any) -> None: ...

    holders = suspect = failed = served = cached


async def calls_until_given_up(monkeypatch: pytest.MonkeyPatch, reason: str, queue_timeout_s: float) -> tuple[int, Any]:
    parts: Any = Unreachable(reason)
    for module in (completion_runner, request_timeline):
        monkeypatch.setattr(module, "monotonic", parts.clock)
    settings = Settings(model="toy", max_attempts=3, queue_timeout_s=queue_timeout_s)
    asked = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[1, 2, 3]))
    request = build_request(asked, Tokenizer(None, None), MODEL)
    timeline = RequestTimeline(parts.now)
    completion: Any = SimpleNamespace(request=request, follows=False, timeline=timeline, over=nothing)
    with pytest.raises(WorkerLost, match="given up after 3 attempts"):
        await CompletionRunner(settings, parts, parts, parts, parts).run(completion, parts.now + 1000.0)
    return parts.calls, completion


async def test_a_request_that_cannot_be_sent_waits_and_is_then_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls count as attempts once it has waited as long as for room: it does not try until its deadline."""
    calls, completion = await calls_until_given_up(monkeypatch, NOT_SENT, queue_timeout_s=10.0)
    assert calls == 9 + 3
    assert len(completion.request.notes) == 3
    assert completion.timeline._retries == pytest.approx(calls * CALL_S)  # each is counted once


class Lacking(Unreachable):
    """Five decode workers without the request's adapter."""

    @asynccontextmanager
    async def placed(self, *_: Any, **__: Any) -> AsyncIterator[Placement]:
        yield Placement(replace(DECODE, worker_id=f"decode-{self.calls % 5}"), None)

    @asynccontextmanager
    async def decode(self, *_: Any) -> AsyncIterator[Any]:
        self.calls += 1
        raise Unavailable("it does not have the adapter", reason="OTHER_ADAPTER")
        yield

    def rejected(self, *_: Any, full: bool) -> None:
        assert not full, "it has room for others"


async def test_each_worker_may_say_once_that_it_lacks_an_adapter() -> None:
    """During an upgrade many do, and the last one may have it. A worker that is asked again, because no other is there,
    has failed the attempt."""
    parts: Any = Lacking("")
    asked = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[1, 2, 3]))
    request = build_request(asked, Tokenizer(None, None), MODEL)
    timeline = RequestTimeline(monotonic())
    completion: Any = SimpleNamespace(request=request, follows=False, timeline=timeline, over=nothing)
    runner = CompletionRunner(Settings(model="toy", max_attempts=3), parts, parts, parts, parts)
    with pytest.raises(Unavailable, match="given up after 3 attempts"):
        await runner.run(completion, monotonic() + 10.0)
    assert (parts.calls, len(request.notes)) == (5 + 3, 5 + 3)


@pytest.mark.parametrize(("reason", "given_back"), [(NOT_SENT, 9), ("DECODE_LOST", 0)])
async def test_what_is_no_attempt_is_given_back(reason: str, given_back: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is placed again, and counts once for its tenant. The control: what counts as an attempt does so."""
    back = list[bool]()
    monkeypatch.setattr(Unreachable, "rejected", lambda self, placement, full=True: back.append(full), raising=False)
    await calls_until_given_up(monkeypatch, reason, queue_timeout_s=10.0)
    assert back == [False] * given_back


async def test_a_request_that_was_sent_has_only_its_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: another loss of the same worker counts at once."""
    calls, _ = await calls_until_given_up(monkeypatch, "DECODE_LOST", queue_timeout_s=10.0)
    assert calls == 3


async def test_a_worker_that_is_lost_while_a_request_waits_to_begin_alone_is_spared_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another request may have ended it. What ends each worker before that admits it is given up like all others: it
    was sent to one worker after another, without end."""

    async def settle(*_: Any) -> bool:
        return True

    monkeypatch.setattr(Unreachable, "settle", settle)
    calls, completion = await calls_until_given_up(monkeypatch, "", queue_timeout_s=10.0)
    assert calls == 3 + 1
    assert len(completion.request.notes) == 3


class Killed(Unreachable):
    """Four decode workers, each of which ends when it gets the request, before it admits it, and is replaced; with the
    liveness of a view that shows each end."""

    version = 0

    @asynccontextmanager
    async def placed(self, *_: Any, **__: Any) -> AsyncIterator[Placement]:
        yield Placement(replace(DECODE, worker_id=f"decode-{self.calls % 4}", incarnation=f"life {self.calls}"), None)

    def ended(self, *_: Any) -> bool:
        return True


@pytest.mark.parametrize("counted", [True, False], ids=["as it is", "control"])
async def test_a_request_that_ends_workers_before_they_admit_it_ends_four(
    monkeypatch: pytest.MonkeyPatch, counted: bool
) -> None:
    """However often it is sent again within a minute: its grammar crashes the compiler, for instance. The control does
    not count such losses."""
    if not counted:
        monkeypatch.setattr(poison_requests, "POISON_LOST", 10**9)
    parts: Any = Killed("")
    for module in (completion_runner, request_timeline, poison_check):
        monkeypatch.setattr(module, "monotonic", parts.clock)
    asked = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[1, 2, 3]))
    poison, errors = PoisonCheck(parts, 4.5), list[str]()
    for _ in range(5):
        request = build_request(asked, Tokenizer(None, None), MODEL)
        timeline = RequestTimeline(parts.now)
        completion: Any = SimpleNamespace(request=request, follows=False, timeline=timeline, over=nothing)
        runner = CompletionRunner(Settings(model="toy"), parts, parts, parts, poison)
        with pytest.raises(TandemError) as failed:
            await runner.run(completion, parts.now + 600.0)
        errors.append(failed.value.reason)
    if counted:
        assert (parts.calls, set(errors)) == (4, {"KILLS_WORKERS"})
    else:
        assert (parts.calls, set(errors)) == (5 * 5, {"DECODE_UNREACHABLE"})


@pytest.mark.parametrize(
    ("last", "reason"), [(True, common_pb2.FINISH_REASON_STOP), (False, None)], ids=["ended", "goes on"]
)
async def test_a_stored_answer_is_complete_where_its_last_token_says_so(last: bool, reason: Any) -> None:
    """Whatever the end tokens of other checkpoints are: a job may have been computed by a worker with others, and its
    end not been stored with its last token."""
    tokenizer, anything = Tokenizer(None, None), _ANYTHING
    asked = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[1, 2, 3]))
    request = build_request(asked, tokenizer, MODEL)
    past = [generation_pb2.Delta(token_ids=[5, 6]), generation_pb2.Delta(token_ids=[7], last=last)]
    reader = OutputReader(Detokenizer(tokenizer), request)
    completion = Completion(request, RequestTimeline(0.0), reader, anything, anything)
    await completion.restore(past)
    assert completion.request.finish() == reason
    assert request.tokens == [1, 2, 3, 5, 6, 7]


async def test_other_streams_go_on_while_a_long_stored_answer_is_read() -> None:
    """A job of 100,000 tokens that another router began takes seconds, for which no stream may stand still."""
    tokenizer, anything = Tokenizer(None, None), _ANYTHING
    asked = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[1, 2, 3]))
    request = build_request(asked, tokenizer, replace(MODEL, context=100_000), 50_000)
    reader = OutputReader(Detokenizer(tokenizer), request)
    completion = Completion(request, RequestTimeline(0.0), reader, anything, anything)
    passes = 0

    async def others() -> None:
        nonlocal passes
        while True:
            await asyncio.sleep(0)
            passes += 1

    going = asyncio.create_task(others())
    await completion.restore([generation_pb2.Delta(token_ids=[5])] * 20_000)
    going.cancel()
    assert request.generated == 20_000
    assert passes >= 20_000 / RESTORED_TOKENS - 2


def said(position: int, *ids: int, scores: int = 0) -> decode_pb2.DecodeResponse:
    logprobs = common_pb2.Logprobs(chosen=[-1.0] * scores) if scores else None
    return decode_pb2.DecodeResponse(tokens=decode_pb2.Tokens(position=position, token_ids=ids, logprobs=logprobs))


ENDED = decode_pb2.DecodeResponse(ended=decode_pb2.Ended())


class Saying(Unreachable):
    """One decode worker whose n-th call sends the n-th of these streams; for a stream, whose first event is read from
    its call, and the others from its feed."""

    def __init__(self, *streams: list[decode_pb2.DecodeResponse]) -> None:
        super().__init__("")
        self._streams = streams
        self.suspected = 0

    @asynccontextmanager
    async def decode(self, *_: Any) -> AsyncIterator[Any]:
        events = self._streams[self.calls]
        self.calls += 1

        async def call() -> AsyncIterator[decode_pb2.DecodeResponse]:
            yield events[0]

        async def read(take: Any, _: Any) -> None:
            assert any(map(take, events[1:]))

        yield call(), SimpleNamespace(read=read)

    def prefilled(self, *_: Any) -> None: ...

    def suspect(self, *_: Any) -> None:
        self.suspected += 1

    def kept(self, *_: Any) -> None: ...

    observe_path = generated = sent = first_token = over = finished = kept


async def answered(parts: Any, max_attempts: int) -> Request:
    """A request whose answer is three tokens, 5, 6 and 7, after its end."""
    asked = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[1, 2, 3]))
    asked.sampling.max_tokens = 3
    request = build_request(asked, Tokenizer(None, None), MODEL)
    output = OutputQueue()
    reader = OutputReader(Detokenizer(Tokenizer(None, None)), request)
    completion = Completion(request, RequestTimeline(monotonic()), reader, output, parts)
    settings = Settings(model="toy", max_attempts=max_attempts)
    await CompletionRunner(settings, parts, parts, parts, parts).run(completion, monotonic() + 10.0)
    delta, finished = await output.take(), await output.take()
    assert (list(delta.delta.token_ids), finished.finished.reason) == ([5, 6, 7], common_pb2.FINISH_REASON_LENGTH)
    return request


@pytest.mark.parametrize(
    "faulty",
    [
        [said(3, 100)],
        [said(3, 5), said(4, 6, 4_000_000_000)],
        [said(3, 5), said(4)],
        [said(3, 5), said(4, *range(50))],
        [said(3, 5, scores=2)],
        [ENDED],
        [said(3, 5), ENDED],
    ],
    ids=["vocabulary", "vocabulary later", "none", "too many", "scores", "ended at once", "ended early"],
)
async def test_what_no_working_decode_worker_sends_is_a_lost_attempt(faulty: list[decode_pb2.DecodeResponse]) -> None:
    """The answer goes on elsewhere with the tokens that were sent before, and has none of the faulty message."""
    parts: Any = Saying(faulty, [said(3, 5), said(4, 6, 7), ENDED] if len(faulty) == 1 else [said(4, 6, 7), ENDED])
    request = await answered(parts, max_attempts=2)
    assert (parts.calls, parts.suspected, len(request.notes)) == (2, 1, 1)


async def test_an_answer_is_complete_without_its_end_also_in_the_last_attempt() -> None:
    """All of its tokens have come, and no other worker could add one."""
    parts: Any = Saying([said(3, 5), said(4, 6, 7), said(6)])  # no worker sends the last message: it breaks the attempt
    request = await answered(parts, max_attempts=1)
    assert (parts.calls, len(request.notes)) == (1, 1)


@pytest.mark.parametrize("counted", [True, False], ids=["as it is", "control"])
async def test_an_answer_that_breaks_counts_its_first_token_and_its_retries(
    monkeypatch: pytest.MonkeyPatch, counted: bool
) -> None:
    """Whatever becomes of the rest: who hangs up on a slow answer must not make the answers look fast, nor must
    requests that fail after all their attempts make retries look rare. The control waits for complete answers."""
    if not counted:
        for name in ("first_token", "over"):
            monkeypatch.setattr(UsageMeter, name, lambda *_: None)
    first = said(3, 5)
    first.tokens.first.path = common_pb2.PATH_LOCAL
    parts: Any = Saying([first, ENDED], [ENDED], [ENDED])
    metrics, anything = RouterMetrics(Settings(model="toy"), "router-0", lambda: 0), Mock()
    usage = UsageMeter(metrics, ReceiptLog(), anything, anything)
    asked = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[1, 2, 3]))
    request = build_request(asked, Tokenizer(None, None), MODEL)
    reader = OutputReader(Detokenizer(Tokenizer(None, None)), request)
    completion = Completion(request, RequestTimeline(monotonic()), reader, OutputQueue(), usage)
    settings = Settings(model="toy", max_attempts=3)
    with pytest.raises(ResumeFailed, match="given up after 3 attempts"):
        await CompletionRunner(settings, parts, parts, parts, parts).run(completion, monotonic() + 10.0)
    found = values(metrics)
    assert found.get(("tandem_time_to_first_token_seconds_count", "local"), 0) == counted
    assert found.get(("tandem_phase_seconds_count", "queue"), 0) == counted
    assert found["tandem_retries_total",] == 2 * counted
    assert found["tandem_output_length_tokens_count",] == 0  # which is of complete answers


@pytest.mark.parametrize(
    ("is_job", "goes_on"), [(True, False), (True, True), (False, False)], ids=["job", "job that goes on", "control"]
)
async def test_a_jobs_first_token_is_nobodys_wait(is_job: bool, goes_on: bool) -> None:
    """A batch's line may wait in the queue for a minute and misses no objective, and pauses and lost routers would make
    the service look slow, or fast. The control is a client's request."""
    token = said(4 if goes_on else 3, 6)
    token.tokens.first.path = common_pb2.PATH_LOCAL  # of the attempt
    parts: Any = Saying([token, ENDED])
    metrics, anything = RouterMetrics(Settings(model="toy"), "router-0", lambda: 0), Mock()
    usage = UsageMeter(metrics, ReceiptLog(), anything, anything)
    asked = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[1, 2, 3]))
    asked.sampling.max_tokens = 2 if goes_on else 1
    request = build_request(asked, Tokenizer(None, None), MODEL)
    request.is_job = is_job
    reader = OutputReader(Detokenizer(Tokenizer(None, None)), request)
    completion = Completion(request, RequestTimeline(monotonic()), reader, OutputQueue(), usage)
    await completion.restore([generation_pb2.Delta(token_ids=[5])] * goes_on)
    await CompletionRunner(Settings(model="toy"), parts, parts, parts, parts).run(completion, monotonic() + 10.0)
    found = values(metrics)
    assert request.tokens == ([1, 2, 3, 5, 6] if goes_on else [1, 2, 3, 6])
    assert found.get(("tandem_time_to_first_token_seconds_count", "local"), 0) == (not is_job)
    assert found.get(("tandem_phase_seconds_count", "queue"), 0) == (not is_job)
    assert found["tandem_output_length_tokens_count",] == 1


class Remembering(Saying):
    """A scheduler that remembers whose request it placed."""

    @asynccontextmanager
    async def placed(self, waiting: Any, *about: Any, **more: Any) -> AsyncIterator[Placement]:
        self.is_job = waiting.is_job
        async with super().placed(waiting, *about, **more) as placement:
            yield placement


@pytest.mark.parametrize("is_job", [True, False])
async def test_the_scheduler_knows_which_requests_are_jobs(is_job: bool) -> None:
    """Their prompts arrive when they are placed."""
    parts: Any = Remembering([said(3, 6), ENDED])
    asked = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[1, 2, 3]))
    asked.sampling.max_tokens = 1
    request = build_request(asked, Tokenizer(None, None), MODEL)
    request.is_job = is_job
    reader = OutputReader(Detokenizer(Tokenizer(None, None)), request)
    completion = Completion(request, RequestTimeline(monotonic()), reader, OutputQueue(), parts)
    await CompletionRunner(Settings(model="toy"), parts, parts, parts, parts).run(completion, monotonic() + 10.0)
    assert parts.is_job is is_job


@pytest.mark.parametrize("refusal", [Busy("no place became free"), NoWorker("no decode worker was ready")])
@pytest.mark.parametrize("sent", [True, False], ids=["sent", "control"])
async def test_a_stream_that_finds_no_place_any_more_broke(
    monkeypatch: pytest.MonkeyPatch, refusal: TandemError, sent: bool
) -> None:
    """To its client "no room" would mean that nothing was generated, and that it may ask again. The control: of that
    which no worker began, it does, also where a job goes on with tokens of an earlier router."""
    parts: Any = Saying([said(3, 5), ENDED])
    first = parts.placed

    @asynccontextmanager
    async def placed(*about: Any, **more: Any) -> AsyncIterator[Placement]:
        if parts.calls or not sent:
            raise refusal
        async with first(*about, **more) as placement:
            yield placement

    monkeypatch.setattr(parts, "placed", placed)
    asked = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[1, 2, 3]))
    request = build_request(asked, Tokenizer(None, None), MODEL)
    reader = OutputReader(Detokenizer(Tokenizer(None, None)), request)
    completion = Completion(request, RequestTimeline(monotonic()), reader, OutputQueue(), parts)
    if not sent:
        await completion.restore([generation_pb2.Delta(token_ids=[5])])
    runner = CompletionRunner(Settings(model="toy"), parts, parts, parts, parts)
    with pytest.raises(TandemError) as caught:
        await runner.run(completion, monotonic() + 10.0)
    if sent:
        assert isinstance(caught.value, ResumeFailed)
        assert "1 tokens had been generated" in caught.value.message
    else:
        assert caught.value is refusal


class Refusing(Unreachable):
    """A decode worker that has no room after all, which it says after CALL_S."""

    @asynccontextmanager
    async def decode(self, *_: Any) -> AsyncIterator[Any]:
        self.now += CALL_S
        raise Busy("no room", reason="NO_ROOM")
        yield

    def cached(self, *_: Any) -> int:
        return 0

    def holders(self, *_: Any) -> tuple[str, ...]:
        return ()


async def test_who_was_refused_after_its_objective_may_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The objective was spent on an attempt, and is long enough for the prompt: sent again, the request has all of it,
    and is served if there is room."""
    parts: Any = Refusing("")
    for module in (completion_runner, request_timeline):
        monkeypatch.setattr(module, "monotonic", parts.clock)
    view = WorkerLiveness(_ANYTHING, 1.0)
    room: dict[str, Any] = {"max_model_len": 1024, "block_size": 16, "max_running": 2, "blocks_total": 100}
    view.workers = {"decode-0": WorkerRecord("decode-0", "decode", State.READY, 1, "a", "h:1", **room)}
    scheduler = RequestScheduler(view, 60.0, RoutingConfig())
    asked = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[1, 2, 3]), ttft_slo_seconds=0.5)
    request = build_request(asked, Tokenizer(None, None), MODEL)
    completion: Any = SimpleNamespace(request=request, follows=False, timeline=RequestTimeline(parts.now), over=nothing)
    runner = CompletionRunner(Settings(model="toy"), scheduler, parts, parts, parts)
    with pytest.raises(Busy, match="its objective") as refused:
        await runner.run(completion, parts.now + 60.0)
    assert (refused.value.reason, refused.value.retry_after) == ("OVERLOADED", pytest.approx(CALL_S - 0.5))


@pytest.mark.parametrize(
    ("reason", "unsuited", "suspected"),
    [
        ("RANK_WITHOUT_ADAPTER", ["decode-0"], []),
        ("OTHER_ADAPTER", ["decode-0"], []),
        ("PREFILL_RANK_WITHOUT_ADAPTER", ["prefill-0"], []),
        ("PREFILL_CHECKPOINT_REFUSED", ["prefill-0"], []),
        ("PREFILL_REFUSED", [], ["prefill-0"]),
        ("DRAINING", [], ["decode-0"]),
    ],
)
def test_a_worker_that_cannot_load_an_adapter_is_avoided_for_this_request_only(
    reason: str, unsuited: list[str], suspected: list[str]
) -> None:
    """All other tenants are served there. The control: one that fails whatever it is asked gets nothing for a while."""
    failed = list[str]()
    scheduler: Any = SimpleNamespace(
        suspect=lambda worker: failed.append(worker.worker_id),
        lost=lambda _, prefill: failed.append(prefill.worker_id),
    )
    nothing: Any = None
    asked = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[1]))
    request = build_request(asked, Tokenizer(None, None), MODEL)
    runner = CompletionRunner(Settings(model="toy"), scheduler, nothing, nothing, nothing)
    placement = Placement(DECODE, replace(DECODE, worker_id="prefill-0"))
    runner._blame(Unavailable("it could not", reason=reason), placement, request)
    assert ([worker_id for worker_id, _ in request.unsuited], failed) == (unsuited, suspected)


@pytest.mark.parametrize(
    ("follows", "late", "raised"),
    [(True, True, DeadlineExceeded), (True, False, ResumeFailed), (False, True, Busy), (False, False, Busy)],
)
async def test_an_answer_that_gets_no_place_after_others_have_begun_is_lost_or_late(
    monkeypatch: pytest.MonkeyPatch, follows: bool, late: bool, raised: type[TandemError]
) -> None:
    """Its client has tokens of the others, so it is not told that there was no room. The control is the only answer."""
    runner = CompletionRunner(Settings(model="toy"), *[_ANYTHING] * 4)
    request = SimpleNamespace(finish=lambda: None, generated=0)
    timeline = SimpleNamespace(ttft=None)
    completion: Any = SimpleNamespace(request=request, timeline=timeline, follows=follows, over=nothing)

    async def full(*_: object) -> None:
        raise Busy("no place became free")

    monkeypatch.setattr(runner, "_place", full)
    with pytest.raises(raised):
        await runner.run(completion, monotonic() + (-1.0 if late else 60.0))


async def test_a_decode_worker_that_reaches_no_prefill_worker_leaves_them_to_the_others() -> None:
    """The first one that it loses gets no prompts, which protects the others from a dead one. Once it has not reached a
    second one, its own connection is the likelier cause."""
    scheduler = RequestScheduler(seen(*two("decode"), *two("prefill")), 5.0, RoutingConfig(local="never"))
    one, other = [await once(scheduler) for _ in range(2)]
    assert one.prefill
    assert other.prefill
    assert one.prefill.worker_id != other.prefill.worker_id
    nothing: Any = None
    asked = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[1]))
    request = build_request(asked, Tokenizer(None, None), MODEL)
    runner = CompletionRunner(Settings(model="toy"), scheduler, nothing, nothing, nothing)
    paths = list[set[tuple[str, str]]]()
    for prefill in (one.prefill, other.prefill):
        runner._blame(Unavailable("no connection", reason="PREFILL_REFUSED"), Placement(one.decode, prefill), request)
        found = [await once(scheduler) for _ in range(4)]
        paths.append({(each.decode.worker_id, each.prefill.worker_id) for each in found if each.prefill})
    assert {prefill for _, prefill in paths[0]} == {other.prefill.worker_id}
    assert paths[1] == {(other.decode.worker_id, other.prefill.worker_id)}
