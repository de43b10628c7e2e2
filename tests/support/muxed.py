"""Calls of a decode worker as a router makes them: through a mux of its own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tandem.v1 import decode_pb2, decode_pb2_grpc

TIMEOUT_S = 20.0
_numbers = itertools.count()


@asynccontextmanager
async def open_mux(stub: decode_pb2_grpc.DecodeServiceStub) -> AsyncIterator[tuple[str, Any]]:
    """The id and the call of a mux that is open until the block ends."""
    name = f"test-{next(_numbers)}"
    call = stub.Feed(decode_pb2.FeedRequest(feed_id=name))
    async with asyncio.timeout(TIMEOUT_S):
        assert (await call.read()).incarnation
    try:
        yield name, call
    finally:
        call.cancel()


async def decoded(stub: decode_pb2_grpc.DecodeServiceStub, request: decode_pb2.DecodeRequest) -> list[int]:
    """The tokens that a decode worker generates for this request, to their end. Raises what the call raises."""
    async with open_mux(stub) as (name, mux), asyncio.timeout(TIMEOUT_S):
        request.feed_id, request.lane = name, 1
        events = [event async for event in stub.Decode(request, timeout=TIMEOUT_S)]
        while not events[-1].HasField("ended"):
            events += (await mux.read()).events
    return [token for event in events for token in event.tokens.token_ids]
