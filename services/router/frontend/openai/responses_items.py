"""The items of a conversation in the Responses API: checked, brought into one form, and turned into chat messages.

    client's items ─read_items─▶ items as they are stored, each with an id ─chat_messages─▶ messages of the template

An assistant's message joins the reasoning, the text and the calls of one turn, which are separate items in the API.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.router.frontend.json_body import encode, text_of
from services.router.frontend.openai.openai_sampling import to_bytes
from services.router.frontend.openai.responses_tools import custom_arguments, flat_name
from services.router.preprocess import json_limits
from services.router.preprocess.chat.prompt import MAX_MESSAGES
from services.router.preprocess.json_limits import out_of_bounds
from tandem.errors import InvalidRequest, NotFound
from tandem.v1 import generation_pb2

Item = dict[str, Any]
NewId = Callable[[str], str]  # of a prefix
MAX_ITEMS = 4 * MAX_MESSAGES  # of a conversation: reasoning, text, a call and its output become two messages
MAX_ITEM_ID = 128
RESPONSE_PREFIX = "resp_"
# Ids of items have that of their response, and a number: answers count from 0, inputs from FIRST_INPUT.
ITEM_PATTERN = re.compile(r"[a-z]+_([0-9a-f]{48})[0-9a-f]{4}")
FIRST_INPUT = 0x8000
SEALED = "tandem.1."  # prefix of `encrypted_content`; servers with another encoding have another one
SYSTEM_ROLES = ("system", "developer")
ROLES = ("user", "assistant", *SYSTEM_ROLES)
SERVED_ITEMS = (
    "message, reasoning, function_call, function_call_output, custom_tool_call, custom_tool_call_output or"
    " item_reference"
)
TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def item_id(prefix: str, response_id: str, number: int) -> str:
    return f"{prefix}_{response_id.removeprefix(RESPONSE_PREFIX)}{number:04x}"


def referenced_ids(value: object) -> list[str]:
    """The ids in the references of an `input`."""
    items = value if isinstance(value, list) and len(value) <= MAX_ITEMS else []
    found = [item.get("id") for item in items if isinstance(item, dict) and item.get("type") == "item_reference"]
    return [one for one in found if isinstance(one, str)]


def response_of(item: str) -> str | None:
    """The id of the response whose item has this id; None if no response of this server has such an id."""
    match = ITEM_PATTERN.fullmatch(item)
    return RESPONSE_PREFIX + match[1] if match else None


def read_items(value: object, new_id: NewId, known: Mapping[str, Item] | None = None) -> list[Item]:
    """`input` of a request, a string or items, as items with ids. `known`: stored items by id, which replace
    references. Raises InvalidRequest, NotFound for a reference to another item."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_ITEMS:
        raise out_of_bounds("input", "no text and no list of items", f"a string, or 1 to {MAX_ITEMS} items")
    left = dict(known or {})
    return [_read(item, f"input[{index}]", new_id, left) for index, item in enumerate(value)]


def _read(item: Any, where: str, new_id: NewId, known: dict[str, Item]) -> Item:
    if not isinstance(item, dict):
        raise out_of_bounds(where, f"a JSON {type(item).__name__}", "an object")
    match item.get("type") or ("message" if "role" in item else None):
        case "message":
            return _message(item, where, new_id)
        case "reasoning":
            return _reasoning(item, where, new_id)
        case "function_call":
            return _call(item, where, new_id("fc"), "arguments")
        case "custom_tool_call":
            return _call(item, where, new_id("ctc"), "input")
        case "function_call_output":
            return _output(item, where, new_id("fco"))
        case "custom_tool_call_output":
            return _output(item, where, new_id("ctco"))
        case "item_reference":
            return _referenced(item, where, known)
        case str(kind):
            raise InvalidRequest(
                f"{where} is of type {kind!r:.80}, which is not served; it must be {SERVED_ITEMS}",
                field=f"{where}.type",
                bound=SERVED_ITEMS,
            )
    raise out_of_bounds(f"{where}.type", "absent", SERVED_ITEMS)


