"""The anthropic package: messages, streams, tools, counting."""

from __future__ import annotations

from anthropic import Anthropic
from report import QUESTION, TOOL, check, need, target

URL, MODEL = target()
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


for work in (messages, tools, count):
    check(work.__name__, work)
