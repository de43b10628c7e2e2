"""Which worker has the beginning of a prompt, as far as the workers have told.

Each worker streams the hashes of its reusable blocks (services/cache_news.py). A message that is missing, or a stream
that ends, empties what is known of that worker until it has told everything again. Wrong or late knowledge costs time
and never a token: a worker computes what it turns out not to have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from cluster.registry import WorkerRecord
from engine import hashing
from services.server import Channels
from services.view import ClusterView
from tandem.errors import InternalError, TandemError
from tandem.status import calling, known_errors
from tandem.tasks import end
from tandem.v1 import worker_pb2, worker_pb2_grpc

log = structlog.get_logger(__name__)

AGAIN_S = 1.0  # until a stream that broke is opened again
LONG_TOKENS = 8192  # of a prompt whose hashes are computed on a thread
Life = tuple[str, str]  # worker id, incarnation


class Prompt:
    """The tokens that are to be computed or found, and the hashes of their full blocks."""

    def __init__(self, tokens: Sequence[int], salt: bytes, adapter: str) -> None:
        self.adapter = adapter
        self._tokens = list(tokens)
        self._salt = salt
        self._chains: dict[tuple[int, bytes], list[bytes]] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def chain(self, block_size: int, fingerprint: bytes) -> list[bytes]:
        """`fingerprint` is that of the adapter; empty for the base model."""
        key = block_size, fingerprint
        if key not in self._chains:
            self._chains[key] = hashing.chain(self._tokens, block_size, self._salt, adapter=fingerprint)
        return self._chains[key]


@dataclass
class Known:
    """What one life of a worker has told."""

    block_size: int
    adapters: dict[str, bytes] = field(default_factory=dict)
    hashes: set[bytes] = field(default_factory=set)
    sequence: int = -1  # of the latest message

    def take(self, message: worker_pb2.WatchCacheResponse) -> None:
        """Raises InternalError when a message is missing."""
        if message.sequence != self.sequence + 1:
            raise InternalError(f"cache message {message.sequence} came after {self.sequence}")
        self.sequence = message.sequence
        if message.sequence == 0:
            self.adapters = dict(message.adapters)
        self.hashes.update(_split(message.added))
        self.hashes.difference_update(_split(message.removed))

    def cached(self, prompt: Prompt) -> int:
        """Leading tokens of it that need not be computed there; one always must be."""
        fingerprint = self.adapters.get(prompt.adapter, b"") if prompt.adapter else b""
        if prompt.adapter and not fingerprint:
            return 0
        chain = prompt.chain(self.block_size, fingerprint)
        blocks = next((count for count, digest in enumerate(chain) if digest not in self.hashes), len(chain))
        return max(0, min(blocks * self.block_size, len(prompt) - 1))


class Prefixes:
    """The index of one router. `follow` keeps it."""

    def __init__(self, view: ClusterView, channels: Channels) -> None:
        self._view = view
        self._channels = channels
        self._known: dict[Life, Known] = {}
        self._watching: dict[Life, asyncio.Task[None]] = {}

    async def prompt(self, tokens: Sequence[int], salt: bytes, adapter: str) -> Prompt:
        """A prompt whose hashes are there, so that placing it does not keep the streams waiting."""
        prompt = Prompt(tokens, salt, adapter)
        if len(prompt) > LONG_TOKENS and not adapter:
            for block_size in {known.block_size for known in self._known.values()}:
                await asyncio.to_thread(prompt.chain, block_size, b"")
        return prompt

    def cached(self, prompt: Prompt, record: WorkerRecord) -> int:
        """Leading tokens of the prompt that this worker has, as far as is known."""
        known = self._known.get((record.worker_id, record.incarnation))
        return known.cached(prompt) if known else 0

    async def follow(self) -> None:
        """Keep up with the registry, until cancelled."""
        try:
            async for workers in self._view.updates():
                living = {
                    (record.worker_id, record.incarnation): record
                    for record in workers.values()
                    if record.role != "router"
                }
                for life in [life for life in self._watching if life not in living]:
                    await self._forget(life)
                for life, record in living.items():
                    if life not in self._watching:
                        self._watching[life] = asyncio.create_task(self._watch(life, record), name=f"cache {life[0]}")
        finally:
            for life in list(self._watching):
                await self._forget(life)

    async def _forget(self, life: Life) -> None:
        await end(self._watching.pop(life))
        self._known.pop(life, None)

    async def _watch(self, life: Life, record: WorkerRecord) -> None:
        """Listens to one life of a worker as long as the registry shows it."""
        while True:
            with suppress(TandemError), known_errors("cache news"):
                await self._listen(life, record)
            self._known.pop(life, None)
            await asyncio.sleep(AGAIN_S)

    async def _listen(self, life: Life, record: WorkerRecord) -> None:
        call = worker_pb2_grpc.WorkerServiceStub(self._channels.to(record.address)).WatchCache(
            worker_pb2.WatchCacheRequest()
        )
        known = Known(record.block_size)
        try:
            with calling(record.worker_id):
                async for message in call:
                    if message.sequence == 0 and message.incarnation != record.incarnation:
                        return  # the registry will tell of its new life
                    known.take(message)
                    self._known[life] = known
        except TandemError as error:
            log.info("cache_news.lost", worker=record.worker_id, error=error.message)
            raise
        finally:
            call.cancel()


def _split(hashes: bytes) -> list[bytes]:
    size = hashing.DIGEST_BYTES
    return [hashes[at : at + size] for at in range(0, len(hashes), size)]
