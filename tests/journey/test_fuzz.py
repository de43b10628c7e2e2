"""Any input over gRPC and HTTP has a documented answer and stops no process.

Requests are made of what the protocol (`tests/support/fuzz.py`) and the bodies' models say they have, so that new
fields are tried as well. By hand, with other examples each time and as many as one likes:
FUZZ_EXAMPLES=5000 pytest tests/journey/test_fuzz.py
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from services.router.frontend.anthropic import messages_body
from services.router.frontend.openai import openai_protocol, responses_body
from services.router.preprocess import preprocessor
from tests.support import oracle
from tests.support.fuzz import CONTEXT, GOOD, SCHEMA, TOOL, Fuzz
from tests.support.templates import HERMES

DEMO = Path(__file__).parents[2] / "demo/model"
BY_HAND = int(os.environ.get("FUZZ_EXAMPLES", 0))


def bounded(examples: int) -> settings:
    """The same few examples in every run; when run by hand, many others."""
    return settings(
        max_examples=BY_HAND or examples,
        derandomize=not BY_HAND,
        database=None,
        deadline=None,
        phases=[Phase.generate, *([Phase.shrink] if BY_HAND else [])],
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture
def cluster(inside: Any, tmp_path: Path) -> Any:
    """A cluster with text, chats and tools. At its end it answers as before, and nothing is left of the requests."""

    @asynccontextmanager
    async def start() -> AsyncIterator[Any]:
        folder = tmp_path / "model"
        shutil.copytree(DEMO, folder)
        (folder / "chat_template.jinja").write_text(HERMES)
        async with inside(model=str(folder), http_port=0, max_model_len=CONTEXT, kv_blocks=512) as one:
            lives = {name: worker.incarnation for name, worker in one.workers.items()}
            yield one
            prompt = oracle.prompts(DEMO, [30])[0]
            done = await one.client.generate(prompt, max_tokens=8, ignore_eos=True)
            assert done.token_ids == oracle.greedy(DEMO, prompt, 8)
            assert (done.receipt.path, done.receipt.attempts) == ("disaggregated", 1)
            await one.freed()
            assert await one.ledgers_balance()
            assert {name: worker.incarnation for name, worker in one.workers.items()} == lives

    return start


async def each(examples: int, strategy: st.SearchStrategy[Any], check: Callable[[Any], Any]) -> None:
    """Hypothesis is not a coroutine: it runs on a thread and passes each example to this loop."""
    loop = asyncio.get_running_loop()

    @bounded(examples)
    @given(strategy)
    def run(example: Any) -> None:
        asyncio.run_coroutine_threadsafe(check(example), loop).result(60)

    await asyncio.to_thread(run)


def bug(*_: Any) -> None:
    raise RuntimeError("put here by the test")


async def test_any_bytes_over_grpc_get_a_documented_status(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer within its limits, or a refusal that names the field; what is no message is refused as such. A bug
    would be noticed."""
    async with cluster() as it, grpc.aio.insecure_channel(it.router.address) as channel:
        cases = await Fuzz.at(channel)
        await cases.cases(seed=random.randrange(2**32) if BY_HAND else 0, numbers=range(BY_HAND or 400), at_once=8)
        assert cases.outcomes["OK"] >= 10, cases.outcomes
        assert cases.outcomes["INVALID_ARGUMENT"] >= 10, cases.outcomes
        with monkeypatch.context() as broken, pytest.raises(AssertionError):
            broken.setattr(preprocessor, "build_request", bug)
            await cases.ask(GOOD[0])


# ---- what is sent over HTTP: text, because JSON can say what Python's encoder would not


def written(fields: dict[str, str]) -> str:
    return "{" + ", ".join(f"{name}: {value}" for name, value in fields.items()) + "}"


