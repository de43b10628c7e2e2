"""The Responses API as its users use it: the real `openai` package, several routers, and refused bodies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pydantic
import pytest

from cluster.state.response_store import ResponseStore
from services import launch
from tandem.errors import Unavailable
from tests.support.calls import with_template
from tests.support.faults import slow_down

DEMO = Path(__file__).parents[2] / "demo/model"
QUESTION = "What does heapq.heappop do?"
CHAT = [{"role": "user", "content": QUESTION}]
GREEDY: dict[str, Any] = {"model": "", "temperature": 0.0}
ANNA, BOB = "anna-key-0123456789", "bob-key-0123456789"


class Door:
    """One router's HTTP side."""

    def __init__(self, router: Any, key: str = "none") -> None:
        self.url = f"http://{router.http.address}"
        self.openai = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)
        self.raw = httpx2.AsyncClient(base_url=self.url, timeout=30)

    async def post(self, **body: Any) -> Any:
        return await self.raw.post("/v1/responses", json={"input": QUESTION, "temperature": 0.0, **body})

    async def close(self) -> None:
        await self.openai.close()
        await self.raw.aclose()


@pytest.fixture
def door(inside: Any) -> Any:
    """`async with door(routers=2, **settings) as (cluster, *doors)`."""

    @asynccontextmanager
    async def start(routers: int = 1, **settings: Any) -> AsyncIterator[tuple[Any, ...]]:
        async with inside(**{"model": str(DEMO), "http_port": 0, "kv_blocks": 1024, **settings}) as cluster:
            more: list[Any] = [
                await launch.start("router", cluster.settings, f"router-{number}") for number in range(1, routers)
            ]
            doors = [Door(router) for router in (cluster.router, *more)]
            yield cluster, *doors
            for one in doors:
                await one.close()
            for router in more:
                await router.stop(0.0)

    return start


async def test_a_response_is_the_answer_of_a_chat(door: Any) -> None:
    """Complete, streamed, and through the SDK's accumulator, it has gRPC's tokens and usage."""
    async with door() as (cluster, it):
        expected = await cluster.client.generate(messages=CHAT, temperature=0.0)
        assert expected.finish_reason == "stop"
        whole = await it.openai.responses.create(input=QUESTION, **GREEDY)
        assert (whole.output_text, whole.status, whole.error) == (expected.text, "completed", None)
        assert whole.usage.output_tokens == len(expected.token_ids)
        assert whole.usage.input_tokens == expected.receipt.prompt_tokens
        assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
        items = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
        deltas, kinds = "", []
        async for event in await it.openai.responses.create(input=items, stream=True, **GREEDY):
            kinds.append(event.type)
            deltas += event.delta if event.type == "response.output_text.delta" else ""
        assert deltas == event.response.output_text == expected.text
        assert kinds[:4] == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
        ]
        assert kinds[-1] == "response.completed"
        async with it.openai.responses.stream(input=QUESTION, **GREEDY) as stream:
            final = await stream.get_final_response()
        assert final.output_text == expected.text
        assert await it.openai.responses.retrieve(final.id) is not None
        cut = await it.openai.responses.create(input=QUESTION, max_output_tokens=3, **GREEDY)
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (cut.usage.output_tokens, cut.output[0].status) == (3, "incomplete")


