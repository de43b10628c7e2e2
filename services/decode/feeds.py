"""What the streams of one router say after their first tokens: one message for a step, however many streams moved, and
for several steps where they follow one another faster than the router wants to be told.

    Decode   ... first token ▶ │ put ─┐
    Decode   ... first token ▶ │ put ─┼▶ Feed ▶ one message ▶ the router's services/router/feeds.py
    Decode   ... first token ▶ │ put ─┘

A message costs both sides far more than what is in it: one for each token and stream took as long as computing them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

from tandem.errors import InvalidRequest, Unavailable
from tandem.v1 import decode_pb2

MOST_EVENTS = 256  # in one message, when the router is behind: with log probabilities some 100 KB
MOST_INTERVAL_S = 1.0


class Feed:
    """What one router has not been told yet. Bounded by what its streams may still generate."""

    def __init__(self, interval_s: float) -> None:
        """At most one message in so long, but for one in which a stream ends."""
        self._interval_s = interval_s
        self._told_at = -math.inf
        self._due: asyncio.TimerHandle | None = None  # when what waits is told
        self._events: list[decode_pb2.DecodeResponse] = []
        self._latest: dict[int, decode_pb2.DecodeResponse] = {}  # of them, by lane
        self._wake = asyncio.Event()
        self.closed = False

    def put(self, event: decode_pb2.DecodeResponse) -> None:
        """Tokens join those of their stream that the router has not been told: one that is behind gets several steps
        at once. Raises Unavailable when nobody listens any more: a token that goes nowhere is not to be generated."""
        if self.closed:
            raise _lost()
        latest = self._latest.get(event.lane)
        if latest is None or not _joined(latest.tokens, event):
            self._events.append(event)
            self._latest[event.lane] = event
        if event.HasField("ended"):
            self._wake.set()
        elif self._due is None and not self._wake.is_set():
            loop = asyncio.get_running_loop()
            if self._told_at + self._interval_s <= loop.time():
                self._wake.set()  # its reader runs after all streams that the same step has woken
            else:
                self._due = loop.call_at(self._told_at + self._interval_s, self._wake.set)

    async def messages(self) -> AsyncGenerator[decode_pb2.FeedResponse, None]:
        while True:
            await self._wake.wait()
            self._told_at = asyncio.get_running_loop().time()
            self._wait_no_more()
            told = self._events[:MOST_EVENTS]
            del self._events[:MOST_EVENTS]
            for event in told:
                if self._latest.get(event.lane) is event:
                    del self._latest[event.lane]
            if not self._events:
                self._wake.clear()
            yield decode_pb2.FeedResponse(events=told)

    def close(self) -> None:
        """Nobody listens any more."""
        self.closed = True
        self._wait_no_more()

    def _wait_no_more(self) -> None:
        if self._due:
            self._due.cancel()
            self._due = None


def _joined(tokens: decode_pb2.Tokens, event: decode_pb2.DecodeResponse) -> bool:
    """Adds its tokens, if they follow. A gap stays a gap, for the router to find."""
    position = tokens.position
    if not event.HasField("tokens") or event.tokens.position != position + len(tokens.token_ids):
        return False
    tokens.MergeFrom(event.tokens)  # lists grow, the rest is as in the later one
    tokens.position = position
    return True


class Feeds:
    def __init__(self) -> None:
        self._feeds: dict[str, Feed] = {}

    @contextmanager
    def opened(self, feed_id: str, interval_s: float) -> Iterator[Feed]:
        """For as long as the router listens. Raises InvalidRequest for an id that is in use, and for an interval that
        nobody would want."""
        if not 0 <= interval_s <= MOST_INTERVAL_S:
            raise InvalidRequest(
                f"{interval_s} s between messages", field="interval_seconds", bound=f"0 to {MOST_INTERVAL_S:g}"
            )
        if not feed_id or feed_id in self._feeds:
            raise InvalidRequest("the feed has no id of its own", field="feed_id", bound="not empty, never used before")
        feed = self._feeds[feed_id] = Feed(interval_s)
        try:
            yield feed
        finally:
            feed.close()
            del self._feeds[feed_id]

    def get(self, feed_id: str) -> Feed:
        """Raises Unavailable when it is not open."""
        if feed_id not in self._feeds:
            raise _lost()
        return self._feeds[feed_id]


def _lost() -> Unavailable:
    return Unavailable("the feed of this stream is not open; place the request again", reason="FEED_LOST")
