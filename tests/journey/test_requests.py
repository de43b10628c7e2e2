"""What a client may rely on for each request: ends, deadlines, capacity, receipts, refusals, and reproducible
tokens."""

from __future__ import annotations

import asyncio
import math
import statistics
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.grpc_server import Channels
from services.worker import WorkerServicer
from tandem.errors import Busy, DeadlineExceeded, InvalidRequest, NotFound, TandemError, TooLarge
from tandem.grpc_errors import from_rpc
from tandem.v1 import decode_pb2, decode_pb2_grpc, generation_pb2, worker_pb2
from tests.support import oracle
from tests.support.faults import Harm, hold_until, slow_down, together
from tests.support.muxed import decoded
from tests.support.stopwatch import Stopwatch
from tests.support.waiting import until

NEW = 16


def nothing_held(cluster: Any) -> bool:
    return not any(cluster.held().values())


async def collect(stream: Any, pieces: list[Any]) -> None:
    async for piece in stream:
        pieces.append(piece)


@pytest.mark.parametrize("phase", ["transfer", "decode"])
async def test_a_client_that_disconnects_frees_every_block_on_both_sides_within_a_second(
    inside: Any, tiny: Path, phase: str
) -> None:
    """Sixteen streams are cut while their KV moves, or while they generate: nothing is held a second later."""
    go = asyncio.Event()
    if phase == "decode":
        go.set()
    wrap = lambda inner, who: Harm(inner, before=hold_until(go)) if who.startswith("decode") else inner  # noqa: E731
    async with inside(wrap=wrap, kv_blocks=1024) as cluster:
        slow_down(cluster.workers["decode-0"])  # none is over before the last has begun
        pieces: list[list[Any]] = [[] for _ in range(16)]
        streams = [
            asyncio.create_task(collect(cluster.client.stream(prompt, max_tokens=400, ignore_eos=True), pieces[i]))
            for i, prompt in enumerate(oracle.prompts(tiny, [40] * 16))
        ]
        wanted = 1 if phase == "transfer" else 3
        await until(lambda: all(len(p) >= wanted for p in pieces), 120, lambda: [len(p) for p in pieces])
        assert cluster.held()["decode-0"] > 0
        if phase == "transfer":
            assert cluster.held()["prefill-0"] > 0
        for stream in streams:
            stream.cancel()
        await until(lambda: nothing_held(cluster), 1.0, cluster.held)
        assert await cluster.ledgers_balance()


async def test_a_deadline_ends_the_request_everywhere(inside: Any, tiny: Path) -> None:
    """The client gets DEADLINE_EXCEEDED, and every block is free on both sides within a second."""
    go = asyncio.Event()
    wrap = lambda inner, who: Harm(inner, before=hold_until(go)) if who.startswith("decode") else inner  # noqa: E731
    async with inside(wrap=wrap) as cluster:
        await cluster.client.model_info()  # connecting is not part of a request's time
        watch = Stopwatch()
        with pytest.raises(DeadlineExceeded):
            await cluster.client.generate(oracle.prompts(tiny, [40])[0], max_tokens=50, ignore_eos=True, timeout=0.4)
        assert watch.within(0.4 + 0.6), watch.seconds
        await until(lambda: nothing_held(cluster), 1.0, cluster.held)


