"""Answers in the format of the Responses API: whatever the order of the parts and wherever they are cut, the events are
those of OpenAI's own models, and the SDK's accumulator makes the same response of them as without a stream."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from services.router.answer.part_messages import put_parts
from services.router.answer.parts import CallArguments, CallBegin, Part, Reasoning, Text, joined
from services.router.frontend.openai import logprobs_json, openai_protocol, responses_answer
from services.router.frontend.openai.responses_answer import Keep, ResponsesAnswer
from services.router.frontend.openai.responses_body import Responses
from services.router.frontend.openai.responses_items import opened
from services.router.preprocess.sampling_defaults import Defaults
from services.router.preprocess.tokenizer import Tokenizer
from tandem.errors import Busy, InvalidRequest, TandemError, TooLarge, Unavailable, WorkerLost
from tandem.v1 import common_pb2, generation_pb2
from tests.support.stopwatch import ThreadTime

TOKENIZER = Tokenizer.load(Path(__file__).parents[2] / "demo/model")
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ID = "resp_" + "ab" * 24
TOOLS = [
    {"type": "function", "name": "shell", "parameters": {}, "strict": False},
    {"type": "custom", "name": "apply_patch"},
    {"type": "namespace", "name": "mcp__docs", "description": "d", "tools": [{"type": "function", "name": "get"}]},
]
ARGUMENTS = '{"cmd": "ls \\"ü\\""}'
SEGMENTS: dict[str, list[Part]] = {  # parts of which answers are made, in every order
    "reasoning": [Reasoning("I think\nof ü")],
    "text": [Text("The answer is 4.")],
    "call": [CallBegin("call_1", "shell"), CallArguments(ARGUMENTS)],
    "custom": [CallBegin("call_2", "apply_patch"), CallArguments('{"input": "*** Begin\\n"}')],
    "namespace": [CallBegin("call_3", "mcp__docs__get"), CallArguments("{}")],
}
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


def answer(keep: Keep | None = None, **fields: Any) -> ResponsesAnswer:
    body = openai_protocol.parse(json.dumps({"input": "x", "tools": TOOLS, **fields}).encode(), Responses)
    body.begin(lambda prefix: f"{prefix}_0", [])
    (request,) = openai_protocol.requests(body, "id", Defaults())
    return ResponsesAnswer(body, ID, json.dumps(body.shown("m", request.sampling)).encode(), TOKENIZER, keep)


def cut(parts: Iterable[Part], size: int) -> list[Part]:
    """The same parts, in pieces of `size` characters."""
    found: list[Part] = []
    for part in parts:
        if isinstance(part, CallBegin):
            found.append(part)
        else:
            found += [type(part)(part.text[at : at + size]) for at in range(0, len(part.text), size)]
    return found


def events(
    parts: list[Part], reason: common_pb2.FinishReason = STOP, each: int = 1
) -> list[generation_pb2.GenerateResponse]:
    """An answer with `each` of the parts in a delta; the last ones come with `finished`."""
    started = generation_pb2.GenerateResponse()
    started.started.prompt_tokens = 10
    found = [started]
    groups = [parts[at : at + each] for at in range(0, len(parts), each)]
    for group in groups[:-1]:
        one = generation_pb2.GenerateResponse()
        one.delta.token_ids.append(66)
        put_parts(one.delta, group)
        found.append(one)
    last = generation_pb2.GenerateResponse()
    last.finished.reason = reason
    put_parts(last.finished, groups[-1] if groups else [])
    last.finished.receipt.cached_tokens, last.finished.receipt.reasoning_tokens = 8, 2
    return [*found, last]


async def streamed(encoder: ResponsesAnswer, made: list[generation_pb2.GenerateResponse]) -> list[dict[str, Any]]:
    """The data of the events; each has the line of its type, and is one of OpenAI's."""
    text = b"".join([await encoder.stream(0, event) for event in made]).decode()
    return parsed(text)


def parsed(text: str) -> list[dict[str, Any]]:
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        kind, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == f"event: {found[-1]['type']}"
        EVENT.validate_python(found[-1])
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    return found


async def collected(encoder: ResponsesAnswer, made: list[generation_pb2.GenerateResponse]) -> dict[str, Any]:
    async def source() -> AsyncIterator[tuple[int, generation_pb2.GenerateResponse]]:
        for event in made:
            yield 0, event

    found: dict[str, Any] = json.loads(await encoder.collect(source()))  # type: ignore[arg-type]
    Response.model_validate(found)
    return found


def accumulated(found: list[dict[str, Any]]) -> Any:
    """What the SDK's accumulator makes of the deltas."""
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=omit, text_format=omit)
    for event in found:
        state.handle_event(EVENT.validate_python(event))
    return state._completed_response