BLOCKS = [
    '{"type": "text", "text": "a"}',
    '{"type": "thinking", "thinking": "a", "signature": ""}',
    '{"type": "redacted_thinking", "data": "x"}',
    '{"type": "tool_use", "id": "x", "name": "f", "input": {"a": [1]}}',
    '{"type": "tool_result", "tool_use_id": "x", "content": [{"type": "tool_reference", "tool_name": "f"}]}',
    '{"type": "tool_result", "tool_use_id": "\\ud800", "is_error": true}',
    '{"type": "image", "source": {}}',
    '{"type": ["text"], "text": 1}',
]
OF_MESSAGES = [
    *(f"[{block}]" for block in BLOCKS),
    *(f'[{{"role": "{role}", "content": [{block}]}}]' for block in BLOCKS for role in ("user", "assistant")),
    '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}]',
    '[{"role": "system", "content": "x-anthropic-billing-header: x"}, {"role": "user", "content": "a"}]',
    '[{"name": "f", "description": "d", "input_schema": {"type": "object"}}]',
    '[{"type": "web_search_20250305", "name": "web_search"}]',
    '{"type": "enabled", "budget_tokens": 1024}',
    '{"type": "disabled"}',
    '{"type": "tool", "name": "f"}',
    '{"type": "any", "disable_parallel_tool_use": true}',
]
ITEMS = [
    '{"role": "developer", "content": "x"}',
    '{"type": "message", "role": "assistant", "id": "\\ud800", "content": [{"type": "output_text", "text": "x"}]}',
    '{"type": "reasoning", "summary": [], "encrypted_content": "tandem.1.YQ=="}',
    '{"type": "reasoning", "summary": [], "encrypted_content": "tandem.1.\u00e9"}',
    '{"type": "function_call", "call_id": "x", "name": "f", "arguments": "{\\"a\\": NaN}", "namespace": "n"}',
    '{"type": "function_call_output", "call_id": "x", "output": [{"type": "input_text", "text": "x"}]}',
    '{"type": "custom_tool_call", "call_id": "x", "name": "f", "input": "x"}',
    '{"type": "item_reference", "id": "msg_' + "0" * 52 + '"}',
    '{"type": "item_reference", "id": 5}',
]
OF_RESPONSES = [
    *(f"[{item}]" for item in ITEMS),
    f"[{', '.join(ITEMS[:1] + ITEMS[4:6])}]",
    f'"resp_{"0" * 48}"',
    '[{"type": "function", "name": "f", "parameters": {}}, {"type": "custom", "name": "g"}]',
    '[{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}, {"type": "web_search"}]',
    '{"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}',
    '{"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}',
    '{"effort": "none"}',
    '["reasoning.encrypted_content", "message.output_text.logprobs"]',
]
ANY_TEXT = st.text(st.characters(exclude_categories=[]), max_size=8)  # with lone surrogates
ATOMS = st.sampled_from(
    [
        *("null", "true", "false", "0", "1", "2", "4", "17", "-1", "1.5", "0.5", "1e400", "-1e400", "NaN", "Infinity"),
        *(str(2**31 - 1), str(2**63), str(-(2**63)), str(2**64), "9" * 400, "9" * 5000, "5e-324", "1e308"),
        *('""', '"a"', '"\\ud800"', '"\\u0000"', '"user"', '"none"', '"auto"', '"required"', '"text"', '"x\\r\\ny: z"'),
        *("[" * 900 + "]" * 900, '{"a":' * 900 + "1" + "}" * 900, "[" * 3000 + "]" * 3000, json.dumps("y" * 3000)),
        *(TOOL.decode(), SCHEMA.decode(), json.dumps(SCHEMA.decode()), "[5, 6, 7]", '["a", "b"]', '{"5": 1, "6": -2}'),
        *('{"type": "json_object"}', '{"type": "text"}', '{"regex": "[a-c]{3}"}', '{"include_usage": true}'),
        *('[{"role": "user", "content": "hi"}]', '[{"role": "user", "content": [{"type": "text", "text": "hi"}]}]'),
        *(
            '{"\\ud800": 1}',
            '{"type": "\\ud800"}',
            '[{"\\ud800": 1}]',
            '{"type": "function", "function": {"name": "f"}}',
        ),
        '{"type": "json_schema", "json_schema": {"schema": {"type": "object", "\\ud800": 1}}}',
        '[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{\\"a\\": 1}"}}]}]',
        '[{"role": "tool", "tool_call_id": "x", "content": null}]',
        *OF_MESSAGES,
        *OF_RESPONSES,
    ]
)
VALUES = st.recursive(
    ATOMS | st.integers().map(str) | ANY_TEXT.map(json.dumps),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]")
        | st.dictionaries(ANY_TEXT.map(json.dumps), inner, max_size=3).map(written)
    ),
    max_leaves=4,
)


