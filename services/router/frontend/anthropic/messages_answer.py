"""Translates events of Generate to Anthropic's Messages API: one message, or server-sent events.

    message_start, { content_block_start, content_block_delta ..., content_block_stop } ..., message_delta, message_stop

Each run of parts of one kind is a block: reasoning a thinking block, text a text block, each call a tool_use block. A
message without streaming is built from the same events. The events:
https://platform.claude.com/docs/en/build-with-claude/streaming.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

from services.router.answer.part_messages import Message, parts_of
from services.router.answer.parts import CallArguments, CallBegin, Part, Reasoning, Text
from services.router.frontend.anthropic import messages_errors
from services.router.frontend.http_answers import Events
from services.router.frontend.json_body import encode, to_json
from tandem.errors import TandemError
from tandem.v1 import common_pb2, generation_pb2

INVALID_JSON = "INVALID_JSON"  # Anthropic's documented key for arguments that are not a JSON object

Event = dict[str, Any]
_DECODER = json.JSONDecoder()


class Blocks:
    """The content blocks of one answer, as events. A block of only white space, such as between two calls, is omitted
    unless it is the only block."""

    def __init__(self) -> None:
        self.calls = 0  # begun so far
        self._index = -1  # of the last block
        self._kind = ""  # of the open block; empty: none is open
        self._held = ""  # white space that may begin a block
        self._held_kind = ""
        self._thought = hashlib.blake2b(person=b"tandem.thinking")

    def push(self, part: Part) -> Iterator[Event]:
        match part:
            case Text(text):
                yield from self._said("text", text)
            case Reasoning(text):
                yield from self._said("thinking", text)
            case CallBegin(id, name):
                self.calls += 1
                yield from self._begin({"type": "tool_use", "id": id, "name": name, "input": {}})
            case CallArguments(text):
                yield self._delta({"type": "input_json_delta", "partial_json": text})

    def finish(self) -> Iterator[Event]:
        if self._index < 0 and self._held:
            yield from self._opened(self._held_kind, self._held)
        yield from self._end()

    def _said(self, kind: str, text: str) -> Iterator[Event]:
        if self._kind == kind:
            yield self._more(kind, text)
            return
        if self._held_kind != kind:
            self._held, self._held_kind = "", kind
        self._held += text
        if self._held.strip():
            yield from self._opened(kind, self._held)

    def _opened(self, kind: str, text: str) -> Iterator[Event]:
        signature = {"signature": ""} if kind == "thinking" else {}
        yield from self._begin({"type": kind, kind: "", **signature})
        yield self._more(kind, text)

    def _more(self, kind: str, text: str) -> Event:
        if kind == "thinking":
            self._thought.update(text.encode())
        return self._delta({"type": f"{kind}_delta", kind: text})

    def _begin(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._end()
        self._index, self._kind, self._held, self._held_kind = self._index + 1, block["type"], "", ""
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _end(self) -> Iterator[Event]:
        if self._kind == "thinking":  # clients drop unsigned thinking; this server ignores the signature
            signature = base64.b64encode(self._thought.digest()).decode()
            yield self._delta({"type": "signature_delta", "signature": signature})
        if self._kind:
            yield {"type": "content_block_stop", "index": self._index}
        self._kind = ""

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


class MessagesAnswer:
    """Encodes the events of one request."""

    keep_alive = b'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(self, request_id: str, model: str, max_tokens: int) -> None:
        """`max_tokens`: the body's. With 0 the prompt is computed and cached, and the generated token is not shown."""
        self._request_id = request_id
        self._max_tokens = max_tokens
        self._blocks = Blocks()
        self._prompt_tokens = self._tokens = 0
        self._message: dict[str, Any] = {
            "id": f"msg_{request_id}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._started = False

    def named(self, error: TandemError) -> TandemError:
        """The error unchanged: messages_errors.py puts the body's field names into its message."""
        return error

    def error_body(self, error: TandemError) -> bytes:
        return messages_errors.error_body(error, self._request_id)

    def error_event(self, error: TandemError) -> bytes:
        """The end of a stream that has begun. No message_stop follows: the answer is incomplete."""
        return messages_errors.error_event(error, self._request_id)

    async def stream(self, index: int, event: generation_pb2.GenerateResponse) -> bytes:
        """The event as server-sent events; none before the first token."""
        return "".join(f"event: {one['type']}\ndata: {encode(one)}\n\n" for one in self._events(event)).encode()

    async def collect(self, events: Events) -> bytes:
        """One message."""
        message = self._message
        pieces: dict[tuple[int, str], list[str]] = defaultdict(list)  # by the index of the block, and the field
        async for _, event in events:
            for one in self._events(event):
                match one:
                    case {"type": "content_block_start", "content_block": block}:
                        message["content"].append(dict(block))
                    case {"type": "content_block_delta", "index": index, "delta": delta}:
                        for name, text in delta.items():
                            pieces[index, name].append(text)
                    case {"type": "message_delta", "delta": delta, "usage": usage}:
                        message |= {**delta, "usage": usage}
        ended = message["stop_reason"] == "tool_use"
        for (index, name), texts in pieces.items():
            block, text = message["content"][index], "".join(texts)
            if name != "type":
                block |= {"input": _input(text, ended=ended)} if name == "partial_json" else {name: text}
        return to_json(message)

    def _events(self, event: generation_pb2.GenerateResponse) -> Iterator[Event]:
        kind = event.WhichOneof("event")
        if kind == "started":
            self._prompt_tokens = event.started.prompt_tokens
            return
        if not self._started:
            self._started = True
            yield {"type": "message_start", "message": {**self._message, "content": [], "usage": self._usage()}}
        if kind == "delta":
            self._tokens += len(event.delta.token_ids) if self._max_tokens else 0
            yield from self._parts(event.delta)
            return
        yield from self._parts(event.finished)
        yield from self._blocks.finish()
        receipt = event.finished.receipt
        details = {"output_tokens_details": {"thinking_tokens": receipt.reasoning_tokens}}
        usage = self._usage(receipt.cached_tokens) | details
        yield {"type": "message_delta", "delta": self._stopped(event.finished), "usage": usage}
        yield {"type": "message_stop"}

    def _parts(self, message: Message) -> Iterator[Event]:
        if not self._max_tokens:
            return
        for part in parts_of(message):
            yield from self._blocks.push(part)

    def _stopped(self, finished: generation_pb2.Finished) -> dict[str, Any]:
        if finished.stop:
            return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop}
        if not self._max_tokens:
            reason = "max_tokens"
        elif finished.reason == common_pb2.FINISH_REASON_STOP:
            reason = "tool_use" if self._blocks.calls else "end_turn"
        else:  # the context may have ended first
            reason = "max_tokens" if self._tokens >= self._max_tokens else "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": None}

    def _usage(self, cached: int = 0) -> dict[str, Any]:
        """The usage; input_tokens is the uncached part of the prompt."""
        return {
            "input_tokens": self._prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._tokens,
        }


def _input(text: str, *, ended: bool) -> dict[str, Any]:
    """A call's arguments. Truncated ones keep their complete values, as in the SDK's streams; other text that is not
    one JSON object is put under INVALID_JSON. `ended`: by the model, so nothing was truncated."""
    if not text.strip():
        return {}
    try:
        value = from_json(text, allow_inf_nan=False, allow_partial=not (ended or _ends(text)))
        json.dumps(value, allow_nan=False)  # a number beyond a double has become an infinity, which JSON has not
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: text}


def _ends(text: str) -> bool:
    """Whether there is a whole JSON value at the beginning."""
    try:
        _DECODER.raw_decode(text.lstrip())
    except (ValueError, RecursionError):
        return False
    return True
