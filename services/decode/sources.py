"""The prefill workers that this decode worker can read from: connected before a request needs them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import structlog

from engine.layout import KvLayout
from kvtransfer.blocks import Peer
from kvtransfer.transport import Transport
from services.convert import peer_from
from services.server import Channels
from services.view import ClusterView
from tandem.errors import IncompatibleLayout, StaleTransfer, TandemError
from tandem.status import calling, known
from tandem.v1 import prefill_pb2, prefill_pb2_grpc

log = structlog.get_logger(__name__)
CONNECT_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Source:
    """One life of one prefill worker: how to call it and how to read from it."""

    peer: Peer
    stub: prefill_pb2_grpc.PrefillServiceStub
    adapters: dict[str, bytes]  # name to fingerprint


class Sources:
    """Connects to every prefill worker that the registry shows, and forgets those that are gone."""

    def __init__(self, transport: Transport, layout: KvLayout, channels: Channels) -> None:
        self._transport = transport
        self._layout = layout
        self._channels = channels
        self._connecting: dict[tuple[str, str], asyncio.Task[Source]] = {}  # (worker id, incarnation)
        self._background: set[asyncio.Task[None]] = set()

    async def get(self, worker_id: str, incarnation: str, address: str) -> Source:
        """The connected source. Raises IncompatibleLayout, StaleTransfer (it lives as another incarnation by now),
        WorkerLost, DeadlineExceeded."""
        key = (worker_id, incarnation)
        task = self._connecting.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            task = self._connecting[key] = asyncio.create_task(self._connect(worker_id, incarnation, address))
        with calling(worker_id):  # the connection may be given up while it is made: the source is gone
            return await asyncio.shield(task)  # a cancelled request must not cancel everybody's connection

    async def follow(self, view: ClusterView) -> None:
        """Keep up with the registry, until cancelled."""
        async for _ in view.updates():
            living = view.of_role("prefill")
            keys = {(record.worker_id, record.incarnation) for record in living}
            for key in [key for key in self._connecting if key not in keys]:
                await self._forget(key)
            for record in living:
                if (record.worker_id, record.incarnation) not in self._connecting:
                    task = asyncio.create_task(self._warm(record.worker_id, record.incarnation, record.address))
                    self._background.add(task)
                    task.add_done_callback(self._background.discard)
            self._channels.keep_only({record.address for record in living})

    async def _warm(self, worker_id: str, incarnation: str, address: str) -> None:
        try:
            await self.get(worker_id, incarnation, address)
        except TandemError as error:
            log.warning("source.not_connected", source=worker_id, error=error.message)

    async def _connect(self, worker_id: str, incarnation: str, address: str) -> Source:
        stub = prefill_pb2_grpc.PrefillServiceStub(self._channels.to(address))
        try:
            with calling(worker_id):
                answer: prefill_pb2.GetPeerResponse = await stub.GetPeer(
                    prefill_pb2.GetPeerRequest(), timeout=CONNECT_TIMEOUT_S
                )
            peer = peer_from(answer.peer)
            if (peer.worker_id, peer.incarnation) != (worker_id, incarnation):
                raise StaleTransfer(
                    f"{address} is {peer.worker_id} in life {peer.incarnation}, not {worker_id} in {incarnation}",
                    reason="STALE_INCARNATION",
                )
            differences = self._layout.differences(KvLayout.from_json(answer.layout_json))
            if differences:
                raise IncompatibleLayout(f"{worker_id} cannot hand over to this worker: {'; '.join(differences)}")
            await self._transport.connect(peer, CONNECT_TIMEOUT_S)
        except Exception as error:
            raise known(error, "connecting to a prefill worker") from error
        log.info("source.connected", source=worker_id, incarnation=incarnation, link=self._transport.link(peer))
        return Source(peer, stub, dict(answer.adapters))

    async def _forget(self, key: tuple[str, str]) -> None:
        task = self._connecting.pop(key)
        if task.done() and not task.cancelled() and task.exception() is None:
            self._transport.forget(task.result().peer)
        else:
            task.cancel()
