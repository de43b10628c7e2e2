"""What a protobuf message consists of is bounded before it is parsed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem import grpc_errors
from tandem.errors import InvalidRequest
from tandem.grpc_errors import ErrorInterceptor
from tandem.rpc.message_parts import LARGE_BYTES, MOST_PARTS, check_parts
from tandem.v1 import generation_pb2, generation_pb2_grpc, jobs_pb2

GENERATE = "/tandem.v1.GenerationService/Generate"
SUBMIT = "/tandem.v1.JobService/SubmitJobs"
MANY = 2 * MOST_PARTS


def chat(messages: int) -> bytes:
    """Of empty messages, two bytes each."""
    request = generation_pb2.GenerateRequest()
    request.chat.messages.extend(generation_pb2.ChatMessage() for _ in range(messages))
    return request.SerializeToString()


TOO_MANY: dict[str, tuple[str, Callable[[], bytes]]] = {
    "empty messages": (GENERATE, lambda: chat(MANY)),
    "empty messages, then bytes that are no message": (GENERATE, lambda: chat(MANY) + b"\x0a\xff\xff\xff"),
    "empty messages before one that is cut off": (SUBMIT, lambda: b"\x0a\x00" * MANY + b"\x0a\x01\x0a"),
    "entries of a map": (GENERATE, lambda: sampling(b"\x62\x00" * MANY)),
    "unknown fields": (GENERATE, lambda: b"\xf8\x3f\x00" * MANY),
    "numbers that are not packed": (GENERATE, lambda: sampling(b"\x40\x01" * MANY)),
}


def sampling(fields: bytes) -> bytes:
    number = generation_pb2.GenerateRequest.DESCRIPTOR.fields_by_name["sampling"].number
    return bytes([number << 3 | 2]) + varint(len(fields)) + fields


def varint(number: int) -> bytes:
    parts = bytearray()
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


@pytest.mark.parametrize(("method", "made"), TOO_MANY.values(), ids=TOO_MANY)
def test_a_message_of_too_many_parts_is_refused(method: str, made: Callable[[], bytes]) -> None:
    """Wherever they are."""
    with pytest.raises(InvalidRequest) as refused:
        check_parts(made(), method)
    assert refused.value.field == "message"


def test_large_requests_have_few_parts() -> None:
    """A text of megabytes, half a million packed token ids, and as many jobs as one call takes."""
    text = generation_pb2.GenerateRequest(text=b"a b" * 10**6)
    ids = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=range(500_000)))
    talk = generation_pb2.GenerateRequest()
    for number in range(40):
        talk.chat.messages.add(role="user", content=b"word " * number)
    for message in (text, ids, talk):
        check_parts(message.SerializeToString(), GENERATE)
    check_parts(jobs_pb2.SubmitJobsRequest(requests=[talk] * 128).SerializeToString(), SUBMIT)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_left_to_the_parser(data: bytes) -> None:
    """Whatever comes: it is counted or left."""
    check_parts(data, GENERATE)


class Answers(generation_pb2_grpc.GenerationServiceServicer):
    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        yield generation_pb2.GenerateResponse(delta=generation_pb2.Delta(text=str(len(request.chat.messages))))


@asynccontextmanager
async def served(bounded: bool) -> AsyncIterator[grpc.aio.UnaryStreamMultiCallable]:
    server = grpc.aio.server(interceptors=[ErrorInterceptor(bounded)])
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(Answers(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel.unary_stream(GENERATE)
    await server.stop(0)


@pytest.mark.parametrize("bounded", [True, False])
async def test_only_a_server_for_clients_counts(bounded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """There, such a message is an invalid request that was never parsed; the cluster's own may be of any kind."""
    parsed: list[int] = []
    parse = generation_pb2.GenerateRequest.FromString
    monkeypatch.setattr(
        generation_pb2_grpc.tandem_dot_v1_dot_generation__pb2.GenerateRequest,
        "FromString",
        lambda data: parsed.append(len(data)) or parse(data),
    )
    assert len(chat(MANY)) > LARGE_BYTES
    async with served(bounded) as call:
        if bounded:
            with pytest.raises(grpc.RpcError) as refused:
                await call(chat(MANY)).read()
            assert grpc_errors.from_rpc(refused.value).field == "message"
        else:
            assert await call(chat(MANY)).read() != grpc.aio.EOF
    assert bool(parsed) is not bounded