def _referenced(item: Item, where: str, known: dict[str, Item]) -> Item:
    """A stored item, once per input, because a short reference may stand for much text."""
    name = text_of(item, "id", where)
    if name not in known:
        raise NotFound(
            f"{where} refers to {name!r:.140}, which is not stored, or was referred to before",
            reason="NO_SUCH_ITEM",
            field=f"{where}.id",
            bound="the id of an item of a stored response, once; or send the item itself",
        )
    return known.pop(name)


def _message(item: Item, where: str, new_id: NewId) -> Item:
    role = item.get("role")
    if role not in ROLES:
        raise out_of_bounds(f"{where}.role", "unknown", ", ".join(ROLES))
    kind = "output_text" if role == "assistant" else "input_text"
    content = item.get("content")
    more: dict[str, Any] = {"annotations": []} if role == "assistant" else {}
    parts = [{"type": kind, "text": text, **more} for text in _texts(content, f"{where}.content")]
    status = item.get("status") if item.get("status") in ("in_progress", "incomplete") else "completed"
    return {"id": _id(item, new_id("msg")), "type": "message", "role": role, "status": status, "content": parts}


def _reasoning(item: Item, where: str, new_id: NewId) -> Item:
    """A reasoning item with its text: from `content`, else from `encrypted_content`, else from the summary."""
    texts = _texts_of(item.get("content"), f"{where}.content", ("reasoning_text", "text"))
    sealed = item.get("encrypted_content")
    summary = _texts_of(item.get("summary"), f"{where}.summary", ("summary_text",))
    if not texts and sealed is not None:
        texts = [opened(sealed, f"{where}.encrypted_content")]
    texts = texts or summary
    content = [{"type": "reasoning_text", "text": text} for text in texts]
    return {"id": _id(item, new_id("rs")), "type": "reasoning", "summary": [], "content": content}


def _call(item: Item, where: str, new: str, arguments: str) -> Item:
    fields = {name: text_of(item, name, where) for name in ("call_id", "name", arguments)}
    found = {"id": _id(item, new), "type": item["type"], "status": "completed", **fields}
    if item.get("namespace") is not None:
        found["namespace"] = text_of(item, "namespace", where)
    return found


def _output(item: Item, where: str, new: str) -> Item:
    output = item.get("output")
    text = output if isinstance(output, str) else "".join(_texts(output, f"{where}.output"))
    call_id = text_of(item, "call_id", where)
    return {"id": _id(item, new), "type": item["type"], "status": "completed", "call_id": call_id, "output": text}


def _id(item: Item, new: str) -> str:
    given = item.get("id")
    return given if isinstance(given, str) and 0 < len(given) <= MAX_ITEM_ID else new


def _texts(content: Any, where: str) -> list[str]:
    """The texts of a message: a string, or parts that are text. Raises InvalidRequest for a part that is not."""
    if content is None or isinstance(content, str):
        return [content] if content else []
    if not isinstance(content, list):
        raise out_of_bounds(where, "no text", "a string, or a list of parts")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in TEXT_PARTS:
            raise InvalidRequest(
                f"{where}[{index}] is of type {kind!r:.80}, and this server takes text only",
                field=f"{where}[{index}].type",
                bound=", ".join(TEXT_PARTS),
            )
        texts.append(text_of(part, TEXT_PARTS[kind], f"{where}[{index}]"))
    return texts


def _texts_of(parts: Any, where: str, kinds: tuple[str, ...]) -> list[str]:
    if parts is None:
        return []
    if not isinstance(parts, list) or not all(isinstance(part, dict) and part.get("type") in kinds for part in parts):
        raise out_of_bounds(where, "not readable", f"a list of parts of type {' or '.join(kinds)}")
    return [text_of(part, "text", f"{where}[{index}]") for index, part in enumerate(parts)]


def sealed(text: str) -> str:
    """`encrypted_content` of reasoning, for clients that keep only this field. It is not encrypted: the client has the
    same text in `content`."""
    return SEALED + base64.b64encode(text.encode()).decode()