async def test_the_receipts_phases_add_up_to_the_time_to_first_token(inside: Any, tiny: Path) -> None:
    """Their sum equals the router's TTFT exactly, and the client's within 5 ms or 5 % in the median, because client and
    server share this process and its cores."""
    beyond: list[float] = []
    async with inside() as cluster:
        await cluster.client.model_info()  # connecting is not part of a request's time
        prompts = oracle.prompts(tiny, [3, 40, 200, 200, 3, 40, 200])
        while not beyond or (statistics.median(beyond[-len(prompts) :]) > 0 and len(beyond) < 5 * len(prompts)):
            for prompt in prompts:  # once more where others used the machine
                receipt = (await cluster.client.generate(prompt, max_tokens=4, ignore_eos=True)).receipt
                assert math.isclose(sum(receipt.phases.values()), receipt.ttft, abs_tol=1e-6)
                assert all(seconds >= -1e-4 for seconds in receipt.phases.values()), receipt.phases
                gap = abs(sum(receipt.phases.values()) - receipt.client_ttft)
                beyond.append(gap - max(0.005, 0.05 * receipt.client_ttft))
                assert receipt.total >= receipt.ttft
    assert statistics.median(beyond[-len(prompts) :]) <= 0


async def test_without_a_prefill_worker_the_decode_worker_prefills_and_the_receipt_says_so(
    inside: Any, tiny: Path
) -> None:
    """The tokens are the same, the path is local, and the receipt has the reason."""
    prompt = oracle.prompts(tiny, [150])[0]
    async with inside(prefill=0) as cluster:
        done = await cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True)
        assert done.token_ids == oracle.greedy(tiny, prompt, NEW)
        assert done.receipt.path == "local"
        assert done.receipt.prefill_worker == ""
        assert done.receipt.transfer is None
        assert "there is no prefill worker" in done.receipt.notes[0]
        phases = done.receipt.phases
        assert math.isclose(sum(phases.values()), done.receipt.ttft, abs_tol=1e-6)
        assert all(0 <= seconds <= done.receipt.ttft for seconds in phases.values()), phases
        again = await cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True)
        assert again.token_ids == done.token_ids
        counted = cluster.workers["decode-0"].metrics._local._value.get()
        assert counted == again.receipt.cached_tokens >= 144, "what was cached here is counted as such"


