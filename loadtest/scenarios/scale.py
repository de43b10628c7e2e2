"""Cost of a router of a large cluster: placing, refreshing its view, and a long queue.

One process, no network: generated records of `--workers` prefill and as many decode workers, a registry that returns
them, and workers that answer at once. Prints a table with the wanted values and exits with 1 if a value is missed. The
longest blocking is the longest time between two turns of the event loop, on which the tokens of all streams are
relayed. All times are CPU seconds of this thread, so they do not depend on other processes.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import thread_time
from typing import Annotated, Any

import typer

from cluster.state.registry import RECORDS_PER_SLICE, RecordReader, RegistryChanges, State, WorkerRecord
from engine.core import block_hash
from loadtest.harness.options import Quick
from loadtest.harness.stats import percentile
from services.launch import short_collections
from services.router.routing.placement import Placement, RoutingConfig, WorkerSnapshot
from services.router.routing.prefix_index import PrefixIndex, Prompt
from services.router.routing.request_scheduler import RequestScheduler
from services.router.routing.waiting_request import WaitingRequest
from services.worker_liveness import WorkerLiveness
from tandem.settings import RESERVED_OUTPUT_TOKENS
from tandem.tasks import end
from tandem.v1 import worker_pb2

BLOCK = 16
PLACES, BLOCKS = 16, 8192  # of a worker
SYSTEM = list(range(1, 513))  # the beginning that all workers have cached
CONVERSATIONS = 2000  # each cached at one worker of either role
TENANTS = 50
LONG_S = 1e6
LIMIT_S = 0.005  # of blocking the loop
MS = 1e3


@dataclass(frozen=True)
class Row:
    name: str
    value: float
    wanted: float

    @property
    def missed(self) -> bool:
        return self.value > self.wanted


class MadeUp:
    """A registry whose workers are all alive and always a little different."""

    def __init__(self, each: int) -> None:
        self._random = random.Random(1)
        self._beat = 0.0
        self._number = 0  # of the latest answer
        self._reader = RecordReader()
        self._changed: dict[str, bytes] = {}  # since then, as the registry keeps them
        self._records = [self._record(role, number) for role in ("decode", "prefill") for number in range(each)]

    def _record(self, role: str, number: int) -> WorkerRecord:
        return WorkerRecord(
            worker_id=f"{role}-{number}",
            role=role,
            state=State.READY,
            pid=number,
            incarnation=f"life-{number}",
            address=f"10.0.{number // 250}.{number % 250}:7000",
            max_model_len=32768,
            vocab_size=32000,
            block_size=BLOCK,
            max_running=PLACES,
            blocks_total=BLOCKS,
            step_s=0.02,
            stream_s=0.0005,
            prompt_rate=8000.0,
        )

    @property
    def records(self) -> list[WorkerRecord]:
        return self._records

    @records.setter
    def records(self, records: list[WorkerRecord]) -> None:
        for before, after in zip(self._records, records, strict=True):
            if after is not before:
                self._changed[after.worker_id] = b"a 0.0 " + after.text().encode()
        self._records = records

    async def changes_since(self, mark: tuple[str, int]) -> RegistryChanges:
        """As the registry's answer, which is read on the event loop as well."""
        self._number += 1
        changed, self._changed = self._changed, {}
        answer = ("made up", self._number)
        if mark != ("made up", self._number - 1):
            return RegistryChanges(answer, True, {record.worker_id: record for record in self._records})
        read: dict[str, WorkerRecord | None] = {}
        for number, (name, value) in enumerate(changed.items()):
            read[name] = self._reader.read(name.encode(), value, self._beat)
            if number % RECORDS_PER_SLICE == RECORDS_PER_SLICE - 1:
                await asyncio.sleep(0)
        return RegistryChanges(answer, False, read)

    def beats(self, part: float = 1.0) -> None:
        """That share of the workers has beaten again, with other numbers."""
        self._beat += 1.0
        self.records = [
            replace(
                record, beat=self._beat, running=self._random.randrange(4), blocks_held=self._random.randrange(2000)
            )
            if self._random.random() < part
            else record
            for record in self.records
        ]


