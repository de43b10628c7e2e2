"""Several answers to one prompt: each equals the answer to its seed alone, and the prompt is computed once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.router.execution.completion import Completion
from services.router.routing.request_scheduler import RequestScheduler
from services.router.routing.waiting_request import WaitingRequest
from tandem.errors import Busy, DeadlineExceeded, TandemError
from tests.support import oracle
from tests.support.faults import Harm, flip_a_byte, only_first, slow_down

BLOCK = 8  # of the clusters here
NEW = 40


def options(**changes: Any) -> dict[str, Any]:
    return {"max_tokens": NEW, "temperature": 0.9, "seed": 5, "ignore_eos": True, "logprobs": 1, **changes}


@pytest.mark.parametrize("prefill", [0, 1])
async def test_each_answer_is_what_its_own_seed_gives(inside: Any, tiny: Path, prefill: int) -> None:
    """Requested alone with the seed of its receipt, each answer has the same tokens; the answers differ from each
    other."""
    prompt = oracle.prompts(tiny, [45])[0]
    async with inside(prefill=prefill) as cluster:
        done = await cluster.client.generate(prompt, n=5, **options())
        assert [one.receipt.choice for one in done] == list(range(5))
        assert {one.receipt.choices for one in done} == {5}
        assert done[0].receipt.seed == 5
        assert len({one.receipt.seed for one in done}) == len({tuple(one.token_ids) for one in done}) == 5
        for one in done:
            alone = await cluster.client.generate(prompt, **options(seed=one.receipt.seed))
            assert one.token_ids == alone.token_ids
            assert [known.token_id for known in one.logprobs] == one.token_ids
            assert alone.receipt.choices == 1
        [single] = await cluster.client.generate(prompt, n=1, **options())
        assert single.token_ids == done[0].token_ids


async def test_only_the_first_answer_comes_before_those_who_wait(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others follow to where the prompt's KV is, and have no token yet, so they queue like every request."""
    asked = []
    placed = RequestScheduler.placed

    def seen(scheduler: RequestScheduler, waiting: WaitingRequest, *given: Any, **about: Any) -> Any:
        asked.append((waiting.begun, bool(waiting.kv_holder)))
        return placed(scheduler, waiting, *given, **about)

    monkeypatch.setattr(RequestScheduler, "placed", seen)
    async with inside() as cluster:
        await cluster.client.generate(oracle.prompts(tiny, [45])[0], n=4, **options())
    assert asked == [(False, False), *[(False, True)] * 3]


async def test_the_prompt_is_computed_once_and_its_blocks_are_shared(inside: Any, tiny: Path) -> None:
    """There is one prefill and one transfer; on the decode worker all tables begin with the same blocks. Control: the
    blocks that are not shared would be that many times more."""
    length, n = 85, 6
    prompt = oracle.prompts(tiny, [length])[0]
    full = (length - 1) // BLOCK
    async with inside() as cluster:
        quick = slow_down(cluster.workers["decode-0"], 0.05)  # the first is not over before the last has begun
        pool = cluster.workers["decode-0"].engine.pool
        stream = cluster.client.stream(prompt, n=n, **options())
        begun: set[int] = set()
        async for piece in stream:
            begun.add(piece.choice)
            if len(begun) == n:
                break
        tables = [pool.table(owner) for owner in pool.owners()]
        assert len(tables) == n
        assert len({tuple(table[:full]) for table in tables}) == 1
        assert pool.held == full + sum(len(table) - full for table in tables)
        assert pool.held < sum(len(table) for table in tables) - (n - 2) * full
        assert not pool.check()
        quick()
        pieces = [piece async for piece in stream]
        receipts = {piece.choice: piece.receipt for piece in pieces if piece.receipt}
        assert [receipts[choice].path for choice in range(n)] == ["disaggregated", *["local"] * (n - 1)]
        assert [receipts[choice].cached_tokens for choice in range(n)] == [0, *[full * BLOCK] * (n - 1)]
        assert sum(receipt.transfer is not None for receipt in receipts.values()) == 1
        assert cluster.workers["prefill-0"].engine.steps <= 3, "chunks of 64 tokens, once"
        assert await cluster.ledgers_balance()


async def test_an_answer_that_ends_at_its_first_token(inside: Any, tiny: Path) -> None:
    """Its KV is not sent to a decode worker; the others are then placed like other requests and are complete."""
    prompt = oracle.prompts(tiny, [45])[0]
    async with inside() as cluster:
        alone = await cluster.client.generate(prompt, **options())
        done = await cluster.client.generate(prompt, n=4, **options(stop_token_ids=[alone.token_ids[0]]))
        assert done[0].token_ids == alone.token_ids[:1]
        assert {one.receipt.path for one in done} == {"disaggregated"}
        for one in done[1:]:
            same = await cluster.client.generate(
                prompt, **options(stop_token_ids=[alone.token_ids[0]], seed=one.receipt.seed)
            )
            assert one.token_ids == same.token_ids
        assert await cluster.ledgers_balance()


