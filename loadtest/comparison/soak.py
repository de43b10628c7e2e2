"""Many small requests through one `tandem up`: memory must stay flat and the ledger balanced."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from loadtest.comparison.peer_servers import Peers, Tandem, started
from loadtest.harness.demo_model import DEMO, DEMO_VOCAB
from loadtest.harness.stats import Row, Section, Spread, Tick, ratios, sparkline
from tandem.async_client import AsyncClient
from tandem.cluster_results import Audit
from tandem.errors import InternalError

FLAT = 1.0  # MiB for a thousand requests


@dataclass(frozen=True)
class Plan:
    """`requests` to the demo model, `at_once`, sampled `samples` times; the first fifth warms up. Few KV blocks, so
    that all of them are touched while it does."""

    requests: int = 10_000
    at_once: int = 16
    samples: int = 50
    kv_blocks: int = 512

    @property
    def ticks(self) -> int:
        return 1 + self.samples


def run(peers: Peers, plan: Plan, tick: Tick) -> list[Section]:
    """Raises InternalError when the ledger does not balance at the end."""
    tick("starting a cluster of the demo model")
    small = {"kv_blocks": plan.kv_blocks, "max_model_len": 256, "dtype": "float32"}
    server = Tandem("pd", DEMO, **{**small, **peers.settings})
    with started([server]):
        return [asyncio.run(_soak(server, plan, tick))]


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
