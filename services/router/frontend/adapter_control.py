"""Loads and unloads adapters while the cluster runs: on all workers, or on none.

load     every ready worker reads the folder ─▶ all found one fingerprint ─▶ the registry's list ─▶ all processes follow
unload   the registry's list ─▶ all routers refuse the name ─▶ the requests that were admitted end ─▶ the slots are free

Both return when every router and every ready worker has the new list, so the next request may go to any of them.
"""

from __future__ import annotations

import asyncio
import re

import structlog

from cluster.state.adapter_list import LoadedAdapter, taken, unknown
from cluster.state.registry import State, WorkerRecord
from services.grpc_server import Channels
from services.router.frontend.json_body import is_utf8
from services.router.models import Model, Models
from services.worker_liveness import WorkerLiveness
from tandem.errors import (
    CheckpointRefused,
    InvalidRequest,
    NotFound,
    NoWorker,
    PreconditionFailed,
    TandemError,
    Unavailable,
)
from tandem.grpc_errors import calling
from tandem.settings import ADAPTER_NAME
from tandem.v1 import admin_pb2, worker_pb2, worker_pb2_grpc

log = structlog.get_logger(__name__)
PREPARE_TIMEOUT_S = 45.0  # for a worker to read and check an adapter; less than services.runtime_adapters.PREPARED_S
SEEN_TIMEOUT_S = 5.0  # for every process to read the new list


class AdapterControl:
    def __init__(self, models: Models, channels: Channels) -> None:
        self._models = models
        self._channels = channels

    def listed(self, model_name: str = "") -> list[admin_pb2.ServedAdapter]:
        """The adapters that requests may name: of all models, or of one. Raises NotFound."""
        models = [self._models.named(model_name)] if model_name else self._models
        return [one for model in models for one in _listed(model)]

    async def load(self, name: str, path: str, model_name: str = "") -> admin_pb2.ServedAdapter:
        """Raises InvalidRequest for a name that is taken or an adapter that the workers refuse, NotFound for a folder
        without an adapter, PreconditionFailed without `adapter_root`, Unavailable if a worker or the registry does not
        answer. Then nothing has changed."""
        model = self._models.named(model_name)
        if not path or not is_utf8(path):
            raise InvalidRequest("path names no folder", field="path", bound="a folder within adapter_root, in UTF-8")
        self._check_name(name)
        if model.pools.settings.adapter_root is None:
            raise PreconditionFailed(
                "adapters cannot be loaded while this cluster runs; start it with adapter_root",
                reason="NO_ADAPTER_ROOT",
                field="adapter_root",
                bound="the folder that has them",
            )
        adapter = LoadedAdapter(path, (await self._prepared(model.pools.view, name, path)).hex())
        await _seen_by_all(model.pools.view, await model.pools.adapters.add(name, adapter))
        log.info("adapter.listed", adapter=name, path=path, fingerprint=adapter.fingerprint, model=model.key)
        return _served(name, adapter, model.key)

    async def unload(self, name: str) -> None:
        """Raises NotFound, PreconditionFailed for an adapter of the settings, Unavailable."""
        if any(name in model.pools.settings.adapters for model in self._models):
            raise PreconditionFailed(
                f"{name} is of the setting adapters; it is served until the cluster is restarted without it",
                reason="ADAPTER_OF_SETTINGS",
                field="name",
                bound="an adapter that was loaded while the cluster runs",
            )
        if not re.fullmatch(ADAPTER_NAME, name):
            raise unknown(name)
        model = next((one for one in self._models if name in one.served.adapters), self._models.first)
        await _seen_by_all(model.pools.view, await model.pools.adapters.remove(name))
        log.info("adapter.unlisted", adapter=name, model=model.key)

    def _check_name(self, name: str) -> None:
        if not re.fullmatch(ADAPTER_NAME, name):
            raise InvalidRequest(
                f"{name!r:.140} cannot be the name of an adapter",
                field="name",
                bound="1 to 128 letters, digits and ._/:-, the first one a letter or a digit",
            )
        if any(name in model.served.adapters for model in self._models):
            raise taken(name)
        if self._models.is_taken(name):
            raise InvalidRequest(f"{name} is the name of a model", field="name", bound="a name that is free")

    async def _prepared(self, view: WorkerLiveness, name: str, path: str) -> bytes:
        """The fingerprint that all ready workers found."""
        await view.refresh()
        workers = [one for one in view.workers.values() if one.role != "router" and one.state is State.READY]
        if not workers:
            raise NoWorker("no worker is ready to check the adapter; `tandem workers` shows the pools", retry_after=2.0)
        answers = await asyncio.gather(*(self._prepare(worker, name, path) for worker in workers))
        errors = [answer for answer in answers if isinstance(answer, TandemError)]
        if errors:
            raise min(errors, key=lambda error: error.http >= 500)  # a refusal is more informative than a lost worker
        found = {answer: worker.worker_id for answer, worker in zip(answers, workers, strict=True)}
        if len(found) > 1:
            raise InvalidRequest(
                f"the workers found different adapters in {path!r:.200}, such as {' and '.join(found.values())}",
                field="path",
                bound="a folder with the same content on all workers",
            )
        fingerprint = answers[0]
        assert isinstance(fingerprint, bytes)
        return fingerprint

    async def _prepare(self, worker: WorkerRecord, name: str, path: str) -> bytes | TandemError:
        stub = worker_pb2_grpc.WorkerServiceStub(self._channels.to(worker.address))
        request = worker_pb2.PrepareAdapterRequest(name=name, path=path)
        try:
            with calling(worker.worker_id):
                answer = await stub.PrepareAdapter(request, timeout=PREPARE_TIMEOUT_S)
        except TandemError as error:
            return _refusal(worker.worker_id, error)
        return bytes(answer.fingerprint)


