"""Anthropic's Messages API as its clients use it, on a real cluster."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.templates import HERMES

DEMO = Path(__file__).parents[2] / "demo/model"
QUESTION = "What does heapq.heappop do?"
MESSAGES = [{"role": "user", "content": QUESTION}]
ASKED = {"model": str(DEMO), "max_tokens": 40, "messages": MESSAGES, "temperature": 0}
KEY = "anna-key-0123456789"
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
HEIGHT = {"name": "height", "input_schema": {"properties": {"of": {"enum": ["Eiger", "Mönch"]}}, "required": ["of"]}}


class Door:
    """A cluster's Messages API."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.http = httpx2.AsyncClient(base_url=f"http://{cluster.router.http.address}", timeout=30)

    async def ask(self, **body: Any) -> dict[str, Any]:
        answer = await self.http.post("/v1/messages", json={**ASKED, **body})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    async def count(self, **body: Any) -> int:
        asked = {**ASKED, **body}
        del asked["max_tokens"]
        answer = await self.http.post("/v1/messages/count_tokens", json=asked)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["input_tokens"])

    async def stream(self, **body: Any) -> list[dict[str, Any]]:
        """The events; each is sent with its type as its name."""
        async with self.http.stream("POST", "/v1/messages?beta=true", json={**ASKED, "stream": True, **body}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["request-id"]
            lines = [line async for line in answer.aiter_lines() if line]
        found = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
        assert lines[::2] == [f"event: {one['type']}" for one in found]
        return found


@pytest.fixture
def door(inside: Any) -> Any:
    @asynccontextmanager
    async def start(**settings: Any) -> AsyncIterator[Door]:
        async with inside(**{"model": str(DEMO), "http_port": 0, "kv_blocks": 1024, **settings}) as cluster:
            one = Door(cluster)
            yield one
            await one.http.aclose()

    return start


def text(found: list[dict[str, Any]]) -> str:
    deltas = [one["delta"] for one in found if one["type"] == "content_block_delta"]
    return "".join(delta["text"] for delta in deltas if delta["type"] == "text_delta")


async def test_messages_are_those_of_grpc(door: Any) -> None:
    """Complete and streamed, with a string or blocks, with and without a system prompt: text, counts and finish
    reason."""
    system = "Be brief."
    async with door() as it:
        for extra, turns in (({}, MESSAGES), ({"system": system}, [{"role": "system", "content": system}, *MESSAGES])):
            expected = await it.cluster.client.generate(messages=turns, max_tokens=40, temperature=0.0)
            whole = await it.ask(**extra)
            blocks = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
            found = await it.stream(**{**extra, "messages": blocks})
            assert whole["content"] == [{"type": "text", "text": expected.text}]
            assert text(found) == expected.text
            usage, last = whole["usage"], found[-2]
            size = expected.receipt.prompt_tokens
            assert usage["input_tokens"] + usage["cache_read_input_tokens"] == size == await it.count(**extra)
            assert usage["output_tokens"] == last["usage"]["output_tokens"] == len(expected.token_ids)
            assert last["usage"]["cache_read_input_tokens"] > 0
            reason = {"stop": "end_turn", "length": "max_tokens"}[expected.finish_reason]
            assert whole["stop_reason"] == last["delta"]["stop_reason"] == reason
            assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", DEMO.name)
        assert not any(it.cluster.held().values())


async def test_an_answer_ends_where_the_client_says_or_the_context_ends(door: Any) -> None:
    """A stop sequence is named. max_tokens beyond the context is no error, because Claude Code always sends 32,000; 0
    only fills the cache."""
    async with door(max_model_len=200) as it:
        free = (await it.ask())["content"][0]["text"]
        stopped = await it.ask(stop_sequences=["\x00", free[10:14]])
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", free[10:14])
        assert stopped["content"][0]["text"] == free[: free.index(free[10:14])]
        long = {"role": "assistant", "content": "x " * 10}
        endless = await it.ask(max_tokens=32000, messages=[*MESSAGES, long, *MESSAGES], temperature=1, top_k=0, seed=1)
        usage = endless["usage"]
        used = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"]
        assert (endless["stop_reason"], used) in (("model_context_window_exceeded", 200), ("end_turn", used))
        nothing = await it.ask(max_tokens=0)
        assert (nothing["content"], nothing["stop_reason"]) == ([], "max_tokens")
        over = await it.http.post("/v1/messages", json={**ASKED, "messages": [{"role": "user", "content": "x " * 300}]})
        assert over.status_code == 400
        assert over.json()["error"]["type"] == "invalid_request_error"
        assert over.json()["error"]["message"].startswith("prompt is too long: ")
        assert over.json()["error"]["message"].endswith(" tokens > 199 maximum")
        assert await it.count(messages=[{"role": "user", "content": "x " * 300}]) > 200


async def test_a_schema_is_enforced(door: Any) -> None:
    """The request is the one by which Claude Code generates titles."""
    async with door() as it:
        output = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
        answer = await it.ask(**output, temperature=1, seed=3)
        assert json.loads(answer["content"][0]["text"]).keys() == {"ok"}


BAD: list[tuple[dict[str, Any], int, str, str]] = [
    ({"model": "claude-haiku-4-5"}, 404, "not_found_error", "there is no model"),
    ({"max_tokens": -1}, 400, "invalid_request_error", "max_tokens"),
    ({"messages": []}, 400, "invalid_request_error", "messages"),
    ({"top_p": 2}, 400, "invalid_request_error", "top_p is 2"),
    ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences[0] is empty"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "invalid_request_error", "read text only"),
    ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, 400, "invalid_request_error", "web_search_20250305"),
    ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
        *(400, "invalid_request_error", "output_config.format.schema"),
    ),
]


