"""Random faults under load: no answer may differ by a token.

Starts `tandem up` with two routers, two prefill and two decode workers of the demo model, with so few KV blocks that
streams are preempted. A book of requests (greedy, sampled, penalties, log probabilities, grammars, stop strings, n > 1,
chats) is answered twice without faults, both times equally. Then, for `--minutes` or until `--requests-total` requests
were answered, `--at-once` clients send requests of the book, short ones more often than long ones, as streams and as
jobs, and some disconnect before the end; and about every `--every` seconds one fault strikes the cluster:

    kill             SIGKILL to a prefill or decode worker or a router
    pool             SIGKILL to all workers of a pool
    freeze           SIGSTOP to one process for up to 10 s: it may be declared dead, and come back
    hiccup           SIGSTOP to a worker for 1 to 4 s
    registry         SIGKILL to Valkey, or SIGSTOP for up to 4 s
    registry-flap    12 SIGKILLs to Valkey, each as soon as it is back
    supervisor       SIGKILL to the supervisor
    two-supervisors  another `tandem up` with the same registry and cluster name, which must be refused
    drain            one worker is drained
    scale            a pool is scaled to 1 to 3 workers
    kv-silent        the KV plane of one worker makes no progress for 5 to 25 s, while gRPC works
    kv-errors        one transfer in four fails, at the post or at completion, for 10 s
    step-fails       one step of an engine raises an error, such as out of memory
    step-hangs       one step of an engine never returns
    transport-dies   the thread that owns a NIXL agent ends or hangs
    rank             SIGKILL, or SIGSTOP for good, to a rank of a worker of several: only if asked for with --only, and
                     with --set prefill_tp=2 --set decode_tp=2
    poison           a request that kills every worker that computes it, which must end as KILLS_WORKERS

loadtest/scenarios/chaos/injector.py strikes inside workers. A fault that was not seen to strike does not count.

With `--hybrid` the model has recurrent layers (tiny, random Qwen3.5). Where a worker promises no order of sums (its
`sum_order` is "torch", as without the compiled operators), or where workers sum in several orders, as with `--set
prefill_tp=2` alone, log probabilities may differ from the book's by LOGPROB_TOLERANCE; tokens and letters never, but
where a random number falls on the border of two tokens, which counts as corrupt.

An answer with status OK must equal the book's: each token, log probability and letter of each choice. A failed one must
have one of the statuses that a lost process may cause, and what was received must be the beginning of the book's. No
job may fail, except one whose registry was killed (the embedded Valkey stores nothing on disk). INTERNAL is for poison
alone, not for requests that run together with it. Then the load goes on for `--calm`
seconds without faults, in which the workers of each pool must share it evenly again. At the end all workers are back,
the book is answered as before, the ledgers balance with nothing held, and no process is left. Exits with 1 otherwise.

The same seed gives the same requests and faults in the same order; their coincidence is left to timing.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Annotated

import psutil
import typer

from loadtest.harness.demo_model import DEMO, make_hybrid
from loadtest.harness.options import AtOnce, Json, Quick, Seed, names, positive
from loadtest.harness.processes import Process
from loadtest.harness.stats import sparkline
from loadtest.scenarios.chaos.answer_book import Answer, book, difference
from loadtest.scenarios.chaos.book_clients import answered, client_loop
from loadtest.scenarios.chaos.faults import FAULTS, OF_ALL, Faults, environment
from loadtest.scenarios.chaos.tally import Tally
from tandem.async_client import AsyncClient
from tandem.errors import InternalError, TandemError

POOLS = {"router": 2, "prefill": 2, "decode": 2}
SETTINGS: dict[str, object] = {
    "model": DEMO,
    "port": 0,
    **{f"{role}s" if role == "router" else role: count for role, count in POOLS.items()},
    "cluster_token": "of-the-chaos-run-only",
    "dtype": "float32",
    "threads": 1,
    "kv_blocks": 96,
    "max_model_len": 512,
    "max_num_seqs": 16,
    "speculation": "ngram",
    "local_prefill": "never",  # the demo's prompts are so short that hardly one would be moved otherwise
    "drain_grace_s": 5,
}
START_S = 400.0  # of the cluster
BACK_S = 120.0  # until everything is there again, at the end
SPAN_S = 10.0  # of one bar in the picture of answers
MOST_WRONG = 20  # then the run ends
# By rounding log probabilities differ by some 1e-6; a state of another sequence or position shows in the first digits.
LOGPROB_TOLERANCE = 1e-3
UNORDERED = "torch"  # a worker's `sum_order` (engine/kernels/__init__.py, which loads torch)


@contextmanager
def up(settings: dict[str, object], sockets: Path, tally: Tally) -> Iterator[tuple[Process, str, str]]:
    """`tandem up`, where its routers listen, and its registry. A process that outlives it is leaked."""
    process = Process(["loadtest.scenarios.chaos.chaos_cluster"], environment(settings, sockets))
    children: list[psutil.Process] = []
    try:
        registry = process.line("registry ", START_S)
        yield process, process.line("ready "), registry
        children = psutil.Process(process.popen.pid).children(recursive=True)
    finally:
        process.stop(BACK_S)
    left = [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    if left:
        tally.violate("leaked", f"processes are left: {left}")


@dataclass(frozen=True)
class Plan:
    minutes: Annotated[float, typer.Option(metavar="N", help="Length of the run.", callback=positive)] = 10.0
    requests_total: Annotated[int | None, typer.Option(metavar="N", help="Answered, instead of --minutes.")] = None
    seed: Seed = 1
    at_once: AtOnce = 12
    requests: Annotated[int, typer.Option(metavar="N", min=1, help="In the book.")] = 48
    every: Annotated[float, typer.Option(metavar="S", help="From one fault to the next.", callback=positive)] = 4.0
    calm: Annotated[float, typer.Option(metavar="S", help="Of load without faults at the end.")] = 30.0


class Run:
    """One chaos run against one cluster."""

    def __init__(
        self, cluster: Faults, plan: Plan, faults: Sequence[str], tally: Tally, say: Callable[[str], None]
    ) -> None:
        self._cluster, self._plan, self._faults, self._tally, self._say = cluster, plan, faults, tally, say
        self._chance = random.Random(plan.seed)
        self._requests = book(self._chance, plan.requests)
        self._references: list[Answer] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._began = 0.0

    async def run(self) -> None:
        plan, tally = self._plan, self._tally
        await self._read_book()
        duration = f"{plan.requests_total} requests" if plan.requests_total else f"{plan.minutes:g} minutes"
        self._say(f"{duration} with faults, {plan.at_once} clients")
        self._began = monotonic()
        async with AsyncExitStack() as stack:
            for number in range(plan.at_once):
                chance = random.Random(f"{plan.seed}/{number}")
                client = client_loop(self._cluster.target, self._requests, self._references, chance, tally)
                self._tasks.append(asyncio.create_task(client))
            stack.push_async_callback(_cancelled, self._tasks)
            watching = [
                asyncio.create_task(self._cluster.watch.follow()),
                asyncio.create_task(self._cluster.watch.sample()),
            ]
            stack.push_async_callback(_cancelled, watching)
            self._tasks += watching  # have no end either
            shown = 0
            while self._goes_on():
                await self._pause(self._chance.expovariate(1 / plan.every))
                outcome = await self._cluster.harm(self._faults)
                self._say(f"{outcome}  ({self._progress()})")
                for text in tally.wrong[shown:]:
                    self._say(f"wrong: {text}")
                shown = len(tally.wrong)
            await self._cluster.watch.over()
            if plan.calm:
                await self._calm()
        if len(tally.wrong) < MOST_WRONG:
            await self._check_the_end()
        self._draw()

    def _goes_on(self) -> bool:
        done, now = self._tally.outcomes.total(), monotonic()
        enough = done >= total if (total := self._plan.requests_total) else now > self._began + 60 * self._plan.minutes
        return not enough and len(self._tally.wrong) < MOST_WRONG

    def _progress(self) -> str:
        done, seconds = self._tally.outcomes.total(), monotonic() - self._began
        return f"{done} requests, {done / seconds:.0f} a second, {len(self._tally.wrong)} wrong"

    async def _read_book(self) -> None:
        self._say(f"the book: {len(self._requests)} requests, twice")
        async with AsyncClient(self._cluster.target) as client:
            orders = {worker.sum_order for worker in await client.workers() if worker.sum_order}
        tolerance = LOGPROB_TOLERANCE if UNORDERED in orders or len(orders) > 1 else 0.0
        if tolerance:
            named = ", ".join(sorted(orders))
            self._say(f"sums have no single order here ({named}): log probabilities may differ by {tolerance:g}")
        self._references = await answered(self._cluster.target, self._requests, tolerance)
        again = await answered(self._cluster.target, self._requests)
        for one, reference in zip(again, self._references, strict=True):
            if not one.same(reference):
                raise InternalError(f"the book's answers differ without a fault: {difference(one, reference)}")

    async def _pause(self, seconds: float) -> None:
        await asyncio.wait(self._tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in self._tasks:
            if task.done():
                task.result()  # raises: these tasks have no end

    async def _calm(self) -> None:
        """The load alone, since all workers are ready."""
        over = monotonic()
        self._tally.members = await ready_again(self._cluster.target, nothing_held=False)
        self._tally.calm_since = monotonic()
        self._say(f"no fault any more; all workers are ready after {monotonic() - over:.1f} s  ({self._progress()})")
        await self._pause(self._plan.calm)

    async def _check_the_end(self) -> None:
        tally, target = self._tally, self._cluster.target
        began = monotonic()
        try:
            await ready_again(target, nothing_held=True)
            self._say(f"all workers are ready, the ledgers balance, nothing is held, after {monotonic() - began:.1f} s")
        except InternalError as error:
            tally.violate("leaked", error.message)
            return
        for one, reference in zip(await answered(target, self._requests), self._references, strict=True):
            if not one.same(reference):
                tally.violate("corrupt", f"the book's answers differ after it: {difference(one, reference)}")

    def _draw(self) -> None:
        spans = [0] * (int((monotonic() - self._began) / SPAN_S) + 1)
        for ended in self._tally.ended:
            spans[int((ended - self._began) / SPAN_S)] += 1
        self._say(f"answers in {SPAN_S:.0f} s, {min(spans)} to {max(spans)}: {sparkline(spans[-200:])}")


async def ready_again(target: str, nothing_held: bool) -> set[str]:
    """Waits until each pool has its first size again, all ready, and, if asked for, nothing is held; returns the ids of
    workers and routers. Raises InternalError."""
    began = monotonic()
    problem: object = "nothing was asked"
    while monotonic() < began + BACK_S:
        try:
            async with AsyncClient(target) as client:
                await client.scale(prefill=POOLS["prefill"], decode=POOLS["decode"])
                workers = [worker for worker in (await client.workers()).workers if worker.state == "ready"]
                problem = ready = Counter(worker.role for worker in workers)
                fine = ready == POOLS
                if fine and nothing_held:
                    audit = await client.audit()
                    problem = audit.to_dict()
                    fine = audit.balanced and not any(ledger.held for ledger in audit.ledgers)
                if fine:
                    return {worker.worker_id for worker in workers}
        except TandemError as error:
            problem = error
        await asyncio.sleep(0.25)
    raise InternalError(f"{BACK_S:.0f} s after the last fault: {problem}")


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def main(
    plan: Plan,
    only: Annotated[str, typer.Option(metavar="FAULT,...", help="Faults to try.")] = ",".join(OF_ALL),
    hybrid: Annotated[bool, typer.Option("--hybrid", help="A model with recurrent layers.")] = False,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Of the cluster.")] = None,
    quick: Quick = False,
    results: Json = None,
) -> int:
    if quick:
        plan = replace(plan, minutes=0.1, requests=12, at_once=4, every=2.0, calm=0.0)
    faults, tally, began = names(only, FAULTS), Tally(), monotonic()

    def say(text: str) -> None:
        print(f"{monotonic() - began:7.1f} s  {text}", flush=True)

    say("starting two routers, two prefill and two decode workers")
    try:
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            own = {"model": make_hybrid(Path(folder) / "model"), "speculation": "off"} if hybrid else {}
            chosen = {**SETTINGS, **own, **dict(pair.partition("=")[::2] for pair in settings or ())}
            with up(chosen, Path(folder), tally) as (process, target, registry):
                chance = random.Random(f"{plan.seed}/faults")
                cluster = Faults(process, target, registry, Path(folder), chosen, chance, tally)
                asyncio.run(Run(cluster, plan, faults, tally, say).run())
    finally:  # an aborted run, or one that ended its cluster, reports its results so far
        for line in tally.lines():
            say(line)
        if results:
            results.write_text(json.dumps({"seed": plan.seed, **tally.to_dict()}, indent=1))
        for wrong in tally.wrong:
            print(f"error: {wrong}", file=sys.stderr)
    return 1 if tally.wrong else 0
