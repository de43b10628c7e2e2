"""Answers in Anthropic's format: the events that its SDK puts together, and the message that they are."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.frontend.anthropic.messages_answer import MessagesAnswer
from tandem.errors import NoWorker
from tandem.v1 import common_pb2, generation_pb2

Part = generation_pb2.Part
STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH


def said(text: str) -> Part:
    return Part(text=text)


def thought(text: str) -> Part:
    return Part(reasoning=text)


def call(name: str = "height", id: str = "call_1") -> Part:
    return Part(call=generation_pb2.ToolCall(id=id, name=name))


def given_as(text: str) -> Part:
    return Part(arguments=text)


def events(
    parts: Iterable[Part], reason: common_pb2.FinishReason = STOP, stop: str = "", held: str = ""
) -> list[generation_pb2.GenerateResponse]:
    """A delta of one token for each part; `held` comes at the end."""
    receipt = generation_pb2.Receipt(cached_tokens=4, reasoning_tokens=2)
    finished = generation_pb2.Finished(reason=reason, stop=stop, text=held, receipt=receipt)
    started = generation_pb2.Started(request_id="7", prompt_tokens=10)
    answered = [generation_pb2.GenerateResponse(started=started)]
    for part in parts:
        delta = generation_pb2.Delta(token_ids=[1], text=part.text)
        if not part.text:
            delta.parts.append(part)
        answered.append(generation_pb2.GenerateResponse(delta=delta))
    return [*answered, generation_pb2.GenerateResponse(finished=finished)]


def parsed(stream: bytes) -> list[dict[str, Any]]:
    """The events of a stream; each has its type as the name of the event."""
    found = []
    for one in stream.decode().split("\n\n")[:-1]:
        name, data = one.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def streamed(made: list[generation_pb2.GenerateResponse], most: int = 100) -> list[dict[str, Any]]:
    answer = MessagesAnswer("7", "m", most)
    return parsed(b"".join([await answer.stream(0, event) for event in made]))


async def collected(made: list[generation_pb2.GenerateResponse], most: int = 100) -> dict[str, Any]:
    async def source() -> AsyncIterator[tuple[int, generation_pb2.GenerateResponse]]:
        for event in made:
            yield 0, event

    return dict(json.loads(await MessagesAnswer("7", "m", most).collect(source())))  # type: ignore[arg-type]


def accumulated(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The message, put together by the rules of the SDK: blocks are opened, grow and end in their order."""
    first, *middle, delta, stop = found
    assert (first["type"], delta["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    message = first["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    inputs: dict[int, str] = {}
    open_block: int | None = None
    for one in middle:
        if one["type"] == "content_block_start":
            assert (open_block, one["index"]) == (None, len(message["content"]))
            message["content"].append(one["content_block"])
            open_block = one["index"]
        elif one["type"] == "content_block_delta":
            assert one["index"] == open_block
            block, (kind, value) = message["content"][open_block], list(one["delta"].items())[1]
            names = {"text": "text_delta", "thinking": "thinking_delta", "signature": "signature_delta"}
            assert one["delta"]["type"] == names.get(kind, "input_json_delta")
            if kind == "partial_json":
                inputs[open_block] = inputs.get(open_block, "") + value
            else:
                block[kind] += value
        else:
            assert one == {"type": "content_block_stop", "index": open_block}
            open_block = None
    assert open_block is None
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    return {**message, **delta["delta"], "usage": delta["usage"]}


async def test_blocks_are_the_runs_of_parts_in_their_order() -> None:
    """Reasoning, text and calls in any order, streamed or not. A call may have no arguments, and the last text may come
    with the end."""
    parts = [thought("Hm"), thought("."), said("I "), said("look."), call(), given_as('{"of": '), given_as('"Eiger"}')]
    parts += [call("now", "call_2"), thought("So?"), said("Well")]
    made = events(parts, held=".")
    message = await collected(made)
    signatures = [block.pop("signature") for block in message["content"] if block["type"] == "thinking"]
    assert all(signatures)
    assert message["content"] == [
        {"type": "thinking", "thinking": "Hm."},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "call_1", "name": "height", "input": {"of": "Eiger"}},
        {"type": "tool_use", "id": "call_2", "name": "now", "input": {}},
        {"type": "thinking", "thinking": "So?"},
        {"type": "text", "text": "Well."},
    ]
    assert (message["id"], message["model"], message["stop_reason"]) == ("msg_7", "m", "tool_use")
    assert accumulated(await streamed(made)) == await collected(made)


KINDS = st.sampled_from(["text", "thinking", "call"])
WORDS = st.text("ab \n", min_size=1, max_size=6)


@given(st.lists(st.tuples(KINDS, WORDS), max_size=8), st.randoms(use_true_random=False))
async def test_a_message_does_not_depend_on_how_its_parts_were_cut(runs: list[tuple[str, str]], random: Any) -> None:
    """Whatever the order of the parts: the blocks have all that is no space between them, and the stream is the
    message."""
    whole, cut = [], []
    for number, (kind, text) in enumerate(runs):
        if kind == "call":
            both = call(id=f"call_{number}"), given_as(json.dumps({"of": text}))
            whole += both
            cut += [both[0], *(given_as(letter) for letter in both[1].arguments)]
            continue
        make = said if kind == "text" else thought
        whole.append(make(text))
        at = random.randint(0, len(text))
        cut += [make(piece) for piece in (text[:at], text[at:]) if piece]
    message = await collected(events(whole))
    assert await collected(events(cut)) | {"usage": None} == message | {"usage": None}
    assert accumulated(await streamed(events(cut))) | {"usage": None} == message | {"usage": None}
    for kind in ("text", "thinking"):
        told = "".join(block[kind] for block in message["content"] if block["type"] == kind)
        assert "".join(told.split()) == "".join("".join(text for one, text in runs if one == kind).split())
    inputs = [block["input"]["of"] for block in message["content"] if block["type"] == "tool_use"]
    assert inputs == [text for kind, text in runs if kind == "call"]


async def test_space_between_blocks_is_no_block() -> None:
    """Anthropic's API refuses a block of space when it is sent back. At the beginning of a text it stays, and where
    there is nothing else."""
    parts = [thought("\n"), said("\n\n"), call(), given_as("{}"), said("\n"), call(id="call_2"), said(" \n")]
    assert [block["type"] for block in (await collected(events(parts)))["content"]] == ["tool_use", "tool_use"]
    (block,) = (await collected(events([said("\n"), said("\nHi"), said("\n")])))["content"]
    assert block["text"] == "\n\nHi\n"
    (block,) = (await collected(events([said(" "), said("\n")])))["content"]
    assert block["text"] == " \n"
    assert (await collected(events([])))["content"] == []


@pytest.mark.parametrize(
    ("parts", "how", "most", "reason", "stop"),
    [
        ([said("x")], {}, 9, "end_turn", None),
        ([call()], {}, 9, "tool_use", None),
        ([said("x"), call(), given_as("{}"), said("y")], {}, 9, "tool_use", None),
        ([said("x")], {"stop": "END"}, 9, "stop_sequence", "END"),
        ([said("x")], {"reason": LENGTH}, 1, "max_tokens", None),
        ([call(), given_as("{}")], {"reason": LENGTH}, 2, "max_tokens", None),
        ([said("x")], {"reason": LENGTH}, 9, "model_context_window_exceeded", None),
        ([said("x")], {}, 0, "max_tokens", None),
    ],
)
async def test_the_stop_reason_says_why(
    parts: list[Part], how: dict[str, Any], most: int, reason: str, stop: Any
) -> None:
    """A call is the reason only if the model stopped by itself. The end of the context is not max_tokens."""
    made = events(parts, **how)
    for message in (await collected(made, most), accumulated(await streamed(made, most))):
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop)


