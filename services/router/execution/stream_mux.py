"""The router's calls to decode workers, and the other end of services/decode/stream_mux.py, which passes the events
of a worker to the streams they belong to.

One feed per incarnation of a decode worker, opened with the first request there and closed after IDLE_CLOSE_S without
one. A substream is one attempt's share of it. Its number (`lane` in the proto) is never reused, so late events of an
attempt that is over reach no reader.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from time import monotonic
from typing import Any

from cluster.state.registry import WorkerRecord
from services.grpc_server import Channels
from services.router.routing.placement import WorkerSnapshot
from tandem.errors import TandemError, Unauthenticated, WorkerLost
from tandem.grpc_errors import calling, known_errors
from tandem.tasks import end, fail, once
from tandem.telemetry.tracing import Span
from tandem.v1 import decode_pb2, decode_pb2_grpc

OPEN_TIMEOUT_S = 5.0
# Reason of an error. The worker has not seen the request: no connection could be made, or the worker has another token
NOT_SENT = "NOT_SENT"
IDLE_CLOSE_S = 30.0  # without a stream; then the feed is closed, so a router has feeds only to workers that serve it
OnEvent = Callable[[decode_pb2.DecodeResponse], bool]  # returns True at the end of the stream
END_WAIT_S = 5.0  # that the end of a stream may take after its call has ended without an error


class Substream:
    """One attempt's share of a feed. Events that arrive before `read` are buffered, bounded by its max_tokens."""

    def __init__(self, feed_id: str, number: int, worker_id: str) -> None:
        self.feed_id = feed_id
        self.number = number
        self._worker_id = worker_id
        self._early: list[decode_pb2.DecodeResponse] = []
        self._take: OnEvent | None = None
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def put(self, event: decode_pb2.DecodeResponse) -> None:
        if self._take is None:
            self._early.append(event)
        elif not self._ended.done():
            try:
                if self._take(event):
                    self._ended.set_result(None)
            except Exception as error:  # fails this stream's attempt only
                self.fail(error)

    def fail(self, error: Exception) -> None:
        """Ends the stream with an error, after the events that were put."""
        fail(self._ended, error)

    async def read(self, take: OnEvent, call: Any) -> None:
        """Passes events to `take` as they arrive, until it returns True. `call` is the Decode call, whose first token
        has been read. Raises what breaks the call, the feed or `take`."""
        for event in self._early:
            if take(event):
                return
        self._take = take
        moved = asyncio.Event()
        call.add_done_callback(lambda _: moved.set())
        self._ended.add_done_callback(lambda _: moved.set())
        await moved.wait()
        if not self._ended.done():
            async for _ in call:  # its status: raises unless it ended well
                pass
            try:
                async with asyncio.timeout(END_WAIT_S):
                    await self._ended
            except TimeoutError as error:
                raise WorkerLost(f"{self._worker_id} ended the stream without a status") from error
        self._ended.result()


