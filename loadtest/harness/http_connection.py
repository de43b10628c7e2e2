"""Streaming completions, one at a time, on a connection that stays open. It uses no library, so that the client takes
little of the cores (loadtest/loadgen/targets.py parses the messages completely)."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from time import perf_counter

from tandem.errors import Unavailable

EVENT, DONE, LAST_CHUNK = b"data: {", b"data: [DONE]", b"0\r\n\r\n"
USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
KEPT = 1024  # bytes before the end of an answer, in which its usage is


def completion(body: dict[str, object]) -> bytes:
    """The whole request."""
    text = json.dumps(body)
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
    return f"{head}\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode()


@dataclass(frozen=True)
class Answer:
    """Seconds to the first message and to the end, the number of messages, and the tokens that the answer reports."""

    ttft: float
    seconds: float
    messages: int
    tokens: int


class Connection(asyncio.Protocol):
    """Messages are counted as bytes and not parsed; only the usage at the end is."""

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport | None = None
        self._answer: asyncio.Future[Answer] | None = None
        self._rest = b""
        self._messages = 0
        self._sent = self._first = 0.0

    @classmethod
    async def open(cls, port: int) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return connection

    async def complete(self, request: bytes) -> Answer:
        """Raises Unavailable, with the server's message, when it answers with an error or disconnects."""
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._rest, self._messages, self._first, self._sent = b"", 0, 0.0, perf_counter()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        if self._transport:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            return
        if not self._rest and not data.startswith(b"HTTP/1.1 200"):
            self._answer.set_exception(Unavailable(f"the server answered {data[:2000].decode(errors='replace')}"))
            return
        # What begins in the last bytes of before and ends here has not been counted yet.
        self._messages += (self._rest[1 - len(EVENT) :] + data).count(EVENT)
        if self._messages and not self._first:
            self._first = perf_counter()
        self._rest = (self._rest + data)[-KEPT:]
        if self._rest.endswith(LAST_CHUNK) and DONE in self._rest:
            ended, tokens = perf_counter(), USAGE.findall(self._rest)
            count = int(tokens[-1]) if tokens else 0
            self._answer.set_result(Answer(self._first - self._sent, ended - self._sent, self._messages, count))
        elif self._rest.endswith(LAST_CHUNK):
            self._answer.set_exception(Unavailable(f"the server broke off: {self._rest.decode(errors='replace')}"))

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer and not self._answer.done():
            self._answer.set_exception(Unavailable(f"the server hung up: {error}"))
