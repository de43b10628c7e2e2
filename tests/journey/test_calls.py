"""A tool call that is being written when its worker is lost is the same call in every API."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2

from tandem.results import Piece
from tandem.rpc.stream_reader import completion
from tests.support.faults import slow_down
from tests.support.templates import HERMES

DEMO = Path(__file__).parents[2] / "demo/model"
SCHEMA = {"type": "object", "properties": {"text": {"type": "string", "minLength": 40}}, "required": ["text"]}
TOOL = {"name": "note", "parameters": SCHEMA}
FUNCTION = {"type": "function", "function": TOOL}
MESSAGES = [{"role": "user", "content": "Make a note."}]
SEED = 1
OPTIONS = {"max_tokens": 200, "seed": SEED, "temperature": 1.0}
Call = tuple[str, str, int]  # name, arguments, completion tokens


class Doors:
    """The same forced call, requested as a stream in every API."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.http = httpx2.AsyncClient(base_url=f"http://{cluster.router.http.address}", timeout=60)
        self.begun = {name: asyncio.Event() for name in ("grpc", "job", "chat", "responses", "messages")}

    def all(self) -> dict[str, Any]:
        return {ask.__name__: ask() for ask in (self.grpc, self.job, self.chat, self.responses, self.messages)}

    async def grpc(self) -> Call:
        return await self._pieces("grpc", self.cluster.client.stream(**self._asked()))

    async def job(self) -> Call:
        submitted = await self.cluster.client.submit(**self._asked())
        return await self._pieces("job", self.cluster.client.watch(submitted.job_id))

    def _asked(self) -> dict[str, Any]:
        return {"messages": MESSAGES, "tools": [FUNCTION], "tool_choice": {"name": "note"}, **OPTIONS}

    async def _pieces(self, name: str, stream: AsyncIterator[Piece]) -> Call:
        pieces = []
        async for piece in stream:
            pieces.append(piece)
            if piece.calls:
                self.begun[name].set()
        whole = completion(pieces)
        (call,) = whole.calls
        return call.name, call.arguments, whole.receipt.completion_tokens

    async def chat(self) -> Call:
        choice = {"type": "function", "function": {"name": "note"}}
        body = {"messages": MESSAGES, "tools": [FUNCTION], "tool_choice": choice, **OPTIONS}
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        name = arguments = ""
        async for event in self._events("/v1/chat/completions", {**body, **usage}):
            for piece in (piece for one in event["choices"] for piece in one["delta"].get("tool_calls", ())):
                self.begun["chat"].set()
                name += piece["function"].get("name", "")
                arguments += piece["function"]["arguments"]
        return name, arguments, event["usage"]["completion_tokens"]

    async def responses(self) -> Call:
        body = {"input": "Make a note.", "max_output_tokens": 200, "seed": SEED, "temperature": 1.0, "stream": True}
        tools = {"tools": [{"type": "function", **TOOL}], "tool_choice": {"type": "function", "name": "note"}}
        arguments = ""
        async for event in self._events("/v1/responses", {**body, **tools}):
            if event["type"] == "response.function_call_arguments.delta":
                self.begun["responses"].set()
                arguments += event["delta"]
        (item,) = event["response"]["output"]
        assert item["arguments"] == arguments
        return item["name"], arguments, event["response"]["usage"]["output_tokens"]

    async def messages(self) -> Call:
        tools = {"tools": [{"name": "note", "input_schema": SCHEMA}], "tool_choice": {"type": "tool", "name": "note"}}
        name = arguments = ""
        tokens = 0
        body = {"model": "", "messages": MESSAGES, "stream": True, **OPTIONS}
        async for event in self._events("/v1/messages", {**body, **tools}):
            if event["type"] == "content_block_start":
                name += event["content_block"].get("name", "")
            elif event["type"] == "content_block_delta":
                self.begun["messages"].set()
                arguments += event["delta"].get("partial_json", "")
            elif event["type"] == "message_delta":
                tokens = event["usage"]["output_tokens"]
        return name, arguments, tokens

    async def _events(self, path: str, body: Any) -> AsyncIterator[Any]:
        async with self.http.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))


async def test_a_worker_that_goes_away_in_the_middle_of_a_call_changes_no_call(inside: Any, tmp_path: Path) -> None:
    """In every API, and for a job, name, arguments and their tokens equal those of an undisturbed answer. That answer
    is the same in all of them but responses, where the tool has other fields in the prompt."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    (folder / "chat_template.jinja").write_text(HERMES)
    async with inside(model=str(folder), http_port=0, kv_blocks=1024, decode=2) as cluster:
        doors = Doors(cluster)
        undisturbed = {name: await ask for name, ask in doors.all().items()}
        name, arguments, _ = undisturbed["grpc"]
        assert (name, len(json.loads(arguments)["text"]) >= 40) == ("note", True)
        same = {name: call for name, call in undisturbed.items() if name != "responses"}
        assert same == dict.fromkeys(same, undisturbed["grpc"])
        quick = [slow_down(cluster.workers[worker], 0.05) for worker in ("decode-0", "decode-1")]
        for begun in doors.begun.values():
            begun.clear()
        tasks = {name: asyncio.create_task(ask) for name, ask in doors.all().items()}
        async with asyncio.timeout(30):
            await asyncio.gather(*(begun.wait() for begun in doors.begun.values()))
        assert not any(task.done() for task in tasks.values()), "the fault must come in the middle"
        await cluster.workers["decode-0"].grpc.stop(0.0)
        for hurry in quick:
            hurry()
        assert {name: await task for name, task in tasks.items()} == undisturbed
        assert any(receipt.attempts > 1 for receipt in await cluster.client.receipts()), "it must have hit a stream"
        await doors.http.aclose()
