"""What traces and metrics cost: two clusters with the same load in turn, one with telemetry and one without.

Telemetry is what a cluster would have: spans of one request in ten, sent over OTLP, and metrics that are asked for.
The receiver of the spans keeps nothing, as its work would be another machine's.
"""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import grpc

from loadtest.hop import ROUTER, WORKER, Through
from loadtest.local import Local, cpu_seconds
from loadtest.stats import Row, Section, Spread, Tick, ratios
from loadtest.web import free_port
from tandem.client import AsyncClient
from tandem.errors import InternalError

OTLP = "opentelemetry.proto.collector.trace.v1.TraceService"
PREFILL = "prefill-0"
PROCESSES = (ROUTER, PREFILL, WORKER)
SCRAPE_TIMEOUT_S = 5.0
EXPORT_S = 20.0  # spans are sent every five seconds


@dataclass(frozen=True)
class Plan:
    """`rounds` of each side, in each of which `streams` at once send `requests` each, one after another."""

    rounds: int = 30
    streams: int = 16
    requests: int = 4
    prompt: int = 64
    tokens: int = 64
    share: float = 0.1  # of requests that are traced

    @property
    def ticks(self) -> int:
        return 2


class _Receiver:
    """Takes what is exported and reads none of it."""

    def __init__(self) -> None:
        self.bytes = 0
        self.came = asyncio.Event()

    def handler(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(OTLP, {"Export": grpc.unary_unary_rpc_method_handler(self._export)})

    async def _export(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        self.bytes += len(request)
        self.came.set()
        return b""


@dataclass(frozen=True)
class _Round:
    tokens_s: float
    cpu: float  # seconds for a token, of all processes


def run(model: Path, vocab: int, plan: Plan, tick: Tick) -> Section:
    """`model` is a checkpoint folder, `vocab` the token ids that its tokenizer knows. Raises InternalError when the
    spans of the traced requests did not come, so that nothing would have been measured."""
    return asyncio.run(_run(model, vocab, plan, tick))


async def _run(model: Path, vocab: int, plan: Plan, tick: Tick) -> Section:
    tick("starting two clusters")
    port = free_port()
    about = {"otlp_endpoint": f"http://127.0.0.1:{port}", "trace_ratio": plan.share, "metrics_port": 0}
    shared = {"model": model, "kv_blocks": 1024}
    with Local(**shared) as off, Local(**shared, **about) as on:
        sides = {"with": on, "without": off}
        for local in sides.values():
            local.launch("router", ROUTER)
            local.launch("prefill", PREFILL)
            local.launch("decode", WORKER)
        async with _receiver(port) as receiver:  # not before: gRPC and a fork do not go together
            for local in sides.values():
                await asyncio.to_thread(local.wait_seen, ROUTER, 2)
            tick(f"{plan.rounds} rounds each")
            found = await _rounds(sides, vocab, plan)
            try:
                async with asyncio.timeout(EXPORT_S):
                    await receiver.came.wait()
            except TimeoutError as error:
                raise InternalError("no span came to the receiver: the telemetry was not on") from error
    rows = [
        Row(
            f"tokens a second, {plan.streams} streams",
            ratios([one.tokens_s for one in found["with"]], [one.tokens_s for one in found["without"]]),
            {name: (Spread.of([one.tokens_s for one in rounds]), "1") for name, rounds in found.items()},
        ),
        Row(
            "CPU for a token, router, prefill and decode worker",
            ratios([one.cpu for one in found["with"]], [one.cpu for one in found["without"]]),
            {name: (Spread.of([one.cpu for one in rounds]), "s") for name, rounds in found.items()},
        ),
    ]
    notes = [
        f"{plan.share:.0%} of the requests traced over OTLP ({receiver.bytes} bytes of spans came), metrics asked for",
        f"the demo model, prefill/decode, {plan.prompt} tokens in and {plan.tokens} out; all processes share the cores",
    ]
    return Section("What telemetry costs", "with / without", rows, notes)


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


async def _rounds(sides: dict[str, Local], vocab: int, plan: Plan) -> dict[str, list[_Round]]:
    found: dict[str, list[_Round]] = {name: [] for name in sides}
    through = {name: Through(local.address(ROUTER), vocab, plan.prompt) for name, local in sides.items()}
    async with AsyncClient(sides["with"].address(ROUTER)) as client:
        scraped = [worker.metrics_address for worker in (await client.workers()).workers if worker.metrics_address]
    try:
        for number in range(plan.rounds + 1):
            for name, local in tuple(sides.items())[:: 1 if number % 2 else -1]:
                asked = scraped if name == "with" else []
                one = await _round(through[name], [local.pid(process) for process in PROCESSES], asked, plan)
                if number:  # the first one warms up
                    found[name].append(one)
    finally:
        for side in through.values():
            await side.channel.close()
    return found


async def _round(through: Through, pids: list[int], scraped: list[str], plan: Plan) -> _Round:
    async def stream() -> None:
        for _ in range(plan.requests):
            await through.stream(plan.tokens)

    before, began = sum(map(cpu_seconds, pids)), perf_counter()
    await asyncio.gather(
        *(stream() for _ in range(plan.streams)), *(asyncio.to_thread(_scrape, address) for address in scraped)
    )
    tokens = plan.streams * plan.requests * plan.tokens
    return _Round(tokens / (perf_counter() - began), (sum(map(cpu_seconds, pids)) - before) / tokens)


def _scrape(address: str) -> None:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=SCRAPE_TIMEOUT_S) as answer:
        answer.read()