async def test_a_response_is_continued_on_any_router(door: Any) -> None:
    """Its id stands for the conversation: the next answer is that of the whole chat, with the new instructions. What is
    stored can be read and deleted; later responses stay."""
    async with door(routers=2) as (cluster, first, second):
        one = await first.openai.responses.create(input=QUESTION, instructions="Be short.", **GREEDY)
        two = await second.openai.responses.create(input="And heappush?", previous_response_id=one.id, **GREEDY)
        chat = [*CHAT, {"role": "assistant", "content": one.output_text}, {"role": "user", "content": "And heappush?"}]
        expected = await cluster.client.generate(messages=chat, temperature=0.0)
        assert two.output_text == expected.text
        assert two.previous_response_id == one.id
        assert (await second.openai.responses.retrieve(one.id)) == one
        listed = await first.openai.responses.input_items.list(two.id, order="asc", limit=2)
        assert [item.content[0].text for item in listed.data] == [QUESTION, one.output_text]
        assert listed.has_more
        rest = await first.openai.responses.input_items.list(two.id, order="asc", after=listed.last_id)
        assert [item.content[0].text for item in rest.data] == ["And heappush?"]
        newest = await first.openai.responses.input_items.list(two.id, limit=1)
        assert newest.data == rest.data
        assert len({item.id for item in (*listed.data, *rest.data, *two.output)}) == 4
        references = [{"type": "item_reference", "id": item.id} for item in (*listed.data, *one.output, *rest.data)]
        references = list({one["id"]: one for one in references}.values())
        three = await second.openai.responses.create(input=references, **GREEDY)
        assert three.output_text == two.output_text
        await first.openai.responses.delete(one.id)
        for call in (second.openai.responses.retrieve, second.openai.responses.delete):
            with pytest.raises(openai.NotFoundError):
                await call(one.id)
        stream = await second.openai.responses.create(
            input="Why?", previous_response_id=two.id, stream=True, max_output_tokens=8, **GREEDY
        )
        *_, last = [event async for event in stream]
        assert last.response.status == "incomplete"
        assert (await first.openai.responses.retrieve(last.response.id)).output == last.response.output


async def test_an_id_that_is_unknown_is_named(door: Any) -> None:
    """The error has OpenAI's code, before anything is generated; so has one for an id that was not to be stored."""
    async with door() as (_, it):
        gone = await it.openai.responses.create(input=QUESTION, store=False, max_output_tokens=1, **GREEDY)
        for unknown in (gone.id, "resp_1", "../jobs"):
            with pytest.raises(openai.NotFoundError) as refused:
                await it.openai.responses.create(input="x", previous_response_id=unknown, **GREEDY)
            assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
        for path in ("", "/input_items", "/cancel"):
            method = "POST" if path == "/cancel" else "GET"
            assert (await it.raw.request(method, f"/v1/responses/{gone.id}{path}")).status_code == 404


async def test_responses_belong_to_their_tenant(inside: Any, tmp_path: Path) -> None:
    """Another tenant's id is unknown for reading, continuing and deleting; without a key every call is refused."""
    file = tmp_path / "keys"
    file.write_text(f"anna {ANNA}\nbob {BOB}\n")
    async with inside(model=str(DEMO), http_port=0, kv_blocks=1024, api_keys=file) as cluster:
        anna, bob, nobody = (Door(cluster.router, key) for key in (ANNA, BOB, "no-key-0123456789"))
        one = await anna.openai.responses.create(input=QUESTION, max_output_tokens=2, **GREEDY)
        for call in (
            bob.openai.responses.retrieve(one.id),
            bob.openai.responses.delete(one.id),
            bob.openai.responses.input_items.list(one.id),
            bob.openai.responses.create(input="x", previous_response_id=one.id, **GREEDY),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        with pytest.raises(openai.AuthenticationError):
            await nobody.openai.responses.retrieve(one.id)
        assert (await anna.openai.responses.retrieve(one.id)).id == one.id
        for client in (anna, bob, nobody):
            await client.close()


async def test_a_schema_is_enforced_and_parsed(door: Any) -> None:
    """By the SDK's `text_format`, streamed or not."""

    class Answer(pydantic.BaseModel):
        short: bool
        letters: list[str]

    async with door() as (_, it):
        sampled = {"model": "", "temperature": 1.0, "max_output_tokens": 400, "extra_body": {"seed": 4}}
        done = await it.openai.responses.parse(input=QUESTION, text_format=Answer, **sampled)
        assert isinstance(done.output_parsed, Answer)
        async with it.openai.responses.stream(input=QUESTION, text_format=Answer, **sampled) as stream:
            assert (await stream.get_final_response()).output_parsed == done.output_parsed


async def test_log_probabilities_come_with_the_text(door: Any) -> None:
    """With `include` and `top_logprobs` the numbers equal gRPC's."""
    async with door() as (cluster, it):
        expected = await cluster.client.generate(messages=CHAT, temperature=0.0, max_tokens=6, logprobs=2)
        done = await it.openai.responses.create(
            input=QUESTION,
            max_output_tokens=6,
            top_logprobs=2,
            include=["message.output_text.logprobs"],
            **GREEDY,
        )
        found = done.output[0].content[0].logprobs
        assert [one.logprob for one in found] == pytest.approx([one.logprob for one in expected.logprobs], abs=1e-4)
        assert [len(one.top_logprobs) for one in found] == [2] * 6


async def test_a_dead_decode_worker_changes_nothing_of_a_response(door: Any) -> None:
    """The response continues at its next token elsewhere, and is one response with one end."""
    async with door(decode=2, max_attempts=8) as (cluster, it):
        expected = await cluster.client.generate(messages=CHAT, temperature=0.0)
        for worker in cluster.workers.values():
            slow_down(worker, 0.02)
        events, killed = [], False
        async for event in await it.openai.responses.create(
            input=QUESTION, stream=True, extra_body={"tandem_receipt": True}, **GREEDY
        ):
            events.append(event)
            if not killed and event.type == "response.output_text.delta":
                killed = True
                (busy,) = [name for name, held in cluster.held().items() if held and name.startswith("decode")]
                await cluster.workers.pop(busy).stop(0.0)
        assert events[-1].type == "response.completed"
        assert events[-1].response.output_text == expected.text
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].response.tandem_receipt["attempts"] > 1, "the worker must have been lost in the middle"


