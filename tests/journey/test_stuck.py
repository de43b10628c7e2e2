"""A worker whose engine or transport hangs is detected and ends; its streams continue elsewhere with their tokens."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.state.registry import State
from services.router.execution.poison_requests import Loss, PoisonRequests
from services.watchdog import EXIT_STATUS, Watchdog
from services.worker import Worker
from tandem.errors import InternalError, TandemError
from tests.support import oracle
from tests.support.faults import slow_down
from tests.support.stopwatch import Stopwatch

COUNT, NEW = 6, 120
MARK_S = 0.25  # a stopwatch costs milliseconds: not one for each token
HANG_S = 3.0  # the promise: found and streams resumed
HUNG_STEP_S = 2.0  # the product's


@pytest.fixture(scope="module")
def plain(tiny: Path) -> list[list[int]]:
    return [oracle.greedy(tiny, prompt, NEW) for prompt in oracle.prompts(tiny, [20] * COUNT)]


class Streams:
    """Some concurrent streams, with the time at which each last received a token."""

    def __init__(self, cluster: Any, tiny: Path) -> None:
        self._cluster = cluster
        self._prompts = oracle.prompts(tiny, [20] * COUNT)
        self.tokens: list[list[int]] = [[] for _ in self._prompts]
        self.gap_s = 0.0  # the longest between two tokens of a stream
        self.moved = asyncio.Event()

    async def run(self) -> list[list[int]]:
        for worker in self._cluster.workers.values():
            slow_down(worker)  # no stream is over before its worker hangs
        await asyncio.gather(*(self._one(number) for number in range(COUNT)))
        return self.tokens

    async def _one(self, number: int) -> None:
        last: Stopwatch | None = None
        asked = {"max_tokens": NEW, "temperature": 0.0, "ignore_eos": True, "timeout": 60}
        async for piece in self._cluster.client.stream(self._prompts[number], **asked):
            if last and not last.within(MARK_S):
                self.gap_s = max(self.gap_s, last.seconds)
                last = None
            last = last or Stopwatch()
            self.tokens[number] += piece.token_ids
            if all(len(tokens) > 3 for tokens in self.tokens):
                self.moved.set()


class Block:
    """Blocks a worker's next step until the end of the block."""

    def __init__(self, worker: Worker) -> None:
        self._engine: Any = worker.engine
        self._forward = self._engine.forward
        self._over = threading.Event()

    def __enter__(self) -> None:
        self._engine.forward = self._wait

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _wait(self, *batch: Any) -> Any:
        self._over.wait(60)
        return self._forward(*batch)


async def health(worker: Worker) -> int:
    async with grpc.aio.insecure_channel(worker.address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        return int(answer.status)


async def left(worker: Worker) -> TandemError:
    """Why the worker ended."""
    async with asyncio.timeout(60):
        try:
            await worker.wait()
        except TandemError as error:
            return error
    raise AssertionError("it ended well")


async def test_a_hung_step_is_found_and_its_streams_go_on(inside: Any, tiny: Path, plain: list[list[int]]) -> None:
    """Within three seconds; the worker says that it does not serve, and its process would end."""
    async with inside(decode=2, hung_step_s=HUNG_STEP_S) as cluster:
        streams = Streams(cluster, tiny)
        running = asyncio.create_task(streams.run())
        await streams.moved.wait()
        victim = cluster.workers["decode-0"]
        with Block(victim):
            assert (await left(victim)).reason == "ENGINE_STUCK"
            assert victim.state is State.DRAINING
            assert await health(victim) == health_pb2.HealthCheckResponse.NOT_SERVING
            assert await running == plain
            assert await asyncio.to_thread(cluster.exits.get, timeout=60) == EXIT_STATUS
        print(f"longest gap in a stream: {streams.gap_s:.2f} s")
        assert streams.gap_s < HANG_S + 0.5


async def test_control_without_the_watchdog_its_streams_hang(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: the streams hang as long as the test waits."""
    monkeypatch.setattr(Watchdog, "start", lambda _: None)
    async with inside(decode=2, hung_step_s=HUNG_STEP_S) as cluster:
        streams = Streams(cluster, tiny)
        running = asyncio.create_task(streams.run())
        await streams.moved.wait()
        with Block(cluster.workers["decode-0"]):
            _, hanging = await asyncio.wait({running}, timeout=HANG_S + 1.0)
        assert hanging
        await running


async def test_a_prompt_whose_step_hangs_is_placed_again(inside: Any, tiny: Path, plain: list[list[int]]) -> None:
    """The same on a prefill worker."""
    async with inside(prefill=2, hung_step_s=HUNG_STEP_S) as cluster:
        victim = cluster.workers["prefill-0"]
        with Block(victim):
            assert await Streams(cluster, tiny).run() == plain
            assert (await left(victim)).reason == "ENGINE_STUCK"


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_a_request_whose_step_hangs_counts_towards_poison(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    """The router learns that the step failed with it, and not only that a worker does not serve any more."""
    losses = list[Loss]()
    monkeypatch.setattr(PoisonRequests, "lost", lambda self, request, loss: losses.append(loss))
    async with inside(**{"prefill": 0, "decode": 1, role: 2}, hung_step_s=HUNG_STEP_S) as cluster:
        with Block(cluster.workers[f"{role}-0"]):
            prompts = oracle.prompts(tiny, [20] * 4)
            await asyncio.gather(*(cluster.client.generate(one, max_tokens=4, ignore_eos=True) for one in prompts))
    assert f"{role}-0" in {loss.worker_id for loss in losses if loss.failed_step}


async def test_a_worker_whose_transport_broke_leaves(inside: Any, tiny: Path, plain: list[list[int]]) -> None:
    """It could read nothing any more, and would look idle."""
    async with inside(decode=2, hung_step_s=HUNG_STEP_S) as cluster:
        streams = Streams(cluster, tiny)
        running = asyncio.create_task(streams.run())
        await streams.moved.wait()
        victim = cluster.workers["decode-0"]
        victim.transport.broken = InternalError("its thread has ended")
        await asyncio.to_thread(victim.transport.on_broken)
        assert (await left(victim)).reason == "TRANSPORT_BROKEN"
        assert await running == plain
        assert victim.state is State.DRAINING


async def test_a_worker_whose_transport_hangs_leaves(inside: Any) -> None:
    """Its thread makes no rounds any more, and raises nothing."""

    class Hung:
        under_way = ("a call", 0.5)

        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    async with inside(wrap=lambda transport, worker_id: Hung(transport) if worker_id == "decode-0" else transport) as (
        cluster
    ):
        assert (await left(cluster.workers["decode-0"])).reason == "TRANSPORT_STUCK"
        assert cluster.workers["prefill-0"].state is State.READY
