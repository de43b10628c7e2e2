"""Whatever comes to the two front doors has a documented answer and brings nothing down.

Requests are made of what the protocol and the bodies' models say they have, so that new fields are tried as well. By
hand, with other examples each time and as many as one likes: FUZZ_EXAMPLES=5000 pytest tests/journey/test_fuzz.py
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import struct
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from services.router import openai, servicer
from services.router.admit import MAX_N
from tandem.errors import InvalidRequest
from tandem.status import from_rpc
from tandem.v1 import common_pb2, generation_pb2
from tests import oracle
from tests.templates import HERMES

DEMO = Path(__file__).parents[2] / "demo/model"
CONTEXT = 96  # short, so that an answer of any length is quick
BY_HAND = int(os.environ.get("FUZZ_EXAMPLES", 0))
REFUSALS = {"INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED"}
GENERATE = "/tandem.v1.GenerationService/Generate"
TOOL = b'[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]'
SCHEMA = (
    b'{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}'
)
KINDS = FieldDescriptor


def bounded(examples: int) -> settings:
    """The same few examples in every run; when done by hand, many others."""
    return settings(
        max_examples=BY_HAND or examples,
        derandomize=not BY_HAND,
        database=None,
        deadline=None,
        phases=[Phase.generate, *([Phase.shrink] if BY_HAND else [])],
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture
def cluster(inside: Any, tmp_path: Path) -> Any:
    """One that knows text, chats and tools. At its end it serves what it served before, and nothing is left of all
    that was asked."""

    @asynccontextmanager
    async def start() -> AsyncIterator[Any]:
        folder = tmp_path / "model"
        shutil.copytree(DEMO, folder)
        (folder / "chat_template.jinja").write_text(HERMES)
        async with inside(model=str(folder), http_port=0, max_model_len=CONTEXT, kv_blocks=512) as one:
            lives = {name: worker.incarnation for name, worker in one.workers.items()}
            yield one
            prompt = oracle.prompts(DEMO, [30])[0]
            done = await one.client.generate(prompt, max_tokens=8, ignore_eos=True)
            assert done.token_ids == oracle.greedy(DEMO, prompt, 8)
            assert (done.receipt.path, done.receipt.attempts) == ("disaggregated", 1)
            await one.freed()
            assert await one.ledgers_balance()
            assert {name: worker.incarnation for name, worker in one.workers.items()} == lives

    return start


async def each(examples: int, strategy: st.SearchStrategy[Any], check: Callable[[Any], Any]) -> None:
    """Hypothesis is no coroutine: it runs on a thread and hands each example to this loop."""
    loop = asyncio.get_running_loop()

    @bounded(examples)
    @given(strategy)
    def run(example: Any) -> None:
        asyncio.run_coroutine_threadsafe(check(example), loop).result(60)

    await asyncio.to_thread(run)


# ---- what is sent over gRPC: bytes, because no message can hold all that a client can send

NUMBERS = [0, 1, 2, 3, 5, 16, 17, 20, 64, 90, 301, -1, -2, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, -(2**63)]
INTEGERS = st.sampled_from(NUMBERS) | st.integers(0, 20) | st.integers(-(2**63), 2**63 - 1)
FLOATS = [0.0, -0.0, 0.5, 1.0, 2.0, 5e-324, 1e308, math.inf, -math.inf, math.nan, -1.0, 100.0, 1.0001]
DOUBLES = st.sampled_from(FLOATS) | st.floats(0, 2) | st.floats()
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
    *(
        b'{"type": "string", "format": []}',
        b'{"type": [[]]}',
        b'{"$ref": "#"}',
        b'{"type": "integer", "maximum": 1e400}',
    ),
    b'{"type": "object", "properties": {"' + b"z" * 60_000 + b'": {"type": "x"}}}',
    b'[{"function": {"name": "f", "x": ' + b"[" * 900 + b"]" * 900 + b"}}]",
    *(b"[" * 900 + b"]" * 900, b'{"items":' * 900 + b"1" + b"}" * 900),
    *(b"[a-z]{3}", b"(a|b)*", b"(a+)+$", b"(", b"a{1,99999}", b"\\d+", b"(?<=a)b", b"\\1", b"[^a]", b"(?i)a"),
    *(b'root ::= "a" | "b" root', b"root ::= root", b"root ::= [", b"x", b'root ::= ("" | "a")*'),
]
BYTES = st.sampled_from(SAID) | st.binary(max_size=20) | st.text(max_size=8).map(str.encode)


def varint(number: int) -> bytes:
    number &= 2**64 - 1
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def sized(data: bytes) -> bytes:
    return varint(len(data)) + data


def payload(field: FieldDescriptor) -> tuple[int, st.SearchStrategy[bytes]]:
    """The wire type of a field, and what may stand there."""
    if field.type == KINDS.TYPE_MESSAGE:
        return 2, message(field.message_type).map(sized)
    if field.type in (KINDS.TYPE_STRING, KINDS.TYPE_BYTES):
        return 2, BYTES.map(sized)
    if field.type == KINDS.TYPE_DOUBLE:
        return 1, DOUBLES.map(lambda value: struct.pack("<d", value))
    assert field.type in (KINDS.TYPE_INT64, KINDS.TYPE_UINT64, KINDS.TYPE_UINT32, KINDS.TYPE_BOOL), field.name
    return 0, INTEGERS.map(varint)


@st.composite
def message(draw: Any, of: Descriptor) -> bytes:
    """Some fields of a message, one after another: also twice, or several of those that exclude each other."""
    out = b""
    for field in draw(st.lists(st.sampled_from(list(of.fields)), max_size=4)):
        kind, values = payload(field)
        many = draw(st.sampled_from([1, 1, 1, 2, 17, 2000])) if field.is_repeated else 1
        one = varint(field.number << 3 | kind) + draw(values)
        out += one * max(1, min(many, 2**20 // len(one)))
    return out


@st.composite
def one_field(draw: Any, of: Descriptor) -> bytes:
    """One value somewhere in a message, each place as likely as any other."""
    *way, last = draw(st.sampled_from(list(places(of))))
    kind, values = payload(last)
    out = (varint(last.number << 3 | kind) + draw(values)) * (draw(st.sampled_from([1, 17])) if last.is_repeated else 1)
    for field in reversed(way):
        out = varint(field.number << 3 | 2) + sized(out)
    return out


def places(of: Descriptor) -> Iterator[list[FieldDescriptor]]:
    for field in of.fields:
        if field.type == KINDS.TYPE_MESSAGE and not field.message_type.GetOptions().map_entry:
            yield from ([field, *rest] for rest in places(field.message_type))
        else:
            yield [field]


def request(**fields: Any) -> bytes:
    given = {"text": b"Return the", **fields}
    return generation_pb2.GenerateRequest(**given).SerializeToString()


IDS = generation_pb2.TokenIds(ids=[5, 6, 7])
TURN = {"role": "user", "content": b"What does sorted do?"}
GOOD = [
    request(sampling={"max_tokens": 4}),
    request(sampling={"max_tokens": 4, "temperature": 1.0, "seed": 3, "logprobs": 2, "prompt_logprobs": 1}),
    request(text=None, token_ids=IDS),
    request(text=None, chat={"messages": [TURN], "tools": TOOL}, sampling={"max_tokens": 30}),
    request(sampling={"grammar": {"json_schema": SCHEMA}, "temperature": 1.0, "max_tokens": 40}),
    request(sampling={"n": 3, "max_tokens": 6, "temperature": 1.0}),
    b"",
]


@st.composite
def requests(draw: Any) -> bytes:
    """A good one and something behind it, which protobuf takes for more of the same message; at times cut or random."""
    of = generation_pb2.GenerateRequest.DESCRIPTOR
    raw: bytes = draw(st.sampled_from(GOOD)) + draw(one_field(of) | message(of))
    match draw(st.integers(0, 15)):
        case 0:
            return raw[: draw(st.integers(0, len(raw)))]
        case 1:
            return raw + draw(st.binary(max_size=30))
        case 2:
            return raw + varint(9999 << 3 | 2) + sized(b"a field that nobody knows")
    return raw


# ---- what may come back over gRPC


def check_events(asked: generation_pb2.GenerateRequest, events: list[Any], vocab: int) -> None:
    """The answer keeps to what was asked for."""
    how = asked.sampling
    started = events[0].started
    each = how.n if how.HasField("n") else 1
    assert started.choices == each <= MAX_N
    most = how.max_tokens if how.HasField("max_tokens") else CONTEXT
    most = min(most, CONTEXT - started.prompt_tokens)
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
        assert all(token < vocab for token in tokens[choice])
        assert (end.receipt.completion_tokens, end.receipt.choices) == (count, each)
        if end.reason == common_pb2.FINISH_REASON_STOP:
            assert count > how.min_tokens or end.stop
            assert end.stop or tokens[choice][-1] in (0, *how.stop_token_ids)
        else:
            assert (end.reason, count) == (common_pb2.FINISH_REASON_LENGTH, most)
        if end.stop:
            assert end.stop.encode() in how.stop
            assert texts[choice].endswith(end.stop) or not how.include_stop
        elif how.min_tokens == 0:
            assert not any(stop.decode() in texts[choice] for stop in how.stop)


def check_refusal(error: grpc.aio.AioRpcError) -> None:
    known = from_rpc(error)
    assert error.code().name in REFUSALS, (error.code(), error.details())
    assert known.message
    assert known.reason == known.reason.upper()
    assert len(known.message) <= 1000
    if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
        assert isinstance(known, InvalidRequest)
        assert known.field, known.message


def bug(*_: Any) -> None:
    raise RuntimeError("put here by the test")


async def test_any_bytes_over_grpc_get_a_documented_status(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer within its limits, or a refusal that names the field; what is no message is refused as such. A bug
    would be noticed."""
    outcomes: dict[str, int] = {}
    async with cluster() as it, grpc.aio.insecure_channel(it.router.address) as channel:
        generate = channel.unary_stream(
            GENERATE, request_serializer=None, response_deserializer=generation_pb2.GenerateResponse.FromString
        )
        vocab = it.workers["decode-0"].engine.model.vocab_size

        async def check(raw: bytes) -> None:
            try:
                asked = generation_pb2.GenerateRequest.FromString(raw)
            except DecodeError:
                asked = None
            status = "OK"
            try:
                events = [event async for event in generate(raw, timeout=30)]
            except grpc.aio.AioRpcError as error:
                check_refusal(error)
                status = error.code().name
                assert asked is not None or status == "INVALID_ARGUMENT" or len(raw) > it.settings.max_prompt_bytes
            else:
                assert asked is not None
                check_events(asked, events, vocab)
            outcomes[status] = outcomes.get(status, 0) + 1

        await each(300, requests(), check)
        assert outcomes["OK"] >= 10, outcomes
        assert outcomes["INVALID_ARGUMENT"] >= 10, outcomes
        with monkeypatch.context() as broken, pytest.raises(AssertionError):
            broken.setattr(servicer, "admit", bug)
            await check(GOOD[0])


