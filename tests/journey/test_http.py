"""The HTTP API as its users use it: the real `openai` package, and bytes that no client would send."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import openai
import pytest

from services.router.frontend import http_answers, http_body, http_server
from services.router.preprocess.chat.chat_template import ChatTemplate
from services.router.preprocess.sampling_defaults import Defaults
from tandem.errors import CheckpointRefused, InvalidRequest
from tests.support.faults import Harm, hold_until, slow_down
from tests.support.stopwatch import Stopwatch
from tests.support.templates import HERMES, LLAMA
from tests.support.waiting import until

DEMO = Path(__file__).parents[2] / "demo/model"
PROMPT, CHAT = "Raised when", [{"role": "user", "content": "What does heapq.heappop do?"}]
HARD = {  # everything that changes which token is chosen
    "temperature": 0.9,
    "top_p": 0.95,
    "seed": 5,
    "frequency_penalty": 0.4,
    "presence_penalty": -0.3,
    "logit_bias": {"11": 3.0, "300": -100.0},
}
VLLM = {"top_k": 60, "min_p": 0.001, "repetition_penalty": 1.2, "min_tokens": 20, "ignore_eos": True}
GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 0.9, "seed": 19}  # random numbers far from where the last bits of the logits decide
ROOT = 'root ::= "tick" | "tock"'


class Door:
    """A cluster's HTTP side."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.url = f"http://{cluster.router.http.address}"
        self.openai = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        self.raw = httpx2.AsyncClient(base_url=self.url, timeout=30)

    def stream(self, **body: Any) -> Any:
        return self.raw.stream("POST", "/v1/completions", json={"stream": True, **GREEDY, "ignore_eos": True, **body})


@pytest.fixture
def door(inside: Any) -> Any:
    @asynccontextmanager
    async def start(**settings: Any) -> AsyncIterator[Door]:
        async with inside(**{"model": str(DEMO), "http_port": 0, "kv_blocks": 1024, **settings}) as cluster:
            one = Door(cluster)
            yield one
            await one.openai.close()
            await one.raw.aclose()

    return start


def events(lines: list[str]) -> list[Any]:
    """The JSON of each server-sent event; the last event must be [DONE]."""
    assert all(line == "" or line.startswith("data: ") for line in lines)
    data = [line.removeprefix("data: ") for line in lines if line]
    assert data[-1] == "[DONE]"
    return [json.loads(one) for one in data[:-1]]


def streamed_calls(chunks: list[Any]) -> list[tuple[str, str]]:
    """Name and arguments of each call, joined from their parts."""
    calls: dict[int, tuple[str, str]] = {}
    for piece in (piece for chunk in chunks for piece in chunk.delta.tool_calls or ()):
        name, arguments = calls.get(piece.index, ("", ""))
        calls[piece.index] = name + (piece.function.name or ""), arguments + (piece.function.arguments or "")
    return [calls[index] for index in sorted(calls)]


# ---- the same tokens


async def test_completions_are_those_of_grpc(door: Any) -> None:
    """Text or ids, streamed or not, greedy or with every option: tokens, text, finish reason and usage equal gRPC's."""
    async with door() as it:
        for options, extra in ((GREEDY, {}), (HARD, VLLM)):
            biases = {int(token): bias for token, bias in options.get("logit_bias", {}).items()}
            expected = await it.cluster.client.generate(
                PROMPT, max_tokens=40, **{**options, **extra, **({"logit_bias": biases} if biases else {})}
            )
            assert expected.text
            ids = (await it.raw.post("/tokenize", json={"prompt": PROMPT})).json()["tokens"]
            for prompt in (PROMPT, ids):
                given = {"model": str(DEMO), "prompt": prompt, "max_tokens": 40, **options}
                body = {**extra, "return_token_ids": True}
                whole = await it.openai.completions.create(**given, extra_body=body)
                usage = {"include_usage": True}
                stream = await it.openai.completions.create(**given, stream=True, stream_options=usage, extra_body=body)
                *chunks, last = [chunk async for chunk in stream]
                pieces = [chunk.choices[0] for chunk in chunks]
                assert whole.choices[0].text == "".join(one.text for one in pieces) == expected.text
                assert whole.choices[0].token_ids == expected.token_ids
                assert [token for one in pieces for token in one.token_ids] == expected.token_ids
                assert whole.choices[0].finish_reason == pieces[-1].finish_reason == expected.finish_reason
                assert [one.finish_reason for one in pieces[:-1]] == [None] * (len(pieces) - 1)
                assert last.choices == []
                assert last.usage.completion_tokens == whole.usage.completion_tokens == len(expected.token_ids)
                assert last.usage.prompt_tokens == whole.usage.prompt_tokens == len(ids)


async def test_chat_is_that_of_grpc(door: Any) -> None:
    """Streamed or not, with content as a string or in parts; without max_tokens the answer may use the whole
    context."""
    async with door(max_model_len=1100) as it:
        expected = await it.cluster.client.generate(messages=CHAT, temperature=0.0)
        assert expected.finish_reason == "stop"
        parts = [{"role": "user", "content": [{"type": "text", "text": CHAT[0]["content"]}]}]
        for messages in (CHAT, parts):
            whole = await it.openai.chat.completions.create(model="", messages=messages, temperature=0.0)
            assert whole.choices[0].message.content == expected.text
            assert whole.choices[0].message.role == "assistant"
            assert (whole.choices[0].finish_reason, whole.choices[0].stop_reason) == ("stop", None)
        stream = await it.openai.chat.completions.create(
            model=str(DEMO), messages=CHAT, temperature=0.0, stream=True, max_completion_tokens=100
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content for chunk in chunks) == expected.text
        assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
        endless = await it.openai.chat.completions.create(
            model="", messages=CHAT, temperature=0.0, extra_body={"ignore_eos": True}
        )
        facts = await it.cluster.client.model_info()
        assert endless.usage.total_tokens == facts.max_context_tokens > 1024 + endless.usage.prompt_tokens
        assert endless.choices[0].finish_reason == "length"