def spoken(response: dict[str, Any]) -> list[Part]:
    """The parts that the items of a response say."""
    parts: list[Part] = []
    for item in response["output"]:
        match item["type"]:
            case "message":
                parts.append(Text(item["content"][0]["text"]))
            case "reasoning":
                parts.append(Reasoning(item["content"][0]["text"]))
            case "function_call":
                namespace = item.get("namespace")
                name = f"{namespace}__{item['name']}" if namespace else item["name"]
                parts += [CallBegin(item["call_id"], name), CallArguments(item["arguments"])]
            case "custom_tool_call":
                arguments = json.dumps({"input": item["input"]})
                parts += [CallBegin(item["call_id"], item["name"]), CallArguments(arguments)]
    return parts


# ---- every order, cut anywhere

ORDERS = [order for count in (1, 2, 3) for order in itertools.permutations(SEGMENTS, count)]


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
async def test_any_order_of_parts_is_a_response(order: tuple[str, ...]) -> None:
    """Streamed, accumulated by the SDK and collected it is the same; nothing is lost, and ids and places are unique."""
    parts = [part for name in order for part in SEGMENTS[name]]
    whole = await collected(answer(), events(parts))
    assert spoken(whole) == joined(parts)
    assert whole["status"] == "completed"
    assert len({item["id"] for item in whole["output"]}) == len(order)
    found = await streamed(answer(stream=True), events(parts))
    assert [one["type"] for one in found[:2]] == ["response.created", "response.in_progress"]
    assert found[-1]["type"] == "response.completed"
    assert found[-1]["response"]["output"] == whole["output"]
    assert [item["item"] for item in found if item["type"] == "response.output_item.done"] == whole["output"]
    assert accumulated(found).output_text == "".join(part.text for part in parts if isinstance(part, Text))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("each", [1, 2, 5])
async def test_where_an_answer_is_cut_changes_only_the_deltas(size: int, each: int) -> None:
    """One character at a time or several parts in one message: deltas together are what `done` says."""
    parts = [part for segment in SEGMENTS.values() for part in segment]
    made = events(cut(parts, size), each=each)
    whole = await collected(answer(), events(parts))
    found = await streamed(answer(stream=True), made)
    assert found[-1]["response"]["output"] == whole["output"]
    grown: dict[tuple[int, str], str] = {}
    ends: dict[tuple[int, str], str] = {}
    for one in found:
        kind = one["type"].removeprefix("response.")
        if kind.endswith(".delta"):
            place = one["output_index"], kind.removesuffix(".delta")
            grown[place] = grown.get(place, "") + one["delta"]
        elif kind.endswith(("text.done", "arguments.done", "input.done")):
            ends[one["output_index"], kind.removesuffix(".done")] = one.get(
                "text", one.get("arguments", one.get("input"))
            )
    assert grown == ends
    assert len(ends) == len(SEGMENTS)
    for one in found:
        if "item_id" in one:
            assert one["item_id"] == whole["output"][one["output_index"]]["id"]


async def test_text_alone_needs_no_parts() -> None:
    """Where a message has nothing but text, `parts` is empty."""
    made = events(cut([Text("Hello")], 2))
    assert not any(event.delta.parts or event.finished.parts for event in made)
    whole = await collected(answer(), made)
    assert [part["text"] for part in whole["output"][0]["content"]] == ["Hello"]


async def test_an_empty_answer_has_an_empty_message() -> None:
    """Programs read output[0].content[0].text."""
    found = await streamed(answer(stream=True), events([]))
    (item,) = found[-1]["response"]["output"]
    assert item["content"][0]["text"] == ""
    assert accumulated(found).output_text == ""


# ---- the end


@pytest.mark.parametrize("name", SEGMENTS)
async def test_an_answer_that_was_cut_short_is_incomplete(name: str) -> None:
    """The response and the item that was being written say so; items before it are complete."""
    parts = [*SEGMENTS["reasoning"], *SEGMENTS["text"], *SEGMENTS[name]]
    found = await streamed(answer(stream=True), events(parts, LENGTH))
    response = found[-1]["response"]
    assert found[-1]["type"] == "response.incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    *before, last = [item["status"] for item in response["output"]]
    assert set(before) == {"completed"}
    assert last == "incomplete"
    assert (await collected(answer(), events(parts, LENGTH)))["status"] == "incomplete"


async def test_usage_counts_reasoning_and_the_cache() -> None:
    """In OpenAI's names; before the end there is none."""
    made = events(cut(SEGMENTS["text"], 4))
    found = await streamed(answer(stream=True), made)
    assert found[0]["response"]["usage"] is None
    assert found[-1]["response"]["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 13,
    }


