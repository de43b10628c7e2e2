"""A forged handle opens nothing: each forgery has its status, and the transfer at which it aims continues."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from cluster.state.registry import State
from kvtransfer.sender import Sender, Ticket
from services.prefill.servicer import PrefillServicer
from tandem.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, sampling_pb2
from tests.support import oracle
from tests.support.faults import Harm, hold_until
from tests.support.muxed import decoded
from tests.support.waiting import until

GREEDY = sampling_pb2.Sampling(top_p=1.0, repetition_penalty=1.0)


async def refused(call: Any) -> str:
    """The status of a call, which must fail."""
    try:
        async with asyncio.timeout(60):
            if hasattr(call, "__aiter__"):
                events = [event async for event in call]
                raise AssertionError(f"it was served: {events}")
            raise AssertionError(f"it was served: {await call}")
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)


def prefill(worker: Any, prompt: list[int], **changes: Any) -> prefill_pb2.PrefillRequest:
    given: dict[str, Any] = {
        "request_id": "genuine",
        "token_ids": prompt,
        "prompt_tokens": len(prompt),
        "sampling": GREEDY,
        "layout_hash": worker.layout_hash,
        "incarnation": worker.incarnation,
    }
    return prefill_pb2.PrefillRequest(**{**given, **changes})


async def opened(stream: Any) -> prefill_pb2.Opened:
    """Waits until every block has arrived."""
    ticket = None
    async for event in stream:
        ticket = event.opened if event.HasField("opened") else ticket
        if event.ready.last:
            break
    assert ticket is not None
    return ticket


async def test_a_transfer_is_released_by_its_ticket_alone_and_once(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ticket that is unknown, of another generation or incarnation, consumed or expired is FAILED_PRECONDITION, and
    no blocks are freed. A refused stream leaves no transfer open, and an ended one leaves nothing."""
    prompt, made = oracle.prompts(tiny, [40])[0], list[PrefillServicer]()
    init = PrefillServicer.__init__
    monkeypatch.setattr(PrefillServicer, "__init__", lambda self, *about: made.append(self) or init(self, *about))
    async with inside() as cluster:
        worker = cluster.workers["prefill-0"]
        async with grpc.aio.insecure_channel(worker.address) as channel:
            stub = prefill_pb2_grpc.PrefillServiceStub(channel)

            def release(*ticket: Any) -> Any:
                names = ("transfer_id", "generation", "incarnation")
                return stub.ReleaseTransfer(prefill_pb2.ReleaseTransferRequest(**dict(zip(names, ticket, strict=True))))

            stream = stub.Prefill(prefill(worker, prompt))
            real = await opened(stream)
            name, generation, life = real.transfer_id, real.generation, real.incarnation
            held = cluster.held()["prefill-0"]
            assert held > 0
            for forged in (
                ("nobody's", generation, life),
                ("", 0, ""),
                (name, generation + 1, life),
                (name, 2**64 - 1, life),
                (name, 0, life),
                (name, generation, "another life"),
                (f"{name}\0", generation, life),
            ):
                assert await refused(release(*forged)) == "FAILED_PRECONDITION", forged
            assert cluster.held()["prefill-0"] == held
            assert await refused(stub.Prefill(prefill(worker, prompt))) == "INVALID_ARGUMENT", "its id is in use"
            await release(name, generation, life)
            assert await refused(release(name, generation, life)) == "FAILED_PRECONDITION", "consumed"
            await cluster.freed()
            stream = stub.Prefill(prefill(worker, prompt))
            real = await opened(stream)
            stream.cancel()
            await cluster.freed()
            assert (await refused(release(real.transfer_id, real.generation, life))) == "FAILED_PRECONDITION", "expired"
            worker.state = State.DRAINING
            for _ in range(2):
                assert await refused(stub.Prefill(prefill(worker, prompt))) == "UNAVAILABLE", (
                    "its id is in nobody's use"
                )
            worker.state = State.READY
            (servicer,) = made
            await until(lambda: not servicer._released, 10, lambda: servicer._released)
        assert await cluster.ledgers_balance()