def names(*models: Any) -> Iterable[str]:
    """The keys that a body may have, as clients spell them."""
    fields = {name: about for model in models for name, about in model.model_fields.items()}
    return sorted({about.alias or name for name, about in fields.items()} | openai_protocol.NOT_SERVED.keys())


MODELS = (openai_protocol.Completions, openai_protocol.Chat, responses_body.Responses, messages_body.Messages)
KEYS = st.sampled_from(names(*MODELS)).map(json.dumps)
OWN_KEYS = {  # keys of one endpoint alone, which are rare among all keys
    "/v1/responses": st.sampled_from(names(responses_body.Responses)).map(json.dumps),
    "/v1/messages": st.sampled_from(names(messages_body.Messages)).map(json.dumps),
    "/v1/messages/count_tokens": st.sampled_from(names(messages_body.Prompt)).map(json.dumps),
}
BODIES = {
    "/v1/completions": {'"prompt"': '"Return the"', '"max_tokens"': "4"},
    "/v1/chat/completions": {'"messages"': '[{"role": "user", "content": "hi"}]', '"max_tokens"': "4"},
    "/v1/responses": {'"input"': '"hi"', '"max_output_tokens"': "4"},
    "/v1/messages": {'"model"': '""', '"messages"': '[{"role": "user", "content": "hi"}]', '"max_tokens"': "4"},
    "/v1/messages/count_tokens": {'"model"': '""', '"messages"': '[{"role": "user", "content": "hi"}]'},
    "/tokenize": {'"prompt"': '"Return the"'},
    "/detokenize": {'"tokens"': "[5, 6]"},
}


GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


@st.composite
def bodies(draw: Any) -> tuple[str, bytes]:
    """A valid body with some fields replaced by anything; sometimes truncated, or bytes that are no body."""
    path = draw(st.sampled_from([*BODIES, *GENERATING]))
    own = [*BODIES[path], '"tokens"', '"stream"']
    keys = OWN_KEYS.get(path, KEYS) | KEYS | st.sampled_from(own) | ANY_TEXT.map(json.dumps)
    extra = draw(st.dictionaries(keys, VALUES, max_size=4))
    if draw(st.booleans()):
        extra['"stream"'] = "true"
    body = written({**BODIES[path], **extra}).encode()
    match draw(st.integers(0, 15)):
        case 0:
            return path, body[: draw(st.integers(0, len(body)))]
        case 1:
            return path, draw(st.binary(max_size=30))
        case 2:
            at = draw(st.integers(0, len(body) - 1))
            return path, body[:at] + draw(st.binary(min_size=1, max_size=2)) + body[at + 1 :]
    return path, body


def check_http(path: str, sent: bytes, answer: httpx2.Response) -> None:
    """The answer is OK within its limits, or an error in the format of its API that is the client's fault."""
    if answer.status_code != 200:
        assert answer.status_code in (400, 404, 429), (answer.status_code, answer.text)
        (check_messages_error if "messages" in path else check_error)(answer.json()["error"])
        return
    asked = json.loads(sent)
    match path:
        case "/v1/completions" | "/v1/chat/completions":
            check_choices(path, asked, answer)
        case "/v1/responses":
            check_response(asked, answer)
        case "/v1/messages":
            check_message(asked, answer)
        case _:
            assert answer.json().keys() & {"tokens", "prompt", "input_tokens"}