async def test_nothing_is_sent_before_the_first_token() -> None:
    """So that an error before it has a status; then the response is created."""
    started, *_ = events(SEGMENTS["text"])
    assert await answer(stream=True).stream(0, started) == b""


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (WorkerLost("gone"), "server_error", "WORKER_LOST"),
        (Busy("later", retry_after=1.0), "rate_limit_exceeded", "BUSY"),
        (TooLarge("over"), "server_error", "TOO_LARGE"),
    ],
)
async def test_a_stream_whose_response_cannot_be_stored_has_all_events_before(
    error: TandemError, code: str, reason: str
) -> None:
    """Its items are done, and no number is left out; clients wait for that of a call."""

    async def fails(response: bytes) -> None:
        raise error

    encoder = answer(fails, stream=True)
    said = b""
    with pytest.raises(type(error)):
        for event in events(cut([*SEGMENTS["reasoning"], *SEGMENTS["text"]], 4)):
            said += await encoder.stream(0, event)
    *made, named, failed = parsed((said + encoder.error_event(error)).decode())
    assert [one["sequence_number"] for one in (*made, named, failed)] == list(range(len(made) + 2))
    assert made[-1]["type"] == "response.output_item.done"
    assert (named["code"], failed["response"]["error"]["code"]) == (reason, code)


async def test_a_response_holds_a_bounded_number_of_log_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stream, too, whose last events repeat all of them."""
    made = events(cut(SEGMENTS["text"], 4))
    tokens = made[1:-1]
    for event in tokens:
        event.delta.logprobs.chosen.append(-1.0)
    monkeypatch.setattr(logprobs_json, "MAX_RESPONSE_SCORES", len(tokens))
    encoder = answer(stream=True)
    assert b"response.completed" in [await encoder.stream(0, event) for event in made][-1]
    monkeypatch.setattr(logprobs_json, "MAX_RESPONSE_SCORES", len(tokens) - 1)
    encoder = answer(stream=True)
    with pytest.raises(InvalidRequest, match=f"more than {len(tokens) - 1} log probabilities"):
        for event in made:
            await encoder.stream(0, event)


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (WorkerLost("gone"), "server_error", "WORKER_LOST"),
        (Busy("later", retry_after=1.0), "rate_limit_exceeded", "BUSY"),
        (TooLarge("over"), "server_error", "TOO_LARGE"),
    ],
)
async def test_a_stream_that_breaks_says_that_the_response_failed(error: TandemError, code: str, reason: str) -> None:
    """With the text so far, an item that is incomplete, and a code that clients know."""
    encoder = answer(stream=True)
    made = events(cut([*SEGMENTS["reasoning"], *SEGMENTS["text"]], 4))
    begun = b"".join([await encoder.stream(0, event) for event in made[:-2]])
    *_, named, failed = parsed((begun + encoder.error_event(error)).decode())
    assert (named["type"], named["code"]) == ("error", reason)
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": code, "message": error.message}
    assert [item["status"] for item in failed["response"]["output"]] == ["completed", "incomplete"]


async def test_a_response_that_fails_before_its_first_token_was_created() -> None:
    """Keep-alive bytes in a long silence begin a stream, and OpenAI's client expects `response.created` first."""
    found = parsed(answer(stream=True).error_event(Busy("later", retry_after=1.0)).decode())
    assert [one["type"] for one in found] == ["response.created", "response.in_progress", "error", "response.failed"]
    accumulated(found)


async def test_an_error_before_the_stream_is_a_body() -> None:
    """In OpenAI's shape."""
    assert json.loads(answer().error_body(Busy("later", retry_after=2.0)))["error"]["code"] == "BUSY"


# ---- stored


async def test_a_response_is_stored_before_its_last_event() -> None:
    """What is stored is the object of the last event; if it cannot be stored, no client is told that it is complete."""
    kept: list[bytes] = []

    async def keep(response: bytes) -> None:
        kept.append(response)

    encoder, made = answer(keep, stream=True), events(SEGMENTS["text"])
    found = await streamed(encoder, made)
    assert [json.loads(one) for one in kept] == [found[-1]["response"]]
    whole = await collected(answer(keep), made)
    assert json.loads(kept[1]) == whole

    async def lost(response: bytes) -> None:
        raise Unavailable("the registry does not answer")

    encoder = answer(lost, stream=True)
    begun = b"".join([await encoder.stream(0, event) for event in made[:-1]])
    with pytest.raises(Unavailable):
        await encoder.stream(0, made[-1])
    with pytest.raises(Unavailable):
        await collected(answer(lost), made)
    assert b"response.completed" not in begun


# ---- what is included on request


