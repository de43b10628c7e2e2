"""Translates events of Generate to OpenAI's API: one JSON object, or server-sent events."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from services.router.answer.part_messages import parts_of
from services.router.answer.parts import CallArguments, CallBegin, Part, Reasoning
from services.router.frontend.http_answers import Events
from services.router.frontend.json_body import SSE_BLANK, encode
from services.router.frontend.openai import logprobs_json, openai_errors
from services.router.frontend.openai.logprobs_json import (
    Scored,
    TokenTexts,
    answer_scores,
    json_parts,
    of_answer,
    of_prompt,
    prompt_scores,
    with_offsets,
)
from services.router.frontend.openai.openai_protocol import Chat, Completions, prompt_text
from services.router.frontend.openai.openai_sampling import Sampled, StreamOptions
from services.router.preprocess.tokenizer import Tokenizer
from tandem import results
from tandem.errors import TandemError
from tandem.v1 import common_pb2, generation_pb2

DONE = "data: [DONE]\n\n"


@dataclass(slots=True)
class Choice:
    """One completion so far."""

    index: int
    texts: TokenTexts  # of its tokens with log probabilities so far
    calls: int = 0  # of tools, begun so far
    held: generation_pb2.Delta | None = None  # the last delta, which is sent together with the finish reason


@dataclass(slots=True)
class Piece:
    """One choice's part of a message of a stream; without streaming, the whole choice."""

    choice: Choice
    text: str = ""
    parts: list[Part] = field(default_factory=list)  # all of it; `text` is the text of these
    token_ids: list[int] = field(default_factory=list)
    scored: generation_pb2.Delta = field(default_factory=generation_pb2.Delta)  # ids and log probabilities of tokens
    prompt_logprobs: generation_pb2.PromptLogprobs | None = None  # Python's objects would be many times as large
    finish: str | None = None
    stop_reason: int | str | None = None
    receipt: dict[str, Any] | None = None


