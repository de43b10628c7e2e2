"""Penalties, bias, min_tokens and log probabilities through the whole path: a token depends on the request and its
tokens so far, never on the worker that computes it or on how many have died."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support import oracle
from tests.support.faults import Harm, flip_a_byte, only_first, slow_down, together

NEW = 80


def options(prompt: list[int], **changes: Any) -> dict[str, Any]:
    """Every option. The stop token's bias is so high that only min_tokens prevents it."""
    return {
        "max_tokens": NEW,
        "temperature": 0.9,
        "top_p": 0.95,
        "top_k": 60,
        "min_p": 0.001,
        "seed": 5,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.4,
        "presence_penalty": -0.3,
        "logit_bias": {prompt[0]: 3.0, prompt[1]: -100.0, 11: 100.0},
        "stop_token_ids": [11],
        "min_tokens": NEW - 10,
        "logprobs": 4,
        **changes,
    }


def check(done: Any, expected: Any) -> None:
    """Compares the tokens exactly, and the log probabilities up to the order of sums."""
    assert done.token_ids == expected.token_ids
    assert done.finish_reason == expected.finish_reason == "stop"
    assert len(done.token_ids) == NEW - 9, "min_tokens, and then the stop token"
    for one, other in zip(done.logprobs, expected.logprobs, strict=True):
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert list(one.top.values()) == pytest.approx(list(other.top.values()), abs=1e-4)


def check_logprobs(done: Any, folder: Path, prompt: list[int], top: int) -> None:
    """Compares them with log_softmax of transformers' logits."""
    expected = oracle.logits(folder, prompt + done.token_ids)[len(prompt) - 1 : -1].log_softmax(-1)
    assert [one.token_id for one in done.logprobs] == done.token_ids
    for place, one in enumerate(done.logprobs):
        assert one.logprob == pytest.approx(float(expected[place, one.token_id]), abs=1e-4)
        best = expected[place].topk(top).values.tolist()
        assert list(one.top.values()) == pytest.approx(best, abs=1e-4)
        assert list(one.top.values()) == pytest.approx(expected[place, list(one.top)].tolist(), abs=1e-4)
        assert len(one.top) == top


async def test_disaggregated_and_local_give_the_same(inside: Any, tiny: Path) -> None:
    """With every option, alone and with others; the log probabilities equal those of transformers."""
    prompts = oracle.prompts(tiny, [30, 50, 41])
    async with inside() as cluster:
        alone = [await cluster.client.generate(prompt, **options(prompt)) for prompt in prompts]
        crowd = await asyncio.gather(
            *(cluster.client.generate(prompt, **options(prompt)) for prompt in prompts),
            *(cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True) for prompt in prompts),
        )
        await cluster.workers.pop("prefill-0").stop(0.0)
        await cluster.seen(1)
        local = [await cluster.client.generate(prompt, **options(prompt)) for prompt in prompts]
        for prompt, one, other, third in zip(prompts, alone, crowd, local, strict=False):
            assert (one.receipt.path, third.receipt.path) == ("disaggregated", "local")
            check(other, one)
            check(third, one)
            check_logprobs(one, tiny, prompt, 4)
        for prompt, plain in zip(prompts, crowd[3:], strict=True):
            assert plain.token_ids == oracle.greedy(tiny, prompt, NEW), "neighbours with options change nothing"
            assert plain.logprobs is None


async def test_a_corrupted_transfer_changes_nothing(inside: Any, tiny: Path) -> None:
    """The request is placed again with its first token as part of the prompt, which still counts as generated."""
    prompt = oracle.prompts(tiny, [50])[0]
    harms: list[Harm] = []

    def wrap(inner: Any, who: str) -> Any:
        if not who.startswith("decode"):
            return inner
        harms.append(Harm(inner, after=only_first(flip_a_byte)))
        return harms[0]

    async with inside(wrap=wrap) as cluster:
        harmed = await cluster.client.generate(prompt, **options(prompt))
        assert harmed.receipt.attempts == 2
        undisturbed = await cluster.client.generate(prompt, **options(prompt))
        assert undisturbed.receipt.attempts == 1
        check(harmed, undisturbed)


@pytest.mark.parametrize("prefill", [0, 1])
async def test_a_decode_worker_that_goes_away_mid_stream_changes_nothing(inside: Any, tiny: Path, prefill: int) -> None:
    """The other worker continues with the same counts, the same random numbers and the same min_tokens."""
    prompts = oracle.prompts(tiny, [30, 44, 37, 51])
    async with inside(prefill=prefill, decode=2) as cluster:
        expected = [await cluster.client.generate(prompt, **options(prompt)) for prompt in prompts]
        quick = [slow_down(cluster.workers[name], 0.03) for name in ("decode-0", "decode-1")]
        pieces: list[list[Any]] = [[] for _ in prompts]
        under_way = asyncio.Event()

        async def collect(index: int) -> None:
            async for piece in cluster.client.stream(prompts[index], **options(prompts[index])):
                pieces[index].append(piece)
                if all(sum(len(piece.token_ids) for piece in one) >= 12 for one in pieces):
                    under_way.set()

        running = asyncio.gather(*(collect(index) for index in range(len(prompts))))
        async with asyncio.timeout(30):
            await under_way.wait()
        await cluster.workers["decode-0"].grpc.stop(0.0)
        for hurry in quick:
            hurry()
        await running
        assert any(one[-1].receipt.attempts > 1 for one in pieces), "the fault must have hit a stream"
        for one, undisturbed in zip(pieces, expected, strict=True):
            assert [token for piece in one for token in piece.token_ids] == undisturbed.token_ids
            logprobs = [known for piece in one for known in piece.logprobs or []]
            assert [known.token_id for known in logprobs] == undisturbed.token_ids
            assert [known.logprob for known in logprobs] == pytest.approx(
                [known.logprob for known in undisturbed.logprobs], abs=1e-4
            )


