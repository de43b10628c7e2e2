"""The links of a two-sided KV transport as gRPC streams: a decode worker dials, a prefill worker answers. The cluster's
token and certificates protect them like every other call."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from kvtransfer.transport import Transport
from kvtransfer.types import LinkEntry, LinkMessage, LinkOpen, Peer, SendBlocks
from tandem.errors import InvalidRequest
from tandem.grpc_errors import calling
from tandem.v1 import prefill_pb2, prefill_pb2_grpc


async def dialled(
    stub: prefill_pb2_grpc.PrefillServiceStub, peer: Peer, messages: AsyncIterator[LinkMessage]
) -> AsyncGenerator[LinkMessage, None]:
    """`Transport.dial` of one source. Raises the source's errors, and WorkerLost."""
    with calling(peer.worker_id):
        call = stub.Link(_request(message) async for message in messages)
        try:
            async for response in call:
                yield LinkEntry(response.entry.key, response.entry.value)
        finally:
            call.cancel()


async def answered(
    transport: Transport, requests: AsyncIterator[prefill_pb2.LinkRequest]
) -> AsyncGenerator[prefill_pb2.LinkResponse, None]:
    """The servicer's Link method."""
    async with aclosing(transport.answer(_message(request) async for request in requests)) as messages:
        async for message in messages:
            if isinstance(message, LinkEntry):
                entry = prefill_pb2.LinkEntry(key=message.key, value=message.value)
                yield prefill_pb2.LinkResponse(entry=entry)


def _request(message: LinkMessage) -> prefill_pb2.LinkRequest:
    match message:
        case LinkOpen():
            return prefill_pb2.LinkRequest(open=prefill_pb2.LinkOpen(**vars(message)))
        case LinkEntry():
            return prefill_pb2.LinkRequest(entry=prefill_pb2.LinkEntry(**vars(message)))
        case SendBlocks(number, blocks, stall):
            send = prefill_pb2.SendBlocks(number=number, blocks=blocks, stall_seconds=stall)
            return prefill_pb2.LinkRequest(send=send)


def _message(request: prefill_pb2.LinkRequest) -> LinkMessage:
    """Raises InvalidRequest for an event of a later version."""
    match request.WhichOneof("event"):
        case "open":
            said = request.open
            return LinkOpen(
                said.worker_id, said.incarnation, said.source_incarnation, said.layout_hash, said.epoch, said.secret
            )
        case "entry":
            return LinkEntry(request.entry.key, request.entry.value)
        case "send":
            return SendBlocks(request.send.number, tuple(request.send.blocks), request.send.stall_seconds)
    raise InvalidRequest("an unknown event of a link", field="event", bound="open, entry or send")
