"""Reasoning reaches every client separately from the answer, and no fault changes where it ends."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from services.router.frontend import job_runner
from tandem.results import Completion, Piece
from tandem.rpc.stream_reader import completion
from tandem.v1 import generation_pb2, sampling_pb2
from tests.journey.test_jobs import NEXT_LEASE_S, taken_over
from tests.support.faults import slow_down

DEMO = Path(__file__).parents[2] / "demo/model"
TEMPLATE = (
    "{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{%- endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is not false %}<think>{% endif %}{% endif %}"
)
FORMAT = "<think> ,"  # the demo's model has not learnt to reason: its reasoning is the text up to a comma
MARKER = "<|user|>"  # a special token
QUESTION = "How do I open a file?"
MESSAGES = [{"role": "user", "content": QUESTION}]
Shown = tuple[str, str, int]  # reasoning, text, completion tokens


class Doors:
    """One answer, requested as a stream in every API."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.http = httpx2.AsyncClient(base_url=f"http://{cluster.router.http.address}", timeout=60)
        self.started = {name: asyncio.Event() for name in ("grpc", "chat", "responses", "messages", "job")}

    def all(self, seed: int) -> dict[str, Any]:
        asks = (self.grpc, self.chat, self.responses, self.messages, self.job)
        return {ask.__name__: ask(seed) for ask in asks}

    async def grpc(self, seed: int) -> Shown:
        client = self.cluster.client
        return await self._pieces("grpc", client.stream(messages=MESSAGES, **options(seed)))

    async def job(self, seed: int) -> Shown:
        submitted = await self.cluster.client.submit(messages=MESSAGES, **options(seed))
        return await self._pieces("job", self.cluster.client.watch(submitted.job_id))

    async def _pieces(self, name: str, stream: AsyncIterator[Piece]) -> Shown:
        pieces = []
        async for piece in stream:
            pieces.append(piece)
            self.started[name].set()
        return shown(completion(pieces))

    async def chat(self, seed: int) -> Shown:
        reasoning = text = ""
        tokens = 0
        body = {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}, **options(seed)}
        async for event in self._events("chat", "/v1/chat/completions", body):
            for choice in event["choices"]:
                assert choice["delta"].get("reasoning") == choice["delta"].get("reasoning_content")
                reasoning += choice["delta"].get("reasoning_content") or ""
                text += choice["delta"].get("content") or ""
            tokens = (event.get("usage") or {}).get("completion_tokens", 0)
        return reasoning, text, tokens

    async def responses(self, seed: int) -> Shown:
        body = {"input": QUESTION, "stream": True, "max_output_tokens": 60, "seed": seed, "temperature": 1.0}
        deltas = {"response.reasoning_text.delta": "", "response.output_text.delta": ""}
        async for event in self._events("responses", "/v1/responses", body):
            if event["type"] in deltas:
                deltas[event["type"]] += event["delta"]
        usage = event["response"]["usage"]
        return *deltas.values(), usage["output_tokens"]  # type: ignore[return-value]

    async def messages(self, seed: int) -> Shown:
        reasoning = text = ""
        body = {"model": "", "messages": MESSAGES, "stream": True, **options(seed)}
        async for event in self._events("messages", "/v1/messages", body):
            if event["type"] == "content_block_delta":
                reasoning += event["delta"].get("thinking", "")
                text += event["delta"].get("text", "")
            elif event["type"] == "message_delta":
                tokens = event["usage"]["output_tokens"]
        return reasoning, text, tokens

    async def _events(self, name: str, path: str, body: Any) -> AsyncIterator[Any]:
        async with self.http.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    self.started[name].set()
                    yield json.loads(line.removeprefix("data: "))


def options(seed: int) -> dict[str, Any]:
    return {"max_tokens": 60, "seed": seed, "temperature": 1.0}


def shown(answer: Completion) -> Shown:
    return answer.reasoning, answer.text, answer.receipt.completion_tokens


@pytest.fixture
def doors(inside: Any, tmp_path: Path) -> Any:
    @asynccontextmanager
    async def start(**settings: Any) -> AsyncIterator[Doors]:
        folder = tmp_path / "model"
        shutil.copytree(DEMO, folder)
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        about = {"model": str(folder), "http_port": 0, "kv_blocks": 1024, "reasoning_format": FORMAT, **settings}
        async with inside(**about) as cluster:
            one = Doors(cluster)
            yield one
            await one.http.aclose()

    return start


_found: list[int] = []


async def thoughtful(doors: Doors) -> int:
    """A seed with which the model reasons for a while and then answers. Searched for once, because all tests have this
    model."""
    for seed in _found or range(120, 320):  # 127, with the bits of today's operators
        answer = await doors.cluster.client.generate(messages=MESSAGES, **options(seed))
        after = answer.receipt.completion_tokens - answer.receipt.reasoning_tokens
        if answer.receipt.reasoning_tokens >= 15 and after >= 10 and answer.text:
            _found[:] = [seed]
            return seed
    raise AssertionError("no seed of these does")


async def raw(doors: Doors, seed: int) -> Completion:
    """The same answer as the model writes it."""
    message = generation_pb2.GenerateRequest(sampling=sampling_pb2.SamplingParams(**options(seed)))
    message.chat.raw = True
    message.chat.messages.add(role="user", content=QUESTION.encode())
    return completion([piece async for piece in doors.cluster.client._pieces(message, None)])


