"""Workers that change their pool and keep their engine, under load, over real NIXL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from engine.core.step_time import PROMPTS_S
from services import launch
from services.worker import Worker
from tandem.errors import InternalError, PreconditionFailed, StaleTransfer, TandemError, Unavailable
from tandem.grpc_errors import calling
from tandem.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from tests.support import oracle
from tests.support.faults import slow_down

NEW = 40
SOON_S = 20.0


async def switch_role(cluster: Any, worker_id: str, becomes: str, grace_s: float = SOON_S) -> tuple[Worker, Worker]:
    """Switches the role as the worker's actor does; returns the former incarnation and the next one."""
    before = cluster.workers[worker_id]
    engine = await before.release(grace_s)
    after: Any = await launch.start(becomes.rsplit("-", 1)[0], cluster.settings, becomes, engine=engine)
    del cluster.workers[worker_id]
    cluster.workers[becomes] = after
    cluster._stack.push_async_callback(after.stop, 0.0)
    return before, after


class Load:
    """Sends requests continuously until it is stopped, and keeps their results."""

    def __init__(self, cluster: Any, prompts: list[list[int]]) -> None:
        self._cluster, self._prompts = cluster, prompts
        self.answers: list[tuple[int, Any]] = []  # the place of the prompt, and the answer
        self.seen: set[str] = set()
        self._over = False
        self._more = asyncio.Condition()

    async def ask(self, place: int) -> Any:
        return await self._cluster.client.generate(
            self._prompts[place], max_tokens=NEW, temperature=0.0, ignore_eos=True, timeout=SOON_S
        )

    async def client(self, number: int) -> None:
        while not self._over:
            place = number % len(self._prompts)
            answer = await self.ask(place)
            self.answers.append((place, answer))
            hops = [answer.receipt.decode_worker, answer.receipt.prefill_worker]
            self.seen.update(filter(None, hops))
            number += 3
            async with self._more:
                self._more.notify_all()

    async def until_seen(self, *workers: str) -> None:
        """Waits until each of them has contributed to an answer."""
        async with asyncio.timeout(SOON_S), self._more:
            await self._more.wait_for(lambda: set(workers) <= self.seen)

    def stop(self) -> None:
        self._over = True


async def test_flips_under_load_lose_no_request_and_no_token(inside: Any, tiny: Any) -> None:
    """A decode worker becomes a prefill worker and a decode worker again while three clients send continuously: every
    answer is the one of the undisturbed model, both new incarnations serve, the weights are the same objects as before,
    and the ledgers balance afterwards. Only as a decode worker does it keep its steps short for streams that may
    come."""
    prompts = oracle.prompts(tiny, [30, 57, 41, 23, 66])
    expected = [oracle.greedy(tiny, prompt, NEW) for prompt in prompts]
    async with inside(prefill=1, decode=2, transport="nixl", slo_tpot_s=0.4) as cluster:
        load = Load(cluster, prompts)
        clients = [asyncio.create_task(load.client(number)) for number in range(3)]
        await load.until_seen("prefill-0", "decode-0", "decode-1")
        module = cluster.workers["decode-1"].engine.model.module
        before, after = await switch_role(cluster, "decode-1", "prefill-1")
        await load.until_seen("prefill-1")
        assert before.incarnation != after.incarnation
        assert after.engine.model.module is module
        assert after.engine.alone_s == PROMPTS_S
        load.seen.clear()
        _, after = await switch_role(cluster, "prefill-1", "decode-1")
        assert (after.engine.alone_s, after.engine.config.beside_s) == (0.2, 0.2)
        await load.until_seen("decode-1")
        load.stop()
        await asyncio.gather(*clients)
        assert cluster.workers["decode-1"].engine.model.module is module
        await cluster.freed()
        assert await cluster.ledgers_balance()
    assert len(load.answers) >= 9
    assert [place for place, answer in load.answers if answer.token_ids != expected[place]] == []


