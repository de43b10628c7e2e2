"""A Transport over torch.distributed: NCCL for KV on GPUs, Gloo for KV in host memory. Both sides act.

    decode worker                                        prefill worker
    dial ─ LinkOpen(epoch, secret) ────────────────────▶ answer      over gRPC, with the cluster's credentials
         ◀─ LinkEntry ... both make a process group ... ─▶
         ── secret ── over the new connection ───────────             another host's connection ends here
    read: SendBlocks(number, blocks) ──────────────────▶ gather, send
         ◀═ one message for each, in this order ═════════             over the process group
    receive into staging, scatter

Batches move in the order of the decode worker's messages. The link (link.py) lives as long as its gRPC stream: the
stream ends at once with either process, and by keepalive if a process freezes. Either side ends the other's process
group by ending its own. The next read makes a link with the next epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager

from kvtransfer.backends.nccl.group import backend_of, check_host
from kvtransfer.backends.nccl.link import IN_FLIGHT, SECRET_BYTES, Batch, Pages, PairLink, SinkLink, SourceLink
from kvtransfer.backends.network_devices import device_of
from kvtransfer.transport import STALL_S, Dial, Pair, batches, check_pairs, describe, settle
from kvtransfer.types import (
    LinkEntry,
    LinkMessage,
    LinkOpen,
    Peer,
    ReadStats,
    Region,
    SendBlocks,
    agent_name,
    check_compatible,
)
from tandem.errors import (
    IncompatibleLayout,
    InternalError,
    InvalidRequest,
    StaleTransfer,
    TandemError,
    TransferFailed,
    WorkerLost,
)

log = logging.getLogger(__name__)

# Bounds on what one decode worker may send before the source ends the link.
MAX_WAITING = 4 * IN_FLIGHT
MAX_ENTRIES = 64
MAX_ENTRY_BYTES = 64 << 10
MAX_SEND_S = 60.0  # for one batch, whatever stall limit the decode worker names

CLOSE_GRACE_S = 0.5  # for all links to end


class NcclTransport:
    """See Transport. `host`: the address of this worker that its connections use."""

    kind = "nccl"

    def __init__(self, region: Region, worker_id: str, incarnation: str, layout_hash: str, host: str) -> None:
        self.region = region
        self.layout_hash = layout_hash
        self.broken: TandemError | None = None
        self.dial: Dial | None = None
        self.on_broken: Callable[[], object] | None = None
        self._worker_id, self._incarnation, self._host = worker_id, incarnation, host
        self._pages = Pages(region)
        check_host(self._pages.device, host)
        self._epochs = itertools.count(1)
        self._peers: dict[str, Peer] = {}  # connected, by agent name
        self._links: dict[str, SinkLink] = {}  # the latest link to each of them
        self._dialling: set[asyncio.Task[None]] = set()
        self._answered: dict[str, tuple[int, SourceLink]] = {}  # by the decode worker's agent name: epoch, link
        self._closed = False

    @property
    def under_way(self) -> None:
        """None, because every wait of a link's thread has a limit, and only its pair depends on it."""
        return None

    def peer(self) -> Peer:
        return describe(self, self._worker_id, self._incarnation, b"")

    # ---- the decode worker

    async def connect(self, peer: Peer, timeout: float) -> None:
        check_compatible(self.region, self.layout_hash, peer, self.kind)
        if peer.memory != self.region.memory:
            raise IncompatibleLayout(
                f"{peer.worker_id} has its KV in {peer.memory}, this worker in {self.region.memory}", field="memory"
            )
        if self._closed:
            raise WorkerLost(f"{self._worker_id} is closed")
        self._peers[peer.agent_name] = peer
        await self._linked(peer, timeout)

    async def read(
        self,
        peer: Peer,
        pairs: Sequence[Pair],
        stall: float,
        failing: Callable[[TandemError], None] | None = None,
    ) -> ReadStats:
        """Raises an error as soon as it is known, because only staging may still be written; `failing` is not used."""
        check_compatible(self.region, self.layout_hash, peer, self.kind)
        check_pairs(self.region, peer, pairs)
        started = time.monotonic()
        link = await self._linked(peer, STALL_S)
        flying: deque[Batch] = deque()
        try:
            for part in batches(pairs, self.region.block_bytes):
                if len(flying) == IN_FLIGHT:  # so that reads take turns
                    await asyncio.wrap_future(flying[0].done)
                    flying.popleft()
                batch = Batch([remote for remote, _ in part], [local for _, local in part], stall)
                link.submit(batch)
                flying.append(batch)
            while flying:
                await asyncio.wrap_future(flying[0].done)
                flying.popleft()
        finally:
            writing = [batch for batch in flying if not batch.give_up()]  # first all: the wait may be cancelled
            if writing:
                ended = asyncio.gather(*(asyncio.wrap_future(batch.done) for batch in writing), return_exceptions=True)
                await settle(ended, f"a read from {peer.agent_name}")
        return ReadStats(len(pairs) * self.region.block_bytes, time.monotonic() - started, self.link(peer))

    def device(self, peer: Peer) -> str:
        """Gloo binds its connections to this worker's address. NCCL chooses a device and does not report it."""
        return device_of(self._host) if backend_of(self._pages.device) == "gloo" else ""

    def why(self, peer: Peer) -> str:
        return ""

    def forget(self, peer: Peer) -> None:
        self._peers.pop(peer.agent_name, None)
        if link := self._links.pop(peer.agent_name, None):
            link.end(WorkerLost(f"{peer.agent_name} was forgotten"))

    def one_sided(self, peer: Peer) -> bool:
        """Always, because the source's link has a thread: the source need not be `serving`."""
        return True

    def link(self, peer: Peer) -> str:
        return "nccl" if backend_of(self._pages.device) == "nccl" else "gloo:tcp"

    async def _linked(self, peer: Peer, timeout: float) -> SinkLink:
        """The link to a connected peer; a new one if the last one has ended."""
        if self._closed or self._peers.get(peer.agent_name) != peer:
            raise WorkerLost(f"{peer.agent_name} is not connected")
        link = self._links.get(peer.agent_name)
        if link is None or link.error is not None:
            link = self._begin(peer)
        if not link.ready.done():
            await asyncio.wait([asyncio.wrap_future(link.ready)], timeout=timeout)
            if not link.ready.done():
                raise TransferFailed(f"connecting to {peer.worker_id} took longer than {timeout} s")
        if link.error is not None:
            raise type(link.error)(link.error.message)
        return link

    def _begin(self, peer: Peer) -> SinkLink:
        """Dials, and creates this side of the link."""
        loop, outgoing = asyncio.get_running_loop(), asyncio.Queue[LinkMessage | None]()

        def tell(message: LinkMessage | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the link with it
                loop.call_soon_threadsafe(outgoing.put_nowait, message)

        epoch, secret = next(self._epochs), secrets.token_bytes(SECRET_BYTES)
        name = f"{peer.agent_name} #{epoch}"
        link = SinkLink(name, self._pages, self._host, secret, tell, lambda error: tell(None))
        opening = LinkOpen(
            self._worker_id, self._incarnation, peer.incarnation, self.layout_hash, epoch=epoch, secret=secret
        )
        outgoing.put_nowait(opening)
        self._links[peer.agent_name] = link
        fresh = contextvars.Context()  # the link serves all reads, so its log lines have no ids of this one's request
        task = asyncio.create_task(self._talk(peer, link, outgoing), name=f"kv link {name}", context=fresh)
        self._dialling.add(task)
        task.add_done_callback(self._dialling.discard)
        link.start()
        return link

    async def _talk(self, peer: Peer, link: SinkLink, outgoing: asyncio.Queue[LinkMessage | None]) -> None:
        """Forwards messages until either side ends the link, then ends both sides."""
        hanging_up = asyncio.Event()

        async def messages() -> AsyncIterator[LinkMessage]:
            while (message := await outgoing.get()) is not None:
                yield message
            hanging_up.set()

        async def listen() -> None:
            assert self.dial is not None
            async with aclosing(self.dial(peer, messages())) as answers:
                async for answer in answers:
                    if isinstance(answer, LinkEntry):
                        link.store.put(answer.key, answer.value)

        error: TandemError = TransferFailed(f"{peer.agent_name} has ended the link")
        listening = asyncio.create_task(listen())
        ending = asyncio.create_task(hanging_up.wait())
        try:
            await asyncio.wait([listening, ending], return_when=asyncio.FIRST_COMPLETED)
            if listening.done() and (raised := listening.exception()) is not None:
                error = _why(raised, peer)
        finally:
            for task in (listening, ending):
                task.cancel()
            link.end(error)

    # ---- the prefill worker

    async def answer(self, messages: AsyncIterator[LinkMessage]) -> AsyncGenerator[LinkMessage, None]:
        async with asyncio.timeout(STALL_S):
            opening = await anext(aiter(messages), None)
        name = self._check(opening)
        assert isinstance(opening, LinkOpen)
        loop, events = asyncio.get_running_loop(), asyncio.Queue[LinkMessage | TandemError | None]()

        def tell(event: LinkMessage | TandemError) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the link with it
                loop.call_soon_threadsafe(events.put_nowait, event)

        link = SourceLink(f"{name} #{opening.epoch}", self._pages, self._host, opening.secret, tell, tell)
        if last := self._answered.get(name):
            last[1].end(WorkerLost(f"{name} has made another link"))
        self._answered[name] = (opening.epoch, link)
        link.start()
        hearing = asyncio.create_task(self._hear(messages, link, events))
        try:
            while (event := await events.get()) is not None:
                if isinstance(event, TandemError):
                    raise type(event)(event.message)
                yield event
        finally:
            hearing.cancel()
            link.end(TransferFailed(f"the link {link.name} has ended"))
            if self._answered.get(name) == (opening.epoch, link):
                del self._answered[name]

    async def _hear(
        self,
        messages: AsyncIterator[LinkMessage],
        link: SourceLink,
        events: asyncio.Queue[LinkMessage | TandemError | None],
    ) -> None:
        entries = 0
        try:
            async for message in messages:
                match message:
                    case LinkEntry(key, value):
                        entries += 1
                        if entries > MAX_ENTRIES or len(key) + len(value) > MAX_ENTRY_BYTES:
                            raise InvalidRequest("too much is told of a process group", field="entry")
                        link.store.put(key, value)
                    case SendBlocks(_, blocks, stall):
                        self._check_blocks(blocks, link)
                        link.submit(Batch(blocks, (), min(max(stall, 0.0), MAX_SEND_S)))
                    case _:
                        raise InvalidRequest("a link is opened once", field="open")
            events.put_nowait(None)
        except TandemError as error:
            events.put_nowait(error)
        except Exception as error:  # noqa: BLE001, the stream broke: this call ends
            events.put_nowait(TransferFailed(f"the link {link.name} broke: {error!r}"))

    def _check(self, opening: LinkMessage | None) -> str:
        """The decode worker's agent name."""
        if not isinstance(opening, LinkOpen) or len(opening.secret) != SECRET_BYTES:
            raise InvalidRequest(
                "a link begins with its opening", field="open", bound=f"{SECRET_BYTES} bytes of secret"
            )
        if self._closed:
            raise WorkerLost(f"{self._worker_id} is closed")
        if opening.source_incarnation != self._incarnation:
            raise StaleTransfer(
                f"{self._worker_id} is incarnation {self._incarnation}, not {opening.source_incarnation}",
                reason="STALE_INCARNATION",
            )
        if opening.layout_hash != self.layout_hash:
            raise IncompatibleLayout(
                f"{self._worker_id} has KV layout {self.layout_hash}, {opening.worker_id} {opening.layout_hash}"
            )
        name = agent_name(opening.worker_id, opening.incarnation)
        if (last := self._answered.get(name)) and last[0] >= opening.epoch:
            raise StaleTransfer(f"{name} has made a link after this one", reason="STALE_LINK")
        return name

    def _check_blocks(self, blocks: Sequence[int], link: SourceLink) -> None:
        most = self._pages.batch_blocks
        if not 0 < len(blocks) <= most or not all(0 <= block < self.region.num_blocks for block in blocks):
            raise InvalidRequest(
                f"{len(blocks)} blocks cannot be sent", field="blocks", bound=f"1 to {most} of {self.region.num_blocks}"
            )
        if link.waiting >= MAX_WAITING:
            raise InvalidRequest("the decode worker asks for more than it takes", field="blocks")

    # ---- both

    @contextmanager
    def serving(self) -> Iterator[None]:
        yield

    def close(self) -> None:
        self._closed = True
        self._peers.clear()
        links: list[PairLink] = [*self._links.values(), *(link for _, link in self._answered.values())]
        for link in links:
            link.end(WorkerLost(f"{self._worker_id} was closed"))
        until = time.monotonic() + CLOSE_GRACE_S
        for link in links:
            if not link.settled(max(0.0, until - time.monotonic())):
                log.warning("the thread of the link %s ends when its wait does", link.name)
        self._links.clear()


def _why(raised: BaseException, peer: Peer) -> TandemError:
    """The error of a link whose stream has ended with `raised`."""
    if isinstance(raised, WorkerLost):  # only the connection is lost; the worker may be alive
        return TransferFailed(f"the link to {peer.agent_name} broke: {raised.message}")
    if isinstance(raised, TandemError):
        return raised
    log.error("a bug in the link to %s", peer.agent_name, exc_info=raised)
    return InternalError(f"the link to {peer.agent_name} failed: {raised!r}")
