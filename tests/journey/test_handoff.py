"""The handoff. KV is used only if it is provably this request's KV, and the first token does not wait for it.

Each protection is also tested switched off: the same fault must then go through, otherwise the test proves
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvtransfer.sender import Sender
from kvtransfer.types import Peer, Ticket
from services.decode.prefill_stream import PrefillStream
from services.grpc_server import Channels
from services.prefill.servicer import PrefillServicer
from tandem.errors import StaleTransfer, TransferFailed, Unavailable
from tandem.grpc_errors import from_rpc
from tandem.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, sampling_pb2
from tests.journey.conftest import all_transports, both_transports
from tests.journey.test_forged import prefill
from tests.support import oracle
from tests.support.faults import Harm, forget_cached, hold_until, only_first
from tests.support.memory import block_view
from tests.support.muxed import open_mux
from tests.support.waiting import until

NEW = 16


def harming(harms: dict[str, Harm], **actions: Any) -> Any:
    """Wraps the decode workers' transports; `harms` collects the wrappers."""

    def wrap(inner: Any, worker_id: str) -> Any:
        if not worker_id.startswith("decode"):
            return inner
        harms[worker_id] = Harm(inner, **actions)
        return harms[worker_id]

    return wrap


def scramble(harm: Harm, peer: Peer, pairs: Sequence[tuple[int, int]]) -> None:
    view = block_view(harm.region, pairs[0][1])
    view[:] = bytes([0x40, 0x13]) * (len(view) // 2)


@both_transports
async def test_the_first_token_reaches_the_client_before_the_kv_has_moved(inside: Any, tiny: Path) -> None:
    """While the transfer is held back, the first token arrives; the others wait for the KV and are right. A request for
    one token waits for no KV."""
    go, harms = asyncio.Event(), {}
    prompt = oracle.prompts(tiny, [50])[0]
    async with inside(wrap=harming(harms, before=hold_until(go))) as cluster:
        async with asyncio.timeout(60):
            only = await cluster.client.generate(prompt, max_tokens=1, ignore_eos=True)
        assert only.token_ids == oracle.greedy(tiny, prompt, 1)
        await cluster.freed()
        stream = cluster.client.stream(prompt, max_tokens=NEW, ignore_eos=True)
        first = await anext(stream)
        assert first.token_ids == oracle.greedy(tiny, prompt, 1)
        assert harms["decode-0"].reads == 0
        waiting = asyncio.ensure_future(anext(stream))
        done, _ = await asyncio.wait([waiting], timeout=0.3)
        assert not done, "no second token without the KV"
        go.set()
        rest = [await waiting, *[piece async for piece in stream]]
        ids = first.token_ids + [token for piece in rest for token in piece.token_ids]
        assert ids == oracle.greedy(tiny, prompt, NEW)
        assert rest[-1].receipt is not None
        assert rest[-1].receipt.transfer.exposed >= 0.3


@both_transports
async def test_a_long_prompt_is_announced_and_read_in_parts(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step may finish many blocks, all of them if the prompt is cached: no read has more than PART_BYTES."""
    monkeypatch.setattr("services.prefill.servicer.PART_BYTES", 1)  # one block
    sizes: list[int] = []
    prompt = oracle.prompts(tiny, [50])[0]
    async with inside(wrap=harming({}, before=lambda harm, peer, pairs: sizes.append(len(pairs)))) as cluster:
        done = await cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True)
        assert done.token_ids == oracle.greedy(tiny, prompt, NEW)
        assert done.receipt.path == "disaggregated"
        assert sizes == [1] * -(-len(prompt) // cluster.settings.block_size)


async def test_blocks_are_announced_while_later_ones_are_computed(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step of 64 tokens announces its 8 blocks before the next one begins, and no announcement is repeated or
    empty."""
    prompt, steps = oracle.prompts(tiny, [150])[0], threading.Semaphore(0)
    async with inside() as cluster:
        worker = cluster.workers["prefill-0"]
        step = worker.engine.step
        monkeypatch.setattr(worker.engine, "step", lambda: steps.acquire(timeout=60) and step())
        async with grpc.aio.insecure_channel(worker.address) as channel:
            stub = prefill_pb2_grpc.PrefillServiceStub(channel)
            stream = stub.Prefill(prefill(worker, prompt))
            assert (await stream.read()).HasField("opened")
            for first in (0, 8):
                steps.release()
                ready = (await stream.read()).ready
                assert [block.index for block in ready.blocks] == list(range(first, first + 8))
            steps.release(100)
            assert (await stream.read()).HasField("first_token")
            ready = (await stream.read()).ready
            assert ([block.index for block in ready.blocks], ready.last) == ([16, 17, 18], True)
            stream.cancel()
            await cluster.freed()
            stream = stub.Prefill(prefill(worker, prompt))
            while not (event := await stream.read()).HasField("first_token"):
                pass
            assert event.first_token.timing.cached_tokens == worker.metrics._local._value.get() == 144, "18 blocks"
            stream.cancel()


@all_transports
async def test_a_failed_read_is_tried_again_without_another_attempt(inside: Any, tiny: Path) -> None:
    """A transfer that fails once costs neither another prefill nor an attempt of the request."""
    failed: list[int] = []

    def fail_once(harm: Harm, peer: Peer, pairs: Sequence[tuple[int, int]]) -> None:
        if not failed:
            failed.append(1)
            raise TransferFailed("injected")

    prompt = oracle.prompts(tiny, [50])[0]
    async with inside(wrap=harming({}, before=fail_once)) as cluster:
        done = await cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True)
        assert failed
        assert done.receipt.attempts == 1
        assert done.token_ids == oracle.greedy(tiny, prompt, NEW)
        assert await cluster.ledgers_balance()


@all_transports
async def test_a_corrupted_block_is_refused_and_the_request_retried(inside: Any, tiny: Path) -> None:
    """A block whose bytes changed in transit is discarded; the second attempt gives the right tokens."""
    harms: dict[str, Harm] = {}
    prompt = oracle.prompts(tiny, [50])[0]
    async with inside(wrap=harming(harms, after=only_first(scramble))) as cluster:
        done = await cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True)
        assert done.token_ids == oracle.greedy(tiny, prompt, NEW)
        assert done.receipt.attempts == 2
        assert "digest" in done.receipt.notes[0]
        assert harms["decode-0"].reads >= 2
        assert await cluster.ledgers_balance()