async def test_a_stream_that_outlasts_the_drain_goes_on_elsewhere(inside: Any, tiny: Any) -> None:
    """A stream that a flip without grace period cuts off continues token for token on the other decode worker; the
    engine that switched holds none of its blocks."""
    (prompt,) = oracle.prompts(tiny, [30])
    new = 150
    async with inside(prefill=1, decode=2) as cluster:
        for name in ("decode-0", "decode-1"):
            slow_down(cluster.workers[name])
        stream = cluster.client.stream(prompt, max_tokens=new, temperature=0.0, ignore_eos=True)
        tokens = list((await anext(stream)).token_ids)
        (holder,) = (name for name, held in cluster.held().items() if name.startswith("decode") and held)
        _, after = await switch_role(cluster, holder, "prefill-1", grace_s=0.0)
        assert after.engine.pool.held == 0
        receipt = None
        async for piece in stream:
            tokens += piece.token_ids
            receipt = piece.receipt or receipt
        assert tokens == oracle.greedy(tiny, prompt, new)
        assert receipt is not None
        assert receipt.attempts == 2


class Caller:
    """What a decode worker and a router know of one incarnation of a worker: its address, its incarnation, and a
    transfer that is open there."""

    def __init__(self, worker: Worker) -> None:
        self._channel = grpc.aio.insecure_channel(worker.address)
        self.prefill = prefill_pb2_grpc.PrefillServiceStub(self._channel)
        self.decode = decode_pb2_grpc.DecodeServiceStub(self._channel)
        self._asked = prefill_pb2.PrefillRequest(
            request_id="held",
            token_ids=range(5, 25),
            prompt_tokens=20,
            layout_hash=worker.layout_hash,
            incarnation=worker.incarnation,
        )

    async def open(self) -> None:
        """A transfer that is not released, because its stream stays open. Raises the worker's error."""
        with calling("it"):
            self._call = self.prefill.Prefill(self._asked, timeout=SOON_S)
            opened = (await self._call.read()).opened
        self._ticket = (opened.transfer_id, opened.generation, opened.incarnation)

    async def release(self) -> None:
        ticket = prefill_pb2.ReleaseTransferRequest(
            transfer_id=self._ticket[0], generation=self._ticket[1], incarnation=self._ticket[2]
        )
        with calling("it"):
            await self.prefill.ReleaseTransfer(ticket, timeout=SOON_S)

    async def open_feed(self) -> None:
        self._feed = self.decode.Feed(decode_pb2.FeedRequest(feed_id="mine"))
        await self._feed.read()

    async def use_feed(self) -> None:
        asked = decode_pb2.DecodeRequest(
            request_id="fed", token_ids=range(5, 25), prompt_tokens=20, max_tokens=2, feed_id="mine", lane=1
        )
        with calling("it"):
            await self.decode.Decode(asked, timeout=SOON_S).read()

    async def close(self) -> None:
        await self._channel.close()


async def lives(
    cluster: Any, worker_id: str, stack: AsyncExitStack, *roles: str
) -> AsyncIterator[tuple[Worker, Caller]]:
    """Incarnation after incarnation of one engine at one address, each with a caller that first connected during it."""
    worker: Any = cluster.workers.pop(worker_id)
    port = int(worker.address.rsplit(":", 1)[1])
    fixed = cluster.settings.model_copy(update={"worker_port": port})
    for number, role in enumerate(roles):
        if number:
            worker = await launch.start(role, fixed, f"{role}-7", engine=await worker.release(0.0))
            assert worker.address.endswith(f":{port}")
            stack.push_async_callback(worker.stop, 0.0)
        caller = Caller(worker)
        stack.push_async_callback(caller.close)
        yield worker, caller