def opened(value: object, where: str) -> str:
    """The inverse of `sealed`. Raises InvalidRequest for other values."""
    try:
        if isinstance(value, str) and value.startswith(SEALED):
            return base64.b64decode(value.removeprefix(SEALED), validate=True).decode()
    except ValueError:  # not base64, not even ASCII, or not UTF-8 in it
        pass  # the same error as for another server's content
    raise out_of_bounds(
        where, "not from this server, so its reasoning cannot be read", "absent, or what this server sent"
    )


# ---- chat messages


@dataclass(slots=True)
class _Turn:
    """An assistant's message under construction."""

    reasoning: list[str] = field(default_factory=list)
    text: str | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)

    def message(self) -> generation_pb2.ChatMessage:
        return generation_pb2.ChatMessage(
            role="assistant",
            content=to_bytes(self.text or ""),
            reasoning=to_bytes("".join(self.reasoning)),
            tool_calls=to_bytes(encode(self.calls)) if self.calls else b"",
        )


def chat_messages(items: list[Item], instructions: str | None) -> list[generation_pb2.ChatMessage]:
    """The messages of items that `read_items` or an answer made, after the instructions. Raises InvalidRequest for
    arguments of a call that are too large."""
    found = [generation_pb2.ChatMessage(role="system", content=to_bytes(instructions))] if instructions else []
    turn: _Turn | None = None
    names: dict[str, str] = {}  # call id -> function
    for item in items:
        kind = item["type"]
        if kind == "reasoning":
            if turn is None or turn.text is not None or turn.calls:
                turn = _next(found, turn)
            turn.reasoning += [part["text"] for part in item["content"]]
        elif kind in ("function_call", "custom_tool_call"):
            turn = turn or _Turn()
            turn.calls.append(_chat_call(item))
            names[item["call_id"]] = turn.calls[-1]["function"]["name"]
        elif kind == "message" and item["role"] == "assistant":
            if turn is None or turn.text is not None:
                turn = _next(found, turn)
            turn.text = "".join(part["text"] for part in item["content"])
        else:
            _ended(found, turn)
            turn = None
            found.append(_other(item, names))
    _ended(found, turn)
    return _joined_beginning(found)


def _next(found: list[generation_pb2.ChatMessage], turn: _Turn | None) -> _Turn:
    _ended(found, turn)
    return _Turn()


def _ended(found: list[generation_pb2.ChatMessage], turn: _Turn | None) -> None:
    if turn is not None:
        found.append(turn.message())


def _other(item: Item, names: dict[str, str]) -> generation_pb2.ChatMessage:
    """A message of a role other than assistant."""
    if item["type"] == "message":
        text = "".join(part["text"] for part in item["content"])
        return generation_pb2.ChatMessage(role=item["role"], content=to_bytes(text))
    call_id = item["call_id"]
    return generation_pb2.ChatMessage(
        role="tool", content=to_bytes(item["output"]), tool_call_id=call_id, name=names.get(call_id, "")
    )


def _chat_call(item: Item) -> dict[str, Any]:
    """A call in the form that templates expect: its arguments as an object, if they are a JSON object."""
    custom = item["type"] == "custom_tool_call"
    text = custom_arguments(item["input"]) if custom else item["arguments"]
    json_limits.check(to_bytes(text), name="input")
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        arguments = text
    if not isinstance(arguments, dict):
        arguments = text
    function = {"name": flat_name(item["name"], item.get("namespace")), "arguments": arguments}
    return {"id": item["call_id"], "type": "function", "function": function}


def _joined_beginning(messages: list[generation_pb2.ChatMessage]) -> list[generation_pb2.ChatMessage]:
    """Several system and developer messages at the beginning as one: many templates allow one only."""
    end = next((place for place, one in enumerate(messages) if one.role not in SYSTEM_ROLES), len(messages))
    if end < 2:
        return messages
    content = b"\n\n".join(message.content for message in messages[:end])
    return [generation_pb2.ChatMessage(role="system", content=content), *messages[end:]]