# ---- what is sent over HTTP: text, because JSON can say what Python's encoder would not


def written(fields: dict[str, str]) -> str:
    return "{" + ", ".join(f"{name}: {value}" for name, value in fields.items()) + "}"


ANY_TEXT = st.text(st.characters(exclude_categories=[]), max_size=8)  # with lone surrogates
ATOMS = st.sampled_from(
    [
        *("null", "true", "false", "0", "1", "2", "4", "17", "-1", "1.5", "0.5", "1e400", "-1e400", "NaN", "Infinity"),
        *(str(2**31 - 1), str(2**63), str(-(2**63)), str(2**64), "9" * 400, "9" * 5000, "5e-324", "1e308"),
        *('""', '"a"', '"\\ud800"', '"\\u0000"', '"user"', '"none"', '"auto"', '"required"', '"text"', '"x\\r\\ny: z"'),
        *("[" * 900 + "]" * 900, '{"a":' * 900 + "1" + "}" * 900, "[" * 3000 + "]" * 3000, json.dumps("y" * 3000)),
        *(TOOL.decode(), SCHEMA.decode(), json.dumps(SCHEMA.decode()), "[5, 6, 7]", '["a", "b"]', '{"5": 1, "6": -2}'),
        *('{"type": "json_object"}', '{"type": "text"}', '{"regex": "[a-c]{3}"}', '{"include_usage": true}'),
        *('[{"role": "user", "content": "hi"}]', '[{"role": "user", "content": [{"type": "text", "text": "hi"}]}]'),
        *(
            '{"\\ud800": 1}',
            '{"type": "\\ud800"}',
            '[{"\\ud800": 1}]',
            '{"type": "function", "function": {"name": "f"}}',
        ),
        '{"type": "json_schema", "json_schema": {"schema": {"type": "object", "\\ud800": 1}}}',
        '[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{\\"a\\": 1}"}}]}]',
        '[{"role": "tool", "tool_call_id": "x", "content": null}]',
    ]
)
VALUES = st.recursive(
    ATOMS | st.integers().map(str) | ANY_TEXT.map(json.dumps),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]")
        | st.dictionaries(ANY_TEXT.map(json.dumps), inner, max_size=3).map(written)
    ),
    max_leaves=4,
)