async def test_only_a_request_that_must_begin_alone_waits_until_that_is_sent(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait is a minute here. In the control, a request that begins alone does wait."""
    monkeypatch.setattr("services.decode.servicer.SENT_S", 60.0)
    prompt = oracle.prompts(tiny, [20])[0]
    async with inside(prefill=0) as cluster:
        await asyncio.wait_for(cluster.client.generate(prompt, max_tokens=2, ignore_eos=True), 30)

        async def suspected(*_: Any) -> bool:
            return True

        monkeypatch.setattr("services.router.execution.poison_check.PoisonCheck.settle", suspected)
        with pytest.raises(DeadlineExceeded):
            await cluster.client.generate(prompt, max_tokens=2, ignore_eos=True, timeout=1)


async def test_a_queue_at_the_prefill_worker_spills_to_the_decode_worker(inside: Any, tiny: Path) -> None:
    """A burst of long prompts uses both workers, each receipt has the reason, and the tokens are right."""
    prompts = oracle.prompts(tiny, [180] * 8)
    async with inside(local_prefill="measured", kv_blocks=512) as cluster:
        slow_down(cluster.workers["prefill-0"])  # the first prompts are not computed before the last is placed
        done = await asyncio.gather(
            *(cluster.client.generate(prompt, max_tokens=4, temperature=0.0, ignore_eos=True) for prompt in prompts)
        )
        paths = [one.receipt.path for one in done]
        assert paths.count("local") >= 1, paths
        assert paths.count("disaggregated") >= 1, paths
        assert all("estimated cost" in one.receipt.notes[-1] for one in done if one.receipt.path == "local")
        assert [one.token_ids for one in done] == [oracle.greedy(tiny, prompt, 4) for prompt in prompts]


async def test_the_router_counts_the_requests_in_progress(inside: Any, tiny: Path) -> None:
    """`tandem workers` shows requests while they run, and none after they have finished, were cancelled or refused."""
    go = asyncio.Event()
    wrap = lambda inner, who: Harm(inner, before=hold_until(go)) if who.startswith("decode") else inner  # noqa: E731
    prompt = oracle.prompts(tiny, [40])[0]
    async with inside(wrap=wrap) as cluster:

        async def shown(running: int) -> None:
            async with asyncio.timeout(10):
                while {one.role: one.running for one in await cluster.client.workers()}["router"] != running:
                    await cluster.router.models.first.pools.view.newer_than(
                        cluster.router.models.first.pools.view.version
                    )

        streams = [
            asyncio.create_task(cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True)) for _ in range(3)
        ]
        await shown(3)
        streams[0].cancel()
        await shown(2)
        go.set()
        await asyncio.gather(*streams[1:])
        with pytest.raises(InvalidRequest):
            await cluster.client.generate([10**6])
        await shown(0)


async def test_room_is_reserved_before_prefill_starts(inside: Any, tiny: Path) -> None:
    """While the decode worker is full nothing is prefilled; the request waits in the router and then runs."""
    go = asyncio.Event()
    wrap = lambda inner, who: Harm(inner, before=hold_until(go)) if who.startswith("decode") else inner  # noqa: E731
    first, second = oracle.prompts(tiny, [40, 40])
    async with inside(wrap=wrap, max_num_seqs=1) as cluster:
        holding = asyncio.create_task(cluster.client.generate(first, max_tokens=NEW, ignore_eos=True))
        await until(lambda: cluster.held()["prefill-0"] > 0, 10, cluster.held)
        await until(lambda: cluster.workers["prefill-0"].engine.steps > 0, 10, cluster.held)
        steps = cluster.workers["prefill-0"].engine.steps
        waiting = asyncio.create_task(cluster.client.generate(second, max_tokens=NEW, ignore_eos=True))
        done, _ = await asyncio.wait([waiting], timeout=0.4)
        assert not done
        assert cluster.workers["prefill-0"].engine.steps == steps, "the prefill worker must not have begun it"
        go.set()
        assert (await holding).token_ids == oracle.greedy(tiny, first, NEW)
        late = await waiting
        assert late.token_ids == oracle.greedy(tiny, second, NEW)
        assert late.receipt.phases["queue"] > 0.3


async def test_who_waits_too_long_for_room_is_told_when_to_come_back(inside: Any, tiny: Path) -> None:
    """The request gets RESOURCE_EXHAUSTED with a retry delay, and the one before it is not affected."""
    go = asyncio.Event()
    wrap = lambda inner, who: Harm(inner, before=hold_until(go)) if who.startswith("decode") else inner  # noqa: E731
    prompt = oracle.prompts(tiny, [40])[0]
    async with inside(wrap=wrap, max_num_seqs=1, queue_timeout_s=0.3) as cluster:
        holding = asyncio.create_task(cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True))
        await until(lambda: cluster.held()["prefill-0"] > 0, 10, cluster.held)
        with pytest.raises(Busy) as caught:
            await cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True)
        assert caught.value.retry_after
        go.set()
        assert (await holding).token_ids == oracle.greedy(tiny, prompt, NEW)


async def test_a_preempted_stream_loses_nothing(inside: Any, tiny: Path) -> None:
    """With too few blocks for all, streams are preempted and still return exactly their tokens."""
    prompts = oracle.prompts(tiny, [20] * 6)
    async with inside(kv_blocks=60) as cluster:
        together(cluster.workers["decode-0"], 4)  # which end with 72 blocks
        done = await asyncio.gather(
            *(cluster.client.generate(prompt, max_tokens=120, ignore_eos=True) for prompt in prompts)
        )
        assert [one.token_ids for one in done] == [oracle.greedy(tiny, prompt, 120) for prompt in prompts]
        assert sum(one.receipt.preemptions for one in done) > 0
        assert await cluster.ledgers_balance()


async def test_a_sampled_stream_is_a_function_of_its_seed(inside: Any, tiny: Path) -> None:
    """The same seed gives the same tokens with remote or local prefill, alone or with others; another seed gives
    others."""
    prompt = oracle.prompts(tiny, [30])[0]
    options = {"max_tokens": 24, "temperature": 0.8, "top_p": 0.9, "top_k": 50, "ignore_eos": True}
    async with inside() as cluster:
        alone = await cluster.client.generate(prompt, seed=5, **options)
        crowd = await asyncio.gather(*(cluster.client.generate(prompt, seed=seed, **options) for seed in range(8)))
        await cluster.workers.pop("prefill-0").stop(0.0)
        await cluster.seen(1)
        local = await cluster.client.generate(prompt, seed=5, **options)
        assert (alone.receipt.path, local.receipt.path) == ("disaggregated", "local")
        assert alone.token_ids == crowd[5].token_ids == local.token_ids
        assert len({tuple(one.token_ids) for one in crowd}) == 8
        unseeded = await cluster.client.generate(prompt, **options)
        again = await cluster.client.generate(prompt, seed=unseeded.receipt.seed, **options)
        assert again.token_ids == unseeded.token_ids


async def test_tenants_share_no_cache(inside: Any, tiny: Path) -> None:
    """A prompt that is cached under one salt is computed again under another, with the same tokens."""
    prompt = oracle.prompts(tiny, [64])[0]
    async with inside() as cluster:
        ask = lambda salt: cluster.client.generate(prompt, max_tokens=4, cache_salt=salt, ignore_eos=True)  # noqa: E731
        cold, warm, other = await ask(b"a"), await ask(b"a"), await ask(b"b")
        assert [one.receipt.cached_tokens for one in (cold, warm, other)] == [0, 56, 0]
        assert cold.token_ids == warm.token_ids == other.token_ids


async def test_a_stop_token_ends_the_stream(inside: Any, tiny: Path) -> None:
    """Also if it is the first token, for which no KV is needed; the source's blocks are free afterwards."""
    prompt = oracle.prompts(tiny, [30])[0]
    expected = oracle.greedy(tiny, prompt, NEW)
    async with inside() as cluster:
        for count in (1, 5):
            done = await cluster.client.generate(prompt, max_tokens=NEW, stop_token_ids=[expected[count - 1]])
            first = expected.index(expected[count - 1]) + 1
            assert done.token_ids == expected[:first]
            assert done.finish_reason == "stop"
        await until(lambda: nothing_held(cluster), 1.0, cluster.held)


BAD: list[tuple[str, dict[str, Any], type[TandemError], str]] = [
    ("empty ids", {"prompt": []}, InvalidRequest, "token_ids"),
    ("empty text", {"prompt": b""}, InvalidRequest, "text"),
    ("id of the vocabulary's size", {"prompt": [1, 2, 10**6]}, InvalidRequest, "token_ids[2]"),
    ("negative id", {"prompt": [1, -1]}, InvalidRequest, "token_ids[1]"),
    ("huge id", {"prompt": [2**31 - 1]}, InvalidRequest, "token_ids[0]"),
    ("prompt + max_tokens over the context", {"prompt": [5] * 100, "max_tokens": 10**6}, InvalidRequest, "max_tokens"),
    ("prompt over the context", {"prompt": [5] * 5000}, InvalidRequest, "token_ids"),
    ("temperature NaN", {"temperature": math.nan}, InvalidRequest, "temperature"),
    ("temperature negative", {"temperature": -0.1}, InvalidRequest, "temperature"),
    ("temperature infinite", {"temperature": math.inf}, InvalidRequest, "temperature"),
    ("temperature huge", {"temperature": 1e38}, InvalidRequest, "temperature"),
    ("top_p 0", {"top_p": 0.0}, InvalidRequest, "top_p"),
    ("top_p over 1", {"top_p": 1.0001}, InvalidRequest, "top_p"),
    ("top_p NaN", {"top_p": math.nan}, InvalidRequest, "top_p"),
    ("top_k negative", {"top_k": -2}, InvalidRequest, "top_k"),
    ("min_p over 1", {"min_p": 1.5}, InvalidRequest, "min_p"),
    ("min_p NaN", {"min_p": math.nan}, InvalidRequest, "min_p"),
    ("max_tokens negative", {"max_tokens": -1}, InvalidRequest, "max_tokens"),
    ("max_tokens 0", {"max_tokens": 0}, InvalidRequest, "max_tokens"),
    ("max_tokens huge", {"max_tokens": 2**31 - 1}, InvalidRequest, "max_tokens"),
    ("repetition penalty 0", {"repetition_penalty": 0.0}, InvalidRequest, "repetition_penalty"),
    ("repetition penalty negative", {"repetition_penalty": -1.0}, InvalidRequest, "repetition_penalty"),
    ("repetition penalty over 10", {"repetition_penalty": 10.1}, InvalidRequest, "repetition_penalty"),
    ("repetition penalty NaN", {"repetition_penalty": math.nan}, InvalidRequest, "repetition_penalty"),
    ("frequency penalty over 2", {"frequency_penalty": 2.01}, InvalidRequest, "frequency_penalty"),
    ("frequency penalty NaN", {"frequency_penalty": math.nan}, InvalidRequest, "frequency_penalty"),
    ("presence penalty under -2", {"presence_penalty": -2.01}, InvalidRequest, "presence_penalty"),
    ("presence penalty infinite", {"presence_penalty": math.inf}, InvalidRequest, "presence_penalty"),
    ("301 biases", {"logit_bias": dict.fromkeys(range(301), 1.0)}, InvalidRequest, "logit_bias"),
    ("5,000 biases", {"logit_bias": dict.fromkeys(range(5000), 1.0)}, InvalidRequest, "logit_bias"),
    ("100,000 biases", {"logit_bias": dict.fromkeys(range(100_000), 1.0)}, InvalidRequest, "message"),
    ("bias outside the vocabulary", {"logit_bias": {5: 1.0, 10**7: 1.0}}, InvalidRequest, "logit_bias[10000000]"),
    ("bias of a negative id", {"logit_bias": {-1: 1.0}}, InvalidRequest, "logit_bias[-1]"),
    ("bias over 100", {"logit_bias": {5: 100.5}}, InvalidRequest, "logit_bias[5]"),
    ("bias huge", {"logit_bias": {5: -1e9}}, InvalidRequest, "logit_bias[5]"),
    ("bias NaN", {"logit_bias": {5: math.nan}}, InvalidRequest, "logit_bias[5]"),
    ("min_tokens negative", {"min_tokens": -1}, InvalidRequest, "min_tokens"),
    ("min_tokens over max_tokens", {"max_tokens": 5, "min_tokens": 6}, InvalidRequest, "min_tokens"),
    ("min_tokens huge", {"min_tokens": 2**62}, InvalidRequest, "min_tokens"),
    ("21 logprobs", {"logprobs": 21}, InvalidRequest, "logprobs"),
    ("a million logprobs", {"logprobs": 10**6}, InvalidRequest, "logprobs"),
    ("logprobs negative", {"logprobs": -1}, InvalidRequest, "logprobs"),
    ("21 prompt logprobs", {"prompt_logprobs": 21}, InvalidRequest, "prompt_logprobs"),
    ("prompt logprobs negative", {"prompt_logprobs": -1}, InvalidRequest, "prompt_logprobs"),
    ("17 stop ids", {"stop_token_ids": [3] * 17}, InvalidRequest, "stop_token_ids"),
    ("stop id outside", {"stop_token_ids": [10**7]}, InvalidRequest, "stop_token_ids"),
    ("long request id", {"request_id": "x" * 10_000}, InvalidRequest, "request_id"),
    ("control characters in the request id", {"request_id": "a\nb"}, InvalidRequest, "request_id"),
    ("long salt", {"cache_salt": b"x" * 1000}, InvalidRequest, "cache_salt"),
    ("invalid UTF-8", {"prompt": b"caf\xe9"}, InvalidRequest, "text"),
    ("truncated UTF-8", {"prompt": "é".encode()[:1]}, InvalidRequest, "text"),
    ("text without a tokenizer", {"prompt": "hello"}, InvalidRequest, "text"),
    ("50 MB", {"prompt": b"x" * 50_000_000}, TooLarge, ""),
]


async def test_bad_input_is_refused_with_the_field_and_the_bound_before_anything_is_reserved(
    inside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every case gets its documented status within 100 ms, and no worker gets a request."""
    async with inside() as cluster:
        worker = cluster.workers["decode-0"]
        monkeypatch.setattr(worker.engine, "reserve", lambda *_: pytest.fail("a bad request reached a worker"))
        for name, options, expected, field in BAD:
            took = []
            while not took or (min(took) > 0.1 and len(took) < 10):  # whatever else the machine did meanwhile
                given = {"prompt": [5, 6, 7], **options}
                watch = Stopwatch()
                with pytest.raises(expected) as caught:
                    await cluster.client.generate(given.pop("prompt"), **given)
                took.append(watch.seconds)
            error = caught.value
            assert error.status == expected.status, name
            if field:
                assert field in (error.field or ""), name
                assert error.bound, name
                assert min(took) <= 0.1, f"{name} took {took} s"
        with pytest.raises(InvalidRequest):
            await cluster.client.scale(decode=0)
        with pytest.raises(NotFound):
            await cluster.client.drain("nobody-7")
        assert nothing_held(cluster)


async def test_calls_that_are_wrong_before_any_field_is_read(inside: Any, tiny: Path) -> None:
    """An unknown method or service, endless metadata, and an expired deadline get gRPC's own statuses at once."""
    prompt = oracle.prompts(tiny, [20])[0]
    good = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=prompt))
    good.sampling.max_tokens = NEW
    generate = "/tandem.v1.GenerationService/Generate"
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("/tandem.v1.GenerationService/Nothing", {}, "UNIMPLEMENTED"),
        ("/tandem.v0.GenerationService/Generate", {}, "UNIMPLEMENTED"),
        ("/", {}, "UNIMPLEMENTED"),
        (generate, {"metadata": (("x", "y" * 20_000),)}, "RESOURCE_EXHAUSTED"),
        (generate, {"timeout": 0.001}, "DEADLINE_EXCEEDED"),
        (generate, {"timeout": -1.0}, "DEADLINE_EXCEEDED"),
    ]
    async with inside() as cluster, grpc.aio.insecure_channel(cluster.router.address) as channel:
        for method, how, status in cases:
            watch = Stopwatch()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in channel.unary_stream(method)(good.SerializeToString(), **{"timeout": 10, **how}):
                    pass
            assert caught.value.code().name == status, (method, how)
            assert watch.within(1.0)
        await cluster.freed()
        assert await cluster.ledgers_balance()
        done = await cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True)
        assert done.token_ids == oracle.greedy(tiny, prompt, NEW)


