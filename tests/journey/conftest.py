"""A cluster inside the test's own process: same services, same protocol, over the in-process transport or real NIXL,
with seams that a test can break on purpose."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

import engine.builder
import services.router.server
import services.watchdog
import services.worker
from cluster.state import redis_store
from cluster.state.embedded_valkey import EmbeddedValkey
from engine import engine_thread
from engine.runner import captured_steps
from kvtransfer.sender import Sender
from kvtransfer.types import Ticket
from loadtest.harness.random_checkpoints import make_checkpoint
from services import grpc_server, launch
from services.grpc_server import CHANNEL_OPTIONS
from services.router.routing.path_latency import PathLatencyTracker
from services.router.server import Router
from services.worker import Worker
from tandem import model_settings
from tandem.async_client import AsyncClient
from tandem.settings import Settings
from tests.support.in_process_transport import InProcessTransport
from tests.support.loaded_models import LoadedModels
from tests.support.stopwatch import Stopwatch

Wrap = Callable[[Any, str], Any]  # (transport, worker id) -> transport
PING_TIMEOUT_MS = 60_000


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="tdm-") as folder:
        server = EmbeddedValkey(Path(folder))
        yield server.start()
        server.stop()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama whose outputs vary."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    make_checkpoint(folder, "tiny-llama", seed=0, dtype="float32")
    return folder


class Inside:
    """The parts of a cluster in this process, by worker id, and a client."""

    def __init__(self, settings: Settings, stack: AsyncExitStack) -> None:
        self.settings = settings
        self._stack = stack
        self.workers: dict[str, Worker] = {}
        self.router: Router
        self.client: AsyncClient
        self.exits: Queue[int]  # exit statuses with which workers would have ended their processes

    async def start_worker(self, worker_id: str) -> Worker:
        model, _, role = worker_id.rpartition("-")[0].rpartition("/")
        worker: Any = await launch.start(role, model_settings.settings_of_models(self.settings)[model], worker_id)
        self._stack.push_async_callback(worker.stop, 0.0)
        self.workers[worker_id] = worker
        return worker  # type: ignore[no-any-return]

    async def start_router(self) -> None:
        router: Any = await launch.start("router", self.settings, "router-0")
        self.router = router
        self._stack.push_async_callback(router.stop, 0.0)
        self.client = AsyncClient(router.address)
        self._stack.push_async_callback(self.client.close)

    async def seen(self, count: int) -> None:
        """Waits until the router knows that many ready workers of each model."""
        for model in self.router.models:
            async for workers in model.pools.view.updates():
                if sum(record.role != "router" and record.state == "ready" for record in workers.values()) == count:
                    break

    def held(self) -> dict[str, int]:
        """The blocks that any owner holds, by worker."""
        return {name: worker.engine.pool.held for name, worker in self.workers.items()}

    async def freed(self, within_s: float = 1.0) -> None:
        """Waits until no block is held on any worker."""
        watch = Stopwatch()
        while any(self.held().values()):
            assert watch.within(within_s), f"not within {within_s} s: {self.held()}"
            await asyncio.sleep(0.005)

    async def ledgers_balance(self) -> bool:
        ledgers = [await worker.ledger() for worker in self.workers.values()]
        return all(not ledger.faults and not ledger.entries for ledger in ledgers)


# The rates that every worker of `inside` reports: two on one machine are equal, and what each measures on
# models this small is mostly noise, which would decide where requests go. With `measured=True` they measure.
EQUAL = {"step_s": 0.01, "stream_s": 0.001, "prompt_rate": 10_000.0}


@pytest.fixture(scope="session")
def loaded() -> LoadedModels:
    return LoadedModels()


# For tests whose promise depends on the transport: one that reads by itself, and one in which both sides act.
both_transports = pytest.mark.parametrize("transport", ["inprocess", "nccl"])
# Some promises are also tested with both NIXL and Gloo, of which each pair uses one.
all_transports = pytest.mark.parametrize("transport", ["inprocess", "nccl", "auto"])


@pytest.fixture
def transport() -> str:
    """The transport of the workers of `inside`."""
    return "inprocess"


@pytest.fixture
def inside(
    valkey_url: str,
    tiny: Path,
    transport: str,
    loaded: LoadedModels,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[Any]:
    """`async with inside(prefill=1, decode=1, wrap=..., **settings) as cluster`."""

    @asynccontextmanager
    async def start(
        *,
        prefill: int = 1,
        decode: int = 1,
        wrap: Wrap | None = None,
        measured: bool = False,
        hung_step_s: float = 60.0,
        **settings: Any,
    ) -> AsyncIterator[Inside]:
        exits: Queue[int] = Queue()
        given = {
            "model": "" if "models" in settings else str(tiny),
            "redis": valkey_url,
            "cluster": f"t{abs(hash(request.node.nodeid)) % 10**9}",
            "port": 0,
            "device": "cpu",
            "threads": 1,
            "kv_blocks": 256,
            "block_size": 8,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 32,
            "transport": transport,
            "heartbeat_s": 0.1,
            "heartbeat_ttl_s": 10.0,  # the loop that sends heartbeats also runs the test and transformers' forwards
            "local_prefill": "never",  # a test of the handoff needs one
            "transfer_timeout_s": 30.0,  # source and reader share one loop, which others may keep from a core
            **settings,
        }
        if given["transport"] == "inprocess":  # which is no setting: the workers of a cluster are processes
            given["transport"] = "nixl"
            monkeypatch.setattr(services.worker, "make_transport", lambda _, *rest: InProcessTransport(*rest[:4]))
        if wrap:
            make = services.worker.make_transport

            def wrapped(kind: str, region: Any, worker_id: str, *rest: str) -> Any:
                return wrap(make(kind, region, worker_id, *rest), worker_id)

            monkeypatch.setattr(services.worker, "make_transport", wrapped)
        if not measured:
            told = Worker.record
            monkeypatch.setattr(Worker, "record", lambda worker: dataclasses.replace(told(worker), **EQUAL))
            monkeypatch.setattr(PathLatencyTracker, "observe", lambda *_, **__: None)
        monkeypatch.setattr(services.watchdog, "end_process", exits.put)
        monkeypatch.setattr(engine.builder, "load_model", loaded.load)
        # Captured for 1, 2 and 4 sequences: six captures would take a third of such a worker's start.
        monkeypatch.setitem(captured_steps.LARGEST, "cpu", 4)
        # A worker's process does this once. Here each of hundreds would look at all that the tests have imported.
        for name, nothing in (("importing", nullcontext), ("short_collections", lambda: None)):
            monkeypatch.setattr(launch, name, nothing)
        # The test's own computing shares the event loop, which a worker's process has to itself.
        for module in (services.worker, services.router.server):
            monkeypatch.setattr(module, "MAX_LOOP_BLOCKED_S", 300.0)
        monkeypatch.setattr(redis_store, "CALL_TIMEOUT_S", 30.0)
        # A step waits for whatever else this process and the machine do; the product's 2 s are for a worker by itself.
        monkeypatch.setattr(engine_thread, "LEAST_STEP_S", hung_step_s)
        # All peers are this process: when none answers a ping, the machine is busy.
        patient = {name: PING_TIMEOUT_MS for name, _ in CHANNEL_OPTIONS if name.endswith("_timeout_ms")}
        monkeypatch.setattr(grpc_server, "PING_TIMEOUT_MS", PING_TIMEOUT_MS)
        monkeypatch.setattr(grpc_server, "CHANNEL_OPTIONS", tuple({**dict(CHANNEL_OPTIONS), **patient}.items()))
        async with AsyncExitStack() as stack:
            cluster = Inside(Settings(**given), stack)
            cluster.exits = exits
            await cluster.start_router()
            for model in cluster.router.models:
                for number in range(prefill):
                    await cluster.start_worker(f"{model.pool('prefill')}-{number}")
                for number in range(decode):
                    await cluster.start_worker(f"{model.pool('decode')}-{number}")
            await cluster.seen(prefill + decode)
            yield cluster

    yield start
    loaded.give_back()


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> list[Sender]:
    """The prefill workers' ledgers of open transfers, which no interface exposes."""
    made: list[Sender] = []

    class Recorded(Sender):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.tickets: list[Ticket] = []
            made.append(self)

        def open(self, transfer_id: str) -> Ticket:
            self.tickets.append(super().open(transfer_id))
            return self.tickets[-1]

    monkeypatch.setattr("services.prefill.servicer.Sender", Recorded)
    return made
