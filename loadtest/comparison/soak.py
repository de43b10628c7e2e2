"""Many small requests through one `tandem up`: memory must stay flat and the ledger balanced. Also measures the part of
a transfer that a client waits for."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import psutil

from loadtest.comparison.peer_servers import Peers, Tandem, started
from loadtest.harness.demo_model import DEMO, DEMO_VOCAB
from loadtest.harness.stats import Row, Section, Spread, Tick, ratios, sparkline
from tandem.async_client import AsyncClient
from tandem.cluster_results import Audit
from tandem.errors import InternalError
from tandem.results import Receipt

SHAPE, VOCAB = "SmolLM2-135M", 49152
FLAT = 1.0  # MiB for a thousand requests


@dataclass(frozen=True)
class Plan:
    """`requests` to the demo model, `at_once`, sampled `samples` times; the first fifth warms up. Few KV blocks, so
    that all of them are touched while it does. `prompts` and `repeats` are for the exposed transfer."""

    requests: int = 10_000
    at_once: int = 16
    samples: int = 50
    kv_blocks: int = 512
    prompts: tuple[int, ...] = (512, 2048)
    repeats: int = 9

    @property
    def ticks(self) -> int:
        return 1 + self.samples

    @property
    def exposed_ticks(self) -> int:
        return 1 + len(self.prompts)


# ---- memory


def run(peers: Peers, plan: Plan, tick: Tick) -> Section:
    """Raises InternalError when the ledger does not balance at the end."""
    tick("starting a cluster of the demo model")
    small = {"kv_blocks": plan.kv_blocks, "max_model_len": 256, "dtype": "float32"}
    server = Tandem("pd", DEMO, **{**small, **peers.settings})
    with started([server]):
        return asyncio.run(_soak(server, plan, tick))


async def _soak(server: Tandem, plan: Plan, tick: Tick) -> Section:
    watched = _named(server)
    rss: dict[str, list[float]] = {name: [] for name in watched}
    sent: list[int] = []
    async with AsyncClient(server.target) as client:
        for sample in range(plan.samples):
            tick(f"{plan.requests * sample // plan.samples} of {plan.requests} requests")
            count = plan.requests * (sample + 1) // plan.samples - plan.requests * sample // plan.samples
            await _requests(client, count, plan.at_once)
            sent.append(sum([*sent[-1:], count]))
            for name, process in watched.items():
                rss[name].append(process.memory_info().rss / 2**20)
        audit = await _balanced(client)
    if not audit.balanced:
        raise InternalError(f"the ledger does not balance after {plan.requests} requests: {audit.to_dict()}")
    first = len(sent) // 5
    rows, notes = [], []
    for name, values in rss.items():
        growth = slope(sent[first:], values[first:])
        end = Spread.of(values[-max(1, first) :])
        rows.append(
            Row(
                f"{name}: {'flat' if abs(growth) <= FLAT else 'NOT FLAT'}, {growth:+.2f} MiB per 1,000 requests",
                ratios([end.median], [Spread.of(values[first : 2 * first + 1]).median]),
                {"MiB at the end": (end, "1"), "MiB at the start": (Spread.of(values[:1]), "1")},
            )
        )
        notes.append(f"{sparkline(values)}  {name}")
    blocks = sum(ledger.total for ledger in audit.ledgers)
    notes.append(f"tandem audit at the end: balanced, {blocks} blocks of {len(audit.ledgers)} workers")
    read = f"resident memory at the end / after warm-up; flat: at most {FLAT:g} MiB per 1,000 requests after warm-up"
    title = f"Soak: {plan.requests} requests, {plan.at_once} at once"
    return Section(title, read, rows, notes, {"requests": sent, "rss_mib": rss})


def _named(server: Tandem) -> dict[str, psutil.Process]:
    """The workers and the router by their names, other processes by program and pid."""
    names = {pid: name for name, pid in server.workers().items()}
    processes = {}
    for process in server.processes():
        name = names.get(process.pid) or f"{process.name()}-{process.pid}"
        processes[name] = process
    return dict(sorted(processes.items(), key=lambda item: item[1].pid not in names))


async def _requests(client: AsyncClient, count: int, at_once: int) -> None:
    places = asyncio.Semaphore(at_once)

    async def client_loop() -> None:
        async with places:
            prompt = random.choices(range(DEMO_VOCAB), k=random.randrange(1, 64))
            answer = await client.generate(prompt, max_tokens=random.randrange(1, 17), ignore_eos=True)
            assert answer.receipt.completion_tokens == len(answer.token_ids)

    await asyncio.gather(*(client_loop() for _ in range(count)))


async def _balanced(client: AsyncClient) -> Audit:
    """The audit; asked again for a moment, because a request may end between the looks at two workers."""
    for _ in range(20):
        audit = await client.audit()
        if audit.balanced and not any(ledger.held for ledger in audit.ledgers):
            break
        await asyncio.sleep(0.25)
    return audit


def slope(requests: Sequence[float], mib: Sequence[float]) -> float:
    """MiB per 1,000 requests, least squares; 0 for less than two samples."""
    return statistics.linear_regression(requests, mib).slope * 1000 if len(requests) > 1 else 0.0


# ---- exposed transfer


def run_exposed(peers: Peers, plan: Plan, tick: Tick) -> Section:
    """Raises InternalError when a prompt took another path."""
    tick(f"starting tandem-pd with {SHAPE}")
    server = Tandem("pd", peers.checkpoint(SHAPE), **{"local_prefill": "never", **peers.settings})
    with started([server]):
        return asyncio.run(_exposed(server, plan, tick))


async def _exposed(server: Tandem, plan: Plan, tick: Tick) -> Section:
    rows = []
    async with AsyncClient(server.target) as client:
        await _ask(client, max(plan.prompts))  # warms up
        for length in plan.prompts:
            tick(f"{plan.repeats} prompts of {length} tokens")
            rows += _shares(length, [await _ask(client, length) for _ in range(plan.repeats)])
    read = "share of the time to first token. receipt: first token's arrival to the commit of the last block"
    notes = [
        "client: the interval from the first token to the second, less the median of the following ones: what a reader"
        " waits longer for the second token than for any other, so also the way from commit to the next step",
        "promised: at most 0.05; idle cluster, one core each, every prompt on the prefill worker",
    ]
    return Section("Exposed transfer", read, rows, notes)


async def _ask(client: AsyncClient, length: int) -> tuple[Receipt, float]:
    """The receipt, and by how much the second token came later than the following ones did, in seconds."""
    at: list[float] = []
    receipt = None
    clock = asyncio.get_running_loop().time
    async for piece in client.stream(random.choices(range(VOCAB), k=length), max_tokens=16, ignore_eos=True):
        at += [clock()] * len(piece.token_ids)
        receipt = piece.receipt or receipt
    assert receipt is not None
    if receipt.path != "disaggregated" or receipt.transfer is None or receipt.cached_tokens:
        raise InternalError(f"the prompt of {length} tokens went another way: {receipt.to_dict()}")
    gaps = [b - a for a, b in pairwise(at)]
    return receipt, max(0.0, gaps[0] - statistics.median(gaps[1:]))


def _shares(length: int, asked: Sequence[tuple[Receipt, float]]) -> list[Row]:
    ttft = [receipt.ttft for receipt, _ in asked]
    reported: Callable[[Receipt], float] = lambda receipt: receipt.transfer.exposed if receipt.transfer else 0.0  # noqa: E731
    sides = {"receipt": [reported(receipt) for receipt, _ in asked], "client": [late for _, late in asked]}
    return [
        Row(
            f"{length} tokens, {name}",
            ratios(exposed, ttft),
            {"exposed": (Spread.of(exposed), "s"), "TTFT": (Spread.of(ttft), "s")},
        )
        for name, exposed in sides.items()
    ]
