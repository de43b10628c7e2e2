"""A job's tokens are stored: if its client or its router is lost, it is still one answer, with no token lost or
repeated."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic, time
from typing import Any

import pytest

from cluster.state import job_journal, job_scripts
from cluster.state.job_journal import Asked, JobJournal, Kept
from loadtest.harness.random_checkpoints import make_adapter
from services import launch
from services.decode.servicer import DecodeServicer
from services.router.execution import output_queue
from services.router.frontend import job_runner, jobs_service
from tandem.async_client import AsyncClient
from tandem.errors import (
    Busy,
    Cancelled,
    InternalError,
    InvalidRequest,
    NotFound,
    PreconditionFailed,
    Unavailable,
)
from tandem.rpc import unary_calls
from tandem.rpc.stream_reader import completion
from tandem.tasks import end
from tandem.v1 import generation_pb2, jobs_pb2, jobs_pb2_grpc
from tests.support import oracle
from tests.support.calls import forced_call, with_template
from tests.support.faults import slow_down
from tests.support.waiting import until

NEW = 48
# Of routers that start later; they look for jobs three times in it. The first one has the product's own, so that a busy
# machine does not let it lapse before the router is lost.
NEXT_LEASE_S = 3.0


async def read(client: AsyncClient, job_id: str, from_token: int = 0) -> list[int]:
    return [token async for piece in client.watch(job_id, from_token=from_token) for token in piece.token_ids]


async def ended(client: AsyncClient, job_id: str) -> Any:
    async with asyncio.timeout(60):
        while True:
            if (job := await client.job(job_id)).state != "open":
                return job
            await asyncio.sleep(0.02)


async def crash(router: Any) -> None:
    """Its process is gone: nothing is renewed or kept any more, and its leases have ended with time."""
    await end(router.job_runner._keeping)
    running = dict(router.job_runner._running)
    for _, task in running.values():
        await end(task)
    await router.journal.release([(job_id, generation) for job_id, (generation, _) in running.items()])


def held(router: Any, when: Callable[[list[list[int]]], bool], choices: int = 1) -> None:
    """The router stores nothing more of its job once what was stored fulfils `when`: the job is then open, however fast
    it is and however late its watchers are."""
    kept: list[list[int]] = [[] for _ in range(choices)]
    job_journal = router.journal
    append, end_it = job_journal.append, job_journal.end

    async def or_wait(call: Any, *given: Any, **more: Any) -> Any:
        if when(kept):
            await asyncio.Event().wait()
        return await call(*given, **more)

    async def keep(job_id: str, generation: int, first: int, end_at: int, event: bytes, choice: int = 0) -> Any:
        found = await or_wait(append, job_id, generation, first, end_at, event, choice)
        kept[choice] += generation_pb2.GenerateResponse.FromString(event).delta.token_ids
        return found

    job_journal.append, job_journal.end = keep, lambda *given, **more: or_wait(end_it, *given, **more)


async def test_a_job_is_what_generate_gives(inside: Any, tiny: Path) -> None:
    """A job has the tokens of generate, also for a second watcher that comes when it is over, and for one that only
    waits for the end."""
    prompt = oracle.prompts(tiny, [30])[0]
    async with inside() as cluster:
        job = await cluster.client.submit(prompt, max_tokens=NEW, ignore_eos=True)
        assert job.state == "open"
        expected = oracle.greedy(tiny, prompt, NEW)
        assert await read(cluster.client, job.job_id) == expected
        assert await read(cluster.client, job.job_id) == expected
        tail = await read(cluster.client, job.job_id, from_token=40)
        assert 8 <= len(tail) < NEW
        assert expected[-len(tail) :] == tail
        pieces = [piece async for piece in cluster.client.watch(job.job_id)]
        assert pieces[-1].receipt.completion_tokens == NEW
        done = await cluster.client.job(job.job_id)
        assert (done.state, done.tokens, done.takeovers) == ("finished", NEW, 0)
        await cluster.freed()


async def test_the_same_id_twice_is_one_job(inside: Any, tiny: Path) -> None:
    """A client that got no answer may send again; another request under the same id is refused."""
    prompt, other = oracle.prompts(tiny, [30, 40])
    async with inside() as cluster:
        options = {"max_tokens": 8, "ignore_eos": True, "temperature": 1.0, "request_id": "mine"}
        first = await cluster.client.submit(prompt, **options)
        tokens = await read(cluster.client, "mine")
        again = await cluster.client.submit(prompt, **options)
        assert (first.job_id, again.job_id, again.state) == ("mine", "mine", "finished")
        assert await read(cluster.client, "mine") == tokens
        with pytest.raises(PreconditionFailed) as refused:
            await cluster.client.submit(other, **options)
        assert refused.value.reason == "JOB_DIFFERS"


async def of_each(pieces: AsyncIterator[Any], into: list[list[int]], until: Any = lambda seen: False) -> None:
    """Collects the tokens of each completion."""
    async for piece in pieces:
        into[piece.choice] += piece.token_ids
        if until(into):
            return


async def taken_over(cluster: Any, submit: Any, choices: int, until: Any, lost: Any = crash) -> list[list[int]]:
    """The tokens of a watcher that begins at the first router, loses it, and continues at the second one."""
    second: Any = await launch.start("router", cluster.settings, "router-1")
    held(cluster.router, until, choices)
    quick = {name: worker.engine.step for name, worker in cluster.workers.items()}
    for worker in cluster.workers.values():
        slow_down(worker)
    async with AsyncClient(second.address) as client:
        job = await submit(cluster.client)
        seen: list[list[int]] = [[] for _ in range(choices)]
        await of_each(cluster.client.watch(job.job_id), seen, until)
        await lost(cluster.router)
        assert (await client.job(job.job_id)).state == "open", "the router must have been lost in the middle"
        for name, step in quick.items():
            cluster.workers[name].engine.step = step
        whole: list[list[int]] = [[] for _ in range(choices)]
        async with asyncio.timeout(20):
            await of_each(client.watch(job.job_id), whole)
        assert all(mine == all_of_it[: len(mine)] for mine, all_of_it in zip(seen, whole, strict=True))
        done = await ended(client, job.job_id)
        assert (done.state, done.tokens, done.takeovers) == ("finished", sum(map(len, whole)), 1)
    await second.stop(0.0)
    return whole


async def test_every_completion_goes_on_at_its_own_last_token(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that had ended stay as they are; the others are what they are without the loss, each with its seed."""
    prompt, n = oracle.prompts(tiny, [30])[0], 4
    ends = {3: 2.5, 4: 2.5}  # end tokens made more likely, so that completions end at different positions
    options: Any = {"max_tokens": 300, "ignore_eos": True, "temperature": 1.0, "seed": 7, "n": n}
    options |= {"stop_token_ids": list(ends), "logit_bias": ends, "min_tokens": 8}
    async with inside() as cluster:
        monkeypatch.setattr(job_runner, "LEASE_S", NEXT_LEASE_S)
        expected: list[list[int]] = [[] for _ in range(n)]
        await of_each(cluster.client.stream(prompt, **options), expected)
        assert len({tuple(tokens) for tokens in expected}) == n, "they must differ, or equality says nothing"
        order = sorted(range(n), key=lambda choice: len(expected[choice]))
        first, last = order[0], order[-1]
        assert len(expected[first]) + 20 < len(expected[last])

        def when(seen: list[list[int]]) -> bool:
            return seen[first] == expected[first] and len(seen[last]) > len(expected[first]) + 8

        assert await taken_over(cluster, lambda client: client.submit(prompt, **options), n, when) == expected
        await cluster.freed()


