"""Random faults under load, and no answer may differ by a token.

    python -m loadtest.chaos [--minutes 10 | --requests-total N] [--seed 1] [--at-once 12] [--requests 48] [--every 4]
                             [--only FAULT,...] [--calm 30] [--set NAME=VALUE]... [--quick] [--json FILE]

Starts `tandem up` with two routers, two prefill and two decode workers of the demo's model, with so few KV blocks that
streams are preempted. A book of requests (greedy, sampled, penalties, log probabilities, grammars, stop strings, n > 1,
chats) is answered while nothing happens, twice, and both times the same. Then, for so many minutes or until so many
requests were answered, `--at-once` clients ask for what is in the book, short answers more often than long ones, as
streams and as jobs, and some leave in the middle; and about every `--every` seconds something happens to the cluster:

    kill             SIGKILL to a prefill or decode worker or a router
    pool             SIGKILL to all workers of a pool
    freeze           SIGSTOP to one of them, for up to 10 s: it may be taken for dead, and come back
    hiccup           SIGSTOP to a worker for 1 to 4 s
    registry         SIGKILL to Valkey, or SIGSTOP for up to 4 s
    registry-flap    12 SIGKILLs to Valkey, each as soon as it is back
    supervisor       SIGKILL to the supervisor
    two-supervisors  another `tandem up` with the same registry and cluster name, which must be refused
    drain            a worker is sent away after its requests
    scale            a pool gets 1 to 3 workers
    kv-silent        the KV plane of one worker makes no progress for 5 to 25 s, while gRPC works
    kv-errors        one transfer in four fails, at the post or at completion, for 10 s
    step-fails       one step of an engine raises, out of memory among the errors
    step-hangs       one step of an engine never returns
    transport-dies   the thread that owns a NIXL agent ends or hangs
    poison           a request that kills whatever worker computes it, which must end as KILLS_WORKERS

loadtest/chaos/inject.py strikes inside workers. A fault that was not seen to strike is not counted.

An answer with status OK is the book's: each token, log probability and letter of each choice. One that fails has one of
the statuses that a lost process may cost, and what had come is the beginning of the book's. No job fails, but one whose
registry was killed (the embedded Valkey keeps nothing on disk). INTERNAL is for poison, and for a request that was
beside it: KILLS_WORKERS where two workers did end. Then no fault for `--calm` seconds under the same load, in which
each pool must share it evenly again. At the end all workers come back, the book is answered as it was, the ledgers
balance with nothing held, and no process is left.
Exits 1 at anything else. The same seed asks and harms in the same order, but what meets what is left to timing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from time import monotonic

import psutil

from loadtest.chaos.book import Answer, book
from loadtest.chaos.faults import FAULTS, Up, environment
from loadtest.chaos.load import answered, lane
from loadtest.chaos.report import Tally
from loadtest.local import Process
from loadtest.peers.soak import draw
from tandem.client import AsyncClient
from tandem.errors import InternalError, TandemError

DEMO = Path(__file__).parents[2] / "demo/model"
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


@contextmanager
def up(settings: dict[str, object], sockets: Path, tally: Tally) -> Iterator[tuple[Process, str, str]]:
    """`tandem up`, where its routers listen, and its registry. A process that outlives it is leaked."""
    process = Process(["loadtest.chaos.up"], environment(settings, sockets))
    whole: list[psutil.Process] = []
    try:
        registry = process.line("registry ", START_S)
        yield process, process.line("ready "), registry
        whole = psutil.Process(process.popen.pid).children(recursive=True)
    finally:
        process.stop(BACK_S)
    left = [one for one in whole if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    if left:
        tally.violate("leaked", f"processes are left: {left}")


class Run:
    """One chaos run against one cluster."""

    def __init__(self, cluster: Up, args: argparse.Namespace, tally: Tally, say: Callable[[str], None]) -> None:
        self._cluster, self._args, self._tally, self._say = cluster, args, tally, say
        self._chance = random.Random(args.seed)
        self._requests = book(self._chance, args.requests)
        self._whole: list[Answer] = []
        self._lanes: list[asyncio.Task[None]] = []
        self._began = 0.0

    async def run(self) -> None:
        args, tally = self._args, self._tally
        await self._read_book()
        limit = f"{args.requests_total} requests" if args.requests_total else f"{args.minutes:g} minutes"
        self._say(f"{limit} with faults, {args.at_once} clients")
        self._began = monotonic()
        async with AsyncExitStack() as stack:
            for number in range(args.at_once):
                chance = random.Random(f"{args.seed}/{number}")
                asked = lane(self._cluster.target, self._requests, self._whole, chance, tally)
                self._lanes.append(asyncio.create_task(asked))
            stack.push_async_callback(_cancelled, self._lanes)
            following = asyncio.create_task(self._cluster.follow())
            stack.push_async_callback(_cancelled, [following])
            self._lanes.append(following)  # has no end either
            while self._goes_on():
                await self._pause(self._chance.expovariate(1 / args.every))
                said = await self._cluster.harm(args.only)
                self._say(f"{said}  ({self._progress()})")
            await self._cluster.over()
            if args.calm:
                await self._calm()
        if len(tally.wrong) < MOST_WRONG:
            await self._check_the_end()
        self._draw()

    def _goes_on(self) -> bool:
        done, now = self._tally.outcomes.total(), monotonic()
        enough = done >= total if (total := self._args.requests_total) else now > self._began + 60 * self._args.minutes
        return not enough and len(self._tally.wrong) < MOST_WRONG

    def _progress(self) -> str:
        done, seconds = self._tally.outcomes.total(), monotonic() - self._began
        return f"{done} requests, {done / seconds:.0f} a second, {len(self._tally.wrong)} wrong"

    async def _read_book(self) -> None:
        self._say(f"the book: {len(self._requests)} requests, twice")
        self._whole = await answered(self._cluster.target, self._requests)
        again = await answered(self._cluster.target, self._requests)
        if [one.choices for one in again] != [one.choices for one in self._whole]:
            raise InternalError("the book's answers differ without a fault")

    async def _pause(self, seconds: float) -> None:
        await asyncio.wait(self._lanes, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for one in self._lanes:
            if one.done():
                one.result()  # raises: a lane has no end

    async def _calm(self) -> None:
        """The load alone, since all workers are ready."""
        over = monotonic()
        await ready_again(self._cluster.target)
        self._tally.calm_since = monotonic()
        self._say(f"no fault any more; all workers are ready after {monotonic() - over:.1f} s  ({self._progress()})")
        await self._pause(self._args.calm)

    async def _check_the_end(self) -> None:
        tally, target = self._tally, self._cluster.target
        try:
            await whole_again(target, self._say)
        except InternalError as error:
            tally.violate("leaked", error.message)
            return
        if [one.choices for one in await answered(target, self._requests)] != [one.choices for one in self._whole]:
            tally.violate("corrupt", "the book's answers differ after it")

    def _draw(self) -> None:
        spans = [0] * (int((monotonic() - self._began) / SPAN_S) + 1)
        for ended in self._tally.ended:
            spans[int((ended - self._began) / SPAN_S)] += 1
        self._say(f"answers in {SPAN_S:.0f} s, {min(spans)} to {max(spans)}: {draw(spans[-200:])}")


async def ready_again(target: str) -> None:
    """Until each pool has its first size again, all ready. Raises InternalError."""
    began, ready = monotonic(), Counter[str]()
    while monotonic() < began + BACK_S:
        with suppress(TandemError):
            async with AsyncClient(target) as client:
                await client.scale(prefill=POOLS["prefill"], decode=POOLS["decode"])
                ready = Counter(one.role for one in (await client.workers()).workers if one.state == "ready")
                if ready == POOLS:
                    return
        await asyncio.sleep(0.25)
    raise InternalError(f"{BACK_S:.0f} s after the last fault: {dict(ready)}")


async def whole_again(target: str, say: Callable[[str], None]) -> None:
    """Pools as at the start, everybody ready, nothing held. Raises InternalError."""
    began = monotonic()
    problem: object = "nothing was asked"
    while monotonic() < began + BACK_S:
        try:
            async with AsyncClient(target) as client:
                await client.scale(prefill=POOLS["prefill"], decode=POOLS["decode"])
                ready = Counter(one.role for one in (await client.workers()).workers if one.state == "ready")
                audit = await client.audit()
            problem = dict(ready) if ready != POOLS else audit.to_dict()
            if ready == POOLS and audit.balanced and not any(ledger.held for ledger in audit.ledgers):
                say(f"all workers are ready, the ledgers balance, nothing is held, after {monotonic() - began:.1f} s")
                return
        except TandemError as error:
            problem = error
        await asyncio.sleep(0.25)
    raise InternalError(f"{BACK_S:.0f} s after the last fault: {problem}")


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    for one in tasks:
        one.cancel()
    await asyncio.wait(tasks)


def _setting(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--requests-total", type=int, metavar="N", help="answered, instead of --minutes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=12)
    parser.add_argument("--requests", type=int, default=48, metavar="N", help="in the book")
    parser.add_argument("--every", type=float, default=4.0, metavar="SECONDS", help="from one fault to the next")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(FAULTS), metavar="FAULT,...")
    parser.add_argument("--calm", type=float, default=30.0, metavar="SECONDS", help="of load without faults at the end")
    parser.add_argument(
        "--set", type=_setting, action="append", default=[], metavar="NAME=VALUE", help="of the cluster"
    )
    parser.add_argument("--quick", action="store_true", help="twelve seconds, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.quick:
        args.minutes, args.requests, args.at_once, args.every, args.calm = 0.2, 12, 4, 2.0, 0.0
    if unknown := set(args.only) - FAULTS.keys():
        parser.error(f"--only: no such fault: {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
    return args


def main() -> int:
    args, tally = _arguments(), Tally()
    began = monotonic()

    def say(text: str) -> None:
        print(f"{monotonic() - began:7.1f} s  {text}", flush=True)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    settings = {**SETTINGS, **dict(args.set)}
    say("starting two routers, two prefill and two decode workers")
    try:
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            with up(settings, Path(folder), tally) as (process, target, registry):
                chance = random.Random(f"{args.seed}/faults")
                cluster = Up(process, target, registry, Path(folder), settings, chance, tally)
                asyncio.run(Run(cluster, args, tally, say).run())
    finally:  # a run that is ended early, or that ended its cluster, tells what it saw until then
        for line in tally.lines():
            say(line)
        if args.json:
            args.json.write_text(json.dumps({"seed": args.seed, **tally.to_dict()}, indent=1))
        for wrong in tally.wrong:
            print(f"error: {wrong}", file=sys.stderr)
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