async def test_what_cannot_be_stored_is_not_said_to_be_complete(door: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the registry does not answer, a response is refused before it is generated, or fails at its end; with
    `store` false it is served."""

    async def away(*_: Any) -> None:
        raise Unavailable("the registry does not answer", reason="REGISTRY_UNREACHABLE", retry_after=1.0)

    async with door() as (_, it):
        with monkeypatch.context() as patch:
            patch.setattr(ResponseStore, "put", away)
            with pytest.raises(openai.InternalServerError) as refused:
                await it.openai.responses.create(input=QUESTION, max_output_tokens=2, **GREEDY)
            assert refused.value.code == "REGISTRY_UNREACHABLE"
            stream = await it.openai.responses.create(input=QUESTION, max_output_tokens=2, stream=True, **GREEDY)
            kinds = [event.type async for event in stream]
            assert kinds[-2:] == ["error", "response.failed"]
            patch.setattr(ResponseStore, "check", away)
            with pytest.raises(openai.InternalServerError):
                await it.openai.responses.create(input=QUESTION, max_output_tokens=2, stream=True, **GREEDY)
            done = await it.openai.responses.create(input=QUESTION, max_output_tokens=2, store=False, **GREEDY)
            assert done.output_text
        assert (await it.openai.responses.create(input=QUESTION, max_output_tokens=2, **GREEDY)).store


BAD: list[tuple[Any, int, str]] = [
    (b"{", 400, "body"),
    (b"[]", 400, "body"),
    (b'{"input": "x", "input": "y"}', 400, "body"),
    ({}, 400, "input"),
    ({"input": []}, 400, "input"),
    ({"input": "\ud800"}, 400, "input"),
    ({"input": "x", "instructions": "\ud800"}, 400, "body"),
    ({"input": "x", "metadata": {"a": "\ud800"}}, 400, "metadata"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, 400, None),
    ({"input": "x", "model": "gpt-5"}, 404, "model"),
    ({"input": "x", "background": True}, 400, "background"),
    ({"input": "x", "temperature": -1}, 400, "temperature"),
    ({"input": "x", "max_output_tokens": 0}, 400, "max_output_tokens"),
    ({"input": "x", "max_output_tokens": 10**9}, 400, "input"),
    ({"input": "x", "top_logprobs": 99}, 400, "top_logprobs"),
    ({"input": "word " * 60_000}, 400, "input"),
    ({"input": "x", "text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, 400, None),
    ({"input": "x", "tools": [{"type": "mcp"}]}, 400, "tools[0].type"),
    ({"input": [{"role": "user", "content": "x"}] * 5000}, 400, "input"),
    ({"input": [[]] * 70_000}, 400, "body"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, 404, "input[0].id"),
    ({"input": [{"type": "item_reference", "id": f"msg_{'0' * 52}"}]}, 404, "input[0].id"),
]


async def test_bad_bodies_are_refused_by_the_name_of_the_field(door: Any) -> None:
    """Nothing is reserved for them, and the status is the documented one."""
    async with door() as (cluster, it):
        for body, status, param in BAD:
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            answer = await it.raw.post("/v1/responses", content=raw, headers={"content-type": "application/json"})
            error = answer.json()["error"]
            assert answer.status_code == status, (raw[:80], error)
            assert param in (None, error["param"]), (raw[:80], error)
        assert not any(cluster.held().values())
        one = (await it.post(max_output_tokens=1)).json()["id"]
        for path in (
            "?stream=true",
            "?starting_after=3",
            "/input_items?limit=0",
            "/input_items?limit=1e3",
            "/input_items?order=up",
            "/input_items?after=msg_1",
        ):
            assert (await it.raw.get(f"/v1/responses/{one}{path}")).status_code == 400, path
        assert (await it.raw.post(f"/v1/responses/{one}/cancel")).status_code == 400
        assert (await it.raw.get("/v1/responses")).status_code == 405


async def test_a_client_that_leaves_stores_nothing_and_frees_its_blocks(door: Any) -> None:
    """As with the other endpoints, within a second."""
    async with door() as (cluster, it):
        for worker in cluster.workers.values():
            slow_down(worker)
        body = {"input": QUESTION, "stream": True, "ignore_eos": True}
        async with it.raw.stream("POST", "/v1/responses", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    begun = json.loads(line.removeprefix("data: "))["response"]["id"]
                    break
        await cluster.freed()
        assert (await it.raw.get(f"/v1/responses/{begun}")).status_code == 404


async def test_many_responses_at_once_are_all_stored(door: Any) -> None:
    """Each is stored under its own id, with few connections to the registry."""
    async with door() as (_, it):
        made = await asyncio.gather(
            *(it.openai.responses.create(input=f"{number}", max_output_tokens=2, **GREEDY) for number in range(24))
        )
        assert len({one.id for one in made}) == 24
        read = await asyncio.gather(*(it.openai.responses.retrieve(one.id) for one in made))
        assert [one.output_text for one in read] == [one.output_text for one in made]


async def test_a_call_is_an_item_and_its_output_continues_the_conversation(door: Any, tmp_path: Path) -> None:
    """As an agent does: a forced call, streamed or not, of a function, a free-form tool, and a tool of a namespace;
    then the outputs, under the id of the response or with all items sent again."""
    arguments = {"type": "object", "properties": {"peak": {"enum": ["Eiger"]}}, "required": ["peak"]}
    height = {"type": "function", "name": "height", "parameters": arguments, "strict": True}
    patch = {"type": "custom", "name": "apply_patch", "description": "Edits."}
    docs = {"type": "namespace", "name": "mcp__docs", "description": "Docs.", "tools": [height]}
    async with door(model=str(with_template(tmp_path))) as (_, it):
        sampled = {"model": "", "tools": [height, patch, docs], "max_output_tokens": 200, "extra_body": {"seed": 3}}
        named = {"type": "function", "name": "height"}
        one = await it.openai.responses.create(input=QUESTION, tool_choice=named, **sampled)
        (call,) = one.output
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "height", {"peak": "Eiger"})
        async with it.openai.responses.stream(input=QUESTION, tool_choice=named, **sampled) as stream:
            events = [event async for event in stream]
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == call.arguments
        inner = {**named, "namespace": "mcp__docs"}
        other = await it.openai.responses.create(input=QUESTION, tool_choice=inner, **sampled)
        assert (other.output[0].namespace, other.output[0].name) == ("mcp__docs", "height")
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "3967"}
        rest = {"model": "", "temperature": 0.0, "max_output_tokens": 8, "tools": sampled["tools"]}
        by_id = await it.openai.responses.create(input=[output], previous_response_id=one.id, **rest)
        again = [{"role": "user", "content": QUESTION}, *(item.to_dict() for item in one.output), output]
        by_items = await it.openai.responses.create(input=again, store=False, **rest)
        assert by_id.output_text == by_items.output_text
        assert by_id.usage.input_tokens == by_items.usage.input_tokens
        free = {"type": "custom", "name": "apply_patch"}
        cut = await it.openai.responses.create(input=QUESTION, tool_choice=free, **sampled)
        assert (cut.output[0].type, cut.output[0].name) == ("custom_tool_call", "apply_patch")
        assert cut.output[0].input
