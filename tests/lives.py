"""One process that serves one model after another: a sweep over many models imports torch once.

stdin   a line of JSON for each life: [role, worker id, settings as environment variables]; `end` ends it
stdout  `ready HOST:PORT`, as `python -m services` says it, and `ended`
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys

from services import launch
from tandem import settings


async def live(orders: asyncio.StreamReader) -> None:
    while order := await orders.readline():
        role, worker_id, environment = json.loads(order)
        os.environ.update(environment)
        service = await launch.start(role, settings.load(), worker_id)
        print(f"ready {service.address}", flush=True)
        assert await orders.readline() in (b"end\n", b"")
        await service.stop(0.0)
        for name in environment:
            del os.environ[name]
        del service
        gc.unfreeze()  # `launch.start` froze what lived then
        gc.collect()
        print("ended", flush=True)


async def main() -> None:
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    await live(orders)


if __name__ == "__main__":
    asyncio.run(main())