@all_transports
async def test_control_without_the_digest_the_corruption_goes_through(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: with digests switched off, the same fault gives one attempt, status OK and wrong tokens."""
    monkeypatch.setattr("kvtransfer.receiver.Receiver._first_wrong", lambda self, ready: None)
    prompt = oracle.prompts(tiny, [50])[0]
    async with inside(wrap=harming({}, after=only_first(scramble))) as cluster:
        done = await cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True)
        assert done.receipt.attempts == 1
        assert done.token_ids != oracle.greedy(tiny, prompt, NEW)


@both_transports
async def test_blocks_in_another_order_are_refused(inside: Any, tiny: Path) -> None:
    """Right bytes in wrong places fail the digest too, because it is bound to the place."""
    swapped: list[int] = []

    def swap(pairs: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        if swapped or len(pairs) < 2:
            return pairs
        swapped.append(1)
        (r0, l0), (r1, l1), *rest = pairs
        return [(r1, l0), (r0, l1), *rest]

    prompt = oracle.prompts(tiny, [50])[0]
    async with inside(wrap=harming({}, read_pairs=swap)) as cluster:
        done = await cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True)
        assert swapped
        assert done.receipt.attempts == 2
        assert done.token_ids == oracle.greedy(tiny, prompt, NEW)


def give_up(book: Any) -> None:
    for ticket in book.tickets:
        book.revoke_ticket(ticket, "given up")


async def reuse_at_source(cluster: Any, *, overwrite: bool) -> None:
    """Gives the blocks to another owner at the source during the read, as a bug or an expired lease would."""
    source = cluster.workers["prefill-0"]
    held = [owner for owner in source.engine.pool.owners() if owner.startswith("transfer:")]
    assert held, "the fault must fire while the transfer is open"
    blocks = [block for owner in held for block in source.engine.pool.table(owner)]
    for owner in held:
        await source.engine_thread.drop(owner)
    await source.engine_thread.call(lambda: forget_cached(source.engine.pool))
    if overwrite:
        source.engine.pages.buffer[blocks] = 0x41


@all_transports
@pytest.mark.parametrize("overwrite", [True, False])
async def test_blocks_that_the_source_gave_up_during_the_read_are_never_used(
    inside: Any, tiny: Path, overwrite: bool, books: list[Sender]
) -> None:
    """Blocks that were reused for another request (bytes differ) or only freed (bytes equal) are refused."""
    prompt = oracle.prompts(tiny, [50])[0]
    fired: list[int] = []
    running: list[Any] = []

    async def reuse(harm: Harm, peer: Peer, pairs: Sequence[tuple[int, int]]) -> None:
        if not fired:
            fired.append(1)
            await reuse_at_source(running[0], overwrite=overwrite)
            if not overwrite:  # the source handles the loss like any end of a transfer
                give_up(books[0])

    async with inside(wrap=harming({}, before=reuse)) as cluster:
        running.append(cluster)
        done = await cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True)
        assert fired
        assert done.receipt.attempts == 2
        assert done.token_ids == oracle.greedy(tiny, prompt, NEW)


@all_transports
async def test_control_without_the_fence_given_up_blocks_are_used(
    inside: Any, tiny: Path, books: list[Sender], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: with a release that always succeeds, the same loss is not noticed."""
    prompt = oracle.prompts(tiny, [50])[0]
    fired: list[int] = []
    running: list[Any] = []

    async def reuse(harm: Harm, peer: Peer, pairs: Sequence[tuple[int, int]]) -> None:
        if not fired:
            fired.append(1)
            give_up(books[0])

    async def yes(self: Any, request: Any, context: Any) -> prefill_pb2.ReleaseTransferResponse:
        ticket = Ticket(request.transfer_id, request.generation, request.incarnation)
        if ticket in self._released:
            self._released[ticket].set()
        return prefill_pb2.ReleaseTransferResponse()

    monkeypatch.setattr("services.prefill.servicer.PrefillServicer.ReleaseTransfer", yes)
    async with inside(wrap=harming({}, before=reuse)) as cluster:
        running.append(cluster)
        done = await cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True)
        assert fired
        assert done.receipt.attempts == 1


