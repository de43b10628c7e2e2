"""One gRPC server, the same for every role: options, health, reflection, the error interceptor; and channels to peers.

Keepalive finds a peer that vanished without closing its connection (a machine that lost power, a frozen process);
a process that dies closes its sockets and is seen at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tandem.errors import SettingsError
from tandem.status import ErrorInterceptor
from tandem.tasks import end

KEEPALIVE_MS = 2_000  # between pings
PING_TIMEOUT_MS = 4_000  # until a peer that does not answer one is taken for dead
INTERNAL_MESSAGE_BYTES = 64 * 1024 * 1024
FAREWELL_S = 24 * 3600.0  # how long calls may go on over a channel that takes no new ones

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
    ("grpc.enable_http_proxy", 0),  # a worker is never behind the proxy that the environment may name
    ("grpc.enable_retries", 0),  # placing again is the router's decision alone
)


class GrpcServer:
    """A server that knows its port and tells its health."""

    def __init__(self, *, max_message_bytes: int = INTERNAL_MESSAGE_BYTES) -> None:
        self.server = grpc.aio.server(
            interceptors=[ErrorInterceptor()],
            options=(
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", INTERNAL_MESSAGE_BYTES),
                ("grpc.keepalive_time_ms", KEEPALIVE_MS),
                ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
                ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 500),
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.so_reuseport", 0),  # a port in use is an error, not a second server
            ),
        )
        self._health = health.aio.HealthServicer()
        self._names: list[str] = []

    async def start(self, host: str, port: int, services: Iterable[str]) -> str:
        """Listen; returns host:port. Raises SettingsError when the port is taken."""
        self._names = list(services)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        reflection.enable_server_reflection((*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME), self.server)
        try:
            bound = self.server.add_insecure_port(f"{host}:{port}")
        except RuntimeError as error:
            raise SettingsError(f"port {port} of {host} is in use; choose another", field="port") from error
        await self.server.start()
        for name in ("", *self._names):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        return f"{host}:{bound}"

    async def stop_accepting(self) -> None:
        """Tell health checkers that nothing new should come; calls still work."""
        for name in self._names:
            await self._health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


class Channels:
    """One channel for each address, made when first asked for."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    def to(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        return self._channels[address]

    def keep_only(self, addresses: set[str]) -> None:
        """Let go of channels to addresses that nobody is known to live at any more.

        Calls under way go on: who left the registry may still be finishing, or it is the registry that forgot. They
        end with their deadline, or when keepalive finds nobody there.
        """
        for address in list(self._channels):
            if address not in addresses:
                task = asyncio.create_task(self._channels.pop(address).close(FAREWELL_S), name=f"leave {address}")
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        """Ends what is left."""
        for task in list(self._leaving):
            await end(task)
        for address in list(self._channels):
            await self._channels.pop(address).close()
