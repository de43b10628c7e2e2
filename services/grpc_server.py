"""The gRPC server of every role: options, health, reflection, the error interceptor; and channels to peers.

Keepalive detects a peer that vanished without closing its connection (a machine that lost power, a frozen process); a
process that dies closes its sockets, which is noticed at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakSet

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection
from pydantic import SecretStr

from services.cluster_credentials import CLUSTER_NAME, TOKEN_METADATA
from tandem.errors import SettingsError
from tandem.grpc_errors import ErrorInterceptor, Guard
from tandem.rpc.addresses import WILDCARD_HOSTS, host_port
from tandem.tasks import once

KEEPALIVE_MS = 800  # between pings
PING_TIMEOUT_MS = 2_000  # after which a peer that does not answer counts as dead: detected within 2 to 2.8 s
MAX_PENDING_CALLS = 50_000  # calls that wait for a handler; beyond its default of 1000, gRPC cancels random calls
HANDSHAKE_MS = 20_000  # for TLS on a new connection, before keepalive begins; grpc's default is two minutes
MAX_PING_STRIKES = 100  # pings within 500 ms of the last one, without a message from this side between; then GOAWAY
INTERNAL_MESSAGE_BYTES = 64 * 1024 * 1024
CHANNEL_CLOSE_GRACE_S = 24 * 3600.0  # for running calls of a channel that accepts no new ones

CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),  # of every ping: one that measures bandwidth holds up keepalive's
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", INTERNAL_MESSAGE_BYTES),
    ("grpc.max_send_message_length", INTERNAL_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_http_proxy", 0),  # workers are never behind the environment's proxy
    ("grpc.enable_retries", 0),  # only the router retries
)


class GrpcServer:
    """A server that reports its health."""

    def __init__(
        self,
        *,
        max_message_bytes: int = INTERNAL_MESSAGE_BYTES,
        guard: Guard | None = None,
        share_port: bool = False,
        advertise: str | None = None,
        credentials: grpc.ServerCredentials | None = None,
        for_clients: bool = False,
        most_connections: int | None = None,
    ) -> None:
        """`share_port`: shares the port with other such servers of this user; otherwise a port in use is an error.
        `advertise`: the address for other machines, if it differs from the one it listens on. `for_clients`: bounds the
        parts of requests (tandem/rpc/message_parts.py). `guard` refuses calls. `most_connections`: further ones are
        closed at once."""
        self._advertise = advertise
        self._credentials = credentials
        self.server = grpc.aio.server(
            interceptors=[ErrorInterceptor(for_clients, guard)],
            options=(
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", INTERNAL_MESSAGE_BYTES),
                ("grpc.keepalive_time_ms", KEEPALIVE_MS),
                ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
                ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 500),
                ("grpc.http2.max_ping_strikes", MAX_PING_STRIKES),
                ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
                ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
                ("grpc.so_reuseport", int(share_port)),
                ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
                *([("grpc.max_allowed_incoming_connections", most_connections)] if most_connections else []),
            ),
        )
        self._health = health.aio.HealthServicer()
        self._names: list[str] = []

    async def start(self, host: str, port: int, services: Iterable[str], *, field: str = "port") -> str:
        """Listens; returns the host:port for peers. Raises SettingsError, with the setting's name, for a port that is
        taken or unreachable."""
        if host in WILDCARD_HOSTS and self._advertise is None:
            raise SettingsError(
                f"{host} means all addresses of this machine; other processes need a single one",
                field="advertise_host",
                bound="a name or an address of this machine",
            )
        self._names = list(services)
        check = grpc.unary_unary_rpc_method_handler(
            self._health.Check,
            health_pb2.HealthCheckRequest.FromString,
            health_pb2.HealthCheckResponse.SerializeToString,
        )
        # Without Watch: grpc_health's writes while it holds the lock that a change of the status needs, so one client
        # that takes nothing would keep this process from its drain and its end.
        only_check = grpc.method_handlers_generic_handler(health.SERVICE_NAME, {"Check": check})
        self.server.add_generic_rpc_handlers((only_check,))
        reflection.enable_server_reflection((*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME), self.server)
        try:
            where = host_port(host, port)
            bound = (
                self.server.add_secure_port(where, self._credentials)
                if self._credentials
                else self.server.add_insecure_port(where)
            )
        except RuntimeError as error:
            what = "is in use, or the certificate is not valid" if self._credentials else "is in use"
            raise SettingsError(f"port {port} of {host} {what}; choose another", field=field) from error
        await self.server.start()
        for name in ("", *self._names):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return host_port(self._advertise or host, bound)

    async def not_serving(self, *, drains: bool = False) -> None:
        """Reports to health checks that no new calls are wanted, of any service. While it `drains`, the process itself
        still serves: calls work."""
        for name in self._names if drains else ("", *self._names):
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


class ClusterChannel:
    """A channel with the methods that a stub needs. Its calls carry the token, if there is one, and can be ended after
    `close` has begun to wait for them, which grpc's own cannot."""

    def __init__(self, channel: grpc.aio.Channel, token: str | None) -> None:
        self._channel = channel
        self._shown = () if token is None else ((TOKEN_METADATA, token),)
        self._calls: WeakSet[Any] = WeakSet()

    def unary_unary(self, *about: Any, **more: Any) -> Callable[..., Any]:
        return self._calling(self._channel.unary_unary(*about, **more))

    def unary_stream(self, *about: Any, **more: Any) -> Callable[..., Any]:
        return self._calling(self._channel.unary_stream(*about, **more))

    def stream_stream(self, *about: Any, **more: Any) -> Callable[..., Any]:
        return self._calling(self._channel.stream_stream(*about, **more))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    def cancel_calls(self) -> None:
        for call in list(self._calls):
            call.cancel()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def _calling(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        def calling(request: Any, *, metadata: Any = (), **more: Any) -> Any:
            call = ask(request, metadata=(*metadata, *self._shown), **more)
            self._calls.add(call)
            return call

        return calling


class Channels:
    """One channel per address, created on first use. Its calls carry the cluster's token, if there is one."""

    def __init__(self, token: SecretStr | None = None, credentials: grpc.ChannelCredentials | None = None) -> None:
        self._token = token
        self._credentials = credentials
        self._channels: dict[str, ClusterChannel] = {}
        self._leaving: dict[asyncio.Task[None], ClusterChannel] = {}  # that close once their calls have ended

    def to(self, address: str) -> Any:
        if address not in self._channels:
            token = self._token.get_secret_value() if self._token else None
            self._channels[address] = ClusterChannel(self._open(address), token)
        return self._channels[address]

    def _open(self, address: str) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        name = ("grpc.ssl_target_name_override", CLUSTER_NAME)
        return grpc.aio.secure_channel(address, self._credentials, options=(*CHANNEL_OPTIONS, name))

    def keep_only(self, addresses: set[str]) -> None:
        """Closes channels to addresses without a known process.

        Running calls continue: a process that left the registry may still be finishing, or the registry may have lost
        its record. They end at their deadline, or when keepalive fails.
        """
        for address in list(self._channels):
            if address not in addresses:
                channel = self._channels.pop(address)
                task = once(channel.close(CHANNEL_CLOSE_GRACE_S), name=f"leave {address}")
                self._leaving[task] = channel
                task.add_done_callback(lambda task: self._leaving.pop(task, None))

    async def close(self) -> None:
        """Ends all calls and channels."""
        for task, channel in list(self._leaving.items()):
            channel.cancel_calls()
            await asyncio.wait({task})
        for address in list(self._channels):
            await self._channels.pop(address).close()