async def test_no_ticket_of_the_old_life_works_in_the_new_one(inside: Any) -> None:
    """A worker switches its role and switches back at the same address. A ticket of the first incarnation releases
    nothing in the third, and its incarnation id opens nothing; a ticket of the third does."""
    async with inside(prefill=1, decode=0) as cluster, AsyncExitStack() as stack:
        walk = lives(cluster, "prefill-0", stack, "prefill", "decode", "prefill")
        _, old = await anext(walk)
        await old.open()
        await anext(walk)
        with pytest.raises(TandemError, match="Method not found"):
            await old.release()
        worker, new = await anext(walk)
        with pytest.raises(StaleTransfer, match="another incarnation of this worker"):
            await old.release()
        with pytest.raises(StaleTransfer, match="look it up again"):
            await old.open()
        assert worker.engine.pool.held == 0
        await new.open()
        await new.release()


async def test_control_with_one_incarnation_for_all_lives_the_old_one_opens(
    inside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: the incarnation id keeps a caller of the first incarnation out of the third."""
    monkeypatch.setattr("services.worker.secrets.token_hex", lambda size: "always-the-same")
    async with inside(prefill=1, decode=0) as cluster, AsyncExitStack() as stack:
        walk = lives(cluster, "prefill-0", stack, "prefill", "decode", "prefill")
        _, old = await anext(walk)
        await anext(walk)
        await anext(walk)
        await old.open()
        await old.release()


async def test_no_feed_of_the_old_life_works_in_the_new_one(inside: Any) -> None:
    """A router that opened a shared stream in the first incarnation gets an error in the third, before anything runs;
    in an incarnation that knows the shared stream, the same request is served."""
    async with inside(prefill=0, decode=1) as cluster, AsyncExitStack() as stack:
        walk = lives(cluster, "decode-0", stack, "decode", "prefill", "decode")
        _, old = await anext(walk)
        await old.open_feed()
        await old.use_feed()
        await anext(walk)
        worker, new = await anext(walk)
        with pytest.raises(Unavailable, match="place the request again"):
            await old.use_feed()
        assert worker.engine.pool.held == 0
        await new.open_feed()
        await new.use_feed()


async def test_an_engine_with_something_left_in_it_is_not_handed_on(inside: Any) -> None:
    """Blocks that are held after the drain have an owner: the flip fails, and the process would be ended."""
    async with inside(prefill=1, decode=1) as cluster:
        worker = cluster.workers["prefill-0"]
        await worker.engine_thread.call(lambda: worker.engine.pool.take("a-leak", [], 2))
        with pytest.raises(InternalError, match="a-leak"):
            await worker.release(0.0)
        await worker.engine_thread.call(lambda: worker.engine.pool.drop("a-leak"))


async def test_an_engine_whose_transport_did_not_close_is_not_handed_on(inside: Any) -> None:
    """While peers may still read or write the pages, no other incarnation may serve from them."""
    async with inside(prefill=0, decode=1) as cluster:
        worker = cluster.workers["decode-0"]
        close, failures = worker.transport.close, [InternalError("the NIXL agent did not stop")]

        def fail() -> None:
            close()
            if failures:
                raise failures.pop()

        worker.transport.close = fail
        with pytest.raises(InternalError, match="did not stop"):
            await worker.release(0.0)
        worker.engine_thread.stop()


async def test_an_engine_that_only_prefills_does_not_decode(inside: Any) -> None:
    """With speculation a prefill worker loads no drafter; it reports that it cannot switch its role, and a decode
    worker on its engine is refused. If the autoscaler may flip workers, every engine has a drafter."""
    async with inside(prefill=1, decode=0, speculation="ngram") as cluster:
        worker = cluster.workers["prefill-0"]
        assert not worker.can_switch_role
        with pytest.raises(PreconditionFailed):
            await launch.start("decode", cluster.settings, "decode-7", engine=await worker.release(0.0))
        worker.engine_thread.stop()
    flips = {"autoscale": "on", "prefill_max": 2, "decode_max": 2}
    async with inside(prefill=1, decode=0, speculation="ngram", **flips) as cluster:
        assert cluster.workers["prefill-0"].can_switch_role
