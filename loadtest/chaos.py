"""Everything is killed, frozen, drained and resized by chance, under load, and no answer may differ by a token.

    python -m loadtest.chaos [--minutes 10] [--seed 1] [--at-once 12] [--requests 48] [--every 4] [--only FAULT,...]
                             [--set NAME=VALUE]... [--quick] [--json FILE]

Starts `tandem up` with two routers, two prefill and two decode workers of the demo's model, with so few KV blocks that
streams are preempted. A book of requests (greedy, sampled, penalties, log probabilities, grammars, stop strings, n > 1,
chats) is answered while nothing happens, twice, and both times the same. Then, for so many minutes, `--at-once` clients
ask for what is in the book, as streams and as jobs, and some leave in the middle; and about every `--every` seconds
something happens to the cluster:

    kill           SIGKILL to a prefill or decode worker or a router
    pool           SIGKILL to all workers of a pool
    freeze         SIGSTOP to one of them, for up to 10 s: it may be taken for dead, and come back
    registry       SIGKILL to Valkey, or SIGSTOP for up to 4 s
    supervisor     SIGKILL to the supervisor
    drain          a worker is sent away after its requests
    scale          a pool gets 1 to 3 workers

An answer with status OK is the book's: each token, log probability and letter of each choice. One that fails has one of
the statuses that a lost process may cost, and what had come is the beginning of the book's. No job fails, but one that
two workers died with by chance, which is taken for the reason (KILLS_WORKERS), or that was kept by a registry that was
killed (the embedded Valkey keeps nothing on disk). At the end all workers come back, the book is answered as it was,
the ledgers balance with nothing held, and no process is left.
Exits 1 at anything else. The same seed asks and harms in the same order, but what meets what is chance.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import psutil

from loadtest.local import Process, environment_of
from loadtest.peers.soak import draw
from tandem.answers import Piece, Worker
from tandem.client import AsyncClient
from tandem.errors import (
    Busy,
    DeadlineExceeded,
    InternalError,
    NotFound,
    ResumeFailed,
    TandemError,
    Unavailable,
)

DEMO = Path(__file__).parents[1] / "demo/model"
POOLS = {"router": 2, "prefill": 2, "decode": 2}
SETTINGS = {
    "model": DEMO,
    "port": 0,
    **{f"{role}s" if role == "router" else role: count for role, count in POOLS.items()},
    "dtype": "float32",
    "threads": 1,
    "kv_blocks": 96,
    "max_model_len": 512,
    "max_num_seqs": 16,
    "speculation": "ngram",
    "drain_grace_s": 5,
}
COST = (Unavailable, ResumeFailed, Busy, DeadlineExceeded)  # with their subclasses: what a lost process may cost
UNLUCKY, UNKEPT = "KILLS_WORKERS", "KEPT_BY_A_KILLED_REGISTRY"
REQUEST_S = 120.0  # that one answer may take
BACK_S = 120.0  # until everything is there again, at the end
FREEZE_S, REGISTRY_S = 10.0, 4.0
LEAVES, JOBS = 0.1, 0.3  # shares of the requests
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "many": {"type": "integer"}}}
FAULTS = {"kill": 4, "pool": 1, "freeze": 3, "registry": 1, "supervisor": 1, "drain": 2, "scale": 2}  # how often

# ---- the book


def book(chance: random.Random, count: int) -> list[dict[str, Any]]:
    """So many requests: what `AsyncClient.stream` takes. Each has a seed, so each has one answer."""
    texts = ["Return the", "Create a new", "Raised when", "class Queue:", "import os\n", "5 6 7"]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.95},
        {"temperature": 1.1, "top_k": 40, "min_p": 0.02},
        {"temperature": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.3},
        {"temperature": 0.7, "logit_bias": {11: 2.0, 12: -100.0}, "min_tokens": 6},
        {"temperature": 1.0, "logprobs": 3, "prompt_logprobs": 2},
        {"temperature": 1.0, "n": 3},
        {"temperature": 0.8, "n": 2, "logprobs": 1, "stop": ["the", "\n\n"]},
        {"temperature": 1.0, "stop": [" a", "ing"], "include_stop": True},
        {"temperature": 1.0, "grammar": {"regex": "[a-z ]{30,90}"}},
        {"temperature": 1.0, "grammar": {"json_schema": SCHEMA}},
        {"temperature": 0.9, "cache_salt": "mine"},
    ]
    found = []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        request = {"max_tokens": chance.choice([8, 40, 120]), "seed": number, **kind}
        request["ignore_eos"] = chance.random() < 0.5 and "grammar" not in kind
        match chance.randrange(3):
            case 0:
                request["prompt"] = chance.choice(texts)
            case 1:
                request["messages"] = [{"role": "user", "content": f"What does {chance.choice(texts)} do?"}]
            case _:
                request["prompt"] = chance.choices(range(2, 2048), k=chance.choice([3, 40, 150, 300]))
        found.append(request)
    return found


@dataclass
class Choice:
    """One completion, as far as it came."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None