def names(*models: Any) -> Iterable[str]:
    """What a body may have, as clients spell it."""
    fields = {name: about for model in models for name, about in model.model_fields.items()}
    return sorted({about.alias or name for name, about in fields.items()} | openai.NOT_SERVED.keys())


KEYS = st.sampled_from(names(openai.Completions, openai.Chat)).map(json.dumps)
BODIES = {
    "/v1/completions": {'"prompt"': '"Return the"', '"max_tokens"': "4"},
    "/v1/chat/completions": {'"messages"': '[{"role": "user", "content": "hi"}]', '"max_tokens"': "4"},
    "/tokenize": {'"prompt"': '"Return the"'},
    "/detokenize": {'"tokens"': "[5, 6]"},
}


@st.composite
def bodies(draw: Any) -> tuple[str, bytes]:
    """A good body with some fields replaced by anything; at times cut, or bytes that are no body."""
    path = draw(st.sampled_from([*BODIES, "/v1/completions", "/v1/chat/completions"]))
    own = [*BODIES[path], '"tokens"', '"stream"']
    extra = draw(st.dictionaries(KEYS | st.sampled_from(own) | ANY_TEXT.map(json.dumps), VALUES, max_size=4))
    if draw(st.booleans()):
        extra['"stream"'] = "true"
    body = written({**BODIES[path], **extra}).encode()
    match draw(st.integers(0, 15)):
        case 0:
            return path, body[: draw(st.integers(0, len(body)))]
        case 1:
            return path, draw(st.binary(max_size=30))
        case 2:
            at = draw(st.integers(0, len(body) - 1))
            return path, body[:at] + draw(st.binary(min_size=1, max_size=2)) + body[at + 1 :]
    return path, body