async def test_log_probabilities_have_both_shapes(door: Any) -> None:
    """The numbers equal gRPC's, for each token the chosen one and the most likely ones."""
    async with door() as it:
        expected = await it.cluster.client.generate(PROMPT, max_tokens=8, logprobs=3, ignore_eos=True, **GREEDY)
        done = await it.openai.completions.create(
            model="", prompt=PROMPT, max_tokens=8, logprobs=3, extra_body={"ignore_eos": True}, **GREEDY
        )
        found = done.choices[0].logprobs
        assert found.token_logprobs == pytest.approx([one.logprob for one in expected.logprobs], abs=1e-4)
        assert "".join(found.tokens[:-1]) == done.choices[0].text[: found.text_offset[-1]]
        for token, top, one in zip(found.tokens, found.top_logprobs, expected.logprobs, strict=True):
            assert sorted(top.values()) == pytest.approx(sorted(one.top.values()), abs=1e-4)
            assert top[token] == max(top.values())
        stream = await it.openai.completions.create(
            model="", prompt=PROMPT, max_tokens=8, logprobs=3, stream=True, extra_body={"ignore_eos": True}, **GREEDY
        )
        parts = [chunk.choices[0].logprobs async for chunk in stream]
        assert [token for part in parts for token in part.tokens] == found.tokens
        assert [offset for part in parts for offset in part.text_offset] == found.text_offset
        talk = await it.cluster.client.generate(messages=CHAT, max_tokens=8, logprobs=2, **GREEDY)
        chat = await it.openai.chat.completions.create(
            model="", messages=CHAT, max_tokens=8, logprobs=True, top_logprobs=2, **GREEDY
        )
        for got, one in zip(chat.choices[0].logprobs.content, talk.logprobs, strict=True):
            assert got.logprob == pytest.approx(one.logprob, abs=1e-4)
            assert [top.logprob for top in got.top_logprobs] == pytest.approx(list(one.top.values()), abs=1e-4)
            assert bytes(got.bytes).decode() == got.token


async def test_several_prompts_are_several_choices(door: Any) -> None:
    """Each prompt has its own tokens; in a stream every message has its choice's index, and usage is the sum."""
    prompts = [PROMPT, "Create a", "Return the"]
    async with door() as it:
        alone = [
            (await it.openai.completions.create(model="", prompt=one, max_tokens=12, **GREEDY)).choices[0].text
            for one in prompts
        ]
        assert len(set(alone)) == 3
        whole = await it.openai.completions.create(model="", prompt=prompts, max_tokens=12, **GREEDY)
        assert [(one.index, one.text) for one in whole.choices] == list(enumerate(alone))
        stream = await it.openai.completions.create(
            model="", prompt=prompts, max_tokens=12, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
        texts = ["", "", ""]
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == alone
        assert chunk.usage.completion_tokens == whole.usage.completion_tokens
        with pytest.raises(openai.BadRequestError):
            await it.openai.completions.create(model="", prompt=[PROMPT, ""], max_tokens=12)
        await until(lambda: not any(it.cluster.held().values()), 1.0, lambda: "one refused prompt ends the others")


# ---- the stream


async def test_a_stream_has_one_event_for_each_message_and_none_before_the_first_token(door: Any) -> None:
    """The first event has a token, the last token's event has the reason, then come usage and [DONE]: the times that
    load generators measure are the times of tokens."""
    async with door() as it:
        body = {"prompt": PROMPT, "max_tokens": 6, "return_token_ids": True}
        async with it.stream(**body, stream_options={"include_usage": True, "continuous_usage_stats": True}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            *tokens, usage = events([line async for line in answer.aiter_lines()])
        assert all(one["choices"][0]["token_ids"] for one in tokens)
        counts = [one["usage"]["completion_tokens"] for one in tokens]
        assert counts == sorted(set(counts))
        assert counts[-1] == 6
        assert [one["choices"][0]["finish_reason"] for one in tokens][-1] == "length"
        assert usage["choices"] == []
        async with it.stream(**body) as answer:
            assert all("usage" not in one for one in events([line async for line in answer.aiter_lines()]))


async def test_n_completions_are_those_of_grpc(door: Any) -> None:
    """Two prompts have three answers each, with the tokens of their own seeds; each prompt is counted once."""
    prompts = [PROMPT, "Return the largest"]
    async with door() as it:
        expected = [
            one for prompt in prompts for one in await it.cluster.client.generate(prompt, n=3, max_tokens=12, **SEEDED)
        ]
        body = {"model": "", "prompt": prompts, "n": 3, "max_tokens": 12, **SEEDED}
        whole = await it.openai.completions.create(**body, best_of=3)
        assert [one.index for one in whole.choices] == list(range(6))
        assert [one.text for one in whole.choices] == [one.text for one in expected]
        assert len({one.text for one in whole.choices}) == 6
        assert whole.usage.prompt_tokens == expected[0].receipt.prompt_tokens + expected[3].receipt.prompt_tokens
        assert whole.usage.completion_tokens == sum(len(one.token_ids) for one in expected)
        texts, ends = [""] * 6, 0
        async for chunk in await it.openai.completions.create(**body, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
            ends += chunk.choices[0].finish_reason is not None
        assert texts == [one.text for one in expected]
        assert ends == 6
        chat = await it.openai.chat.completions.create(model="", messages=CHAT, n=2, max_tokens=12, **SEEDED)
        expected = await it.cluster.client.generate(messages=CHAT, n=2, max_tokens=12, **SEEDED)
        assert [one.message.content for one in chat.choices] == [one.text for one in expected]


async def test_a_stop_string_ends_the_text_and_is_named(door: Any) -> None:
    """Also a stop string that spans tokens; with or without it in the text, streamed or not."""
    async with door() as it:
        free = await it.cluster.client.generate(PROMPT, max_tokens=40, ignore_eos=True, **GREEDY)
        stop = free.text[20:25]
        at = free.text.index(stop)
        for include in (False, True):
            body = {"model": "", "prompt": PROMPT, "max_tokens": 40, "stop": ["\x00 not there", stop], **GREEDY}
            extra = {"include_stop_str_in_output": include, "ignore_eos": True}
            whole = await it.openai.completions.create(**body, extra_body=extra)
            choice = whole.choices[0]
            assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
            assert choice.text == free.text[: at + len(stop) * include]
            stream = await it.openai.completions.create(**body, stream=True, extra_body=extra)
            pieces = [chunk.choices[0] async for chunk in stream]
            assert "".join(one.text for one in pieces) == choice.text
            assert pieces[-1].stop_reason == stop
        single = await it.openai.chat.completions.create(
            model="", messages=CHAT, temperature=0.0, max_tokens=40, stop="e"
        )
        assert "e" not in single.choices[0].message.content
        assert single.choices[0].finish_reason == "stop"


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}


async def test_structured_output_fits_what_was_asked_for(door: Any) -> None:
    """A schema, any JSON object, a regular expression, choices and rules, in OpenAI's fields and in vLLM's."""
    async with door() as it:

        async def ask(**body: Any) -> str:
            given = {"messages": CHAT, "max_tokens": 300, "temperature": 0.8, "seed": 3, **body}
            answer = await it.raw.post("/v1/chat/completions", json=given)
            assert answer.status_code == 200, answer.text
            choice = answer.json()["choices"][0]
            assert choice["finish_reason"] == "stop"
            text: str = choice["message"]["content"]
            return text

        for body in (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            {"structured_outputs": {"json": SCHEMA}},
            {"guided_json": json.dumps(SCHEMA)},
        ):
            found = json.loads(await ask(**body))
            assert found.keys() == {"name", "ok"}
            assert isinstance(found["ok"], bool)
        for body in ({"structured_outputs": {"regex": "[ab]{3}[0-9]"}}, {"guided_regex": "[ab]{3}[0-9]"}):
            assert re.fullmatch("[ab]{3}[0-9]", await ask(**body))
        for body in ({"structured_outputs": {"choice": ["yes", "no"]}}, {"guided_choice": ["yes", "no"]}):
            assert await ask(**body) in ("yes", "no")
        for body in ({"structured_outputs": {"grammar": ROOT}}, {"guided_grammar": ROOT}):
            assert await ask(**body) in ("tick", "tock")
        free = await it.raw.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 60, "temperature": 0.8})
        assert free.json()["choices"][0]["message"]["content"] not in ("tick", "tock")