class Answer:
    """What a client has been told, and how it went."""

    def __init__(self) -> None:
        self.choices: dict[int, Choice] = {}
        self.attempts = 1
        self.job = False  # it was taken as one

    def add(self, piece: Piece) -> None:
        choice = self.choices.setdefault(piece.choice, Choice())
        choice.token_ids += piece.token_ids
        choice.text += piece.text
        choice.logprobs += piece.logprobs or []
        choice.prompt_logprobs += piece.prompt_logprobs or []
        choice.finish_reason = piece.finish_reason or choice.finish_reason
        if piece.receipt:
            self.attempts = max(self.attempts, piece.receipt.attempts)

    def same(self, other: Answer) -> bool:
        return self.choices == other.choices

    def begins(self, whole: Answer) -> bool:
        """Whether all of it stands at the beginning of another one."""
        return all(
            (of := whole.choices.get(number)) is not None
            and of.token_ids[: len(one.token_ids)] == one.token_ids
            and of.text.startswith(one.text)
            and of.logprobs[: len(one.logprobs)] == one.logprobs
            for number, one in self.choices.items()
        )


# ---- what is counted


@dataclass
class Tally:
    """What became of the requests, and what was done to the cluster."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    resumed: int = 0
    registries: int = 0  # that were killed, with the jobs that they kept
    longest_s: float = 0.0
    ended: list[float] = field(default_factory=list)

    def judge(self, how: str, request: dict[str, Any], said: Answer, whole: Answer, error: TandemError | None) -> None:
        """One request is over: `error` is None for a status of OK."""
        name = f"{how}: as it should be" if error is None else f"{how}: {type(error).__name__} {error.reason}"
        self.outcomes[name] += 1
        self.resumed += error is None and said.attempts > 1
        if error is None and not said.same(whole):
            self.wrong.append(f"{how} {request}: an answer with status OK differs: {_differs(said, whole)}")
        elif error is not None and not said.begins(whole):
            self.wrong.append(f"{how} {request}: what came before {error!r} differs: {_differs(said, whole)}")
        elif (
            error is not None
            and error.reason not in (UNLUCKY, UNKEPT)
            and (how == "job" or not isinstance(error, COST))
        ):
            self.wrong.append(f"{how} {request}: {type(error).__name__} {error.reason}: {error.message}")


def _differs(said: Answer, whole: Answer) -> str:
    for number, right in whole.choices.items():
        one = said.choices.get(number, Choice())
        for name, wanted in asdict(right).items():
            if (got := getattr(one, name)) != wanted:
                return f"choice {number}, {name}: {got!r:.300} instead of {wanted!r:.300}"
    return f"choices {sorted(said.choices)} instead of {sorted(whole.choices)}"


# ---- the cluster


class Up:
    """`tandem up`, its processes, and what can be done to them."""

    def __init__(self, process: Process, target: str, chance: random.Random, tally: Tally) -> None:
        self.target = target
        self._process = process
        self._chance = chance
        self._tally = tally
        self._thaws: set[asyncio.Task[None]] = set()
        self.faults: dict[str, Callable[[AsyncClient], Awaitable[str]]] = {
            "kill": self._kill,
            "pool": self._pool,
            "freeze": self._freeze,
            "registry": self._registry,
            "supervisor": self._supervisor,
            "drain": self._drain,
            "scale": self._scale,
        }

    def tree(self) -> list[psutil.Process]:
        whole = psutil.Process(self._process.popen.pid)
        return [whole, *whole.children(recursive=True)]

    async def harm(self, names: list[str]) -> str:
        """One of these faults, by chance. Says what it was; what the cluster cannot do at the moment is no fault."""
        name = self._chance.choices(names, [FAULTS[name] for name in names])[0]
        try:
            async with AsyncClient(self.target) as client, asyncio.timeout(2 * FREEZE_S):
                said = await self.faults[name](client)
        except (TandemError, TimeoutError, psutil.NoSuchProcess) as error:
            return f"{name}: not possible now: {error}"
        self._tally.faults[name] += 1
        return f"{name}: {said}"

    async def thawed(self) -> None:
        """Until nothing is frozen any more."""
        if self._thaws:
            await asyncio.wait(self._thaws)

    async def _worker(self, client: AsyncClient) -> tuple[str, psutil.Process]:
        one = self._one((await client.workers()).workers)
        return one.worker_id, psutil.Process(one.pid)

    def _one(self, workers: list[Worker]) -> Worker:
        if not workers:
            raise Unavailable("nobody is there")
        return self._chance.choice(sorted(workers, key=lambda worker: worker.worker_id))

    async def _kill(self, client: AsyncClient) -> str:
        name, process = await self._worker(client)
        process.kill()
        return name

    async def _pool(self, client: AsyncClient) -> str:
        role = self._chance.choice(["prefill", "decode"])
        found = [one for one in (await client.workers()).workers if one.role == role]
        for one in found:
            with suppress(psutil.NoSuchProcess):
                psutil.Process(one.pid).kill()
        return f"{', '.join(one.worker_id for one in found)} killed"

    async def _freeze(self, client: AsyncClient) -> str:
        name, process = await self._worker(client)
        return f"{name} for {self._stop(process, FREEZE_S):.1f} s"

    async def _registry(self, client: AsyncClient) -> str:
        process = self._named("valkey")
        if self._chance.random() < 0.5:
            process.kill()
            self._tally.registries += 1
            return "killed"
        return f"frozen for {self._stop(process, REGISTRY_S):.1f} s"

    async def _supervisor(self, client: AsyncClient) -> str:
        self._named("SupervisorActor").kill()
        return "killed"

    async def _drain(self, client: AsyncClient) -> str:
        name = self._one([one for one in (await client.workers()).workers if one.role != "router"]).worker_id
        await client.drain(name, self._chance.choice([0.0, 1.0, 5.0]))
        return name

    async def _scale(self, client: AsyncClient) -> str:
        role = self._chance.choice(["prefill", "decode"])
        return json.dumps(await client.scale(**{role: self._chance.randint(1, 3)}))

    def _named(self, part: str) -> psutil.Process:
        for process in self.tree():
            if part in process.name():
                return process
        raise Unavailable(f"no process is called {part}")

    def _stop(self, process: psutil.Process, most_s: float) -> float:
        """For a time up to the most."""
        seconds = self._chance.uniform(0.1, most_s)
        process.suspend()

        async def thaw() -> None:
            await asyncio.sleep(seconds)
            with suppress(psutil.NoSuchProcess):
                process.resume()

        task = asyncio.create_task(thaw())
        self._thaws.add(task)
        task.add_done_callback(self._thaws.discard)
        return seconds


@contextmanager
def up(settings: dict[str, object]) -> Iterator[tuple[Process, str]]:
    """`tandem up` and where its routers listen. Raises InternalError when a process outlives it."""
    process = Process(["tandem", "up"], environment_of(settings))
    whole: list[psutil.Process] = []
    try:
        yield process, process.line("ready ").split(" ")[0]
        whole = psutil.Process(process.popen.pid).children(recursive=True)
    finally:
        process.stop(BACK_S)
    left = [one for one in whole if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    if left:
        raise InternalError(f"left behind: {left}")


# ---- the load


async def ask(client: AsyncClient, request: dict[str, Any], said: Answer, job: bool, leave_after: int | None) -> None:
    """One request, to its end or until so many pieces have come. Raises TandemError."""
    if job:
        submitted = await client.submit(**request)
        said.job = True
        pieces = client.watch(submitted.job_id)
    else:
        pieces = client.stream(**request, timeout=REQUEST_S)
    count = 0
    async with aclosing(pieces):
        async for piece in pieces:
            said.add(piece)
            count += 1
            if count == leave_after:
                return


async def lane(
    up: Up, requests: list[dict[str, Any]], whole: list[Answer], chance: random.Random, tally: Tally
) -> None:
    """One client: request after request, until it is cancelled."""
    while True:
        number = chance.randrange(len(requests))
        job, leaves = chance.random() < JOBS, chance.random() < LEAVES
        said, began, registries = Answer(), monotonic(), tally.registries
        error: TandemError | None = None
        async with AsyncClient(up.target) as client:  # a connection of its own: both routers get some
            try:
                async with asyncio.timeout(2 * REQUEST_S):
                    await ask(client, requests[number], said, job, chance.randint(1, 6) if leaves else None)
            except NotFound as failed:
                kept = tally.registries == registries
                error = failed if kept else Unavailable(failed.message, reason=UNKEPT)
            except TandemError as failed:
                error = failed
            except TimeoutError:
                error = InternalError(f"no end within {2 * REQUEST_S:.0f} s")
        if leaves and error is None:
            tally.outcomes["left in the middle"] += 1
            if not said.begins(whole[number]):
                tally.wrong.append(f"{requests[number]}: what came differs: {_differs(said, whole[number])}")
            continue
        tally.judge(
            "job" if said.job else "submission" if job else "stream", requests[number], said, whole[number], error
        )
        tally.longest_s = max(tally.longest_s, monotonic() - began)
        tally.ended.append(monotonic())


async def answered(target: str, requests: list[dict[str, Any]]) -> list[Answer]:
    """Each request's answer, one after another."""
    found = []
    async with AsyncClient(target) as client:
        for request in requests:
            found.append(Answer())
            await ask(client, request, found[-1], job=False, leave_after=None)
    return found


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


