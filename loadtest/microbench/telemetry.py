"""Cost of traces and metrics: CPU of router, prefill and decode worker for a request, over that of one without.

The way in which steps batch streams varies more than telemetry costs. So requests come one after another here, and the
result is a share of the CPU of a request under load. One cluster gets requests that their caller traces (W3C's
`traceparent` says so) and requests that are not traced, in turn. The CPU of creating the spans of a request that is not
traced, and of a request for metrics, is measured alone: two processes with the same work differ by more. The receiver
of the spans stores nothing, as its work would be another machine's.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, process_time

import grpc

from cluster.free_port import free_port
from loadtest.harness.processes import Local, cpu_seconds
from loadtest.harness.stats import Row, Section, Spread, Tick, sure
from loadtest.microbench.hop import ROUTER, WORKER, Through
from tandem.async_client import AsyncClient
from tandem.errors import InternalError
from tandem.settings import Settings
from tandem.telemetry.tracing import of_process

OTLP = "opentelemetry.proto.collector.trace.v1.TraceService"
PREFILL = "prefill-0"
PROCESSES = (ROUTER, PREFILL, WORKER)
ASK_TIMEOUT_S = 5.0
SEND_S = 0.2  # how often spans are sent here, where the SDK's own is 5 s: a group's are sent before the next begins
SHARE = 0.1  # of requests traced, that the result is for
ASKED_S = 15.0  # from one question for metrics to the next, that the result is for
LOADS = 5  # measurements of what a request takes under load
AT_ONCE = 50  # requests whose spans are exported together, in the separate measurement of spans
SPANS = (5, 4, 3)  # beside its own, that a traced request has in the router, the decode and the prefill worker


@dataclass(frozen=True)
class Plan:
    """`rounds` of groups of `requests`, one after another, of `few` tokens each, whose number spans do not depend on.
    Under load `streams` at once send `requests` each, of `tokens`. All prompts have `prompt` tokens."""

    rounds: int = 60
    requests: int = 20
    few: int = 4
    streams: int = 8
    prompt: int = 64
    tokens: int = 64

    @property
    def ticks(self) -> int:
        return 3


class _Receiver:
    """Takes what is exported and reads none of it."""

    def __init__(self) -> None:
        self.bytes = 0

    def handler(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(OTLP, {"Export": grpc.unary_unary_rpc_method_handler(self._export)})

    async def _export(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        self.bytes += len(request)
        return b""


class _Cluster:
    """One router, one prefill and one decode worker, and the channels to it, by whether a request is traced."""

    def __init__(self, local: Local, vocab: int, prompt: int) -> None:
        self.address = local.address(ROUTER)
        self.variants = {sampled: _Traced(self.address, vocab, prompt, sampled) for sampled in (False, True)}
        self._pids = [local.pid(process) for process in PROCESSES]

    def cpu(self) -> float:
        return sum(map(cpu_seconds, self._pids))

    async def close(self) -> None:
        for variant in self.variants.values():
            await variant.channel.close()


class _Traced(Through):
    """Whose caller has decided whether it is traced."""

    def __init__(self, address: str, vocab: int, prompt: int, sampled: bool) -> None:
        super().__init__(address, vocab, prompt)
        self._flags = f"{sampled:02x}"

    def headers(self) -> tuple[tuple[str, str], ...]:
        return (("traceparent", f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{self._flags}"),)


def run(model: Path, vocab: int, plan: Plan, tick: Tick) -> Section:
    """`model` is a checkpoint folder, `vocab` the token ids that its tokenizer knows. Raises InternalError when the
    spans of the traced requests did not come, so that nothing would have been measured."""
    return asyncio.run(_run(model, vocab, plan, tick))


async def _run(model: Path, vocab: int, plan: Plan, tick: Tick) -> Section:
    tick("starting a cluster")
    endpoint = f"http://127.0.0.1:{(port := free_port('127.0.0.1', 0, 'port'))}"
    about = {"otlp_endpoint": endpoint, "trace_ratio": 0.0, "metrics_port": 0}
    often = {"OTEL_BSP_SCHEDULE_DELAY": f"{SEND_S * 1e3:.0f}"}  # ms
    with Local(model=model, kv_blocks=512, **about) as local:
        for role, name in (("router", ROUTER), ("prefill", PREFILL), ("decode", WORKER)):
            local.launch(role, name, environment=often)
        async with _receiver(port) as receiver:  # not before: gRPC and a fork do not go together
            await asyncio.to_thread(local.wait_seen, ROUTER, 2)
            cluster = _Cluster(local, vocab, plan.prompt)
            try:
                tick(f"{plan.rounds} rounds of {plan.requests} requests of each kind")
                rounds = await _rounds(cluster, plan)
                came = [receiver.bytes]
                tick(f"requests of {plan.streams} streams, questions for metrics, and spans by themselves")
                under_load = await _under_load(cluster, plan)
                asked = await _asked(cluster, plan)
                spans = await _spans(endpoint, plan)
                came.append(receiver.bytes)
            finally:
                await cluster.close()
    if not 0 < came[0] == came[1]:
        raise InternalError(f"{came} bytes of spans came: of the traced requests, and in all")
    return _section(rounds, under_load, asked, spans, came[0], plan)


def _section(
    rounds: dict[bool, list[float]],
    under_load: list[float],
    asked: list[float],
    spans: list[float],
    sent: int,
    plan: Plan,
) -> Section:
    request_s, busy_s = Spread.of(under_load).median, ASKED_S * len(os.sched_getaffinity(0))
    tracing = [second - other for second, other in zip(rounds[True], rounds[False], strict=True)]
    more = {  # CPU seconds of what, and of how many seconds they are a share
        "traced / not traced": (tracing, request_s),
        "not traced / without telemetry, its spans by themselves": (spans, request_s),
        f"metrics asked for every {ASKED_S:.0f} s, of busy cores": (asked, busy_s),
    }
    rows = [
        Row(name, Spread.of([1 + second / total for second in seconds]), {"CPU": (Spread.of(seconds), "s")})
        for name, (seconds, total) in more.items()
    ]
    traced, untraced, questions = (
        [share / total for share in (Spread.of(seconds).median, *sure(seconds))] for seconds, total in more.values()
    )
    middle, low, high = (SHARE * t + n + q for t, n, q in zip(traced, untraced, questions, strict=True))
    notes = [
        f"with {SHARE:.0%} of the requests traced: {middle:.2%} of the CPU of requests under load, {low:.2%} to"
        f" {high:.2%} (all rows, 95 % intervals of their medians)",
        f"a request under load, {plan.streams} streams of {plan.prompt} tokens in and {plan.tokens} out:"
        f" {request_s:.4f} s; one after another with {plan.few} out: {Spread.of(rounds[False]).median:.4f} s",
        f"{sent} bytes of spans came over OTLP; the demo model, prefill/decode",
    ]
    return Section("What telemetry costs", "CPU for a request, with / without", rows, notes)


@asynccontextmanager
async def _receiver(port: int) -> AsyncIterator[_Receiver]:
    receiver, server = _Receiver(), grpc.aio.server()
    server.add_generic_rpc_handlers((receiver.handler(),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield receiver
    finally:
        await server.stop(None)


async def _rounds(cluster: _Cluster, plan: Plan) -> dict[bool, list[float]]:
    """CPU seconds for a request in each round, by whether it is traced."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(plan.rounds + 1):
        for sampled in (True, False) if number % 2 else (False, True):
            before = cluster.cpu()
            for _ in range(plan.requests):
                await cluster.variants[sampled].stream(plan.few)
            await asyncio.sleep(2 * SEND_S)  # until the spans of this group are sent, whose work is of this group, too
            if number:  # the first one warms up
                seconds[sampled].append((cluster.cpu() - before) / plan.requests)
    return seconds