async def test_reasoning_is_sealed_on_request_only() -> None:
    """`encrypted_content` has the text for clients that keep nothing else."""
    parts = [*SEGMENTS["reasoning"], *SEGMENTS["text"]]
    plain = await collected(answer(), events(parts))
    assert plain["output"][0]["encrypted_content"] is None
    found = await collected(answer(include=["reasoning.encrypted_content"]), events(parts))
    assert opened(found["output"][0]["encrypted_content"], "x") == "I think\nof ü"


def scored(parts: list[Part], tokens: int) -> generation_pb2.GenerateResponse:
    one = generation_pb2.GenerateResponse()
    put_parts(one.delta, parts)
    one.delta.token_ids.extend([66] * tokens)
    one.delta.logprobs.chosen.extend([-0.5] * tokens)
    one.delta.logprobs.top_ids.extend([66, 67] * tokens)
    one.delta.logprobs.top.extend([-0.5, -2.0] * tokens)
    return one


@pytest.mark.parametrize("parts", [[Text("A")], []], ids=["text", "tokens without text"])
async def test_twice_as_many_log_probabilities_cost_twice_as_much(
    parts: list[Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of 8,000 tokens, 16 MB, are put together once: to copy them for each token took up to 36 s of the event
    loop."""

    async def written(*_: Any) -> str:
        return f'{{"token":"{"A" * 2000}"}}'

    monkeypatch.setattr(responses_answer, "joined_json", written)
    started, last = events([])

    async def made() -> AsyncIterator[tuple[int, Any]]:
        for event in (started, *[scored(parts, 1)] * 8000, last):
            yield 0, event

    with ThreadTime() as taken:
        whole = await answer(top_logprobs=2).collect(made())  # type: ignore[arg-type]
    assert taken.seconds < 2.0
    assert len(json.loads(whole)["output"][0]["content"][0]["logprobs"]) == 8000


async def test_log_probabilities_are_those_of_the_text() -> None:
    """Each once, with the next text or at the end; none of reasoning or calls."""
    started, last = events([])
    made = [
        started,
        scored([Reasoning("hm")], 2),
        scored([], 1),  # a part of the marker that ends the reasoning
        scored([Reasoning("m"), Text("A")], 3),
        scored([], 2),
        scored([Text("B")], 1),
        scored([Text("C")], 1),
        scored([], 1),  # a token without text, such as the end of the sequence
        last,
    ]
    found = await streamed(answer(stream=True, top_logprobs=2), made)
    deltas = [one for one in found if one["type"] == "response.output_text.delta"]
    assert [(one["delta"], len(one["logprobs"])) for one in deltas] == [("A", 0), ("B", 3), ("C", 1)]
    text = found[-1]["response"]["output"][1]["content"][0]
    assert len(text["logprobs"]) == 5
    assert text["logprobs"][0]["top_logprobs"][1]["logprob"] == -2.0
    whole = await collected(answer(top_logprobs=2), made)
    assert whole["output"] == found[-1]["response"]["output"]
    made[-2:] = [scored([Text("D"), CallBegin("call_1", "shell")], 4), last]  # which of the four are of the text?
    called = await streamed(answer(stream=True, top_logprobs=2), made)
    deltas = [one for one in called if one["type"] == "response.output_text.delta"]
    assert [(one["delta"], len(one["logprobs"])) for one in deltas] == [("A", 0), ("B", 3), ("C", 1), ("D", 0)]


@pytest.mark.parametrize("before", ["reasoning", "call", "custom"])
async def test_the_first_text_after_another_part_has_its_log_probabilities(before: str) -> None:
    """And not those of the tokens between the two, such as the marker that ends the reasoning."""
    started, last = events([])
    made = [started, scored(SEGMENTS[before], 4), scored([], 1), scored([Text("A")], 2), scored([Text("B")], 1), last]
    found = await streamed(answer(stream=True, top_logprobs=2), made)
    deltas = [one for one in found if one["type"] == "response.output_text.delta"]
    assert [(one["delta"], len(one["logprobs"])) for one in deltas] == [("A", 2), ("B", 1)]
    whole = await collected(answer(top_logprobs=2), made)
    assert len(whole["output"][1]["content"][0]["logprobs"]) == 3


@pytest.mark.parametrize("stop", ["x", ""], ids=["stop string", "control"])
@pytest.mark.parametrize("name", ["call", "custom"])
async def test_a_call_that_a_stop_string_cut_is_incomplete(name: str, stop: str) -> None:
    """Its client must not run it. The control: a call that the model ended."""
    begin, arguments = SEGMENTS[name][:2]
    assert isinstance(arguments, CallArguments)
    made = events([begin, CallArguments(arguments.text[:5]) if stop else arguments])
    made[-1].finished.stop = stop
    assert (await collected(answer(), made))["output"][-1]["status"] == ("incomplete" if stop else "completed")