async def run(process: Process, target: str, args: argparse.Namespace, say: Callable[[str], None]) -> Tally:
    tally, chance = Tally(), random.Random(args.seed)
    cluster = Up(process, target, random.Random(f"{args.seed}/faults"), tally)
    requests = book(chance, args.requests)
    say(f"the book: {len(requests)} requests, twice")
    whole = await answered(target, requests)
    if [one.choices for one in await answered(target, requests)] != [one.choices for one in whole]:
        raise InternalError("the book's answers differ without a fault")
    say(f"{args.minutes:g} minutes of faults, {args.at_once} clients")
    lanes = [
        asyncio.create_task(lane(cluster, requests, whole, random.Random(f"{args.seed}/{number}"), tally))
        for number in range(args.at_once)
    ]
    began = monotonic()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_cancelled, lanes)
        while monotonic() < began + 60 * args.minutes and not tally.wrong:
            await asyncio.wait(lanes, timeout=chance.expovariate(1 / args.every), return_when=asyncio.FIRST_COMPLETED)
            for one in lanes:
                if one.done():
                    one.result()  # raises: a lane has no end
            done = tally.outcomes.total()
            say(f"{await cluster.harm(args.only)}  ({done} requests, {len(tally.wrong)} wrong)")
        await cluster.thawed()
    if not tally.wrong:
        await whole_again(target, say)
        if [one.choices for one in await answered(target, requests)] != [one.choices for one in whole]:
            tally.wrong.append("the book's answers differ after it")
    spans = [0] * (int(monotonic() - began) // 10 + 1)
    for ended in tally.ended:
        spans[int(ended - began) // 10] += 1
    say(f"answers in 10 s, {min(spans)} to {max(spans)}: {draw(spans)}")
    return tally


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    for one in tasks:
        one.cancel()
    await asyncio.wait(tasks)


def _setting(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=12)
    parser.add_argument("--requests", type=int, default=48, metavar="N", help="in the book")
    parser.add_argument("--every", type=float, default=4.0, metavar="SECONDS", help="from one fault to the next")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(FAULTS), metavar="FAULT,...")
    parser.add_argument(
        "--set", type=_setting, action="append", default=[], metavar="NAME=VALUE", help="of the cluster"
    )
    parser.add_argument("--quick", action="store_true", help="twelve seconds, to see that it works")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.quick:
        args.minutes, args.requests, args.at_once, args.every = 0.2, 12, 4, 2.0
    if unknown := set(args.only) - FAULTS.keys():
        parser.error(f"--only: no such fault: {', '.join(sorted(unknown))}; there are {', '.join(FAULTS)}")
    began = monotonic()

    def say(text: str) -> None:
        print(f"{monotonic() - began:7.1f} s  {text}", flush=True)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    say("starting two routers, two prefill and two decode workers")
    with up({**SETTINGS, **dict(args.set)}) as (process, target):
        tally = asyncio.run(run(process, target, args, say))
    for name, counts in (("requests", tally.outcomes), ("faults", tally.faults)):
        say(f"{counts.total()} {name}: {', '.join(f'{count} {what}' for what, count in sorted(counts.items()))}")
    say(f"{tally.resumed} answers went on at another worker; the longest took {tally.longest_s:.1f} s")
    if args.json:
        about = {"outcomes": tally.outcomes, "faults": tally.faults, "wrong": tally.wrong, "resumed": tally.resumed}
        args.json.write_text(json.dumps({"seed": args.seed, "minutes": args.minutes, **about}, indent=1))
    for wrong in tally.wrong:
        print(f"error: {wrong}", file=sys.stderr)
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
