"""Cost of the router: the same requests through it (gRPC, HTTP) and directly to the decode worker, in turn.

Straight means the worker's own Decode call with prefill on that worker, which is what the router would ask for. Each
concurrent stream has a feed of its own there, and a message for each token.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import grpc

from cluster.free_port import free_port
from loadtest.harness.processes import Local, cpu_seconds
from loadtest.harness.stats import Row, Section, Spread, Tick
from loadtest.loadgen.targets import Http
from tandem.v1 import decode_pb2, decode_pb2_grpc, generation_pb2, generation_pb2_grpc

ROUTER, WORKER = "router-0", "decode-0"
STREAM_TIMEOUT_S = 60.0  # of one stream, and of the silence of its feed
_numbers = itertools.count()


@dataclass(frozen=True)
class Plan:
    """`requests` of each side one after another; then `rounds` of each side with `streams` at once, `tokens` each."""

    requests: int = 60
    prompt: int = 32
    streams: tuple[int, ...] = (1, 16)
    tokens: int = 256
    rounds: int = 5

    @property
    def ticks(self) -> int:
        return 2 + len(self.streams)


@dataclass
class _Stream:
    """When the messages with tokens came, in seconds of perf_counter, and how many tokens each had."""

    sent: float = field(default_factory=perf_counter)
    at: list[float] = field(default_factory=list)
    tokens: int = 0

    def came(self, tokens: int) -> None:
        self.at.append(perf_counter())
        self.tokens += tokens

    @property
    def ttft(self) -> float:
        return self.at[0] - self.sent

    @property
    def per_token(self) -> float:
        """Mean seconds between tokens after the first. Where all came in one message, the machine was too busy to show
        that: seconds since the request, per token."""
        if len(self.at) == 1:
            return (self.at[0] - self.sent) / self.tokens
        return (self.at[-1] - self.at[0]) / (self.tokens - 1)


class Side(ABC):
    """One way to the worker."""

    def __init__(self, address: str, vocab: int, prompt: int) -> None:
        self.channel = grpc.aio.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),))
        self._vocab, self._prompt = vocab, prompt

    def prompt(self) -> list[int]:
        return random.choices(range(2, self._vocab), k=self._prompt)

    @abstractmethod
    def events(self, max_tokens: int) -> AsyncIterator[int]:
        """The number of tokens of each message that has some."""

    def headers(self) -> tuple[tuple[str, str], ...]:
        """What goes with the next request."""
        return ()

    async def stream(self, max_tokens: int) -> _Stream:
        stream = _Stream()
        async for tokens in self.events(max_tokens):
            stream.came(tokens)
        assert stream.tokens == max_tokens, f"{stream.tokens} of {max_tokens} tokens came"
        return stream


class Through(Side):
    async def events(self, max_tokens: int) -> AsyncIterator[int]:
        request = generation_pb2.GenerateRequest()
        request.token_ids.ids.extend(self.prompt())
        request.sampling.max_tokens, request.sampling.ignore_eos = max_tokens, True
        stub = generation_pb2_grpc.GenerationServiceStub(self.channel)
        async for event in stub.Generate(request, metadata=self.headers()):
            if event.HasField("delta"):
                yield len(event.delta.token_ids)


class _Web(Side):
    """Through the router's HTTP API."""

    def __init__(self, target: Http, vocab: int, prompt: int) -> None:
        self._target, self._vocab, self._prompt = target, vocab, prompt

    async def events(self, max_tokens: int) -> AsyncIterator[int]:
        async for message in self._target.stream(self.prompt(), max_tokens):
            if message.tokens:
                yield message.tokens


class Straight(Side):
    def __init__(self, address: str, vocab: int, prompt: int) -> None:
        super().__init__(address, vocab, prompt)
        self._stub = decode_pb2_grpc.DecodeServiceStub(self.channel)
        self._idle: list[tuple[str, Any]] = []  # open feeds that no stream uses now

    async def events(self, max_tokens: int) -> AsyncIterator[int]:
        ids, number, ended = self.prompt(), next(_numbers), False
        feed_id, feed_call = self._idle.pop() if self._idle else await self._open(f"bench-{number}")
        request = decode_pb2.DecodeRequest(
            request_id=f"bench-{number}", attempt=1, token_ids=ids, prompt_tokens=len(ids), max_tokens=max_tokens
        )
        request.sampling.top_p = 1.0
        request.feed_id, request.lane = feed_id, number
        call = self._stub.Decode(request, timeout=STREAM_TIMEOUT_S)
        async for event in call:
            if event.HasField("tokens"):
                yield len(event.tokens.token_ids)
                break
        while not ended:
            async with asyncio.timeout(STREAM_TIMEOUT_S):
                message = await feed_call.read()
            for event in message.events:
                if event.HasField("tokens"):
                    yield len(event.tokens.token_ids)
                ended = ended or event.HasField("ended")
        assert await call.code() is grpc.StatusCode.OK
        self._idle.append((feed_id, feed_call))

    async def _open(self, feed_id: str) -> tuple[str, Any]:
        feed_call = self._stub.Feed(decode_pb2.FeedRequest(feed_id=feed_id))
        async with asyncio.timeout(STREAM_TIMEOUT_S):
            await feed_call.read()
        return feed_id, feed_call