async def test_control_without_the_fence_a_forged_ticket_ends_a_transfer(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: if the id is sufficient, the forged release succeeds and the genuine one comes too late."""
    prompt = oracle.prompts(tiny, [40])[0]

    def by_name(self: Sender, ticket: Ticket) -> Any:
        return self._end(ticket.transfer_id, "released")

    async with inside() as cluster:
        worker = cluster.workers["prefill-0"]
        async with grpc.aio.insecure_channel(worker.address) as channel:
            stub = prefill_pb2_grpc.PrefillServiceStub(channel)
            stream = stub.Prefill(prefill(worker, prompt))
            real = await opened(stream)
            forged = prefill_pb2.ReleaseTransferRequest(transfer_id=real.transfer_id, generation=7, incarnation="x")
            with monkeypatch.context() as open_to_all:
                open_to_all.setattr(Sender, "release", by_name)
                await refused(stub.ReleaseTransfer(forged))
            genuine = prefill_pb2.ReleaseTransferRequest(
                transfer_id=real.transfer_id, generation=real.generation, incarnation=real.incarnation
            )
            assert await refused(stub.ReleaseTransfer(genuine)) == "FAILED_PRECONDITION"
            stream.cancel()


async def test_workers_lives_layouts_and_feeds_are_not_to_be_made_up(inside: Any, tiny: Path) -> None:
    """A handle of another incarnation or layout, out of range, in use or unknown is refused before anything is
    reserved."""
    prompt = oracle.prompts(tiny, [40])[0]
    async with inside() as cluster:
        source, decode = cluster.workers["prefill-0"], cluster.workers["decode-0"]
        vocabulary = decode.engine.model.vocab_size
        async with (
            grpc.aio.insecure_channel(source.address) as to_source,
            grpc.aio.insecure_channel(decode.address) as to_decode,
        ):
            prefills = prefill_pb2_grpc.PrefillServiceStub(to_source)
            decodes = decode_pb2_grpc.DecodeServiceStub(to_decode)
            for changes, status in (
                ({"incarnation": "another life"}, "FAILED_PRECONDITION"),
                ({"layout_hash": "another layout"}, "FAILED_PRECONDITION"),
                ({"token_ids": [vocabulary]}, "INVALID_ARGUMENT"),
                ({"token_ids": []}, "INVALID_ARGUMENT"),
                ({"prompt_tokens": 2**32 - 1}, "INVALID_ARGUMENT"),
                ({"adapter": {"name": "nobody's"}}, "FAILED_PRECONDITION"),
            ):
                assert await refused(prefills.Prefill(prefill(source, prompt, **changes))) == status, changes
            given: dict[str, Any] = {
                "request_id": "genuine",
                "token_ids": prompt,
                "prompt_tokens": len(prompt),
                "max_tokens": 4,
                "sampling": GREEDY,
                "feed_id": "mine",
                "lane": 1,
            }
            feed = decodes.Feed(decode_pb2.FeedRequest(feed_id="mine"))
            await feed.read()
            here = {"worker_id": "prefill-0", "address": source.address, "incarnation": source.incarnation}
            for changes, statuses in (
                ({"feed_id": "nobody's"}, {"UNAVAILABLE"}),
                ({"feed_id": ""}, {"INVALID_ARGUMENT"}),
                ({"prefill": {**here, "incarnation": "another life"}}, {"FAILED_PRECONDITION", "UNAVAILABLE"}),
                ({"prefill": {**here, "worker_id": "prefill-9"}}, {"FAILED_PRECONDITION", "UNAVAILABLE"}),
                ({"token_ids": [vocabulary]}, {"INVALID_ARGUMENT"}),
                ({"prompt_tokens": 41}, {"INVALID_ARGUMENT"}),
                ({"max_tokens": 2**32 - 1}, {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}),
                ({"adapter": {"name": "nobody's"}}, {"UNAVAILABLE"}),  # the router asks another worker
            ):
                call = decodes.Decode(decode_pb2.DecodeRequest(**{**given, **changes}), timeout=60)
                assert await refused(call) in statuses, changes
            for feed_id in ("mine", ""):
                assert await refused(decodes.Feed(decode_pb2.FeedRequest(feed_id=feed_id))) == "INVALID_ARGUMENT"
            feed.cancel()
        await cluster.freed()
        assert await cluster.ledgers_balance()
        done = await cluster.client.generate(prompt, max_tokens=4, ignore_eos=True)
        assert (done.token_ids, done.receipt.attempts) == (oracle.greedy(tiny, prompt, 4), 1)


async def test_a_second_call_of_one_attempt_leaves_the_first_its_blocks(inside: Any, tiny: Path) -> None:
    """The first call's KV is still being written to them; the worker does not rely on the router for unique ids."""
    go, prompt = asyncio.Event(), oracle.prompts(tiny, [40])[0]
    async with inside(
        wrap=lambda inner, who: Harm(inner, before=hold_until(go)) if who.startswith("decode") else inner
    ) as cluster:
        source, decode = cluster.workers["prefill-0"], cluster.workers["decode-0"]
        async with grpc.aio.insecure_channel(decode.address) as channel:
            stub = decode_pb2_grpc.DecodeServiceStub(channel)
            request = decode_pb2.DecodeRequest(
                request_id="genuine", attempt=1, token_ids=prompt, prompt_tokens=40, max_tokens=4, sampling=GREEDY
            )
            here = {"worker_id": "prefill-0", "address": source.address, "incarnation": source.incarnation}
            first = decode_pb2.DecodeRequest(prefill=here)
            first.MergeFrom(request)
            tokens = asyncio.create_task(decoded(stub, first))
            await until(lambda: source.engine.pool.held, 10, cluster.held)
            held = (await decode.ledger()).entries
            assert await decoded(stub, request) == oracle.greedy(tiny, prompt, 4)
            assert [entry.owner for entry in (await decode.ledger()).entries] == [entry.owner for entry in held] != []
            go.set()
            assert await tokens == oracle.greedy(tiny, prompt, 4)
        await cluster.freed()
        assert await cluster.ledgers_balance()
