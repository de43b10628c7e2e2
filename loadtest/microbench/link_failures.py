"""Links of the KV transport over torch.distributed that fail again and again: does anything remain of them?

Reads from a source in another process, and breaks each link in one of six ways while a read is under way. After each
failure the next read must give the right bytes. At the end neither process may have more open files, threads or memory
than after the first tenth of the failures. Exits with 1 if one has.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from time import monotonic
from typing import Annotated

import numpy as np
import typer

from kvtransfer.transport import Transport
from kvtransfer.types import LinkMessage, LinkOpen, Peer, SendBlocks
from loadtest.harness.processes import Process
from loadtest.microbench.kv_source import Dialler, content
from loadtest.microbench.link import connected
from tandem.errors import InternalError, TandemError

KINDS = ("hung up", "wrong request", "stranger", "abandoned", "forgotten", "stands still")
BLOCK_BYTES, BLOCKS = 1 << 20, 16
TIMEOUT_S = 10.0
STALL_S = 0.1  # of a read from a source that stands still
SETTLE_S = 10.0  # for the threads of the last links to end
GROWTH_BYTES = 16 << 20  # what allocators may keep; a link has 8 MiB of staging
GROWTH_THREADS = 2  # by which gRPC's pool may vary; a link has three


@dataclass(frozen=True)
class Usage:
    """Of one process."""

    files: int
    threads: int
    memory: int  # bytes

    @classmethod
    def of(cls, pid: int) -> Usage:
        with open(f"/proc/{pid}/statm") as statm:
            pages = int(statm.read().split()[1])
        files, threads = os.listdir(f"/proc/{pid}/fd"), os.listdir(f"/proc/{pid}/task")
        return cls(len(files), len(threads), pages * os.sysconf("SC_PAGE_SIZE"))

    def leaks(self, since: Usage) -> bool:
        return self.files > since.files or self.threads > since.threads + GROWTH_THREADS

    def grows(self, since: Usage) -> bool:
        return self.memory - since.memory > GROWTH_BYTES


class FaultyDial:
    """Breaks links where their messages pass."""

    def __init__(self, dial: Dialler) -> None:
        self.kind = ""
        self._dial = dial

    async def __call__(self, peer: Peer, messages: AsyncIterator[LinkMessage]) -> AsyncGenerator[LinkMessage, None]:
        async with aclosing(self._dial(peer, self._passed(messages))) as answers:
            async for answer in answers:
                yield answer

    async def _passed(self, messages: AsyncIterator[LinkMessage]) -> AsyncGenerator[LinkMessage, None]:
        async for message in messages:
            if isinstance(message, LinkOpen) and self.kind == "stranger":
                message = replace(message, secret=bytes(reversed(message.secret)))
            if isinstance(message, SendBlocks) and self.kind == "hung up":
                return
            if isinstance(message, SendBlocks) and self.kind == "wrong request":
                message = replace(message, blocks=(BLOCKS,))
            yield message


@dataclass
class Pair:
    """A reader in this process and its source."""

    transport: Transport
    peer: Peer
    dial: FaultyDial
    source: Process
    pages: np.ndarray
    wanted: np.ndarray

    async def read(self, stall_s: float = TIMEOUT_S) -> None:
        await self.transport.connect(self.peer, TIMEOUT_S)
        await self.transport.read(self.peer, [(block, block) for block in range(BLOCKS)], stall_s)

    async def check(self) -> None:
        """Raises InternalError unless a read works, and gives the source's bytes."""
        self.pages[:] = 0
        await self.read()
        if not np.array_equal(self.pages, self.wanted):
            raise InternalError("a read after a failed link gave other bytes")

    async def fail(self, kind: str) -> None:
        """Raises InternalError if the read did not fail."""
        if kind in ("stranger", "hung up", "wrong request"):
            self.transport.forget(self.peer)
            self.dial.kind = kind
        stopped = kind == "stands still"
        if stopped:
            self.source.popen.send_signal(signal.SIGSTOP)
        try:
            reading = asyncio.create_task(self.read(STALL_S if stopped else TIMEOUT_S))
            if kind in ("abandoned", "forgotten"):
                await asyncio.sleep(0)
                reading.cancel() if kind == "abandoned" else None
                self.transport.forget(self.peer)
            with suppress(asyncio.CancelledError, TandemError):
                await reading
                if kind not in ("abandoned", "forgotten"):  # those may come too late
                    raise InternalError(f"the read ended well, though: {kind}")
        finally:
            self.dial.kind = ""
            if stopped:
                self.source.popen.send_signal(signal.SIGCONT)

    def usage(self) -> tuple[Usage, Usage]:
        return Usage.of(os.getpid()), Usage.of(self.source.popen.pid)


async def repeat(failures: int) -> tuple[list[tuple[Usage, Usage]], float]:
    """The usage of reader and source after the first tenth of the failures, and at the end; and the seconds it took.
    Raises InternalError."""
    pages = np.zeros((BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    async with connected("nccl", pages) as (transport, peer, source):
        assert isinstance(transport.dial, Dialler)
        transport.dial = dial = FaultyDial(transport.dial)
        pair = Pair(transport, peer, dial, source, pages, content(BLOCK_BYTES, BLOCKS))
        await pair.check()
        began, seen = monotonic(), list[tuple[Usage, Usage]]()
        for number, kind in enumerate(itertools.islice(itertools.cycle(KINDS), failures), 1):
            await pair.fail(kind)
            await pair.check()
            if number == max(len(KINDS), failures // 10):
                await asyncio.sleep(2 * STALL_S)
                gc.collect()
                seen.append(pair.usage())
        seconds = monotonic() - began
        gc.collect()
        for _ in range(round(SETTLE_S / STALL_S)):
            if not any(now.leaks(then) for now, then in zip(pair.usage(), seen[0], strict=True)):
                break
            await asyncio.sleep(STALL_S)
        return [*seen, pair.usage()], seconds


def main(
    failures: Annotated[int, typer.Option(min=len(KINDS), help="Links that fail, in turn in each of six ways.")] = 500,
) -> int:
    (first, last), seconds = asyncio.run(repeat(failures))
    print(f"{failures} failed links ({', '.join(KINDS)}), a correct read after each, in {seconds:.1f} s")
    for name, then, now in zip(("reader", "source"), first, last, strict=True):
        print(
            f"{name}: open files {then.files} to {now.files}, threads {then.threads} to {now.threads}, "
            f"memory {then.memory / 2**20:.0f} to {now.memory / 2**20:.0f} MiB"
        )
    leaked = any(now.leaks(then) or now.grows(then) for then, now in zip(first, last, strict=True))
    print("something remains of them" if leaked else "nothing remains of them")
    return int(leaked)
