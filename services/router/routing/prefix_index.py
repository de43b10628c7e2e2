"""The router's index of which workers have cached the beginning of a prompt.

Each worker streams the hashes of its reusable blocks (services/kv_events.py). After a missing message, or at the end of
the stream, the router discards a worker's hashes until it has received all of them again. Wrong or late information
costs time but never a token, because a worker computes what it has not cached.

A worker of a model with recurrent layers resumes a prompt only where it has a copy of the states. Copies are blocks
with separate hashes (engine.core.block_hash.of_state), which are in the stream like others. All blocks of a copy are
stored and evicted together, so the first one represents it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from random import randrange

import structlog

from cluster.state.registry import WorkerRecord
from engine.core import block_hash
from services.grpc_server import Channels
from services.worker_liveness import Incarnation, WorkerLiveness
from tandem.errors import InternalError, TandemError
from tandem.grpc_errors import calling, known_errors
from tandem.tasks import end, forever
from tandem.v1 import worker_pb2, worker_pb2_grpc

log = structlog.get_logger(__name__)

RECONNECT_S = 1.0  # before a broken stream is opened again
MAX_HOLDERS = 8  # workers with the beginning of the prompt that a placement considers
HASHES_PER_SLICE = 1000  # before the token streams get a turn
LONG_PROMPT_TOKENS = 8192  # of a prompt; the hashes of a longer one are computed on a thread
Shape = tuple[int, bool]  # tokens of a block; whether there are recurrent states


class Prompt:
    """The tokens of a prompt, and the hashes of their full blocks."""

    def __init__(self, tokens: Sequence[int], salt: bytes, adapter: str, fingerprint: bytes = b"") -> None:
        """`fingerprint`: of the adapter; without one the workers' fingerprints count."""
        self.adapter = adapter
        self.fingerprint = fingerprint
        self._tokens = list(tokens)
        self._salt = salt
        self._chains: dict[tuple[int, bytes], list[bytes]] = {}
        self._states: dict[tuple[int, bytes], list[bytes]] = {}
        self.lengths: list[tuple[int, int]] = []  # BlockIndex's cached result, and its version of the index
        self.lengths_at: object = None

    def __len__(self) -> int:
        return len(self._tokens)

    def chain(self, block_size: int, fingerprint: bytes) -> list[bytes]:
        """`fingerprint` is that of the adapter; empty for the base model."""
        key = block_size, fingerprint
        if key not in self._chains:
            self._chains[key] = block_hash.chain(self._tokens, block_size, self._salt, adapter=fingerprint)
        return self._chains[key]

    def states(self, block_size: int, fingerprint: bytes) -> list[bytes]:
        """For each full block, the hash of the copy of the recurrent states after it."""
        key = block_size, fingerprint
        if key not in self._states:
            chain = enumerate(self.chain(block_size, fingerprint), 1)
            self._states[key] = [block_hash.of_state_part(digest, at * block_size, 0) for at, digest in chain]
        return self._states[key]


@dataclass
class _Known:
    """The hashes that one incarnation of a worker has streamed."""

    bit: int  # its place in the masks
    role: str
    hashes: set[bytes] = field(default_factory=set)
    sequence: int = -1  # of the latest message


