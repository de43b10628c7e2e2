"""The prefill workers that this decode worker reads from: connected before a request needs them, and refused while
their KV does not arrive.

    connect ─▶ usable ──a transfer fails──▶ refused at once, verified in the background ──a block arrives──▶ usable

Verification takes as long as it takes to detect a stalled link. Requests are refused meanwhile, which costs
milliseconds, and go to another prefill worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog
from structlog.contextvars import clear_contextvars

from engine.core.kv_layout import KvLayout
from kvtransfer.transport import Transport
from kvtransfer.types import LinkMessage, Peer
from services.decode.kv_landing import KvLanding, KvLandings
from services.grpc_server import Channels
from services.kv_links import dialled
from services.proto_convert import peer_from
from services.worker_liveness import Incarnation, WorkerLiveness
from tandem.errors import (
    Busy,
    DeadlineExceeded,
    IncompatibleLayout,
    InternalError,
    StaleTransfer,
    TandemError,
    TransferFailed,
    WorkerLost,
)
from tandem.grpc_errors import calling, known
from tandem.tasks import failed, once
from tandem.v1 import prefill_pb2, prefill_pb2_grpc

log = structlog.get_logger(__name__)
ANSWER_TIMEOUT_S = 5.0  # of GetPeer
CONNECT_TIMEOUT_S = 5.0  # of the KV plane
VERIFY_MIN_S, VERIFY_MAX_S = 0.1, 5.0  # between two verifications, or measurements; doubles after each failure


@dataclass(frozen=True)
class PrefillPeer:
    """One incarnation of one prefill worker: how to call it and how to read from it."""

    incarnation: Incarnation
    peer: Peer
    stub: prefill_pb2_grpc.PrefillServiceStub
    transport: Transport
    landing: KvLanding | None  # receives blocks of another layout; None: the layout is this worker's

    async def adapters(self) -> dict[str, bytes]:
        """The fingerprints of the adapters that it serves now, by name. Raises Unavailable."""
        return dict((await _get_peer(self.stub, self.incarnation[0])).adapters)


Verify = Callable[[PrefillPeer], Awaitable[object]]


@dataclass
class _Link:
    incarnation: Incarnation
    address: str
    peer: Peer | None = None  # as it last described itself
    transport: Transport | None = None
    connecting: asyncio.Task[PrefillPeer] | None = None
    users: int = 0
    failed: TandemError | None = None  # why requests are refused; None: usable
    verifying: asyncio.Task[None] | None = None
    warming: asyncio.Task[None] | None = None


class PrefillPeers:
    """Connects to every prefill worker in the registry. `verify` reads a block from a connected source, and raises a
    TandemError when it does not arrive; `compare` measures the transports of a new source, if there are several."""

    def __init__(
        self,
        transport: Transport,
        landings: KvLandings,
        channels: Channels,
        verify: Verify,
        compare: Verify,
    ) -> None:
        self._transport = transport
        self._landings = landings
        self._channels = channels
        self._verify = verify
        self._compare = compare
        self._links: dict[Incarnation, _Link] = {}

    @asynccontextmanager
    async def using(self, worker_id: str, incarnation: str, address: str) -> AsyncIterator[PrefillPeer]:
        """The connected prefill worker, kept until the block ends. Raises IncompatibleLayout, StaleTransfer (the worker
        has another incarnation now), WorkerLost, and TransferFailed: if it cannot be connected, or at once if a
        transfer from it has failed and it has not been verified since."""
        link = self._link((worker_id, incarnation), address)
        link.users += 1
        try:
            yield await self._get(link)
        finally:
            link.users -= 1

    def failed(self, prefill: PrefillPeer, error: TransferFailed) -> None:
        """A transfer from it has failed: refuses it until a background verification succeeds."""
        if link := self._links.get(prefill.incarnation):
            self._refuse(link, error)

    async def follow(self, view: WorkerLiveness) -> None:
        """Follows the registry, until cancelled."""
        async for _ in view.updates():
            records = {key: record for key, record in view.incarnations.items() if record.role == "prefill"}
            for link in [link for key, link in self._links.items() if key not in records and not link.users]:
                await self._forget(link)
            for incarnation, record in records.items():
                link = self._link(incarnation, record.address)  # a request may have made it before
                if link.warming is None:
                    link.warming = once(self._warm(link), name=f"warm {record.worker_id}")
            self._channels.keep_only({link.address for link in self._links.values()})

    async def close(self) -> None:
        """Ends the background tasks."""
        for link in list(self._links.values()):
            await self._forget(link)

    def _link(self, incarnation: Incarnation, address: str) -> _Link:
        if incarnation not in self._links:
            self._links[incarnation] = _Link(incarnation, address)
        return self._links[incarnation]

    async def _get(self, link: _Link) -> PrefillPeer:
        if link.failed:
            raise type(link.failed)(link.failed.message, reason=link.failed.reason)
        task = link.connecting
        if task is None or failed(task):
            task = self._begin(link)
        try:
            with calling(link.incarnation[0]):  # the connect is cancelled when the worker is forgotten
                return await asyncio.shield(task)  # a cancelled request must not cancel the shared connect
        except TransferFailed as error:
            self._refuse(link, error)
            raise

    def _refuse(self, link: _Link, error: TandemError) -> None:
        link.failed = error
        if link.verifying is None or link.verifying.done():
            link.verifying = once(self._verified(link), name=f"verify {link.incarnation[0]}")

    async def _verified(self, link: _Link) -> None:
        """Repeats the verification until a block arrives, or the worker has another incarnation or layout."""
        clear_contextvars()  # of the request that began it: it serves all that use the link
        pause_s = VERIFY_MIN_S
        log.warning("source.refused", source=link.incarnation[0], error=link.failed and link.failed.message)
        while True:
            try:
                await self._verify(await self._begin(link))  # reconnects: its agent may have restarted
                break
            except (StaleTransfer, IncompatibleLayout) as error:
                link.failed = error
                return
            except Busy as error:  # no local block is free: no information about the prefill worker
                log.info("source.not_verified", source=link.incarnation[0], error=error.message)
            except Exception as error:  # noqa: BLE001, every caller of `_get` receives it
                link.failed = _lost(error, "verifying a prefill worker")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, VERIFY_MAX_S)
        link.failed = None
        log.info("source.verified", source=link.incarnation[0])

    def _begin(self, link: _Link) -> asyncio.Task[PrefillPeer]:
        link.connecting = asyncio.create_task(self._connect(link), name=f"connect {link.incarnation[0]}")
        return link.connecting

    async def _warm(self, link: _Link) -> None:
        """Connects a new source, and measures its transports as soon as that is possible."""
        pause_s = VERIFY_MIN_S
        while True:
            try:
                await self._compare(await self._get(link))
                return
            except TandemError as error:
                # A link whose connection failed is verified in the background.
                later = isinstance(error, TransferFailed) and link.failed is not None
                # Others are measured, no local block is free, or the worker does not answer yet.
                later = later or isinstance(error, Busy | WorkerLost)
                if not later:  # requests detect by themselves whether KV arrives
                    log.warning("source.not_measured", source=link.incarnation[0], error=error.message)
                    return
                log.info("source.not_measured_yet", source=link.incarnation[0], error=error.message)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, VERIFY_MAX_S)

    async def _connect(self, link: _Link) -> PrefillPeer:
        clear_contextvars()  # of the request that began it
        (worker_id, incarnation), address = link.incarnation, link.address
        stub = prefill_pb2_grpc.PrefillServiceStub(self._channels.to(address))
        try:
            answer = await _get_peer(stub, worker_id)
            peer = peer_from(answer.peer)
            if (peer.worker_id, peer.incarnation) != link.incarnation:
                raise StaleTransfer(
                    f"{address} is {peer.worker_id}, incarnation {peer.incarnation}, not {worker_id}, {incarnation}",
                    reason="STALE_INCARNATION",
                )
            link.peer = peer  # from here on it needs a landing of its layout
            landing = await self._landing(worker_id, answer.layout_json)
            link.transport = transport = landing.transport if landing else self._transport
            transport.dial = self._dial
            try:
                await transport.connect(peer, CONNECT_TIMEOUT_S)
            except DeadlineExceeded as error:
                raise TransferFailed(f"no connection to the KV of {worker_id}: {error.message}") from error
        except Exception as error:
            raise _lost(error, "connecting to a prefill worker") from error
        converted = landing.names if landing else ""
        log.info(
            "source.connected",
            source=worker_id,
            incarnation=incarnation,
            link=transport.link(peer),
            **({"converted": converted} if converted else {}),
        )
        return PrefillPeer(link.incarnation, peer, stub, transport, landing)

    async def _landing(self, worker_id: str, layout_json: str) -> KvLanding | None:
        """Raises IncompatibleLayout."""
        try:
            return await self._landings.of(KvLayout.from_json(layout_json), self._layouts)
        except IncompatibleLayout as error:
            raise IncompatibleLayout(f"{worker_id} cannot hand over to this worker: {error.message}") from error
        except (ValueError, KeyError, TypeError) as error:
            what = f"{worker_id} describes its blocks in a way that this worker does not know: {error}"
            raise IncompatibleLayout(what) from error

    def _layouts(self) -> set[str]:
        return {link.peer.layout_hash for link in self._links.values() if link.peer is not None}

    def _dial(self, peer: Peer, messages: AsyncIterator[LinkMessage]) -> AsyncGenerator[LinkMessage, None]:
        """The Link call to a source, for a transport in which both sides act."""
        address = self._links[peer.worker_id, peer.incarnation].address
        return dialled(prefill_pb2_grpc.PrefillServiceStub(self._channels.to(address)), peer, messages)

    async def _forget(self, link: _Link) -> None:
        self._links.pop(link.incarnation, None)
        if link.peer is not None and link.transport is not None:
            link.transport.forget(link.peer)  # also ends a verification's read
        for task in (link.connecting, link.warming, link.verifying):
            if task and not task.done():
                task.cancel()


def _lost(error: Exception, where: str) -> TandemError:
    """What requests receive. A bug, as of a transport that fails in an unknown way, is not theirs: the log has it, and
    they use another prefill worker or none."""
    found = known(error, where)
    return TransferFailed(found.message) if isinstance(found, InternalError) else found


async def _get_peer(stub: prefill_pb2_grpc.PrefillServiceStub, worker_id: str) -> prefill_pb2.GetPeerResponse:
    try:
        with calling(worker_id):
            answer: prefill_pb2.GetPeerResponse = await stub.GetPeer(
                prefill_pb2.GetPeerRequest(), timeout=ANSWER_TIMEOUT_S
            )
            return answer
    except DeadlineExceeded as error:
        raise WorkerLost(f"{worker_id} did not answer within {ANSWER_TIMEOUT_S:.0f} s") from error