async def test_usage_tells_the_cached_tokens_apart() -> None:
    """input_tokens has none of them, as in Anthropic's API; both are known at the end, and the thinking too."""
    found = await streamed(events([thought("x"), said("y")]))
    first, last = found[0]["message"]["usage"], found[-2]["usage"]
    assert (first["input_tokens"], first["cache_read_input_tokens"], first["output_tokens"]) == (10, 0, 0)
    assert last == {
        "input_tokens": 6,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 2,
        "output_tokens_details": {"thinking_tokens": 2},
    }


async def test_max_tokens_0_fills_the_cache_and_shows_nothing() -> None:
    """The one token that is generated is neither shown nor counted."""
    message = await collected(events([said("x")], reason=LENGTH), most=0)
    assert (message["content"], message["usage"]["output_tokens"]) == ([], 0)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"of": "Eiger", "in": "Ber', {"of": "Eiger"}),
        ('{"of": {"deep": [1, 2', {"of": {"deep": [1, 2]}}),
        ("", {}),
        ('{"of" "Eiger"}', {"INVALID_JSON": '{"of" "Eiger"}'}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        (' {"of": "Eiger"}, "in": "m"}', {"INVALID_JSON": ' {"of": "Eiger"}, "in": "m"}'}),
        (' {"of": "Eiger"}\n', {"of": "Eiger"}),
        ('{"x": NaN}', {"INVALID_JSON": '{"x": NaN}'}),
        ('{"x": [-1e999]}', {"INVALID_JSON": '{"x": [-1e999]}'}),
        ('{"x": "\\ud800"}', {"INVALID_JSON": '{"x": "\\ud800"}'}),
    ],
)
async def test_broken_arguments_are_kept(text: str, arguments: dict[str, Any]) -> None:
    """`input` is an object in any case: of unfinished ones what there is, of others the text."""
    parts = [call(), *([given_as(text)] if text else [])]
    (block,) = (await collected(events(parts, reason=LENGTH)))["content"]
    assert block["input"] == arguments


async def test_arguments_that_the_model_left_unfinished_are_no_smaller_call() -> None:
    """It ended the answer itself, so the client would run what it takes for the whole call."""
    text = '{"of": "Eiger", "in": "Ber'
    message = await collected(events([call(), given_as(text)]))
    assert (message["stop_reason"], message["content"][0]["input"]) == ("tool_use", {"INVALID_JSON": text})


async def test_a_stream_begins_with_the_first_token_and_ends_with_what_failed() -> None:
    """Before it an error is a body; after it the error is the last event, without message_stop."""
    answer = MessagesAnswer("7", "m", 9)
    started, delta, *_ = events([said("x")])
    assert await answer.stream(0, started) == b""
    body = answer.error_body(NoWorker("nobody", retry_after=2.0))
    assert json.loads(body)["error"]["type"] == "overloaded_error"
    assert parsed(await answer.stream(0, delta))[0]["type"] == "message_start"
    (event,) = parsed(answer.error_event(NoWorker("nobody")))
    assert event == {"type": "error", "error": {"type": "overloaded_error", "message": "nobody"}, "request_id": "7"}
