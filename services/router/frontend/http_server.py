"""The HTTP server: its connections and their time limits.

    a connection                                 for at most
    makes the handshake of TLS                   HEADERS_TIMEOUT_S
    waits for the first head, or for its rest    HEADERS_TIMEOUT_S
    waits for the next request                   KEEP_ALIVE_S
    sends a body that is discarded               DISCARD_TIMEOUT_S
    does not accept what is written to it        WRITE_TIMEOUT_S

The endpoint bounds the time for reading a body (http_body.py) and for an answer. At the limit of connections a new one
replaces one that waits for a handshake, for a head, or for the rest of a discarded body: the longest waiting one that
never had a request, or else the longest waiting one.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable, Generator
from typing import Any

import anyio.lowlevel
import httptools
import structlog
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from tandem.errors import InternalError, SettingsError
from tandem.rpc.addresses import host_port
from tandem.settings import Settings
from tandem.tasks import end, once

log = structlog.get_logger(__name__)

MAX_HEAD_BYTES = 64 * 1024  # of a request line and its headers, and of the requests that wait behind it
# Fields of them, and of trailers: each is some 130 bytes in memory, however short. A request counts as REQUEST_FIELDS
# more.
MAX_FIELDS, REQUEST_FIELDS = 512, 8
MIN_CHUNK_BYTES = 128  # the framing of smaller chunks counts as head: a body must not be mostly framing
HEADERS_TIMEOUT_S = 20.0
KEEP_ALIVE_S = 75.0  # longer than clients keep idle connections, so that no connection closes during a new request
DISCARD_TIMEOUT_S = 5.0
WRITE_TIMEOUT_S = 30.0
TCP_KEEPALIVE_S = 10  # of silence, after which the kernel probes a client
MAX_CONNECTIONS = 4096
BACKLOG = 128  # connections that are accepted in one iteration of the event loop
MIN_GRACE_S = 0.5  # the time that an idle server takes to stop
CANCEL_TIMEOUT_S = 1.0
FULL_RESPONSE = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def most_connections(part: int = 2) -> int:
    """MAX_CONNECTIONS, or this part of the files that this process may open: half for HTTP, a quarter for gRPC;
    connections to workers and the registry need the rest."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(MAX_CONNECTIONS, soft // part)


