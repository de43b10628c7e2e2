"""Pools of workers of several ranks change under streams: a worker starts, drains, switches its role and is replaced as
one, with all of its ranks; and an upgrade to other ranks, and to another KV dtype, refuses no pair."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster.state.registry import Registry
from cluster.supervision.supervisor import Supervisor
from cluster.supervision.worker_process import Started, WorkerProcess
from engine import kernels
from services import launch
from services.worker import Worker
from tandem.errors import Unavailable
from tandem.tasks import once
from tests.journey.test_flip import NEW, Load, switch_role
from tests.support import oracle
from tests.support.faults import slow_down
from tests.support.rank_copies import rank_copies
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(
    kernels.serving(kernels.CPU) == kernels.REFERENCE, reason="ranks need the compiled operators"
)
GRACE_S = 30.0
UPGRADES = [
    ("decode", {"decode_tp": 2}),
    ("prefill", {"prefill_tp": 2}),
    ("decode", {"kv_dtype": "int8"}),
]


@pytest.fixture(autouse=True)
def copies() -> Iterator[list[Any]]:
    """The processes of all ranks other than rank 0, in the order of their start."""
    with rank_copies() as started:
        yield started


class Hosted:
    """A worker in this process, as its supervisor sees it."""

    node = ""

    def __init__(self, cluster: Any, worker_id: str, one_loads: asyncio.Lock) -> None:
        self._cluster, self._worker_id, self._one_loads = cluster, worker_id, one_loads

    @property
    def _worker(self) -> Worker:
        worker: Worker = self._cluster.workers[self._worker_id]
        return worker

    async def start(self, report: Callable[[str], None]) -> Started:
        async with self._one_loads:
            await self._cluster.start_worker(self._worker_id)
        return self._started()

    async def wait(self) -> None:
        await self._worker.wait()

    async def stop(self, grace_s: float) -> None:
        await self._worker.stop(grace_s)

    async def switch_role(self, worker_id: str, grace_s: float, report: Callable[[str], None]) -> Started:
        await switch_role(self._cluster, self._worker_id, worker_id, grace_s)
        self._worker_id = worker_id
        return self._started()

    def kill(self) -> None:
        """The process ends, and what serves in it."""
        if self._worker_id in self._cluster.workers:
            once(self._worker.stop(0.0), name="kill")

    def _started(self) -> Started:
        worker = self._worker
        return Started(worker.address, os.getpid(), worker.incarnation, worker.can_switch_role)


class HereHost:
    """Starts workers in this process."""

    silent = False

    def __init__(self, cluster: Any) -> None:
        self._cluster, self._one_loads = cluster, asyncio.Lock()

    def create(self, worker_id: str) -> WorkerProcess:
        return Hosted(self._cluster, worker_id, self._one_loads)

    def keep_spares(self, count: int) -> None:
        pass

    async def leaving(self) -> set[str]:
        return set()

    async def survivors(self) -> dict[str, WorkerProcess]:
        return {}

    late_survivors = survivors


@asynccontextmanager
async def supervised(cluster: Any, **sizes: int) -> AsyncIterator[None]:
    """The product's supervisor over workers in this process."""
    registry = Registry(cluster.settings.redis, cluster.settings.cluster, cluster.settings.heartbeat_ttl_s)
    await registry.set_wanted(sizes)
    supervisor = Supervisor(HereHost(cluster), registry, GRACE_S)
    running = asyncio.create_task(supervisor.run())
    try:
        yield
    finally:
        await supervisor.stop(0.0)
        await running
        await registry.close()


