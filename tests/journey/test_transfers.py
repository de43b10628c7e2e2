"""A failed transfer does not mean a dead worker: the pair is avoided, and the prompt is computed elsewhere.

The faults are those that a transport reports: an error at once, or nothing for a while (TransferFailed). What the NIXL
transport does on errors and silence is tested in tests/kvtransfer.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from kvtransfer.receiver import Receiver
from kvtransfer.types import Peer
from services.decode.prefill_peers import PrefillPeers
from services.decode.prefill_stream import PrefillStream, from_below
from services.prefill.servicer import PrefillServicer
from services.router.execution.completion_runner import UNSUITED
from services.router.routing.request_scheduler import WHY_ALONE, RequestScheduler
from tandem.errors import (
    Busy,
    CheckpointRefused,
    DataLoss,
    DeadlineExceeded,
    PreconditionFailed,
    StepFailed,
    TandemError,
    TransferFailed,
    Unavailable,
    WorkerLost,
)
from tandem.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2
from tests.journey.conftest import all_transports, both_transports
from tests.journey.test_forged import GREEDY
from tests.support import oracle
from tests.support.faults import Harm
from tests.support.muxed import decoded
from tests.support.stopwatch import Stopwatch
from tests.support.waiting import until

NEW = 12
STALL_S = 0.5  # time after which these transports report a silent peer


class Faulty(Harm):
    """`fails(peer)` determines for each read of blocks whether it fails, `stall_s` after it began."""

    def __init__(self, inner: Any, fails: Callable[[Peer], bool], stall_s: float = 0.0) -> None:
        super().__init__(inner)
        self._fails, self._stall_s = fails, stall_s
        self.failed = 0

    async def read(self, peer: Peer, pairs: Any, *rest: Any, **more: Any) -> Any:
        if self._fails(peer):
            self.failed += len(pairs) > 1  # a single block is a verification
            await asyncio.sleep(self._stall_s)
            raise TransferFailed(f"nothing came from {peer.worker_id}")
        return await super().read(peer, pairs, *rest, **more)


def faulty(into: dict[str, Faulty], fails: Callable[[Peer], bool], stall_s: float = 0.0) -> Any:
    """Wraps the decode workers' transports."""

    def wrap(inner: Any, worker_id: str) -> Any:
        if not worker_id.startswith("decode"):
            return inner
        into[worker_id] = Faulty(inner, fails, stall_s)
        return into[worker_id]

    return wrap


async def balanced(cluster: Any) -> None:
    """Waits until nothing is held; a source that failed is verified in the background, with a block for a moment."""
    watch = Stopwatch()
    while not await cluster.ledgers_balance():
        assert watch.within(5.0)
        await asyncio.sleep(0.01)


@all_transports
async def test_with_one_transfer_in_four_failing_every_request_is_answered(inside: Any, tiny: Path) -> None:
    """Each has its own tokens, and none is suspected as poison."""
    chance, made = random.Random(1), dict[str, Faulty]()
    prompts = oracle.prompts(tiny, [40 + index for index in range(24)])
    async with inside(prefill=2, decode=2, wrap=faulty(made, lambda peer: chance.random() < 0.25)) as cluster:
        done = await asyncio.gather(
            *(cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True) for prompt in prompts)
        )
        assert sum(one.failed for one in made.values()) >= 2
        assert [one.token_ids for one in done] == [oracle.greedy(tiny, prompt, NEW) for prompt in prompts]
        assert not any(WHY_ALONE in note for one in done for note in one.receipt.notes)
        await cluster.freed()
        await balanced(cluster)


