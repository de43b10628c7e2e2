"""What traces and metrics cost: CPU for a token, of a cluster that has them over that of one that has not.

Both have the same load at the same time, so that what the machine does at that moment it does to both. A third one that
has none either is the control: what the method itself gets wrong. The caller says which requests are traced, as W3C's
`traceparent` does: all of them, or none; of one in ten a tenth of what lies between counts, and of its noise.

How a step batches its streams differs by more than telemetry costs, so the same is measured directly, too: the CPU of
making and sending the spans of one request, of one that is not traced, and of asking for the metrics once, each as a
share of what a request takes. The receiver of the spans keeps nothing, as its work would be another machine's.
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

from loadtest.hop import ROUTER, WORKER, Through
from loadtest.local import Local, cpu_seconds
from loadtest.stats import Row, Section, Spread, Tick, sure
from loadtest.web import free_port
from tandem.client import AsyncClient
from tandem.errors import InternalError
from tandem.settings import Settings
from tandem.tracing import of_process

OTLP = "opentelemetry.proto.collector.trace.v1.TraceService"
PREFILL = "prefill-0"
PROCESSES = (ROUTER, PREFILL, WORKER)
ASK_TIMEOUT_S = 5.0
SEND_S = 0.5  # how often spans are sent here, where the SDK's own is 5 s: a round's are sent before the next begins
SHARE = 0.1  # of requests traced, that the result is for
ASKED_S = 15.0  # from one question for metrics to the next, that the result is for
ALL, NONE, CONTROL = "every request traced", "none traced", "control: none has telemetry"
AT_ONCE = 50  # requests whose spans are sent together
SPANS = (5, 4, 3)  # beside its own, that a traced request has in the router, the decode and the prefill worker


@dataclass(frozen=True)
class Plan:
    """`rounds` of each kind, in each of which `streams` at once send `requests` each to both clusters, one after
    another. What is measured directly is measured so many times, too."""

    rounds: int = 60
    streams: int = 8
    requests: int = 3
    prompt: int = 64
    tokens: int = 64

    @property
    def ticks(self) -> int:
        return 2


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
    """One router, one prefill and one decode worker, and the channels to it."""

    def __init__(self, local: Local, vocab: int, prompt: int) -> None:
        address = local.address(ROUTER)
        self.address = address
        self.ways = {sampled: _Traced(address, vocab, prompt, sampled) for sampled in (False, True)}
        self._pids = [local.pid(process) for process in PROCESSES]

    def cpu(self) -> float:
        return sum(map(cpu_seconds, self._pids))

    async def close(self) -> None:
        for way in self.ways.values():
            await way.channel.close()


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
    tick("starting three clusters")
    port = free_port()
    about = {"otlp_endpoint": f"http://127.0.0.1:{port}", "trace_ratio": 0.0, "metrics_port": 0}
    shared = {"model": model, "kv_blocks": 512}
    often = {"OTEL_BSP_SCHEDULE_DELAY": f"{SEND_S * 1e3:.0f}"}  # ms
    with Local(**shared) as off, Local(**shared) as other, Local(**shared, **about) as on:
        sides = (on, off, other)
        for local in sides:
            local.launch("router", ROUTER, environment=often)
            local.launch("prefill", PREFILL, environment=often)
            local.launch("decode", WORKER, environment=often)
        async with _receiver(port) as receiver:  # not before: gRPC and a fork do not go together
            for local in sides:
                await asyncio.to_thread(local.wait_seen, ROUTER, 2)
            tick(f"{plan.rounds} rounds of each")
            clusters = [_Cluster(local, vocab, plan.prompt) for local in sides]
            try:
                rounds = await _rounds(clusters[0], clusters[1], clusters[2], plan)
                asked = await _asked(clusters[0], plan)
                came = [receiver.bytes]
                spans = {}
                for sampled in (True, False):
                    spans[sampled] = await _spans(f"http://127.0.0.1:{port}", sampled, plan)
                    came.append(receiver.bytes)
            finally:
                for cluster in clusters:
                    await cluster.close()
    if not 0 < came[0] < came[1] == came[2]:
        raise InternalError(f"{came} bytes of spans came: of the cluster's, made here, and of those that nobody traces")
    cost = {name: [with_ / without for with_, without in pairs] for name, pairs in rounds.items()}
    request_s = plan.tokens * _spread(rounds[NONE], 1)[0].median
    busy_s = ASKED_S * len(os.sched_getaffinity(0))
    direct = {
        f"{ALL}: the spans alone": (spans[True], request_s),
        f"{NONE}: the spans alone": (spans[False], request_s),
        f"metrics asked for every {ASKED_S:.0f} s, of cores that are busy": (asked, busy_s),
    }
    rows = [
        *(
            Row(f"{name} / without", Spread.of(cost[name]), {"with": _spread(pairs, 0), "without": _spread(pairs, 1)})
            for name, pairs in rounds.items()
        ),
        *(
            Row(name, Spread.of([1 + one / whole for one in seconds]), {"CPU": (Spread.of(seconds), "s")})
            for name, (seconds, whole) in direct.items()
        ),
    ]
    traced, untraced, questions = (row.ratio.median - 1 for row in rows[len(rounds) :])
    notes = [
        f"with {SHARE:.0%} of the requests traced: {SHARE * traced + (1 - SHARE) * untraced + questions:+.2%} by what"
        f" was measured directly; {_difference(cost)} by the clusters",
        *(
            f"{name}: 95 % interval of the median {low:.4f} to {high:.4f}"
            for name in cost
            for low, high in [sure(cost[name])]
        ),
        f"{came[0]} bytes of spans came over OTLP",
        f"the demo model, prefill/decode, {plan.streams} streams of {plan.prompt} tokens in and {plan.tokens} out to"
        " either cluster; CPU of router, prefill and decode worker",
    ]
    return Section("What telemetry costs", "CPU for a token, with / without", rows, notes)


def _spread(pairs: list[tuple[float, float]], which: int) -> tuple[Spread, str]:
    return Spread.of([pair[which] for pair in pairs]), "s"


def _difference(cost: dict[str, list[float]]) -> str:
    """For `SHARE` of the requests traced. The errors are independent."""
    share = {NONE: 1 - SHARE, ALL: SHARE}
    middle = sum(part * (Spread.of(cost[name]).median - 1) for name, part in share.items())
    error = sum((part * (high - low) / 2) ** 2 for name, part in share.items() for low, high in [sure(cost[name])])
    return f"{middle:+.2%}, give or take {error**0.5:.2%} (95 %),"


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


async def _rounds(on: _Cluster, off: _Cluster, other: _Cluster, plan: Plan) -> dict[str, list[tuple[float, float]]]:
    """CPU seconds for a token of the one and of `off`, by what the one is."""
    kinds = {ALL: (on, True), NONE: (on, False), CONTROL: (other, False)}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in kinds}
    for number in range(plan.rounds + 1):
        for name, (cluster, sampled) in tuple(kinds.items())[:: 1 if number % 2 else -1]:
            pair = await _round(cluster, sampled, off, plan)
            if number:  # the first one warms up
                found[name].append(pair)
    return found


async def _round(one: _Cluster, sampled: bool, off: _Cluster, plan: Plan) -> tuple[float, float]:
    async def stream(way: Through) -> None:
        for _ in range(plan.requests):
            await way.stream(plan.tokens)

    clusters = (one, off)
    before = [cluster.cpu() for cluster in clusters]
    ways = (one.ways[sampled], off.ways[sampled])  # what the caller says is read by one of them only
    await asyncio.gather(*(stream(way) for _ in range(plan.streams) for way in ways))
    await asyncio.sleep(2 * SEND_S)  # until the spans of this round are sent, whose work is of this round, too
    tokens = plan.streams * plan.requests * plan.tokens
    first, second = ((cluster.cpu() - used) / tokens for cluster, used in zip(clusters, before, strict=True))
    return first, second


async def _asked(cluster: _Cluster, plan: Plan) -> list[float]:
    """CPU seconds of asking all its processes for their metrics once."""
    async with AsyncClient(cluster.address) as client:
        addresses = [worker.metrics_address for worker in (await client.workers()).workers if worker.metrics_address]
    found = []
    for _ in range(plan.rounds):
        before = cluster.cpu()
        await asyncio.gather(*(asyncio.to_thread(_ask, address) for address in addresses))
        found.append(cluster.cpu() - before)
    return found


def _ask(address: str) -> None:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=ASK_TIMEOUT_S) as answer:
        answer.read()


async def _spans(endpoint: str, sampled: bool, plan: Plan) -> list[float]:
    """CPU seconds of the spans of one request in its three processes, made and sent from this one, and received here,
    which is counted, too."""
    settings = Settings(model="bench", otlp_endpoint=endpoint, trace_ratio=0.0)
    header = (("traceparent", f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{sampled:02x}"),)
    found = []
    for _ in range(plan.rounds):
        tracing = of_process(settings, "router", "bench")
        before = process_time()
        for _ in range(AT_ONCE):
            for parts in SPANS:
                with tracing.serve("request", lambda: header, {"bench.parts": parts}) as span:
                    for number in range(parts):
                        span.phase(f"phase {number}", monotonic(), 0.001)
        await asyncio.to_thread(tracing.close)  # sends them
        found.append((process_time() - before) / AT_ONCE)
    return found
