"""Multiplexes the token streams of one router onto one gRPC stream, the Feed call: one message per step for all
streams, or per several steps if these are shorter than the router's interval.

    Decode   ... first token ▶ │ put ─┐
    Decode   ... first token ▶ │ put ─┼▶ StreamMux ▶ one message ▶ services/router/execution/stream_mux.py
    Decode   ... first token ▶ │ put ─┘

A message costs both sides far more than its content: one message per token and stream took as long as computing the
tokens.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

from tandem.errors import InvalidRequest, Unavailable
from tandem.v1 import decode_pb2

MAX_EVENTS = 256  # in one message to a slow router: with log probabilities some 100 KB
MAX_INTERVAL_S = 1.0


class StreamMux:
    """The events that one router has not received yet. Bounded by what its streams may still generate."""

    def __init__(self, interval_s: float) -> None:
        """`interval_s` is the minimum time between two messages; a message in which a stream ends is sent at once."""
        self._interval_s = interval_s
        self._sent_at = -math.inf
        self._timer: asyncio.TimerHandle | None = None  # sends the waiting events
        self._events: list[decode_pb2.DecodeResponse] = []
        self._latest: dict[int, decode_pb2.DecodeResponse] = {}  # the latest waiting event of each lane
        self._wake = asyncio.Event()
        self.closed = False

    def put(self, event: decode_pb2.DecodeResponse) -> None:
        """Queues an event. Tokens are merged with waiting tokens of the same stream, so a slow router receives several
        steps at once. Raises Unavailable when the router no longer listens, which ends the generation."""
        if self.closed:
            raise _not_open()
        latest = self._latest.get(event.lane)
        if latest is None or not _appended(latest.tokens, event):
            self._events.append(event)
            self._latest[event.lane] = event
        if event.HasField("ended"):
            self._wake.set()
        elif self._timer is None and not self._wake.is_set():
            loop = asyncio.get_running_loop()
            if self._sent_at + self._interval_s <= loop.time():
                self._wake.set()  # `messages` runs after all tasks that the same step has woken
            else:
                self._timer = loop.call_at(self._sent_at + self._interval_s, self._wake.set)

    async def messages(self) -> AsyncGenerator[decode_pb2.FeedResponse, None]:
        while True:
            await self._wake.wait()
            self._sent_at = asyncio.get_running_loop().time()
            self._cancel_timer()
            events = self._events[:MAX_EVENTS]
            del self._events[:MAX_EVENTS]
            for event in events:
                if self._latest.get(event.lane) is event:
                    del self._latest[event.lane]
            if not self._events:
                self._wake.clear()
            yield decode_pb2.FeedResponse(events=events)

    def close(self) -> None:
        """The router no longer listens."""
        self.closed = True
        self._cancel_timer()

    def _cancel_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None


def _appended(tokens: decode_pb2.Tokens, event: decode_pb2.DecodeResponse) -> bool:
    """Appends the event's tokens if they follow directly. A gap is left in place; the router detects it."""
    position = tokens.position
    if not event.HasField("tokens") or event.tokens.position != position + len(tokens.token_ids):
        return False
    tokens.MergeFrom(event.tokens)  # lists grow, the other fields are those of the later event
    tokens.position = position
    return True


class StreamMuxes:
    """The open muxes of all routers, by the id that each router chose."""

    def __init__(self) -> None:
        self._muxes: dict[str, StreamMux] = {}

    @contextmanager
    def opened(self, feed_id: str, interval_s: float) -> Iterator[StreamMux]:
        """Open while the router listens. Raises InvalidRequest for an id that is in use and an interval out of
        bounds."""
        if not 0 <= interval_s <= MAX_INTERVAL_S:
            raise InvalidRequest(
                f"{interval_s} s between messages", field="interval_seconds", bound=f"0 to {MAX_INTERVAL_S:g}"
            )
        if not feed_id or feed_id in self._muxes:
            raise InvalidRequest(
                "the shared stream needs its own id", field="feed_id", bound="not empty, never used before"
            )
        mux = self._muxes[feed_id] = StreamMux(interval_s)
        try:
            yield mux
        finally:
            mux.close()
            del self._muxes[feed_id]

    def get(self, feed_id: str) -> StreamMux:
        """Raises InvalidRequest without an id, Unavailable when the mux is not open."""
        if not feed_id:
            raise InvalidRequest("the request names no shared stream", field="feed_id", bound="that of an open one")
        if feed_id not in self._muxes:
            raise _not_open()
        return self._muxes[feed_id]


def _not_open() -> Unavailable:
    return Unavailable("the shared stream is not open; place the request again", reason="FEED_LOST")