async def test_control_if_a_failed_transfer_were_a_lost_worker_requests_would_be_suspected(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: every transfer fails as a loss that counts, without avoiding pairs or sparing workers."""
    for module in ("remote_prefill", "prefill_stream"):
        monkeypatch.setattr(
            f"services.decode.{module}.from_below",
            lambda error, source, **_: Unavailable(error.message, reason="PREFILL_LOST"),
        )
    monkeypatch.setattr("services.router.routing.request_scheduler.SUSPECT_S", 0.0)
    monkeypatch.setattr("services.worker_liveness.WorkerLiveness.ended", lambda *_: True)
    prompt = oracle.prompts(tiny, [40])[0]
    async with inside(prefill=2, wrap=faulty({}, lambda peer: True)) as cluster:
        done = await cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True)
        assert any(WHY_ALONE in note for note in done.receipt.notes)


async def test_requests_go_around_a_prefill_worker_whose_kv_does_not_arrive(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request that meets it has one stall; those that follow go to the other worker."""
    monkeypatch.setattr("services.router.routing.request_scheduler.SUSPECT_S", 60.0)
    made: dict[str, Faulty] = {}
    silent = lambda peer: peer.worker_id == "prefill-0"  # noqa: E731
    prompts = oracle.prompts(tiny, [40 + index for index in range(8)])
    async with inside(prefill=2, wrap=faulty(made, silent, STALL_S)) as cluster:
        for count, prompt in enumerate(prompts):
            watch = Stopwatch()
            done = await cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True, timeout=60)
            assert watch.within(5.0)
            assert done.token_ids == oracle.greedy(tiny, prompt, NEW)
            assert (done.receipt.path, done.receipt.prefill_worker) == ("disaggregated", "prefill-1")
            if count >= 2:
                assert done.receipt.attempts == 1
        await cluster.freed(2.0)


@all_transports
async def test_two_incarnations_of_a_worker_that_both_run_do_not_disturb_each_other(inside: Any, tiny: Path) -> None:
    """A router with an old view has requests served by the former incarnation, others by the later one, in turn. The
    former one's connection ends with its last request."""
    prompts = oracle.prompts(tiny, [40 + index for index in range(6)])
    async with inside() as cluster:
        old, decode = cluster.workers["prefill-0"], cluster.workers["decode-0"]
        new = await cluster.start_worker("prefill-0")
        links = decode._peers._links  # type: ignore[attr-defined]
        await until(lambda: set(links) == {("prefill-0", new.incarnation)}, 10, lambda: links)
        async with grpc.aio.insecure_channel(decode.address) as channel:
            stub = decode_pb2_grpc.DecodeServiceStub(channel)
            where = {"worker_id": "prefill-0", "address": old.address, "incarnation": old.incarnation}
            for count, (by_old, by_new) in enumerate(zip(prompts[::2], prompts[1::2], strict=True)):
                request = decode_pb2.DecodeRequest(
                    request_id=f"r{count}",
                    token_ids=by_old,
                    prompt_tokens=len(by_old),
                    max_tokens=2,
                    sampling=GREEDY,
                    prefill=where,
                )
                assert await decoded(stub, request) == oracle.greedy(tiny, by_old, 2)
                done = await cluster.client.generate(by_new, max_tokens=2, ignore_eos=True)
                assert done.token_ids == oracle.greedy(tiny, by_new, 2)
                assert (done.receipt.path, done.receipt.attempts) == ("disaggregated", 1)
        await until(lambda: set(links) == {("prefill-0", new.incarnation)}, 10, lambda: links)


@pytest.mark.parametrize("transport", ["nixl"])
async def test_a_connection_that_was_lost_is_made_again(inside: Any, tiny: Path) -> None:
    """Though its source lives, as when its agent was replaced: that is a failed transfer and not a lost worker."""
    prompts = oracle.prompts(tiny, [40, 41, 42])
    async with inside() as cluster:
        decode: Any = cluster.workers["decode-0"]
        assert (await cluster.client.generate(prompts[0], max_tokens=1)).receipt.path == "disaggregated"
        [link] = decode._peers._links.values()
        decode.transport.forget(link.peer)
        for prompt, path, attempts in ((prompts[1], "local", 2), (prompts[2], "disaggregated", 1)):
            done = await cluster.client.generate(prompt, max_tokens=2, ignore_eos=True)
            assert done.token_ids == oracle.greedy(tiny, prompt, 2)
            assert (done.receipt.path, done.receipt.attempts) == (path, attempts), done.receipt.notes
            await until(lambda: link.failed is None, 20, lambda: link)
            cluster.router.models.first.pools.scheduler._avoided.clear()  # as SUSPECT_S would