TOOL = {"type": "function", "function": {"name": "heights", "parameters": {"type": "object", "properties": {}}}}
CALLS = 'I look. <tool_call>{"name": "heights", "arguments": {"of": "Eiger"}}</tool_call>' * 2


async def test_tool_calls_come_as_openai_has_them(door: Any, tmp_path: Path) -> None:
    """Calls are returned complete and streamed; text before them is kept; without tools all is text. The model is
    forced to write them."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    (folder / "chat_template.jinja").write_text(HERMES)
    async with door(model=str(folder)) as it:
        forced = {"extra_body": {"structured_outputs": {"choice": [CALLS]}}, "temperature": 0.0}
        given = {"model": "", "messages": CHAT, "max_tokens": 300, **forced}
        whole = (await it.openai.chat.completions.create(**given, tools=[TOOL])).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content == "I look. " * 2
        assert [call.function.name for call in whole.message.tool_calls] == ["heights"] * 2
        assert [json.loads(call.function.arguments) for call in whole.message.tool_calls] == [{"of": "Eiger"}] * 2
        stream = await it.openai.chat.completions.create(**given, tools=[TOOL], stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.message.content
        assert streamed_calls(chunks) == [
            (call.function.name, call.function.arguments) for call in whole.message.tool_calls
        ]
        assert chunks[-1].finish_reason == "tool_calls"
        for without in ({}, {"tools": [TOOL], "tool_choice": "none"}):
            plain = (await it.openai.chat.completions.create(**given, **without)).choices[0]
            assert (plain.message.content, plain.message.tool_calls, plain.finish_reason) == (CALLS, None, "stop")
        answered = [*CHAT, whole.message, {"role": "tool", "tool_call_id": "x", "content": "3967 m"}]
        second = await it.openai.chat.completions.create(
            model="", messages=answered, tools=[TOOL], max_tokens=5, temperature=0.0
        )
        template = ChatTemplate(HERMES, {})
        call = {"function": {"arguments": {"of": "Eiger"}, "name": "heights"}}  # in its order
        turns = [*CHAT, {"role": "assistant", "content": "I look. " * 2, "tool_calls": [call] * 2}]
        turns += [{"role": "tool", "content": "3967 m"}]
        ids = await it.raw.post(
            "/tokenize", json={"prompt": template.render(turns, [TOOL]), "add_special_tokens": False}
        )
        assert second.usage.prompt_tokens == ids.json()["count"]


PEAK = {"type": "object", "properties": {"of": {"enum": ["Eiger", "Mönch"]}}, "required": ["of"]}
HEIGHT = {"type": "function", "function": {"name": "height", "parameters": PEAK}}
TOOLS = [HEIGHT, {"type": "function", "function": {"name": "now"}}]
NOW = {"type": "function", "function": {"name": "now"}}
IMPOSSIBLE = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 2, "maximum": 1}}}
UNFORCEABLE: list[tuple[dict[str, Any], str]] = [
    ({"tools": None}, "tool_choice"),
    ({"tools": []}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "depth"}}}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "\ud800"}}}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "tool_choice"),
    ({"guided_regex": "a"}, "tool_choice"),
    ({"ignore_eos": True}, "ignore_eos"),
    ({"tool_choice": NOW, "min_tokens": 150}, "min_tokens"),
    ({"tools": [{"function": {"name": "\ud800"}}]}, "tools"),
    ({"tools": [NOW, {"function": {"name": "f", "parameters": {"not": {}}}}]}, "tools[1].function.parameters"),
    (
        {"tools": [{"function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"not": {}}}}}}]},
        "tools[0].function.parameters.properties.x.not",
    ),
    ({"tools": [{"function": {"name": "f", "parameters": IMPOSSIBLE}}]}, "tools"),
]


@pytest.mark.parametrize("template", [HERMES, LLAMA], ids=["hermes", "llama"])
async def test_a_forced_call_is_the_whole_answer(door: Any, tmp_path: Path, template: str) -> None:
    """An answer is one call or more of any tool, or one of a named tool, with arguments that fit its schema, streamed
    or not. Without forcing, the model writes none. A call that cannot be forced is refused with the field's name."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    (folder / "chat_template.jinja").write_text(template)
    async with door(model=str(folder)) as it:
        ask = it.openai.chat.completions.create
        given = {"model": "", "messages": CHAT, "tools": TOOLS, "max_tokens": 400, "temperature": 1.0}
        given["logit_bias"] = {"0": 30.0}  # end where the grammar allows it: this model has not learnt to call
        for seed, longer in itertools.product(range(2), (False, True)):
            # where the answer may not end yet, another call follows
            extra = {"extra_body": {"min_tokens": 100}} if longer else {"parallel_tool_calls": False}
            how = {**given, "seed": seed, "tool_choice": "required", **extra}
            whole = (await ask(**how)).choices[0]
            assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
            calls = [(one.function.name, json.loads(one.function.arguments)) for one in whole.message.tool_calls]
            for name, arguments in calls:
                jsonschema.validate(arguments, PEAK if name == "height" else {"const": {}})
            assert (len(calls) > 1) == longer
            chunks = [chunk.choices[0] async for chunk in await ask(**how, stream=True)]
            assert "".join(chunk.delta.content or "" for chunk in chunks) == ""
            assert [(name, json.loads(arguments)) for name, arguments in streamed_calls(chunks)] == calls
            assert chunks[-1].finish_reason == "tool_calls"
        named = (await ask(**given, tool_choice=NOW)).choices[0]
        assert (named.finish_reason, len(named.message.tool_calls)) == ("stop", 1)
        function = named.message.tool_calls[0].function
        assert (function.name, json.loads(function.arguments)) == ("now", {})
        free = (await ask(**{**given, "logit_bias": {}, "max_tokens": 60})).choices[0]
        assert free.message.tool_calls is None
        cut = (await ask(**{**given, "max_tokens": 5}, tool_choice="required")).choices[0]
        assert (cut.message.tool_calls, cut.finish_reason) == (None, "length")
        for body, param in UNFORCEABLE:
            body = {"messages": CHAT, "tools": TOOLS, "tool_choice": "required", **body}
            refused = await it.raw.post(
                "/v1/chat/completions", content=json.dumps(body), headers={"content-type": "application/json"}
            )
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), (body, refused.text)
        assert not any(it.cluster.held().values())


