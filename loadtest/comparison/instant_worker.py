"""A decode worker that computes nothing, so that only the router's own cost remains.

    python -m loadtest.comparison.instant_worker STEP_S decode WORKER_ID

Settings come from TANDEM_*, as those of a real one. A step gives each stream a token and takes STEP_S, 0: as fast as
this process can; events go through the mux of the real worker (services/decode/stream_mux.py). Prints
`ready HOST:PORT`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import secrets
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import grpc

from cluster.state.heartbeat import Heartbeat
from cluster.state.registry import Registry, State, WorkerRecord
from services.decode import stream_mux
from services.grpc_server import GrpcServer
from tandem import settings as tandem_settings
from tandem.settings import Settings
from tandem.tasks import end
from tandem.v1 import common_pb2, decode_pb2, decode_pb2_grpc, worker_pb2, worker_pb2_grpc

PLENTY = 1 << 20
MAX_LEN = 4096


@dataclass(eq=False)
class _Stream:
    lane: int
    position: int  # of the next token
    left: int
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Instant(decode_pb2_grpc.DecodeServiceServicer, worker_pb2_grpc.WorkerServiceServicer):
    """Speaks to routers as services/decode/servicer.py does."""

    def __init__(self, step_s: float, vocab: int) -> None:
        self.incarnation = secrets.token_hex(8)
        self._step_s = step_s
        self._tokens = itertools.cycle(random.choices(range(2, vocab), k=4096))
        self._muxes = stream_mux.StreamMuxes()
        self._streams: dict[str, set[_Stream]] = {}  # by feed id
        self._wake = asyncio.Event()

    async def Feed(
        self, request: decode_pb2.FeedRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[decode_pb2.FeedResponse, None]:
        with self._muxes.opened(request.feed_id, request.interval_seconds) as mux:
            yield decode_pb2.FeedResponse(incarnation=self.incarnation)
            streams = self._streams[request.feed_id] = set()
            stepping = asyncio.create_task(self._run(mux, streams))
            try:
                async with aclosing(mux.messages()) as messages:
                    async for message in messages:
                        yield message
            finally:
                await end(stepping)

    async def _run(self, mux: stream_mux.StreamMux, streams: set[_Stream]) -> None:
        """As an engine does, whether or not the router keeps up."""
        due = monotonic()
        while True:
            while not streams:
                self._wake.clear()
                await self._wake.wait()
            due = max(due + self._step_s, monotonic())
            await asyncio.sleep(due - monotonic())
            for stream in list(streams):
                for event in self._step(stream):
                    mux.put(event)
            streams -= {stream for stream in streams if stream.over.is_set()}

    def _step(self, stream: _Stream) -> list[decode_pb2.DecodeResponse]:
        events = []
        if stream.left:
            events.append(self._token(stream))
        if not stream.left:
            events.append(_ended(stream.lane))
            stream.over.set()
        return events

    def _token(self, stream: _Stream) -> decode_pb2.DecodeResponse:
        tokens = decode_pb2.Tokens(position=stream.position, token_ids=[next(self._tokens)])
        stream.position += 1
        stream.left -= 1
        return decode_pb2.DecodeResponse(lane=stream.lane, tokens=tokens)

    async def Decode(
        self, request: decode_pb2.DecodeRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
        """The first token at once; the others in the feed."""
        self._muxes.get(request.feed_id)  # raises when it is not open
        left = request.max_tokens - (len(request.token_ids) - request.prompt_tokens)
        stream = _Stream(request.lane, len(request.token_ids), left)
        yield decode_pb2.DecodeResponse(admitted=decode_pb2.Admitted(incarnation=self.incarnation))
        first = self._token(stream)
        first.tokens.first.CopyFrom(decode_pb2.FirstTokenTiming(path=common_pb2.PATH_LOCAL))
        yield first
        streams = self._streams[request.feed_id]
        streams.add(stream)
        self._wake.set()
        try:
            await stream.over.wait()
        finally:
            streams.discard(stream)

    async def WatchCache(
        self, request: worker_pb2.WatchCacheRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[worker_pb2.WatchCacheResponse, None]:
        """It never has anything."""
        yield worker_pb2.WatchCacheResponse(incarnation=self.incarnation)
        await asyncio.Event().wait()


def _ended(lane: int) -> decode_pb2.DecodeResponse:
    return decode_pb2.DecodeResponse(lane=lane, ended=decode_pb2.Ended(reason=common_pb2.FINISH_REASON_LENGTH))


async def serve(step_s: float, worker_id: str, settings: Settings) -> None:
    """Until it is cancelled."""
    config = json.loads((Path(settings.model) / "config.json").read_text())
    servicer, server = Instant(step_s, config["vocab_size"]), GrpcServer()
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(servicer, server.server)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server.server)
    address = await server.start(settings.host, 0, ["tandem.v1.DecodeService", "tandem.v1.WorkerService"])
    record = WorkerRecord(
        worker_id=worker_id,
        role="decode",
        state=State.READY,
        pid=os.getpid(),
        incarnation=servicer.incarnation,
        address=address,
        model=settings.model,
        layout_hash="none",
        max_model_len=MAX_LEN,
        vocab_size=config["vocab_size"],
        eos_token_ids=[config["eos_token_id"]],
        block_size=16,
        max_running=PLENTY,
        blocks_total=PLENTY,
    )
    registry = Registry(settings.redis or "", settings.cluster, settings.heartbeat_ttl_s)
    heartbeat = Heartbeat(registry, lambda: record, settings.heartbeat_s)
    await heartbeat.start()
    print(f"ready {address}", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        await heartbeat.stop()
        await server.stop(0.1)
        await registry.close()


if __name__ == "__main__":
    asyncio.run(serve(float(sys.argv[1]), sys.argv[3], tandem_settings.load()))
