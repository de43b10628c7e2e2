"""Models with recurrent layers through prefill and decode: the state moves under the same ticket, fence and digests as
the KV, and no sequence runs with a state that is not provably its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core import block_hash
from engine.core.sequence import Sequence
from engine.runner.sequence_states import SequenceStates
from kvtransfer.sender import Sender
from kvtransfer.types import Offer, Peer, Ticket
from loadtest.harness.random_checkpoints import make_checkpoint
from services import launch
from services.router.routing.prefix_index import BlockIndex
from tandem.async_client import AsyncClient
from tests.journey.test_handoff import harming, reuse_at_source
from tests.journey.test_jobs import read
from tests.journey.test_kill import ids, reached
from tests.journey.test_prefix import known
from tests.support import oracle
from tests.support.faults import Harm, slow_down
from tests.support.harness import LocalCluster
from tests.support.memory import block_view
from tests.support.waiting import until

NEW = 16
SETTINGS: dict[str, Any] = {"transport": "nixl", "dtype": "float32"}
# Other kinds are in test_families: states of one block and of several; no attention, so blocks without content.
FAMILIES = ("qwen3-next", "falcon-h1", "mamba2")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = make_checkpoint(tmp_path_factory.mktemp(family), f"tiny-{family}", dtype="float32")
        return made[family]

    return get


async def ask(cluster: Any, prompt: list[int], **options: Any) -> Any:
    return await cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True, **options)


@pytest.mark.parametrize("family", FAMILIES)
async def test_tokens_equal_transformers_over_nixl(inside: Any, hybrid: Callable[[str], Path], family: str) -> None:
    """Many prompts at once, in chunks, then the same ones again, whose KV the decode worker has: only the rest and the
    state move, and of a model without KV only the state."""
    folder = hybrid(family)
    prompts = oracle.prompts(folder, [1, 7, 8, 9, 40, 64, 65, 150])
    wanted = [oracle.greedy(folder, prompt, NEW) for prompt in prompts]
    async with inside(model=str(folder), **SETTINGS) as cluster:
        engine = cluster.workers["decode-0"].engine
        assert engine.state_blocks > 0
        for again in (False, True):
            answers = await asyncio.gather(*(ask(cluster, prompt) for prompt in prompts))
            assert [done.token_ids for done in answers] == wanted
            for prompt, done in zip(prompts, answers, strict=True):
                receipt = done.receipt
                assert (receipt.path, receipt.attempts) == ("disaggregated", 1)
                skipped = (len(prompt) - 1) // 8 if again else 0
                kv = -(-len(prompt) // 8) - skipped if engine.pages.layout.calls else 0
                assert receipt.transfer.blocks == kv + engine.state_blocks
        await cluster.freed()
        assert await cluster.ledgers_balance()
        assert engine.states.slots.held == 0
        for ledger in (await cluster.client.audit()).ledgers:
            worker = cluster.workers[ledger.worker_id]
            assert (ledger.states.free, ledger.states.total) == (worker.settings.max_num_seqs,) * 2
            assert ledger.states.snapshots == worker._load().states[2]
            assert ledger.states.snapshots > 0 or worker.role == "decode"


async def test_a_prompt_that_is_computed_where_it_decodes(inside: Any, hybrid: Callable[[str], Path]) -> None:
    """Without a prefill worker; the second time it begins at the snapshot at the end of its last full block."""
    folder = hybrid("qwen3-next")
    (prompt,) = oracle.prompts(folder, [50])
    async with inside(model=str(folder), prefill=0, **SETTINGS) as cluster:
        for cached in (0, 48):
            done = await ask(cluster, prompt)
            assert done.token_ids == oracle.greedy(folder, prompt, NEW)
            assert done.receipt.path == "local"
            assert done.receipt.cached_tokens == cached


async def test_the_router_expects_what_a_worker_can_resume(
    inside: Any, hybrid: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a conversation's next prompt the router expects only the tokens before the last snapshot, though the worker
    has further blocks of KV, which the router expects in the control."""
    folder = hybrid("qwen3-next")
    (prompt,) = oracle.prompts(folder, [50])
    async with inside(model=str(folder), prefill=0, **SETTINGS) as cluster:
        answer = await cluster.client.generate(prompt, max_tokens=10, ignore_eos=True)
        again = prompt + answer.token_ids
        await until(lambda: known(cluster, "decode-0", again) == 48, 5, lambda: "the router did not hear of it")
        with monkeypatch.context() as patch:
            patch.setattr(BlockIndex, "_resumable", BlockIndex._leading)
            await until(lambda: known(cluster, "decode-0", again) == 56, 5, lambda: "no control")
        done = await ask(cluster, again)
        assert (done.receipt.cached_tokens, done.receipt.unresumed_tokens) == (48, 8)
        assert done.token_ids == oracle.greedy(folder, again, NEW)


