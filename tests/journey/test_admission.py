"""Admission: a request is accepted within its tenant's limits, while its first token can be useful, and if it does not
crash workers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import monotonic
from typing import Any

import grpc
import openai
import pytest

from engine.core.scheduler import Scheduler
from services.decode.servicer import DecodeServicer
from services.router.execution import poison_requests
from services.router.routing import request_scheduler
from services.router.routing.request_scheduler import RequestScheduler
from services.worker_liveness import WorkerLiveness
from tandem.async_client import AsyncClient
from tandem.errors import Busy, InternalError, InvalidRequest, StepFailed, Unavailable
from tandem.v1 import decode_pb2
from tests.support import oracle
from tests.support.faults import slow_down

SMALL, LARGE = "small-key-0123456789", "large-key-0123456789"


class AfterAdmitted:
    """The context of a call, which acts when the router has been told that the request is admitted."""

    def __init__(self, context: Any, act: Callable[[], Awaitable[None]]) -> None:
        self._context, self._act = context, act

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, event: decode_pb2.DecodeResponse) -> None:
        await self._context.write(event)
        if event.HasField("admitted"):
            await self._act()


def deadly(monkeypatch: pytest.MonkeyPatch, poison: list[int], *, dies: bool = True) -> list[str]:
    """A decode worker's call with this prompt ends like a crash, once admitted. The worker's record is removed first,
    because a heartbeat in flight would be a sign of life, unless only the connection broke. Returns the workers whose
    calls ended."""
    crashed: list[str] = []
    decode = DecodeServicer.Decode

    async def crash(self: Any, request: Any, context: Any) -> None:
        async def die() -> None:
            crashed.append(self._worker.worker_id)
            if dies:
                await self._worker._heartbeat.stop()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "")

        poisoned = list(request.token_ids[: len(poison)]) == poison
        await decode(self, request, AfterAdmitted(context, die) if poisoned else context)

    monkeypatch.setattr(DecodeServicer, "Decode", crash)
    monkeypatch.setattr(request_scheduler, "SUSPECT_S", 0.05)
    return crashed


async def test_a_request_that_kills_workers_is_stopped_after_three(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began alone at the third worker. It is refused when it is sent again, with any id and seed; all other requests
    are served as before."""
    poison, harmless = oracle.prompts(tiny, [30, 40])
    crashed = deadly(monkeypatch, poison)
    async with inside(decode=4) as cluster:
        with pytest.raises(InternalError) as stopped:
            await cluster.client.generate(poison, max_tokens=8, ignore_eos=True)
        assert stopped.value.reason == "KILLS_WORKERS"
        assert len(crashed) == len(set(crashed)) == 3
        with pytest.raises(InternalError) as refused:
            await cluster.client.generate(poison, max_tokens=8, ignore_eos=True, request_id="again", seed=3)
        assert refused.value.reason == "KILLS_WORKERS"
        assert len(crashed) == 3
        done = await cluster.client.generate(harmless, max_tokens=8, ignore_eos=True)
        assert done.token_ids == oracle.greedy(tiny, harmless, 8)
        await cluster.freed()