async def test_a_decode_worker_that_goes_away_mid_stream_changes_no_answer(inside: Any, tiny: Path) -> None:
    """Each answer is resumed separately with the same tokens, none lost and none twice."""
    prompt = oracle.prompts(tiny, [45])[0]
    async with inside(decode=2) as cluster:
        expected = await cluster.client.generate(prompt, n=4, **options())
        quick = [slow_down(cluster.workers[name], 0.05) for name in ("decode-0", "decode-1")]
        pieces: list[Any] = []
        async for piece in cluster.client.stream(prompt, n=4, **options()):
            pieces.append(piece)
            if quick and len({piece.choice for piece in pieces}) == 4:
                busy = max(cluster.held(), key=lambda name: cluster.held()[name] if name.startswith("decode") else -1)
                await cluster.workers[busy].grpc.stop(0.0)
                while quick:
                    quick.pop()()
        for choice, undisturbed in enumerate(expected):
            own = [piece for piece in pieces if piece.choice == choice]
            assert [token for piece in own for token in piece.token_ids] == undisturbed.token_ids
            assert own[-1].receipt.seed == undisturbed.receipt.seed
        assert sum(piece.receipt.attempts > 1 for piece in pieces if piece.receipt) == 4


async def test_a_corrupted_transfer_changes_no_answer(inside: Any, tiny: Path) -> None:
    """The first answer is placed again; the others wait for valid KV."""
    prompt = oracle.prompts(tiny, [45])[0]

    def wrap(inner: Any, who: str) -> Any:
        return Harm(inner, after=only_first(flip_a_byte)) if who.startswith("decode") else inner

    async with inside(wrap=wrap) as cluster:
        harmed = await cluster.client.generate(prompt, n=3, **options())
        again = await cluster.client.generate(prompt, n=3, **options())
        assert [one.receipt.attempts for one in harmed] == [2, 1, 1]
        assert [one.token_ids for one in harmed] == [one.token_ids for one in again]


async def test_sixteen_answers_where_few_places_and_blocks_are(inside: Any, tiny: Path) -> None:
    """They queue or are preempted, and are complete; the ledgers balance."""
    prompt = oracle.prompts(tiny, [45])[0]
    async with inside(max_num_seqs=5, kv_blocks=40) as cluster:
        done = await cluster.client.generate(prompt, n=16, **options())
        for one in (done[0], done[7], done[15]):
            alone = await cluster.client.generate(prompt, **options(seed=one.receipt.seed))
            assert one.token_ids == alone.token_ids
        assert await cluster.ledgers_balance()


async def test_answers_that_wait_for_another_are_not_refused_after_its_tokens(inside: Any, tiny: Path) -> None:
    """They wait for longer than `queue_timeout_s`, until the deadline. In the control they are refused, although the
    client has tokens."""
    prompt = oracle.prompts(tiny, [45])[0]
    async with inside(max_num_seqs=1, queue_timeout_s=0.3) as cluster:
        slow_down(cluster.workers["decode-0"], 0.02)
        done = await cluster.client.generate(prompt, n=3, **options())
        assert [len(one.token_ids) for one in done] == [NEW] * 3
        with pytest.raises(DeadlineExceeded):
            await cluster.client.generate(prompt, n=2, timeout=1.0, **options(max_tokens=200))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Completion, "follows", property(lambda _: False, lambda *_: None), raising=False)
            with pytest.raises(Busy, match="no place became free"):
                await cluster.client.generate(prompt, n=3, **options())
        await cluster.freed()


async def test_a_client_that_leaves_and_a_deadline_free_every_answer(inside: Any, tiny: Path) -> None:
    """Within a second nothing is held on either side, in whatever state each of them was."""
    prompt = oracle.prompts(tiny, [45])[0]
    async with inside() as cluster:
        slow_down(cluster.workers["decode-0"])
        for wanted in (1, 5, 30):
            stream = cluster.client.stream(prompt, n=8, **options(max_tokens=300))
            for _ in range(wanted):
                await anext(stream)
            await stream.aclose()
            await cluster.freed()
        with pytest.raises(TandemError):
            await cluster.client.generate(prompt, n=8, timeout=0.5, **options(max_tokens=300))
        await cluster.freed()
        assert await cluster.ledgers_balance()


async def test_each_answer_has_its_own_stop_string_and_grammar(inside: Any) -> None:
    """The answers share the request, and no state of what they have generated."""
    demo = str(Path(__file__).parents[2] / "demo/model")
    async with inside(model=demo) as cluster:
        how = {"max_tokens": 60, "temperature": 1.0, "seed": 3}
        done = await cluster.client.generate("Return the", n=4, grammar={"regex": "[a-z]{5,30}!"}, **how)
        assert len({one.text for one in done}) == 4
        for one in done:
            assert one.text[:-1].isalpha()
            alone = await cluster.client.generate(
                "Return the", grammar={"regex": "[a-z]{5,30}!"}, **{**how, "seed": one.receipt.seed}
            )
            assert alone.text == one.text
        stopped = await cluster.client.generate("Return the", n=4, stop="e", **how)
        assert not any("e" in one.text for one in stopped)
        assert len({len(one.token_ids) for one in stopped}) > 1