@both_transports
async def test_a_consumed_ticket_cannot_be_replayed(inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ticket is valid for one release; its replay, another generation and an unknown id are refused."""
    used: list[Ticket] = []
    original = Sender.release
    monkeypatch.setattr(Sender, "release", lambda self, ticket: used.append(ticket) or original(self, ticket))
    async with inside() as cluster:
        await cluster.client.generate(oracle.prompts(tiny, [20])[0], max_tokens=2, ignore_eos=True)
        (ticket,) = used
        channels = Channels()
        stub = prefill_pb2_grpc.PrefillServiceStub(channels.to(cluster.workers["prefill-0"].address))
        for transfer_id, generation in (
            (ticket.transfer_id, ticket.generation),
            (ticket.transfer_id, ticket.generation + 1),
            ("made-up", 1),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ReleaseTransfer(
                    prefill_pb2.ReleaseTransferRequest(
                        transfer_id=transfer_id, generation=generation, incarnation=ticket.incarnation
                    )
                )
            assert isinstance(from_rpc(caught.value), StaleTransfer)
        await channels.close()


@both_transports
async def test_a_decode_worker_that_holds_an_old_ticket_is_refused_and_the_request_retried(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release with an older generation of the same transfer does not commit anything."""
    original = PrefillStream._open
    aged: list[int] = []

    def age(self: Any, opened: prefill_pb2.Opened) -> None:
        if not aged:
            aged.append(1)
            opened.generation -= 1
        original(self, opened)

    monkeypatch.setattr(PrefillStream, "_open", age)
    prompt = oracle.prompts(tiny, [50])[0]
    async with inside() as cluster:
        done = await cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True)
        assert aged
        assert done.receipt.attempts == 2
        assert done.token_ids == oracle.greedy(tiny, prompt, NEW)


@all_transports
async def test_a_source_that_restarted_is_not_taken_for_its_former_self(inside: Any, tiny: Path) -> None:
    """A request that names the old incarnation, sent to the address of the new one, gets no token."""
    prompt = oracle.prompts(tiny, [50])[0]
    async with inside() as cluster:
        await cluster.client.generate(prompt, max_tokens=2, ignore_eos=True)
        old = cluster.workers["prefill-0"]
        await old.stop(0.0)
        new = await cluster.start_worker("prefill-0")
        assert new.incarnation != old.incarnation
        channels = Channels()
        stub = decode_pb2_grpc.DecodeServiceStub(channels.to(cluster.workers["decode-0"].address))
        request = decode_pb2.DecodeRequest(
            request_id="r",
            attempt=1,
            token_ids=prompt,
            prompt_tokens=len(prompt),
            max_tokens=NEW,
            sampling=sampling_pb2.Sampling(top_p=1.0),
            prefill=common_pb2.WorkerRef(worker_id="prefill-0", incarnation=old.incarnation, address=new.address),
        )
        tokens: list[int] = []
        async with open_mux(stub) as (request.feed_id, _):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for event in stub.Decode(request):
                    tokens += event.tokens.token_ids
        error = from_rpc(caught.value)
        assert isinstance(error, Unavailable)
        assert error.reason == "PREFILL_REFUSED"
        assert tokens == []
        done = await cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True)
        assert done.token_ids == oracle.greedy(tiny, prompt, NEW)
        await channels.close()


