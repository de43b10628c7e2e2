"""A small real gRPC server with canned answers, and one face for both clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import grpc
import pytest

from tandem.client import AsyncClient, Client
from tandem.errors import InvalidRequest, NotFound
from tandem.grpc_errors import ErrorInterceptor
from tandem.v1 import admin_pb2, admin_pb2_grpc, common_pb2, generation_pb2, generation_pb2_grpc

Event = generation_pb2.GenerateResponse
Script = Callable[[generation_pb2.GenerateRequest], AsyncIterator[Event]]


def started(request_id: str = "r-1", choices: int = 1) -> Event:
    said = generation_pb2.Started(request_id=request_id, model="toy", prompt_tokens=3, choices=choices)
    return Event(started=said)


def delta(index: int, ids: list[int], text: str, choice: int = 0) -> Event:
    return Event(delta=generation_pb2.Delta(index=index, token_ids=ids, text=text, choice=choice))


def finished(tokens: int = 4, text: str = "", choice: int = 0) -> Event:
    receipt = generation_pb2.Receipt(
        request_id="r-1",
        model="toy",
        path=common_pb2.PATH_DISAGGREGATED,
        prefill_worker="prefill-0",
        decode_worker="decode-0",
        prompt_tokens=3,
        completion_tokens=tokens,
        cached_tokens=2,
        seed=2**64 - 1,
        ttft_seconds=0.04,
        phases=[
            generation_pb2.Phase(name="tokenize", seconds=0.01),
            generation_pb2.Phase(name="prefill_compute", seconds=0.03),
        ],
        tpot_seconds=0.005,
        total_seconds=0.06,
        transfer=common_pb2.TransferReport(
            transport="nixl:ucx:cma", bytes=4096, blocks=2, seconds=0.002, exposed_seconds=0.001
        ),
        attempts=1,
        notes=["a note"],
        choice=choice,
    )
    reason = common_pb2.FINISH_REASON_LENGTH
    return Event(finished=generation_pb2.Finished(reason=reason, text=text, receipt=receipt, choice=choice))


WHOLE = [started(), delta(0, [5], "He"), delta(1, [6, 7], "llo"), delta(3, [8], ""), finished(4, "!")]


async def whole(_: generation_pb2.GenerateRequest) -> AsyncIterator[Event]:
    for event in WHOLE:
        yield event


def ledger(worker: str, *, free: int = 5, cached: int = 1, held: int = 2, total: int = 8) -> common_pb2.Ledger:
    return common_pb2.Ledger(
        worker=common_pb2.WorkerRef(worker_id=worker, incarnation="i-1", address="127.0.0.1:1"),
        total=total,
        free=free,
        cached=cached,
        held=held,
        entries=[common_pb2.LedgerEntry(owner="sequence:r-9", blocks=[3, 4], age_seconds=1.5)],
    )


def worker(worker_id: str, role: str, address: str = "127.0.0.1:1") -> admin_pb2.Worker:
    return admin_pb2.Worker(
        worker_id=worker_id,
        role=role,
        state="ready",
        pid=7,
        incarnation="i-1",
        address=address,
        running=1,
        blocks_total=8,
        blocks_held=2,
        kv_dtype="int8",
        kv_token_bytes=816.0,
        heartbeat_age_seconds=0.25,
        node="gpu3",
        device="cuda:1",
    )


RED = admin_pb2.ServedAdapter(name="red", path="adapters/red", fingerprint=b"\x01\xff" * 8, loaded_at=5.0)
GIVEN = admin_pb2.ServedAdapter(name="given", path="/given")


class Fake(generation_pb2_grpc.GenerationServiceServicer, admin_pb2_grpc.AdminServiceServicer):
    """Plays `script` for every Generate and answers the rest from its fields. Remembers what it was asked."""

    def __init__(self) -> None:
        self.target = ""
        self.script: Script = whole
        self.before_workers: Callable[[], Awaitable[object]] = partial(asyncio.sleep, 0)
        self.requests: list[Any] = []
        self.peers: set[str] = set()  # connections that asked
        self.cancelled = asyncio.Event()
        self.receipts: list[generation_pb2.Receipt] = []
        self.workers = [worker("prefill-0", "prefill"), worker("decode-0", "decode")]
        self.audit = admin_pb2.AuditResponse(ledgers=[ledger("prefill-0"), ledger("decode-0")])
        pair = admin_pb2.Pair(
            prefill_worker="prefill-0",
            decode_worker="decode-0",
            compatible=True,
            transport="nixl:ucx:cma",
            bytes_per_second=2.5e9,
        )
        self.diagnosis = admin_pb2.DiagnoseResponse(
            pairs=[pair], registry_reachable=True, registry_round_trip_seconds=0.0003, versions={"tandem": "0.1.0"}
        )

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Event]:
        self.requests.append(request)
        self.peers.add(context.peer())
        try:
            async for event in self.script(request):
                yield event
        except (asyncio.CancelledError, GeneratorExit):  # the second one while gRPC was still sending
            self.cancelled.set()
            raise

    async def GetModelInfo(self, request: Any, context: Any) -> generation_pb2.GetModelInfoResponse:
        return generation_pb2.GetModelInfoResponse(
            model="toy", max_context_tokens=128, vocab_size=300, eos_token_ids=[2], has_tokenizer=True
        )

    async def ListWorkers(self, request: Any, context: Any) -> admin_pb2.ListWorkersResponse:
        await self.before_workers()
        return admin_pb2.ListWorkersResponse(workers=self.workers, wanted={"prefill": 1, "decode": 1})

    async def ScalePools(self, request: Any, context: Any) -> admin_pb2.ScalePoolsResponse:
        self.requests.append(request)
        return admin_pb2.ScalePoolsResponse(wanted={"prefill": 1, "decode": 1, **request.wanted})

    async def GetScaling(self, request: Any, context: Any) -> admin_pb2.GetScalingResponse:
        pools = [
            admin_pb2.ScalingVerdict(role="prefill", size=1, wanted=1, why="0 prompt tokens/s arrive"),
            admin_pb2.ScalingVerdict(role="decode", size=1, wanted=2, why="9 requests"),
        ]
        return admin_pb2.GetScalingResponse(mode="dry-run", age_seconds=0.25, pools=pools)

    async def DrainWorker(self, request: Any, context: Any) -> admin_pb2.DrainWorkerResponse:
        self.requests.append(request)
        if request.worker_id not in {worker.worker_id for worker in self.workers}:
            raise NotFound(f"no worker {request.worker_id}", field="worker_id")
        return admin_pb2.DrainWorkerResponse(finished=3, cut=1)

    async def ListAdapters(self, request: Any, context: Any) -> admin_pb2.ListAdaptersResponse:
        return admin_pb2.ListAdaptersResponse(adapters=[RED, GIVEN])

    async def LoadAdapter(self, request: Any, context: Any) -> admin_pb2.LoadAdapterResponse:
        self.requests.append(request)
        if request.name == RED.name:
            raise InvalidRequest("red has already been loaded", field="name")
        return admin_pb2.LoadAdapterResponse(adapter=admin_pb2.ServedAdapter(name=request.name, path=request.path))

    async def UnloadAdapter(self, request: Any, context: Any) -> admin_pb2.UnloadAdapterResponse:
        self.requests.append(request)
        return admin_pb2.UnloadAdapterResponse()

    async def Audit(self, request: Any, context: Any) -> admin_pb2.AuditResponse:
        return self.audit

    async def ListReceipts(self, request: Any, context: Any) -> admin_pb2.ListReceiptsResponse:
        self.requests.append(request)
        return admin_pb2.ListReceiptsResponse(receipts=self.receipts)

    async def Diagnose(self, request: Any, context: Any) -> admin_pb2.DiagnoseResponse:
        return self.diagnosis


@pytest.fixture
async def fake() -> AsyncIterator[Fake]:
    servicer = Fake()
    server = grpc.aio.server(
        interceptors=[ErrorInterceptor()], options=[("grpc.max_receive_message_length", 4 * 1024 * 1024)]
    )
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    servicer.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield servicer
    await server.stop(None)


class Threaded:
    """The blocking client behind AsyncClient's face: each call in a thread, as a program without asyncio makes it."""

    def __init__(self, target: str) -> None:
        self._client = Client(target)

    async def stream(self, *args: Any, **options: Any) -> AsyncIterator[Any]:
        pieces = self._client.stream(*args, **options)
        try:
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                yield piece
        finally:
            await asyncio.to_thread(pieces.close)

    async def close(self) -> None:
        await asyncio.to_thread(self._client.close)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: asyncio.to_thread(getattr(self._client, name), *args, **options)


@pytest.fixture(params=["async", "sync"])
async def client(request: pytest.FixtureRequest, fake: Fake) -> AsyncIterator[Any]:
    """AsyncClient, then Client: a test that uses it proves that both keep the promise."""
    one = AsyncClient(fake.target) if request.param == "async" else Threaded(fake.target)
    yield one
    await one.close()


@pytest.fixture
def events() -> Any:
    """The builders of this file, for scripts."""

    class Events:
        started = staticmethod(started)
        delta = staticmethod(delta)
        finished = staticmethod(finished)
        ledger = staticmethod(ledger)
        worker = staticmethod(worker)

    return Events