def run(model: Path, vocab: int, plan: Plan, tick: Tick) -> Section:
    """`model` is a checkpoint folder, `vocab` the token ids that its tokenizer knows."""
    tick("starting a router and a decode worker")
    with Local(model=model, kv_blocks=1024) as local:
        port = free_port("127.0.0.1", 0, "port")
        local.launch("router", ROUTER, http_port=port)
        local.launch("decode", WORKER)
        local.wait_seen(ROUTER, 1)
        return asyncio.run(_measure(local, port, str(model), vocab, plan, tick))


async def _measure(local: Local, port: int, model: str, vocab: int, plan: Plan, tick: Tick) -> Section:
    through = Through(local.address(ROUTER), vocab, plan.prompt)
    straight = Straight(local.address(WORKER), vocab, plan.prompt)
    try:
        tick(f"{plan.requests} requests each way")
        rows = [await _per_request(through, straight, plan)]
        async with Http(f"http://127.0.0.1:{port}", model) as target:
            sides = {"through": through, "http": _Web(target, vocab, plan.prompt), "straight": straight}
            for streams in plan.streams:
                tick(f"{streams} streams of {plan.tokens} tokens, {plan.rounds} rounds each way")
                rows += await _per_token(sides, local, streams, plan)
    finally:
        await through.channel.close()
        await straight.channel.close()
    read = "first token, token interval: through the router / straight to the worker. CPU: router / decode worker"
    notes = [
        "the demo model, its tokenizer included; router, worker and client share the cores, unpinned",
        "steps share messages (`stream_interval_s`, or a reader that is behind): intervals are means per token",
    ]
    return Section("What the router adds", read, rows, notes)


async def _per_request(through: Side, straight: Side, plan: Plan) -> Row:
    with_router: list[float] = []
    without: list[float] = []
    for number in range(plan.requests + 4):
        for side, times in ((through, with_router), (straight, without))[:: 1 if number % 2 else -1]:
            ttft = (await side.stream(1)).ttft
            if number >= 4:  # the first ones only warm up
                times.append(ttft)
    added = [interval - other for interval, other in zip(with_router, without, strict=True)]
    values = {"through": with_router, "straight": without, "added": added}
    return Row.of(f"time to first token, {plan.prompt} tokens", with_router, without, values)


async def _per_token(sides: dict[str, Side], local: Local, streams: int, plan: Plan) -> list[Row]:
    router, worker = local.pid(ROUTER), local.pid(WORKER)
    intervals: dict[str, list[float]] = {name: [] for name in sides}
    router_cpu: dict[str, list[float]] = {name: [] for name in sides}
    worker_cpu, batched = [], []
    for number in range(plan.rounds + 1):
        for name, side in tuple(sides.items())[:: 1 if number % 2 else -1]:
            before = cpu_seconds(router), cpu_seconds(worker)
            done = await asyncio.gather(*(side.stream(plan.tokens) for _ in range(streams)))
            tokens = sum(stream.tokens for stream in done)
            if number == 0:  # warms up
                continue
            intervals[name].append(Spread.of([stream.per_token for stream in done]).median)
            router_cpu[name].append((cpu_seconds(router) - before[0]) / tokens)
            if name == "through":
                worker_cpu.append((cpu_seconds(worker) - before[1]) / tokens)
                batched.append(tokens / sum(len(stream.at) for stream in done))
    added = [interval - other for interval, other in zip(intervals["through"], intervals["straight"], strict=True)]
    what = f"{streams} stream{'s' if streams > 1 else ''} of {plan.tokens} tokens"
    straight, grpc, http = intervals["straight"], router_cpu["through"], router_cpu["http"]
    interval = Row.of(f"token interval, {what}", intervals["through"], straight, intervals | {"added": added})
    interval.beside["tokens a message"] = Spread.of(batched), "1"
    values = {"http": http, "through": grpc}
    return [
        interval,
        Row.of(f"CPU per token, {what}", grpc, worker_cpu, {"router": grpc, "worker": worker_cpu}),
        Row.of(f"router's CPU per token, HTTP / gRPC, {what}", http, grpc, values),
    ]
