"""A client on one of the hosts: reads orders from stdin, a JSON object a line, and answers with such lines.

{"order": 1, "call": "stream", "prompt": [...], "options": {...}}   a line for each piece, then the receipt
{"order": 2, "call": "workers"}, "audit", "diagnose"                one line
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from tandem.async_client import AsyncClient
from tandem.errors import TandemError

QUESTIONS = ("workers", "audit", "diagnose")


async def follow(client: AsyncClient, order: dict[str, Any]) -> None:
    try:
        if order["call"] in QUESTIONS:
            answer = await getattr(client, order["call"])()
            say(order, answer=answer.to_dict(), balanced=getattr(answer, "balanced", None))
            return
        async for piece in client.stream(order["prompt"], **order["options"]):
            say(order, tokens=list(piece.token_ids))
            if piece.receipt is not None:
                say(order, answer=piece.receipt.to_dict())
    except TandemError as error:
        say(order, error=f"{type(error).__name__} {error.reason}: {error.message}")


def say(order: dict[str, Any], **what: Any) -> None:
    print(json.dumps({"order": order["order"], **what}), flush=True)


async def main(target: str) -> None:
    client = AsyncClient(target)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    running: set[asyncio.Task[None]] = set()
    print("up", flush=True)
    while line := await reader.readline():
        task = asyncio.create_task(follow(client, json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)
    await client.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
