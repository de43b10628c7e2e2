"""Which worker has the beginning of a prompt, as far as the workers have told.

Each worker streams the hashes of its reusable blocks (services/cache_news.py). A message that is missing, or a stream
that ends, empties what is known of that worker until it has told everything again. Wrong or late knowledge costs time
and never a token: a worker computes what it turns out not to have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from random import randrange

import structlog

from cluster.registry import WorkerRecord
from engine import hashing
from services.server import Channels
from services.view import ClusterView
from tandem.errors import InternalError, TandemError
from tandem.status import calling, known_errors
from tandem.tasks import end, forever
from tandem.v1 import worker_pb2, worker_pb2_grpc

log = structlog.get_logger(__name__)

AGAIN_S = 1.0  # until a stream that broke is opened again
FEW = 8  # workers that a placement looks at because they have the beginning of the prompt
SLICE = 1000  # hashes that are taken in before the streams have their turn again
LONG_TOKENS = 8192  # of a prompt whose hashes are computed on a thread
Life = tuple[str, str]  # worker id, incarnation


class Prompt:
    """The tokens that are to be computed or found, and the hashes of their full blocks."""

    def __init__(self, tokens: Sequence[int], salt: bytes, adapter: str) -> None:
        self.adapter = adapter
        self._tokens = list(tokens)
        self._salt = salt
        self._chains: dict[tuple[int, bytes], list[bytes]] = {}
        self.found: list[tuple[int, int]] = []  # Index's answer, and of which version of it
        self.found_at: object = None

    def __len__(self) -> int:
        return len(self._tokens)

    def chain(self, block_size: int, fingerprint: bytes) -> list[bytes]:
        """`fingerprint` is that of the adapter; empty for the base model."""
        key = block_size, fingerprint
        if key not in self._chains:
            self._chains[key] = hashing.chain(self._tokens, block_size, self._salt, adapter=fingerprint)
        return self._chains[key]


@dataclass
class _Known:
    """What one life of a worker has told."""

    bit: int  # its place in the masks
    role: str
    hashes: set[bytes] = field(default_factory=set)
    sequence: int = -1  # of the latest message


class Index:
    """Which lives have which blocks: for each hash a mask with a bit for each life. So those that have the leading
    blocks of a prompt are found for all lives at once: a look into a dictionary and an `and` for each block."""

    def __init__(self) -> None:
        self._known: dict[Life, _Known] = {}
        self._lives: dict[int, Life] = {}  # by bit; a life that is being forgotten is in none of these two
        self._free: list[int] = []
        self._bits = 0
        self._holders: dict[bytes, int] = {}
        self._roles: dict[str, int] = {}
        self._kinds: dict[str, dict[tuple[int, bytes], int]] = {}  # adapter -> (block size, fingerprint) -> lives
        self._version = object()  # another one after each change

    def __len__(self) -> int:
        """How many hashes are known."""
        return len(self._holders)

    @property
    def block_sizes(self) -> set[int]:
        return {block_size for block_size, _ in self._kinds.get("", {})}

    def take(self, record: WorkerRecord, message: worker_pb2.WatchCacheResponse) -> Iterator[None]:
        """What a worker says next: a slice of it for each step, and all of it must be taken. Raises InternalError when
        a message is missing."""
        known = self._known.get((record.worker_id, record.incarnation))
        if message.sequence == 0 and known is None:
            known = self._begin(record, dict(message.adapters))
        if known is None or message.sequence != known.sequence + 1:
            at = known.sequence if known else -1
            raise InternalError(f"cache message {message.sequence} came after {at}")
        known.sequence = message.sequence
        return self._steps(known, message)

    def forget(self, life: Life) -> Iterator[None]:
        """From now on it has nothing. To be gone through: each step frees a slice of what was known."""
        known = self._known.pop(life, None)
        if known is None:
            return iter(())
        del self._lives[known.bit]
        self._roles[known.role] &= ~(1 << known.bit)
        for kinds in self._kinds.values():
            for kind in list(kinds):
                kinds[kind] &= ~(1 << known.bit)
                if not kinds[kind]:
                    del kinds[kind]
        self._version = object()
        return self._empty(known)

    def cached(self, prompt: Prompt, life: Life) -> int:
        """Leading tokens of the prompt that need not be computed there; one always must be."""
        known = self._known.get(life)
        if known is None:
            return 0
        return next((tokens for tokens, mask in self._found(prompt) if mask >> known.bit & 1), 0)

    def holders(self, prompt: Prompt, role: str, most: int) -> list[Life]:
        """Lives that have most of it, at most so many: where more have as much of it, some that chance names."""
        named: list[Life] = []
        of_role = self._roles.get(role, 0)
        for _, mask in self._found(prompt):
            mask, start = mask & of_role, randrange(self._bits)
            for part, offset in ((mask >> start, start), (mask & (1 << start) - 1, 0)):
                while part and len(named) < most:
                    low = part & -part
                    part ^= low
                    named.append(self._lives[low.bit_length() - 1 + offset])
            if len(named) == most:
                break
        return named

    def _found(self, prompt: Prompt) -> list[tuple[int, int]]:
        """(leading tokens, lives that have so many and no more), the most first."""
        if prompt.found_at is not self._version:
            found: dict[int, int] = {}
            for (block_size, fingerprint), having in self._kinds.get(prompt.adapter, {}).items():
                tokens = 0
                for digest in prompt.chain(block_size, fingerprint) if having else ():
                    still = having & self._holders.get(digest, 0)
                    if still != having:
                        found[tokens] = found.get(tokens, 0) | having & ~still
                        having = still
                    if not having:
                        break
                    tokens = min(tokens + block_size, len(prompt) - 1)
                found[tokens] = found.get(tokens, 0) | having
            found.pop(0, None)
            prompt.found = sorted(found.items(), reverse=True)
            prompt.found_at = self._version
        return prompt.found

    def _begin(self, record: WorkerRecord, adapters: dict[str, bytes]) -> _Known:
        if self._free:
            bit = self._free.pop()
        else:
            bit, self._bits = self._bits, self._bits + 1
        life = self._lives[bit] = record.worker_id, record.incarnation
        self._roles[record.role] = self._roles.get(record.role, 0) | 1 << bit
        for adapter, fingerprint in {"": b"", **adapters}.items():  # "": the base model
            kinds = self._kinds.setdefault(adapter, {})
            kinds[record.block_size, fingerprint] = kinds.get((record.block_size, fingerprint), 0) | 1 << bit
        known = self._known[life] = _Known(bit, record.role)
        return known

    def _steps(self, known: _Known, message: worker_pb2.WatchCacheResponse) -> Iterator[None]:
        mask, holders = 1 << known.bit, self._holders
        for number, digest in enumerate(_split(message.added)):
            holders[digest] = holders.get(digest, 0) | mask
            known.hashes.add(digest)
            if number % SLICE == SLICE - 1:
                self._version = object()
                yield
        self._version = object()
        for number, digest in enumerate(_split(message.removed)):
            if digest in known.hashes:
                known.hashes.remove(digest)
                self._remove(digest, mask)
            if number % SLICE == SLICE - 1:
                self._version = object()
                yield
        self._version = object()

    def _empty(self, known: _Known) -> Iterator[None]:
        mask, left = 1 << known.bit, known.hashes
        while left:
            for _ in range(min(len(left), SLICE)):
                self._remove(left.pop(), mask)
            yield
        self._free.append(known.bit)  # no mask has it any more

    def _remove(self, digest: bytes, mask: int) -> None:
        others = self._holders[digest] & ~mask
        if others:
            self._holders[digest] = others
        else:
            del self._holders[digest]


class Prefixes:
    """The index of one router. `follow` keeps it."""

    def __init__(self, view: ClusterView, channels: Channels) -> None:
        self._view = view
        self._channels = channels
        self.index = Index()
        self._watching: dict[Life, asyncio.Task[None]] = {}

    async def prompt(self, tokens: Sequence[int], salt: bytes, adapter: str) -> Prompt:
        """A prompt whose hashes are there, so that placing it does not keep the streams waiting."""
        prompt = Prompt(tokens, salt, adapter)
        if len(prompt) > LONG_TOKENS and not adapter:
            for block_size in self.index.block_sizes:
                await asyncio.to_thread(prompt.chain, block_size, b"")
        return prompt

    def cached(self, prompt: Prompt, record: WorkerRecord) -> int:
        """Leading tokens of the prompt that this worker has, as far as is known."""
        return self.index.cached(prompt, (record.worker_id, record.incarnation))

    def holders(self, prompt: Prompt, role: str) -> list[str]:
        """Ids of a few workers that have most of it."""
        return [worker_id for worker_id, _ in self.index.holders(prompt, role, FEW)]

    async def follow(self) -> None:
        """Keep up with the registry, until cancelled."""
        try:
            async for _ in self._view.updates():
                living = {life: record for life, record in self._view.lives.items() if record.role != "router"}
                for life in [life for life in self._watching if life not in living]:
                    await self._forget(life)
                for life, record in living.items():
                    if life not in self._watching:
                        self._watching[life] = forever(partial(self._watch, life, record), name=f"cache {life[0]}")
        finally:
            for life in list(self._watching):
                await self._forget(life)

    async def _forget(self, life: Life) -> None:
        await end(self._watching.pop(life))
        await _in_slices(self.index.forget(life))

    async def _watch(self, life: Life, record: WorkerRecord) -> None:
        """Listens to one life of a worker as long as the registry shows it."""
        while True:
            with suppress(TandemError), known_errors("cache news"):
                await self._listen(life, record)
            await _in_slices(self.index.forget(life))
            await asyncio.sleep(AGAIN_S)

    async def _listen(self, life: Life, record: WorkerRecord) -> None:
        call = worker_pb2_grpc.WorkerServiceStub(self._channels.to(record.address)).WatchCache(
            worker_pb2.WatchCacheRequest()
        )
        try:
            with calling(record.worker_id):
                async for message in call:
                    if message.sequence == 0 and message.incarnation != record.incarnation:
                        return  # the registry will tell of its new life
                    await _in_slices(self.index.take(record, message))
        except TandemError as error:
            log.info("cache_news.lost", worker=record.worker_id, error=error.message)
            raise
        finally:
            call.cancel()


async def _in_slices(work: Iterator[None]) -> None:
    """The streams have their turn between two steps of it. When cancelled it is done all the same."""
    try:
        for _ in work:
            await asyncio.sleep(0)
    finally:
        for _ in work:
            pass


def _split(hashes: bytes) -> list[bytes]:
    size = hashing.DIGEST_BYTES
    return [hashes[at : at + size] for at in range(0, len(hashes), size)]
