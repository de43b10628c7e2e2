"""Clients that take their time, one socket each: what they hold is bounded, and nobody else notices."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from loadtest.harness import certificates
from services.router.frontend import http_server
from services.router.frontend.http_server import Server
from tandem.settings import Settings
from tests.support.waiting import until

SOON_S = 30.0
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers at once, or as the path says."""
    received, more = 0, scope["path"] == "/body"
    while more:
        message = await receive()
        received, more = received + len(message.get("body", b"")), message.get("more_body")
    size = 2**20 if scope["path"] == "/much" else 2
    headers = [(b"content-length", b"%d" % (16 * size)), (b"x-received", b"%d" % received)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if scope["path"] == "/wait":
        while (await receive())["type"] != "http.disconnect":
            pass
        return
    for _ in range(16):
        await send({"type": "http.response.body", "body": b"x" * size, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


Connect = Callable[..., Any]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`async with served(HEADERS_TIMEOUT_S=0.2, ...) as (server, connect)`."""

    @asynccontextmanager
    async def start(**bounds: Any) -> AsyncIterator[tuple[Server, Connect]]:
        tls = {name: bounds.pop(name) for name in ("tls_cert", "tls_key") if name in bounds}
        for name, value in bounds.items():
            monkeypatch.setattr(http_server, name, value)
        server = Server(hello, Settings(model="any", **tls))
        await server.start(0)
        port = int(server.address.rsplit(":", 1)[1])
        writers: list[asyncio.StreamWriter] = []

        async def connect(**more: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**16, **more)
            writers.append(writer)
            return reader, writer

        try:
            yield server, connect
        finally:
            for writer in writers:
                writer.transport.abort()
            await server.stop(0.0)

    return start


async def all_of(reader: asyncio.StreamReader) -> bytes:
    """What comes until the server has closed the connection."""
    said = b""
    async with asyncio.timeout(SOON_S):
        with suppress(ConnectionError):
            while more := await reader.read(2**16):
                said += more
    return said


async def closed_after(reader: asyncio.StreamReader, began: float) -> float:
    """Seconds from then until the server has closed the connection."""
    await all_of(reader)
    return monotonic() - began


async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(GET)
    async with asyncio.timeout(SOON_S):
        assert await reader.readuntil(b"\r\n\r\n" + b"x" * 32)


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n", b"GET"])
async def test_a_head_that_does_not_come_is_not_waited_for(served: Any, said: bytes) -> None:
    """Nothing at all, or a part of it."""
    async with served(HEADERS_TIMEOUT_S=0.2) as (server, connect):
        began = monotonic()
        reader, writer = await connect()
        writer.write(said)
        assert await closed_after(reader, began) >= 0.1
        assert len(server.connections) == 0


async def test_a_head_that_comes_byte_by_byte_gets_no_more_time(served: Any) -> None:
    """Each byte says that the client lives, and none brings the request nearer."""
    async with served(HEADERS_TIMEOUT_S=0.3) as (_, connect):
        began = monotonic()
        reader, writer = await connect()

        async def trickle() -> None:
            writer.write(b"GET / HTTP/1.1\r\nx: ")
            while True:
                writer.write(b"y")
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(trickle())
        assert await closed_after(reader, began) < SOON_S
        dripping.cancel()


async def test_a_connection_between_two_requests_is_closed_in_time_and_not_before(served: Any) -> None:
    """Also where the next request has begun, which then has the time of a head."""
    async with served(KEEP_ALIVE_S=4.0, HEADERS_TIMEOUT_S=0.8) as (_, connect):
        reader, writer = await connect()
        for _ in range(2):
            began = monotonic()
            await answered(reader, writer)
            await asyncio.sleep(1.0)
        assert await closed_after(reader, began) >= 3.9
    async with served(KEEP_ALIVE_S=2 * SOON_S, HEADERS_TIMEOUT_S=0.8) as (_, connect):
        began = monotonic()
        reader, writer = await connect()
        await answered(reader, writer)
        writer.write(b"GET ")
        assert await closed_after(reader, began) < SOON_S


async def test_a_body_that_nobody_reads_is_not_taken_for_ever(served: Any) -> None:
    """The answer has come; the rest of the body has some time to come, too, and then the connection is of use again."""
    async with served(DISCARD_TIMEOUT_S=1.0) as (_, connect):
        reader, writer = await connect()
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n12345")
        await reader.readuntil(b"x" * 32)
        writer.write(b"67890")
        await asyncio.sleep(1.2)
        await answered(reader, writer)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")

        async def forever() -> None:
            while True:
                writer.write(b"5\r\nabcde\r\n")
                await asyncio.sleep(0.02)

        dripping, began = asyncio.create_task(forever()), monotonic()
        assert await closed_after(reader, began) < SOON_S
        dripping.cancel()


@pytest.mark.parametrize(
    ("chunk", "status"),
    [
        (b"%x\r\n%s\r\n" % (200, b"x" * 200), b"200"),
        (b"%x\r\n%s\r\n" % (5000, b"x" * 5000), b"200"),
        (b"1\r\nx\r\n", b"400"),
        (b"c8;name=value\r\n%s\r\n" % (b"x" * 200), b"400"),
    ],
)
async def test_the_framing_of_a_body_in_chunks_is_no_head(served: Any, chunk: bytes, status: bytes) -> None:
    """However many chunks it has, as of a client that sends a file line by line; unless it is mostly framing, or there
    is more in it than the sizes."""
    async with served(MAX_HEAD_BYTES=1024) as (_, connect):
        reader, writer = await connect()
        writer.write(b"POST /body HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(400):
            writer.write(chunk)
        await writer.drain()
        if status == b"200":
            writer.write(b"0\r\n\r\n")
        async with asyncio.timeout(SOON_S):
            assert (await reader.readline()).split()[1] == status


async def test_a_client_that_does_not_read_is_hung_up_on(served: Any) -> None:
    """Its answer is longer than what the system buffers; without the bound its request would never end."""
    async with served(WRITE_TIMEOUT_S=0.3) as (server, connect):
        _, writer = await connect()
        writer.transport.pause_reading()
        writer.write(GET.replace(b"/ ", b"/much "))
        async with asyncio.timeout(SOON_S):
            while not server._server.server_state.tasks:  # noqa: ASYNC110 (it offers no event)
                await asyncio.sleep(0.01)
            while server._server.server_state.tasks or len(server.connections):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_control_with_more_time_they_all_stay(served: Any) -> None:
    """So that each end above is its bound's doing."""
    async with served() as (server, connect):
        readers = []
        for said in (b"", b"GET", GET, b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n1"):
            reader, writer = await connect()
            writer.write(said)
            readers.append(reader)
        _, writer = await connect()
        writer.transport.pause_reading()
        writer.write(GET.replace(b"/ ", b"/much "))
        await asyncio.sleep(1.0)
        assert len(server.connections) == 5
        assert not any(reader.at_eof() for reader in readers)


async def test_of_too_many_connections_the_longest_idle_goes_first(served: Any) -> None:
    """One that never had a request before one that had; none that is being answered. Everybody new is answered."""
    async with served(MAX_CONNECTIONS=4) as (server, connect):
        kept = await connect()
        await answered(*kept)
        busy = await connect()
        busy[1].write(b"POST /body HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n1")
        silent = [await connect() for _ in range(2)]
        for _ in range(20):
            await answered(*await connect())
        assert len(server.connections) == 4
        for reader, _ in silent:
            await all_of(reader)
        busy[1].write(b"2")
        async with asyncio.timeout(SOON_S):
            assert await busy[0].readuntil(b"x" * 32)


async def test_a_body_that_does_not_come_keeps_no_connection_once_it_is_answered(served: Any) -> None:
    """Anyone could else occupy all connections without a key. The control: a body that its request waits for does."""
    async with served(MAX_CONNECTIONS=2) as (server, connect):
        for path in (b"/", b"/", b"/body"):
            reader, writer = await connect()
            writer.write(b"GET %s HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n" % path)
            if path == b"/":
                await reader.readuntil(b"x" * 32)
        await until(lambda: len(server._server.server_state.tasks) == 1)
        for _ in range(3):
            await answered(*await connect())
        assert len(server.connections) == 2
        writer.write(b"x" * 9)
        async with asyncio.timeout(SOON_S):
            assert b"x-received: 9\r\n" in await reader.readuntil(b"x" * 32)


async def test_a_body_that_does_come_late_is_no_obstacle_to_the_next_request(served: Any) -> None:
    """Its connection is an idle one from then on, and busy again with the next head."""
    async with served(MAX_CONNECTIONS=2, DISCARD_TIMEOUT_S=1.0) as (server, connect):
        reader, writer = await connect()
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n")
        await reader.readuntil(b"x" * 32)
        writer.write(b"x" * 9 + WAIT)
        await until(lambda: len(server._server.server_state.tasks) == 1)
        for _ in range(3):
            await answered(*await connect())
        async with asyncio.timeout(SOON_S):
            assert await reader.readuntil(b"x-received: 0\r\n\r\n")
        assert not reader.at_eof()


async def test_where_all_are_busy_a_new_connection_is_told_so(served: Any) -> None:
    """None is closed that waits for its answer."""
    async with served(MAX_CONNECTIONS=3) as (server, connect):
        for _ in range(3):
            _, writer = await connect()
            writer.write(b"POST /body HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n1")
        await until(lambda: len(server._server.server_state.tasks) == 3)
        reader, _ = await connect()
        async with asyncio.timeout(SOON_S):
            assert (await reader.read()).startswith(b"HTTP/1.1 503 ")


async def test_connections_whose_handshake_does_not_come_are_bounded_in_number_and_time(
    served: Any, tmp_path: Path
) -> None:
    """As those whose head does not come: they are replaced, also by one that is answered, or closed in time. One that
    is busy is not replaced, and new ones are closed while all are busy."""
    pems = certificates.make(tmp_path, "ours")
    ours: dict[str, Any] = {"ssl": ssl.create_default_context(cafile=pems / "ours.pem"), "server_hostname": "127.0.0.1"}
    tls = {"tls_cert": pems / "ours-router.pem", "tls_key": pems / "ours-router.key"}
    async with served(MAX_CONNECTIONS=3, HEADERS_TIMEOUT_S=1.0, **tls) as (server, connect):
        silent = [(await connect())[0] for _ in range(10)]
        await answered(*await connect(**ours))
        assert len(server.connections) <= 3
        async with asyncio.timeout(SOON_S):
            for reader in silent:
                assert not await all_of(reader)
    async with served(MAX_CONNECTIONS=2, HEADERS_TIMEOUT_S=2 * SOON_S, **tls) as (server, connect):
        for _ in range(2):
            _, writer = await connect(**ours)
            writer.write(WAIT)
        await until(lambda: len(server._server.server_state.tasks) == 2)
        assert not await all_of((await connect())[0])
        assert len(server.connections) == 2


async def test_a_connection_without_a_handshake_does_not_hold_up_the_end(served: Any, tmp_path: Path) -> None:
    """Nobody would tell it of the end when its handshake is over."""
    pems = certificates.make(tmp_path, "ours")
    tls = {"tls_cert": pems / "ours-router.pem", "tls_key": pems / "ours-router.key"}
    async with served(HEADERS_TIMEOUT_S=2 * SOON_S, **tls) as (server, connect):
        silent, _ = await connect()
        await until(lambda: len(server.connections) == 1)
        stopping = asyncio.create_task(server.stop(2 * SOON_S))
        async with asyncio.timeout(SOON_S):
            assert not await all_of(silent)
            await stopping


async def test_a_client_that_vanished_is_noticed(served: Any) -> None:
    """The client acknowledges nothing and sends no reset; the kernel probes it and gives up in the write timeout."""
    async with served() as (server, connect):
        await answered(*await connect())
        (one,) = server.connections._open
        its = one.transport.get_extra_info("socket")
        assert its.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert its.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * http_server.WRITE_TIMEOUT_S


@pytest.fixture
def many_files() -> Iterator[None]:
    """Both ends of each connection are this process's; many shells allow 1024 descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
async def test_five_hundred_idle_connections_keep_nobody_waiting(served: Any) -> None:
    """And are all closed in the end."""
    async with served(HEADERS_TIMEOUT_S=1.0) as (_, connect):
        idle = [await connect() for _ in range(500)]
        for _ in range(20):
            await answered(*await connect())
        async with asyncio.timeout(2 * SOON_S):
            for reader, _ in idle:
                await reader.read()


async def test_requests_that_come_all_at_once_are_answered_in_turn(served: Any) -> None:
    """Pipelined; and the connection is an idle one again when the last is answered."""
    async with served(KEEP_ALIVE_S=0.3) as (_, connect):
        began = monotonic()
        reader, writer = await connect()
        writer.write(GET * 50)
        async with asyncio.timeout(SOON_S):
            for _ in range(50):
                await reader.readuntil(b"x" * 32)
        assert await closed_after(reader, began) >= 0.3


WAIT = GET.replace(b"/ ", b"/wait ")
BODY = b"POST /body HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"


async def idle(server: Server) -> None:
    """Until no request is being answered."""
    async with asyncio.timeout(SOON_S):
        while server._server.server_state.tasks:  # noqa: ASYNC110 (it offers no event)
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("waiting", [GET, GET * 20, BODY % 10 + b"123", BODY % 60_000 + b"x" * 50_000])
async def test_a_client_that_leaves_is_noticed_whatever_it_has_sent_meanwhile(served: Any, waiting: bytes) -> None:
    """Requests that wait behind the answer, in one piece with the first or after it."""
    async with served() as (server, connect):
        for pieces in ([WAIT + waiting], [WAIT, waiting]):
            reader, writer = await connect()
            for piece in pieces:
                writer.write(piece)
                async with asyncio.timeout(SOON_S):
                    await reader.readuntil(b"x-received: 0\r\n\r\n") if piece is pieces[0] else await writer.drain()
            writer.transport.abort()
            await idle(server)


@pytest.mark.parametrize("waiting", [GET * 5000, BODY % 200_000 + b"x" * 100_000, b"not HTTP\r\n\r\n"])
async def test_what_waits_behind_an_answer_is_bounded(served: Any, waiting: bytes) -> None:
    """A client that sends more than a few requests, or a long body, before it has its answer is hung up on. No other
    answer gets into the one that it was reading."""
    async with served() as (server, connect):
        reader, writer = await connect()
        writer.write(WAIT)
        async with asyncio.timeout(SOON_S):
            await reader.readuntil(b"x-received: 0\r\n\r\n")
            (connection,) = server.connections._open
        writer.write(waiting)
        assert not await all_of(reader)
        assert len(connection.pipeline) <= http_server.MAX_FIELDS // http_server.REQUEST_FIELDS
        await idle(server)


async def test_a_head_of_very_many_short_fields_is_refused(served: Any) -> None:
    """Each takes many times its bytes in memory, also one after a body in chunks."""
    fields = b"".join(b"x%d:\r\n" % number for number in range(http_server.MAX_FIELDS))
    chunked = b"POST /body HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
    async with served() as (_, connect):
        for head in (b"GET / HTTP/1.1\r\nhost: x\r\n", chunked):
            reader, writer = await connect()
            writer.write(head + fields + b"\r\n")
            assert b" 400 " in ((await all_of(reader)).splitlines() or [b" 400 "])[0]
        await answered(*await connect())


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"h2c, websocket"])
async def test_a_request_that_asks_for_another_protocol_is_answered_with_its_body(served: Any, protocol: bytes) -> None:
    """As Java's HTTP client asks. In one piece, cut at any place, and again on the same connection."""
    asking = (BODY % 5).replace(
        b"\r\n\r\n", b"\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: %s\r\n\r\n" % protocol
    )
    said = asking + b"hello"
    async with served() as (_, connect):
        reader, writer = await connect()
        for place in (len(said), *range(1, len(said), 7), len(asking), len(asking) + 1, len(asking) - 1):
            for piece in (said[:place], said[place:]):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            async with asyncio.timeout(SOON_S):
                assert b"x-received: 5\r\n" in await reader.readuntil(b"x" * 32)
        writer.write(said + said + GET)
        async with asyncio.timeout(SOON_S):
            for received in (5, 5, 0):
                assert b"x-received: %d\r\n" % received in await reader.readuntil(b"x" * 32)
        writer.write(b"CONNECT / HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(SOON_S):
            await reader.readuntil(b"x" * 32)


async def test_a_client_that_asks_first_is_told_to_go_on_only_if_its_body_is_wanted(served: Any) -> None:
    """expect: 100-continue."""
    async with served() as (_, connect):
        for path, wanted in ((b"/body", True), (b"/", False)):
            reader, writer = await connect()
            writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n" % path)
            async with asyncio.timeout(SOON_S):
                first = await reader.readuntil(b"\r\n")
                assert (b" 100 " in first) is wanted
                writer.write(b"12")
                await reader.readuntil(b"x" * 32)
