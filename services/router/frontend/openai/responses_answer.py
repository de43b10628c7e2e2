"""Translates events of Generate to the Responses API: one response object, or its server-sent events.

    created, in_progress ─▶ each item: output_item.added, content_part.added, deltas, done, content_part.done,
    output_item.done ─▶ completed, incomplete or failed

An item ends where the next part of the answer is of another kind. A response is stored before its last event is sent,
so a client that has `response.completed` can continue it on any router.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from time import time
from typing import Any

from services.router.answer.part_messages import parts_of
from services.router.answer.parts import CallArguments, CallBegin, Part, Reasoning, Text
from services.router.frontend.http_answers import Events
from services.router.frontend.json_body import SSE_BLANK, encode
from services.router.frontend.openai import logprobs_json, openai_errors
from services.router.frontend.openai.logprobs_json import joined_json, of_answer, scored_tokens
from services.router.frontend.openai.responses_body import SEALED_REASONING, Responses
from services.router.frontend.openai.responses_items import item_id
from services.router.frontend.openai.responses_output import (
    CallItem,
    CustomCallItem,
    Event,
    MessageItem,
    OutputItem,
    ReasoningItem,
)
from services.router.frontend.openai.responses_tools import Tool
from services.router.preprocess.tokenizer import Tokenizer
from tandem import results
from tandem.errors import Busy, InternalError, TandemError
from tandem.v1 import common_pb2, generation_pb2

Keep = Callable[[bytes], Awaitable[None]]  # stores the response object


class ResponsesAnswer:
    """Encodes the events of one request."""

    keep_alive = SSE_BLANK

    def __init__(
        self, body: Responses, response_id: str, shown: bytes, tokenizer: Tokenizer, keep: Keep | None
    ) -> None:
        """`shown`: the request's fields that the response object repeats, a JSON object that may be megabytes. Without
        `keep` the response is not stored."""
        self._body = body
        self._streams = bool(body.stream)
        self._tokenizer = tokenizer
        self._keep = keep
        self._id = response_id
        self._head = encode({"id": response_id, "object": "response", "created_at": int(time())})[:-1]
        self._shown = shown[1:-1]
        self._sequence = 0  # of the next event
        self._unsent = b""  # events before those of the end, if the end fails
        self._items: list[OutputItem] = []
        self._ended: list[str] = []  # JSON of the ended items; at most the last item has not ended
        self._scores: list[str] = []  # log probabilities of tokens whose text has not arrived yet
        self._prompt_tokens = self._tokens = self._scored = 0
        self._receipt = generation_pb2.Receipt()

    def named(self, error: TandemError) -> TandemError:
        """The error with the field names of the request."""
        return self._body.named(error)

    def error_body(self, error: TandemError) -> bytes:
        return openai_errors.error_body(error)

    def error_event(self, error: TandemError) -> bytes:
        """The end of a stream that has begun, with the events that each kind of client expects."""
        about = openai_errors.error_fields(error)
        begun = self._begin() if self._sequence == 0 else self._unsent  # clients expect it first
        text = self._event("error", encode({name: about[name] for name in ("code", "message", "param")})[1:-1], "")
        code = "rate_limit_exceeded" if isinstance(error, Busy) else "server_error"  # of OpenAI's codes
        failure = {"code": code, "message": about["message"]}
        return begun + text.encode() + self._lifecycle("failed", self._response("failed", error=failure))

    async def stream(self, index: int, event: generation_pb2.GenerateResponse) -> bytes:
        """The event as server-sent events; none before the first token."""
        kind, self._unsent = event.WhichOneof("event"), b""
        if kind == "started":
            self._prompt_tokens = event.started.prompt_tokens
            return b""
        message = self._begin() if self._sequence == 0 else b""
        message += (await self._take(event)).encode()
        if kind == "finished":
            self._unsent = message
            status, response = await self._end(event.finished)
            message += self._lifecycle(status, response)
        return message

    async def collect(self, events: Events) -> bytes:
        """The response object."""
        response = b""
        async for _, event in events:
            kind = event.WhichOneof("event")
            if kind == "started":
                self._prompt_tokens = event.started.prompt_tokens
                continue
            await self._take(event)
            if kind == "finished":
                _, response = await self._end(event.finished)
        return response

    # ---- parts

    async def _take(self, event: generation_pb2.GenerateResponse) -> str:
        """The event's part of the stream."""
        if event.HasField("delta"):
            self._tokens += len(event.delta.token_ids)
            parts = parts_of(event.delta)
            if event.delta.HasField("logprobs"):
                more, most = event.delta.logprobs, logprobs_json.MAX_RESPONSE_SCORES
                self._scored = logprobs_json.check_scores(self._scored, more, most, "ask for fewer")
                await self._score(event.delta, parts)
            return "".join(map(self._add, parts))
        text = "".join(map(self._add, parts_of(event.finished)))
        self._receipt = event.finished.receipt
        stopped = event.finished.reason == common_pb2.FINISH_REASON_STOP
        if not self._items:  # clients expect a message
            text += self._open(MessageItem(self._new_id(MessageItem)))
        cut = isinstance(self._items[-1], CallItem) and bool(event.finished.stop)  # perhaps within the call
        return text + self._close("completed" if stopped and not cut else "incomplete")

    def _add(self, part: Part) -> str:
        item = self._items[-1] if self._items else None
        text = ""
        match part:
            case CallBegin():
                return self._turn_to(self._call(part))
            case Text() if not isinstance(item, MessageItem):
                text = self._turn_to(MessageItem(self._new_id(MessageItem)))
            case Reasoning() if not isinstance(item, ReasoningItem):
                seals = self._body.includes(SEALED_REASONING)
                text = self._turn_to(ReasoningItem(self._new_id(ReasoningItem), seals=seals))
            case CallArguments() if not isinstance(item, CallItem):
                raise InternalError("arguments came without a call")
        return text + self._grow(part.text)

    def _grow(self, more: str) -> str:
        item = self._items[-1]
        item.add(more)
        if isinstance(item, MessageItem):
            item.score(self._scores)
            self._scores = []
        return self._about(item, item.grown(more)) if self._streams else ""

    def _turn_to(self, item: OutputItem) -> str:
        return (self._close("completed") if self._items else "") + self._open(item)

    def _open(self, item: OutputItem) -> str:
        self._items.append(item)
        if not self._streams:
            return ""
        added = ("output_item.added", f'"item":{item.json("in_progress")}')
        return self._about(None, [added]) + self._about(item, item.begun())

    def _close(self, status: str) -> str:
        """Ends the last item."""
        item = self._items[-1]
        if isinstance(item, MessageItem):
            item.score(self._scores)
            self._scores = []
        text = self._about(item, item.done()) if self._streams else ""
        self._ended.append(item.json(status))
        return text + (self._about(None, [("output_item.done", f'"item":{self._ended[-1]}')]) if self._streams else "")

    def _new_id(self, kind: type[OutputItem]) -> str:
        """An id that no other item has: the response's, and the item's place."""
        return item_id(kind.prefix, self._id, len(self._items))

    def _call(self, call: CallBegin) -> OutputItem:
        tool = self._body.tools_read.by_name.get(call.name, Tool(call.name))
        kind = CustomCallItem if tool.custom else CallItem
        return kind(self._new_id(kind), call, tool)

    async def _score(self, delta: generation_pb2.Delta, parts: Sequence[Part]) -> None:
        """Keeps the log probabilities of text. Those of reasoning and calls are dropped, also for a token that contains
        text as well."""
        if any(not isinstance(part, Text) for part in parts):
            self._scores = []
            return
        if parts and self._items and not isinstance(self._items[-1], MessageItem):
            self._scores = []  # of the tokens between the other part and this text
        make = partial(of_answer, self._tokenizer)
        if scores := await joined_json(make, scored_tokens(delta.token_ids, delta.logprobs)):
            self._scores.append(scores)

    # ---- the response object and its events

    def _begin(self) -> bytes:
        response = self._response("in_progress")
        return self._lifecycle("created", response) + self._lifecycle("in_progress", response)

    async def _end(self, finished: generation_pb2.Finished) -> tuple[str, bytes]:
        """Stores the response. Returns its status, and the object."""
        stopped = finished.reason == common_pb2.FINISH_REASON_STOP
        status = "completed" if stopped else "incomplete"
        response = self._response(status)
        if self._keep is not None:
            await self._keep(response)
        return status, response

    def _response(self, status: str, error: dict[str, Any] | None = None) -> bytes:
        output = list(self._ended)
        if len(output) < len(self._items):
            output.append(self._items[-1].json("incomplete"))
        about: dict[str, Any] = {
            "status": status,
            "completed_at": int(time()) if status == "completed" else None,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": None if status == "in_progress" else self._usage(),
        }
        if self._body.tandem_receipt and status in ("completed", "incomplete"):
            about["tandem_receipt"] = results.receipt(self._receipt).to_dict()
        own = f'{self._head},{encode(about)[1:-1]},"output":[{",".join(output)}],'
        return b"".join((own.encode(), self._shown, b"}"))

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self._prompt_tokens,
            "input_tokens_details": {"cached_tokens": self._receipt.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self._tokens,
            "output_tokens_details": {"reasoning_tokens": self._receipt.reasoning_tokens},
            "total_tokens": self._prompt_tokens + self._tokens,
        }

    def _lifecycle(self, name: str, response: bytes) -> bytes:
        before, after = self._event(f"response.{name}", '"response":\0', "").split("\0")
        return b"".join((before.encode(), response, after.encode()))

    def _about(self, item: OutputItem | None, events: list[Event]) -> str:
        """The events of the last item."""
        place = f',"output_index":{len(self._items) - 1}'
        if item is not None:
            place += f',"item_id":{encode(item.id)}'
        return "".join(self._event(f"response.{kind}", fields, place) for kind, fields in events)

    def _event(self, kind: str, fields: str, place: str) -> str:
        number, self._sequence = self._sequence, self._sequence + 1
        return f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":{number}{place},{fields}}}\n\n'
