"""A call to a peer ends in an error of ours, however it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.grpc_server import Channels
from tandem.errors import InternalError, InvalidRequest, Unauthenticated, WorkerLost
from tandem.grpc_errors import MESSAGE_BYTES, ErrorInterceptor, calling, from_rpc, known_errors, shown
from tandem.v1 import generation_pb2_grpc

LONG = "\ud800" + "ä" * 100_000


class Health(health_pb2_grpc.HealthServicer):
    """Watch answers once and then waits; Check ends in an unexpected cancellation, or says much."""

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        yield health_pb2.HealthCheckResponse()
        await asyncio.get_running_loop().create_future()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        if request.service == "long":
            raise InvalidRequest(LONG, field=LONG, bound=LONG)
        raise asyncio.CancelledError


class Writing(health_pb2_grpc.HealthServicer):
    """Watch is a coroutine that writes its answer, then ends in an error or waits."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        await context.write(health_pb2.HealthCheckResponse())
        if request.service == "wrong":
            raise InvalidRequest("no such service", field="service")
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


@pytest.fixture
async def server() -> AsyncIterator[tuple[grpc.aio.Server, str]]:
    patient = [("grpc.http2.max_ping_strikes", 0)]  # as ours: it does not close a connection for its keepalives
    server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=patient)
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
    await asyncio.wait({task}, timeout=60)
    assert task.cancelled()


async def test_a_call_that_begins_on_a_closed_channel_is_a_lost_peer(server: tuple[grpc.aio.Server, str]) -> None:
    """Of either kind, under `calling` and under `known_errors`; grpcio's own error (the control) is none of ours."""
    channel = grpc.aio.insecure_channel(server[1])
    await channel.close()
    stub, request = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()
    for guard in (calling("decode-0"), known_errors("a test")):
        with pytest.raises(WorkerLost), guard:
            await stub.Check(request)
    for guard in (calling("decode-0"), known_errors("a test")):
        with pytest.raises(WorkerLost), guard:
            await stub.Watch(request).read()
    with pytest.raises(grpc.aio.UsageError):
        await stub.Check(request)


async def test_a_server_that_ends_is_a_lost_peer(server: tuple[grpc.aio.Server, str]) -> None:
    """Whatever status grpcio gives to the calls that it cuts off."""
    channel, task = await watching(server[1], calling("decode-0"))
    await server[0].stop(None)
    with pytest.raises(WorkerLost):
        await asyncio.wait_for(task, 10)
    await channel.close()


async def test_a_write_into_a_call_that_has_ended_is_a_lost_peer() -> None:
    """grpcio puts this status in place of the call's own. The control is another INTERNAL without details, for which no
    attempt is made again."""
    channel = grpc.aio.insecure_channel("127.0.0.1:1")
    call: Any = channel.stream_stream("/tandem.v1.PrefillService/Link")()
    call._cython_call.set_internal_error("a write failed")  # as grpcio's `_write` does
    with pytest.raises(WorkerLost), calling("prefill-0"):
        await call.read()
    await channel.close()
    nothing = grpc.aio.Metadata()
    other = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, "Received RST_STREAM with error code 2")
    assert type(from_rpc(other)) is InternalError


async def test_a_cancellation_that_is_meant_passes(server: tuple[grpc.aio.Server, str]) -> None:
    """A task that its owner cancels ends cancelled."""
    channel, task = await watching(server[1], calling("decode-0"))
    task.cancel()
    await asyncio.wait({task}, timeout=60)
    assert task.cancelled()
    await channel.close()


async def test_a_stray_cancellation_is_answered(server: tuple[grpc.aio.Server, str]) -> None:
    """A handler that ends in one answers INTERNAL at once; otherwise its caller waits for the deadline."""
    async with grpc.aio.insecure_channel(server[1]) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert isinstance(from_rpc(caught.value), InternalError)


async def test_a_stream_may_be_written_by_a_coroutine() -> None:
    """Its messages arrive, its errors have their status, and a call that is cancelled cancels it."""
    server, servicer = grpc.aio.server(interceptors=[ErrorInterceptor()]), Writing()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        wrong = stub.Watch(health_pb2.HealthCheckRequest(service="wrong"), timeout=60)
        assert await wrong.read() == health_pb2.HealthCheckResponse()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await wrong.read()
        assert isinstance(from_rpc(caught.value), InvalidRequest)
        waiting = stub.Watch(health_pb2.HealthCheckRequest(), timeout=60)
        await waiting.read()
        waiting.cancel()
        await asyncio.wait_for(servicer.cancelled.wait(), 10)
    await server.stop(None)


async def test_calls_outlive_the_registry_entry(server: tuple[grpc.aio.Server, str]) -> None:
    """A channel that nobody wants to keep takes no new calls; the ones under way go on until `close`."""
    channels, first = Channels(), asyncio.Event()
    channel = channels.to(server[1])
    task = asyncio.create_task(watch(channel, calling("decode-0"), first))
    await asyncio.wait_for(first.wait(), 10)
    channels.keep_only(set())
    assert channels.to(server[1]) is not channel
    await health_pb2_grpc.HealthStub(channels.to(server[1])).Watch(health_pb2.HealthCheckRequest(), timeout=60).read()
    assert not task.done()
    await channels.close()
    with pytest.raises(WorkerLost):
        await asyncio.wait_for(task, 2)


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x02\xc3\x28", b"\x0a\x7fcut"])
async def test_bytes_that_are_no_message_are_refused_as_such(server: tuple[grpc.aio.Server, str], data: bytes) -> None:
    """Random, a string that is not UTF-8, cut off: INVALID_ARGUMENT for both kinds of call; grpcio says UNKNOWN."""
    async with grpc.aio.insecure_channel(server[1]) as channel:
        for call in (
            channel.unary_unary("/grpc.health.v1.Health/Check")(data),
            channel.unary_stream("/grpc.health.v1.Health/Watch")(data).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            found = from_rpc(caught.value)
            assert isinstance(found, InvalidRequest)
            assert found.field == "message"


async def test_an_error_of_any_length_arrives(server: tuple[grpc.aio.Server, str]) -> None:
    """With its class and the beginning of its words, whatever they quote: all of it would not fit into the trailers."""
    assert shown("short") == "short"
    async with grpc.aio.insecure_channel(server[1]) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="long"), timeout=60)
        found = from_rpc(caught.value)
        assert isinstance(found, InvalidRequest)
        assert len(found.message.encode()) <= MESSAGE_BYTES
        assert found.message.startswith("\\ud800ää")
        assert found.field
        assert found.bound


@pytest.mark.parametrize("method", ["Generate", "GetModelInfo"])
async def test_a_call_that_is_refused_for_its_key_is_answered_without_its_message(method: str) -> None:
    """It may have megabytes: 250 such calls of a client without a key took a gigabyte of the router."""

    def refuse(method: str, metadata: object) -> None:
        raise Unauthenticated(f"no key for {method}")

    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.get_running_loop().create_future()
        yield b""

    server = grpc.aio.server(interceptors=[ErrorInterceptor(guard=refuse)])
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(
        generation_pb2_grpc.GenerationServiceServicer(),  # type: ignore[no-untyped-call]
        server,
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream(f"/tandem.v1.GenerationService/{method}")(nothing(), timeout=20.0)
        with pytest.raises(Unauthenticated, match="no key for"), calling("the server"):
            async for _ in call:
                pass
    await server.stop(None)
