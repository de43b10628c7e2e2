"""A cluster with two tenants: `polite`, whose requests are measured, and `greedy`, a process that does one thing."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from cluster.local_cluster import DEFAULT_LAUNCHER, LocalCluster
from loadtest.harness.demo_model import DEMO
from tandem import settings
from tandem.async_client import AsyncClient
from tandem.errors import TandemError

GREEDY, POLITE = "greedy-key-0123456789", "polite-key-0123456789"
START_S = 60.0
ANSWER_S = 10.0
BEGUN = b"begun\n"


@dataclass(frozen=True)
class Target:
    """Of a cluster: its address for gRPC, and for HTTP with the path."""

    grpc: str
    http: str

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        parts = urlsplit(self.http)
        return await asyncio.open_connection(parts.hostname, parts.port)

    async def send(
        self, method: str, path: str, body: bytes = b"", key: str = GREEDY, kind: str = "application/json"
    ) -> tuple[str, bytes]:
        """One request on a connection of its own. Returns the status, or "closed", and the answer's body with the marks
        between its chunks."""
        reader, writer = await self.connect()
        writer.write(head(method, path, key, kind, len(body)) + body)
        try:
            answer = await reader.read(-1)
        except ConnectionError:
            answer = b""
        finally:
            writer.close()
        status, _, rest = answer.partition(b"\r\n")
        return status.split()[1].decode() if status else "closed", rest.partition(b"\r\n\r\n")[2]


def head(method: str, path: str, key: str, kind: str, length: int) -> bytes:
    lines = (f"{method} {path} HTTP/1.1", "host: x", "connection: close", f"authorization: Bearer {key}")
    return "\r\n".join((*lines, f"content-type: {kind}", f"content-length: {length}", "\r\n")).encode()


@contextmanager
def two_tenants(limits: str, launcher: str = DEFAULT_LAUNCHER, **overrides: Any) -> Iterator[Target]:
    """The demo model's cluster, in which greedy has these limits."""
    with tempfile.TemporaryDirectory(prefix="tandem-tenants-") as folder:
        keys = Path(folder) / "keys"
        keys.write_text(f"greedy {GREEDY} {limits}\npolite {POLITE}\n")
        wanted = {"model": str(DEMO), "port": 0, "http_port": 0, "api_keys": keys, "kv_blocks": 8192, **overrides}
        with LocalCluster(settings.load(**wanted), _say, launcher=launcher) as cluster:
            yield Target(cluster.target, cluster.http)


def _say(line: str) -> None:
    print(line, file=sys.stderr)


# ---- polite


@dataclass
class Polite:
    """Seconds of its requests, over a connection that it keeps and over new ones, and the reasons of failures."""

    kept: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)


@asynccontextmanager
async def served(target: str) -> AsyncIterator[Polite]:
    """Polite's requests, until the block ends; those that are under way then are waited for, so each way has one."""
    polite, over = Polite(), asyncio.Event()

    async def ask(client: AsyncClient, into: list[float]) -> None:
        began = perf_counter()
        try:
            await client.generate([5, 6, 7], max_tokens=8, ignore_eos=True, timeout=ANSWER_S)
            into.append(perf_counter() - began)
        except TandemError as error:
            polite.failed[error.reason] += 1

    async def keeps() -> None:
        async with AsyncClient(target, api_key=POLITE) as client:
            await ask(client, polite.kept)
            while not over.is_set():
                await ask(client, polite.kept)

    async def comes_anew() -> None:
        while not over.is_set() or not (polite.new or polite.failed):
            async with AsyncClient(target, api_key=POLITE) as client:
                await ask(client, polite.new)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(keeps())
        tasks.create_task(comes_anew())
        try:
            yield polite
        finally:
            over.set()


# ---- greedy


async def be_greedy(work: Sequence[Awaitable[None]], outcomes: Counter[str], settle_s: float = 0.0) -> None:
    """Until the standard input ends. Says when it has begun, and in the end what became of it."""
    tasks = [asyncio.ensure_future(each) for each in work]
    await asyncio.wait(tasks, timeout=settle_s)
    sys.stdout.buffer.write(BEGUN)
    sys.stdout.flush()
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    await asyncio.wait([*tasks, ended], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task.done():
            task.result()
        task.cancel()
    print(", ".join(f"{count} {what}" for what, count in outcomes.most_common()))


@asynccontextmanager
async def greedy(command: str, name: str, target: Target, lines: list[str]) -> AsyncIterator[None]:
    """The process of `loadtest COMMAND --greedy NAME`, until the block ends; its last output is appended to `lines`."""
    pipe, program = asyncio.subprocess.PIPE, [sys.executable, "-m", "loadtest", command]
    process = await asyncio.create_subprocess_exec(
        *program, "--greedy", name, target.grpc, target.http, stdin=pipe, stdout=pipe
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            begun = await process.stdout.readline()
        if begun != BEGUN:
            raise RuntimeError(f"{command} --greedy {name} ended before it had begun")
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