async def test_control_without_the_quarantine_it_takes_all_attempts(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: without the quarantine, the request uses all attempts and as many workers."""
    monkeypatch.setattr(poison_requests, "SUSPECT_LOST", 1000)
    poison = oracle.prompts(tiny, [30])[0]
    crashed = deadly(monkeypatch, poison)
    async with inside(decode=4) as cluster:
        with pytest.raises(Unavailable):
            await cluster.client.generate(poison, max_tokens=8, ignore_eos=True)
        assert len(set(crashed)) == cluster.settings.max_attempts


def crowded(monkeypatch: pytest.MonkeyPatch, poison: list[int]) -> tuple[asyncio.Semaphore, asyncio.Event]:
    """When the call with this prompt is admitted, the worker's record is removed, and all its calls end like a crash.
    Each other call releases the semaphore when it is admitted, and continues after the event, or at once if it begins
    alone."""
    admitted_calls, over = asyncio.Semaphore(0), asyncio.Event()
    dead: dict[str, asyncio.Event] = {}
    decode = DecodeServicer.Decode

    async def crash(self: Any, request: Any, context: Any) -> None:
        gone = dead.setdefault(self._worker.worker_id, asyncio.Event())

        async def admitted() -> None:
            if list(request.token_ids[: len(poison)]) == poison:
                await self._worker._heartbeat.stop()
                gone.set()
                await asyncio.Event().wait()
            elif not request.alone:
                admitted_calls.release()
                await over.wait()

        calls = [
            asyncio.ensure_future(decode(self, request, AfterAdmitted(context, admitted))),
            asyncio.ensure_future(gone.wait()),
        ]
        try:
            await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            if gone.is_set():
                await context.abort(grpc.StatusCode.UNAVAILABLE, "")
            await calls[0]
        finally:
            for call in calls:
                call.cancel()

    monkeypatch.setattr(DecodeServicer, "Decode", crash)
    monkeypatch.setattr(request_scheduler, "SUSPECT_S", 0.05)
    return admitted_calls, over


async def beside_poison(inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The answers to four requests with one prompt, which begin at the same time as a poison request on two or three
    workers."""
    poison, harmless = oracle.prompts(tiny, [30, 40])
    admitted, over = crowded(monkeypatch, poison)
    async with inside(decode=4, max_attempts=8) as cluster:
        asked = [
            asyncio.create_task(cluster.client.generate(harmless, max_tokens=8, ignore_eos=True)) for _ in range(4)
        ]
        for _ in asked:
            await admitted.acquire()
        with pytest.raises(InternalError) as stopped:
            await cluster.client.generate(poison, max_tokens=8, ignore_eos=True)
        assert stopped.value.reason == "KILLS_WORKERS"
        over.set()
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert all(
            isinstance(one, InternalError) or one.token_ids == oracle.greedy(tiny, harmless, 8) for one in answers
        )
        return answers


async def test_requests_that_begin_beside_poison_are_served(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same number of workers was lost with them, but they then begin alone, without a crash."""
    answers = await beside_poison(inside, tiny, monkeypatch)
    assert not [one for one in answers if isinstance(one, InternalError)]
    assert any(one.receipt.attempts > 2 for one in answers)


async def test_lost_connections_to_workers_that_live_are_no_reason_to_refuse_a_request(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls end as in a crash, but the workers send heartbeats: all attempts are used, each time that the request
    is sent."""
    unlucky = oracle.prompts(tiny, [30])[0]
    broken = deadly(monkeypatch, unlucky, dies=False)
    async with inside(decode=2) as cluster:
        for _ in range(2):
            with pytest.raises(Unavailable):
                await cluster.client.generate(unlucky, max_tokens=8, ignore_eos=True)
        assert len(broken) == 2 * cluster.settings.max_attempts


async def test_control_if_every_loss_counted_they_would_be(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: the router's view determines what a broken connection means."""
    monkeypatch.setattr(WorkerLiveness, "ended", lambda *_: True)
    unlucky = oracle.prompts(tiny, [30])[0]
    deadly(monkeypatch, unlucky, dies=False)
    async with inside(decode=3) as cluster:
        with pytest.raises(InternalError):
            await cluster.client.generate(unlucky, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize("workers", [2, 1])
async def test_a_request_whose_step_fails_at_two_workers_is_stopped(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """The request is stopped although both workers live. One worker alone is no proof: the request is tried there until
    the attempts are used."""
    poison = oracle.prompts(tiny, [30])[0]
    failed: list[str] = []
    decode = DecodeServicer.Decode

    async def fail(self: Any, request: Any, context: Any) -> None:
        async def fail_step() -> None:
            failed.append(self._worker.worker_id)
            raise StepFailed("the step with this request failed")

        await decode(self, request, AfterAdmitted(context, fail_step))

    monkeypatch.setattr(DecodeServicer, "Decode", fail)
    async with inside(decode=workers) as cluster:
        with pytest.raises(InternalError if workers == 2 else Unavailable):
            await cluster.client.generate(poison, max_tokens=8, ignore_eos=True)
        assert len(failed) == (2 if workers == 2 else cluster.settings.max_attempts)
        assert len(set(failed)) == workers


async def test_a_tenant_has_no_more_than_its_line_says(inside: Any, tmp_path: Path) -> None:
    """Requests in progress and tokens per minute are limited over gRPC and HTTP, with a retry delay; other tenants are
    served."""
    file = tmp_path / "keys"
    file.write_text(f"small {SMALL} requests=1 tokens_per_minute=200\nlarge {LARGE}\n")
    model = str(Path(__file__).parents[2] / "demo/model")
    async with inside(model=model, http_port=0, kv_blocks=1024, api_keys=file) as cluster:
        small = AsyncClient(cluster.router.address, api_key=SMALL)
        large = AsyncClient(cluster.router.address, api_key=LARGE)
        url = f"http://{cluster.router.http.address}/v1"
        async with small, large, openai.AsyncOpenAI(base_url=url, api_key=SMALL, max_retries=0) as http:
            quick = slow_down(cluster.workers["decode-0"], 0.05)  # the stream is not over before the others have come
            stream = small.stream("one", max_tokens=150, ignore_eos=True)
            await anext(stream)
            with pytest.raises(Busy) as refused:
                await small.generate("two", max_tokens=1)
            assert refused.value.reason == "TENANT_REQUESTS"
            assert refused.value.retry_after
            with pytest.raises(openai.RateLimitError) as limited:
                await http.completions.create(model="", prompt="two", max_tokens=1)
            assert int(limited.value.response.headers["retry-after"]) >= 1
            with pytest.raises(openai.RateLimitError) as never:
                await http.completions.create(model="", prompt=["two", "three"], max_tokens=1)
            assert (never.value.code, never.value.response.headers["x-should-retry"]) == ("TOO_LARGE", "false")
            await large.generate("three", max_tokens=2, ignore_eos=True)
            quick()
            async for _ in stream:
                pass
            with pytest.raises(Busy) as spent:
                await small.generate("four " * 60, max_tokens=1)
            assert spent.value.reason == "TENANT_TOKENS"
            await large.generate("four " * 60, max_tokens=1)


async def test_what_no_worker_has_begun_costs_its_tenant_nothing(
    inside: Any, tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that is refused because no worker has room, and is sent again, is charged to the tenant's minute once
    and counted once in its metric."""
    file = tmp_path / "keys"
    file.write_text(f"small {SMALL} tokens_per_minute=100\n")
    prompt = oracle.prompts(tiny, [64])[0]
    async with inside(api_keys=file) as cluster:
        scheduler, placed = cluster.router.models.first.pools.scheduler, RequestScheduler.placed
        refusals = iter(range(5))

        def full(*given: Any, **more: Any) -> Any:
            if next(refusals, None) is not None:
                raise Busy("no room")
            return placed(scheduler, *given, **more)

        monkeypatch.setattr(scheduler, "placed", full)
        async with AsyncClient(cluster.router.address, api_key=SMALL) as small:
            for _ in range(5):
                with pytest.raises(Busy, match="no room"):
                    await small.generate(prompt, max_tokens=4, ignore_eos=True)
            assert len((await small.generate(prompt, max_tokens=4, ignore_eos=True)).token_ids) == 4
            with pytest.raises(Busy) as spent:
                await small.generate(prompt, max_tokens=4)
            assert spent.value.reason == "TENANT_TOKENS"
        shown = cluster.router._exposition.text().decode().splitlines()
        counted = {line for line in shown if line.startswith("tandem_tenant_tokens_total{")}
        assert sorted(line.rpartition(" ")[2] for line in counted) == ["4.0", "64.0"]


async def test_tenants_do_not_share_cached_prefixes(inside: Any, tmp_path: Path, tiny: Path) -> None:
    """The time to first token does not reveal what another tenant has sent. Keys of one tenant share a cache."""
    file, second = tmp_path / "keys", "other-key-0123456789"
    file.write_text(f"small {SMALL}\nlarge {LARGE}\nsmall {second}\n")
    prompt = oracle.prompts(tiny, [64])[0]
    async with inside(api_keys=file) as cluster:
        cached = []
        for key in (SMALL, LARGE, second):
            async with AsyncClient(cluster.router.address, api_key=key) as client:
                done = await client.generate(prompt, max_tokens=2, ignore_eos=True)
                assert done.token_ids == oracle.greedy(tiny, prompt, 2)
                cached.append(done.receipt.cached_tokens)
        assert cached[:2] == [0, 0]
        assert cached[2] > 0


async def test_overload_is_told_at_once_and_what_is_let_in_is_right(inside: Any, tiny: Path) -> None:
    """With far more prompts than can begin in time, the rest is refused with a retry delay, and nothing stays held."""
    prompts = oracle.prompts(tiny, [600] * 40)
    async with inside(max_num_seqs=4, kv_blocks=1024, measured=True) as cluster:
        await cluster.client.generate(prompts[0], max_tokens=1)
        rate = next(iter(cluster.router.models.first.pools.view.of_role("prefill"))).prompt_rate
        # Of 39 prompts some are served and some refused, though the rate may change sixfold beside other tests.
        objective = 6 * 600 / rate
        refused: list[tuple[float, Busy]] = []
        done: dict[int, list[int]] = {}

        async def ask(number: int) -> None:
            began = monotonic()
            try:
                answer = await cluster.client.generate(
                    prompts[number], max_tokens=4, ignore_eos=True, ttft_slo=objective
                )
                done[number] = answer.token_ids
            except Busy as error:
                refused.append((monotonic() - began, error))

        await asyncio.gather(*map(ask, range(1, 40)))
        assert refused
        assert done
        assert {error.reason for _, error in refused} <= {"OVERLOADED", "QUEUE_TIMEOUT"}
        # Not all: while the rate is very low, a prompt that would take longer than its objective without others is
        # told not to come again.
        assert any(error.retry_after for _, error in refused)
        for number, tokens in done.items():
            assert tokens == oracle.greedy(tiny, prompts[number], 4)
        await cluster.freed()


async def test_what_no_priority_or_objective_can_be_is_refused_by_name(inside: Any, tiny: Path) -> None:
    """The error has the bound, and nothing has been reserved."""
    prompt = oracle.prompts(tiny, [10])[0]
    async with inside() as cluster:
        for about, field in (
            ({"priority": 1001}, "priority"),
            ({"priority": -1001}, "priority"),
            ({"ttft_slo": 0.0}, "ttft_slo_seconds"),
            ({"ttft_slo": float("nan")}, "ttft_slo_seconds"),
        ):
            with pytest.raises(InvalidRequest) as refused:
                await cluster.client.generate(prompt, max_tokens=1, **about)
            assert refused.value.field == field
        done = await cluster.client.generate(prompt, max_tokens=1, priority=-1000, ttft_slo=60.0)
        assert len(done.token_ids) == 1


async def test_a_record_counts_blocks_that_preempted_streams_wait_for_as_held(
    inside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New requests cannot reserve these blocks, so no router should try; the count never exceeds the pool."""
    async with inside() as cluster:
        worker = cluster.workers["decode-0"]
        for owed in (0, 7, 10_000):
            monkeypatch.setattr(Scheduler, "owed", owed)
            assert worker.record().blocks_held == min(worker.engine.pool.held + owed, worker.engine.pool.total)


@pytest.mark.parametrize("pool", [{"kv_blocks": 16}, {}], ids=["a small pool", "a low limit"])
@pytest.mark.parametrize(("role", "prompt", "new"), [("decode", 20, 120), ("prefill", 150, 12)])
async def test_what_is_too_large_for_one_worker_is_served_by_another(
    inside: Any, tiny: Path, role: str, prompt: int, new: int, pool: dict[str, int]
) -> None:
    """During an upgrade to a longer context, some workers of a pool take less than a request may need, even where
    their pool of blocks would hold it."""
    tokens = oracle.prompts(tiny, [prompt])[0]
    expected = oracle.greedy(tiny, tokens, new)
    async with inside() as cluster:
        cluster.settings = cluster.settings.model_copy(update={"max_model_len": 128, **pool})
        await cluster.start_worker(f"{role}-1")
        await cluster.seen(3)
        answers = await asyncio.gather(*(cluster.client.generate(tokens, max_tokens=new) for _ in range(4)))
        assert [answer.token_ids for answer in answers] == [expected] * 4
        assert {getattr(answer.receipt, f"{role}_worker") for answer in answers} == {f"{role}-0"}
        assert await cluster.ledgers_balance()
