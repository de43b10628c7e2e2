"""A process that offers a region of KV until its stdin ends, over any transport; and what a reader needs to reach it.

    python -m loadtest.microbench.kv_source KIND BLOCK_BYTES BLOCKS RANKS

RANKS above 1 allocates the pages in shared memory, as a worker of several ranks does. It prints `peer` and its
description as JSON, with the address of its links.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from kvtransfer.factory import make_transport
from kvtransfer.transport import Transport
from kvtransfer.types import LinkMessage, Peer, Region
from services.grpc_server import Channels, GrpcServer
from services.kv_links import answered, dialled
from tandem.v1 import prefill_pb2, prefill_pb2_grpc

LAYOUT = "loadtest"
HOST = "127.0.0.1"


class _Links(prefill_pb2_grpc.PrefillServiceServicer):
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def Link(
        self, request_iterator: AsyncIterator[prefill_pb2.LinkRequest], context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[prefill_pb2.LinkResponse, None]:
        return answered(self._transport, request_iterator)


@asynccontextmanager
async def links_of(transport: Transport) -> AsyncIterator[str]:
    """Answers links as a prefill worker does; gives the address."""
    server = GrpcServer()
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(_Links(transport), server.server)
    try:
        yield await server.start(HOST, 0, ["tandem.v1.PrefillService"])
    finally:
        await server.stop(0.0)


class Dialler:
    """`Transport.dial`, for sources whose addresses are known."""

    def __init__(self) -> None:
        self.addresses: dict[str, str] = {}  # by agent name
        self.channels = Channels()

    def __call__(self, peer: Peer, messages: AsyncIterator[LinkMessage]) -> AsyncGenerator[LinkMessage, None]:
        channel = self.channels.to(self.addresses[peer.agent_name])
        return dialled(prefill_pb2_grpc.PrefillServiceStub(channel), peer, messages)


def region_of(pages: npt.NDArray[np.uint8]) -> Region:
    return Region(pages.ctypes.data, pages.shape[0], pages.shape[1], keepalive=pages)


def pages_of(ranks: int, block_bytes: int, blocks: int) -> npt.NDArray[np.uint8]:
    """Memory for pages `[blocks, block_bytes]`; with several ranks it is a mapping that they would share."""
    if ranks == 1:
        return np.empty((blocks, block_bytes), dtype=np.uint8)
    from engine.parallel.rank_group import mapped, shared_file  # imports torch, which takes seconds

    file = shared_file(blocks * block_bytes)
    try:
        return mapped(file, blocks * block_bytes).numpy().reshape(blocks, block_bytes)
    finally:
        os.close(file)


def content(block_bytes: int, blocks: int) -> npt.NDArray[np.uint8]:
    """What a source has in its region."""
    return np.random.default_rng(0).integers(0, 256, (blocks, block_bytes), dtype=np.uint8)


def peer_to_json(peer: Peer) -> dict[str, Any]:
    return {**vars(peer), "metadata": peer.metadata.hex()}


def peer_from_json(values: dict[str, Any]) -> Peer:
    return Peer(**{**values, "metadata": bytes.fromhex(values["metadata"])})


async def main(kind: str, block_bytes: int, blocks: int, ranks: int) -> None:
    pages = pages_of(ranks, block_bytes, blocks)
    pages[:] = content(block_bytes, blocks)
    transport = make_transport(kind, region_of(pages), "bench-source", "1", LAYOUT)
    async with links_of(transport) as address:
        with transport.serving():
            print("peer", json.dumps({"peer": peer_to_json(transport.peer()), "links": address}), flush=True)
            await asyncio.to_thread(sys.stdin.read)
    transport.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
