"""Speculative decoding through the whole path: every answer equals the one without it. test_kill.py kills workers
meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import engine.decoding.speculative
from engine.decoding import new_tokens
from tandem.errors import SettingsError
from tests.journey.test_sampling import check, options
from tests.support import oracle
from tests.support.faults import slow_down, together

NEW = 60


@pytest.fixture(scope="session")
def similar(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model that is right about half of the time."""
    folder = tmp_path_factory.mktemp("similar") / "model"
    oracle.weaken(tiny, folder, noise=0.015)
    return folder


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sequence drafts as many tokens as permitted, whatever their price."""
    monkeypatch.setattr(engine.decoding.speculative, "worth", lambda chance, fixed, each, most: most)


@pytest.mark.parametrize("prefill", [0, 1])
async def test_answers_are_those_without_drafts(
    inside: Any, tiny: Path, similar: Path, always: None, prefill: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, and with every sampling option, at once, with remote and local prefill; the receipt counts the drafts.
    With the verification of drafts switched off the answers differ."""
    prompts = oracle.prompts(tiny, [30, 50, 41])

    async def ask(cluster: Any) -> list[Any]:
        return await asyncio.gather(
            *(cluster.client.generate(prompt, **options(prompt)) for prompt in prompts),
            *(cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True) for prompt in prompts),
        )

    async with inside(prefill=prefill) as cluster:
        expected = await ask(cluster)
        assert all(one.receipt.drafted == 0 for one in expected)
    async with inside(prefill=prefill, speculation="draft", draft_model=str(similar)) as cluster:
        done = await ask(cluster)
        for one, other in zip(done[:3], expected[:3], strict=True):
            check(one, other)
        assert [one.token_ids for one in done[3:]] == [oracle.greedy(tiny, prompt, NEW) for prompt in prompts]
        for one in done:
            assert 0 < one.receipt.accepted < one.receipt.drafted
        assert await cluster.ledgers_balance()
        monkeypatch.setattr(new_tokens, "agrees", lambda draft, token: True)
        assert [one.token_ids for one in await ask(cluster)] != [one.token_ids for one in expected]


async def test_prompt_lookup_needs_no_second_model(inside: Any, tiny: Path, always: None) -> None:
    """A text that repeats itself is guessed from itself, and the answer stays what it is, also on the worker that goes
    on with it when its own goes away in between."""
    prompts = oracle.prompts(tiny, [20, 33])
    how = {"max_tokens": NEW, "ignore_eos": True, "logit_bias": dict.fromkeys(range(20, 26), 60.0), "seed": 3}
    pieces: list[list[Any]] = [[] for _ in prompts]
    begun = asyncio.Event()

    async def collect(client: Any, index: int) -> None:
        async for piece in client.stream(prompts[index], temperature=1.5, **how):
            pieces[index].append(piece)
            if all(sum(len(piece.token_ids) for piece in one) >= 8 for one in pieces):
                begun.set()

    async with inside() as cluster:
        expected = [await cluster.client.generate(prompt, temperature=1.5, **how) for prompt in prompts]
    async with inside(speculation="ngram", decode=2) as cluster:
        done = [await cluster.client.generate(prompt, temperature=1.5, **how) for prompt in prompts]
        assert [one.token_ids for one in done] == [one.token_ids for one in expected]
        assert sum(one.receipt.accepted for one in done) > 0
        for name in ("decode-0", "decode-1"):
            slow_down(cluster.workers[name])
        running = asyncio.gather(*(collect(cluster.client, index) for index in range(len(prompts))))
        async with asyncio.timeout(30):
            await begun.wait()
        await cluster.workers["decode-0"].grpc.stop(0.0)
        await running
        assert [[t for piece in one for t in piece.token_ids] for one in pieces] == [one.token_ids for one in expected]
        moved = [one[-1].receipt for one in pieces if one[-1].receipt.attempts > 1]
        assert moved, "the fault must have hit a stream"
        assert sum(receipt.accepted for receipt in moved) > 0


async def test_preempted_streams_change_nothing(inside: Any, tiny: Path, similar: Path, always: None) -> None:
    """With too few blocks for all of them, drafts included, each still returns the same tokens as alone."""
    prompts = oracle.prompts(tiny, [20] * 6)
    async with inside(kv_blocks=60, speculation="draft", draft_model=str(similar)) as cluster:
        together(cluster.workers["decode-0"], 4)  # which end with 72 blocks
        done = await asyncio.gather(
            *(cluster.client.generate(prompt, max_tokens=120, ignore_eos=True) for prompt in prompts)
        )
        assert [one.token_ids for one in done] == [oracle.greedy(tiny, prompt, 120) for prompt in prompts]
        assert sum(one.receipt.preemptions for one in done) > 0
        assert sum(one.receipt.accepted for one in done) > 0
        assert await cluster.ledgers_balance()


async def test_a_draft_model_with_another_vocabulary_is_refused(inside: Any, tiny: Path, tmp_path: Path) -> None:
    """A draft is a token id, and ids of another vocabulary have another meaning. Prefill workers load no draft
    model."""
    from loadtest.harness.random_checkpoints import make_checkpoint

    other = make_checkpoint(tmp_path / "other", "tiny-llama", dtype="float32", vocab_size=200)
    with pytest.raises(SettingsError, match="vocabulary of 200 tokens, the model one of 384"):
        async with inside(speculation="draft", draft_model=str(other)):
            pass
