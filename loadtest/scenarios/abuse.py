"""Latency of a client that keeps to its limits, during each abuse by another client.

Starts a cluster on this machine with two tenants. `polite` requests eight tokens over gRPC, again and again. `greedy`,
a process of its own, does one thing at a time:

    body          posts bodies of 4 MiB, {"messages":[0,0,...]}, one after another on one connection
    undecodable   keeps 16 requests in progress, of 1,900 tokens each that never become text
    idle          holds 500 HTTP connections open and sends nothing
    watchers      has 150 watchers of one running job

Each is measured `--rounds` times for `--seconds`, in turn with an equal time without it; for `undecodable`, greedy has
as many requests of ordinary text in progress in that time, and for `watchers` a job with one watcher. Prints the 99th
percentile of polite's requests without and with the abuse, and their ratio. Exits with 1 if a request of polite failed.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated
from urllib.parse import urlsplit

import typer

from cluster.local_cluster import LocalCluster
from loadtest.harness.demo_model import DEMO
from loadtest.harness.options import Rounds, Seconds, names
from loadtest.harness.stats import percentile
from loadtest.scenarios.flood import GREEDY, POLITE, served
from tandem import settings
from tandem.async_client import AsyncClient
from tandem.errors import TandemError

BODY_BYTES = 4 * 1024 * 1024
UNDECODABLE = 227  # the demo model's token for the byte 0x80, which begins no code point
TEXT = 66  # and one for a letter
REQUESTS, TOKENS = 16, 1900
CONNECTIONS = 500
WATCHERS = 150
START_S = 60.0
BEGUN = b"begun\n"


@dataclass(frozen=True)
class Target:
    """Of a cluster: its address for gRPC, and for HTTP with the path."""

    grpc: str
    http: str

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        parts = urlsplit(self.http)
        return await asyncio.open_connection(parts.hostname, parts.port)


# ---- what greedy does, until it is cancelled; `outcomes` counts the results


async def body(target: Target, outcomes: Counter[str]) -> None:
    zeros = b'{"messages":[' + b",".join([b"0"] * ((BODY_BYTES - 20) // 2)) + b"]}"
    while True:
        await post(target, "/v1/chat/completions", zeros, outcomes)


async def text(target: Target, outcomes: Counter[str]) -> None:
    await tokens(target, outcomes, TEXT)


async def undecodable(target: Target, outcomes: Counter[str]) -> None:
    await tokens(target, outcomes, UNDECODABLE)


async def tokens(target: Target, outcomes: Counter[str], token: int) -> None:
    """The one token, again and again, of as many requests as are allowed."""
    asked = {"prompt": [5, 6, 7], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    asked["logit_bias"] = {str(token): 100}

    async def keep_on() -> None:
        while True:
            await post(target, "/v1/completions", json.dumps(asked).encode(), outcomes)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(REQUESTS):
            tasks.create_task(keep_on())


async def idle(target: Target, outcomes: Counter[str]) -> None:
    async def hold() -> None:
        while True:
            reader, writer = await target.connect()
            outcomes["opened"] += 1
            await reader.read()  # until the server closes it
            outcomes["closed"] += 1
            writer.close()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(CONNECTIONS):
            tasks.create_task(hold())


async def watchers(target: Target, outcomes: Counter[str]) -> None:
    await watched(target, outcomes, WATCHERS)


async def job(target: Target, outcomes: Counter[str]) -> None:
    await watched(target, outcomes, 1)


async def watched(target: Target, outcomes: Counter[str], count: int) -> None:
    """One job after another, each with `count` watchers from its first token to its last."""
    async with AsyncClient(target.grpc, api_key=GREEDY) as client:

        async def watch(job_id: str) -> None:
            try:
                async for _ in client.watch(job_id):
                    outcomes["pieces"] += 1
            except TandemError as error:
                outcomes[error.reason] += 1

        while True:
            submitted = await client.submit([5, 6, 7], max_tokens=TOKENS, ignore_eos=True)
            await asyncio.gather(*(watch(submitted.job_id) for _ in range(count)))
            outcomes["jobs"] += 1


async def post(target: Target, path: str, content: bytes, outcomes: Counter[str]) -> None:
    """One request on a separate connection, read to the end of its answer; counts its status."""
    reader, writer = await target.connect()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer {GREEDY}\r\n"
    writer.write(f"{head}content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content)
    try:
        status = (await reader.readline()).split()
        outcomes[status[1].decode() if len(status) > 1 else "closed"] += 1
        while await reader.read(2**16):
            pass
    except ConnectionError:
        outcomes["closed"] += 1
    finally:
        writer.close()


Abuse = Callable[[Target, Counter[str]], Awaitable[None]]
ABUSES: dict[str, Abuse] = {"body": body, "undecodable": undecodable, "idle": idle, "watchers": watchers}
FAIR: dict[str, Abuse] = {"text": text, "job": job}
# greedy's load while the abuse is not measured; otherwise none
INSTEAD = {"undecodable": "text", "watchers": "job"}


async def be_greedy(name: str, target: Target) -> None:
    """Until the standard input ends. Says when it has begun, and in the end what became of it."""
    outcomes: Counter[str] = Counter()
    abusing = asyncio.ensure_future((ABUSES | FAIR)[name](target, outcomes))
    await asyncio.wait([abusing], timeout=1.0)  # it has its connections and requests by then
    sys.stdout.buffer.write(BEGUN)
    sys.stdout.flush()
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    await asyncio.wait([abusing, ended], return_when=asyncio.FIRST_COMPLETED)
    if abusing.done():
        abusing.result()
    abusing.cancel()
    print(", ".join(f"{count} {what}" for what, count in outcomes.most_common()))


@asynccontextmanager
async def greedy(name: str, target: Target, lines: list[str]) -> AsyncIterator[None]:
    """A process that does it until the block ends; its last output is appended to `lines`."""
    command = [sys.executable, "-m", "loadtest", "abuse", "--greedy", name, target.grpc, target.http]
    async with beside(command, lines):
        yield


@asynccontextmanager
async def beside(command: list[str], lines: list[str]) -> AsyncIterator[None]:
    """A process that has printed BEGUN, until the block ends; its last output is appended to `lines`."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            begun = await process.stdout.readline()
        if begun != BEGUN:
            raise RuntimeError(f"{command} ended before it had begun")
        yield
    finally:
        if process.returncode is None:
            try:
                last, _ = await asyncio.wait_for(process.communicate(b""), START_S)
                lines.append(last.decode().strip())
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()