async def test_what_is_refused_has_anthropics_shape(door: Any) -> None:
    """An error has its status, and the request's id in the body and the header; the same in a stream, and for a path or
    method that is not served."""
    async with door() as it:
        for body, status, kind, word in BAD:
            for stream in (False, True):
                asked = {**ASKED, **body, "stream": stream}
                refused = await it.http.post("/v1/messages", json=asked, headers={"x-request-id": "mine-7"})
                found = refused.json()
                assert (refused.status_code, found["type"], found["error"]["type"]) == (status, "error", kind), body
                assert word in found["error"]["message"]
                assert found["request_id"] == refused.headers["request-id"] == "mine-7"
                assert refused.headers["x-should-retry"] == "false"
        for raw, name in ((b"[", "body"), (b"{}", "messages")):
            for path in ("/v1/messages", "/v1/messages/count_tokens"):
                refused = await it.http.post(path, content=raw, headers={"content-type": "application/json"})
                assert refused.status_code == 400
                assert name in refused.json()["error"]["message"]
                assert refused.json()["request_id"] == refused.headers["request-id"]
        plain = await it.http.post("/v1/messages", content=b"{}", headers={"content-type": "text/plain"})
        assert (plain.status_code, plain.json()["type"]) == (400, "error")
        bad_id = await it.http.post("/v1/messages", json=ASKED, headers={"x-request-id": "x" * 500})
        assert (bad_id.status_code, len(bad_id.headers["request-id"])) == (400, 16)
        for method, path, status in (("GET", "/v1/messages", 405), ("POST", "/v1/messages/batches", 404)):
            refused = await it.http.request(method, path)
            assert (refused.status_code, refused.json()["error"]["type"]) == (status, "not_found_error")
        assert not any(it.cluster.held().values())


async def test_a_key_is_asked_for_in_anthropics_shape(door: Any, tmp_path: Path) -> None:
    """A tenant's key is accepted in OpenAI's header or in Anthropic's."""
    file = tmp_path / "keys"
    file.write_text(f"anna {KEY}\n")
    async with door(api_keys=file) as it:
        refused = await it.http.post("/v1/messages", json=ASKED)
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        for name, value in (("authorization", f"Bearer {KEY}"), ("x-api-key", KEY)):
            it.http.headers = {name: value}
            assert (await it.ask())["content"]
            assert await it.count() > 0


THINKS = (
    "{%- for message in messages %}<|{{ message.role }}|>{% if message.reasoning_content %}<think>"
    "{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}<|end|>{% endfor -%}"
    "{%- if add_generation_prompt %}<|assistant|>{% if enable_thinking is not defined or enable_thinking %}<think>"
    "{% endif %}{% endif -%}"
)


async def test_reasoning_is_a_thinking_block(door: Any, tmp_path: Path) -> None:
    """Complete and streamed, signed; sent back it is part of the prompt. `thinking` turns it off."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    (folder / "chat_template.jinja").write_text(THINKS)
    async with door(model=str(folder)) as it:
        given = {"model": "", "max_tokens": 20}
        whole = await it.ask(**given)
        (block,) = whole["content"]
        assert block["type"] == "thinking"
        assert block["thinking"]
        assert block["signature"]
        assert whole["usage"]["output_tokens_details"]["thinking_tokens"] > 0
        deltas = [one["delta"] for one in await it.stream(**given) if one["type"] == "content_block_delta"]
        assert "".join(delta.get("thinking", "") for delta in deltas) == block["thinking"]
        assert deltas[-1] == {"type": "signature_delta", "signature": block["signature"]}
        off = await it.ask(**given, thinking={"type": "disabled"})
        assert [block["type"] for block in off["content"]] == ["text"]
        answer = {"type": "text", "text": "Yes."}
        counts = [
            await it.count(model="", messages=[*MESSAGES, {"role": "assistant", "content": content}, *MESSAGES])
            for content in ([answer], [block, answer])
        ]
        assert counts[0] < counts[1]


async def test_a_call_is_a_block(door: Any, tmp_path: Path) -> None:
    """Complete and streamed, forced; the conversation continues with the tool's result. The model is forced to call."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    (folder / "chat_template.jinja").write_text(HERMES)
    async with door(model=str(folder)) as it:
        asked = {"model": str(folder), "max_tokens": 300, "temperature": 1, "seed": 1, "tools": [HEIGHT]}
        asked["tool_choice"] = {"type": "tool", "name": "height"}
        whole = await it.ask(**asked)
        (block,) = whole["content"]
        assert (block["type"], block["name"], whole["stop_reason"]) == ("tool_use", "height", "tool_use")
        assert block["input"]["of"] in ("Eiger", "Mönch")
        found = await it.stream(**asked)
        (start,) = [one["content_block"] for one in found if one["type"] == "content_block_start"]
        deltas = [one["delta"] for one in found if one["type"] == "content_block_delta"]
        assert (start["type"], start["name"], start["input"]) == ("tool_use", "height", {})
        assert json.loads("".join(delta["partial_json"] for delta in deltas)) == block["input"]
        result = {"type": "tool_result", "tool_use_id": block["id"], "content": "3967 m"}
        turns = [*MESSAGES, {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
        again = {"model": str(folder), "messages": turns, "tools": [HEIGHT]}
        assert (await it.ask(**again))["stop_reason"] in ("end_turn", "max_tokens")
        assert await it.count(**again) > await it.count(model=str(folder))