async def test_a_watcher_of_several_completions_finds_the_next_router(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks again from the completion that is furthest behind, and nobody sees a token twice."""
    prompt = oracle.prompts(tiny, [30])[0]
    options: Any = {"max_tokens": 100, "ignore_eos": True, "temperature": 1.0, "seed": 7, "n": 3}
    async with inside() as cluster:
        monkeypatch.setattr(job_runner, "LEASE_S", NEXT_LEASE_S)
        expected: list[list[int]] = [[], [], []]
        await of_each(cluster.client.stream(prompt, **options), expected)
        held(cluster.router, lambda now: min(map(len, now)) >= 5, choices=3)
        job = await cluster.client.submit(prompt, **options)
        watching = cluster.client.watch(job.job_id)
        seen: list[list[int]] = [[], [], []]
        await of_each(watching, seen, lambda now: min(map(len, now)) >= 5)
        address = cluster.router.address
        await cluster.router.stop(0.0)
        second: Any = await launch.start(
            "router", cluster.settings.model_copy(update={"port": int(address.rpartition(":")[2])}), "router-1"
        )
        async with asyncio.timeout(30):
            await of_each(watching, seen)
        assert seen == expected
        await second.stop(0.0)


async def test_a_job_whose_last_token_was_kept_ends_at_the_next_router(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nothing is left to compute; its receipt says that the account of it is lost."""
    prompt = oracle.prompts(tiny, [30])[0]
    async with inside() as cluster:
        monkeypatch.setattr(job_runner, "LEASE_S", NEXT_LEASE_S)
        reached = asyncio.Event()

        async def never(*_: Any, **__: Any) -> Any:
            reached.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(cluster.router.journal, "end", never)
        second: Any = await launch.start("router", cluster.settings, "router-1")
        async with AsyncClient(second.address) as client, asyncio.timeout(20):
            job = await cluster.client.submit(prompt, max_tokens=NEW, ignore_eos=True)
            await reached.wait()
            await crash(cluster.router)
            pieces = [piece async for piece in client.watch(job.job_id)]
            assert await client.receipts() == [], "it says nothing of how long anything took"
        assert [token for piece in pieces for token in piece.token_ids] == oracle.greedy(tiny, prompt, NEW)
        receipt = pieces[-1].receipt
        assert (receipt.completion_tokens, receipt.attempts) == (NEW, 0)
        assert "lost after the last token" in receipt.notes[-1]
        await second.stop(0.0)


async def test_a_job_that_must_call_a_tool_goes_on_with_its_call(
    inside: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept is the prompt as token ids and the grammar that was made of its tools."""
    request = forced_call(max_tokens=100, seed=3)
    async with inside(model=str(with_template(tmp_path))) as cluster:
        monkeypatch.setattr(job_runner, "LEASE_S", NEXT_LEASE_S)
        expected: list[list[int]] = [[]]
        await of_each(cluster.client._pieces(request, None), expected)

        async def submit(client: AsyncClient) -> Any:
            return (await client._ask(unary_calls.submit([request])))[0]

        assert await taken_over(cluster, submit, 1, lambda seen: len(seen[0]) >= 8) == expected


@pytest.mark.parametrize("tokens", [6, 20, 45])
async def test_a_call_that_a_job_began_at_a_lost_router_is_one_call(
    inside: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """Within its marker, within its name, and within its arguments. Whoever reads the job finds each part once."""
    request = forced_call(max_tokens=100, seed=3)
    request.request_id = "call"
    async with inside(model=str(with_template(tmp_path))) as cluster:
        monkeypatch.setattr(job_runner, "LEASE_S", NEXT_LEASE_S)
        whole = completion([piece async for piece in cluster.client._pieces(request, None)])
        assert len(whole.token_ids) > tokens

        async def submit(client: AsyncClient) -> Any:
            return (await client._ask(unary_calls.submit([request])))[0]

        await taken_over(cluster, submit, 1, lambda seen: len(seen[0]) >= tokens)
        kept = completion([piece async for piece in cluster.client.watch("call")])
        assert (kept.token_ids, kept.text, kept.reasoning) == (whole.token_ids, whole.text, "")
        assert [(call.name, call.arguments) for call in kept.calls] == [("note", whole.calls[0].arguments)]
        assert json.loads(whole.calls[0].arguments)["text"]


# ---- adapters


@pytest.fixture
def adapters(tiny: Path, tmp_path: Path) -> dict[str, Path]:
    """`red` is the adapter that the workers serve; `other` may replace it."""
    return {name: make_adapter(tmp_path / name, tiny, seed=seed) for seed, name in enumerate(("red", "other"))}


async def test_a_job_with_an_adapter_goes_on_with_it(
    inside: Any, tiny: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token for token, and they are not the base model's."""
    prompt = oracle.prompts(tiny, [30])[0]
    options: Any = {"max_tokens": 80, "ignore_eos": True, "adapter": "red"}
    async with inside(adapters={"red": str(adapters["red"])}) as cluster:
        monkeypatch.setattr(job_runner, "LEASE_S", NEXT_LEASE_S)
        expected = [(await cluster.client.generate(prompt, **options)).token_ids]
        assert expected[0][:NEW] != oracle.greedy(tiny, prompt, NEW)
        submit = lambda client: client.submit(prompt, **options)  # noqa: E731
        assert await taken_over(cluster, submit, 1, lambda seen: len(seen[0]) >= 8) == expected


async def replaced(cluster: Any, adapters: dict[str, Path], prompt: list[int]) -> tuple[Any, Any]:
    """A job that began with an adapter whose name has another content now, and the router that takes it over."""
    second: Any = await launch.start("router", cluster.settings, "router-1")
    held(cluster.router, lambda now: len(now[0]) >= 8)
    slow_down(cluster.workers["decode-0"], 0.05)  # it is replaced below
    await end(second.job_runner._keeping)  # it takes nothing over before the adapter is replaced
    job = await cluster.client.submit(prompt, max_tokens=80, ignore_eos=True, adapter="red")
    seen: list[list[int]] = [[]]
    await of_each(cluster.client.watch(job.job_id), seen, lambda now: len(now[0]) >= 8)
    await crash(cluster.router)
    for name in ("prefill-0", "decode-0"):
        await cluster.workers.pop(name).stop(0.0)
    shutil.rmtree(adapters["red"])
    adapters["other"].rename(adapters["red"])
    for name in ("prefill-0", "decode-0"):
        await cluster.start_worker(name)
    await second.job_runner.start()
    return job, second


async def test_a_job_does_not_go_on_with_another_adapter_of_the_same_name(
    inside: Any, tiny: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for its own, for as long as it has, and what was kept stays as it was."""
    prompt = oracle.prompts(tiny, [30])[0]
    check, refused = DecodeServicer._check_adapter, asyncio.Event()

    def seen_by_us(self: Any, request: Any) -> None:
        try:
            check(self, request)
        except Unavailable as error:
            if error.reason == "OTHER_ADAPTER":
                refused.set()
            raise

    monkeypatch.setattr(DecodeServicer, "_check_adapter", seen_by_us)
    async with inside(adapters={"red": str(adapters["red"])}) as cluster:
        monkeypatch.setattr(job_runner, "LEASE_S", NEXT_LEASE_S)
        kept = (await cluster.client.generate(prompt, max_tokens=80, ignore_eos=True, adapter="red")).token_ids
        job, second = await replaced(cluster, adapters, prompt)
        async with AsyncClient(second.address) as client:
            async with asyncio.timeout(30):
                await refused.wait()
            assert (await client.job(job.job_id)).state == "open"
            done = await client.cancel(job.job_id)
            seen: list[list[int]] = [[]]
            with pytest.raises(Cancelled):
                await of_each(client.watch(job.job_id), seen)
        assert 8 <= len(seen[0]) == done.tokens < 80
        assert seen[0] == kept[: done.tokens]
        await second.stop(0.0)


async def test_control_without_its_fingerprint_two_adapters_make_one_answer(
    inside: Any, tiny: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the refusal above is the kept fingerprint's doing."""
    prompt = oracle.prompts(tiny, [30])[0]

    class Forgetful(job_runner.ResumeState):
        def add(self, events: Any) -> None:
            super().add(events)
            self.adapter_fingerprint = b""

    monkeypatch.setattr(job_runner, "ResumeState", Forgetful)
    async with inside(adapters={"red": str(adapters["red"])}) as cluster:
        monkeypatch.setattr(job_runner, "LEASE_S", NEXT_LEASE_S)
        expected = (await cluster.client.generate(prompt, max_tokens=80, ignore_eos=True, adapter="red")).token_ids
        job, second = await replaced(cluster, adapters, prompt)
        async with AsyncClient(second.address) as client, asyncio.timeout(20):
            whole: list[list[int]] = [[]]
            await of_each(client.watch(job.job_id), whole)
        assert len(whole[0]) == 80
        assert whole[0] != expected
        await second.stop(0.0)


@pytest.mark.parametrize("how", ["stopped", "crashed"])
async def test_another_router_goes_on_at_the_last_token(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Sampled, with penalties: the same tokens as without the loss, and the watcher of the lost router finds the other
    one by itself."""
    prompt = oracle.prompts(tiny, [30])[0]
    options = {"max_tokens": 400, "ignore_eos": True, "temperature": 1.0, "seed": 5, "frequency_penalty": 0.3}
    async with inside() as cluster:
        monkeypatch.setattr(job_runner, "LEASE_S", NEXT_LEASE_S)
        expected = (await cluster.client.generate(prompt, **options)).token_ids
        second: Any = await launch.start("router", cluster.settings, "router-1")
        held(cluster.router, lambda now: len(now[0]) >= 20)
        quick = slow_down(cluster.workers["decode-0"])  # the other router has not ended the job when it is looked at
        async with AsyncClient(second.address) as client:
            job = await cluster.client.submit(prompt, **options)
            seen: list[int] = []
            async for piece in cluster.client.watch(job.job_id):
                seen += piece.token_ids
                if len(seen) >= 20:
                    break
            await (crash(cluster.router) if how == "crashed" else cluster.router.jobs.leave())
            kept = (await client.job(job.job_id)).tokens
            assert 20 <= kept < 400
            quick()
            async with asyncio.timeout(20):
                assert seen + (await read(client, job.job_id, from_token=len(seen))) == expected
            done = await ended(client, job.job_id)
            assert (done.state, done.takeovers) == ("finished", 1)
        await second.stop(0.0)
        await cluster.freed()


async def test_workers_with_another_checkpoint_do_not_go_on_with_a_job(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would give other tokens: when no worker has had its own for a while, the job fails and says so, and what was
    kept stays as it was."""
    monkeypatch.setattr(job_runner, "MAX_HOMELESS_S", 0.3)
    prompt = oracle.prompts(tiny, [30])[0]
    async with inside() as cluster:
        monkeypatch.setattr(job_runner, "LEASE_S", NEXT_LEASE_S)
        second: Any = await launch.start("router", cluster.settings, "router-1")
        served = second.models.first.served
        others = [replace(one, computes_with="another") for one in served.decode_workers()]
        monkeypatch.setattr(served, "decode_workers", lambda: others)
        async with AsyncClient(second.address) as client:
            held(cluster.router, lambda now: len(now[0]) >= 1)
            job = await cluster.client.submit(prompt, max_tokens=400, ignore_eos=True)
            async for _ in cluster.client.watch(job.job_id):
                break
            await crash(cluster.router)
            kept = (await client.job(job.job_id)).tokens
            done = await ended(client, job.job_id)
            assert (done.state, done.tokens) == ("failed", kept)
            with pytest.raises(PreconditionFailed) as failed:
                await read(client, job.job_id)
            assert failed.value.reason == "JOB_OF_OTHER_MODEL"
        await second.stop(0.0)


async def test_a_cancelled_job_ends_and_holds_nothing(inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its watchers get the cancellation."""
    monkeypatch.setattr(job_runner, "LEASE_S", 0.6)
    prompt = oracle.prompts(tiny, [30])[0]
    async with inside() as cluster:
        job = await cluster.client.submit(prompt, max_tokens=900, ignore_eos=True)
        watching = asyncio.create_task(read(cluster.client, job.job_id))
        await cluster.client.cancel(job.job_id)
        with pytest.raises(Cancelled):
            async with asyncio.timeout(10):
                await watching
        assert (await ended(cluster.client, job.job_id)).state == "cancelled"
        await cluster.freed()


async def test_a_job_that_cannot_be_is_refused(inside: Any, tiny: Path) -> None:
    """An invalid job is refused before it is stored if that is known then; of one call all jobs are accepted or
    none."""
    prompt = oracle.prompts(tiny, [30])[0]
    async with inside() as cluster:
        with pytest.raises(InvalidRequest) as refused:
            await cluster.client.submit_many([prompt, [10**6]], max_tokens=4)
        assert "token_ids" in refused.value.field
        with pytest.raises(InvalidRequest):
            await cluster.client.submit_many([prompt] * 129, max_tokens=4)
        with pytest.raises(NotFound) as unknown:
            await cluster.client.submit(prompt, adapter="nobody's")
        assert unknown.value.field == "adapter"
        taken = await cluster.client.submit_many([prompt] * 3, max_tokens=4, ignore_eos=True)
        assert len({job.job_id for job in taken}) == 3
        for job in taken:
            assert await read(cluster.client, job.job_id) == oracle.greedy(tiny, prompt, 4)
        with pytest.raises(NotFound):
            await cluster.client.job("nobody's")


async def test_jobs_are_bounded_and_forgotten(inside: Any, tiny: Path) -> None:
    """The number of open jobs is bounded, and ended ones expire."""
    prompt = oracle.prompts(tiny, [30])[0]
    async with inside(max_jobs=1, job_kept_s=0.3) as cluster:
        job = await cluster.client.submit(prompt, max_tokens=900, ignore_eos=True)
        with pytest.raises(Busy) as full:
            await cluster.client.submit(prompt, max_tokens=4)
        assert full.value.reason == "JOBS_FULL"
        await cluster.client.cancel(job.job_id)
        async with asyncio.timeout(10):
            while True:
                try:
                    await cluster.client.job(job.job_id)
                except NotFound:
                    break
                await asyncio.sleep(0.05)
        await cluster.client.submit(prompt, max_tokens=4)


async def test_a_tenant_sees_its_own_jobs_only(inside: Any, tiny: Path, tmp_path: Path) -> None:
    """Another tenant's id is unknown, and free to be used."""
    file, keys = tmp_path / "keys", ["anna-key-0123456789", "ben-key-01234567890"]
    file.write_text(f"anna {keys[0]}\nben {keys[1]}\n")
    prompts = oracle.prompts(tiny, [30, 40])
    async with inside(api_keys=file) as cluster:
        anna, ben = (AsyncClient(cluster.router.address, api_key=key) for key in keys)
        async with anna, ben:
            await anna.submit(prompts[0], max_tokens=4, ignore_eos=True, request_id="x")
            for ask in (ben.job, ben.cancel, lambda name: read(ben, name)):
                with pytest.raises(NotFound):
                    await ask("x")
            await ben.submit(prompts[1], max_tokens=4, ignore_eos=True, request_id="x")
            for client, prompt in ((anna, prompts[0]), (ben, prompts[1])):
                assert await read(client, "x") == oracle.greedy(tiny, prompt, 4)


async def test_a_leaving_router_gives_its_jobs_back(inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another router has them long before the leases would have expired."""
    monkeypatch.setattr(job_runner, "LEASE_S", 60.0)
    prompt = oracle.prompts(tiny, [30])[0]
    async with inside() as cluster:
        taken = [await cluster.client.submit(prompt, max_tokens=900, ignore_eos=True) for _ in range(3)]
        await cluster.router.jobs.leave()
        other = JobJournal(
            cluster.settings.redis, cluster.settings.cluster, lease_s=6.0, kept_s=60.0, most=100, most_bytes=1 << 26
        )
        async with asyncio.timeout(20):  # a third of the lease
            claimed = [await other.claim() for _ in taken]
        assert {record.job_id for record in claimed if record} == {f"/{job.job_id}" for job in taken}
        for record in claimed:
            await other.end(record.job_id, record.generation, job_journal.JobState.CANCELLED)
        await other.close()


@pytest.mark.parametrize("told_by", ["append", "renew"])
async def test_a_router_that_lost_a_job_generates_no_more(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch, told_by: str
) -> None:
    """Another router owns the job now; the former owner notices at the next token or the next renewal, and frees
    everything of the job."""
    monkeypatch.setattr(job_runner, "LEASE_S", 0.6 if told_by == "renew" else 60.0)
    prompt = oracle.prompts(tiny, [30])[0]
    async with inside() as cluster:
        kept, append = cluster.router.journal, cluster.router.journal.append
        begun, lost, answers = asyncio.Event(), asyncio.Event(), []

        async def slow(*given: Any) -> Any:
            begun.set()
            await (asyncio.Event() if told_by == "renew" else lost).wait()
            answers.append(await append(*given))
            return answers[-1]

        monkeypatch.setattr(kept, "append", slow)
        job = await cluster.client.submit(prompt, max_tokens=900, ignore_eos=True)
        await begun.wait()
        async with kept._writes.client.pipeline(transaction=True) as taken:  # and has a lease: no router claims it
            taken.hset(kept._job(f"/{job.job_id}"), "generation", 7)
            taken.zadd(kept._open[0], {f"/{job.job_id}": (time() + 600) * 1000})
            await taken.execute()
        lost.set()
        await until(lambda: not cluster.router.job_runner._running)
        await cluster.freed()
        assert answers.count(Kept.LOST) == (told_by == "append")
        await kept.end(f"/{job.job_id}", 7, job_journal.JobState.CANCELLED)


async def test_a_watch_from_the_border_of_a_piece_sends_no_token_again(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the client's own filter, the messages contain no part that ends where the watch begins."""
    monkeypatch.setattr(output_queue, "MAX_MERGED_TOKENS", 0)
    prompt = oracle.prompts(tiny, [30])[0]
    async with inside(stream_interval_s=0.0) as cluster:
        job = await cluster.client.submit(prompt, max_tokens=NEW, ignore_eos=True)
        await read(cluster.client, job.job_id)
        stub = jobs_pb2_grpc.JobServiceStub(cluster.client._channel)

        async def deltas(from_token: int) -> list[Any]:
            request = jobs_pb2.WatchJobRequest(job_id=job.job_id, from_token=from_token)
            return [one.event.delta async for one in stub.WatchJob(request) if one.event.HasField("delta")]

        whole = await deltas(0)
        assert len(whole) > 2
        for place in range(1, len(whole)):
            assert await deltas(whole[place].index) == whole[place:]


@pytest.mark.parametrize("paced", [True, False], ids=["paced", "control"])
async def test_watchers_of_a_tenant_get_a_bounded_number_of_messages(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch, paced: bool
) -> None:
    """Tokens that arrive meanwhile are in the next message, each token once and in order. In the control, without the
    rate, there are more messages."""
    per_s = 5.0
    monkeypatch.setattr(jobs_service, "WATCH_MESSAGES_PER_S", per_s if paced else 1e6)
    prompt = oracle.prompts(tiny, [30])[0]
    async with inside() as cluster:
        slow_down(cluster.workers["decode-0"], 0.005)
        job = await cluster.client.submit(prompt, max_tokens=200, ignore_eos=True)
        began = monotonic()
        pieces = [piece.token_ids async for piece in cluster.client.watch(job.job_id) if piece.token_ids]
        allowed = 1 + per_s * (monotonic() - began + jobs_service.WATCH_BURST_S)  # more where the machine is busy
        assert [token for ids in pieces for token in ids] == oracle.greedy(tiny, prompt, 200)
        assert len(pieces) > 1
        assert (len(pieces) <= allowed) is paced


async def test_128_jobs_and_a_watcher_of_each(inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Watchers that wait do not delay submissions, stored tokens and renewed leases."""
    prompt = oracle.prompts(tiny, [20])[0]
    async with inside() as cluster:
        runner, begin = cluster.router.job_runner, asyncio.Event()
        attempt = runner._attempt

        async def later(*given: Any) -> None:
            await begin.wait()
            await attempt(*given)

        monkeypatch.setattr(runner, "_attempt", later)
        taken = await cluster.client.submit_many([prompt] * 128, max_tokens=8, ignore_eos=True)
        reading = [asyncio.create_task(read(cluster.client, job.job_id)) for job in taken]
        await until(lambda: cluster.router.jobs._watchers.total() == 128)
        another = await cluster.client.submit(prompt, max_tokens=8, ignore_eos=True)
        begin.set()
        async with asyncio.timeout(60):
            found = await asyncio.gather(*reading, read(cluster.client, another.job_id))
        assert found == [oracle.greedy(tiny, prompt, 8)] * 129
        assert [(await cluster.client.job(job.job_id)).takeovers for job in taken] == [0] * 128


async def test_watchers_of_a_tenant_are_bounded(inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is refused with a retry delay, and accepted when another one leaves."""
    monkeypatch.setattr(jobs_service, "MAX_WATCHERS", 1)
    prompt = oracle.prompts(tiny, [30])[0]
    async with inside() as cluster:
        slow_down(cluster.workers["decode-0"])  # so that the job outlasts the refusal
        job = await cluster.client.submit(prompt, max_tokens=150, ignore_eos=True)
        watching = cluster.client.watch(job.job_id)
        await anext(watching)
        with pytest.raises(Busy) as full:
            await read(cluster.client, job.job_id)
        assert full.value.reason == "TENANT_WATCHERS"
        await watching.aclose()
        await until(lambda: not cluster.router.jobs._watchers)
        async with asyncio.timeout(20):
            assert len(await read(cluster.client, job.job_id)) == 150


# ---- jobs and the tokens of their tenant


async def test_jobs_keep_to_their_tenants_tokens(
    inside: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16,000 tokens of jobs under a limit of 2,000 a minute: they get their part of it, a request of the same tenant is
    served meanwhile, and so are the jobs of another one. They go on as tokens come back."""
    monkeypatch.setattr(job_runner, "MAX_RETRY_S", 1.0)
    file, keys = tmp_path / "keys", ["anna-key-0123456789", "ben-key-01234567890"]
    file.write_text(f"anna {keys[0]} tokens_per_minute=2000\nben {keys[1]}\n")
    prompt = oracle.prompts(tiny, [100])[0]
    async with inside(api_keys=file, kv_blocks=1024) as cluster:
        anna, ben = (AsyncClient(cluster.router.address, api_key=key) for key in keys)
        async with anna, ben, asyncio.timeout(60):
            taken = await anna.submit_many([prompt] * 20, max_tokens=700, ignore_eos=True)

            async def made() -> int:
                return sum([(await anna.job(job.job_id)).tokens for job in taken])

            generation = cluster.router.models.first.generation
            await until(lambda: cluster.router.ended.outcomes["cancelled"] and not generation.running)  # all wait
            now = await made()
            assert 200 <= now <= 1000 + 4 * 250
            assert len(await read(ben, (await ben.submit(prompt, max_tokens=50, ignore_eos=True)).job_id)) == 50
            answer = await anna.generate(prompt, max_tokens=100, ignore_eos=True, timeout=10)
            assert len(answer.token_ids) == 100
            cluster.router.rate_limits._tenants["anna"].tokens += 2000  # as after a minute
            while True:
                if await made() > now:
                    break
                await asyncio.sleep(0.05)
            for job in taken:
                await anna.cancel(job.job_id)


async def test_a_job_that_waits_for_tokens_ends_as_it_would_have(
    inside: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is stopped in the middle and continues later, token for token; its tenant's tokens are counted once."""
    monkeypatch.setattr(job_runner, "MIN_RETRY_S", 0.05)
    monkeypatch.setattr(job_runner, "MAX_RETRY_S", 0.05)
    monkeypatch.setattr(output_queue, "MAX_MERGED_TOKENS", 1)  # a late job would take all tokens at once
    file, key = tmp_path / "keys", "anna-key-0123456789"
    file.write_text(f"anna {key} tokens_per_minute=400\n")
    prompt = oracle.prompts(tiny, [30])[0]
    async with inside(api_keys=file) as cluster, AsyncClient(cluster.router.address, api_key=key) as anna:
        job = await anna.submit(prompt, max_tokens=200, ignore_eos=True, temperature=1.0, seed=3)
        whole = asyncio.create_task(read(anna, job.job_id))
        bucket = cluster.router.rate_limits._tenants
        async with asyncio.timeout(30):
            while not whole.done():
                if cluster.router.ended.outcomes["cancelled"]:  # it was stopped
                    bucket["anna"].tokens = max(bucket["anna"].tokens, 260.0)
                await asyncio.sleep(0.02)
            await until(lambda: cluster.router.ended.outcomes["ok"])
            shown = cluster.router._exposition.text().decode().splitlines()
            for kind, tokens in (("prompt", 30), ("completion", 200)):
                counted = [line for line in shown if line.startswith("tandem_tenant_tokens_total{") and kind in line]
                assert [line.rpartition(" ")[2] for line in counted] == [f"{tokens}.0"]
            file.write_text(f"anna {key}\n")
            await until(lambda: not cluster.router.rate_limits.named("anna").limits.tokens_per_minute)
            again = await anna.generate(prompt, max_tokens=200, ignore_eos=True, temperature=1.0, seed=3)
        assert await whole == again.token_ids


# ---- what passes, and what ends a job


async def broken(monkeypatch: pytest.MonkeyPatch, cluster: Any, times: int, reason: str | None = None) -> list[int]:
    """Makes the next attempts end with INTERNAL. Returns a list with one entry for each."""
    generate, seen = cluster.router.models.first.generation.generate, []

    def failing(*given: Any, **more: Any) -> Any:
        if len(seen) < times:
            seen.append(1)
            raise InternalError("broken", reason=reason)
        return generate(*given, **more)

    monkeypatch.setattr(cluster.router.models.first.generation, "generate", failing)
    monkeypatch.setattr(job_runner, "MIN_RETRY_S", 0.05)
    return seen


async def test_a_job_outlives_an_internal_error_that_passes(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is about to die may return INTERNAL once; the third time in a row ends the job."""
    prompt = oracle.prompts(tiny, [30])[0]
    async with inside() as cluster:
        await broken(monkeypatch, cluster, job_runner.MAX_INTERNAL_ERRORS - 1)
        job = await cluster.client.submit(prompt, max_tokens=NEW, ignore_eos=True)
        assert await read(cluster.client, job.job_id) == oracle.greedy(tiny, prompt, NEW)
        seen = await broken(monkeypatch, cluster, 100)
        job = await cluster.client.submit(prompt, max_tokens=NEW, ignore_eos=True)
        assert (await ended(cluster.client, job.job_id)).state == "failed"
        assert len(seen) == job_runner.MAX_INTERNAL_ERRORS


async def test_a_job_that_kills_workers_is_not_tried_again(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is already known as poison."""
    prompt = oracle.prompts(tiny, [30])[0]
    async with inside() as cluster:
        seen = await broken(monkeypatch, cluster, 100, "KILLS_WORKERS")
        job = await cluster.client.submit(prompt, max_tokens=NEW, ignore_eos=True)
        assert (await ended(cluster.client, job.job_id)).state == "failed"
        assert len(seen) == 1


# ---- who no longer owns a job can add nothing


@pytest.fixture
async def owned(valkey_url: str) -> AsyncIterator[tuple[JobJournal, str]]:
    """A job that was taken over: generation 1 was its owner, generation 2 is."""
    kept = JobJournal(valkey_url, "t-fenced", lease_s=0.0, kept_s=60.0, most=10_000, most_bytes=1 << 26)
    name = "/job"
    assert await kept.submit([Asked(name, b"asked", "digest")]) == [True]
    assert await kept.append(name, 1, 0, 2, b"first") is Kept.KEPT
    record = await kept.claim()
    assert record is not None
    assert (record.job_id, record.generation, record.tokens) == (name, 2, 2)
    yield kept, name
    await kept.end(name, 2, job_journal.JobState.FINISHED)
    await kept._writes.client.delete(kept._job(name), kept._events(name))
    await kept.close()


async def test_a_router_that_was_taken_for_dead_adds_nothing(owned: tuple[JobJournal, str]) -> None:
    """It cannot end or keep the job either; the owner adds each token once, at its position."""
    kept, name = owned
    assert await kept.append(name, 1, 2, 4, b"late") is Kept.LOST
    assert await kept.end(name, 1, job_journal.JobState.FINISHED, b"late") is Kept.LOST
    assert await kept.renew([(name, 1)]) == [Kept.LOST]
    assert await kept.append(name, 2, 3, 4, b"gap") is Kept.GAP
    assert await kept.append(name, 2, 0, 2, b"twice") is Kept.GAP
    assert await kept.append(name, 2, 2, 4, b"second") is Kept.KEPT
    assert [entry.event for entry in await kept.entries(name)] == [b"first", b"second"]


async def test_control_without_the_fence_its_tokens_are_there_twice(
    valkey_url: str, monkeypatch: pytest.MonkeyPatch, owned: tuple[JobJournal, str]
) -> None:
    """Control: the scripts cause the refusals above."""
    _, name = owned
    monkeypatch.setattr(
        job_scripts, "APPEND", job_scripts.APPEND.replace("return 'lost'", "").replace("return 'gap'", "")
    )
    open_to_all = JobJournal(valkey_url, "t-fenced", lease_s=0.0, kept_s=60.0, most=10_000, most_bytes=1 << 26)
    assert await open_to_all.append(name, 1, 0, 2, b"twice") is Kept.KEPT
    assert [entry.event for entry in await open_to_all.entries(name)] == [b"first", b"twice"]
    await open_to_all.close()