async def test_every_door_tells_reasoning_from_the_answer(doors: Any) -> None:
    """Together they are what the model wrote, without the marker. With reasoning switched off there is none."""
    async with doors() as it:
        seed = await thoughtful(it)
        answer = await it.cluster.client.generate(messages=MESSAGES, **options(seed))
        whole = await raw(it, seed)
        assert whole.token_ids == answer.token_ids
        assert (whole.reasoning, whole.receipt.reasoning_tokens) == ("", 0)
        before, _, after = whole.text.partition(",")
        assert (answer.reasoning, answer.text) == (before.strip(), after.strip() or after)
        found = {name: await ask for name, ask in it.all(seed).items()}
        assert found == dict.fromkeys(found, shown(answer))
        usage = (await it.http.post("/v1/chat/completions", json={"messages": MESSAGES, **options(seed)})).json()
        assert usage["choices"][0]["message"]["reasoning_content"] == answer.reasoning
        details = usage["usage"]["completion_tokens_details"]
        assert details == {"reasoning_tokens": answer.receipt.reasoning_tokens}
        off = {"chat_template_kwargs": {"enable_thinking": False}, "messages": MESSAGES, **options(seed)}
        message = (await it.http.post("/v1/chat/completions", json=off)).json()["choices"][0]["message"]
        assert "reasoning_content" not in message


async def test_a_worker_that_goes_away_in_the_middle_of_reasoning_changes_no_event(doors: Any) -> None:
    """This holds in every API, and for a job."""
    async with doors(decode=2) as it:
        seed = await thoughtful(it)
        undisturbed = {name: await ask for name, ask in it.all(seed).items()}
        quick = [slow_down(it.cluster.workers[name], 0.05) for name in ("decode-0", "decode-1")]
        for begun in it.started.values():
            begun.clear()
        tasks = {name: asyncio.create_task(ask) for name, ask in it.all(seed).items()}
        async with asyncio.timeout(30):
            await asyncio.gather(*(begun.wait() for begun in it.started.values()))
        running = [name for name, task in tasks.items() if not task.done()]
        assert len(running) == len(tasks), "the fault must come in the middle"
        await it.cluster.workers["decode-0"].grpc.stop(0.0)
        for hurry in quick:
            hurry()
        assert {name: await task for name, task in tasks.items()} == undisturbed
        receipts = await it.cluster.client.receipts()
        assert any(receipt.attempts > 1 for receipt in receipts), "the fault must have hit a stream"


@pytest.mark.parametrize("after", [3, 8], ids=["in the first words", "within the reasoning"])
async def test_a_job_whose_router_is_lost_in_the_middle_of_reasoning_changes_no_part(
    doors: Any, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """The next router reads what the first one had read, and passes on only what comes after."""
    async with doors() as it:
        monkeypatch.setattr(job_runner, "LEASE_S", NEXT_LEASE_S)
        seed = await thoughtful(it)
        expected = await it.grpc(seed)

        async def submit(client: Any) -> Any:
            return await client.submit(messages=MESSAGES, request_id="thought", **options(seed))

        await taken_over(it.cluster, submit, 1, lambda seen: len(seen[0]) >= after)
        kept = completion([piece async for piece in it.cluster.client.watch("thought")])
        assert shown(kept) == expected
        undisturbed = await it.cluster.client.generate(messages=MESSAGES, **options(seed))
        assert kept.receipt.reasoning_tokens == undisturbed.receipt.reasoning_tokens


SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
FORMATTED = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
WANTED = {"messages": MESSAGES, "response_format": FORMATTED, "max_tokens": 200, "temperature": 1.0}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}


async def test_a_grammar_begins_where_the_reasoning_ends(doors: Any) -> None:
    """The reasoning is free, and what follows fits; so does an answer without reasoning."""
    async with doors(reasoning_format=f"<think> {MARKER}") as it:
        (marker,) = (await it.http.post("/tokenize", json={"prompt": MARKER, "add_special_tokens": False})).json()[
            "tokens"
        ]
        lengths = set()
        for seed in range(6):
            asked = {**WANTED, "seed": seed, "logit_bias": {str(marker): 12.0}}  # otherwise never written
            answer = (await it.http.post("/v1/chat/completions", json=asked)).json()
            message = answer["choices"][0]["message"]
            assert isinstance(json.loads(message["content"])["ok"], bool)
            assert MARKER not in message.get("reasoning_content", "")
            lengths.add(answer["usage"]["completion_tokens_details"]["reasoning_tokens"])
        assert max(lengths) > 1, "the model must have thought"
        answer = (await it.http.post("/v1/chat/completions", json={**WANTED, **OFF})).json()["choices"][0]
        assert isinstance(json.loads(answer["message"]["content"])["ok"], bool)


async def test_a_grammar_after_reasoning_whose_end_is_no_token_is_refused(doors: Any) -> None:
    """The position of its beginning would be unknown. Without reasoning the grammar applies."""
    async with doors() as it:
        refused = await it.http.post("/v1/chat/completions", json=WANTED)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format")
        answer = (await it.http.post("/v1/chat/completions", json={**WANTED, **OFF})).json()["choices"][0]
        assert isinstance(json.loads(answer["message"]["content"])["ok"], bool)
