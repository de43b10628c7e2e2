"""Grammars and stop strings through the whole path: the text fits, whichever worker computes it and whichever dies."""

from __future__ import annotations

import asyncio
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import engine.decoding.structured_output
import engine.engine
from services.router.routing import request_scheduler
from tandem.client import AsyncClient
from tandem.errors import Busy, InvalidRequest, TandemError
from tandem.rpc.stream_reader import completion
from tests.support.calls import forced_call, with_template
from tests.support.faults import Harm, flip_a_byte, only_first, slow_down, together

DEMO = str(Path(__file__).parents[2] / "demo/model")
PROMPTS = ["Return the", "What does sorted do?", "Raised when an index", "Create a"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LETTERS = "[a-z]{40}[0-9]{20}!"


def options(**changes: Any) -> dict[str, Any]:
    return {"grammar": {"regex": LETTERS}, "max_tokens": 120, "temperature": 1.0, "seed": 5, "logprobs": 1, **changes}


async def test_text_fits_its_grammar(inside: Any) -> None:
    """Every kind, greedy and sampled, alone and in one batch with plain requests, which do not change."""
    kinds: list[tuple[dict[str, Any], Any]] = [
        ({"regex": LETTERS}, lambda text: re.fullmatch(LETTERS, text)),
        ({"choice": ["yes", "no", 'maybe "so"']}, lambda text: text in ("yes", "no", 'maybe "so"')),
        ({"ebnf": 'root ::= "(" root ")" | "x"'}, lambda text: re.fullmatch(r"(\(*)x(\)*)", text)),
        ({"json_schema": SCHEMA}, lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None),
        ({"json": True}, lambda text: isinstance(json.loads(text), dict)),
    ]
    async with inside(model=DEMO) as cluster:
        ask = cluster.client.generate
        plain = [await ask(prompt, max_tokens=40) for prompt in PROMPTS]
        hows = [{"temperature": 1.0, "seed": seed, "min_p": 0.02} for seed in range(3)] + [{}]
        asked = [(kind, fits, how) for kind, fits in kinds for how in hows]
        *done, again = await asyncio.gather(
            *(ask(PROMPTS[0], grammar=kind, max_tokens=200, **how) for kind, _, how in asked),
            asyncio.gather(*(ask(prompt, max_tokens=40) for prompt in PROMPTS)),
        )
        assert [one.text for one in again] == [one.text for one in plain]
        for (kind, fits, _), one in zip(asked, done, strict=True):
            assert one.finish_reason == "length" or fits(one.text), (kind, one.text)
        ended = {next(iter(kind)) for (kind, _, _), one in zip(asked, done, strict=True) if one.finish_reason == "stop"}
        assert ended >= {"regex", "choice", "ebnf", "json_schema"}
        assert all(one.receipt.path == "disaggregated" for one in done)
        assert await cluster.ledgers_balance()


async def test_without_the_masks_the_text_does_not_fit(inside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: only the masks make the text fit."""
    monkeypatch.setattr(engine.engine.Masks, "begin", lambda *_: None)
    async with inside(model=DEMO) as cluster:
        done = await cluster.client.generate(PROMPTS[0], **options())
        assert not re.fullmatch(LETTERS, done.text)


async def test_disaggregated_local_and_in_a_crowd_give_the_same(inside: Any) -> None:
    """The first token is chosen on the prefill worker, the others on the decode worker, under one grammar."""
    async with inside(model=DEMO) as cluster:
        alone = [await cluster.client.generate(prompt, **options()) for prompt in PROMPTS]
        crowd = await asyncio.gather(*(cluster.client.generate(prompt, **options()) for prompt in PROMPTS))
        await cluster.workers.pop("prefill-0").stop(0.0)
        await cluster.seen(1)
        local = [await cluster.client.generate(prompt, **options()) for prompt in PROMPTS]
        assert {one.receipt.path for one in alone} == {"disaggregated"}
        assert {one.receipt.path for one in local} == {"local"}
        assert [one.token_ids for one in alone] == [one.token_ids for one in crowd] == [one.token_ids for one in local]
        assert all(re.fullmatch(LETTERS, one.text) for one in alone)


async def test_a_corrupted_transfer_changes_nothing(inside: Any) -> None:
    """The request is placed again with the first token as part of the prompt, which the grammar matches again."""
    harms: list[Harm] = []

    def wrap(inner: Any, who: str) -> Any:
        if not who.startswith("decode"):
            return inner
        harms.append(Harm(inner, after=only_first(flip_a_byte)))
        return harms[0]

    async with inside(model=DEMO, wrap=wrap) as cluster:
        harmed = await cluster.client.generate(PROMPTS[1], **options())
        undisturbed = await cluster.client.generate(PROMPTS[1], **options())
        assert (harmed.receipt.attempts, undisturbed.receipt.attempts) == (2, 1)
        assert harmed.token_ids == undisturbed.token_ids


@pytest.mark.parametrize("prefill", [0, 1])
async def test_a_decode_worker_that_goes_away_mid_stream_changes_nothing(inside: Any, prefill: int) -> None:
    """Another worker compiles the grammar, matches the tokens again and continues the same text, with stop strings and
    min_tokens."""
    hows = [options(), options(stop=["5"], min_tokens=30), options(grammar={"json_schema": SCHEMA}), options(seed=9)]
    async with inside(model=DEMO, prefill=prefill, decode=2) as cluster:
        expected = [await cluster.client.generate(p, **how) for p, how in zip(PROMPTS, hows, strict=True)]
        quick = [slow_down(cluster.workers[name], 0.03) for name in ("decode-0", "decode-1")]
        pieces: list[list[Any]] = [[] for _ in PROMPTS]
        under_way = asyncio.Event()

        async def collect(index: int) -> None:
            async for piece in cluster.client.stream(PROMPTS[index], **hows[index]):
                pieces[index].append(piece)
                if all(sum(len(piece.token_ids) for piece in one) >= 4 for one in pieces):
                    under_way.set()

        running = asyncio.gather(*(collect(index) for index in range(len(PROMPTS))))
        async with asyncio.timeout(30):
            await under_way.wait()
        await cluster.workers["decode-0"].grpc.stop(0.0)
        for hurry in quick:
            hurry()
        await running
        assert any(one[-1].receipt.attempts > 1 for one in pieces), "the fault must have hit a stream"
        for one, undisturbed in zip(pieces, expected, strict=True):
            assert [token for piece in one for token in piece.token_ids] == undisturbed.token_ids
            assert "".join(piece.text for piece in one) == undisturbed.text


async def test_a_forced_call_goes_on_when_its_decode_worker_goes_away(inside: Any, tmp_path: Path) -> None:
    """For a named tool, any tool, or several calls: the other worker matches the existing text again, and the call
    equals the undisturbed one."""
    asked = [
        forced_call(seed=1, max_tokens=90),
        forced_call(seed=2, max_tokens=60, name=None, min_tokens=20),
        forced_call(seed=3, max_tokens=60, several=True, min_tokens=40),
    ]
    async with inside(model=str(with_template(tmp_path)), decode=2) as cluster:
        alone = [[piece async for piece in cluster.client._pieces(one, None)] for one in asked]
        quick = [slow_down(cluster.workers[name], 0.03) for name in ("decode-0", "decode-1")]
        pieces: list[list[Any]] = [[] for _ in asked]
        under_way = asyncio.Event()

        async def collect(index: int) -> None:
            async for piece in cluster.client._pieces(asked[index], None):
                pieces[index].append(piece)
                if all(sum(len(piece.token_ids) for piece in one) >= 16 for one in pieces):
                    under_way.set()

        running = asyncio.gather(*(collect(index) for index in range(len(asked))))
        async with asyncio.timeout(30):
            await under_way.wait()
        assert not any(one[-1].receipt for one in pieces), "the fault must come in the middle"
        await cluster.workers["decode-0"].grpc.stop(0.0)
        for hurry in quick:
            hurry()
        await running
        assert any(one[-1].receipt.attempts > 1 for one in pieces), "the fault must have hit a stream"
        for one, undisturbed in zip(pieces, alone, strict=True):
            assert [t for piece in one for t in piece.token_ids] == [
                t for piece in undisturbed for t in piece.token_ids
            ]
        (call,) = completion(pieces[0]).calls
        assert (call.name, len(json.loads(call.arguments)["text"]) >= 20) == ("note", True)


async def test_preempted_streams_change_nothing(inside: Any) -> None:
    """With too few blocks for all of them, each still returns the same text as alone."""
    how = options(grammar={"regex": "[a-z ]{2000}"}, max_tokens=150)
    async with inside(model=DEMO, kv_blocks=50) as cluster:
        alone = [
            await cluster.client.generate(prompt, **{**how, "seed": seed}) for seed in (1, 2) for prompt in PROMPTS
        ]
        together(cluster.workers["decode-0"], 4)  # which end with more blocks than there are
        done = await asyncio.gather(
            *(cluster.client.generate(prompt, **{**how, "seed": seed}) for seed in (1, 2) for prompt in PROMPTS)
        )
        assert sum(one.receipt.preemptions for one in done) > 0
        assert [one.token_ids for one in done] == [one.token_ids for one in alone]
        assert await cluster.ledgers_balance()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"grammar": {"regex": "(a"}}, "sampling.grammar.regex"),
    ({"grammar": {"regex": "a^b"}}, "sampling.grammar.regex"),
    ({"grammar": {"regex": b"\xff"}}, "sampling.grammar.regex"),
    ({"grammar": {"regex": "a{1,100000}"}}, "sampling.grammar.regex"),
    ({"grammar": {"regex": "(a{1,1000}){1,1000}"}}, "sampling.grammar.regex"),
    ({"grammar": {"regex": "((a|[b{]{9}c){100}|d){99}"}}, "sampling.grammar.regex"),
    ({"grammar": {"regex": "[" * 60_000}}, "sampling.grammar.regex"),
    ({"grammar": {"regex": "{" * 60_000}}, "sampling.grammar.regex"),
    ({"grammar": {"regex": "(" * 60_000}}, "sampling.grammar.regex"),
    ({"grammar": {"regex": "a" * 70_000}}, "sampling.grammar.regex"),
    ({"grammar": {"ebnf": ""}}, "sampling.grammar.ebnf"),
    ({"grammar": {"ebnf": "x ::= y"}}, "sampling.grammar.ebnf"),
    ({"grammar": {"choice": []}}, "sampling.grammar"),
    ({"grammar": {"choice": ["a", ""]}}, "sampling.grammar.choice[1]"),
    ({"grammar": {"json": False}}, "sampling.grammar.json"),
    ({"grammar": {"json_schema": "{"}}, "sampling.grammar.json_schema"),
    ({"grammar": {"json_schema": '{"type": "string", "type": "integer"}'}}, "sampling.grammar.json_schema"),
    ({"grammar": {"json_schema": "[" * 30_000}}, "sampling.grammar.json_schema"),
    ({"grammar": {"json_schema": {"type": "frobnicate"}}}, "sampling.grammar.json_schema.type"),
    ({"grammar": {"json_schema": {"type": "array", "items": {"not": {}}}}}, "sampling.grammar.json_schema.items.not"),
    ({"grammar": {"json_schema": {"type": "integer", "minimum": 5, "maximum": 1}}}, "sampling.grammar.json_schema"),
    ({"grammar": {"regex": "a"}, "ignore_eos": True}, "sampling.ignore_eos"),
    ({"stop": ["a"] * 17}, "sampling.stop"),
    ({"stop": [""]}, "sampling.stop[0]"),
    ({"stop": ["x" * 257]}, "sampling.stop[0]"),
    ({"stop": b"\xff"}, "sampling.stop[0]"),
    ({"n": 0}, "sampling.n"),
    ({"n": 17}, "sampling.n"),
    ({"n": -1}, "sampling.n"),
]


async def test_bad_ones_are_refused_with_the_field_and_the_bound_before_anything_is_reserved(
    inside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router or the worker that compiles refuses: no block is taken, and valid requests continue."""
    async with inside(model=DEMO) as cluster:
        reserve = cluster.workers["decode-0"].engine.reserve
        monkeypatch.setattr(
            cluster.workers["decode-0"].engine, "reserve", lambda *_: pytest.fail("blocks were reserved")
        )
        for given, field in BAD:
            with pytest.raises(InvalidRequest) as caught:
                await cluster.client.generate("Return", max_tokens=4, **given)
            assert caught.value.field is not None, given
            assert caught.value.field.startswith(field), (given, caught.value.field)
            assert caught.value.bound, given
        monkeypatch.setattr(cluster.workers["decode-0"].engine, "reserve", reserve)
        assert (await cluster.client.generate("Return", max_tokens=4)).token_ids


async def test_a_model_without_a_tokenizer_has_no_text_to_fit(inside: Any, tiny: Path) -> None:
    """The refusal has the field, and token ids are still served."""
    async with inside() as cluster:
        for given in ({"grammar": {"regex": "a"}}, {"stop": "a"}):
            with pytest.raises(InvalidRequest) as caught:
                await cluster.client.generate([5, 6, 7], max_tokens=4, **given)
            assert caught.value.field == f"sampling.{next(iter(given))}"


DEAD: list[tuple[dict[str, Any], str]] = [
    ({"grammar": {"ebnf": "root ::= root"}}, "sampling.grammar"),
    ({"grammar": {"json_schema": {"$ref": "#"}}}, "sampling.grammar"),
    ({"grammar": {"regex": "abc"}, "min_tokens": 50}, "sampling.min_tokens"),
]


@pytest.mark.parametrize("prefill", [0, 1])
async def test_a_dead_end_ends_with_a_status_and_frees_everything(inside: Any, prefill: int) -> None:
    """On the prefill worker (first token) and on the decode worker (later ones), while other streams continue."""
    async with inside(model=DEMO, prefill=prefill) as cluster:
        others = asyncio.gather(*(cluster.client.generate(prompt, **options()) for prompt in PROMPTS))
        for given, field in DEAD:
            with pytest.raises(InvalidRequest) as caught:
                await cluster.client.generate("Return", max_tokens=60, temperature=1.0, seed=1, **given)
            assert (caught.value.reason, caught.value.field) == ("GRAMMAR_DEAD_END", field)
        assert all(re.fullmatch(LETTERS, one.text) for one in await others)
        assert await cluster.ledgers_balance()


async def test_a_hostile_grammar_costs_an_error_and_not_a_worker(inside: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar whose tokens take ever longer to match fails alone, whether its thread is left or not; concurrent and
    later streams are complete."""
    monkeypatch.setattr(engine.decoding.structured_output, "MASK_CPU_S", 0.1)
    monkeypatch.setattr(engine.decoding.structured_output, "TOKEN_CPU_S", 0.0)
    hostile = {"regex": "(a*)*(a*)*(aa|a)*(a|aa)*" * 8}
    async with inside(model=DEMO) as cluster:
        others = asyncio.gather(*(cluster.client.generate(prompt, **options()) for prompt in PROMPTS))
        with pytest.raises(TandemError) as caught:
            await cluster.client.generate(
                "a" * 60, grammar=hostile, max_tokens=400, min_tokens=390, seed=1, temperature=1
            )
        assert caught.value.reason in ("GRAMMAR_TOO_COMPLEX", "GRAMMAR_DEAD_END")
        assert caught.value.reason == "GRAMMAR_TOO_COMPLEX"
        assert all(re.fullmatch(LETTERS, one.text) for one in await others)
        left = [thread for worker in cluster.workers.values() for thread in worker.engine.masks.left_behind.threads]
        assert (await cluster.client.generate(PROMPTS[0], **options())).finish_reason == "stop"
        assert await cluster.ledgers_balance()
        for thread in left:
            await asyncio.to_thread(thread.join, 60)


# ---- stop strings


async def test_a_worker_that_compiles_no_grammar_serves_all_other_requests(
    inside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request with a grammar goes elsewhere, or ends with the reason if all workers refuse it. No other request
    waits."""
    monkeypatch.setattr(request_scheduler, "REJECTED_S", 60.0)
    async with inside(model=DEMO) as cluster:
        for name, path, attempts in (("prefill-0", "local", 2), ("decode-0", "", 0)):
            monkeypatch.setattr(cluster.workers[name].engine.grammars.left_behind, "count", lambda _: 3)
            asked = cluster.client.generate(PROMPTS[0], timeout=10, **options(grammar={"regex": f"{name}x*"}))
            if path:
                assert ((done := await asked).receipt.path, done.receipt.attempts) == (path, attempts)
            else:
                with pytest.raises(Busy, match="given up after 4 attempts") as caught:
                    await asked
                assert caught.value.reason == "GRAMMARS_STUCK"
            done = await cluster.client.generate(PROMPTS[1], max_tokens=4)
            assert (done.receipt.path, done.receipt.attempts) == ("disaggregated", 1)
            assert done.receipt.phases["queue"] < 30.0, "of REJECTED_S"


async def test_the_grammars_that_a_tenant_has_left_in_a_worker_are_its_own(
    inside: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both workers know whose a request is, and refuse no other tenant's grammar."""
    keys = {name: f"{name}-key-0123456789" for name in ("hostile", "other")}
    (tmp_path / "keys").write_text("".join(f"{name} {key}\n" for name, key in keys.items()))
    asked: list[tuple[str, str]] = []

    def count(name: str, tenant: str) -> int:
        asked.append((name, tenant))
        return 3 if tenant == "hostile" else 0

    async with inside(model=DEMO, api_keys=tmp_path / "keys") as cluster:
        for name in ("prefill-0", "decode-0"):
            left_behind = cluster.workers[name].engine.grammars.left_behind
            monkeypatch.setattr(left_behind, "count", partial(count, name))
        async with AsyncClient(cluster.router.address, api_key=keys["hostile"]) as hostile:
            with pytest.raises(Busy) as caught:
                await hostile.generate(PROMPTS[0], timeout=10, **options())
        assert caught.value.reason == "GRAMMARS_STUCK"
        async with AsyncClient(cluster.router.address, api_key=keys["other"]) as other:
            done = await other.generate(PROMPTS[0], **options())
        assert (done.receipt.path, done.receipt.attempts) == ("disaggregated", 1)
        assert {("prefill-0", "other"), ("decode-0", "other")} <= set(asked)


async def test_stop_strings_cut_the_text_and_end_the_work(inside: Any) -> None:
    """The text ends before the first stop string, or with it; tokens end with the one that completes it, and nothing
    stays held."""
    async with inside(model=DEMO) as cluster:
        for prompt in PROMPTS:
            whole = await cluster.client.generate(prompt, max_tokens=60, ignore_eos=True, logprobs=2)
            stop = whole.text[len(whole.text) // 2 :][:5]
            at = whole.text.index(stop)
            done = await cluster.client.generate(prompt, max_tokens=60, ignore_eos=True, stop=[stop, "@@@"], logprobs=2)
            assert (done.text, done.finish_reason) == (whole.text[:at], "stop")
            assert done.token_ids == whole.token_ids[: len(done.token_ids)]
            assert len(done.token_ids) < 60
            assert [one.token_id for one in done.logprobs] == done.token_ids
            assert done.receipt.completion_tokens == len(done.token_ids)
            assert done.receipt.transfer is not None, "also of a stream that the router ends"
            kept = await cluster.client.generate(prompt, max_tokens=60, ignore_eos=True, stop=stop, include_stop=True)
            assert kept.text == whole.text[: at + len(stop)]
            assert kept.token_ids == done.token_ids
        await cluster.freed()
        assert await cluster.ledgers_balance()
