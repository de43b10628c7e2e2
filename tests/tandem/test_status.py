"""A call to a peer ends in an error of ours, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.server import Channels
from tandem.errors import InternalError, WorkerLost
from tandem.status import ErrorInterceptor, calling, from_rpc


class Health(health_pb2_grpc.HealthServicer):
    """Watch answers once and then waits; Check ends in a cancellation that nobody asked for."""

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        yield health_pb2.HealthCheckResponse()
        await asyncio.get_running_loop().create_future()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        raise asyncio.CancelledError


@pytest.fixture
async def server() -> AsyncIterator[tuple[grpc.aio.Server, str]]:
    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    health_pb2_grpc.add_HealthServicer_to_server(Health(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield server, f"127.0.0.1:{port}"
    await server.stop(None)


async def watch(channel: grpc.aio.Channel, guard: object, first: asyncio.Event) -> None:
    with guard:  # type: ignore[attr-defined]
        async for _ in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
            first.set()


async def watching(address: str, guard: object) -> tuple[grpc.aio.Channel, asyncio.Task[None]]:
    channel, first = grpc.aio.insecure_channel(address), asyncio.Event()
    task = asyncio.create_task(watch(channel, guard, first))
    await asyncio.wait_for(first.wait(), 10)
    return channel, task


async def test_a_closed_channel_is_a_lost_peer(server: tuple[grpc.aio.Server, str]) -> None:
    """Under `calling` it is an error. Without (the control) the task ends as if somebody had cancelled it."""
    channel, task = await watching(server[1], calling("decode-0"))
    await channel.close()
    with pytest.raises(WorkerLost, match="decode-0"):
        await asyncio.wait_for(task, 10)
    channel, task = await watching(server[1], nullcontext())
    await channel.close()
    await asyncio.wait({task}, timeout=10)
    assert task.cancelled()


async def test_a_server_that_ends_is_a_lost_peer(server: tuple[grpc.aio.Server, str]) -> None:
    """Whatever status grpcio gives to the calls that it cuts off."""
    channel, task = await watching(server[1], calling("decode-0"))
    await server[0].stop(None)
    with pytest.raises(WorkerLost):
        await asyncio.wait_for(task, 10)
    await channel.close()


async def test_a_cancellation_that_is_meant_passes(server: tuple[grpc.aio.Server, str]) -> None:
    """A task that its owner cancels ends cancelled."""
    channel, task = await watching(server[1], calling("decode-0"))
    task.cancel()
    await asyncio.wait({task}, timeout=10)
    assert task.cancelled()
    await channel.close()


async def test_a_stray_cancellation_is_answered(server: tuple[grpc.aio.Server, str]) -> None:
    """A handler that ends in one answers INTERNAL at once; otherwise its caller waits for the deadline."""
    async with grpc.aio.insecure_channel(server[1]) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert isinstance(from_rpc(caught.value), InternalError)


async def test_calls_outlive_the_registry_entry(server: tuple[grpc.aio.Server, str]) -> None:
    """A channel that nobody wants to keep takes no new calls; the ones under way go on until `close`."""
    channels, first = Channels(), asyncio.Event()
    channel = channels.to(server[1])
    task = asyncio.create_task(watch(channel, calling("decode-0"), first))
    await asyncio.wait_for(first.wait(), 10)
    channels.keep_only(set())
    assert channels.to(server[1]) is not channel
    await health_pb2_grpc.HealthStub(channels.to(server[1])).Watch(health_pb2.HealthCheckRequest(), timeout=10).read()
    assert not task.done()
    await channels.close()
    with pytest.raises(WorkerLost):
        await asyncio.wait_for(task, 10)