async def test_echo_and_prompt_log_probabilities_score_the_prompt(door: Any) -> None:
    """As evaluation harnesses use it: the prompt's tokens before the answer's, each but the first with a score."""
    async with door() as it:
        expected = await it.cluster.client.generate(PROMPT, max_tokens=3, logprobs=2, prompt_logprobs=2, **GREEDY)
        given = {"model": "", "prompt": PROMPT, "max_tokens": 3, **GREEDY}
        echo = (await it.openai.completions.create(**given, echo=True, logprobs=2)).choices[0]
        assert echo.text == PROMPT + expected.text
        scores = echo.logprobs
        size = expected.receipt.prompt_tokens
        assert len(scores.tokens) == len(scores.token_logprobs) == len(scores.text_offset) == size + 3
        assert (scores.token_logprobs[0], scores.top_logprobs[0]) == (None, None)
        assert scores.token_logprobs[1:size] == pytest.approx([one.logprob for one in expected.prompt_logprobs])
        assert scores.token_logprobs[size:] == pytest.approx([one.logprob for one in expected.logprobs])
        stream = await it.openai.completions.create(**given, echo=True, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == echo.text
        ids = (await it.raw.post("/tokenize", json={"prompt": PROMPT})).json()["tokens"]
        by_ids = await it.openai.completions.create(**{**given, "prompt": ids}, echo=True)
        assert by_ids.choices[0].text == echo.text
        asked = {"prompt": PROMPT, "max_tokens": 3, "prompt_logprobs": 2, **GREEDY}
        first, *rest = (await it.raw.post("/v1/completions", json=asked)).json()["choices"][0]["prompt_logprobs"]
        assert first is None
        for token, one, score in zip(ids[1:], rest, expected.prompt_logprobs, strict=True):
            assert one[str(token)]["logprob"] == pytest.approx(score.logprob)
            assert {rank for value in one.values() if (rank := value["rank"])} == {1, 2}
        refused = await it.raw.post("/v1/completions", json={**asked, "stream": True})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt_logprobs")


async def test_the_receipt_and_the_request_id_are_there_when_asked_for(door: Any) -> None:
    """`tandem_receipt` adds the receipt, streamed or not; the client's x-request-id is the request's id everywhere."""
    async with door() as it:
        ask = it.openai.completions.with_raw_response.create
        named = {"extra_headers": {"x-request-id": "mine-7"}}
        raw = await ask(model="", prompt=PROMPT, max_tokens=4, extra_body={"tandem_receipt": True}, **named)
        receipt = raw.parse().choices[0].tandem_receipt
        assert raw.headers["x-request-id"] == receipt["request_id"] == "mine-7"
        assert raw.parse().id == "cmpl-mine-7"
        assert receipt["path"] == "disaggregated"
        assert sum(receipt["phases"].values()) == pytest.approx(receipt["ttft"], rel=1e-6)
        async with it.stream(prompt=PROMPT, max_tokens=4, tandem_receipt=True) as answer:
            *_, last = events([line async for line in answer.aiter_lines()])
            assert last["choices"][0]["tandem_receipt"]["request_id"] == answer.headers["x-request-id"]
        plain = (await ask(model="", prompt=PROMPT, max_tokens=4)).parse()
        assert not hasattr(plain.choices[0], "tandem_receipt")


# ---- clients that leave


async def leave(it: Door, stream: bool) -> None:
    """Sends a request whose client disconnects: in a stream after its first event, otherwise while the answer is
    computed."""
    if stream:
        async with it.stream(prompt=PROMPT, max_tokens=400) as answer:
            await anext(answer.aiter_lines())
        return
    body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}
    waiting = asyncio.create_task(it.raw.post("/v1/completions", json=body))
    await until(lambda: it.cluster.held()["decode-0"] > 0, 10)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_hangs_up_frees_every_block_within_a_second(
    door: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Blocks are freed on both sides. Without watching the connection they stay held, so the test can fail."""
    go = asyncio.Event()  # never: nothing ends by itself
    wrap = lambda inner, who: Harm(inner, before=hold_until(go)) if who.startswith("decode") else inner  # noqa: E731
    async with door(wrap=wrap) as it:
        await leave(it, stream)
        await until(lambda: not any(it.cluster.held().values()), 1.0, it.cluster.held)
        assert await it.cluster.ledgers_balance()

        async def never(receive: Any) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(http_answers, "_gone", never)
        await leave(it, stream)
        with pytest.raises(AssertionError):
            await until(lambda: not any(it.cluster.held().values()), 1.0)
        await it.cluster.router.http.stop(0.0)
        await until(lambda: not any(it.cluster.held().values()), 1.0)  # the end of the router frees them as well


async def test_large_requests_of_a_tenant_are_bounded_until_they_end(door: Any) -> None:
    """A field that no prompt shows is kept as long as its request runs, and its body counts as long. In the control it
    is small."""
    large, small = ({"messages": CHAT, "chat_template_kwargs": {"x": "x" * size}} for size in (100_000, 1000))
    go = asyncio.Event()
    wrap = lambda inner, who: Harm(inner, before=hold_until(go)) if who.startswith("decode") else inner  # noqa: E731
    async with door(wrap=wrap) as it:
        it.cluster.router.bodies._kept._most = 150_000
        ask = partial(it.raw.post, "/v1/chat/completions")
        held = asyncio.create_task(ask(json={**large, "max_tokens": 2}))
        await until(lambda: it.cluster.router.bodies._kept.total() > 100_000, 10)
        refused = await ask(json={**large, "max_tokens": 2})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "BODIES")
        go.set()
        assert (await ask(json={**small, "max_tokens": 2})).status_code == 200
        assert (await held).status_code == 200
        assert (await ask(json={**large, "max_tokens": 2})).status_code == 200
        assert it.cluster.router.bodies._kept.total() == 0


# ---- what goes wrong


def allowed_tools(*names: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}


BAD: list[tuple[str, Any, int, str | None]] = [
    # (what, body: fields in addition to a valid prompt, or bytes; status, param)
    ("not JSON", b"{", 400, "body"),
    ("not an object", b"[1]", 400, "body"),
    ("not UTF-8", b'{"prompt": "caf\xe9"}', 400, "body"),
    ("UTF-16", '{"prompt": "x"}'.encode("utf-16"), 400, "body"),
    ("NaN", b'{"prompt": "x", "temperature": NaN}', 400, "body"),
    ("1e400", b'{"prompt": "x", "temperature": 1e400}', 400, "body"),
    ("a number of 5,000 digits", b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", 400, "body"),
    ("a key twice", b'{"prompt": "x", "prompt": "y"}', 400, "body"),
    ("depth 100,000", b'{"prompt": "x", "user": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "body"),
    ("a lone surrogate", b'{"prompt": "\\ud800"}', 400, "prompt"),
    ("a lone surrogate as salt", b'{"prompt": "x", "request_id": "\\ud800"}', 400, "request_id"),
    ("5 MB", b'{"prompt": "' + b"x" * 5_000_000 + b'"}', 429, "body"),
    ("no prompt", b"{}", 400, "prompt"),
    ("empty prompt", {"prompt": ""}, 400, "prompt"),
    ("no prompts", {"prompt": []}, 400, "prompt"),
    ("129 prompts", {"prompt": ["x"] * 129}, 400, "prompt"),
    ("a prompt of another kind", {"prompt": {"x": 1}}, 400, "prompt"),
    ("ids and text mixed", {"prompt": [1, "x"]}, 400, "prompt"),
    ("true as an id", {"prompt": [1, True]}, 400, "prompt"),
    ("id over 2^63", {"prompt": [2**63]}, 400, "prompt"),
    ("id of the vocabulary's size", {"prompt": [1, 10**6]}, 400, "prompt[1]"),
    ("prompt over the context", {"prompt": [5] * 5000}, 400, "prompt"),
    ("max_tokens 0", {"max_tokens": 0}, 400, "max_tokens"),
    ("max_tokens huge", {"max_tokens": 2**31 - 1}, 400, "prompt"),
    ("max_tokens over 2^63", {"max_tokens": 2**63}, 400, "max_tokens"),
    ("max_tokens as text", {"max_tokens": "5"}, 400, "max_tokens"),
    ("temperature negative", {"temperature": -0.1}, 400, "temperature"),
    ("top_p 0", {"top_p": 0}, 400, "top_p"),
    ("top_k -2", {"top_k": -2}, 400, "top_k"),
    ("seed -2", {"seed": -2}, 400, "seed"),
    ("seed 2^64", {"seed": 2**64}, 400, "seed"),
    ("logprobs a million", {"logprobs": 10**6}, 400, "logprobs"),
    ("bias out of the vocabulary", {"logit_bias": {"99999999": 1}}, 400, "logit_bias[99999999]"),
    ("bias of no number", {"logit_bias": {"x": 1}}, 400, "logit_bias.x.[key]"),
    ("long request id", {"request_id": "x" * 1000}, 400, "request_id"),
    ("header injection", {"request_id": "a\r\nx: y"}, 400, "request_id"),
    ("unknown model", {"model": "gpt-4"}, 404, "model"),
    ("n 0", {"n": 0}, 400, "n"),
    ("n 10^9", {"n": 10**9}, 400, "n"),
    ("best_of", {"best_of": 5}, 400, "best_of"),
    ("stop of 5", {"stop": 5}, 400, "stop.str"),
    ("an empty stop string", {"stop": ["x", ""]}, 400, "stop[1]"),
    ("a long stop string", {"stop": "x" * 1000}, 400, "stop[0]"),
    ("17 stop strings", {"stop": ["x"] * 17}, 400, "stop"),
    ("a lone surrogate in a stop string", b'{"prompt": "x", "stop": "\\udfff"}', 400, "stop[0]"),
    ("echo and other log probabilities", {"echo": True, "logprobs": 1, "prompt_logprobs": 2}, 400, "prompt_logprobs"),
    ("scores of many prompts", {"prompt": [[5] * 100] * 127, "prompt_logprobs": 20}, 400, "prompt_logprobs"),
    ("prompt_logprobs a million", {"prompt_logprobs": 10**6}, 400, "prompt_logprobs"),
    ("a format of no kind", {"response_format": {"type": "xml"}}, 400, "response_format.type"),
    (
        "a format without its schema",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        400,
        "response_format.json_schema.schema",
    ),
    (
        "a schema that would not be kept",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
        400,
        "response_format.json_schema.not",
    ),
    ("a regex that is none", {"structured_outputs": {"regex": "("}}, 400, "structured_outputs.regex"),
    ("no allowed token", {"allowed_token_ids": []}, 400, "allowed_token_ids"),
    ("1,025 allowed tokens", {"allowed_token_ids": [1] * 1025}, 400, "allowed_token_ids"),
    ("an allowed token that there is not", {"allowed_token_ids": [1, 10**6]}, 400, "allowed_token_ids[1]"),
    ("a bad word of spaces", {"bad_words": ["x", " "]}, 400, "bad_words[1]"),
    ("half a character as a bad word", b'{"prompt": "x", "bad_words": ["\\udfff"]}', 400, "bad_words[0]"),
    ("129 bad words", {"bad_words": ["x"] * 129}, 400, "bad_words"),
    ("a suffix for a model without", {"suffix": "x"}, 400, "suffix"),
    ("a suffix of token ids", {"prompt": [1, 2], "suffix": "x"}, 400, "suffix"),
    ("a suffix and echo", {"suffix": "x", "echo": True}, 400, "suffix"),
    ("no choice", {"guided_choice": []}, 400, "guided_choice.choice"),
    ("two grammars", {"guided_regex": "a", "structured_outputs": {"regex": "a"}}, 400, "guided_regex"),
    (
        "a grammar's unknown part",
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        400,
        "structured_outputs.whitespace_pattern",
    ),
    (
        "half a character as a name",
        b'{"prompt": "x", "logit_bias": {"\\ud800": 1}}',
        400,
        "logit_bias.\ufffd\ufffd\ufffd.[key]",
    ),
    (
        "half a character in a schema that is text",
        {"guided_json": '{"type": "object", "properties": {"\\ud800": {"type": "x"}}}'},
        400,
        "guided_json.json_schema.properties.\\ud800.type",
    ),
    ("transfer parameters", {"kv_transfer_params": {"remote_host": "evil"}}, 400, "kv_transfer_params"),
    ("special tokens of no kind", {"add_special_tokens": "no"}, 400, "add_special_tokens"),
    ("an end at repetitions", {"repetition_detection": {"max_pattern_size": 4}}, 400, "repetition_detection"),
]
BAD_CHAT: list[tuple[str, Any, int, str | None]] = [
    ("no messages", {"messages": []}, 400, "messages"),
    ("no role", {"messages": [{"content": "x"}]}, 400, "messages.0.role"),
    ("an image", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content[0]"),
    ("content 5", {"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
    ("a lone surrogate", b'{"messages": [{"role": "user", "content": "\\udfff"}]}', 400, "messages[0].content"),
    ("a bad role", b'{"messages": [{"role": "\\udfff", "content": ""}]}', 400, "messages[0].role"),
    ("no call", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, 400, "messages[0].tool_calls[0]"),
    ("a template", {"messages": CHAT, "chat_template": "{{ 1 }}"}, 400, "chat_template"),
    ("a variable of ours", {"messages": CHAT, "chat_template_kwargs": {"tools": 1}}, 400, "chat_template_kwargs.tools"),
    ("documents for a model without", {"messages": CHAT, "documents": [{"text": "x"}]}, 400, "documents"),
    ("an effort of no kind", {"messages": CHAT, "reasoning_effort": "much"}, 400, "reasoning_effort"),
    (
        "a question to go on",
        {"messages": CHAT[-1:], "continue_final_message": True},
        400,
        "continue_final_message",
    ),
    ("tools for a model without", {"messages": CHAT, "tools": [{"function": {"name": "f"}}]}, 400, "tools"),
    ("a tool without a name", {"messages": CHAT, "tools": [{"function": {}}]}, 400, "tools[0]"),
    ("129 tools", {"messages": CHAT, "tools": [{"function": {"name": "f"}}] * 129}, 400, "tools"),
    ("a forced tool without tools", {"messages": CHAT, "tool_choice": "required"}, 400, "tool_choice"),
    ("a choice of no kind", {"messages": CHAT, "tool_choice": "sometimes"}, 400, "tool_choice"),
    ("a choice of no function", {"messages": CHAT, "tool_choice": {"type": "function"}}, 400, "tool_choice"),
    ("no allowed tool", {"messages": CHAT, "tool_choice": allowed_tools()}, 400, "tool_choice.allowed_tools.tools"),
    ("an unknown one", {"messages": CHAT, "tool_choice": allowed_tools("f")}, 400, "tool_choice.allowed_tools.tools"),
    ("in an unknown way", {"messages": CHAT, "tool_choice": {"type": "allowed_tools"}}, 400, "tool_choice"),
    (
        "half a character in a tool",
        b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"function": {"name": "\\ud800"}}]}',
        400,
        "tools",
    ),
    ("top_logprobs alone", {"messages": CHAT, "top_logprobs": 3}, 400, "top_logprobs"),
    ("21 top_logprobs", {"messages": CHAT, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    ("no completion tokens", {"messages": CHAT, "max_completion_tokens": 0}, 400, "max_completion_tokens"),
    ("echo", {"messages": CHAT, "echo": True}, 400, "echo"),
    ("a search of the web", {"messages": CHAT, "web_search_options": {}}, 400, "web_search_options"),
]


async def test_bad_input_is_refused_by_its_field_in_openais_shape(door: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every case gets its status within 100 ms (except a huge body), streamed or not, and no worker gets a request."""
    async with door() as it:
        engine = it.cluster.workers["decode-0"].engine
        reserve = engine.reserve
        monkeypatch.setattr(engine, "reserve", lambda *_: pytest.fail("a bad request reached a worker"))
        cases = [("/v1/completions", {"prompt": PROMPT}, *case) for case in BAD]
        cases += [("/v1/chat/completions", {}, *case) for case in BAD_CHAT]
        json_type = {"content-type": "application/json"}
        for path, good, name, body, status, param in cases:
            for stream in (False, True):
                if isinstance(body, bytes):
                    content = body.replace(b"{", b'{"stream": true, ', 1) if stream and b": " in body else body
                else:
                    content = json.dumps({**good, "stream": stream, **body}).encode()
                took = []
                while not took or (min(took) > 0.1 and len(content) <= 10**6 and len(took) < 10):
                    watch = Stopwatch()  # once more where others used the machine
                    answer = await it.raw.post(path, content=content, headers=json_type)
                    took.append(watch.seconds)
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (status, param), (name, error)
                assert set(error) == {"message", "type", "param", "code"}
                assert error["message"]
                assert answer.headers["x-should-retry"] == "false"
                assert "x" not in answer.headers
                assert min(took) < 0.1 or len(content) > 10**6, f"{name} took {min(took):.3f} s"
        plain = await it.raw.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
        assert (plain.status_code, plain.json()["error"]["param"]) == (400, "content-type")
        assert (await it.raw.get("/v1/completions")).status_code == 405
        assert (await it.raw.get("/v1/nothing")).json()["error"]["code"] == "NOT_FOUND"
        with pytest.raises(openai.NotFoundError):
            await it.openai.completions.create(model="gpt-4", prompt=PROMPT)
        monkeypatch.setattr(engine, "reserve", reserve)
        assert (await it.openai.completions.create(model="", prompt=PROMPT)).choices[0].text


async def test_no_depth_of_a_body_is_a_bug(door: Any) -> None:
    """A body that can just be parsed may be too deep to be encoded again for the chat template or the grammar."""
    json_type = {"content-type": "application/json"}
    async with door() as it:
        for depth in (*range(100, 135, 3), *range(840, 1010, 40)):
            deep = "[" * depth + "]" * depth
            for field in (
                f'"tools": [{{"function": {{"name": "f", "x": {deep}}}}}]',
                f'"guided_json": {deep}',
                f'"structured_outputs": {{"json": {{"enum": [{deep}]}}}}, "max_tokens": 1',
            ):
                body = f'{{"messages": [{{"role": "user", "content": "x"}}], {field}}}'
                answer = await it.raw.post("/v1/chat/completions", content=body, headers=json_type)
                assert answer.status_code in (200, 400), (depth, answer.text)


OVER = "This model's maximum context length is 4096 tokens. However, you requested "


async def test_more_than_the_context_is_refused_in_openais_words(door: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the code and the words that clients look for, in a stream or not, and the same reason over gRPC. A
    text that cannot fit is not tokenised."""
    async with door() as it:
        for stream in (False, True):
            for said, prompt in (("4101 tokens (4100 in the prompt, 1 ", [5] * 4100), ("over ", " a" * 500_000)):
                with pytest.raises(openai.BadRequestError) as refused:
                    await it.openai.completions.create(model="", prompt=prompt, max_tokens=1, stream=stream)
                error = refused.value
                assert (error.code, error.type, error.param) == (
                    "context_length_exceeded",
                    "invalid_request_error",
                    "prompt",
                )
                assert error.body["message"].startswith(OVER + said)  # type: ignore[index]
            with pytest.raises(openai.BadRequestError) as refused:
                await it.openai.chat.completions.create(model="", messages=CHAT, max_tokens=5000, stream=stream)
            assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")
            assert "5000 in the completion" in refused.value.message
        monkeypatch.setattr(
            type(it.cluster.router.models.first.generation._preprocessor._tokenizer),
            "encode",
            lambda *_, **__: pytest.fail("tokenised"),
        )
        with pytest.raises(openai.BadRequestError):
            await it.openai.completions.create(model="", prompt=" a" * 500_000)
        with pytest.raises(InvalidRequest) as ours:
            await it.cluster.client.generate([5] * 5000)
        assert (ours.value.reason, ours.value.field) == ("CONTEXT_LENGTH_EXCEEDED", "token_ids")


async def test_an_id_of_the_greatest_length_names_several_prompts(door: Any) -> None:
    """The limit is 128 characters for one prompt and for a hundred."""
    async with door() as it:
        for prompts in (PROMPT, [PROMPT] * 11):
            body = {"prompt": prompts, "max_tokens": 1}
            answer = await it.raw.post("/v1/completions", json=body, headers={"x-request-id": "x" * 128})
            assert (answer.status_code, answer.headers["x-request-id"]) == (200, "x" * 128), answer.text


async def test_bodies_that_do_not_end_take_no_more_memory_than_a_tenant_may_have(
    door: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The body beyond the bound is refused at once with a retry delay; when others have ended, it is accepted."""
    monkeypatch.setattr(http_body, "MAX_TENANT_BODY_BYTES", 200_000)
    go, sent = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b'{"prompt": "x", "max_tokens": 1, "user": "' + b"x" * 150_000
        sent.set()
        await go.wait()
        yield b'"}'

    async with door(max_prompt_bytes=200_000) as it:
        headers = {"content-type": "application/json"}
        holding = asyncio.create_task(it.raw.post("/v1/completions", content=slow(), headers=headers))
        await sent.wait()
        await until(lambda: it.cluster.router.bodies.bodies.total() >= 150_000, 10)
        large = {"prompt": "x", "max_tokens": 1, "user": "y" * 100_000}
        refused = await it.raw.post("/v1/completions", json=large)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "BODIES")
        assert refused.headers["x-should-retry"] == "true"
        assert (await it.raw.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})).status_code == 200
        go.set()
        assert (await holding).status_code == 200
        assert (await it.raw.post("/v1/completions", json=large)).status_code == 200