def check_http(path: str, sent: bytes, answer: httpx2.Response) -> None:
    """OK within its limits, or an error in OpenAI's shape that is the client's fault."""
    if answer.status_code != 200:
        assert answer.status_code in (400, 404, 429), (answer.status_code, answer.text)
        check_error(answer.json()["error"])
        return
    asked = json.loads(sent)
    if "completions" not in path:
        assert answer.json().keys() & {"tokens", "prompt"}
        return
    if not asked.get("stream"):
        choices = answer.json()["choices"]
        assert answer.json()["usage"]["completion_tokens"] <= len(choices) * CONTEXT
    else:
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        if lines[-1] != "[DONE]":
            check_error(json.loads(lines[-1])["error"])
            return
        choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"] if choice["finish_reason"]]
    prompts = asked.get("prompt") if path == "/v1/completions" else None
    several = len(prompts) if isinstance(prompts, list) and not isinstance(prompts[0], int) else 1
    assert len(choices) == (asked.get("n") or 1) * several
    assert {choice["finish_reason"] for choice in choices} <= {"stop", "length", "tool_calls"}


def check_error(error: dict[str, Any]) -> None:
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["code"] != "INTERNAL", error
    assert 0 < len(error["message"]) <= 1000


async def test_any_body_over_http_gets_a_documented_status(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 within its limits or an error of the client's, never 500; streams end in [DONE] or in such an error. A bug
    would be noticed."""
    outcomes: dict[int, int] = {}
    async with cluster() as it, httpx2.AsyncClient(base_url=f"http://{it.router.http.address}", timeout=30) as client:

        async def check(example: tuple[str, bytes]) -> None:
            path, body = example
            answer = await client.post(path, content=body, headers={"content-type": "application/json"})
            check_http(path, body, answer)
            outcomes[answer.status_code] = outcomes.get(answer.status_code, 0) + 1

        await each(400, bodies(), check)
        assert outcomes[200] >= 10, outcomes
        assert outcomes[400] >= 10, outcomes
        with monkeypatch.context() as broken, pytest.raises(AssertionError):
            broken.setattr(servicer, "admit", bug)
            await check(("/v1/completions", b'{"prompt": "x"}'))


async def test_bytes_that_are_no_http_at_all_end_one_connection(cluster: Any) -> None:
    """Answered with 400 or hung up on, or waited for while they may become a request."""
    start = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    lines = st.sampled_from(
        [b"", start, b"GET /health HTTP/1.1\r\n", start + b"content-length: ", b"PRI * HTTP/2.0\r\n"]
    )
    values = st.sampled_from([b"-1\r\n\r\n", b"9" * 30 + b"\r\n\r\n", b"2\r\n\r\n{}", b"x-request-id: \xff\r\n\r\n"])
    async with cluster() as it:
        host, port = it.router.http.address.split(":")

        async def check(sent: bytes) -> None:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            writer.write_eof()
            got = await asyncio.wait_for(reader.read(), 10)
            writer.close()
            assert not got or got.startswith(b"HTTP/1.1 ")
            assert b"HTTP/1.1 5" not in got

        await each(60, st.tuples(lines, values | st.binary(max_size=60)).map(b"".join), check)