class Connections:
    """The open connections, and those that have no request in progress, longest first."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._open: set[_Protocol | _Tls] = set()
        self._unproven: dict[_Protocol | _Tls, None] = {}  # never had a request
        self._idle: dict[_Protocol | _Tls, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def opened(self, connection: _Protocol | _Tls) -> bool:
        """Whether there is room for the connection; may close another one."""
        if len(self._open) >= self.most:
            victim = next(iter(self._unproven), None) or next(iter(self._idle), None)
            if victim is None:
                return False
            self.closed(victim)
            victim.hang_up()
        self._open.add(connection)
        self._unproven[connection] = None
        return True

    def end_handshakes(self) -> None:
        for connection in list(self._unproven):
            if isinstance(connection, _Tls):
                connection.hang_up()

    def busy(self, connection: _Protocol | _Tls) -> None:
        self._unproven.pop(connection, None)
        self._idle.pop(connection, None)

    def idle(self, connection: _Protocol) -> None:
        if connection in self._open:
            self._idle[connection] = None

    def closed(self, connection: _Protocol | _Tls) -> None:
        """Safe to call twice."""
        self._open.discard(connection)
        self.busy(connection)


class _Protocol(HttpToolsProtocol):
    """Closes connections with oversized headers or expired time limits. uvicorn bounds only the time between two
    requests, and httptools bounds neither the size of headers and trailers nor their time.

    A request may come before the answer to the one before it (pipelining) and waits. Reading goes on meanwhile, or a
    client that leaves would not be noticed; so what waits is bounded, and a client that sends more is hung up on."""

    def __init__(self, connections: Connections, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._all = connections
        self.handshake: _Tls | None = None
        self._head_bytes = self._fields = 0  # of this request, trailers included, and of those that wait
        self._answering: RequestResponseCycle | None = None
        self._chunk_bytes = 0  # of the body's chunk that has begun
        self._waits = False  # for the first byte of a request
        self._request_complete = True  # no part of a request is missing
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.handshake is not None:
            self._all.closed(self.handshake)
        if not self._all.opened(self):
            transport.write(FULL_RESPONSE)
            self.hang_up()
            return
        self._within(HEADERS_TIMEOUT_S, self.hang_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.closed(self)
        for timer in (self._timer, self._writing):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        if self._answering is not None and not self._answering.response_complete:  # uvicorn tells the last one only
            self._answering.disconnected = True
            self._answering.message_event.set()

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        if self._waits:
            self._waits = False
            self._within(HEADERS_TIMEOUT_S, self.hang_up)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as asked:
            if self._should_upgrade():
                self._read_again(data[asked.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("The request is not HTTP, or has too many headers.")
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The headers of the request are too large.")

    def _should_upgrade(self) -> bool:
        """A request that asks for another protocol is none for uvicorn. CONNECT, which httptools takes for one, is."""
        return any(name == b"upgrade" for name, _ in self.headers)

    def _read_again(self, rest: bytes) -> None:
        """Ignores that the request asks for another protocol, as RFC 9110 (7.8) permits. Java's HTTP client asks for
        HTTP/2 in each first request. httptools takes what follows such a head for the other protocol, the request's
        body included, so the head is read again without the field that asks."""
        self._head_bytes -= len(rest)
        line = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        fields = [b"%s: %s" % field for field in self.headers if field[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join([line, *fields, b"", rest]))

    def send_400_response(self, msg: str) -> None:
        now = self._answering
        if now is not None and now.response_started and not now.response_complete:
            self.hang_up()  # it would come in the middle of an answer
        else:
            super().send_400_response(msg)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._request_complete = False
        self._count_fields(REQUEST_FIELDS)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count_fields(1)

    def _count_fields(self, count: int) -> None:
        self._fields += count
        if self._fields > MAX_FIELDS:
            raise ValueError("too many fields")  # ends the parser

    def on_headers_complete(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._all.busy(self)
        super().on_headers_complete()
        if self.pipeline:
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._head_bytes -= len(body)
        self._chunk_bytes += len(body)
        if self.pipeline and len(self.cycle.body) > HIGH_WATER_LIMIT:
            self.hang_up()

    def on_chunk_complete(self) -> None:
        """An optional callback of httptools."""
        size, self._chunk_bytes = self._chunk_bytes, 0
        if size >= MIN_CHUNK_BYTES:
            self._head_bytes -= len(f"{size:x}\r\n\r\n")

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if self.parser.should_upgrade() and self._should_upgrade():
            return  # it is read again
        self._chunk_bytes, self._request_complete = 0, True
        if not self.pipeline:
            self._head_bytes = self._fields = 0
        if self.cycle.response_complete:  # the rest of a discarded body has arrived
            self._idle()

    def on_response_complete(self) -> None:
        last = not self.pipeline
        super().on_response_complete()
        self._unset_keepalive_if_required()  # uvicorn's own timer, which any byte would end
        if self.transport.is_closing():
            self._within(WRITE_TIMEOUT_S, self.transport.abort)
        elif last and self._request_complete:
            self._idle()
        elif last:  # nobody waits for the rest of its body, so it may be replaced like an idle one
            self._all.idle(self)
            self._within(DISCARD_TIMEOUT_S, self.hang_up)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self.loop.call_later(WRITE_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()

    def hang_up(self) -> None:
        """Closes the connection; aborts it soon after if the client does not accept what was written."""
        self.transport.close()
        self._within(DISCARD_TIMEOUT_S, self.transport.abort)

    def _idle(self) -> None:
        self._waits = True
        self._all.idle(self)
        self._within(KEEP_ALIVE_S, self.hang_up)

    def _within(self, seconds: float, otherwise: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(seconds, otherwise)


class _Tls(SSLProtocol):
    """Counts in the place of its _Protocol, which asyncio tells of the connection only when the handshake is over."""

    max_size = MAX_HEAD_BYTES  # of the buffer that each connection has; asyncio's is four times as large

    def __init__(self, connections: Connections, inner: _Protocol, context: ssl.SSLContext) -> None:
        how: dict[str, Any] = {"waiter": None, "server_side": True, "ssl_handshake_timeout": HEADERS_TIMEOUT_S}
        super().__init__(asyncio.get_running_loop(), inner, context, **how)
        self._all = connections
        inner.handshake = self

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._encrypted = transport
        if self._all.opened(self):
            super().connection_made(transport)
        else:
            self.hang_up()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._all.closed(self)
        super().connection_lost(exc)

    def hang_up(self) -> None:
        self._encrypted.abort()


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        super().__init__(config)
        self._connections = connections

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn tells only those connections of the end whose handshake is over, and waits for the others."""
        for server in self.servers:
            server.close()
        self._connections.end_handshakes()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """The process handles signals, not this server."""
        yield