class BlockIndex:
    """Which incarnations have which blocks: for each hash a mask with one bit per incarnation. Finding all incarnations
    that have the leading blocks of a prompt costs one dictionary lookup and one `and` per block."""

    def __init__(self) -> None:
        self._known: dict[Incarnation, _Known] = {}
        self._incarnations: dict[int, Incarnation] = {}  # by bit; without those that are being forgotten
        self._free: list[int] = []
        self._bits = 0
        self._holders: dict[bytes, int] = {}
        self._roles: dict[str, int] = {}
        self._kinds: dict[str, dict[tuple[Shape, bytes], int]] = {}  # adapter -> (shape, fingerprint) -> mask
        self._version = object()  # another one after each change

    def take(self, record: WorkerRecord, message: worker_pb2.WatchCacheResponse) -> Iterator[None]:
        """Applies a worker's next message, one slice per iteration; the iterator must be exhausted. Raises
        InternalError if a message is missing."""
        known = self._known.get((record.worker_id, record.incarnation))
        if message.sequence == 0 and known is None:
            known = self._begin(record, dict(message.adapters))
        if known is None or message.sequence != known.sequence + 1:
            at = known.sequence if known else -1
            raise InternalError(f"cache message {message.sequence} came after {at}")
        known.sequence = message.sequence
        return self._steps(known, message)

    def forget(self, incarnation: Incarnation) -> Iterator[None]:
        """Forgets an incarnation at once; each iteration frees a slice of its hashes, and the iterator must be
        exhausted."""
        known = self._known.pop(incarnation, None)
        if known is None:
            return iter(())
        del self._incarnations[known.bit]
        self._roles[known.role] &= ~(1 << known.bit)
        for kinds in self._kinds.values():
            for kind in list(kinds):
                kinds[kind] &= ~(1 << known.bit)
                if not kinds[kind]:
                    del kinds[kind]
        self._version = object()
        return self._empty(known)

    def cached(self, prompt: Prompt, incarnation: Incarnation) -> int:
        """Leading tokens of the prompt that need not be computed there; the last token is always computed."""
        known = self._known.get(incarnation)
        if known is None:
            return 0
        return next((tokens for tokens, mask in self._lengths(prompt) if mask >> known.bit & 1), 0)

    def holders(self, prompt: Prompt, role: str, most: int) -> list[Incarnation]:
        """At most `most` incarnations that have cached the most of the prompt; ties are broken at random."""
        named: list[Incarnation] = []
        of_role = self._roles.get(role, 0)
        for _, mask in self._lengths(prompt):
            mask, start = mask & of_role, randrange(self._bits)
            for part, offset in ((mask >> start, start), (mask & (1 << start) - 1, 0)):
                while part and len(named) < most:
                    low = part & -part
                    part ^= low
                    named.append(self._incarnations[low.bit_length() - 1 + offset])
            if len(named) == most:
                break
        return named

    def kinds_of(self, prompt: Prompt) -> list[tuple[tuple[Shape, bytes], int]]:
        """The kinds of blocks that may hold the prompt, each with its incarnations. If the fingerprint is known, a
        worker without the adapter has no such block."""
        if prompt.fingerprint:
            return [((shape, prompt.fingerprint), mask) for (shape, _), mask in self._kinds.get("", {}).items()]
        return list(self._kinds.get(prompt.adapter, {}).items())

    def _lengths(self, prompt: Prompt) -> list[tuple[int, int]]:
        """(leading tokens, mask of the incarnations that have exactly this many), the most first."""
        if prompt.lengths_at is not self._version:
            holders_by_length: dict[int, int] = {}
            for ((block_size, recurrent), fingerprint), having in self.kinds_of(prompt):
                lengths = self._resumable if recurrent else self._leading
                for tokens, mask in lengths(prompt, block_size, fingerprint, having) if having else ():
                    holders_by_length[tokens] = holders_by_length.get(tokens, 0) | mask
            holders_by_length.pop(0, None)
            prompt.lengths = sorted(holders_by_length.items(), reverse=True)
            prompt.lengths_at = self._version
        return prompt.lengths

    def _leading(self, prompt: Prompt, block_size: int, fingerprint: bytes, having: int) -> Iterator[tuple[int, int]]:
        """As `_lengths`, for the incarnations in `having`, whose blocks have this size."""
        tokens = 0
        for digest in prompt.chain(block_size, fingerprint):
            still = having & self._holders.get(digest, 0)
            if still != having:
                yield tokens, having & ~still
                having = still
            if not having:
                return
            tokens = min(tokens + block_size, len(prompt) - 1)
        yield tokens, having

    def _resumable(self, prompt: Prompt, block_size: int, fingerprint: bytes, having: int) -> Iterator[tuple[int, int]]:
        """As `_leading`, for models with recurrent states: up to the last copy within the leading blocks."""
        lengths: dict[int, int] = {}
        states = prompt.states(block_size, fingerprint)[: (len(prompt) - 1) // block_size]
        for number, (digest, state) in enumerate(zip(prompt.chain(block_size, fingerprint), states, strict=False), 1):
            having &= self._holders.get(digest, 0)
            if not having:
                break
            if resumes := having & self._holders.get(state, 0):
                lengths = {tokens: mask & ~resumes for tokens, mask in lengths.items()}
                lengths[number * block_size] = resumes
        yield from lengths.items()

    def _begin(self, record: WorkerRecord, adapters: dict[str, bytes]) -> _Known:
        if self._free:
            bit = self._free.pop()
        else:
            bit, self._bits = self._bits, self._bits + 1
        incarnation = self._incarnations[bit] = record.worker_id, record.incarnation
        self._roles[record.role] = self._roles.get(record.role, 0) | 1 << bit
        for adapter, fingerprint in {"": b"", **adapters}.items():  # "": the base model
            kinds = self._kinds.setdefault(adapter, {})
            kind = (record.block_size, record.state_blocks > 0), fingerprint
            kinds[kind] = kinds.get(kind, 0) | 1 << bit
        known = self._known[incarnation] = _Known(bit, record.role)
        return known

    def _steps(self, known: _Known, message: worker_pb2.WatchCacheResponse) -> Iterator[None]:
        mask, holders = 1 << known.bit, self._holders
        for number, digest in enumerate(_split(message.added)):
            holders[digest] = holders.get(digest, 0) | mask
            known.hashes.add(digest)
            if number % HASHES_PER_SLICE == HASHES_PER_SLICE - 1:
                self._version = object()
                yield
        self._version = object()
        for number, digest in enumerate(_split(message.removed)):
            if digest in known.hashes:
                known.hashes.remove(digest)
                self._remove(digest, mask)
            if number % HASHES_PER_SLICE == HASHES_PER_SLICE - 1:
                self._version = object()
                yield
        self._version = object()

    def _empty(self, known: _Known) -> Iterator[None]:
        mask, left = 1 << known.bit, known.hashes
        while left:
            for _ in range(min(len(left), HASHES_PER_SLICE)):
                self._remove(left.pop(), mask)
            yield
        self._free.append(known.bit)  # no mask contains it any more

    def _remove(self, digest: bytes, mask: int) -> None:
        others = self._holders[digest] & ~mask
        if others:
            self._holders[digest] = others
        else:
            del self._holders[digest]


class PrefixIndex:
    """The index of one router, kept current by `follow`."""

    def __init__(self, view: WorkerLiveness, channels: Channels) -> None:
        self._view = view
        self._channels = channels
        self.index = BlockIndex()
        self._watching: dict[Incarnation, asyncio.Task[None]] = {}
        self._lost: set[Incarnation] = set()  # incarnations whose broken stream was logged

    async def prompt(self, tokens: Sequence[int], salt: bytes, adapter: str, fingerprint: bytes = b"") -> Prompt:
        """A prompt with its hashes computed, so that its placement does not delay the token streams."""
        prompt = Prompt(tokens, salt, adapter, fingerprint)
        if len(prompt) > LONG_PROMPT_TOKENS:
            for ((block_size, recurrent), known), _ in self.index.kinds_of(prompt):
                await asyncio.to_thread(prompt.states if recurrent else prompt.chain, block_size, known)
        return prompt

    def cached(self, prompt: Prompt, record: WorkerRecord) -> int:
        """Leading tokens of the prompt that this worker is known to have cached."""
        return self.index.cached(prompt, (record.worker_id, record.incarnation))

    def holders(self, prompt: Prompt, role: str) -> list[str]:
        """Ids of a few workers that have cached most of it."""
        return [worker_id for worker_id, _ in self.index.holders(prompt, role, MAX_HOLDERS)]

    async def follow(self) -> None:
        """Follows the registry until cancelled."""
        try:
            async for _ in self._view.updates():
                records = {key: record for key, record in self._view.incarnations.items() if record.role != "router"}
                for incarnation in self._watching.keys() - records.keys():
                    await self._forget(incarnation)
                for incarnation, record in records.items():
                    if incarnation not in self._watching:
                        watch = partial(self._watch, incarnation, record)
                        self._watching[incarnation] = forever(watch, name=f"cache {record.worker_id}")
        finally:
            for incarnation in list(self._watching):
                await self._forget(incarnation)

    async def _forget(self, incarnation: Incarnation) -> None:
        await end(self._watching.pop(incarnation))
        self._lost.discard(incarnation)
        await _in_slices(self.index.forget(incarnation))

    async def _watch(self, incarnation: Incarnation, record: WorkerRecord) -> None:
        """Reads the stream of one incarnation while the registry has it."""
        while True:
            with suppress(TandemError), known_errors("cache news"):
                await self._listen(incarnation, record)
            await _in_slices(self.index.forget(incarnation))
            await asyncio.sleep(RECONNECT_S)

    async def _listen(self, incarnation: Incarnation, record: WorkerRecord) -> None:
        call = worker_pb2_grpc.WorkerServiceStub(self._channels.to(record.address)).WatchCache(
            worker_pb2.WatchCacheRequest()
        )
        try:
            with calling(record.worker_id):
                async for message in call:
                    self._lost.discard(incarnation)
                    if message.sequence == 0 and message.incarnation != record.incarnation:
                        return  # the registry will show the new incarnation
                    await _in_slices(self.index.take(record, message))
        except TandemError as error:
            if incarnation not in self._lost:  # it is tried again each second for the minute that it is kept
                log.info("cache_news.lost", worker=record.worker_id, error=error.message)
                self._lost.add(incarnation)
            raise
        finally:
            call.cancel()


async def _in_slices(work: Iterator[None]) -> None:
    """Lets the token streams run between two slices. Completes the work even if cancelled."""
    try:
        for _ in work:
            await asyncio.sleep(0)
    finally:
        for _ in work:
            pass


def _split(hashes: bytes) -> list[bytes]:
    size = block_hash.DIGEST_BYTES
    return [hashes[at : at + size] for at in range(0, len(hashes), size)]
