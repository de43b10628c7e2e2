"""Log probabilities of the prompt: every token but the first has one, whatever was cached, chunked or repeated."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import InvalidRequest
from tests.support import oracle
from tests.support.faults import Harm, flip_a_byte, only_first

TOP = 3


def check(done: Any, folder: Path, prompt: list[int]) -> None:
    """Compares them with log_softmax of transformers' logits, best first."""
    expected = oracle.logits(folder, prompt).log_softmax(-1)
    assert [one.token_id for one in done.prompt_logprobs] == prompt[1:]
    for place, one in enumerate(done.prompt_logprobs):
        assert one.logprob == pytest.approx(float(expected[place, one.token_id]), abs=1e-4)
        assert list(one.top.values()) == pytest.approx(expected[place].topk(TOP).values.tolist(), abs=1e-4)
        assert list(one.top.values()) == pytest.approx(expected[place, list(one.top)].tolist(), abs=1e-4)


@pytest.mark.parametrize("prefill", [0, 1])
async def test_each_prompt_token_has_its_own(inside: Any, tiny: Path, prefill: int) -> None:
    """With remote or local prefill, in one chunk or many, alone or with others, and the second time although the prompt
    is cached; the answer is the same as without them."""
    prompts = oracle.prompts(tiny, [1, 2, 30, 150, 300])
    how = {"max_tokens": 8, "ignore_eos": True}
    async with inside(prefill=prefill, max_num_batched_tokens=200) as cluster:
        ask = cluster.client.generate
        plain = await asyncio.gather(*(ask(prompt, **how) for prompt in prompts))
        assert all(one.prompt_logprobs is None for one in plain)
        done = await asyncio.gather(
            *(ask(prompt, prompt_logprobs=TOP, logprobs=0, **how) for prompt in prompts),
            *(ask(prompt, **how) for prompt in prompts),
        )
        for prompt, one, other, expected in zip(prompts, done[:5], done[5:], plain, strict=True):
            assert one.token_ids == other.token_ids == expected.token_ids
            assert other.prompt_logprobs is None
            check(one, tiny, prompt)
        assert await cluster.ledgers_balance()


async def test_without_alternatives(inside: Any, tiny: Path) -> None:
    """0 alternatives give each token's own log probability and nothing else."""
    prompt = oracle.prompts(tiny, [30])[0]
    async with inside() as cluster:
        done = await cluster.client.generate(prompt, max_tokens=1, prompt_logprobs=0)
        assert [one.top for one in done.prompt_logprobs] == [{}] * 29
        assert done.logprobs is None


async def test_a_preempted_prompt_is_scored_once(inside: Any, tiny: Path) -> None:
    """Prompts that lose their blocks in the middle return each token's log probability once."""
    prompts = oracle.prompts(tiny, [150] * 4)
    async with inside(prefill=0, kv_blocks=60, max_num_batched_tokens=32) as cluster:
        done = await asyncio.gather(
            *(
                cluster.client.generate(prompt, max_tokens=80, ignore_eos=True, prompt_logprobs=TOP)
                for prompt in prompts
            )
        )
        for prompt, one in zip(prompts, done, strict=True):
            check(one, tiny, prompt)
            assert one.token_ids == oracle.greedy(tiny, prompt, 80)


async def test_a_resumed_request_gets_them_once(inside: Any, tiny: Path) -> None:
    """They came with the first token; the attempt that continues after a corrupted transfer does not send them
    again."""
    prompt = oracle.prompts(tiny, [50])[0]
    harms: list[Harm] = []

    def wrap(inner: Any, who: str) -> Any:
        if not who.startswith("decode"):
            return inner
        harms.append(Harm(inner, after=only_first(flip_a_byte)))
        return harms[0]

    async with inside(wrap=wrap) as cluster:
        stream = cluster.client.stream(prompt, max_tokens=20, ignore_eos=True, prompt_logprobs=TOP)
        pieces = [piece async for piece in stream]
        assert pieces[-1].receipt.attempts == 2
        assert [piece.prompt_logprobs is not None for piece in pieces] == [True] + [False] * (len(pieces) - 1)
        check(pieces[0], tiny, prompt)
        assert [token for piece in pieces for token in piece.token_ids] == oracle.greedy(tiny, prompt, 20)


async def test_how_many_may_be_asked_for_is_bounded(inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is the prompt's length times the alternatives: what has to be computed, stored and sent."""
    monkeypatch.setattr("services.router.preprocess.validation.MAX_PROMPT_LOGPROBS", 100)
    prompt = oracle.prompts(tiny, [26])[0]
    async with inside() as cluster:
        with pytest.raises(InvalidRequest) as caught:
            await cluster.client.generate(prompt, max_tokens=1, prompt_logprobs=TOP)
        assert caught.value.field == "sampling.prompt_logprobs"
        assert "<= 100" in (caught.value.bound or "")
        done = await cluster.client.generate(prompt[:25], max_tokens=1, prompt_logprobs=TOP)
        assert len(done.prompt_logprobs) == 24
