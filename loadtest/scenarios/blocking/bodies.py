"""What `python -m loadtest blocking` sends: for each door the largest bodies that it takes, and some beyond them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

MIB = 2**20
MESSAGES, TOOLS = 1000, 100
# It shows of a chat what the demo model's context has room for.
TEMPLATE = (
    "{%- if tools %}{{ tools | length }} tools, as <tool_call>{{ tools[0] | tojson | length }}</tool_call>{% endif -%}"
    "{%- for message in messages %}{% for call in message.tool_calls or [] %}"
    "{% set x = '<tool_call>' + call.function | tojson %}{% endfor %}{% endfor %}{{ messages[-1].content[:400] }}"
)


def _tools(wrap: Callable[[dict[str, Any]], dict[str, Any]], count: int = TOOLS) -> list[dict[str, Any]]:
    text = {"type": "string", "description": "what it is for " * 4}
    schema = {"type": "object", "properties": {f"p{index}": text for index in range(24)}, "required": ["p0"]}
    return [wrap({"name": f"f{index}", "description": "d" * 200, "parameters": schema}) for index in range(count)]


def _function(about: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": about}


def _turns(padding: int) -> list[dict[str, Any]]:
    arguments = json.dumps({"p0": "x" * padding})
    turns: list[dict[str, Any]] = []
    for index in range(MESSAGES // 3):
        call = {"id": f"call_{index}", "type": "function", "function": {"name": "f0", "arguments": arguments}}
        turns += [
            {"role": "user", "content": "why? " * (padding // 5)},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call_{index}", "content": "because " * (padding // 8)},
        ]
    return [*turns, {"role": "user", "content": "Return the"}]


def chat() -> Iterator[dict[str, Any]]:
    for padding in (10, 3400):
        yield {"messages": _turns(padding), "tools": _tools(_function), "max_tokens": 8}


def long_message() -> Iterator[dict[str, Any]]:
    for letter in ("word ", "é", "\n"):
        content = letter * (3 * MIB // (len(json.dumps(letter)) - 2))
        yield {"messages": [{"role": "user", "content": content}], "max_tokens": 8}


def stops() -> Iterator[dict[str, Any]]:
    base = {"prompt": "Return the", "max_tokens": 64, "ignore_eos": True}
    yield {**base, "stop": ["\0" * 254 + str(index % 10) for index in range(16)], "bad_words": ["w" * 200] * 128}
    yield {**base, "stop": ["x"] * (MIB // 2)}
    yield {**base, "logit_bias": {str(index): 1 for index in range(300)}}
    yield {**base, "bad_words": [f"{index} a" for index in range(300_000)]}


def schemas() -> Iterator[dict[str, Any]]:
    leaf = {"enum": [f"value {index}" for index in range(20)]}
    schema = {"type": "object", "properties": {f"p{index}": leaf for index in range(100)}, "required": ["p0"]}
    base = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 16}
    yield {**base, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    yield {**base, "tools": _tools(_function, 12), "tool_choice": "required"}
    yield {**base, "tools": _tools(_function, 128), "tool_choice": "required"}
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(60):
        deep = {"anyOf": [{"type": "array", "items": deep}, {"type": "object", "properties": {"a": deep}}]} | {}
        if len(json.dumps(deep)) > 20_000:
            break
    yield {**base, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": deep}}}


def prompts() -> Iterator[dict[str, Any]]:
    yield {"prompt": "word " * (4 * MIB // 5 - 100), "max_tokens": 8}
    yield {"prompt": [5] * (MIB - 100), "max_tokens": 8}
    yield {"prompt": ["word " * 100] * 2000, "max_tokens": 8}
    yield {"prompt": [[5, 6, 7]] * 100_000, "max_tokens": 8}


def responses() -> Iterator[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for index in range(330):
        items += [
            {"role": "user", "content": [{"type": "input_text", "text": "why? " * 400}]},
            {"type": "function_call", "call_id": f"c{index}", "name": "f0", "arguments": '{"p0": "x"}'},
            {"type": "function_call_output", "call_id": f"c{index}", "output": "because " * 600},
        ]
    items.append({"role": "user", "content": "Return the"})
    tools = _tools(lambda about: {"type": "function", **about})
    yield {"input": items, "tools": tools, "max_output_tokens": 8}
    yield {"input": items, "tools": tools, "max_output_tokens": 8, "store": False, "stream": True}


def messages() -> Iterator[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    for index in range(480):
        use = {"type": "tool_use", "id": f"toolu_{index}", "name": "f0", "input": {"p0": "x" * 2000}}
        result = {"type": "tool_result", "tool_use_id": f"toolu_{index}", "content": "because " * 400}
        turns += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    tools = [
        {"name": one["name"], "description": one["description"], "input_schema": one["parameters"]}
        for one in _tools(dict, 80)
    ]
    begun = [{"role": "user", "content": "why?"}, *turns, {"role": "user", "content": "Return the"}]
    yield {"model": "", "messages": begun, "tools": tools, "max_tokens": 8}
    yield {"model": "", "messages": begun, "tools": tools, "max_tokens": 8, "stream": True}


def uncounted() -> Iterator[dict[str, Any]]:
    for body in messages():
        yield {name: body[name] for name in ("model", "messages", "tools")}


def texts() -> Iterator[dict[str, Any]]:
    yield {"prompt": "word " * (4 * MIB // 5 - 100)}
    yield {"prompt": "word " * 20_000}


def ids() -> Iterator[dict[str, Any]]:
    yield {"tokens": [66] * 100_000}


def adapters() -> Iterator[dict[str, Any]]:
    yield {"lora_name": "x", "lora_path": "/" + "y" * (4 * MIB - 1000)}
    yield {"lora_name": "x", "lora_path": "/y", "more": [0] * (MIB - 1000)}


Bodies = Callable[[], Iterator[dict[str, Any]]]
DOORS: dict[str, tuple[str, Bodies]] = {
    "chat": ("/v1/chat/completions", chat),
    "message": ("/v1/chat/completions", long_message),
    "stops": ("/v1/completions", stops),
    "schemas": ("/v1/chat/completions", schemas),
    "prompts": ("/v1/completions", prompts),
    "responses": ("/v1/responses", responses),
    "messages": ("/v1/messages", messages),
    "count": ("/v1/messages/count_tokens", uncounted),
    "tokenize": ("/tokenize", texts),
    "detokenize": ("/detokenize", ids),
    "adapters": ("/v1/load_lora_adapter", adapters),
}
CALLS = ("grpc", "files", "jobs", "models")  # doors of more than one call; run.py knows them


def batch_input() -> bytes:
    """8 MiB, less what surrounds it."""
    about = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "word " * 180, "max_tokens": 4}}
    lines, size, number = list[bytes](), 0, 0
    while size < 8 * MIB - 4096:
        lines.append(json.dumps({"custom_id": str(number), **about}).encode())
        size, number = size + len(lines[-1]) + 1, number + 1
    return b"\n".join(lines[:-1])


def job_prompts() -> Iterator[list[str] | list[list[int]]]:
    """Of one call each."""
    yield [[5 + index % 100] * 1500 for index in range(128)]
    yield ["word " * 1500] * 128
    yield ["word " * 6400] * 128  # refused: over the context
