"""One streaming completion over the OpenAI HTTP API, read with no library so that the client's share of the cores stays
small."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence

from tandem.errors import Unavailable


async def stream(port: int, model: str, prompt: Sequence[int], max_tokens: int) -> AsyncIterator[int]:
    """The number of tokens in each message that has some; greedy, never ended by an end-of-sequence token.

    Raises Unavailable, with what the server said, when it answers with an error or ends early.
    """
    fields = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "stream": True, "return_token_ids": True}
    body = json.dumps({"model": model, "prompt": list(prompt), **fields})
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
        writer.write(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())
        status = (await reader.readline()).decode().strip()
        while (await reader.readline()).strip():
            pass
        if " 200" not in status:
            raise Unavailable(f"port {port} answered {status}: {(await reader.read(2000)).decode(errors='replace')}")
        async for line in _lines(reader):
            if line == b"data: [DONE]":
                return
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "choices" not in event:
                    raise Unavailable(f"port {port} broke off: {line.decode(errors='replace')}")
                if event["choices"] and (tokens := event["choices"][0].get("token_ids")):
                    yield len(tokens)
        raise Unavailable(f"port {port} ended the stream early")
    finally:
        writer.close()


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The lines of a chunked body; a proxy may cut its chunks anywhere."""
    rest = b""
    while size := int(await reader.readline() or b"0", 16):
        *lines, rest = (rest + await reader.readexactly(size)).split(b"\n")
        await reader.readline()
        for line in lines:
            yield line.strip()