# ---- what polite has of it


@dataclass
class Measured:
    """Polite's requests, in seconds."""

    seconds: list[float] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)

    async def measure(self, target: Target, seconds: float) -> None:
        async with served(target.grpc) as polite:
            await asyncio.sleep(seconds)
        self.seconds += polite.kept
        self.failed += polite.failed

    @property
    def p99(self) -> float:
        return percentile(self.seconds, 0.99)


async def compare(name: str, target: Target, rounds: int, seconds: float) -> int:
    """Prints a row. Returns how many of polite's requests failed."""
    without, during, lines = Measured(), Measured(), list[str]()
    for _ in range(rounds):
        async with greedy(INSTEAD[name], target, []) if name in INSTEAD else nullcontext():
            await without.measure(target, seconds)
        async with greedy(name, target, lines):
            await during.measure(target, seconds)
    columns = [f"{name:>12}"]
    for measured in (without, during):
        columns.append(f"{len(measured.seconds):>6} {1000 * median(measured.seconds):7.1f} {1000 * measured.p99:7.1f}")
    print("  ".join([*columns, f"{during.p99 / without.p99:5.2f}   greedy: {lines[-1]}"]), flush=True)
    for reason, count in (without.failed + during.failed).items():
        print(f"{'':>12}  failed: {count} {reason}", flush=True)
    return (without.failed + during.failed).total()


async def run(target: Target, names: list[str], rounds: int, seconds: float) -> int:
    """Returns how many of polite's requests failed."""
    print(f"{'':>12}  {'without p50':>14} {'p99 ms':>7}  {'with p50':>14} {'p99 ms':>7}  ratio", flush=True)
    await Measured().measure(target, 2.0)  # what is slow once
    return sum([await compare(name, target, rounds, seconds) for name in names])


def main(
    seconds: Seconds = 10.0,
    rounds: Rounds = 3,
    only: Annotated[str, typer.Option(metavar="ABUSE,...", help="Abuses to try.")] = ",".join(ABUSES),
    greedy: Annotated[tuple[str, str, str] | None, typer.Option(hidden=True)] = None,
) -> int:
    if greedy:
        name, *addresses = greedy
        asyncio.run(be_greedy(name, Target(*addresses)))
        return 0
    abuses = list(names(only, ABUSES))
    with tempfile.TemporaryDirectory(prefix="tandem-abuse-") as folder:
        keys = Path(folder) / "keys"
        keys.write_text(f"greedy {GREEDY} requests=64\npolite {POLITE}\n")
        overrides = settings.load(model=str(DEMO), port=0, http_port=0, api_keys=keys, kv_blocks=8192)
        with LocalCluster(overrides, lambda line: print(line, file=sys.stderr)) as cluster:
            target = Target(cluster.target, cluster.http)
            return 1 if asyncio.run(run(target, abuses, rounds, seconds)) else 0