class StreamMux:
    """One feed: its call, and the substreams on it."""

    def __init__(
        self, worker: WorkerSnapshot | WorkerRecord, stub: decode_pb2_grpc.DecodeServiceStub, interval_s: float
    ) -> None:
        self.id = secrets.token_hex(8)
        self.over = False
        self._worker = worker
        self._substreams: dict[int, Substream] = {}
        self._count = 0
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._call = stub.Feed(decode_pb2.FeedRequest(feed_id=self.id, interval_seconds=interval_s))
        self.reading = once(self._read(), name=f"feed {worker.worker_id}")
        self._idle = self._closed_later()

    async def opened(self) -> None:
        """Waits until the worker has accepted the feed. Raises WorkerLost, DeadlineExceeded."""
        with calling(self._worker.worker_id):
            try:
                async with asyncio.timeout(OPEN_TIMEOUT_S):
                    await asyncio.shield(self._opened)
            except TimeoutError as error:
                self._call.cancel()  # the next request begins afresh
                raise WorkerLost(f"it did not open a shared stream within {OPEN_TIMEOUT_S:.0f} s") from error

    @contextmanager
    def substream(self) -> Iterator[Substream]:
        self._idle.cancel()
        self._count += 1
        substream = self._substreams[self._count] = Substream(self.id, self._count, self._worker.worker_id)
        try:
            yield substream
        finally:
            self._substreams.pop(substream.number, None)
            if not self._substreams and not self.over:
                self._idle.cancel()
                self._idle = self._closed_later()

    def _closed_later(self) -> asyncio.TimerHandle:
        """Closes the feed after a while, unless a substream opens before."""
        return asyncio.get_running_loop().call_later(IDLE_CLOSE_S, self._close)

    def _close(self) -> None:
        self.over = True  # immediately: the next request opens another feed
        self.reading.cancel()

    async def _read(self) -> None:
        name = self._worker.worker_id
        try:
            with known_errors(f"the shared stream of {name}"), calling(name):
                async for message in self._call:
                    if message.incarnation and not self._opened.done():
                        if message.incarnation != self._worker.incarnation:
                            raise WorkerLost(f"{name} is another incarnation now")
                        self._opened.set_result(None)
                    for event in message.events:
                        if substream := self._substreams.get(event.lane):
                            substream.put(event)
            raise WorkerLost(f"{name} ended its shared stream")
        except TandemError as error:
            self._fail(error)
        finally:
            self._fail(WorkerLost(f"the shared stream of {name} was closed"))
            self._call.cancel()

    def _fail(self, error: TandemError) -> None:
        self.over = True
        self._idle.cancel()
        fail(self._opened, error)
        for substream in self._substreams.values():
            substream.fail(error)
        self._substreams.clear()


class StreamMuxes:
    """The feeds of one router."""

    def __init__(self, channels: Channels, interval_s: float) -> None:
        """Each worker sends at most one message per `interval_s`, ends of streams excepted."""
        self._channels = channels
        self._interval_s = interval_s
        self._muxes: dict[tuple[str, str], StreamMux] = {}  # (worker id, incarnation)

    @asynccontextmanager
    async def decode(
        self, worker: WorkerSnapshot, request: decode_pb2.DecodeRequest, deadline: float, span: Span
    ) -> AsyncIterator[tuple[Any, Substream]]:
        """Opens a Decode call, which yields events up to the first token, and its substream for later ones, and fills
        in the request's `feed_id` and `lane`. Cancels the call when the block ends: the worker frees what it holds for
        the attempt. Raises WorkerLost, with the reason NOT_SENT if the call was never sent, and the worker's errors."""
        stub = decode_pb2_grpc.DecodeServiceStub(self._channels.to(worker.address))
        try:
            with calling(worker.worker_id):
                mux = await self.of(worker)
        except (WorkerLost, Unauthenticated) as error:
            raise WorkerLost(error.message, reason=NOT_SENT) from error
        with mux.substream() as substream, calling(worker.worker_id):
            request.feed_id, request.lane = substream.feed_id, substream.number
            timeout = max(0.001, deadline - monotonic())
            call = stub.Decode(request, timeout=timeout, metadata=span.headers)
            try:
                yield call, substream
            finally:
                call.cancel()

    async def of(self, worker: WorkerSnapshot | WorkerRecord) -> StreamMux:
        """The open feed of this incarnation of a worker. Raises WorkerLost."""
        key = (worker.worker_id, worker.incarnation)
        mux = self._muxes.get(key)
        if mux is None or mux.over:
            stub = decode_pb2_grpc.DecodeServiceStub(self._channels.to(worker.address))
            mux = self._muxes[key] = StreamMux(worker, stub, self._interval_s)
            mux.reading.add_done_callback(functools.partial(self._forget, key, mux))
        await mux.opened()
        return mux

    def _forget(self, key: tuple[str, str], mux: StreamMux, _: asyncio.Task[None]) -> None:
        if self._muxes.get(key) is mux:
            del self._muxes[key]

    async def close(self) -> None:
        for mux in list(self._muxes.values()):
            await end(mux.reading)
