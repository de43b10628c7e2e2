"""Sends a generated answer over HTTP, as one body or as a stream. An AnswerEncoder writes the format of one endpoint.

A client that disconnects cancels its generation, which frees its blocks everywhere. A stream's status is fixed with its
first message: an earlier error has a status code, a later one is an event of the stream.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, aclosing, nullcontext
from time import monotonic
from typing import Any, Protocol

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.router.frontend.openai.openai_errors import error_headers
from tandem.errors import ResumeFailed, TandemError, Unavailable
from tandem.grpc_errors import known_errors
from tandem.tasks import end, forever, merged
from tandem.v1 import generation_pb2

log = structlog.get_logger(__name__)

Events = AsyncGenerator[tuple[int, generation_pb2.GenerateResponse], None]  # each with the index of its prompt
Kept = Callable[[int], AbstractContextManager[object]]  # counts as many bytes of a tenant; raises Busy

# Silence in a stream after which keep-alive bytes are sent: proxies, and clients such as Claude Code, treat a longer
# silence as a lost connection.
KEEP_ALIVE_S = 30.0
LARGE_BYTES = 64 * 1024  # requests and messages beyond this are counted while they are kept
PIECE_BYTES = 256 * 1024  # of a body that is written at once: the event loop takes 1 ms for 2 MB


class AnswerEncoder(Protocol):
    """Encodes the events of one HTTP request in the format of one endpoint."""

    keep_alive: bytes
    """What a stream may have between any two messages, and clients ignore."""

    def named(self, error: TandemError) -> TandemError:
        """The error with the field names of the request."""

    async def stream(self, index: int, event: generation_pb2.GenerateResponse) -> bytes:
        """The event's part of a stream; b"" if it adds nothing yet."""

    async def collect(self, events: Events) -> bytes:
        """The body of an answer without streaming."""

    def error_body(self, error: TandemError) -> bytes:
        """The body of an answer that has not begun."""

    def error_event(self, error: TandemError) -> bytes:
        """The end of a stream that has begun."""


class Generating(Response, ABC):
    """A generated answer; the generation ends when the client disconnects."""

    def __init__(self, answer: AnswerEncoder, events: Events, request_id: str, kept: Kept, size: int) -> None:
        """The request, of `size` bytes, and what the client has not read of the answer are `kept` until the end."""
        self._answer = answer
        self._events = events
        self._request_id = request_id
        self._kept, self._size = kept, size
        self._midway = False  # a large message is half written: nothing but the end of the connection may follow

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._run(send))
        gone = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # the server's grace period is over
            await end(work)
            if not self._midway:
                await self._fail(Unavailable("the router is stopping", reason="DRAINING", retry_after=1.0), send)
        finally:
            await end(gone)
            await end(work)
        if not work.cancelled():
            work.result()

    async def _run(self, send: Send) -> None:
        try:
            with known_errors("http"):
                async with aclosing(self._events) as events:
                    with self._keeping(self._size):
                        await self._send(events, send)
        except TandemError as error:
            await self._fail(self._answer.named(error), send)

    def _keeping(self, size: int) -> AbstractContextManager[object]:
        return self._kept(size) if size > LARGE_BYTES else nullcontext()

    @abstractmethod
    async def _send(self, events: Events, send: Send) -> None:
        """Sends the whole answer."""

    async def _fail(self, error: TandemError, send: Send) -> None:
        """Of an answer of which nothing has been written."""
        if isinstance(error, ResumeFailed):  # so its client may ask again, as if no token had been generated
            error = Unavailable(error.message, reason=error.reason, retry_after=1.0)
        headers = {**id_headers(self._request_id), **error_headers(error)}
        await write(send, error.http, self._answer.error_body(error), headers)


class Collected(Generating):
    async def _send(self, events: Events, send: Send) -> None:
        body = await self._answer.collect(events)
        self._midway = len(body) > LARGE_BYTES
        with self._keeping(len(body)):
            await write(send, 200, body, id_headers(self._request_id))


class Streaming(Generating):
    """Writes once for each message of the decode worker, and `keep_alive` during long silences. An error before the
    first write has a status."""

    def __init__(self, answer: AnswerEncoder, events: Events, request_id: str, kept: Kept, size: int) -> None:
        super().__init__(answer, events, request_id, kept, size)
        self._started = False
        self._sent_at = monotonic()
        self._writing = asyncio.Lock()

    async def _send(self, events: Events, send: Send) -> None:
        keeping = forever(lambda: self._keep_alive(send), name="keep-alive")
        try:
            async for index, event in events:
                if message := await self._answer.stream(index, event):
                    with self._keeping(len(message)):
                        await self._write(send, message)
        finally:
            await end(keeping)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            await asyncio.sleep(max(0.0, self._sent_at + KEEP_ALIVE_S - monotonic()))
            if monotonic() - self._sent_at >= KEEP_ALIVE_S:
                await self._write(send, self._answer.keep_alive)

    async def _write(self, send: Send, message: bytes) -> None:
        async with self._writing:
            self._sent_at = monotonic()
            if not self._started:
                self._started = True
                headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
                await send(_head(200, {**headers, **id_headers(self._request_id)}))
            self._midway = len(message) > LARGE_BYTES
            await _write(send, message)
            self._midway = False

    async def _fail(self, error: TandemError, send: Send) -> None:
        if not self._started:
            await super()._fail(error, send)
            return
        log.warning("stream.failed", request=self._request_id, error=error.message)
        await send({"type": "http.response.body", "body": self._answer.error_event(error), "more_body": False})


def id_headers(request_id: str) -> dict[str, str]:
    """The request id in the headers that OpenAI's and Anthropic's clients read."""
    return {"x-request-id": request_id, "request-id": request_id}


def _head(status: int, headers: dict[str, str]) -> dict[str, Any]:
    fields = [(name.encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": fields}


async def write(send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
    about = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    await send(_head(status, about))
    if len(body) > LARGE_BYTES:
        await _write(send, body)
        body = b""
    await send({"type": "http.response.body", "body": body})


async def _write(send: Send, body: bytes) -> None:
    """Some of a body, with more to come. Returns when the client has read most of a large one."""
    if len(body) <= LARGE_BYTES:
        await send({"type": "http.response.body", "body": body, "more_body": True})
        return
    for start in range(0, len(body), PIECE_BYTES):
        await send({"type": "http.response.body", "body": body[start : start + PIECE_BYTES], "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": True})  # waits until there is room for more


async def _gone(receive: Receive) -> None:
    """Returns when the client disconnects. Its body has been read, so no other message can arrive."""
    while (await receive())["type"] != "http.disconnect":
        pass


def merged_events(sources: list[AsyncGenerator[generation_pb2.GenerateResponse, None]]) -> Events:
    """The events of all sources as they arrive, each with the number of its source."""
    numbered = [_numbered(number, source) for number, source in enumerate(sources)]
    return numbered[0] if len(numbered) == 1 else merged(numbered)


async def _numbered(number: int, source: AsyncGenerator[generation_pb2.GenerateResponse, None]) -> Events:
    async with aclosing(source) as events:
        async for event in events:
            yield number, event