class Server:
    """One port of this process."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._settings = settings
        self.address = ""
        self._serving: asyncio.Task[None] | None = None
        self.connections = Connections(most_connections())
        self._tls: ssl.SSLContext | None = None
        self._server = _Uvicorn(
            uvicorn.Config(
                app,
                loop="none",
                http=self._connection,  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=BACKLOG,
                ssl_certfile=settings.tls_cert,
                ssl_keyfile=settings.tls_key,
                ssl_ca_certs=str(settings.tls_client_ca) if settings.tls_client_ca else None,
                ssl_cert_reqs=ssl.CERT_REQUIRED if settings.tls_client_ca else ssl.CERT_NONE,
            ),
            self.connections,
        )

    async def start(self, port: int, failed: Callable[[BaseException], object] | None = None) -> None:
        """Listens at `address` from then on. `failed` receives the error when the server ends by itself. Raises
        SettingsError when the port is taken."""
        listening = _listen(self._settings.host, port, share=self._settings.routers > 1)
        self._serving = once(self._serve(listening), name="http", failed=failed)
        self.address = host_port(self._settings.host, listening.getsockname()[1])
        log.info("http.ready", address=self.address)

    def _connection(self, **about: Any) -> _Protocol | _Tls:
        connection = _Protocol(self.connections, **about)
        return _Tls(self.connections, connection, self._tls) if self._tls else connection

    async def _serve(self, listening: socket.socket) -> None:
        # Loads the code for answers of several pieces, which blocked the event loop for 20 ms at the first such answer.
        await anyio.lowlevel.checkpoint()
        config = self._server.config
        config.load()
        self._tls, config.ssl = config.ssl, None  # uvicorn listens without TLS, and `_connection` adds it
        await self._server.serve([listening])
        if not self._server.should_exit:
            raise InternalError("the HTTP server ended by itself")

    async def stop(self, grace_s: float) -> None:
        """Accepts no new request, lets running ones finish for `grace_s` seconds, then cancels them."""
        if self._serving is None:
            return
        self._server.should_exit = True
        await asyncio.wait({self._serving}, timeout=max(grace_s, MIN_GRACE_S))
        tasks = self._server.server_state.tasks
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(list(tasks), timeout=CANCEL_TIMEOUT_S)  # a client that does not read may block a task
        self._server.force_exit = True
        await asyncio.wait({self._serving}, timeout=CANCEL_TIMEOUT_S)
        await end(self._serving)


def _listen(host: str, port: int, *, share: bool) -> socket.socket:
    """`share`: the port is shared with other routers of this user; the system gives each connection to one of them."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Of accepted connections. A client that vanished acknowledges nothing: by default, that ends a connection after
        # a quarter of an hour, and one to which nothing is written never.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            listening.setsockopt(socket.IPPROTO_TCP, option, TCP_KEEPALIVE_S)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * WRITE_TIMEOUT_S))
        if share:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind(address)
        listening.listen()
    except OSError as error:
        listening.close()
        raise SettingsError(f"port {port} of {host} is in use; choose another", field="http_port") from error
    return listening
