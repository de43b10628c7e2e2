"""Generated requests over gRPC, each of which must have a documented answer.

A case is a valid request followed by bytes that protobuf reads as more of the same message: an unusual value in some
field, some fields of any message, or random bytes. It depends on its seed and number only.
"""

from __future__ import annotations

import asyncio
import math
import random
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from tandem import settings
from tandem.errors import InvalidRequest
from tandem.grpc_errors import from_rpc
from tandem.v1 import common_pb2, generation_pb2

CONTEXT = 96
GENERATE = "/tandem.v1.GenerationService/Generate"
REFUSALS = {"INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED"}
TIMEOUT_S = 120.0  # of one case

# ---- what is sent: bytes, because no message can hold all that a client can send

TOOL = b'[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]'
SCHEMA = (
    b'{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}'
)
TEMPLATE = (
    "{%- if tools %}{{ tools | tojson }} as <tool_call>...</tool_call>{% endif -%}{%- for message in messages %}"
    "{% if message.role == 'skip' %}{% continue %}{% endif -%}<|{{ message.role }}|>{{ message.content }}{%- endfor %}"
)
NUMBERS = [0, 1, 2, 3, 5, 16, 17, 20, 64, 90, 301, -1, -2, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, -(2**63)]
FLOATS = [0.0, -0.0, 0.5, 1.0, 2.0, 5e-324, 1e308, math.inf, -math.inf, math.nan, -1.0, 100.0, 1.0001]
SAID = [
    *(b"", b"a", b" ", b"Return the", "naïve 🙂 \u202e\u200d".encode(), b"user", b"tool", b"mine", b"\0", b"\n"),
    *(b"\xff", b"\xc3", b"\xed\xa0\x80", b"x" * 257, b"y" * 70_000, b"<|end|>", b"<tool_call>"),
    *(
        TOOL,
        SCHEMA,
        b"{}",
        b"[]",
        b"null",
        b"1",
        b"NaN",
        b'"x"',
        b'{"type": "string"}',
        b'[{"function": {"name": "f"}}]',
    ),
    *(b'[{"function": {"name": "\\ud800"}}]', b'{"\\ud800": 1}', b'{"const": "\\ud800"}', b'{"enum": [NaN, 1e400]}'),
    *(b'{"type": "string", "format": []}', b'{"type": [[]]}', b'{"$ref": "#"}'),
    b'{"type": "integer", "maximum": 1e400}',
    b'{"type": "object", "properties": {"' + b"z" * 60_000 + b'": {"type": "x"}}}',
    b'[{"function": {"name": "f", "x": ' + b"[" * 900 + b"]" * 900 + b"}}]",
    *(b"[" * 900 + b"]" * 900, b'{"items":' * 900 + b"1" + b"}" * 900),
    *(b"[a-z]{3}", b"(a|b)*", b"(a+)+$", b"(", b"a{1,99999}", b"\\d+", b"(?<=a)b", b"\\1", b"[^a]", b"(?i)a"),
    *(b'root ::= "a" | "b" root', b"root ::= root", b"root ::= [", b"x", b'root ::= ("" | "a")*'),
]
KINDS = FieldDescriptor


def varint(number: int) -> bytes:
    number &= 2**64 - 1
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def sized(data: bytes) -> bytes:
    return varint(len(data)) + data


def places(of: Any) -> Iterator[list[FieldDescriptor]]:
    """The way to each field that holds a value."""
    for descriptor in of.fields:
        if descriptor.type == KINDS.TYPE_MESSAGE and not descriptor.message_type.GetOptions().map_entry:
            yield from ([descriptor, *rest] for rest in places(descriptor.message_type))
        else:
            yield [descriptor]


def request(**fields: Any) -> bytes:
    return generation_pb2.GenerateRequest(**{"text": b"Return the", **fields}).SerializeToString()