async def test_calls_that_are_opened_and_reset_leave_nothing(inside: Any, tiny: Path) -> None:
    """Five hundred calls are each cancelled before they are answered or while they run; a valid request is served
    meanwhile."""
    prompt = oracle.prompts(tiny, [20])[0]
    good = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=prompt)).SerializeToString()
    async with inside() as cluster, grpc.aio.insecure_channel(cluster.router.address) as channel:
        generate = channel.unary_stream("/tandem.v1.GenerationService/Generate")
        asking = asyncio.create_task(cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True))
        for number in range(500):
            call = generate(good, timeout=30)
            if number % 5 == 0:
                await asyncio.sleep(0)
            if number % 50 == 0:
                await call.read()
            call.cancel()
        assert (await asking).token_ids == oracle.greedy(tiny, prompt, NEW)
        await cluster.freed(within_s=5.0)
        await until(
            lambda: not cluster.router.models.first.generation.running,
            5.0,
            lambda: cluster.router.models.first.generation.running,
        )
        assert await cluster.ledgers_balance()


async def test_a_drained_worker_finishes_what_it_has_and_gets_nothing_new(inside: Any, tiny: Path) -> None:
    """Its stream runs to its end, and new requests go to the other worker."""
    prompts = oracle.prompts(tiny, [30, 30])
    async with inside(decode=2) as cluster:
        quick = [slow_down(cluster.workers[name], 0.05) for name in ("decode-0", "decode-1")]
        stream = cluster.client.stream(prompts[0], max_tokens=150, ignore_eos=True)
        pieces = [await anext(stream)]
        busy = next(name for name, held in cluster.held().items() if name.startswith("decode") and held)
        draining = asyncio.create_task(cluster.client.drain(busy, grace=30.0))
        await until(lambda: cluster.workers[busy].state == "draining", 5, lambda: cluster.workers[busy].state)
        other = await cluster.client.generate(prompts[1], max_tokens=NEW, ignore_eos=True)
        assert other.receipt.decode_worker != busy
        for hurry in quick:
            hurry()
        pieces += [piece async for piece in stream]
        ids = [token for piece in pieces for token in piece.token_ids]
        assert ids == oracle.greedy(tiny, prompts[0], 150)
        assert pieces[-1].receipt.attempts == 1
        assert (await draining).finished == 1