class Answer(ABC):
    """Encodes the events of one HTTP request as JSON. A subclass has the format of one endpoint."""

    prefix = ""
    keep_alive = SSE_BLANK
    whole_object = ""
    chunk_object = ""

    def __init__(
        self,
        body: Sampled,
        request_id: str,
        model: str,
        tokenizer: Tokenizer,
        requests: Sequence[generation_pb2.GenerateRequest],
    ) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self._requests = requests
        self._each = body.n or 1  # completions of each prompt
        self._choices: dict[int, Choice] = {}
        self._prompt_tokens = self._cached_tokens = self._tokens = self._reasoning_tokens = 0
        options = body.stream_options or StreamOptions()
        self._usage_at_end = bool(options.include_usage or options.continuous_usage_stats)
        self._usage_always = bool(options.continuous_usage_stats)
        self._left = len(requests) * self._each  # choices that have not ended
        self._head = {
            "id": f"{self.prefix}-{request_id}",
            "object": self.chunk_object if body.stream else self.whole_object,
            "created": int(time.time()),
            "model": model,
        }
        self._opening = encode(self._head)[:-1] + ","  # of each message of a stream; encoded only once

    def named(self, error: TandemError) -> TandemError:
        """The error with the field names of the request."""
        return self._body.named(error)

    def error_body(self, error: TandemError) -> bytes:
        return openai_errors.error_body(error)

    def error_event(self, error: TandemError) -> bytes:
        """The end of a stream that has begun. No [DONE] follows: the answer is incomplete."""
        return openai_errors.error_event(error)

    async def stream(self, index: int, event: generation_pb2.GenerateResponse) -> bytes:
        """The event as server-sent events; none before the first token."""
        piece = self._piece(index, event)
        if piece is None:
            return b""
        choice = await self._encoded(piece, self.chunk(piece))
        data = f"]{self._usage_so_far()}}}\n\n"
        if piece.finish:
            self._left -= 1
            if self._left == 0:
                if self._usage_at_end:
                    data += f'data: {self._opening}"choices":[],"usage":{encode(self._usage())}}}\n\n'
                data += DONE
        return b"".join((f'data: {self._opening}"choices":['.encode(), *choice, data.encode()))

    async def collect(self, events: Events) -> bytes:
        """One JSON object. Raises InvalidRequest if it would have more log probabilities than one may."""
        pieces, scores = dict[int, Piece](), 0
        texts: dict[int, list[str]] = defaultdict(list)
        async for index, event in events:
            piece = self._piece(index, event)
            if piece is not None:
                merged = pieces.setdefault(piece.choice.index, Piece(piece.choice))
                texts[piece.choice.index].append(piece.text)
                merged.parts += piece.parts
                merged.token_ids += piece.token_ids
                merged.scored.MergeFrom(piece.scored)
                more, most = piece.scored.logprobs, logprobs_json.MAX_SCORES
                scores = logprobs_json.check_scores(scores, more, most, "ask for fewer; a stream has no such bound")
                merged.prompt_logprobs = merged.prompt_logprobs or piece.prompt_logprobs
                merged.finish, merged.stop_reason, merged.receipt = piece.finish, piece.stop_reason, piece.receipt
        parts = [f'{self._opening}"choices":['.encode()]
        for place, (number, piece) in enumerate(sorted(pieces.items())):
            piece.text = "".join(texts.pop(number))
            parts += [b"," if place else b"", *await self._encoded(piece, self.message(piece))]
            await asyncio.sleep(0)
        return b"".join([*parts, f'],"usage":{encode(self._usage())}}}'.encode()])

    @abstractmethod
    def chunk(self, piece: Piece) -> dict[str, Any]:
        """A choice in a message of a stream, without its log probabilities."""

    @abstractmethod
    def message(self, piece: Piece) -> dict[str, Any]:
        """Likewise, in an answer without streaming."""

    @abstractmethod
    async def scores(self, piece: Piece) -> list[bytes]:
        """The piece's log probabilities as JSON, in parts."""

    async def _encoded(self, piece: Piece, fields: dict[str, Any]) -> list[bytes]:
        """The fields as JSON, in parts, with the piece's log probabilities, of which there may be hundreds of
        thousands."""
        more: list[bytes] = []
        if self._has_scores(piece):
            del fields["logprobs"]
            more += [b',"logprobs":', *await self.scores(piece)]
        if self._body.prompt_logprobs is not None:
            del fields["prompt_logprobs"]
            scores = await json_parts(partial(of_prompt, self._tokenizer), prompt_scores(piece.prompt_logprobs))
            more += [b',"prompt_logprobs":[', *scores, b"]"]
        return [encode(fields)[:-1].encode(), *more, b"}"]

    def _has_scores(self, piece: Piece) -> bool:
        return bool(piece.scored.token_ids)

    def _piece(self, index: int, event: generation_pb2.GenerateResponse) -> Piece | None:
        kind = event.WhichOneof("event")
        if kind == "started":
            self._prompt_tokens += event.started.prompt_tokens
            return None
        number = index * self._each + (event.delta.choice if kind == "delta" else event.finished.choice)
        if (choice := self._choices.get(number)) is None:
            texts = TokenTexts(self._tokenizer, special=self._body.skip_special_tokens is False)
            choice = self._choices[number] = Choice(number, texts)
        piece = Piece(choice)
        if kind == "delta":
            self._tokens += len(event.delta.token_ids)
            if event.delta.last:
                choice.held = event.delta
                return None
            self._add(piece, event.delta, index)
        else:
            if choice.held:
                self._add(piece, choice.held, index)
            self._finish(piece, event.finished)
        return piece

    def _add(self, piece: Piece, delta: generation_pb2.Delta, prompt: int) -> None:
        if delta.index == 0:
            self._begin(piece, delta, prompt)
        piece.text += delta.text
        piece.parts += parts_of(delta)
        if self._body.return_token_ids or delta.last:
            piece.token_ids += delta.token_ids
        if delta.HasField("logprobs"):
            piece.scored.token_ids.extend(delta.token_ids)
            piece.scored.logprobs.MergeFrom(delta.logprobs)

    def _begin(self, piece: Piece, delta: generation_pb2.Delta, prompt: int) -> None:
        """Adds the content before the first token."""
        if delta.HasField("prompt_logprobs"):
            piece.prompt_logprobs = delta.prompt_logprobs

    def _finish(self, piece: Piece, finished: generation_pb2.Finished) -> None:
        piece.text += finished.text
        piece.parts += parts_of(finished)
        self._reasoning_tokens += finished.receipt.reasoning_tokens
        stopped = finished.reason == common_pb2.FINISH_REASON_STOP
        piece.finish = "stop" if stopped else "length"
        last = piece.token_ids[-1] if piece.token_ids else None
        if finished.stop:
            piece.stop_reason = finished.stop
        elif stopped and last in (self._body.stop_token_ids or ()):
            piece.stop_reason = last
        if finished.choice == 0:  # the other choices found its prompt in the cache
            self._cached_tokens += finished.receipt.cached_tokens
        if self._body.tandem_receipt:
            piece.receipt = results.receipt(finished.receipt).to_dict()

    def _rest(self, piece: Piece) -> dict[str, Any]:
        return {"logprobs": None, "finish_reason": piece.finish, **self._extras(piece)}

    def _extras(self, piece: Piece) -> dict[str, Any]:
        """Fields that OpenAI's API does not have, if they were requested or have a value."""
        extras: dict[str, Any] = {}
        if piece.finish:
            extras["stop_reason"] = piece.stop_reason
        if self._body.return_token_ids:
            extras["token_ids"] = piece.token_ids
        if self._body.prompt_logprobs is not None:
            extras["prompt_logprobs"] = []
        if piece.receipt:
            extras["tandem_receipt"] = piece.receipt
        return extras

    def _usage_so_far(self) -> str:
        return f',"usage":{encode(self._usage())}' if self._usage_always else ""

    def _usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._tokens,
            "total_tokens": self._prompt_tokens + self._tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
        }