TURN = {"role": "user", "content": b"What does sorted do?"}
GOOD = [
    request(sampling={"max_tokens": 4}),
    request(sampling={"max_tokens": 4, "temperature": 1.0, "seed": 3, "logprobs": 2, "prompt_logprobs": 1}),
    request(text=None, token_ids=generation_pb2.TokenIds(ids=[5, 6, 7])),
    request(text=None, chat={"messages": [TURN], "tools": TOOL}, sampling={"max_tokens": 30}),
    request(text=None, chat={"messages": [TURN], "tools": TOOL, "tool_choice": {}}, sampling={"max_tokens": 40}),
    request(sampling={"grammar": {"json_schema": SCHEMA}, "temperature": 1.0, "max_tokens": 40}),
    request(sampling={"n": 3, "max_tokens": 6, "temperature": 1.0}),
    b"",
]
REQUEST = generation_pb2.GenerateRequest.DESCRIPTOR
PLACES = list(places(REQUEST))


def case(seed: int, number: int) -> bytes:
    """The bytes of one request."""
    chance = random.Random(f"{seed}/{number}")
    raw = chance.choice(GOOD) + (_one_field(chance) if chance.random() < 0.6 else _message(chance, REQUEST))
    match chance.randrange(16):
        case 0:
            return raw[: chance.randint(0, len(raw))]
        case 1:
            return raw + chance.randbytes(chance.randint(0, 30))
        case 2:
            return raw + varint(9999 << 3 | 2) + sized(b"a field that nobody knows")
        case 3 if raw:
            at = chance.randrange(len(raw))
            return raw[:at] + bytes([raw[at] ^ 1 << chance.randrange(8)]) + raw[at + 1 :]
    return raw


def _one_field(chance: random.Random) -> bytes:
    """One value somewhere in a request, each place as likely as any other."""
    *path, last = chance.choice(PLACES)
    out = _field(chance, last) * (chance.choice([1, 17]) if last.is_repeated else 1)
    for parent in reversed(path):
        out = varint(parent.number << 3 | 2) + sized(out)
    return out


