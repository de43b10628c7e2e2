"""Workers for the transfer tests: pages in this process, and separate processes, each with its own NIXL agent."""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvtransfer.factory import make_transport
from kvtransfer.transport import Pair, Transport
from kvtransfer.types import Peer, ReadStats, Region
from loadtest.microbench.kv_source import Dialler
from tests.support.copies import Copy
from tests.support.in_process_transport import InProcessTransport

LAYOUT = "layout-1"
# Seconds within which a helper process must have executed a command.
PATIENCE = 30.0


def pattern(seed: int, size: int) -> np.ndarray:
    """The bytes that `fill` writes; they differ between blocks and within a block."""
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


class Pages:
    """A worker in this process: memory and the transport over it."""

    def __init__(self, kind: str, worker_id: str, incarnation: str, num_blocks: int, block_bytes: int) -> None:
        self.array = np.zeros((num_blocks, block_bytes), dtype=np.uint8)
        self.region = Region(self.array.ctypes.data, num_blocks, block_bytes, keepalive=self.array)
        make = InProcessTransport if kind == "inprocess" else partial(make_transport, kind)
        self.transport = make(self.region, worker_id, incarnation, LAYOUT)

    @property
    def peer(self) -> Peer:
        return self.transport.peer()

    def fill(self, block: int, seed: int) -> None:
        self.array[block] = pattern(seed, self.region.block_bytes)

    def flip(self, block: int) -> None:
        self.array[block, self.region.block_bytes // 2] ^= 1

    links = ""  # it is never dialled

    def serve(self) -> None:
        """In-process reads need no progress from the source."""


class Worker:
    """A worker in a separate process, with the same methods as Pages."""

    def __init__(
        self,
        worker_id: str,
        incarnation: str,
        num_blocks: int,
        block_bytes: int,
        env: dict[str, str] | None = None,
        agents: int = 1,
        kind: str = "nixl",
    ) -> None:
        arguments = [kind, worker_id, incarnation, str(num_blocks), str(block_bytes), LAYOUT, str(agents)]
        self.process = Copy("tests.kvtransfer.peer", arguments, {**os.environ, **(env or {})}, stderr=False)
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read_lines, daemon=True)
        self._reader.start()
        self._peers: list[Peer] = []

    @property
    def peer(self) -> Peer:
        return self.peers[0]

    @property
    def peers(self) -> list[Peer]:
        """Waits at the first use until the process is up, so that several processes can start at the same time."""
        if not self._peers:
            answer = self._answer()
            described, self.links = answer["peers"], answer["links"]
            self._peers = [
                Peer(**{**one, "metadata": bytes.fromhex(one["metadata"]), "also": tuple(one["also"])})
                for one in described
            ]
        return self._peers

    def fill(self, block: int, seed: int) -> None:
        self.ask(cmd="fill", block=block, seed=seed)

    def flip(self, block: int) -> None:
        self.ask(cmd="flip", block=block)

    def serve(self) -> None:
        self.ask(cmd="serve")

    def ask(self, **command: object) -> dict[str, Any]:
        assert self.peer
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def exit(self) -> dict[str, Any]:
        answer = self.ask(cmd="exit")
        self.process.wait(PATIENCE)
        return answer

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()

    def _read_lines(self) -> None:
        for line in self.process.stdout:
            self._lines.put(line)

    def _answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._lines.get(timeout=PATIENCE))
        return answer


class FaultyTransport:
    """Wraps any Transport and calls a hook before and after each read."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.before: Callable[[Sequence[Pair]], Awaitable[None]] | None = None
        self.after: Callable[[Sequence[Pair]], Awaitable[None]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def read(self, peer: Peer, pairs: Sequence[Pair], *more: Any, **named: Any) -> ReadStats:
        if self.before:
            await self.before(pairs)
        stats = await self.inner.read(peer, pairs, *more, **named)
        if self.after:
            await self.after(pairs)
        return stats


@pytest.fixture
def pages() -> Iterator[Callable[..., Pages]]:
    """Creates workers in this process, by default with 16 blocks of 4096 bytes."""
    made: list[Pages] = []

    def make(
        kind: str, worker_id: str = "sink", incarnation: str = "1", num_blocks: int = 16, block_bytes: int = 4096
    ) -> Pages:
        made.append(Pages(kind, worker_id, incarnation, num_blocks, block_bytes))
        return made[-1]

    yield make
    for one in made:
        one.transport.close()


@pytest.fixture
def worker() -> Iterator[Callable[..., Worker]]:
    """Starts workers in separate processes and ends each of them after the test."""
    made: list[Worker] = []

    def make(
        worker_id: str = "source",
        incarnation: str = "1",
        num_blocks: int = 16,
        block_bytes: int = 4096,
        env: dict[str, str] | None = None,
        agents: int = 1,
        kind: str = "nixl",
    ) -> Worker:
        made.append(Worker(worker_id, incarnation, num_blocks, block_bytes, env, agents, kind))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture(params=["inprocess", "nixl", "nccl", "auto"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextmanager
def _filled(kind: str) -> Iterator[Worker]:
    """A source of 16 blocks of 4 KiB, block b filled with pattern b."""
    made = Worker("source", "1", 16, 4096, kind=kind)
    try:
        for block in range(16):
            made.fill(block, block)
        yield made
    finally:
        made.end()


@pytest.fixture(scope="session")
def nixl_source() -> Iterator[Worker]:
    """One process for all tests that only read from it over NIXL."""
    with _filled("nixl") as made:
        yield made


@pytest.fixture(scope="session")
def nccl_source() -> Iterator[Worker]:
    """One process for all tests that only read from it over links."""
    with _filled("nccl") as made:
        yield made


@pytest.fixture(scope="session")
def auto_source() -> Iterator[Worker]:
    """One process for all tests that only read from it over NIXL or links."""
    with _filled("auto") as made:
        yield made


@pytest.fixture(scope="module")
def tcp_source() -> Iterator[Worker]:
    """One process for a file whose transport supports only TCP. It serves all the time, at a tenth of a core: 17 blocks
    of 1 MiB, block b filled with pattern b."""
    made = Worker("tcp-source", "1", 17, 1 << 20, {"UCX_TLS": "tcp"})
    try:
        for block in range(17):
            made.fill(block, block)
        made.serve()
        yield made
    finally:
        made.end()


@pytest.fixture
def source(kind: str, pages: Callable[..., Pages], request: pytest.FixtureRequest) -> Pages | Worker:
    """A source with 16 blocks of 4096 bytes, block b filled with pattern b; for NIXL and Gloo in another process."""
    if kind != "inprocess":
        return request.getfixturevalue(f"{kind}_source")
    made = pages(kind, "source")
    for block in range(16):
        made.fill(block, block)
    return made


@pytest.fixture
async def sink(kind: str, source: Pages | Worker, pages: Callable[..., Pages]) -> AsyncIterator[Pages]:
    made = pages(kind, "sink")
    async with dialling(made, source):
        yield made


@asynccontextmanager
async def dialling(sink: Pages, *sources: Pages | Worker) -> AsyncIterator[Dialler]:
    """Lets the sink dial these sources."""
    sink.transport.dial = dial = Dialler()
    for source in sources:
        dial.addresses[source.peer.agent_name] = source.links
    try:
        yield dial
    finally:
        sink.transport.close()
        await dial.channels.close()


@pytest.fixture
def faulty() -> type[FaultyTransport]:
    return FaultyTransport


@pytest.fixture
def expected() -> Callable[[int, int], np.ndarray]:
    return pattern