async def test_preempted_streams_change_nothing(inside: Any, tiny: Path) -> None:
    """With too few blocks for all of them, each still returns the same tokens as alone."""
    prompts = oracle.prompts(tiny, [20] * 6)
    how = {"min_tokens": 120, "max_tokens": 120, "temperature": 0.8}
    async with inside(kv_blocks=60) as cluster:
        alone = [await cluster.client.generate(prompt, **options(prompt, **how)) for prompt in prompts]
        together(cluster.workers["decode-0"], 4)  # which end with 72 blocks
        done = await asyncio.gather(*(cluster.client.generate(prompt, **options(prompt, **how)) for prompt in prompts))
        assert sum(one.receipt.preemptions for one in alone) == 0
        assert sum(one.receipt.preemptions for one in done) > 0
        assert [one.token_ids for one in done] == [one.token_ids for one in alone]
        for prompt, one in zip(prompts, done, strict=True):
            check_logprobs(one, tiny, prompt, 4)
        assert await cluster.ledgers_balance()


async def test_greedy_follows_the_adjusted_logits(inside: Any, tiny: Path) -> None:
    """Each token follows from transformers' logits and the definitions, from the first one on."""
    prompt = oracle.prompts(tiny, [30])[0]
    bias = {prompt[3]: 1.5, 17: -100.0}
    expected = list(prompt)
    for _ in range(40):
        scores = oracle.logits(tiny, expected)[-1].double()
        for token, value in bias.items():
            scores[token] += value
        for token in set(expected):
            scores[token] *= 1 / 1.3 if scores[token] > 0 else 1.3
        for token, count in Counter(expected[len(prompt) :]).items():
            scores[token] -= 0.2 * count + 0.1
        expected.append(int(scores.argmax()))
    async with inside() as cluster:
        done = await cluster.client.generate(
            prompt,
            max_tokens=40,
            ignore_eos=True,
            repetition_penalty=1.3,
            frequency_penalty=0.2,
            presence_penalty=0.1,
            logit_bias=bias,
            logprobs=0,
        )
        assert done.receipt.path == "disaggregated"
        assert done.token_ids == expected[len(prompt) :]
        assert done.token_ids != oracle.greedy(tiny, prompt, 40), "the options must matter here"
        check_logprobs(done, tiny, prompt, 0)


@pytest.mark.parametrize("prefill", [0, 1])
async def test_min_tokens_keeps_the_end_away(inside: Any, tiny: Path, tmp_path: Path, prefill: int) -> None:
    """Before min_tokens neither the model's end-of-sequence token nor the client's stop tokens appear, the first token
    included."""
    prompt = oracle.prompts(tiny, [30])[0]
    first, *_, later = oracle.greedy(tiny, prompt, 3)
    folder = tmp_path / "with-eos"
    shutil.copytree(tiny, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": first}))
    async with inside(prefill=prefill, model=str(folder)) as cluster:
        ask = cluster.client.generate
        ends = await ask(prompt, max_tokens=20)
        assert (ends.token_ids, ends.finish_reason) == ([first], "stop")
        kept = await ask(prompt, max_tokens=20, min_tokens=20, stop_token_ids=[later])
        assert len(kept.token_ids) == 20
        assert kept.finish_reason == "length"
        assert not {first, later} & set(kept.token_ids)
        for least in (1, 2, 7):
            done = await ask(prompt, max_tokens=20, min_tokens=least, logit_bias={first: 100.0})
            assert len(done.token_ids) == least + 1
            assert done.token_ids[-1] == first
            assert first not in done.token_ids[:-1]


async def test_bounds_are_served(inside: Any, tiny: Path) -> None:
    """The largest and smallest allowed values give a complete answer."""
    prompt = oracle.prompts(tiny, [30])[0]
    extremes: list[dict[str, Any]] = [
        {"repetition_penalty": 5e-324, "temperature": 1.0},
        {"repetition_penalty": 10.0, "temperature": 5e-324},
        {"frequency_penalty": -2.0, "presence_penalty": -2.0, "temperature": 100.0},
        {"logit_bias": {token: (-1) ** token * 100.0 for token in range(300)}, "temperature": 1.0},
        {"min_tokens": 8, "stop_token_ids": list(range(16)), "logprobs": 20},
    ]
    async with inside() as cluster:
        for given in extremes:
            done = await cluster.client.generate(prompt, max_tokens=8, ignore_eos=True, **given)
            assert len(done.token_ids) == 8, given
        assert all(math.isfinite(one.logprob) for one in done.logprobs)
        assert all(len(one.top) == 20 for one in done.logprobs)