@pytest.fixture
def folder(hybrid: Callable[[str], Path]) -> Path:
    return hybrid("qwen3-next")


def scramble_state(running: list[Any]) -> Callable[[Harm, Peer, Seq[tuple[int, int]]], None]:
    """Changes, once, the copy that has just been read."""
    done: list[int] = []

    def act(harm: Harm, peer: Peer, pairs: Seq[tuple[int, int]]) -> None:
        pool = running[0].workers["decode-0"].engine.pool
        ends = {pool.table(owner)[-1] for owner in pool.owners() if owner.startswith("sequence:")}
        for _, local in pairs:
            if local in ends and not done:
                done.append(local)
                view = block_view(harm.region, local)
                view[:] = bytes([0, 0, 0x48, 0x42]) * (len(view) // 4)  # 50.0

    return act


async def test_a_byte_of_the_state_that_changes_on_the_way_is_noticed(inside: Any, folder: Path) -> None:
    """The digest detects it; the second attempt gives the right tokens."""
    running: list[Any] = []
    (prompt,) = oracle.prompts(folder, [50])
    async with inside(model=str(folder), wrap=harming({}, after=scramble_state(running)), **SETTINGS) as cluster:
        running.append(cluster)
        done = await ask(cluster, prompt)
        assert done.token_ids == oracle.greedy(folder, prompt, NEW)
        assert done.receipt.attempts == 2
        assert "digest of block index 7 " in done.receipt.notes[0]
        assert await cluster.ledgers_balance()


async def test_control_without_the_digest_a_wrong_state_goes_through(
    inside: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: the same fault gives one attempt, status OK and wrong tokens."""
    monkeypatch.setattr("kvtransfer.receiver.Receiver._first_wrong", lambda self, ready: None)
    running: list[Any] = []
    (prompt,) = oracle.prompts(folder, [50])
    async with inside(model=str(folder), wrap=harming({}, after=scramble_state(running)), **SETTINGS) as cluster:
        running.append(cluster)
        done = await ask(cluster, prompt)
        assert done.receipt.attempts == 1
        assert done.token_ids != oracle.greedy(folder, prompt, NEW)


@pytest.mark.parametrize("fault", ["missing", "of one token less", "in the place of KV"])
async def test_a_state_that_is_not_this_sequences_own_never_commits(
    inside: Any, folder: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefill worker omits it, offers that of another position, or confuses it with a block of KV."""
    announce, done = Sender.announce, list[int]()

    def wrong(self: Sender, ticket: Ticket, offers: Seq[Offer]) -> Any:
        if done or not any(offer.index == 7 for offer in offers):
            return announce(self, ticket, offers)
        done.append(1)
        *kv, state = offers
        if fault == "missing":
            return announce(self, ticket, kv)
        if fault == "of one token less":
            early = block_hash.of_state(block_hash.chain(prompt[:49], 8, b"", partial=True)[-1], 49, 1)[0]
            return announce(self, ticket, [*kv, Offer(state.index, state.block, early)])
        *kv, last = kv
        mixed = [Offer(last.index, state.block, last.context), Offer(state.index, last.block, state.context)]
        ready = announce(self, ticket, [*kv, last, state])
        return [
            *ready[:-2],
            *(replace(each, remote_block=offer.block) for each, offer in zip(ready[-2:], mixed, strict=True)),
        ]

    monkeypatch.setattr(Sender, "announce", wrong)
    (prompt,) = oracle.prompts(folder, [50])
    async with inside(model=str(folder), **SETTINGS) as cluster:
        assert cluster.workers["decode-0"].engine.state_blocks == 1
        answer = await ask(cluster, prompt)
        assert done
        assert answer.receipt.attempts == 2
        assert answer.token_ids == oracle.greedy(folder, prompt, NEW)
        assert await cluster.ledgers_balance()


async def test_control_a_state_of_one_token_less_gives_other_tokens(
    inside: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest cannot detect this, because the source itself is wrong, but the tokens of these models show it."""
    commit = SequenceStates.commit
    before: dict[int, list[torch.Tensor]] = {}

    def late(self: SequenceStates) -> bool:
        before[id(self._pages)] = [self._memory.row(slot).clone() for slot in range(self._memory.slots)]
        return commit(self)

    def early(self: SequenceStates, owner: str, table: Seq[int]) -> None:
        row = self._memory.row(self.slots.slot(owner))
        now = row.clone()
        row.copy_(before[id(self._pages)][self.slots.slot(owner)])
        self._pages.save_state(self.slots.slot(owner), table[-self.blocks :])
        row.copy_(now)

    monkeypatch.setattr(SequenceStates, "commit", late)
    monkeypatch.setattr(SequenceStates, "save", early)
    (prompt,) = oracle.prompts(folder, [65])  # a step of 64 tokens, and one of the last
    async with inside(model=str(folder), **SETTINGS) as cluster:
        assert (await ask(cluster, prompt)).token_ids != oracle.greedy(folder, prompt, NEW)


async def test_states_that_the_source_gave_up_during_the_read_are_never_used(
    inside: Any, folder: Path, books: list[Sender]
) -> None:
    """As with blocks of KV."""
    running: list[Any] = []
    fired: list[int] = []

    async def give_up(harm: Harm, peer: Peer, pairs: Seq[tuple[int, int]]) -> None:
        pool = running[0].workers["prefill-0"].engine.pool
        states = {pool.table(owner)[-1] for owner in pool.owners() if owner.startswith("transfer:")}
        if not fired and states & {remote for remote, _ in pairs}:  # the prompt is computed by now
            fired.append(1)
            await reuse_at_source(running[0], overwrite=True)

    (prompt,) = oracle.prompts(folder, [50])
    async with inside(model=str(folder), wrap=harming({}, before=give_up), **SETTINGS) as cluster:
        running.append(cluster)
        done = await ask(cluster, prompt)
        assert fired
        assert done.receipt.attempts == 2
        assert done.token_ids == oracle.greedy(folder, prompt, NEW)


async def test_preempted_answers_and_several_of_one_prompt(inside: Any, folder: Path) -> None:
    """With few blocks, the youngest sequences lose their blocks and states, and compute both again; further answers to
    a prompt compute it again, or from a snapshot."""
    prompts = oracle.prompts(folder, [40, 41, 42, 43, 44, 45])
    wanted = [oracle.greedy(folder, prompt, 80) for prompt in prompts]
    async with inside(model=str(folder), kv_blocks=44, **SETTINGS) as cluster:
        slow_down(cluster.workers["decode-0"], 0.02)  # so that the first is not over before the third has come
        answers = await asyncio.gather(*(cluster.client.generate(p, max_tokens=80, ignore_eos=True) for p in prompts))
        assert [answer.token_ids for answer in answers] == wanted
        assert cluster.workers["decode-0"].engine.scheduler.preemptions > 0
        several = await cluster.client.generate(prompts[0], max_tokens=NEW, ignore_eos=True, n=3)
        assert [each.token_ids for each in several] == [wanted[0][:NEW]] * 3
        assert {each.receipt.path for each in several} == {"disaggregated"}


async def test_further_answers_to_a_prompt_begin_at_its_snapshot(inside: Any, folder: Path) -> None:
    """As with other requests, the first one computes the prompt, and the others continue from its snapshot, each with
    its own state. Where blocks are few, the snapshot may have been evicted by then: see the test before."""
    (prompt,) = oracle.prompts(folder, [40])
    async with inside(model=str(folder), **SETTINGS) as cluster:
        several = await cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True, n=3)
        assert [each.token_ids for each in several] == [oracle.greedy(folder, prompt, NEW)] * 3
        assert {each.receipt.path for each in several} == {"disaggregated"}
        assert sorted(each.receipt.cached_tokens for each in several) == [0, 32, 32]
        await cluster.freed()
        assert await cluster.ledgers_balance()


async def test_either_worker_dies_mid_stream(folder: Path) -> None:
    """After SIGKILL of a decode worker its streams and jobs continue on another one, which gets KV and state of all
    tokens so far. Then the prefill worker is killed when only the first blocks of long prompts have moved: they are
    computed again. The tokens are the same."""
    short, long = oracle.prompts(folder, [20, 33, 48, 7]), oracle.prompts(folder, [9, 12, 300, 320])
    with LocalCluster(
        folder, decode=2, step_s=0.1, block_size=8, dtype="float32", max_num_batched_tokens=16, max_num_seqs=8
    ) as cluster:
        client = AsyncClient(cluster.target)

        async def disturbed(prompts: list[list[int]], new: int, victim: str, when: Callable[[Any], bool]) -> list[Any]:
            pieces: list[list[Any]] = [[] for _ in prompts]

            async def one(index: int) -> None:
                async for piece in client.stream(prompts[index], max_tokens=new, ignore_eos=True, timeout=60):
                    pieces[index].append(piece)

            running = asyncio.ensure_future(asyncio.gather(*map(one, range(len(prompts)))))
            await reached(when, pieces, running)
            await asyncio.to_thread(cluster.kill, victim)
            cluster.hurry()
            await asyncio.to_thread(cluster.start_worker, victim)
            await running
            for prompt, each in zip(prompts, pieces, strict=True):
                assert ids(each) == oracle.greedy(folder, prompt, new)
            return [each[-1].receipt.attempts for each in pieces]

        jobs = [(await client.submit(prompt, max_tokens=80, ignore_eos=True)).job_id for prompt in short[:2]]
        attempts = await disturbed(short, 80, "decode-0", lambda pieces: all(len(ids(each)) >= 5 for each in pieces))
        assert max(attempts) > 1
        for job, prompt in zip(jobs, short, strict=False):
            assert await read(client, job) == oracle.greedy(folder, prompt, 80)
        cluster.slow_again()
        attempts = await disturbed(
            long, NEW, "prefill-0", lambda pieces: all(len(ids(each)) >= 2 for each in pieces[:2])
        )
        assert min(attempts[2:]) > 1
        assert attempts[:2] == [1, 1]
        await client.close()
        cluster.wait_balanced()


async def test_a_role_switch_keeps_the_snapshots_and_no_state(inside: Any, folder: Path) -> None:
    """The engine of a prefill worker becomes a decode worker's: no slot is held, and its snapshots are still used."""
    (prompt,) = oracle.prompts(folder, [50])
    async with inside(model=str(folder), **SETTINGS) as cluster:
        await ask(cluster, prompt)
        worker = cluster.workers["prefill-0"]
        engine = await worker.release(5.0)
        assert engine.engine.states.slots.held == 0
        assert engine.engine.check(live=()) == []
        again: Any = await launch.start("decode", cluster.settings, "decode-1", engine=engine)
        cluster.workers["decode-1"] = again
        try:
            sequence = Sequence(id="s", tokens=list(prompt), prompt_len=50, max_len=60)
            assert len(await engine.call(lambda: engine.engine.states.resume(sequence, 13))) == 6
            await engine.call(lambda: engine.engine.states.slots.drop("s"))
        finally:
            await again.stop(0.0)