class CompletionsAnswer(Answer):
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    _body: Completions

    def __init__(self, *about: Any) -> None:
        """On a thread where the body is long: to decode an echoed prompt takes up to 50 ms."""
        super().__init__(*about)
        self._echoed = [prompt_text(one, self._tokenizer) for one in self._requests] if self._body.echo else []

    def chunk(self, piece: Piece) -> dict[str, Any]:
        return {"index": piece.choice.index, "text": piece.text, **self._rest(piece)}

    message = chunk

    def _piece(self, index: int, event: generation_pb2.GenerateResponse) -> Piece | None:
        if self._body.only_echo:
            _remove_completion(event)
        return super()._piece(index, event)

    def _begin(self, piece: Piece, delta: generation_pb2.Delta, prompt: int) -> None:
        super()._begin(piece, delta, prompt)
        if not self._body.echo:
            return
        piece.text = self._echoed[prompt]
        piece.choice.texts.offset = len(piece.text)

    async def scores(self, piece: Piece) -> list[bytes]:
        echoed = prompt_scores(piece.prompt_logprobs if self._body.echo else None)  # the first two parts read on in it
        parts: list[tuple[TokenTexts, Iterable[Scored]]] = [
            (TokenTexts(self._tokenizer, special=False), islice(echoed, self._unwritten(piece))),
            (TokenTexts(self._tokenizer, special=True, begins=True), echoed),
            (piece.choice.texts, answer_scores(piece.scored)),
        ]
        return await with_offsets(parts, as_ids=bool(self._body.return_tokens_as_token_ids))

    def _has_scores(self, piece: Piece) -> bool:
        echoed = self._body.echo and self._body.logprobs is not None and piece.prompt_logprobs is not None
        return bool(piece.scored.token_ids or echoed)

    def _unwritten(self, piece: Piece) -> int:
        """How many of the prompt's first tokens the tokenizer has put before its text."""
        is_text = self._requests[piece.choice.index // self._each].WhichOneof("input") == "text"
        if piece.prompt_logprobs is None or not is_text:
            return 0
        own = self._tokenizer.encode("", special=self._body.add_special_tokens is not False)
        return len(own) if piece.prompt_logprobs.token_ids[: len(own)] == own else 0


class ChatAnswer(Answer):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    _body: Chat
    _roles_sent = False

    async def stream(self, index: int, event: generation_pb2.GenerateResponse) -> bytes:
        """Several choices begin with their roles, in order: OpenAI's client takes their places from the order in which
        they begin, and the log probabilities of a later one's first message twice."""
        message = await super().stream(index, event)
        if self._roles_sent or not message:
            return message
        self._roles_sent = True
        return "".join(map(self._role, range(self._each))).encode() + message

    def _role(self, number: int) -> str:
        delta = {"role": "assistant", "content": ""}
        choice = encode({"index": number, "delta": delta, "logprobs": None, "finish_reason": None})
        return f'data: {self._opening}"choices":[{choice}]{self._usage_so_far()}}}\n\n'

    def chunk(self, piece: Piece) -> dict[str, Any]:
        fields = self._fields(piece)
        calls = fields.pop("tool_calls", [])
        delta = {name: text for name, text in fields.items() if text}
        if calls:
            delta["tool_calls"] = calls
        if not delta:
            delta = {"content": ""}
        if self._each == 1 and not self._roles_sent:
            self._roles_sent = True
            delta = {"role": "assistant", "content": "", **delta}
        return {"index": piece.choice.index, "delta": delta, **self._rest(piece)}

    def message(self, piece: Piece) -> dict[str, Any]:
        fields = self._fields(piece)
        if calls := fields.get("tool_calls"):
            fields["tool_calls"] = [{key: value for key, value in call.items() if key != "index"} for call in calls]
            fields["content"] = fields["content"] if fields["content"].strip() else None
        return {"index": piece.choice.index, "message": {"role": "assistant", **fields}, **self._rest(piece)}

    def _fields(self, piece: Piece) -> dict[str, Any]:
        """The content, and if present the reasoning and the calls: id and name of each call that the piece begins, and
        its pieces of arguments."""
        reasoned, calls, arguments = list[str](), list[dict[str, Any]](), list[list[str]]()
        for part in piece.parts:
            match part:
                case Reasoning(text):
                    reasoned.append(text)
                case CallBegin(id, name):
                    about = {"index": piece.choice.calls, "id": id, "type": "function", "function": {"name": name}}
                    calls.append(about)
                    arguments.append([])
                    piece.choice.calls += 1
                case CallArguments(text):
                    if not calls:
                        calls.append({"index": piece.choice.calls - 1, "function": {}})
                        arguments.append([])
                    arguments[-1].append(text)
        reasoning = "".join(reasoned)
        for call, texts in zip(calls, arguments, strict=True):
            call["function"]["arguments"] = "".join(texts)
        cut = isinstance(piece.stop_reason, str)  # by a stop string, perhaps within a call
        if piece.finish == "stop" and piece.choice.calls and not self._body.names_tool and not cut:
            piece.finish = "tool_calls"
        content = piece.text
        if content.isspace() and self._body.forced() is not None:
            content = ""  # space between calls
        fields: dict[str, Any] = {"content": content}
        if reasoning:  # field names of DeepSeek's API, and of vLLM and OpenRouter
            fields |= {"reasoning_content": reasoning, "reasoning": reasoning}
        return fields | ({"tool_calls": calls} if calls else {})

    async def scores(self, piece: Piece) -> list[bytes]:
        make = partial(of_answer, self._tokenizer, as_ids=bool(self._body.return_tokens_as_token_ids))
        return [b'{"content":[', *await json_parts(make, answer_scores(piece.scored)), b"]}"]


def answer(
    body: Sampled, request_id: str, model: str, tokenizer: Tokenizer, requests: Sequence[generation_pb2.GenerateRequest]
) -> Answer:
    kind = ChatAnswer if isinstance(body, Chat) else CompletionsAnswer
    return kind(body, request_id, model, tokenizer, requests)


def _remove_completion(event: generation_pb2.GenerateResponse) -> None:
    """Keeps only the prompt's part."""
    if event.HasField("delta"):
        del event.delta.token_ids[:]
        event.delta.text = ""
        event.delta.ClearField("logprobs")
    elif event.HasField("finished"):
        event.finished.text = event.finished.stop = ""
        event.finished.reason = common_pb2.FINISH_REASON_LENGTH