async def _under_load(cluster: _Cluster, plan: Plan) -> list[float]:
    """CPU seconds for a request while `streams` have one each."""

    async def stream() -> None:
        for _ in range(plan.requests):
            await cluster.variants[False].stream(plan.tokens)

    costs = []
    for _ in range(LOADS):
        before = cluster.cpu()
        await asyncio.gather(*(stream() for _ in range(plan.streams)))
        costs.append((cluster.cpu() - before) / (plan.streams * plan.requests))
    return costs


async def _asked(cluster: _Cluster, plan: Plan) -> list[float]:
    """CPU seconds of asking all its processes for their metrics once."""
    async with AsyncClient(cluster.address) as client:
        addresses = [worker.metrics_address for worker in (await client.workers()).workers if worker.metrics_address]
    costs = []
    for _ in range(plan.rounds):
        before = cluster.cpu()
        await asyncio.gather(*(asyncio.to_thread(_ask, address) for address in addresses))
        costs.append(cluster.cpu() - before)
    return costs


def _ask(address: str) -> None:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=ASK_TIMEOUT_S) as answer:
        answer.read()


async def _spans(endpoint: str, plan: Plan) -> list[float]:
    """CPU seconds of the spans of one untraced request in its three processes, created in this one."""
    settings = Settings(model="bench", otlp_endpoint=endpoint, trace_ratio=0.0)
    header = (("traceparent", f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00"),)
    costs = []
    for _ in range(plan.rounds):
        tracing = of_process(settings, "router", "bench")
        before = process_time()
        for _ in range(AT_ONCE):
            for parts in SPANS:
                with tracing.serve("request", lambda: header, {"bench.parts": parts}) as span:
                    for number in range(parts):
                        span.phase(f"phase {number}", monotonic(), 0.001)
        costs.append((process_time() - before) / AT_ONCE)
        await asyncio.to_thread(tracing.close)
    return costs