@both_transports
async def test_layouts_that_differ_are_refused_before_any_byte_moves(inside: Any, tiny: Path) -> None:
    """A prefill worker whose KV has another meaning is not used; the request runs locally and the receipt says why.
    (Other blocks of the same KV are converted: test_other_layouts.py.)"""
    harms: dict[str, Harm] = {}
    async with inside(prefill=0, wrap=harming(harms)) as cluster:
        cluster.settings = cluster.settings.model_copy(update={"dtype": "bfloat16"})
        await cluster.start_worker("prefill-0")
        await cluster.seen(2)
        done = await cluster.client.generate(oracle.prompts(tiny, [50])[0], max_tokens=2, ignore_eos=True)
        assert done.receipt.path == "local"
        assert "KV layout" in done.receipt.notes[0]
        assert harms["decode-0"].reads == 0
        report = await cluster.client.diagnose()
        assert not report.pairs[0].compatible
        assert any("model_dtype" in sentence for sentence in report.pairs[0].differences)


@both_transports
async def test_a_half_filled_block_is_not_announced(inside: Any, tiny: Path) -> None:
    """With steps that do not end at block boundaries, every block that is read is complete."""
    prompts = oracle.prompts(tiny, [50, 61, 75])
    async with inside(max_num_batched_tokens=20, max_num_seqs=8) as cluster:
        for prompt in prompts:
            done = await cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True)
            assert done.receipt.attempts == 1
            assert done.token_ids == oracle.greedy(tiny, prompt, NEW)


@both_transports
@pytest.mark.parametrize("again", [False, True])
async def test_a_cancelled_request_holds_its_blocks_until_its_reads_have_ended(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """A read that cannot be ended at once may still write to them, also if the source reports again that the transfer
    is open."""
    started, aborting, landed = asyncio.Event(), asyncio.Event(), asyncio.Event()
    blocks: set[int] = set()

    class Stubborn(Harm):
        async def read(self, peer: Peer, pairs: Sequence[tuple[int, int]], *rest: Any, **more: Any) -> Any:
            if started.is_set():
                return await super().read(peer, pairs, *rest, **more)
            blocks.update(local for _, local in pairs)
            started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                aborting.set()
                await landed.wait()
                raise

    offer = PrefillServicer._offer

    async def opened_again(*given: Any) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        opened = prefill_pb2.PrefillResponse()
        async for event in offer(*given):
            opened = event if event.HasField("opened") else opened
            yield event
            if event.HasField("ready") and again:
                yield opened

    monkeypatch.setattr(PrefillServicer, "_offer", opened_again)
    wrap = lambda inner, who: Stubborn(inner) if who.startswith("decode") else inner  # noqa: E731
    async with inside(wrap=wrap) as cluster:
        decode, prefill = cluster.workers["decode-0"], cluster.workers["prefill-0"]
        request = cluster.client.stream(oracle.prompts(tiny, [150])[0], max_tokens=NEW)
        await asyncio.wait_for(anext(request), 10)  # after the blocks of two steps
        await asyncio.wait_for(started.wait(), 10)
        await request.aclose()
        await asyncio.wait_for(aborting.wait(), 10)
        await until(lambda: not prefill.engine.pool.held, 10, cluster.held)  # the call is over everywhere
        ledger = await decode.ledger()
        assert blocks <= {block for entry in ledger.entries for block in entry.blocks}
        assert not ledger.faults
        landed.set()
        await cluster.freed()
        assert await cluster.ledgers_balance()


@both_transports
async def test_a_ticket_is_dead_before_its_blocks_are_freed(
    inside: Any, tiny: Path, books: list[Sender], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release between the two would succeed for blocks that may have another owner."""
    go, tickets, still_open = asyncio.Event(), list[Ticket](), list[Ticket]()
    opened = Sender.open
    monkeypatch.setattr(Sender, "open", lambda book, name: tickets.append(opened(book, name)) or tickets[-1])
    async with inside(wrap=harming({}, before=hold_until(go))) as cluster:
        prefill = cluster.workers["prefill-0"]
        drop = prefill.engine_thread.drop

        async def check_and_drop(owner: str) -> None:
            for ticket in tickets:
                with contextlib.suppress(StaleTransfer):
                    books[0].release(ticket)
                    still_open.append(ticket)
            await drop(owner)

        monkeypatch.setattr(prefill.engine_thread, "drop", check_and_drop)
        stream = cluster.client.stream(oracle.prompts(tiny, [50])[0], max_tokens=NEW, ignore_eos=True)
        await anext(stream)
        await stream.aclose()
        await until(lambda: not prefill.engine.pool.held, 10, cluster.held)
        assert tickets
        assert not still_open
        await cluster.freed()
