"""What traces and metrics cost, from two differences that noise hides less than it would hide the sum.

- All requests traced against none, in turn, in the same processes: the caller says which, as W3C's `traceparent` does.
  Of one request in ten it is a tenth, and so is what noise adds to it.
- None traced, and metrics asked for, against another cluster that has no telemetry.

The receiver of the spans keeps nothing, as its work would be another machine's.
"""

from __future__ import annotations

import asyncio
import secrets
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import grpc

from loadtest.hop import ROUTER, WORKER, Through
from loadtest.local import Local, cpu_seconds
from loadtest.stats import Row, Section, Spread, Tick, ratios, sure
from loadtest.web import free_port
from tandem.client import AsyncClient
from tandem.errors import InternalError

OTLP = "opentelemetry.proto.collector.trace.v1.TraceService"
PREFILL = "prefill-0"
PROCESSES = (ROUTER, PREFILL, WORKER)
SCRAPE_TIMEOUT_S = 5.0
EXPORT_S = 20.0
SEND_S = 0.5  # how often spans are sent here, where the SDK's own is 5 s: a round's are sent before the next begins
SHARE = 0.1  # of requests traced, that the result is for


@dataclass(frozen=True)
class Plan:
    """`rounds` of each kind, in each of which `streams` at once send `requests` each, one after another."""

    rounds: int = 80
    streams: int = 16
    requests: int = 2
    prompt: int = 64
    tokens: int = 64

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
    about = {"otlp_endpoint": f"http://127.0.0.1:{port}", "trace_ratio": 0.0, "metrics_port": 0}
    shared = {"model": model, "kv_blocks": 1024}
    often = {"OTEL_BSP_SCHEDULE_DELAY": f"{SEND_S * 1e3:.0f}"}  # ms
    with Local(**shared) as off, Local(**shared, **about) as on:
        for local in (on, off):
            local.launch("router", ROUTER, environment=often)
            local.launch("prefill", PREFILL, environment=often)
            local.launch("decode", WORKER, environment=often)
        async with _receiver(port) as receiver:  # not before: gRPC and a fork do not go together
            for local in (on, off):
                await asyncio.to_thread(local.wait_seen, ROUTER, 2)
            tick(f"{plan.rounds} rounds of each")
            found = await _rounds(on, off, vocab, plan)
            try:
                async with asyncio.timeout(EXPORT_S):
                    await receiver.came.wait()
            except TimeoutError as error:
                raise InternalError("no span came to the receiver: the telemetry was not on") from error
    rows, cost = [], {}
    for one, other in (("all traced", "none traced"), ("none traced", "without")):
        rounds = {name: found[name] for name in (one, other)}
        cost[one] = [a.cpu / b.cpu for a, b in zip(*rounds.values(), strict=True)]
        cpu = {name: (Spread.of([each.cpu for each in of]), "s") for name, of in rounds.items()}
        rates = [[each.tokens_s for each in of] for of in rounds.values()]
        beside = {name: (Spread.of(of), "1") for name, of in zip(rounds, rates, strict=True)}
        rows += [
            Row(f"CPU for a token, {one} / {other}", Spread.of(cost[one]), cpu),
            Row(f"tokens a second, {one} / {other}", ratios(*rates), beside),
        ]
    notes = [
        *(f"{name}: 95 % interval of the median {_interval(*sure(values))}" for name, values in cost.items()),
        _together(cost["all traced"], cost["none traced"]),
        f"{receiver.bytes} bytes of spans came over OTLP, of {plan.streams * plan.requests * plan.rounds} requests; "
        "metrics were asked for in each round of the cluster that has them",
        f"the demo model, prefill/decode, {plan.streams} streams of {plan.prompt} tokens in and {plan.tokens} out; CPU "
        "of router, prefill and decode worker, all of which share the cores",
    ]
    return Section("What telemetry costs", "see each row", rows, notes)


def _together(traced: list[float], rest: list[float]) -> str:
    """The two differences as one, for `SHARE` of the requests traced. Their errors are independent."""
    middle = SHARE * (Spread.of(traced).median - 1) + Spread.of(rest).median - 1
    (low, high), (least, most) = sure(traced), sure(rest)
    error = ((SHARE * (high - low) / 2) ** 2 + ((most - least) / 2) ** 2) ** 0.5
    return f"with {SHARE:.0%} of the requests traced: {middle:+.2%} CPU for a token, give or take {error:.2%} (95 %)"


def _interval(low: float, high: float) -> str:
    return f"{low:.4f} to {high:.4f}"


class _Traced(Through):
    """Whose caller has decided whether it is traced."""

    def __init__(self, address: str, vocab: int, prompt: int, sampled: bool) -> None:
        super().__init__(address, vocab, prompt)
        self._flags = f"{sampled:02x}"

    def headers(self) -> tuple[tuple[str, str], ...]:
        return (("traceparent", f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{self._flags}"),)


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


async def _rounds(on: Local, off: Local, vocab: int, plan: Plan) -> dict[str, list[_Round]]:
    kinds = {"all traced": (on, True), "none traced": (on, False), "without": (off, False)}
    found: dict[str, list[_Round]] = {name: [] for name in kinds}
    through = {
        name: _Traced(local.address(ROUTER), vocab, plan.prompt, sampled) for name, (local, sampled) in kinds.items()
    }
    async with AsyncClient(on.address(ROUTER)) as client:
        scraped = [worker.metrics_address for worker in (await client.workers()).workers if worker.metrics_address]
    try:
        for number in range(plan.rounds + 1):
            for name, (local, _) in tuple(kinds.items())[:: 1 if number % 2 else -1]:
                pids = [local.pid(process) for process in PROCESSES]
                one = await _round(through[name], pids, scraped if local is on else [], plan)
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
    seconds, tokens = perf_counter() - began, plan.streams * plan.requests * plan.tokens
    await asyncio.sleep(2 * SEND_S)  # until the spans of this round are sent, whose work is of this round, too
    return _Round(tokens / seconds, (sum(map(cpu_seconds, pids)) - before) / tokens)


def _scrape(address: str) -> None:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=SCRAPE_TIMEOUT_S) as answer:
        answer.read()
