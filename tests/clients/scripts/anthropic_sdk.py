"""The anthropic package: messages, streams, tools, thinking, counting, errors."""

from __future__ import annotations

from anthropic import Anthropic, AuthenticationError, BadRequestError, NotFoundError
from report import QUESTION, TOOL, check, need, refused, target

SERVER = target()
URL, MODEL = SERVER.url, SERVER.model
client = Anthropic(base_url=URL, api_key="none", max_retries=0)
MESSAGES = [{"role": "user", "content": QUESTION}]
TOOLS = [{"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}]


def messages() -> object:
    options = {"model": MODEL, "max_tokens": 16, "messages": MESSAGES, "system": "Be short."}
    options["extra_body"] = {"temperature": 0.0}  # which the package no longer has
    whole = client.messages.create(**options)
    with client.messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    need(text == whole.content[0].text, (text, whole))
    need(last.usage.output_tokens == whole.usage.output_tokens, last.usage)
    return f"{whole.stop_reason}: {text}"


def tools() -> object:
    options = {"model": MODEL, "max_tokens": 200, "tools": TOOLS, "tool_choice": {"type": "any"}}
    answer = client.messages.create(messages=MESSAGES, **options)
    call = next(block for block in answer.content if block.type == "tool_use")
    need(answer.stop_reason == "tool_use", answer.stop_reason)
    with client.messages.stream(messages=MESSAGES, **options) as stream:
        streamed = next(block for block in stream.get_final_message().content if block.type == "tool_use")
    need(streamed.name == call.name, streamed)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "3967"}
    history = [*MESSAGES, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    client.messages.create(model=MODEL, max_tokens=8, tools=TOOLS, messages=history)
    return f"{call.name}({call.input})"


def count() -> object:
    return client.messages.count_tokens(model=MODEL, messages=MESSAGES, system="Be short.").input_tokens


def thinking() -> object:
    """The demo model never ends its reasoning, so there is nothing else."""
    options = {"model": MODEL, "max_tokens": 1032, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    with client.messages.stream(messages=MESSAGES, **options) as stream:
        kinds = {event.type for event in stream}
        (block,) = stream.get_final_message().content
    need(block.type == "thinking" and block.thinking and "thinking" in kinds, (block, kinds))
    return block.thinking


def errors() -> object:
    ask = {"model": MODEL, "max_tokens": 8, "messages": MESSAGES}
    image = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/peak.png"}}
    seen = {"role": "user", "content": [image]}
    many = {"role": "user", "content": "word " * 40_000}
    other = Anthropic(base_url=SERVER.keyed_url, api_key="a-key-that-nobody-has", max_retries=0)
    said = [
        refused(NotFoundError, lambda: client.messages.create(**{**ask, "model": "unknown"})),
        refused(BadRequestError, lambda: client.messages.create(**{**ask, "messages": [seen]})),
        refused(BadRequestError, lambda: client.messages.create(**{**ask, "messages": [many]})),
        refused(AuthenticationError, lambda: other.messages.create(**ask)),
    ]
    need("prompt is too long" in said[2], said[2])
    return [line[:40] for line in said]


def key() -> object:
    return Anthropic(base_url=SERVER.keyed_url, api_key=SERVER.key, max_retries=0).models.list().data[0].id


for work in (messages, tools, thinking, count, errors, key):
    check(work.__name__, work)