@both_transports
async def test_with_no_other_prefill_worker_the_decode_worker_computes_the_prompt(inside: Any, tiny: Path) -> None:
    """At once for the next request, with the reason in the receipt, until a block arrives again."""
    made: dict[str, Faulty] = {}
    silent = asyncio.Event()
    silent.set()
    prompts = oracle.prompts(tiny, [40, 50, 60])
    async with inside(wrap=faulty(made, lambda peer: silent.is_set(), STALL_S)) as cluster:
        first = await cluster.client.generate(prompts[0], max_tokens=NEW, ignore_eos=True, timeout=60)
        second = await cluster.client.generate(prompts[1], max_tokens=NEW, ignore_eos=True, timeout=60)
        for done, prompt in ((first, prompts[0]), (second, prompts[1])):
            assert done.token_ids == oracle.greedy(tiny, prompt, NEW)
            assert done.receipt.path == "local"
            assert "handoffs from prefill-0 to decode-0 failed lately" in done.receipt.notes[-1]
        assert (first.receipt.attempts, second.receipt.attempts) == (2, 1)
        silent.clear()
        decode: Any = cluster.workers["decode-0"]
        (link,) = decode._peers._links.values()
        await until(lambda: link.failed is None, 10, lambda: link)
        cluster.router.models.first.pools.scheduler._avoided.clear()  # as SUSPECT_S would
        third = await cluster.client.generate(prompts[2], max_tokens=NEW, ignore_eos=True)
        assert (third.receipt.path, third.receipt.attempts) == ("disaggregated", 1)
        await cluster.freed()
        await balanced(cluster)


