"""How a router goes on with a job, on a journal that only notes what it is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.state.job_journal import Entry, Kept
from cluster.state.job_journal import JobState as State
from cluster.state.registry import State as Ready
from cluster.state.registry import WorkerRecord
from services.router.frontend.job_runner import MAX_HOMELESS_S, MAX_RUNNING, JobRunner, _Running, goes_on
from services.router.preprocess.request import ResumeState
from services.router.tenancy.rate_limits import RateLimits
from tandem.errors import NotFound, PreconditionFailed, Unavailable
from tandem.v1 import generation_pb2, jobs_pb2, sampling_pb2

GIVEN: Any = SimpleNamespace


def finished(choice: int) -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(finished=generation_pb2.Finished(choice=choice))


class Journal:
    """Of one job of which some completions have ended."""

    def __init__(self, *ended: int) -> None:
        self.entries = [Entry(str(at), finished(choice).SerializeToString()) for at, choice in enumerate(ended)]
        self.calls: list[tuple[str, int]] = []  # "append" or "end", and the completion

    async def pages(self, job_id: str) -> AsyncIterator[list[Entry]]:
        yield self.entries

    async def append(self, job_id: str, generation: int, first: int, end: int, event: bytes, choice: int = 0) -> Kept:
        self.calls.append(("append", choice))
        return Kept.KEPT

    async def end(self, job_id: str, generation: int, state: State, event: bytes = b"") -> Kept:
        assert state is State.FINISHED
        self.calls.append(("end", generation_pb2.GenerateResponse.FromString(event).finished.choice))
        return Kept.KEPT


class Generation:
    """Gives the end of each completion that has not ended."""

    def __init__(self, *left: int) -> None:
        self._left = left

    async def generate(self, *about: Any, **more: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        for choice in self._left:
            yield finished(choice)


@pytest.mark.parametrize(
    ("ended", "left", "told"),
    [
        ((), (0, 1, 2), [("append", 0), ("append", 1), ("end", 2)]),
        ((0,), (1, 2), [("append", 1), ("end", 2)]),
        ((0, 0), (1, 2), [("append", 1), ("end", 2)]),
        ((1, 0, 1, 1), (2,), [("end", 2)]),
    ],
)
async def test_a_job_ends_with_its_last_completion_however_often_one_was_kept(
    ended: tuple[int, ...], left: tuple[int, ...], told: list[tuple[str, int]]
) -> None:
    """A router that died between keeping the end of a completion and hearing so leaves it twice. It counts once: the
    job neither ends before its last completion nor stays open after it."""
    journal = Journal(*ended)
    runner = runner_of(model_of(Generation(*left)), journal)
    request = generation_pb2.GenerateRequest(sampling=sampling_pb2.SamplingParams(n=3, max_tokens=4))
    await runner._attempt(job_of(request))
    assert journal.calls == told


def model_of(generation: Any, vocabulary: str = "", adapters: tuple[str, ...] = ("red",)) -> Any:
    facts = GIVEN(context=64, adapters=dict.fromkeys(adapters, b""))
    return GIVEN(
        generation=generation,
        tokenizer=GIVEN(vocabulary_digest=vocabulary),
        served=GIVEN(decode_workers=lambda: [worker()], facts=lambda: facts),
    )


def runner_of(model: Any, journal: Journal) -> JobRunner:
    return JobRunner(GIVEN(named=lambda name: model), RateLimits(None), GIVEN(**members(journal)))


def job_of(request: generation_pb2.GenerateRequest, **kept: Any) -> _Running:
    about = jobs_pb2.KeptJob(request=request, deadline=time.time() + 60, **kept)
    return _Running(GIVEN(job_id="/job", generation=1, tokens=0), about)


@pytest.mark.parametrize(
    ("kept", "now", "runs"), [("A", "A", True), ("A", "B", False), ("A", "", False), ("", "B", True)]
)
async def test_a_job_is_not_run_with_another_vocabulary(kept: str, now: str, runs: bool) -> None:
    """Its prompt is token ids, which would be other text, also before its first token. One that an older router stored
    does not say which ids it has."""
    journal = Journal()
    runner = runner_of(model_of(Generation(0), now), journal)
    job = job_of(generation_pb2.GenerateRequest(), vocabulary_digest=kept)
    if runs:
        await runner._attempt(job)
        assert journal.calls == [("end", 0)]
        return
    for waited_s, error in ((0.0, Unavailable), (MAX_HOMELESS_S + 1, PreconditionFailed)):
        job.homeless_since = time.monotonic() - waited_s if waited_s else None
        with pytest.raises(error) as refused:
            await runner._attempt(job)
        assert refused.value.reason == "JOB_OF_OTHER_MODEL"
    assert journal.calls == []


async def test_a_job_of_a_model_that_an_upgrade_adds_waits_at_a_router_of_before() -> None:
    """It may claim the job of a new router that was lost, and releases it when it leaves. After some time the job
    fails: its model is no longer served."""

    def unknown(name: str) -> Any:
        raise NotFound(f"there is no model {name!r}")

    journal = Journal()
    runner = JobRunner(GIVEN(named=unknown), RateLimits(None), GIVEN(**members(journal)))
    job = job_of(generation_pb2.GenerateRequest(model="new"))
    for waited_s, error in ((0.0, Unavailable), (MAX_HOMELESS_S + 1, PreconditionFailed)):
        job.homeless_since = time.monotonic() - waited_s if waited_s else None
        with pytest.raises(error, match="no model 'new'") as refused:
            await runner._attempt(job)
        assert refused.value.reason == "JOB_OF_OTHER_MODEL"
    assert journal.calls == []


@pytest.mark.parametrize(("adapters", "prompt", "runs"), [(("red",), 60, True), ((), 60, False), (("red",), 61, False)])
async def test_an_accepted_job_waits_for_what_it_was_accepted_with(
    adapters: tuple[str, ...], prompt: int, runs: bool
) -> None:
    """Its adapter may be between an unload and a load, and the only worker with its context may start again."""
    journal = Journal()
    request = generation_pb2.GenerateRequest(adapter="red", sampling=sampling_pb2.SamplingParams(max_tokens=4))
    request.token_ids.ids.extend([1] * prompt)
    attempt = runner_of(model_of(Generation(0), adapters=adapters), journal)._attempt(job_of(request))
    if runs:
        await attempt
        assert journal.calls == [("end", 0)]
        return
    with pytest.raises(Unavailable):
        await attempt
    assert journal.calls == []


async def test_a_job_means_the_adapter_of_its_submission() -> None:
    """Also at its first attempt: its name may have other content by then."""
    meant: list[bytes] = []

    async def generate(*about: Any, resume: ResumeState, **more: Any) -> AsyncIterator[Any]:
        meant.append(resume.adapter_fingerprint)
        yield finished(0)

    job = job_of(generation_pb2.GenerateRequest(adapter="red"), adapter_fingerprint=b"first")
    await runner_of(model_of(GIVEN(generate=generate)), Journal())._attempt(job)
    assert meant == [b"first"]


async def test_attempts_of_a_job_know_what_was_counted_of_its_prompt() -> None:
    """So that it counts once, however often the job asks for room. Another job has its own account."""
    known: list[bool] = []

    async def generate(*about: Any, resume: ResumeState, **more: Any) -> AsyncIterator[Any]:
        known.append(resume.prompt_count.done)
        resume.prompt_count.done = True
        yield finished(0)

    runner = runner_of(model_of(GIVEN(generate=generate)), Journal())
    one, other = (job_of(generation_pb2.GenerateRequest()) for _ in range(2))
    for job in (one, one, other):
        await runner._attempt(job)
    assert known == [False, True, False]


def worker(**said: str) -> WorkerRecord:
    return WorkerRecord("decode-0", "decode", Ready.READY, 1, "a", "h:1", **said)


def stored(*computes_with: str) -> ResumeState:
    """A token of each completion, as these workers gave it."""
    deltas = [
        generation_pb2.Delta(choice=choice, token_ids=[1], computes_with=by) for choice, by in enumerate(computes_with)
    ]
    return ResumeState(generation_pb2.GenerateResponse(delta=delta) for delta in deltas)


@pytest.mark.parametrize(
    ("tokens_of", "workers", "goes"),
    [
        ((), "X", True),  # nothing is stored: on any
        (("X",), "XY", True),
        (("X",), "Y", False),
        (("X", "Y"), "XY", True),
        (("X", "Y"), "X", False),
    ],
)
def test_a_job_goes_on_with_workers_that_give_its_tokens(tokens_of: tuple[str, ...], workers: str, goes: bool) -> None:
    """Each completion with its own, and one that has ended with none."""
    known = [worker(computes_with=computes) for computes in workers]
    now = stored(*tokens_of)
    assert goes_on(now, known) is goes
    now.ended.update(range(len(tokens_of)))
    assert goes_on(now, known)


def members(journal: Journal) -> dict[str, Any]:
    return {name: getattr(journal, name) for name in ("pages", "append", "end")}


async def test_a_backlog_of_one_model_does_not_keep_the_jobs_of_another_from_being_claimed() -> None:
    """All slots of a are taken, and none of b, whose jobs may not have been seen here yet. With those of b taken as
    well, none is claimed."""
    models: Any = [GIVEN(key="a"), GIVEN(key="b")]
    runner = JobRunner(models, RateLimits(None), GIVEN())
    runner._running = dict.fromkeys(map(str, range(MAX_RUNNING)))  # type: ignore[arg-type]
    for model, takes in (("a", True), ("b", False)):
        for number in range(MAX_RUNNING):
            await runner._slots[model].take(str(number))
        assert runner._takes_more() is takes


@pytest.mark.parametrize("apart", [True, False])
async def test_running_jobs_of_one_model_leave_another_its_slots(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many jobs of a as there are slots run without an end; one of b runs beside them. The control: where both
    have the same slots it waits."""
    held, seen = asyncio.Event(), list[str]()

    async def attempt(runner: JobRunner, job: _Running) -> None:
        seen.append(job.kept.request.model)
        if job.kept.request.model == "a":
            await held.wait()

    monkeypatch.setattr(JobRunner, "_attempt", attempt)
    runner = JobRunner(GIVEN(key_of=lambda name: name if apart else "all"), RateLimits(None), GIVEN())
    for number, model in enumerate([*"a" * MAX_RUNNING, "b"]):
        request = generation_pb2.GenerateRequest(model=model)
        kept = jobs_pb2.KeptJob(request=request, tenant=str(number))
        runner.run_here(GIVEN(job_id=str(number), generation=1, request=kept.SerializeToString()))
    for _ in range(20):
        await asyncio.sleep(0)
    assert seen.count("a") == MAX_RUNNING
    assert ("b" in seen) is apart
    held.set()
    await asyncio.wait({task for _, task in runner._running.values()}, timeout=30)
    assert seen.count("b") == 1