async def test_a_body_without_a_length_is_cut_off_at_the_bound(door: Any) -> None:
    """Chunks are counted as they arrive: a body beyond the bound is refused before the rest has been sent."""
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 200_000_000:
            sent += 65_536
            yield b"x" * 65_536

    async with door(max_prompt_bytes=1_000_000) as it:
        headers = {"content-type": "application/json"}
        async with asyncio.timeout(60):
            answer = await it.raw.post("/v1/completions", content=chunks(), headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "TOO_LARGE")


async def test_a_head_that_does_not_end_is_hung_up_on(door: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is closed after 64 KiB of headers. With a higher bound the server continues to read, so the test
    can fail."""

    async def taken(it: Door, most: int) -> int:
        host, port = it.cluster.router.http.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nx: ")
        sent, hung_up = 0, asyncio.create_task(reader.read())
        while sent < most and not hung_up.done():
            writer.write(b"y" * 16_384)
            sent += 16_384
            await asyncio.sleep(0.002)
        writer.close()
        hung_up.cancel()
        return sent

    async with door() as it:
        assert await taken(it, 2_000_000) < 1_000_000
        monkeypatch.setattr(http_server, "MAX_HEAD_BYTES", 10**9)
        assert await taken(it, 2_000_000) >= 2_000_000


async def test_what_asks_for_nothing_is_accepted(door: Any) -> None:
    """Nulls, unknown fields, and values that mean "off" in vLLM are accepted."""
    nothing = {
        "n": 1,
        "priority": None,
        "stop": None,
        "echo": False,
        "logprobs": None,
        "top_k": -1,
        "response_format": {"type": "text"},
    }
    async with door() as it:
        body = {"prompt": PROMPT, "user": "me", "service_tier": "auto", "temperature": 0, **nothing}
        answer = await it.raw.post("/v1/completions", json=body)
        expected = await it.cluster.client.generate(PROMPT, max_tokens=16, **GREEDY)
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["text"] == expected.text


async def test_a_full_cluster_says_when_to_come_back(door: Any) -> None:
    """The answer is 429 with Retry-After, also for a stream, since nothing was sent yet; 503 if there are no
    workers."""
    go = asyncio.Event()
    wrap = lambda inner, who: Harm(inner, before=hold_until(go)) if who.startswith("decode") else inner  # noqa: E731
    async with door(wrap=wrap, max_num_seqs=1, queue_timeout_s=0.3) as it:
        holding = asyncio.create_task(it.openai.completions.create(model="", prompt=PROMPT, max_tokens=4))
        await until(lambda: it.cluster.held()["decode-0"] > 0, 10)
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as caught:
                await it.openai.completions.create(model="", prompt=PROMPT, stream=stream)
            assert int(caught.value.response.headers["retry-after"]) >= 1
            assert caught.value.response.headers["x-should-retry"] == "true"
            assert caught.value.code == "QUEUE_TIMEOUT"
        go.set()
        assert (await holding).usage.completion_tokens == 4
    async with door(prefill=0, decode=0) as it:
        assert (await it.raw.get("/health")).status_code == 503
        with pytest.raises(openai.InternalServerError) as nobody:
            await it.openai.completions.create(model="", prompt=PROMPT)
        assert (nobody.value.status_code, nobody.value.code) == (503, "NO_WORKER")
        assert "retry-after" in nobody.value.response.headers


async def test_a_stream_that_breaks_says_so_and_is_never_done(door: Any) -> None:
    """If the decode worker ends in mid-stream and no other can continue, the stream has an error event and no [DONE],
    and the SDK raises."""
    async with door(max_attempts=1) as it:
        slow_down(it.cluster.workers["decode-0"])  # no stream is over before its worker ends
        lines: list[str] = []
        async with it.stream(prompt=PROMPT, max_tokens=1500) as answer:
            async for line in answer.aiter_lines():
                lines.append(line)
                if len(lines) == 5:
                    await it.cluster.workers.pop("decode-0").stop(0.0)
        assert "[DONE]" not in "".join(lines)
        assert json.loads([line for line in lines if line][-1].removeprefix("data: "))["error"]["code"] == (
            "RESUME_FAILED"
        )
        slow_down(await it.cluster.start_worker("decode-0"))
        await it.cluster.seen(2)
        stream = await it.openai.completions.create(
            model="", prompt=PROMPT, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        with pytest.raises(openai.APIError):
            async for _ in stream:
                if it.cluster.workers.get("decode-0"):
                    await it.cluster.workers.pop("decode-0").stop(0.0)


async def test_a_stopping_router_ends_its_streams_in_order(door: Any) -> None:
    """Within the grace period a stream runs to its end; after it, an error event ends it. New connections are
    refused."""
    async with door() as it:
        server = it.cluster.router.http
        async with it.stream(prompt=PROMPT, max_tokens=60) as answer:
            lines = answer.aiter_lines()
            got = [await anext(lines)]
            stopping = asyncio.create_task(server.stop(30.0))
            got += [line async for line in lines]
        assert events(got)[-1]["choices"][0]["finish_reason"] == "length"
        await stopping
        with pytest.raises(httpx2.ConnectError):
            await it.raw.get("/health")
    async with door() as it:
        slow_down(it.cluster.workers["decode-0"])
        async with it.stream(prompt=PROMPT, max_tokens=1500) as answer:
            lines = answer.aiter_lines()
            got = [await anext(lines)]
            stopping = asyncio.create_task(it.cluster.router.http.stop(0.0))
            got += [line async for line in lines]
        await stopping
        assert json.loads([line for line in got if line][-1].removeprefix("data: "))["error"]["code"] == "DRAINING"
        await until(lambda: not any(it.cluster.held().values()), 1.0)


# ---- the rest


async def test_the_small_endpoints_answer(door: Any) -> None:
    """Model list, health, version, and text to ids and back."""
    async with door() as it:
        (model,) = (await it.openai.models.list()).data
        assert model.id == DEMO.name
        assert model.max_model_len == (await it.cluster.client.model_info()).max_context_tokens
        assert (await it.raw.get("/health")).status_code == 200
        assert (await it.raw.get("/version")).json()["version"]
        text = "naïve 🙂 text"
        ids = (await it.raw.post("/tokenize", json={"prompt": text})).json()
        assert ids["count"] == len(ids["tokens"])
        back = await it.raw.post("/detokenize", json={"tokens": ids["tokens"]})
        assert back.json()["prompt"] == text
        bad = await it.raw.post("/detokenize", json={"tokens": [-1]})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "tokens.0")
        headers = {"content-type": "application/json"}
        bad = await it.raw.post("/tokenize", content=b'{"prompt": "\\ud800"}', headers=headers)
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "prompt"), "a lone surrogate is no bug"


async def test_metrics_count_what_came_through_either_door(door: Any) -> None:
    """A complete stream, one whose client disconnected, and a refused one are counted over HTTP and gRPC; nothing is in
    progress afterwards."""
    async with door() as it:
        slow_down(it.cluster.workers["decode-0"])  # no stream is over before its client leaves it
        await it.cluster.client.generate("Say something.", max_tokens=3, ignore_eos=True)
        stream = it.cluster.client.stream("Say something else.", max_tokens=400, ignore_eos=True)
        async for _ in stream:
            break
        await stream.aclose()
        await it.raw.post("/v1/completions", json={"prompt": ""})
        about = f'model="{DEMO.name}",'
        idle = f'tandem_inflight_requests{{{about}pool="router",worker="router-0"}} 0.0'
        counted = it.cluster.router._exposition.text
        await until(lambda: idle.encode() in counted(), 5.0)
        said = (await it.raw.get("/metrics")).text
        for how, why in (("ok", ""), ("cancelled", ""), ("refused", "INVALID_REQUEST")):
            own = f'outcome="{how}",pool="router",reason="{why}",worker="router-0"'
            assert f"tandem_requests_total{{{about}{own}}} 1.0" in said


async def test_sampling_that_nobody_asked_for_is_the_checkpoints(door: Any, tmp_path: Path) -> None:
    """As in vLLM: generation_config.json has the defaults, otherwise temperature 1; completions have 16 tokens."""
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 7, "eos_token_id": 0}')
    assert Defaults.load(tmp_path) == Defaults(temperature=0.5, top_k=7)
    (tmp_path / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(CheckpointRefused):
        Defaults.load(tmp_path)
    assert Defaults.load(tmp_path / "nowhere") == Defaults()
    async with door() as it:
        ours = await it.cluster.client.generate(PROMPT, max_tokens=16, temperature=1.0, seed=3, ignore_eos=True)
        answer = await it.raw.post("/v1/completions", json={"prompt": PROMPT, "seed": 3, "ignore_eos": True})
        assert answer.json()["choices"][0]["text"] == ours.text
        assert answer.json()["usage"]["completion_tokens"] == 16


async def test_without_the_setting_nothing_listens(door: Any) -> None:
    """Without http_port there is no HTTP server."""
    async with door(http_port=None) as it:
        assert it.cluster.router.http.address == ""


async def test_a_checkpoint_without_a_tokenizer_serves_ids(door: Any, tiny: Path) -> None:
    """Ids in the request and the answer equal gRPC's; text is refused with the field's name, and log probabilities name
    tokens by id."""
    async with door(model=str(tiny)) as it:
        expected = await it.cluster.client.generate([5, 6, 7], max_tokens=6, ignore_eos=True, **GREEDY)
        body = {"prompt": [5, 6, 7], "max_tokens": 6, "ignore_eos": True, "return_token_ids": True, "logprobs": 1}
        choice = (await it.raw.post("/v1/completions", json={**body, **GREEDY})).json()["choices"][0]
        assert choice["token_ids"] == expected.token_ids
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in expected.token_ids]
        refused = await it.raw.post("/v1/completions", json={"prompt": "hello"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