class Blocking:
    """The longest time between two turns of the loop while the block runs."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    async def __aenter__(self) -> Blocking:
        self._task = asyncio.create_task(self._watch())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *about: object) -> None:
        await asyncio.sleep(0)
        await end(self._task)

    async def _watch(self) -> None:
        before = thread_time()
        while True:
            await asyncio.sleep(0)
            now = thread_time()
            self.longest_s = max(self.longest_s, now - before)
            before = now


@dataclass
class Bench:
    registry: MadeUp
    view: WorkerLiveness
    scheduler: RequestScheduler
    prefixes: PrefixIndex
    prompts: list[Prompt]

    def asked(self, number: int, timeout_s: float = LONG_S) -> Any:
        prompt = self.prompts[number % len(self.prompts)]
        waiting = WaitingRequest(
            len(prompt),
            f"tenant-{number % TENANTS}",
            ahead=RESERVED_OUTPUT_TOKENS,
            cached=functools.partial(self.prefixes.cached, prompt),
            holders=functools.partial(self.prefixes.holders, prompt),
        )
        return self.scheduler.placed(waiting, timeout_s)


def pairs(decode: int, prefill: int) -> Placement:
    """What the account of a request needs of its placement."""
    some = WorkerSnapshot("", "", "", "L", 0, PLACES, BLOCKS, BLOCK, 32768)
    return Placement(replace(some, worker_id=f"decode-{decode}"), replace(some, worker_id=f"prefill-{prefill}"))


async def prepared(workers: int) -> Bench:
    registry = MadeUp(workers)
    view: Any = WorkerLiveness(registry, LONG_S)  # type: ignore[arg-type]
    await view.refresh()
    scheduler, unused = RequestScheduler(view, LONG_S, RoutingConfig()), Any
    await scheduler.keep_up()  # as a router does from its start
    prefixes, some = PrefixIndex(view, unused), random.Random(2)  # type: ignore[arg-type]
    prompts = [
        Prompt([*SYSTEM, *(some.randrange(32000) for _ in range(some.choice((64, 300, 3000))))], b"", "")
        for _ in range(CONVERSATIONS)
    ]
    messages: dict[str, list[bytes]] = {record.worker_id: [] for record in registry.records}
    system = block_hash.chain(SYSTEM, BLOCK, b"")
    for number, prompt in enumerate(prompts):
        for role in ("decode", "prefill"):
            messages[f"{role}-{number % workers}"] += prompt.chain(BLOCK, b"")
    for record in registry.records:
        fill(prefixes, record, [*system, *messages[record.worker_id]])
    for decode in range(workers):
        for prefill in range(workers):
            scheduler.observe_path(pairs(decode, prefill), (0.004, 8, 0.003))
    return Bench(registry, view, scheduler, prefixes, prompts)


async def placing(bench: Bench, requests: int, at_once: int) -> list[Row]:
    """Requests come, have their first token a little later, and end."""
    running: deque[tuple[Any, Any]] = deque()
    placing_s, ending_s = [], []
    async with Blocking() as blocking:
        for number in range(requests):
            request = bench.asked(number)
            before = thread_time()
            placement = await request.__aenter__()
            placing_s.append(thread_time() - before)
            running.append((request, placement))
            learnt(bench.scheduler, placement)
            if len(running) > at_once // 4:
                bench.scheduler.prefilled(running[-at_once // 4][1])
            if len(running) > at_once:
                before = thread_time()
                await running.popleft()[0].__aexit__(None, None, None)
                ending_s.append(thread_time() - before)
            await asyncio.sleep(0)
    for request, _ in running:
        await request.__aexit__(None, None, None)
    return [
        Row("placing a request, p50, ms", MS * percentile(placing_s, 0.5), 1.0),
        Row("placing a request, p99, ms", MS * percentile(placing_s, 0.99), 1.0),
        Row("end of a request, p99, ms", MS * percentile(ending_s, 0.99), 1.0),
        Row("longest blocking while placing, ms", MS * blocking.longest_s, MS * LIMIT_S),
    ]


def fill(prefixes: PrefixIndex, record: WorkerRecord, hashes: Sequence[bytes]) -> None:
    """The worker has reported these blocks."""
    message = worker_pb2.WatchCacheResponse(sequence=0, incarnation=record.incarnation, added=b"".join(hashes))
    for _ in prefixes.index.take(record, message):
        pass


async def refreshed(bench: Bench) -> float:
    """Seconds of CPU until all have taken over what is new."""
    before = thread_time()
    await bench.view.refresh(changes_only=True)
    await bench.scheduler.keep_up()
    return thread_time() - before


def learnt(scheduler: RequestScheduler, placement: Any) -> None:
    """From a request that took this way."""
    scheduler.observe_path(placement, (0.004, 8, 0.003) if placement.prefill else (0.002, 0, 0.0))


async def refreshing(bench: Bench, rounds: int) -> list[Row]:
    """All workers have beaten again, or one in a hundred."""
    rows = []
    for name, part, wanted in (("all workers", 1.0, 10.0), ("one worker in 100", 0.01, 2.0)):
        used_s, longest_s = [], 0.0
        for _ in range(rounds):
            bench.registry.beats(part)
            async with Blocking() as blocking:
                spent = await refreshed(bench)
            used_s.append(spent)
            longest_s = max(longest_s, blocking.longest_s)
        rows.append(Row(f"refresh, {name} new, ms of CPU", MS * percentile(used_s, 0.5), wanted))
        rows.append(Row(f"longest blocking at a refresh, {name}, ms", MS * longest_s, MS * LIMIT_S))
    return rows


async def waiting(bench: Bench, count: int) -> list[Row]:
    """All places are taken; requests arrive, and some leave again. Then places come free."""
    full = [replace(record, running=PLACES) for record in bench.registry.records]
    bench.registry.records = [
        record if number % 100 else replace(record, running=0) for number, record in enumerate(full)
    ]
    await refreshed(bench)
    running, tasks, queueing_s, leaving_s = [], [], [], []
    places = sum(record.running == 0 and record.role == "decode" for record in bench.registry.records) * PLACES
    for number in range(places):
        request = bench.asked(number)
        running.append((request, await request.__aenter__()))
        bench.scheduler.prefilled(running[-1][1])

    async def place_one(number: int) -> None:
        async with bench.asked(number):
            pass

    async with Blocking() as blocking:
        began = thread_time()
        for number in range(count):
            before = thread_time()
            tasks.append(asyncio.create_task(place_one(number)))
            await asyncio.sleep(0)
            queueing_s.append(thread_time() - before)
        all_s = thread_time() - began
        assert bench.scheduler.waiting() == count
        for task in tasks[: count // 10]:
            before = thread_time()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            leaving_s.append(thread_time() - before)
        began = thread_time()
        for request, _ in running:
            await request.__aexit__(None, None, None)
            await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)
        drained_s = thread_time() - began
    assert bench.scheduler.waiting() == 0
    late = queueing_s[-count // 10 :]
    return [
        Row(f"enqueueing {count} that wait, s", all_s, count * 0.0005),
        Row(f"enqueueing the {count}th, p50, ms", MS * percentile(late, 0.5), 1.0),
        Row("leaving the queue, p99, ms", MS * percentile(leaving_s, 0.99), 1.0),
        Row("placing and ending all of them, ms each", MS * drained_s / count, 2.0),
        Row("longest blocking with a queue, ms", MS * blocking.longest_s, MS * LIMIT_S),
    ]


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'':52}{'measured':>10}{'wanted':>10}"]
    for row in rows:
        lines.append(f"{row.name:52}{row.value:>10.2f}{row.wanted:>10.2f}{'  missed' if row.missed else ''}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Sizes:
    workers: Annotated[int, typer.Option(metavar="N", min=1, help="Of each role.")] = 500
    waiting: Annotated[int, typer.Option(metavar="N", min=1, help="Requests that wait.")] = 5000
    requests: Annotated[int, typer.Option(metavar="N", min=1, help="Requests that are placed.")] = 3000
    rounds: Annotated[int, typer.Option(metavar="N", min=1, help="Refreshes of the view.")] = 10


QUICK = Sizes(workers=20, waiting=50, requests=100, rounds=2)


async def measured(sizes: Sizes) -> list[Row]:
    bench = await prepared(sizes.workers)
    short_collections()
    rows = await placing(bench, sizes.requests, 2 * sizes.workers)
    rows += await refreshing(bench, sizes.rounds)
    rows += await waiting(bench, sizes.waiting)
    return rows


def main(sizes: Sizes, quick: Quick = False) -> int:
    rows = asyncio.run(measured(QUICK if quick else sizes))
    print(table(rows))
    return int(any(row.missed for row in rows))