def check_choices(path: str, asked: dict[str, Any], answer: httpx2.Response) -> None:
    if not asked.get("stream"):
        choices = answer.json()["choices"]
        assert answer.json()["usage"]["completion_tokens"] <= len(choices) * CONTEXT
    else:
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        if lines[-1] != "[DONE]":
            check_error(json.loads(lines[-1])["error"])
            return
        choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"] if choice["finish_reason"]]
    prompts = asked.get("prompt") if path == "/v1/completions" else None
    several = len(prompts) if isinstance(prompts, list) and not isinstance(prompts[0], int) else 1
    assert len(choices) == (asked.get("n") or 1) * several
    assert {choice["finish_reason"] for choice in choices} <= {"stop", "length", "tool_calls"}


def events(answer: httpx2.Response) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n") if line.startswith("data: ")]


def check_response(asked: dict[str, Any], answer: httpx2.Response) -> None:
    response = answer.json() if not asked.get("stream") else events(answer)[-1]["response"]
    assert response["status"] in ("completed", "incomplete", "failed")
    assert response["usage"]["output_tokens"] <= CONTEXT
    assert response["error"] is None or response["error"]["code"] != "INTERNAL"


def check_message(asked: dict[str, Any], answer: httpx2.Response) -> None:
    if not asked.get("stream"):
        message = answer.json()
        assert message["usage"]["output_tokens"] <= CONTEXT
        assert message["stop_reason"] in ("end_turn", "max_tokens", "stop_sequence", "tool_use")
        return
    *_, stopped, last = events(answer)
    if last["type"] == "error":
        check_messages_error(last["error"])
    else:
        assert (stopped["type"], last["type"]) == ("message_delta", "message_stop")


def check_messages_error(error: dict[str, Any]) -> None:
    assert error.keys() == {"type", "message"}
    assert error["type"] != "api_error", error
    assert 0 < len(error["message"]) <= 1000


def check_error(error: dict[str, Any]) -> None:
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] != "INTERNAL", error
    assert 0 < len(error["message"]) <= 1000


async def test_any_body_over_http_gets_a_documented_status(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is 200 within its limits or an error of the client's, never 500; streams end in [DONE] or in such an
    error. A bug would be noticed."""
    outcomes: dict[int, int] = {}
    served: set[str] = set()
    async with cluster() as it, httpx2.AsyncClient(base_url=f"http://{it.router.http.address}", timeout=30) as client:

        async def check(example: tuple[str, bytes]) -> None:
            path, body = example
            answer = await client.post(path, content=body, headers={"content-type": "application/json"})
            check_http(path, body, answer)
            outcomes[answer.status_code] = outcomes.get(answer.status_code, 0) + 1
            served.update([path] if answer.status_code == 200 else [])

        await each(600, bodies(), check)
        assert served == BODIES.keys()
        assert outcomes[200] >= 10, outcomes
        assert outcomes[400] >= 10, outcomes
        with monkeypatch.context() as broken, pytest.raises(AssertionError):
            broken.setattr(preprocessor, "build_request", bug)
            await check(("/v1/completions", b'{"prompt": "x"}'))


async def test_bytes_that_are_no_http_at_all_end_one_connection(cluster: Any) -> None:
    """They are answered with 400, or the connection is closed, or the server waits for the rest of a possible
    request."""
    start = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    lines = st.sampled_from(
        [b"", start, b"GET /health HTTP/1.1\r\n", start + b"content-length: ", b"PRI * HTTP/2.0\r\n"]
    )
    values = st.sampled_from([b"-1\r\n\r\n", b"9" * 30 + b"\r\n\r\n", b"2\r\n\r\n{}", b"x-request-id: \xff\r\n\r\n"])
    async with cluster() as it:
        host, port = it.router.http.address.split(":")

        async def check(sent: bytes) -> None:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            writer.write_eof()
            got = await asyncio.wait_for(reader.read(), 10)
            writer.close()
            assert not got or got.startswith(b"HTTP/1.1 ")
            assert b"HTTP/1.1 5" not in got

        await each(60, st.tuples(lines, values | st.binary(max_size=60)).map(b"".join), check)
