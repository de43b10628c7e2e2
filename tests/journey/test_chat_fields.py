"""Chat fields change the prompt in the same way over HTTP and gRPC."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tandem.errors import InvalidRequest

DEMO = Path(__file__).parents[2] / "demo/model"
CHAT = [{"role": "user", "content": "What does heapq.heappop do?"}]
GREEDY = {"temperature": 0.0, "max_tokens": 12}
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.reasoning_content }}{{ message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{% if enable_thinking is false %}<nothink>{% endif %}"
)


@pytest.fixture
def door(inside: Any, tmp_path: Path) -> Any:
    @asynccontextmanager
    async def start(**settings: Any) -> AsyncIterator[tuple[Any, Any]]:
        folder = tmp_path / "model"
        shutil.copytree(DEMO, folder)
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        async with inside(model=str(folder), http_port=0, kv_blocks=1024, **settings) as cluster:
            url = f"http://{cluster.router.http.address}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
                yield cluster.client, client.chat.completions

    return start


async def test_both_doors_render_the_same_chat(door: Any) -> None:
    """Each field changes the prompt, shown as text without a template, in the same way over HTTP and gRPC."""
    said = [*CHAT, {"role": "assistant", "content": "It removes"}]
    thought = [{"role": "assistant", "content": "a", "reasoning_content": "hm"}, *CHAT]
    question = f"<|user|>{CHAT[0]['content']}<|end|>"
    off = {"enable_thinking": False}
    effort = {"reasoning_effort": "none"}
    template = {"chat_template": "{{ messages[0].content }}"}
    cases: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = [
        (f"{question}<|assistant|><nothink>", CHAT, {"chat_template_kwargs": off}, {"template_variables": off}),
        (f"{question}<|assistant|><nothink>", CHAT, effort, {"template_variables": effort}),
        (f"{question}<|assistant|>It removes", said, {"continue_final_message": True}, {"continue_last_message": True}),
        (question, CHAT, {"add_generation_prompt": False}, {"without_generation_prompt": True}),
        (f"<|assistant|>hma<|end|>{question}<|assistant|>", thought, {}, {}),
        (CHAT[0]["content"], CHAT, template, template),
    ]
    async with door(allow_request_chat_template=True) as (grpc, chats):
        for prompt, messages, extra, options in cases:
            expected = await grpc.generate(prompt, **GREEDY)
            answer = await chats.create(model="", messages=messages, extra_body=extra, **GREEDY)
            assert answer.choices[0].message.content == expected.text, prompt
            assert answer.usage.prompt_tokens == expected.receipt.prompt_tokens, prompt
            ours = [{name.removesuffix("_content"): text for name, text in one.items()} for one in messages]
            again = await grpc.generate(messages=ours, **options, **GREEDY)
            assert (again.text, again.receipt.prompt_tokens) == (expected.text, expected.receipt.prompt_tokens), prompt


async def test_a_client_brings_a_template_only_where_it_is_trusted(door: Any) -> None:
    """By default a client's template is refused over HTTP and gRPC."""
    async with door() as (grpc, chats):
        with pytest.raises(InvalidRequest, match="allow_request_chat_template"):
            await grpc.generate(messages=CHAT, chat_template="{{ 1 }}")
        with pytest.raises(openai.BadRequestError, match="allow_request_chat_template"):
            await chats.create(model="", messages=CHAT, extra_body={"chat_template": "{{ 1 }}"})
