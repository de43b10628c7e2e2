"""A TLS proxy in front of a server on this host's loopback.

python -m loadtest.scenarios.hosts.tls_proxy ADDRESS PORT SERVER_PORT CERT KEY
"""

from __future__ import annotations

import asyncio
import ssl
import sys
from contextlib import suppress

PIECE = 65536
CONNECT_S = 5.0


async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until either side ends."""
    with suppress(OSError):
        while piece := await reader.read(PIECE):
            writer.write(piece)
            await writer.drain()
    writer.close()


async def main(address: str, port: str, server_port: str, cert: str, key: str) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                there = await asyncio.open_connection("127.0.0.1", int(server_port))
        except OSError:  # TimeoutError is one
            writer.close()
            return
        await asyncio.gather(relay(reader, there[1]), relay(there[0], writer))

    server = await asyncio.start_server(serve, address, int(port), ssl=context)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
