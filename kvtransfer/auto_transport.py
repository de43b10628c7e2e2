"""Several transports over the same memory, of which each pair of workers uses one: `transport` = auto.

A worker's description names the default transport, and in `also` the others, so it can pair with a worker that has only
the default. pair_choice.py chooses the transport of a pair; a read never changes its transport.

    connect, read ─fails─▶ the caller refuses the source, and connects again ─fails─▶ the pair's other transport
    compare       ─▶ both are measured, also one that has failed
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic

from kvtransfer.pair_choice import Choice, choose
from kvtransfer.transport import STALL_S, Dial, Pair, Transport, measure_link
from kvtransfer.types import LinkMessage, Peer, ReadStats
from tandem.errors import IncompatibleLayout, InternalError, TandemError, TransferFailed, WorkerLost

log = logging.getLogger(__name__)

# Of a transport that does not work between two workers. InternalError: for a reason that its file does not know.
FAULTS = (TransferFailed, InternalError)
FAILURES = 2  # in a row, after which the pair uses another transport; attempts that fail at the same time are one


@dataclass
class _Pair:
    """One incarnation of a source."""

    peer: Peer  # as last connected
    kinds: list[str]  # the transports of both workers, the default first
    connected: set[str] = field(default_factory=set)
    measured: dict[str, float] = field(default_factory=dict)
    failures: int = 0
    failed_at: float = 0.0  # monotonic, of the last one

    def choice(self) -> Choice:
        return choose(self.kinds, self.measured)

    def failed(self, kind: str, began: float, error: TandemError) -> TransferFailed:
        """The error for the reader, who reads again or elsewhere."""
        if began >= self.failed_at:  # otherwise by what failed the other attempt, too: a part of a prompt, or another
            self._count(kind)
        return error if isinstance(error, TransferFailed) else TransferFailed(error.message, reason=error.reason)

    def _count(self, kind: str) -> None:
        self.failures, self.failed_at = self.failures + 1, monotonic()
        if self.failures >= FAILURES and len(self.kinds) > 1:
            self.failures = 0
            self.measured[kind] = 0.0
            if not any(self.measured.get(other) != 0.0 for other in self.kinds):  # try the others again
                self.measured = {kind: 0.0}
            log.warning("%s", self.choice().why)


class AutoTransport:
    """See Transport."""

    kind = "auto"

    def __init__(self, transports: Sequence[Transport]) -> None:
        """`transports`: the default first; all of one region, layout and incarnation. This object closes them."""
        self._transports = {transport.kind: transport for transport in transports}
        default = self._default = transports[0]
        self.region, self.layout_hash = default.region, default.layout_hash
        self.broken: TandemError | None = None
        self.on_broken: Callable[[], object] | None = None
        self._pairs: dict[str, _Pair] = {}  # by agent name
        for transport in transports:
            transport.on_broken = partial(self._broke, transport)

    @property
    def dial(self) -> Dial | None:
        return self._default.dial

    @dial.setter
    def dial(self, dial: Dial | None) -> None:
        for transport in self._transports.values():
            transport.dial = dial

    @property
    def under_way(self) -> tuple[Hashable, float] | None:
        """That of NIXL, the only transport with a thread that drives all its pairs."""
        return next((work for one in self._transports.values() if (work := one.under_way) is not None), None)

    def peer(self) -> Peer:
        others = tuple(kind for kind in self._transports if kind != self._default.kind)
        return replace(self._default.peer(), also=others)

    # ---- the decode worker

    async def connect(self, peer: Peer, timeout: float) -> None:
        pair = self._pair(peer)
        await self._connect(pair, pair.choice().kind, timeout)

    async def read(
        self,
        peer: Peer,
        pairs: Sequence[Pair],
        stall: float,
        failing: Callable[[TandemError], None] | None = None,
    ) -> ReadStats:
        pair = self._pairs.get(peer.agent_name)
        self._kinds(peer)  # raises IncompatibleLayout
        if pair is None:
            raise WorkerLost(f"{peer.agent_name} is not connected")
        kind = pair.choice().kind
        if kind not in pair.connected:  # the choice has changed since the pair connected
            await self._connect(pair, kind, STALL_S)
        began = monotonic()
        try:
            stats = await self._transports[kind].read(_as(peer, kind), pairs, stall, failing)
        except FAULTS as error:
            raise pair.failed(kind, began, error) from error
        if pairs:
            pair.failures = 0
        return stats

    async def compare(self, peer: Peer, blocks: Sequence[int], stall: float = STALL_S) -> float:
        """Runs measure_link for each transport that both workers have, one after another. Returns the bytes per second
        of the one that the pair then uses. If none works, raises the error of the default."""
        pair = self._pair(peer)
        errors: list[TandemError] = []
        measured: dict[str, float] = {}
        for kind in pair.kinds:
            try:
                measured[kind] = await measure_link(self._transports[kind], _as(peer, kind), blocks, stall)
                pair.connected.add(kind)
            except FAULTS as error:
                measured[kind] = 0.0
                errors.append(error)
        pair.measured, pair.failures = measured, 0
        if len(errors) == len(pair.kinds):
            raise errors[0]
        log.info("%s: %s", peer.agent_name, pair.choice().why)
        return measured[pair.choice().kind]

    def why(self, peer: Peer) -> str:
        pair = self._pairs.get(peer.agent_name)
        return pair.choice().why if pair else ""

    def one_sided(self, peer: Peer) -> bool:
        """Whether all of the pair's transports are: the choice may change before the next read."""
        return all(self._transports[kind].one_sided(_as(peer, kind)) for kind in self._kinds(peer))

    def link(self, peer: Peer) -> str:
        transport, described = self._used(peer)
        return transport.link(described)

    def device(self, peer: Peer) -> str:
        transport, described = self._used(peer)
        return transport.device(described)

    def forget(self, peer: Peer) -> None:
        self._pairs.pop(peer.agent_name, None)
        for kind, transport in self._transports.items():
            transport.forget(_as(peer, kind))

    async def _connect(self, pair: _Pair, kind: str, timeout: float) -> None:
        began = monotonic()
        try:
            await self._transports[kind].connect(_as(pair.peer, kind), timeout)
        except FAULTS as error:
            raise pair.failed(kind, began, error) from error
        pair.connected.add(kind)

    def _pair(self, peer: Peer) -> _Pair:
        """The pair with a source that is being connected. Raises IncompatibleLayout."""
        kinds = self._kinds(peer)
        pair = self._pairs.setdefault(peer.agent_name, _Pair(peer, kinds))
        if pair.peer != peer:  # its default transport had to restart
            pair.peer, pair.kinds, pair.connected = peer, kinds, set()
        return pair

    def _kinds(self, peer: Peer) -> list[str]:
        theirs = {peer.transport, *peer.also}
        if peer.memory != self.region.memory:  # NCCL needs the same kind on both sides
            theirs.discard("nccl")
        kinds = [kind for kind in self._transports if kind in theirs]
        if not kinds:
            ours = " and ".join(self._transports)
            raise IncompatibleLayout(
                f"{peer.worker_id} has transport {' and '.join(sorted(theirs))} where this worker has {ours}",
                field="transport",
                bound=ours,
            )
        return kinds

    def _used(self, peer: Peer) -> tuple[Transport, Peer]:
        pair = self._pairs.get(peer.agent_name)
        kind = pair.choice().kind if pair else self._kinds(peer)[0]
        return self._transports[kind], _as(peer, kind)

    # ---- both

    def answer(self, messages: AsyncIterator[LinkMessage]) -> AsyncGenerator[LinkMessage, None]:
        """NCCL answers, whose sources act; without NCCL the default refuses."""
        acting = [transport for transport in self._transports.values() if transport.kind == "nccl"]
        return (acting or [self._default])[0].answer(messages)

    @contextmanager
    def serving(self) -> Iterator[None]:
        with ExitStack() as stack:
            for transport in self._transports.values():
                stack.enter_context(transport.serving())
            yield

    def close(self) -> None:
        self._pairs.clear()
        with ExitStack() as stack:  # all are closed, even if one raises
            for transport in self._transports.values():
                stack.callback(transport.close)

    def _broke(self, transport: Transport) -> None:
        """Called on that transport's thread. It may still write to the memory, so the other transports stop, too."""
        self.broken = transport.broken
        if self.on_broken is not None:
            self.on_broken()


def _as(peer: Peer, kind: str) -> Peer:
    """The peer's description for one of its transports. Only the default has metadata."""
    return replace(peer, transport=kind, also=(), metadata=peer.metadata if kind == peer.transport else b"")
