"""A worker process for the tests: a transport over a few blocks, controlled by JSON lines on stdin.

    {"cmd": "fill", "block": b, "seed": s}    writes the pattern of that seed into the block
    {"cmd": "flip", "block": b}               changes one byte of the block
    {"cmd": "serve"}, {"cmd": "unserve"}      enters and leaves `serving()`
    {"cmd": "cpu"}                            answers with the CPU seconds used so far
    {"cmd": "exit"}                           closes the transport and names the remaining threads

Arguments: kind of transport, worker id, incarnation, number of blocks, bytes per block, layout hash, number of agents.
Every agent is a separate worker over the same blocks; commands are for the first. The first line has the Peer of
each, and for nccl and auto the address for links.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack

import numpy as np

from kvtransfer.factory import make_transport
from kvtransfer.transport import Transport
from kvtransfer.types import Region


class Links:
    """Answers links on its own thread."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._address: Future[str] = Future()
        self._end = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()

    @property
    def address(self) -> str:
        return self._address.result(30)

    def close(self) -> None:
        self._end.set()
        self._thread.join(10)

    async def _run(self) -> None:
        from loadtest.microbench.kv_source import links_of  # gRPC takes long to import

        async with links_of(self._transport) as address:
            self._address.set_result(address)
            await asyncio.to_thread(self._end.wait)


def say(**answer: object) -> None:
    print(json.dumps(answer), flush=True)


def main() -> None:
    # Some tests make UCX abort here.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    kind, worker_id, incarnation, num_blocks, block_bytes, layout_hash, agents = sys.argv[1:8]
    count, size = int(num_blocks), int(block_bytes)
    pages = np.zeros((count, size), dtype=np.uint8)
    region = Region(pages.ctypes.data, count, size, keepalive=pages)
    names = [worker_id, *(f"{worker_id}-{number}" for number in range(1, int(agents)))]
    transport, *more = (make_transport(kind, region, name, incarnation, layout_hash) for name in names)
    peers = [one.peer() for one in (transport, *more)]
    links = Links(transport) if kind in ("nccl", "auto") else None
    address = links.address if links else ""
    say(peers=[{**vars(peer), "metadata": peer.metadata.hex()} for peer in peers], links=address)
    with ExitStack() as stack:
        for line in sys.stdin:
            ask = json.loads(line)
            match ask["cmd"]:
                case "fill":
                    rng = np.random.default_rng(ask["seed"])
                    pages[ask["block"]] = rng.integers(0, 256, size, dtype=np.uint8)
                case "flip":
                    pages[ask["block"], size // 2] ^= 1
                case "serve":
                    stack.enter_context(transport.serving())
                case "unserve":
                    stack.pop_all().close()
                case "exit":
                    break
            say(cpu=time.process_time())
    if links:
        links.close()
    transport.close()
    transport.close()
    say(threads=[thread.name for thread in threading.enumerate()])


if __name__ == "__main__":
    main()
