"""The router's calls to decode workers: a Decode call for each attempt, with its substream of the worker's feed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any

from services.grpc_server import Channels
from services.router.execution.stream_mux import OnEvent, StreamMuxes, Substream
from services.router.routing.placement import WorkerSnapshot
from tandem.grpc_errors import calling
from tandem.telemetry.tracing import Span
from tandem.v1 import decode_pb2, decode_pb2_grpc


@dataclass(frozen=True, slots=True)
class DecodeStream:
    """A decode worker's events of one attempt."""

    call: Any  # yields events up to the first token
    substream: Substream

    async def rest(self, take: OnEvent) -> None:
        """Passes later events to `take` until it returns True. Raises the error of a broken call or feed."""
        await self.substream.read(take, self.call)


class DecodeClient:
    def __init__(self, channels: Channels, muxes: StreamMuxes) -> None:
        self._channels = channels
        self._muxes = muxes

    @asynccontextmanager
    async def stream(
        self, worker: WorkerSnapshot, request: decode_pb2.DecodeRequest, deadline: float, span: Span
    ) -> AsyncIterator[DecodeStream]:
        """Opens the call, and cancels it when the block ends: the worker frees what it holds for the attempt. Fills in
        the request's `feed_id` and `lane`. Raises WorkerLost and the worker's errors."""
        stub = decode_pb2_grpc.DecodeServiceStub(self._channels.to(worker.address))
        with calling(worker.worker_id):
            mux = await self._muxes.of(worker)
        with mux.substream() as substream, calling(worker.worker_id):
            request.feed_id, request.lane = substream.feed_id, substream.number
            timeout = max(0.001, deadline - monotonic())
            call = stub.Decode(request, timeout=timeout, metadata=span.headers)
            try:
                yield DecodeStream(call, substream)
            finally:
                call.cancel()