async def _seen_by_all(view: WorkerLiveness, version: int) -> None:
    """Waits until every ready worker and every router that does not drain has read this version of the list, at most
    SEEN_TIMEOUT_S."""
    behind: list[str] = []
    try:
        async with asyncio.timeout(SEEN_TIMEOUT_S):
            async for workers in view.updates():
                behind = [
                    record.worker_id
                    for record in workers.values()
                    if record.state is State.READY or (record.role == "router" and record.state is State.STARTING)
                    if record.adapters_version < version
                ]
                if not behind:
                    return
    except TimeoutError:
        log.warning("adapters.behind", version=version, workers=behind)


def _listed(model: Model) -> list[admin_pb2.ServedAdapter]:
    given, loaded = model.pools.settings.adapters, model.pools.adapters.list.adapters
    return [
        *(admin_pb2.ServedAdapter(name=name, path=path, model=model.key) for name, path in given.items()),
        *(_served(name, adapter, model.key) for name, adapter in loaded.items() if name not in given),
    ]


def _refusal(worker_id: str, error: TandemError) -> TandemError:
    """The operator's error, from a worker's error."""
    message = f"{worker_id}: {error.message}; no worker has got the adapter"
    if isinstance(error, CheckpointRefused):
        return InvalidRequest(
            message, reason=error.reason, field="path", bound="an adapter that fits the served model and its slots"
        )
    if isinstance(error, InvalidRequest | NotFound | PreconditionFailed):
        return type(error)(message, reason=error.reason, field=error.field, bound=error.bound)
    return Unavailable(message, reason="ADAPTER_NOT_PREPARED", retry_after=1.0)


def _served(name: str, adapter: LoadedAdapter, model: str) -> admin_pb2.ServedAdapter:
    return admin_pb2.ServedAdapter(
        name=name, path=adapter.path, fingerprint=adapter.digest, loaded_at=adapter.loaded_at, model=model
    )
