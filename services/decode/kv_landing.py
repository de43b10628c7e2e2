"""Receives blocks of another layout on this decode worker, and converts them.

    source ──read──▶ staging (its layout) ──digest──▶ converted ──▶ blocks of the sequence (this worker's layout)

Blocks of a prefill worker whose layout has the same meaning (engine/core/kv_conversion.py) are requested and read in
that layout, so the prefill worker need not know of the conversion. The digest covers the bytes that it sent. The
staging has room for STAGED_BYTES; parts of transfers take turns.
"""

from __future__ import annotations

import asyncio
from collections import abc
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from functools import partial

import structlog

from engine.attention.forward_context import device_done
from engine.core.kv_conversion import converters, keeps_bits
from engine.core.kv_layout import KvLayout
from engine.core.sequence import Sequence
from engine.kv.kv_converter import KvConverter
from engine.runner.block_reader import block_reader
from kvtransfer.sender import PART_BYTES
from kvtransfer.transport import Pair
from kvtransfer.types import Peer, ReadStats, digests
from services.worker import Worker, region_of
from tandem.errors import IncompatibleLayout, InternalError, TandemError, TransferFailed

log = structlog.get_logger(__name__)

STAGED_BYTES = 2 * PART_BYTES  # of one layout: two of the largest parts that a source announces at a time
MOST = 2  # layouts at a time other than the worker's own: those before and after an upgrade


