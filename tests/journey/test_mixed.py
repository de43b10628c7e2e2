"""Every option of the OpenAI API, in many concurrent requests: each has the tokens of an engine that runs it alone.

requests of one fixed seed ─┬─▶ openai SDK ─▶ router ─▶ prefill ─▶ decode     all together, every other one streamed
                            └─▶ an engine in this test                        one after another
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
import torch

from engine import kernels
from engine.builder import build_engine
from engine.core.sequence import Logprob, Sequence
from engine.engine import Engine
from services.router.preprocess.request import seed_of
from services.router.preprocess.tokenizer import Tokenizer
from tandem.sampling import GrammarSpec, Sampling
from tandem.settings import Settings
from tests.support.templates import HERMES

DEMO = Path(__file__).parents[2] / "demo/model"
END = 0  # the demo model's end of sequence
COUNT = 40
TEXTS = ["Return the", "What does sorted do?", "Raised when an index", "Create a", "What is a naïve 🙂 string?"]
TOOL = {"type": "function", "function": {"name": "heights", "parameters": {"type": "object", "properties": {}}}}
CALL = 'I look. <tool_call>{"name": "heights", "arguments": {"of": "Eiger"}}</tool_call>'
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
WORD, YES, TICKS = "[a-f]{6}[0-9]{2}", ["yes", "no", "may be"], 'root ::= ("tick " | "tock ") root | "end"'
GRAMMARS: dict[str, tuple[dict[str, Any], GrammarSpec]] = {  # the field that is sent, and its meaning
    "regex": ({"structured_outputs": {"regex": WORD}}, GrammarSpec("regex", WORD)),
    "choice": ({"guided_choice": YES}, GrammarSpec("choice", json.dumps(YES))),
    "rules": ({"structured_outputs": {"grammar": TICKS}}, GrammarSpec("ebnf", TICKS)),
    "json": ({"response_format": {"type": "json_object"}}, GrammarSpec("json", "")),
    "schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        GrammarSpec("json_schema", json.dumps(SCHEMA)),
    ),
    "call": ({"structured_outputs": {"choice": [CALL]}}, GrammarSpec("choice", json.dumps([CALL]))),
}

# Names are those of a body, but for logprobs (of a chat: logprobs and top_logprobs) and grammar (a name of the above).
VALUES: dict[str, list[Any]] = {
    "temperature": [0.0, 0.7, 1.5],
    "top_p": [0.5, 0.9],
    "top_k": [2, 40],
    "min_p": [0.05, 0.3],
    "repetition_penalty": [1.6, 0.8],
    "frequency_penalty": [1.5, -1.0],
    "presence_penalty": [1.9, -1.9],
    "logit_bias": [{"300": 7.0, "11": -100.0}, {"65": 9.0}, {"0": 4.0}],
    "min_tokens": [8, 12],
    "ignore_eos": [True],
    "stop": ["e", ["zebra", "in", "th"]],
    "include_stop_str_in_output": [True],
    "stop_token_ids": [[11, 12, 13, 16, 18, 73, 87, 203, 264, 273, 300, 302, 304, 308, 324, 387]],  # common ones
    "n": [2, 3],
    "logprobs": [0, 1, 5],
    "prompt_logprobs": [0, 2],
    "echo": [True],
    "grammar": list(GRAMMARS),
    "tools": [[TOOL]],
    "ids": [True],
    "cache_salt": ["a", "b"],
    "priority": [-3, 7],
}
SAMPLED = {name for name in VALUES if name in Sampling.__slots__} - {"grammar", "logit_bias"} | {"seed"}
OF_THE_SDK = {
    "temperature",
    "top_p",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "stop",
    "n",
    "echo",
    "tools",
}
NEVER_IN_CHAT, ONLY_IN_CHAT = {"echo", "ids"}, {"tools"}
# Each may leave a grammar without a possible token, which is an error.
NOT_BESIDE_A_GRAMMAR = {
    "ignore_eos",
    "min_tokens",
    "stop",
    "include_stop_str_in_output",
    "stop_token_ids",
    "logit_bias",
}


@dataclass(frozen=True)
class Asked:
    text: str
    chat: bool
    stream: bool
    options: dict[str, Any] = field(default_factory=dict)

    def without(self, name: str) -> Asked:
        """The same request without this option; a seed becomes another one."""
        rest = {key: value for key, value in self.options.items() if key != name}
        return replace(self, options={**rest, "seed": self.options["seed"] ^ 1} if name == "seed" else rest)


class Answer(NamedTuple):
    """One completion, in a form that both sides can produce."""

    token_ids: list[int]
    text: str
    calls: list[tuple[str, Any]]
    finish: str
    stop_reason: int | str | None
    logprobs: list[tuple[int, float | None, dict[int, float]]]
    prompt_logprobs: list[dict[int, float] | None]


def mix() -> Iterator[Asked]:
    """Each option is in some requests, together with random others."""
    rng = random.Random(7)
    leads = [{name: rng.choice(values)} for name, values in VALUES.items()] + [{"grammar": one} for one in GRAMMARS]
    for number in range(COUNT):
        given = leads[number % len(leads)]
        lead = next(iter(given))
        chat = lead in ONLY_IN_CHAT or (lead not in NEVER_IN_CHAT and rng.random() < 0.5)
        stream = number % 2 == 0 and lead != "prompt_logprobs"
        out = (NEVER_IN_CHAT if chat else ONLY_IN_CHAT) | ({"prompt_logprobs"} if stream else set())
        chosen = {lead, *rng.sample(sorted(VALUES.keys() - out), 4)}
        chosen -= {"grammar"} if lead in NOT_BESIDE_A_GRAMMAR else set()
        if chosen & {"grammar"} or lead == "tools":
            chosen -= NOT_BESIDE_A_GRAMMAR
        if "include_stop_str_in_output" in chosen:
            chosen.add("stop")
        if "echo" in chosen and "logprobs" in chosen:
            chosen.discard("prompt_logprobs")
        options = {name: rng.choice(VALUES[name]) for name in sorted(chosen)} | given
        if lead == "tools":
            options["grammar"] = "call"
        options |= {"seed": rng.randrange(2**64), "max_tokens": rng.randint(12, 30)}
        if options.get("grammar") == "call":
            options["max_tokens"] = 120
        yield Asked(rng.choice(TEXTS), chat, stream, options)


# ---- through the cluster


async def through(client: openai.AsyncOpenAI, asked: Asked, text: Tokenizer) -> list[Answer]:
    given, extra = {}, {"return_token_ids": True, "return_tokens_as_token_ids": True}
    for name, value in asked.options.items():
        if name == "grammar":
            sent = GRAMMARS[value][0]
            given |= {key: sent[key] for key in sent.keys() & {"response_format"}} if asked.chat else {}
            extra |= {key: sent[key] for key in sent if key not in given}
        elif name == "logprobs" and asked.chat:
            given |= {"logprobs": True, "top_logprobs": value}
        elif name in OF_THE_SDK | {"seed", "logprobs"} | ({"max_tokens"} if not asked.chat else set()):
            given[name] = value
        elif name == "max_tokens":
            given["max_completion_tokens"] = value
        elif name != "ids":
            extra[name] = value
    if asked.stream:
        given |= {"stream": True, "stream_options": {"include_usage": True}}
    if asked.chat:
        messages = [{"role": "user", "content": asked.text}]
        got: Any = await client.chat.completions.create(model="", messages=messages, extra_body=extra, **given)
    else:
        prompt = text.encode(asked.text) if "ids" in asked.options else asked.text
        got = await client.completions.create(model="", prompt=prompt, extra_body=extra, **given)
    if not asked.stream:
        return [answer(asked, [choice.model_dump()]) for choice in got.choices]
    *chunks, last = [chunk async for chunk in got]
    pieces: dict[int, list[Any]] = {}
    for chunk in chunks:
        pieces.setdefault(chunk.choices[0].index, []).append(chunk.choices[0].model_dump())
    answers = [answer(asked, pieces[index]) for index in sorted(pieces)]
    assert last.usage.completion_tokens == sum(len(one.token_ids) for one in answers)
    return answers


def answer(asked: Asked, pieces: list[dict[str, Any]]) -> Answer:
    """The answer of one choice, complete or streamed."""
    said = [piece.get("message") or piece.get("delta") or piece for piece in pieces]
    assert [piece["finish_reason"] is None for piece in pieces] == [True] * (len(pieces) - 1) + [False]
    calls: dict[int, tuple[str, str]] = {}  # name and arguments, which arrive in parts in a stream
    for one in said:
        for number, call in enumerate(one.get("tool_calls") or ()):
            index, function = call.get("index", number), call["function"]
            name, arguments = calls.get(index, ("", ""))
            calls[index] = name + (function["name"] or ""), arguments + (function["arguments"] or "")
    known = [scored for piece in pieces if piece["logprobs"] for scored in scores(piece["logprobs"], asked.chat)]
    of_prompt = [one for piece in pieces for one in piece.get("prompt_logprobs") or ()]
    return Answer(
        [token for piece in pieces for token in piece["token_ids"]],
        "".join(one["content" if asked.chat else "text"] or "" for one in said),
        [(name, json.loads(arguments)) for name, arguments in calls.values()],
        pieces[-1]["finish_reason"],
        pieces[-1]["stop_reason"],
        known,
        [one and {int(token): about["logprob"] for token, about in one.items()} for one in of_prompt],
    )


def scores(found: dict[str, Any], chat: bool) -> Iterator[tuple[int, float | None, dict[int, float]]]:
    number = lambda name: int(name.removeprefix("token_id:"))  # noqa: E731
    if chat:
        for one in found["content"]:
            top = {number(other["token"]): other["logprob"] for other in one["top_logprobs"]}
            yield number(one["token"]), one["logprob"], top
        return
    for token, chosen, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        yield number(token), chosen, {number(name): value for name, value in (top or {}).items()}


# ---- by an engine alone


class Alone:
    """An engine that computes one completion at a time. All its callers are on one thread."""

    def __init__(self, folder: Path) -> None:
        made = Settings(model=str(folder), device="cpu", threads=1, kv_blocks=256, block_size=8, max_num_seqs=1)
        self._engine: Engine = build_engine(made, lambda line: None)
        self._text = Tokenizer.load(folder)

    def answers(self, asked: Asked) -> list[Answer]:
        return [self._answer(asked, choice) for choice in range(asked.options.get("n", 1))]

    def _answer(self, asked: Asked, choice: int) -> Answer:
        options, text, decode = asked.options, self._text, self._text.backend.decode  # type: ignore[union-attr]
        messages = [{"role": "user", "content": asked.text}]
        rendered = text.render(messages, options.get("tools")) if asked.chat else ""
        prompt = text.encode(rendered, special=False) if asked.chat else text.encode(asked.text)
        ends = {*options.get("stop_token_ids", ()), *([] if options.get("ignore_eos") else [END])}
        sequence = self._sequence(asked, choice, prompt, frozenset(ends))
        stops = [options["stop"]] if isinstance(options.get("stop"), str) else options.get("stop", [])
        known: list[Logprob | None] = []
        hit, shown = None, ""
        self._engine.add(sequence)
        while self._engine.scheduler.has_work and hit is None:
            for item in self._engine.step():
                if item.token is None:
                    continue
                known.append(item.logprob)
                new = sequence.tokens[len(prompt) :]
                if new[-1] in ends:
                    continue
                # Only text after min_tokens ends the answer.
                free = len(decode(new[: max(0, options.get("min_tokens", 0) - 1)]))
                shown = decode(new)
                hit = min(((shown.find(one, free), one) for one in stops if shown.find(one, free) >= 0), default=None)
        self._engine.drop(sequence.id)
        new = sequence.tokens[len(prompt) :]
        stopped = new[-1] in ends
        if hit:
            shown = shown[: hit[0] + len(hit[1]) * bool(options.get("include_stop_str_in_output"))]
        reason = hit[1] if hit else new[-1] if stopped and new[-1] in options.get("stop_token_ids", ()) else None
        finish, calls = "stop" if hit or stopped else "length", []
        if "tools" in options and shown == CALL:
            shown, finish, calls = "I look. ", "tool_calls", [("heights", {"of": "Eiger"})]
        scored = [row(token, one, asked.chat) for token, one in zip(new, known, strict=True) if one]
        rows = [row(token, one, False) for token, one in zip(prompt[1:], sequence.prompt_logprobs, strict=False)]
        if options.get("echo"):
            shown = asked.text + shown
            scored = [(prompt[0], None, {}), *rows, *scored] if rows and "logprobs" in options else scored
        whole = [None, *({**top, token: chosen} for token, chosen, top in rows)] if "prompt_logprobs" in options else []
        return Answer(new, shown, calls, finish, reason, scored, whole)

    def _sequence(self, asked: Asked, choice: int, prompt: list[int], ends: frozenset[int]) -> Sequence:
        options = {"temperature": 1.0, **asked.options}
        if options.get("echo") and "logprobs" in options:
            options["prompt_logprobs"] = options["logprobs"]
        spec = GRAMMARS[options["grammar"]][1] if "grammar" in options else None
        bias = tuple(sorted((int(token), value) for token, value in options.get("logit_bias", {}).items()))
        how = Sampling(
            **{name: options[name] for name in SAMPLED & options.keys()},
            logit_bias=bias,
            grammar=spec,
        )
        how = replace(how, seed=seed_of(how.seed, choice))
        assert self._engine.grammars
        grammar = self._engine.grammars.compile(spec).result(30) if spec else None
        limit = len(prompt) + options["max_tokens"]
        # A separate salt, so that no cached prefix is found.
        salt = random.randbytes(8)
        return Sequence("one", list(prompt), len(prompt), limit, ends, how, salt, grammar=grammar)


def row(token: int, one: Logprob, chat: bool) -> tuple[int, float, dict[int, float]]:
    """The row in the API's format: completions list the chosen token among the most likely ones, whether it is one or
    not."""
    top = dict(zip(one.top_ids, one.top, strict=True))
    return token, one.chosen, top if chat else {**top, token: one.chosen}


# ---- the promise


async def test_a_mixed_workload_has_the_tokens_of_an_engine_alone(inside: Any, tmp_path: Path) -> None:
    """Tokens, texts, finish reasons, calls and log probabilities are equal to the bit. In the control, without any one
    of its options, or with another seed, some request's answer differs."""
    if kernels.serving(torch.device("cpu")) == kernels.REFERENCE:
        pytest.skip("batches round differently without the compiled operators: python -m engine.kernels.build")
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    (folder / "chat_template.jinja").write_text(HERMES)
    workload, text = list(mix()), Tokenizer.load(folder)
    assert {name for asked in workload for name in asked.options} == VALUES.keys() | {"seed", "max_tokens"}
    assert {asked.options["grammar"] for asked in workload if "grammar" in asked.options} == GRAMMARS.keys()
    async with inside(model=str(folder), http_port=0, kv_blocks=1024) as cluster:
        url = f"http://{cluster.router.http.address}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            together = await asyncio.gather(*(through(client, asked, text) for asked in workload))
        await cluster.freed()
        assert await cluster.ledgers_balance()

    def check() -> None:
        alone = Alone(folder)
        expected = [alone.answers(asked) for asked in workload]
        for asked, got, wanted in zip(workload, together, expected, strict=True):
            assert got == wanted, asked
        assert any(answers[0].calls for answers in together)
        assert {one.finish for answers in together for one in answers} == {"stop", "length", "tool_calls"}
        for name in sorted(VALUES.keys() - {"ids", "cache_salt", "priority"} | {"seed"}):
            having = [(asked, got) for asked, got in zip(workload, together, strict=True) if name in asked.options]
            assert any(alone.answers(asked.without(name)) != got for asked, got in having), f"{name} changes nothing"

    with ThreadPoolExecutor(1) as thread:
        await asyncio.get_running_loop().run_in_executor(thread, check)