async def test_control_without_the_pairs_suspicion_the_same_worker_is_chosen_until_the_attempts_are_used(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: avoiding the pair sends the request elsewhere."""
    monkeypatch.setattr(RequestScheduler, "avoid", lambda *_: None)
    async with inside(wrap=faulty({}, lambda peer: True)) as cluster:
        with pytest.raises(TandemError) as failed:
            await cluster.client.generate(oracle.prompts(tiny, [40])[0], max_tokens=NEW, ignore_eos=True)
        assert "given up after 4 attempts" in failed.value.message


async def test_a_source_that_failed_is_refused_at_once_until_it_is_verified(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the router tries it again, there is no second stall. In the control, without the memory of the failure,
    each attempt stalls."""
    monkeypatch.setattr(RequestScheduler, "avoid", lambda *_: None)
    for remembers in (True, False):
        if not remembers:
            monkeypatch.setattr(PrefillPeers, "_refuse", lambda *_: None)
        made: dict[str, Faulty] = {}
        async with inside(wrap=faulty(made, lambda peer: True)) as cluster:
            with pytest.raises(TandemError):
                await cluster.client.generate(oracle.prompts(tiny, [40])[0], max_tokens=NEW, ignore_eos=True)
        assert (made["decode-0"].failed <= 2) is remembers  # a part may be read twice


@pytest.mark.parametrize("when", ["computing", "finishing"])
async def test_the_router_hears_of_a_failed_read_before_the_read_can_be_ended(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The request continues elsewhere while the blocks that may still be written stay held, in the ledger."""
    safe, held = asyncio.Event(), set[int]()
    abort = Receiver.abort

    async def long(receiver: Receiver) -> None:
        held.update(place for _, place in receiver._expected.values())
        await abort(receiver)
        await safe.wait()

    async def unsafe_finish(receiver: Receiver) -> Any:  # raises at once, and `abort` ends the reads
        await receiver.failed.wait()
        raise receiver.error or AssertionError

    monkeypatch.setattr(Receiver, "abort", long)
    monkeypatch.setattr(Receiver, "finish", unsafe_finish)
    if when == "computing":  # the prefill worker says no more after its first announcement: the wait must end
        stuck = PrefillServicer.Prefill

        async def prefill(self: Any, request: Any, context: Any) -> Any:
            async for event in stuck(self, request, context):
                yield event
                if event.HasField("ready"):
                    await asyncio.Event().wait()

        monkeypatch.setattr(PrefillServicer, "Prefill", prefill)
    prompt = oracle.prompts(tiny, [150])[0]
    async with inside(wrap=faulty({}, lambda peer: True)) as cluster:
        decode = cluster.workers["decode-0"]
        watch = Stopwatch()
        done = await cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True)
        assert watch.within(5.0)
        assert done.token_ids == oracle.greedy(tiny, prompt, NEW)
        assert done.receipt.path == "local"
        ledger = await decode.ledger()
        assert held
        assert held <= {block for entry in ledger.entries for block in entry.blocks}
        assert not ledger.faults
        safe.set()
        await cluster.freed()
        await balanced(cluster)


@pytest.mark.parametrize(
    ("remaining_s", "kind"), [(None, TransferFailed), (60.0, TransferFailed), (0.0, DeadlineExceeded)]
)
def test_a_time_limit_of_ours_is_not_the_callers_deadline(remaining_s: float | None, kind: type[TandemError]) -> None:
    """An internal time limit is a failed transfer, unless the caller's own deadline has passed."""
    call: Any = SimpleNamespace(remaining_s=remaining_s, span=SimpleNamespace(headers=()))
    prefill: Any = SimpleNamespace(incarnation=("prefill-0", "a"))
    nothing: Any = None
    stream = PrefillStream(nothing, prefill, nothing, nothing, nothing, call)
    with pytest.raises(TandemError) as failed, stream._errors():
        raise DeadlineExceeded("injected")
    assert type(failed.value) is kind


def test_what_a_failure_below_is_for_the_router() -> None:
    """DEADLINE_EXCEEDED only if the caller's own deadline has passed."""
    late = DeadlineExceeded("late")
    assert isinstance(from_below(late, "p"), TransferFailed)
    assert isinstance(from_below(late, "p", expired=True), DeadlineExceeded)
    found = {
        (type(error).__name__, began): from_below(error, "p", began=began).reason
        for error in (TransferFailed(""), WorkerLost(""), StepFailed(""), DataLoss(""))
        for began in (True, False)
    }
    assert found == {
        ("TransferFailed", True): "TRANSFER_FAILED",
        ("TransferFailed", False): "TRANSFER_FAILED",
        ("WorkerLost", True): "PREFILL_LOST",
        ("WorkerLost", False): "PREFILL_REFUSED",
        ("StepFailed", True): "PREFILL_STEP_FAILED",
        ("StepFailed", False): "PREFILL_STEP_FAILED",
        ("DataLoss", True): "DIGEST_MISMATCH",
        ("DataLoss", False): "DIGEST_MISMATCH",
    }
    for error, reason in (
        (CheckpointRefused("its adapter's folder has changed"), "PREFILL_CHECKPOINT_REFUSED"),
        (Unavailable("", reason="RANK_WITHOUT_ADAPTER"), "PREFILL_RANK_WITHOUT_ADAPTER"),
        (Busy("", reason="NO_ADAPTER_SLOT"), "PREFILL_NO_ADAPTER_SLOT"),
        (Unavailable("", reason="DRAINING"), "PREFILL_REFUSED"),
        (PreconditionFailed("", reason="STALE_INCARNATION"), "PREFILL_REFUSED"),
    ):
        passed_on = from_below(error, "p")
        assert (type(passed_on), passed_on.reason) == (Unavailable, reason)
        assert (reason in UNSUITED) == (reason != "PREFILL_REFUSED"), "the router avoids it for this request only"


# ---- a prefill worker that sends invalid messages


def _no_such_token(event: prefill_pb2.PrefillResponse) -> None:
    event.first_token.token_id = 2**31


def _no_scores(event: prefill_pb2.PrefillResponse) -> None:
    event.first_token.ClearField("logprobs")


def _uneven_scores(event: prefill_pb2.PrefillResponse) -> None:
    event.first_token.logprobs.top.append(0.0)


def _fewer_prompt_scores(event: prefill_pb2.PrefillResponse) -> None:
    event.first_token.prompt_logprobs.chosen.pop()


@pytest.mark.parametrize("harm", [_no_such_token, _no_scores, _uneven_scores, _fewer_prompt_scores, None])
async def test_a_prefill_worker_that_sends_nonsense_loses_the_request_to_another(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Any], None] | None
) -> None:
    """A first token that the model does not have, scores that do not belong to it, or a token before the transfer are
    this worker's fault and not the client's, who gets the same tokens."""
    offer, faulty_worker = PrefillServicer._offer, list[str]()

    async def faulty(servicer: Any, *given: Any) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        worker_id = servicer._worker.worker_id
        faulty_worker[:] = faulty_worker or [worker_id]
        async for event in offer(servicer, *given):
            if [worker_id] == faulty_worker:
                if harm is None and event.HasField("opened"):
                    continue
                if harm is not None and event.HasField("first_token"):
                    harm(event)
            yield event

    monkeypatch.setattr(PrefillServicer, "_offer", faulty)
    prompt = oracle.prompts(tiny, [50])[0]
    async with inside(prefill=2) as cluster:
        done = await cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True, logprobs=2, prompt_logprobs=1)
        assert done.token_ids == oracle.greedy(tiny, prompt, NEW)
        assert (done.receipt.attempts, done.receipt.path) == (2, "disaggregated")
        assert [done.receipt.prefill_worker] != faulty_worker != []
        await cluster.freed()