def _message(chance: random.Random, of: Any) -> bytes:
    """Some fields of a message, one after another: also twice, or several of those that exclude each other."""
    out = b""
    for descriptor in chance.choices(list(of.fields), k=chance.randint(0, 4)):
        encoded = _field(chance, descriptor)
        many = chance.choice([1, 1, 1, 2, 17, 2000]) if descriptor.is_repeated else 1
        out += encoded * max(1, min(many, 2**20 // len(encoded)))
    return out


def _field(chance: random.Random, field: FieldDescriptor) -> bytes:
    if field.type == KINDS.TYPE_MESSAGE:
        kind, value = 2, sized(_message(chance, field.message_type))
    elif field.type in (KINDS.TYPE_STRING, KINDS.TYPE_BYTES):
        plain = chance.random() < 0.7
        kind, value = 2, sized(chance.choice(SAID) if plain else chance.randbytes(chance.randint(0, 20)))
    elif field.type == KINDS.TYPE_DOUBLE:
        plain = chance.random() < 0.7
        kind, value = 1, struct.pack("<d", chance.choice(FLOATS)) if plain else chance.randbytes(8)
    else:
        assert field.type in (KINDS.TYPE_INT64, KINDS.TYPE_UINT64, KINDS.TYPE_UINT32, KINDS.TYPE_BOOL), field.name
        near = chance.randint(0, 20) if chance.random() < 0.5 else chance.getrandbits(64)
        kind, value = 0, varint(chance.choice(NUMBERS) if chance.random() < 0.5 else near)
    return varint(field.number << 3 | kind) + value


# ---- what may come back


def check_events(asked: generation_pb2.GenerateRequest, events: list[Any], model: Any) -> None:
    """The answer keeps to what was asked for. Raises AssertionError."""
    how = asked.sampling
    started = events[0].started
    each = how.n if how.HasField("n") else 1
    assert started.choices == each
    most = how.max_tokens if how.HasField("max_tokens") else model.max_context_tokens
    most = min(most, model.max_context_tokens - started.prompt_tokens)
    tokens: dict[int, list[int]] = {choice: [] for choice in range(each)}
    texts = dict.fromkeys(range(each), "")
    ended: dict[int, Any] = {}
    for event in events[1:]:
        if event.HasField("delta"):
            delta = event.delta
            assert delta.index == len(tokens[delta.choice])
            assert delta.choice not in ended
            if delta.index == 0 and how.HasField("prompt_logprobs"):
                scores = delta.prompt_logprobs
                assert len(scores.token_ids) == len(scores.logprobs.chosen) + 1 == started.prompt_tokens
            assert delta.HasField("logprobs") == how.HasField("logprobs")
            assert len(delta.logprobs.chosen) == len(delta.token_ids) * how.HasField("logprobs")
            assert len(delta.logprobs.top) == len(delta.token_ids) * how.logprobs
            tokens[delta.choice] += delta.token_ids
            texts[delta.choice] += delta.text
        else:
            assert event.finished.choice not in ended
            ended[event.finished.choice] = event.finished
            texts[event.finished.choice] += event.finished.text
    assert ended.keys() == tokens.keys()
    for choice, end in ended.items():
        count = len(tokens[choice])
        assert 1 <= count <= most
        assert all(token < model.vocab_size for token in tokens[choice])
        assert (end.receipt.completion_tokens, end.receipt.choices) == (count, each)
        if end.reason == common_pb2.FINISH_REASON_STOP:
            assert count > how.min_tokens or end.stop
            assert end.stop or tokens[choice][-1] in (*model.eos_token_ids, *how.stop_token_ids)
        else:
            assert (end.reason, count) == (common_pb2.FINISH_REASON_LENGTH, most)
        if end.stop:
            assert end.stop.encode() in how.stop
            assert texts[choice].endswith(end.stop) or not how.include_stop
        elif how.min_tokens == 0:
            assert not any(stop.decode() in texts[choice] for stop in how.stop)


def check_refusal(error: grpc.aio.AioRpcError) -> None:
    """A documented status that names the field. Raises AssertionError."""
    known = from_rpc(error)
    assert error.code().name in REFUSALS, (error.code(), error.details())
    assert known.message
    assert known.reason == known.reason.upper()
    assert len(known.message) <= 1000
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        assert isinstance(known, InvalidRequest)
        assert known.field, known.message


@dataclass
class Fuzz:
    """Cases sent to one router."""

    channel: grpc.aio.Channel
    model: generation_pb2.GetModelInfoResponse
    longest: int = settings.Settings.model_fields["max_prompt_bytes"].default
    outcomes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._generate: Any = self.channel.unary_stream(
            GENERATE, request_serializer=None, response_deserializer=generation_pb2.GenerateResponse.FromString
        )

    @classmethod
    async def at(cls, channel: grpc.aio.Channel) -> Fuzz:
        info = channel.unary_unary(
            "/tandem.v1.GenerationService/GetModelInfo",
            request_serializer=generation_pb2.GetModelInfoRequest.SerializeToString,
            response_deserializer=generation_pb2.GetModelInfoResponse.FromString,
        )
        return cls(channel, await info(generation_pb2.GetModelInfoRequest()))

    async def ask(self, raw: bytes) -> None:
        """One case. Raises AssertionError for an answer that is not documented."""
        try:
            asked = generation_pb2.GenerateRequest.FromString(raw)
        except DecodeError:
            asked = None
        status = "OK"
        try:
            events = [event async for event in self._generate(raw, timeout=TIMEOUT_S)]
        except grpc.aio.AioRpcError as error:
            check_refusal(error)
            status = error.code().name
            assert asked is not None or status == "INVALID_ARGUMENT" or len(raw) > self.longest
        else:
            assert asked is not None
            check_events(asked, events, self.model)
        self.outcomes[status] += 1

    async def cases(self, seed: int, numbers: range, at_once: int) -> None:
        """All of them. Raises AssertionError that names the first one that went wrong."""
        left = iter(numbers)

        async def client_loop() -> None:
            for number in left:
                try:
                    await self.ask(case(seed, number))
                except AssertionError as error:
                    raise AssertionError(f"case {number} of seed {seed}: {error}") from error

        lanes = [asyncio.create_task(client_loop()) for _ in range(at_once)]
        try:
            await asyncio.gather(*lanes)
        finally:
            for task in lanes:
                task.cancel()