async def test_sizes_drains_and_switches_count_workers_and_not_ranks(
    inside: Any, tiny: Path, copies: list[Any]
) -> None:
    """Workers of two ranks, and clients that send continuously. The decode pool grows, its surplus worker becomes a
    prefill worker with the ranks that it has, one is drained and replaced, and one leaves: the router sees as many
    workers as wanted, each has one other rank, no rank survives its worker, and every answer is that of the undisturbed
    model."""
    prompts = oracle.prompts(tiny, [30, 57, 41])

    def living() -> list[int]:
        """The places in `copies` of ranks that run."""
        return [place for place, rank in enumerate(copies) if rank.poll() is None]

    async with (
        inside(prefill=0, decode=0, prefill_tp=2, decode_tp=2) as cluster,
        supervised(cluster, prefill=1, decode=1),
    ):
        client, load = cluster.client, Load(cluster, prompts)
        await cluster.seen(2)
        assert living() == [0, 1]
        clients = [asyncio.create_task(load.client(number)) for number in range(3)]
        await client.scale(decode=2)
        await load.until_seen("decode-1")
        assert living() == [0, 1, 2]
        await client.scale(prefill=2, decode=1)
        await load.until_seen("prefill-1")
        assert (set(cluster.workers), living()) == ({"prefill-0", "prefill-1", "decode-0"}, [0, 1, 2])
        before = cluster.workers["prefill-0"]
        await client.drain("prefill-0", GRACE_S)
        await until(lambda: cluster.workers["prefill-0"] is not before)
        assert (len(living()), len(copies)) == (3, 4)
        await client.scale(prefill=1)
        await until(lambda: len(living()) == 2)
        load.seen.clear()
        await load.until_seen("prefill-0")
        load.stop()
        await asyncio.gather(*clients)
        await cluster.freed()
    assert not living()
    expected = [oracle.greedy(tiny, prompt, NEW) for prompt in prompts]
    assert [place for place, answer in load.answers if answer.token_ids != expected[place]] == []


async def test_a_rank_that_dies_between_two_roles_is_noticed(inside: Any, copies: list[Any]) -> None:
    """Nothing of the worker runs at that time. The next incarnation does not start; it would say that it is ready, and
    refuse every request."""
    async with inside(prefill=0, decode=1, prefill_tp=2, decode_tp=2) as cluster:
        engine = await cluster.workers["decode-0"].release(0.0)
        copies[0].send_signal(signal.SIGKILL)
        await until(lambda: engine.broken)
        with pytest.raises(Unavailable, match="a rank of this worker is lost"):
            await launch.start("prefill", cluster.settings, "prefill-0", engine=engine)
        engine.stop()


async def test_an_upgrade_to_other_ranks_and_another_type_of_kv_refuses_no_pair(inside: Any, tiny: Path) -> None:
    """One pool after the other, while clients send continuously: a worker with the new setting comes, and the former
    one drains with requests in progress. All pairs of the moment can pair, no request is computed without one, and
    each answer is that of an undisturbed pair with the same types of KV: of transformers until a type changes."""
    prompts = oracle.prompts(tiny, [30, 57, 41])
    stored = {"prefill-0": "auto", "decode-0": "auto"}
    expected: dict[tuple[str, str], list[Any]] = {
        ("auto", "auto"): [oracle.greedy(tiny, prompt, NEW) for prompt in prompts]
    }
    wrong: list[Any] = []
    async with inside() as cluster:
        serving = {"prefill": "prefill-0", "decode": "decode-0"}
        for number, (pool, change) in enumerate(UPGRADES, 1):
            cluster.settings = cluster.settings.model_copy(update=change)
            before, after = serving[pool], f"{pool}-{number}"
            slow_down(cluster.workers[before], 0.005)
            load = Load(cluster, prompts)
            clients = [asyncio.create_task(load.client(client)) for client in range(3)]
            await load.until_seen(before)
            worker = await cluster.start_worker(after)
            assert worker.can_switch_role == (number > 1)  # not into a pool whose workers have other ranks
            await cluster.seen(3)
            assert [pair.compatible for pair in (await cluster.client.diagnose()).pairs] == [True, True]
            await until(lambda before=before: cluster.held()[before])
            await cluster.client.drain(before, GRACE_S)
            await load.until_seen(after)
            load.stop()
            await asyncio.gather(*clients)
            await cluster.workers.pop(before).wait()
            serving[pool], stored[after] = after, cluster.settings.kv_dtype
            alone = [await load.ask(place) for place in range(len(prompts))]
            types = stored[serving["prefill"]], stored[serving["decode"]]
            expected.setdefault(types, [one.token_ids for one in alone])
            for place, answer in [*load.answers, *enumerate(alone)]:
                receipt = answer.receipt
                assert receipt.path == "disaggregated", receipt.notes
                types = stored[receipt.prefill_worker], stored[receipt.decode_worker]
                if answer.token_ids != expected[types][place]:
                    wrong.append((types, place, answer))
        assert await cluster.ledgers_balance()
    assert not wrong
    assert list(expected) == [("auto", "auto"), ("auto", "int8")]
