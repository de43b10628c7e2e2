"""Probes of a link write to their own blocks, which no other owner gets before the last byte has arrived."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvtransfer.types import Peer
from services.decode import link_probes
from services.grpc_server import Channels
from tandem.errors import Busy
from tandem.grpc_errors import calling
from tandem.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from tests.support.faults import Harm

Pairs = Sequence[tuple[int, int]]


class HeldReads:
    """Reads of the decode worker that end when `go` is set. `blocks` are those to which they write."""

    def __init__(self) -> None:
        self.go, self.begun = asyncio.Event(), asyncio.Event()
        self.blocks: set[int] = set()

    def wrap(self, inner: Any, worker_id: str) -> Any:
        return Harm(inner, before=self._hold) if worker_id.startswith("decode") else inner

    async def _hold(self, harm: Harm, peer: Peer, pairs: Pairs) -> None:
        self.blocks |= {local for _, local in pairs}
        self.begun.set()
        async with asyncio.timeout(60):
            await self.go.wait()


def owned(worker: Any) -> set[int]:
    pool = worker.engine.pool
    return {block for owner in pool.owners() for block in pool.table(owner)}


@asynccontextmanager
async def prober(cluster: Any) -> AsyncIterator[Any]:
    """Calls ProbePair of decode-0 for prefill-0."""
    channels, prefill = Channels(), cluster.workers["prefill-0"]
    stub = decode_pb2_grpc.DecodeServiceStub(channels.to(cluster.workers["decode-0"].address))
    where = common_pb2.WorkerRef(worker_id="prefill-0", incarnation=prefill.incarnation, address=prefill.address)

    async def probe() -> decode_pb2.ProbePairResponse:
        with calling("decode-0"):
            found: decode_pb2.ProbePairResponse = await stub.ProbePair(decode_pb2.ProbePairRequest(prefill=where))
            return found

    yield probe
    await channels.close()


async def test_a_probe_does_not_free_the_blocks_that_another_one_writes_into(
    inside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second probe is refused while the first one's read is held, and the first one's blocks stay held until
    then."""
    reads = HeldReads()
    monkeypatch.setattr(link_probes, "PROBE_WAIT_S", 0.1)
    async with inside(wrap=reads.wrap) as cluster, prober(cluster) as probe:
        first = asyncio.create_task(probe())
        await asyncio.wait_for(reads.begun.wait(), 10)
        (refused,) = await asyncio.gather(probe(), return_exceptions=True)
        assert reads.blocks <= owned(cluster.workers["decode-0"])
        assert not (await cluster.workers["decode-0"].ledger()).faults
        assert isinstance(refused, Busy)
        assert refused.reason == "PROBING"
        reads.go.set()
        assert (await first).compatible
        assert cluster.workers["decode-0"].engine.pool.held == 0
        assert await cluster.ledgers_balance()


async def test_probes_that_come_at_once_all_succeed(inside: Any) -> None:
    """Concurrent probes run one after another, and afterwards no block is held."""
    async with inside() as cluster, prober(cluster) as probe:
        found = await asyncio.gather(*(probe() for _ in range(4)))
        assert all(one.compatible and one.bytes_per_second > 0 for one in found)
        assert cluster.workers["decode-0"].engine.pool.held == 0
        assert await cluster.ledgers_balance()


async def test_a_probe_that_is_cancelled_holds_its_blocks_until_its_read_has_ended(inside: Any) -> None:
    """The read must not write to blocks of the next owner."""
    started, copied, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
    blocks: set[int] = set()

    class Stubborn(Harm):
        """A read over a link that cannot be cancelled."""

        async def read(self, peer: Peer, pairs: Pairs, timeout: float) -> Any:
            blocks.update(local for _, local in pairs)
            started.set()
            try:
                await asyncio.Event().wait()
            finally:
                await copied.wait()
                ended.set()

    wrap = lambda inner, who: Stubborn(inner) if who.startswith("decode") else inner  # noqa: E731
    async with inside(wrap=wrap) as cluster, prober(cluster) as probe:
        decode = cluster.workers["decode-0"]
        call = asyncio.create_task(probe())
        await asyncio.wait_for(started.wait(), 10)
        call.cancel()
        await asyncio.wait({call})
        assert blocks <= owned(decode)
        copied.set()
        await asyncio.wait_for(ended.wait(), 10)
        await cluster.freed()
        assert await cluster.ledgers_balance()