async def test_a_drain_ends_its_worker_although_its_caller_went_away(inside: Any, tiny: Path) -> None:
    """An operator who stops waiting, or a router that dies, leaves no worker that takes nothing and never ends."""
    prompt = oracle.prompts(tiny, [30])[0]
    async with inside() as cluster:
        worker = cluster.workers["decode-0"]
        hurry = slow_down(worker, 0.05)
        stream = cluster.client.stream(prompt, max_tokens=60, ignore_eos=True)
        pieces = [await anext(stream)]
        context: Any = None  # which Drain does not use
        call = WorkerServicer(worker).Drain(worker_pb2.DrainRequest(grace_seconds=30.0), context)
        draining = asyncio.create_task(call)
        await until(lambda: worker.state == "draining", 5, lambda: worker.state)
        draining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await draining
        hurry()
        pieces += [piece async for piece in stream]
        assert [token for piece in pieces for token in piece.token_ids] == oracle.greedy(tiny, prompt, 60)
        await asyncio.wait_for(worker.wait(), 10.0)


async def test_a_callers_bug_does_not_reach_the_engine(inside: Any, tiny: Path) -> None:
    """The worker refuses an internal request with impossible tokens, and its streams continue."""
    async with inside() as cluster:
        channels = Channels()
        stub = decode_pb2_grpc.DecodeServiceStub(channels.to(cluster.workers["decode-0"].address))
        for tokens, prompt in (([10**6], 1), ([], 0), ([1, 2], 3)):
            request = decode_pb2.DecodeRequest(
                request_id="r", attempt=1, token_ids=tokens, prompt_tokens=prompt, max_tokens=4
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await decoded(stub, request)
            assert isinstance(from_rpc(caught.value), InvalidRequest)
        for wrong in ({"logit_bias": {10**6: 1.0}}, {"top_k": 5, "logit_bias": {2**32 - 1: 1.0}}):
            request = decode_pb2.DecodeRequest(
                request_id="r", attempt=1, token_ids=[1], prompt_tokens=1, max_tokens=4, sampling=wrong
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await decoded(stub, request)
            assert isinstance(from_rpc(caught.value), InvalidRequest)
        await channels.close()
        prompt_ids = oracle.prompts(tiny, [20])[0]
        done = await cluster.client.generate(prompt_ids, max_tokens=NEW, ignore_eos=True)
        assert done.token_ids == oracle.greedy(tiny, prompt_ids, NEW)