class KvLanding:
    """The staging of one other layout. Its constructor may run on any thread: it touches the memory and starts a
    transport."""

    def __init__(
        self, worker: Worker, layout: KvLayout, names: abc.Sequence[str], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.layout, self.names = layout, ", ".join(names)
        self.keeps_bits = keeps_bits(layout, worker.layout)
        longest = -(-worker.engine.model.max_model_len // layout.block_size)
        count = 2 * max(1, min(STAGED_BYTES // 2 // layout.block_bytes, longest))
        self._converter = KvConverter(layout, count, worker.engine.pages)
        staging = self._converter.staging
        # A separate agent from that of the worker's pages.
        incarnation = f"{worker.incarnation}-{layout.hash()[:8]}"
        self.transport = worker.transport_over(region_of(staging), incarnation, layout.hash())
        self.transport.on_broken = partial(worker.transport_broke, self.transport)
        self.digest_blocks = digests(block_reader(staging))
        self.count = count
        self._free = list(range(count))
        self._turn, self._given = asyncio.Lock(), asyncio.Event()
        self._loop = loop

    def convert(self, staged: abc.Sequence[tuple[int, int]], table: abc.Sequence[int], tokens: range) -> None:
        """As KvConverter.convert, and waits for the device, because reads write to the staging and to freed blocks
        outside the device's queue."""
        self._converter.convert(staged, table, tokens)
        device_done(self._converter.staging.buffer.device)

    async def take(self, count: int) -> list[int]:
        """Takes places in the staging, in turn. The wait is bounded, because holders of places read into them and their
        reads cannot stall."""
        if count > self.count:
            raise TransferFailed(f"a part of {count} blocks, where {self.count} can be converted at a time")
        async with self._turn:
            while len(self._free) < count:
                self._given.clear()
                await self._given.wait()
            places, self._free = self._free[:count], self._free[count:]
            return places

    @property
    def empty(self) -> bool:
        """Whether nothing is read into the staging or converted from it."""
        return len(self._free) == self.count

    def give(self, places: abc.Sequence[int]) -> None:
        """Returns places. Call it on the event loop."""
        self._free += places
        self._given.set()

    def give_soon(self, places: abc.Sequence[int]) -> None:
        """As `give`, on any thread."""
        self._loop.call_soon_threadsafe(self.give, places)


@dataclass(frozen=True)
class Landed:
    """One sequence that arrives in a landing: the reads and the digests of its Receiver. Local blocks are indices in
    the sequence."""

    landing: KvLanding
    table: abc.Sequence[int]  # this worker's blocks of the sequence
    tokens: range  # the tokens that are written; earlier ones are cached, in blocks that other sequences may share
    places: dict[int, int]  # index in the sequence -> place in the staging

    def expected(self, sequence: Sequence) -> dict[int, tuple[bytes, int]]:
        """The source's blocks that have `tokens`, by index: the context of each block's digest, and its local index."""
        size = self.landing.layout.block_size
        contexts = sequence.contexts(size, 0)
        return {index: (contexts[index], index) for index in range(self.tokens.start // size, len(contexts))}

    async def read(
        self,
        peer: Peer,
        pairs: abc.Sequence[Pair],
        stall: float,
        failing: Callable[[TandemError], None] | None = None,
    ) -> ReadStats:
        """As Transport.read."""
        places = await self.landing.take(len(pairs))
        staged = [(remote, place) for (remote, _), place in zip(pairs, places, strict=True)]
        try:
            stats = await self.landing.transport.read(peer, staged, stall, failing)
        except BaseException:
            self.landing.give(places)
            raise
        self.places.update({index: place for (_, index), place in zip(pairs, places, strict=True)})
        return stats

    def link(self, peer: Peer) -> str:
        return self.landing.transport.link(peer)

    def why(self, peer: Peer) -> str:
        return self.landing.transport.why(peer)

    def digest_blocks(self, blocks: abc.Sequence[tuple[int, bytes]]) -> abc.Sequence[bytes]:
        """Computes the digests and converts the blocks, even wrong ones, because their sequence is then not used. Runs
        on a thread."""
        staged = [(self.places.pop(index), index) for index, _ in blocks]
        try:
            found = self.landing.digest_blocks(
                [(place, context) for (place, _), (_, context) in zip(staged, blocks, strict=True)]
            )
            self.landing.convert(staged, self.table, self.tokens)
            return found
        finally:
            self.landing.give_soon([place for place, _ in staged])

    def close(self) -> None:
        """Returns places of blocks that were read but not converted. Call it after the Receiver has ended."""
        self.landing.give(list(self.places.values()))
        self.places.clear()


class KvLandings:
    """Those of one decode worker, made when a source needs one. One that no source needs any more is given up when
    another layout needs its room."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._made: dict[str, KvLanding] = {}  # by the layout's hash; the one that was asked for last is the last
        self._not_closed: list[KvLanding] = []  # bytes may still come: their memory stays
        self._making = asyncio.Lock()

    async def of(self, layout: KvLayout, in_use: Callable[[], Collection[str]]) -> KvLanding | None:
        """None: blocks are read to where they belong. `in_use`: the hashes of the layouts of all sources. Raises
        IncompatibleLayout with the reasons, and what making a transport raises."""
        names = converters(layout, self._worker.layout)
        if not names:
            return None
        # A caller that is cancelled leaves it to the next one, or to `close`.
        return await asyncio.shield(asyncio.ensure_future(self._landing(layout, names, in_use)))

    async def _landing(
        self, layout: KvLayout, names: abc.Sequence[str], in_use: Callable[[], Collection[str]]
    ) -> KvLanding:
        async with self._making:
            landing = self._made.pop(layout.hash(), None)
            if landing is None:
                if len(self._made) == MOST:
                    await self._give_up_one(in_use())
                loop = asyncio.get_running_loop()
                landing = await asyncio.to_thread(KvLanding, self._worker, layout, names, loop)
            self._made[layout.hash()] = landing
            return landing

    async def _give_up_one(self, in_use: Collection[str]) -> None:
        """The one that was asked for longest ago, of those without a source. Raises IncompatibleLayout."""
        for name, landing in self._made.items():
            if name not in in_use and landing.empty:
                del self._made[name]
                log.info("landing.given_up", layout=name)
                await self._close(landing)
                return
        raise IncompatibleLayout(f"this worker converts from {MOST} other layouts already")

    async def _close(self, landing: KvLanding) -> None:
        try:
            await asyncio.to_thread(landing.transport.close)
        except InternalError:  # bytes may still arrive, in a staging that is not read any more
            log.exception("landing.transport_not_closed", layout=landing.layout.hash())
            self._not_closed.append(landing)

    def under_way(self, number: int) -> tuple[Hashable, float] | None:
        """As Transport.under_way, of the transport with this number."""
        made = list(self._made.values())
        return made[number].transport.under_way if number < len(made) else None

    async def close(self) -> None:
        async with self._making:
            while self._made:  # one that closes makes no progress: the watchdog must not look at it
                await self._close(self._made.popitem()[1])
