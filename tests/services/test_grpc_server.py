"""The gRPC server of every role, and clients that keep what they have opened."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from loadtest.harness import certificates
from services import grpc_server
from services.cluster_credentials import front_door
from services.grpc_server import GrpcServer
from tandem import grpc_errors
from tandem.errors import DeadlineExceeded, Unauthenticated
from tandem.grpc_errors import calling
from tandem.settings import Settings
from tests.support.flood import HEADERS, PING, PREFACE, SETTINGS, frame, literal
from tests.support.waiting import until

SERVING = health_pb2.HealthCheckResponse.SERVING


async def test_a_health_watch_that_takes_nothing_keeps_no_process_from_its_end() -> None:
    """Nor from its drain. The client opens no window for what the server writes, and answers pings."""
    server = GrpcServer()
    host, _, port = (await server.start("127.0.0.1", 0, ["x"])).rpartition(":")
    asked = health_pb2.HealthCheckRequest(service="x").SerializeToString()
    block = b"\x83\x86" + literal(4, b"/grpc.health.v1.Health/Watch") + literal(1, b"x")
    block += literal(b"content-type", b"application/grpc") + literal(b"te", b"trailers")
    message = b"\0" + struct.pack(">I", len(asked)) + asked
    reader, writer = await asyncio.open_connection(host, int(port))

    async def live() -> None:
        while True:
            head = await reader.readexactly(9)
            body = await reader.readexactly(int.from_bytes(head[:3], "big"))
            if head[3] in (SETTINGS, PING) and not head[4] & 1:
                writer.write(frame(head[3], body if head[3] == PING else b"", 1))

    living = asyncio.create_task(live())
    no_window = frame(SETTINGS, struct.pack(">HI", 4, 0))
    writer.write(PREFACE + no_window + frame(HEADERS, block, 4, 1) + frame(0, message, 1, 1))
    await asyncio.sleep(0.5)
    async with asyncio.timeout(10):
        await server.not_serving(drains=True)
        await server.stop(0.0)
    living.cancel()
    await asyncio.gather(living, return_exceptions=True)
    writer.close()


async def test_a_health_check_whose_message_does_not_come_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """In time, and at once where many others wait, so that one with its message is always answered."""
    server = GrpcServer()
    async with grpc.aio.insecure_channel(await server.start("127.0.0.1", 0, [])) as channel:
        unfinished = channel.stream_unary("/grpc.health.v1.Health/Check")
        monkeypatch.setattr(grpc_errors, "OPEN_TIMEOUT_S", 0.2)
        async with asyncio.timeout(10):
            with pytest.raises(DeadlineExceeded), calling("the server"):
                await unfinished()
        monkeypatch.setattr(grpc_errors, "OPEN_TIMEOUT_S", 600.0)
        monkeypatch.setattr(grpc_errors, "OPEN_CALLS", 2)
        async with asyncio.timeout(10):
            calls = [unfinished() for _ in range(5)]
            await until(lambda: sum(call.done() for call in calls) == 3)
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert answer.status == SERVING
            await until(lambda: sum(call.done() for call in calls) == 4)
        for call in calls:
            call.cancel()
    await server.stop(0.0)


async def test_health_checks_need_no_key_and_reflection_does() -> None:
    """Where there are keys; the control has none."""

    def guard(method: str, shown: Mapping[str, str | bytes]) -> None:
        if shown.get("authorization") != "Bearer key":
            raise Unauthenticated(f"no key for {method}")

    async def listed(channel: grpc.aio.Channel, key: str) -> list[str]:
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        with calling("the server"):
            call = stub.ServerReflectionInfo(iter([asked]), metadata=(("authorization", f"Bearer {key}"),), timeout=60)
            return [one.name async for answer in call for one in answer.list_services_response.service]

    for keys in (guard, None):
        server = GrpcServer(guard=keys)
        async with grpc.aio.insecure_channel(await server.start("127.0.0.1", 0, ["x"])) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="x"))
            assert answer.status == SERVING
            assert "x" in await listed(channel, "key")
            if keys is None:
                assert "x" in await listed(channel, "other")
            else:
                with pytest.raises(Unauthenticated):
                    await listed(channel, "other")
        await server.stop(0.0)


@pytest.mark.parametrize("shared", [False, True])
async def test_connections_of_clients_are_bounded(shared: bool) -> None:
    """A further one is closed, while all are open; the place of one that has left is another's."""
    server = GrpcServer(for_clients=True, most_connections=2, share_port=shared)
    host, _, port = (await server.start("127.0.0.1", 0, [])).rpartition(":")
    writers: list[asyncio.StreamWriter] = []

    async def welcome() -> bool:
        """Whether the server's SETTINGS come on a new connection, or its end."""
        reader, writer = await asyncio.open_connection(host, int(port))
        writers.append(writer)
        try:
            async with asyncio.timeout(30):
                return bool(await reader.read(1))
        except ConnectionError:
            return False

    assert [await welcome() for _ in range(4)] == [True, True, False, False]
    writers[0].close()
    async with asyncio.timeout(30):
        while not await welcome():  # noqa: ASYNC110 (it offers no event)
            await asyncio.sleep(0.05)
    for writer in writers:
        writer.close()
    await server.stop(0.0)


async def test_a_connection_whose_handshake_does_not_come_is_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With TLS: keepalive, which closes silent connections, begins after it."""
    monkeypatch.setattr(grpc_server, "HANDSHAKE_MS", 500)
    pems = certificates.make(tmp_path, "ours")
    tls = {"tls_cert": pems / "ours-router.pem", "tls_key": pems / "ours-router.key"}
    server = GrpcServer(credentials=front_door(Settings(model="any", **tls)))
    host, _, port = (await server.start("127.0.0.1", 0, [])).rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(30):
        with suppress(ConnectionError):
            await reader.read()
    writer.close()
    await server.stop(0.0)
