"""What the streams of one router say after their first tokens: one message for each step, however many streams moved.

    Decode   ... first token ▶ │ put ─┐
    Decode   ... first token ▶ │ put ─┼▶ Feed ▶ one message ▶ the router's services/router/feeds.py
    Decode   ... first token ▶ │ put ─┘

A message costs both sides far more than what is in it: one for each token and stream took as long as computing them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

from tandem.errors import InvalidRequest, Unavailable
from tandem.v1 import decode_pb2

MOST_EVENTS = 256  # in one message, when the router is behind: with log probabilities some 100 KB


class Feed:
    """What one router has not been told yet. Bounded by what its streams may still generate."""

    def __init__(self) -> None:
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
        self._wake.set()  # its reader runs after all streams that the same step has woken

    async def messages(self) -> AsyncGenerator[decode_pb2.FeedResponse, None]:
        while True:
            await self._wake.wait()
            told = self._events[:MOST_EVENTS]
            del self._events[:MOST_EVENTS]
            for event in told:
                if self._latest.get(event.lane) is event:
                    del self._latest[event.lane]
            if not self._events:
                self._wake.clear()
            yield decode_pb2.FeedResponse(events=told)


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
    def opened(self, feed_id: str) -> Iterator[Feed]:
        """For as long as the router listens. Raises InvalidRequest for an id that is in use."""
        if not feed_id or feed_id in self._feeds:
            raise InvalidRequest("the feed has no id of its own", field="feed_id", bound="not empty, never used before")
        feed = self._feeds[feed_id] = Feed()
        try:
            yield feed
        finally:
            feed.closed = True
            del self._feeds[feed_id]

    def get(self, feed_id: str) -> Feed:
        """Raises Unavailable when it is not open."""
        if feed_id not in self._feeds:
            raise _lost()
        return self._feeds[feed_id]


def _lost() -> Unavailable:
    return Unavailable("the feed of this stream is not open; place the request again", reason="FEED_LOST")
