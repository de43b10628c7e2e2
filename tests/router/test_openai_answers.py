"""Answers as JSON: however much a client asks to be told, other streams are relayed while it is written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from services.router.answer.part_messages import put_parts
from services.router.answer.parts import CallArguments, CallBegin
from services.router.execution.detokenizer import Detokenizer
from services.router.frontend.openai import logprobs_json, openai_answers, openai_protocol
from services.router.preprocess.sampling_defaults import Defaults
from services.router.preprocess.tokenizer import Tokenizer
from tandem.errors import InvalidRequest
from tandem.v1 import common_pb2, generation_pb2
from tests.support.byte_fallback import fallback
from tests.support.stopwatch import ThreadTime

TEXT = Tokenizer.load(Path(__file__).parents[2] / "demo/model")
CHOICES, TOKENS, TOP = 8, 300, 20
WORST_S = 0.1


async def events() -> AsyncIterator[tuple[int, generation_pb2.GenerateResponse]]:
    """A whole answer of each choice, with its log probabilities."""
    for choice in range(CHOICES):
        said = generation_pb2.GenerateResponse()
        said.delta.choice, said.delta.text, said.delta.last = choice, "^" * TOKENS, True
        said.delta.token_ids.extend([66] * TOKENS)
        said.delta.logprobs.chosen.extend([-1.5] * TOKENS)
        said.delta.logprobs.top_ids.extend(list(range(60, 60 + TOP)) * TOKENS)
        said.delta.logprobs.top.extend([-2.0] * TOP * TOKENS)
        yield 0, said
        await asyncio.sleep(0)
        over = generation_pb2.GenerateResponse()
        over.finished.choice, over.finished.reason = choice, common_pb2.FINISH_REASON_LENGTH
        yield 0, over


ASKED: dict[str, tuple[Any, dict[str, Any]]] = {
    "chat": (
        openai_protocol.Chat,
        {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": TOP},
    ),
    "completions": (openai_protocol.Completions, {"prompt": "x", "logprobs": TOP}),
}


async def longest(work: Any) -> tuple[Any, float]:
    """What it returns, and the longest time of this thread's that it kept the event loop from others."""
    task, worst = asyncio.ensure_future(work), 0.0
    while not task.done():
        with ThreadTime() as taken:
            await asyncio.sleep(0)
        worst = max(worst, taken.seconds)
    return task.result(), worst


@pytest.mark.parametrize("kind", ASKED)
@pytest.mark.long
async def test_many_log_probabilities_keep_no_stream_waiting(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """48,000 of them, made some at a time. The control: all at once, which others wait for."""
    which, fields = ASKED[kind]
    body = openai_protocol.parse(json.dumps({**fields, "n": CHOICES}).encode(), which)
    requests = openai_protocol.requests(body, "id", Defaults())

    async def made() -> tuple[Any, float]:
        """The answer, and the least of three: a collection of garbage may lie in any of them."""
        answer = openai_answers.answer(body, "id", "m", TEXT, requests)
        runs = [await longest(answer.collect(events())) for _ in range(3)]  # type: ignore[arg-type]
        return runs[0][0], min(worst for _, worst in runs)

    whole, worst = await made()
    found = json.loads(whole)["choices"]
    assert len(found) == CHOICES
    for choice in found:
        scores = choice["logprobs"]
        assert len(scores["content"] if kind == "chat" else scores["top_logprobs"]) == TOKENS
        assert choice["finish_reason"] == "length"
    monkeypatch.setattr(logprobs_json, "TOKENS_PER_SLICE", 10**6)
    same, control = await made()
    assert json.loads(same)["choices"] == found
    assert worst < WORST_S
    assert worst < control


@pytest.mark.parametrize("kind", ASKED)
async def test_an_answer_holds_a_bounded_number_of_log_probabilities(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent as a whole, it would be in memory, and then in JSON, of all choices together. A stream has no such bound."""
    which, fields = ASKED[kind]
    bodies = {
        stream: openai_protocol.parse(json.dumps({**fields, "n": CHOICES, "stream": stream}).encode(), which)
        for stream in (False, True)
    }
    count = CHOICES * TOKENS * (1 + TOP)

    def answer(stream: bool = False) -> Any:
        requests = openai_protocol.requests(bodies[stream], "id", Defaults())
        return openai_answers.answer(bodies[stream], "id", "m", TEXT, requests)

    monkeypatch.setattr(logprobs_json, "MAX_SCORES", count)
    assert len(json.loads(await answer().collect(events()))["choices"]) == CHOICES
    monkeypatch.setattr(logprobs_json, "MAX_SCORES", count - 1)
    with pytest.raises(InvalidRequest, match=f"more than {count - 1} log probabilities") as refused:
        await answer().collect(events())
    assert (refused.value.field, "a stream has" in (refused.value.bound or "")) == ("sampling.logprobs", True)
    streamed = answer(stream=True)
    assert b"[DONE]" in [await streamed.stream(index, event) async for index, event in events()][-1]


LONG = 131_072  # tokens of a prompt; with one alternative each it has as many scores as a prompt may have
SCORED = {"echo": True, "logprobs": 1, "prompt_logprobs": 1}


def of_long_prompt() -> AsyncIterator[tuple[int, generation_pb2.GenerateResponse]]:
    """One token after it, and its scores. Made now, because that takes long, too."""
    said, over = generation_pb2.GenerateResponse(), generation_pb2.GenerateResponse()
    said.delta.text = "^"
    said.delta.token_ids.append(66)
    said.delta.logprobs.CopyFrom(scored([66]))
    said.delta.prompt_logprobs.token_ids.extend([66] * LONG)
    said.delta.prompt_logprobs.logprobs.CopyFrom(scored([66] * (LONG - 1)))
    over.finished.reason = common_pb2.FINISH_REASON_LENGTH

    async def told() -> AsyncIterator[tuple[int, generation_pb2.GenerateResponse]]:
        yield 0, said
        yield 0, over

    return told()


@pytest.mark.long
async def test_the_scores_of_a_long_prompt_keep_no_stream_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Echoed, as for evaluation harnesses, and in vLLM's form: 19 MB of JSON. The control: all at once."""
    body = openai_protocol.parse(
        json.dumps({"prompt": [66] * LONG, **SCORED}).encode(), openai_protocol.Completions, 10**6
    )
    answers = [answered(body, TEXT) for _ in range(3)]
    runs = [await longest(answer.collect(of_long_prompt())) for answer in answers[:2]]  # type: ignore[arg-type]
    (choice,) = json.loads(runs[0][0])["choices"]
    assert {name: len(values) for name, values in choice["logprobs"].items()} == dict.fromkeys(
        ("tokens", "token_logprobs", "text_offset", "top_logprobs"), LONG + 1
    )
    assert choice["logprobs"]["text_offset"][-1] == LONG
    assert (len(choice["prompt_logprobs"]), choice["prompt_logprobs"][0]) == (LONG, None)
    assert min(worst for _, worst in runs) < 0.05
    monkeypatch.setattr(logprobs_json, "TOKENS_PER_SLICE", 10**6)
    _, control = await longest(answers[2].collect(of_long_prompt()))  # type: ignore[arg-type]
    assert control > 0.2


async def test_a_prompt_of_ids_is_decoded_before_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the thread that parses its body: it would keep other streams waiting. An id that no vocabulary has is left to
    the checks of the request."""
    fields = {"prompt": [[66, 67], [2**40]], "echo": True}
    body = openai_protocol.parse(json.dumps(fields).encode(), openai_protocol.Completions)
    answer = answered(body, TEXT)
    monkeypatch.setattr(Tokenizer, "decode", None)
    said, over = generation_pb2.GenerateResponse(), generation_pb2.GenerateResponse()
    said.delta.text = "^"
    over.finished.reason = common_pb2.FINISH_REASON_LENGTH

    async def told() -> AsyncIterator[tuple[int, generation_pb2.GenerateResponse]]:
        for index in (0, 1):
            yield index, said
            yield index, over

    choices = json.loads(await answer.collect(told()))["choices"]  # type: ignore[arg-type]
    assert [choice["text"] for choice in choices] == ["^_^", "^"]


async def test_the_answers_of_several_choices_are_written_one_by_one() -> None:
    """Other streams are relayed in between. The events come all at once, as of a client that was behind."""
    fields = {"messages": [{"role": "user", "content": "x"}], "n": CHOICES}
    body = openai_protocol.parse(json.dumps(fields).encode(), openai_protocol.Chat)
    answer = openai_answers.answer(body, "id", "m", TEXT, openai_protocol.requests(body, "id", Defaults()))
    over, turns = False, 0

    async def told() -> AsyncIterator[tuple[int, generation_pb2.GenerateResponse]]:
        nonlocal over
        async for event in events():
            event[1].delta.ClearField("logprobs") if event[1].HasField("delta") else None
            yield event
        over = True

    task = asyncio.ensure_future(answer.collect(told()))  # type: ignore[arg-type]
    while not task.done():
        turns += over
        await asyncio.sleep(0)
    assert len(json.loads(task.result())["choices"]) == CHOICES
    assert turns >= CHOICES


@pytest.mark.parametrize("stop", ["", "b"])
async def test_a_call_that_a_stop_string_cuts_is_no_call_to_be_run(stop: str) -> None:
    """Its arguments may be incomplete, so `finish_reason` is `stop`; without a stop string it is `tool_calls`."""
    fields = {"messages": [{"role": "user", "content": "x"}], "stop": ["b"]}
    body = openai_protocol.parse(json.dumps(fields).encode(), openai_protocol.Chat)
    said, over = generation_pb2.GenerateResponse(), generation_pb2.GenerateResponse()
    put_parts(said.delta, [CallBegin("1", "f"), CallArguments('{"a": "' if stop else "{}")])
    over.finished.reason, over.finished.stop = common_pb2.FINISH_REASON_STOP, stop

    async def told() -> AsyncIterator[tuple[int, generation_pb2.GenerateResponse]]:
        yield 0, said
        yield 0, over

    (choice,) = json.loads(await answered(body, TEXT).collect(told()))["choices"]  # type: ignore[arg-type]
    assert choice["finish_reason"] == ("stop" if stop else "tool_calls")
    assert choice["stop_reason"] == (stop or None)


async def test_openais_client_reads_a_stream_of_several_choices() -> None:
    """It gives a choice its place in the order in which they begin, and takes log probabilities of the message with
    which a later one begins twice."""
    fields = {"messages": [{"role": "user", "content": "x"}], "stream": True, "n": 3, "logprobs": True}
    more = {"stream_options": {"continuous_usage_stats": True}}
    body = openai_protocol.parse(json.dumps({**fields, **more}).encode(), openai_protocol.Chat)
    streaming, state = answered(body, TEXT), ChatCompletionStreamState()
    started = generation_pb2.GenerateResponse()
    started.started.prompt_tokens = 7
    assert await streaming.stream(0, started) == b""
    sent = []
    for number in (0, 2, 1):
        said, over = generation_pb2.GenerateResponse(), generation_pb2.GenerateResponse()
        said.delta.choice, said.delta.text = number, "abc"[number]
        said.delta.token_ids.append(66)
        said.delta.logprobs.CopyFrom(scored([66]))
        over.finished.choice, over.finished.reason = number, common_pb2.FINISH_REASON_STOP
        for event in (said, over):
            for line in (await streaming.stream(0, event)).decode().splitlines():
                if line.startswith("data: {"):
                    sent.append(ChatCompletionChunk.model_validate_json(line.removeprefix("data: ")))
                    state.handle_chunk(sent[-1])
    choices = state.get_final_completion().choices
    assert [(one.index, one.message.role, one.message.content) for one in choices] == [
        (0, "assistant", "a"),
        (1, "assistant", "b"),
        (2, "assistant", "c"),
    ]
    assert [len(one.logprobs.content) for one in choices if one.logprobs and one.logprobs.content] == [1, 1, 1]
    assert all(chunk.usage and chunk.usage.prompt_tokens == 7 for chunk in sent)


# ---- where tokens are in the text

KINDS = {"bytes": TEXT, "llama": fallback(strip=True, begins=True), "gemma": fallback(strip=False, begins=True)}
PROMPT, LETTERS = "ab \N{SNOWMAN}\u00e9", " a\N{SNOWMAN}b\u4f60 \N{GRINNING FACE}ab"


def scored(ids: list[int]) -> common_pb2.Logprobs:
    """Each of them with one likelier token beside it."""
    return common_pb2.Logprobs(chosen=[-1.0] * len(ids), top_ids=[66] * len(ids), top=[-0.5] * len(ids))


async def of_tokens(tokenizer: Tokenizer, ids: list[int], **fields: Any) -> tuple[str, dict[str, list[Any]]]:
    """The text and the log probabilities of a completion of these tokens, streamed one by one, with those of the
    messages put together; without a stream they are the same."""
    body = openai_protocol.parse(json.dumps({"logprobs": 1, **fields}).encode(), openai_protocol.Completions)
    (request,) = openai_protocol.requests(body, "id", Defaults())
    special = body.add_special_tokens is not False
    prompt = list(request.token_ids.ids) or tokenizer.encode(request.text.decode(), special=special)

    async def told() -> AsyncIterator[tuple[int, generation_pb2.GenerateResponse]]:
        stream = Detokenizer(tokenizer, special=body.skip_special_tokens is False, prompt=prompt)
        for at, token in enumerate(ids):
            event = generation_pb2.GenerateResponse()
            event.delta.index, event.delta.text = at, stream.push([token])
            event.delta.token_ids.append(token)
            event.delta.logprobs.CopyFrom(scored([token]))
            if at == 0 and body.echo:
                event.delta.prompt_logprobs.token_ids.extend(prompt)
                event.delta.prompt_logprobs.logprobs.CopyFrom(scored(prompt[1:]))
            yield 0, event
        over = generation_pb2.GenerateResponse()
        over.finished.text, over.finished.reason = stream.finish(), common_pb2.FINISH_REASON_LENGTH
        yield 0, over

    (whole,) = json.loads(await answered(body, tokenizer).collect(told()))["choices"]  # type: ignore[arg-type]
    streaming, text, found = answered(body, tokenizer), "", dict[str, list[Any]]()
    async for index, event in told():
        lines = (await streaming.stream(index, event)).decode().splitlines()
        for message in (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")):
            text += message["choices"][0]["text"]
            for name, values in (message["choices"][0]["logprobs"] or {}).items():
                found[name] = found.get(name, []) + values
    assert (whole["text"], whole["logprobs"]) == (text, found)
    return text, found


def letters(kind: str) -> list[int]:
    """The tokens of LETTERS; Llama's tokenizer puts a space before them itself."""
    return KINDS[kind].encode(LETTERS.removeprefix(" ") if kind == "llama" else LETTERS, special=False)


def answered(body: Any, tokenizer: Tokenizer) -> openai_answers.Answer:
    return openai_answers.answer(body, "id", "m", tokenizer, openai_protocol.requests(body, "id", Defaults()))


def in_place(text: str, found: dict[str, list[Any]]) -> bool:
    """Whether each token that is text stands in the text where its offset says."""
    return all(text.startswith(*each) for each in zip(found["tokens"], found["text_offset"], strict=True))


@pytest.mark.parametrize("kind", KINDS)
async def test_each_token_of_a_completion_is_where_its_offset_says(kind: str) -> None:
    """Also behind letters that are made of several tokens, and behind tokens that are not in the text."""
    tokenizer = KINDS[kind]
    ids = letters(kind)
    text, found = await of_tokens(tokenizer, ids, prompt=PROMPT)
    assert text == LETTERS
    assert "".join(found["tokens"]) == text
    assert in_place(text, found)
    assert found["text_offset"][-1] == len(text) - len(found["tokens"][-1])
    assert all(top[token] == -1.0 for token, top in zip(found["tokens"], found["top_logprobs"], strict=True))
    named, same = await of_tokens(tokenizer, ids, prompt=PROMPT, return_tokens_as_token_ids=True)
    assert (named, same["text_offset"]) == (text, found["text_offset"])
    assert tokenizer.backend is not None
    added = tokenizer.backend.get_added_tokens_decoder().items()
    special = next(token for token, each in added if each.special)
    for fields, extra in (({}, ""), ({"skip_special_tokens": False}, tokenizer.token(special))):
        shown, found = await of_tokens(tokenizer, [special, *ids], prompt=PROMPT, **fields)
        assert shown == extra + LETTERS
        assert "".join(found["tokens"][1:]) == LETTERS
        assert in_place(shown, {name: values[1:] for name, values in found.items()})


@pytest.mark.parametrize("kind", KINDS)
async def test_an_echoed_prompt_has_its_own_offsets(kind: str) -> None:
    """The answer's first token is at the end of the prompt, whatever the tokenizer has put before it."""
    tokenizer = KINDS[kind]
    ids = letters(kind)
    prompts = {PROMPT: PROMPT, "ids": tokenizer.decode(tokenizer.encode(PROMPT))}
    for prompt, written in prompts.items():
        asked: Any = tokenizer.encode(PROMPT) if prompt == "ids" else prompt
        text, found = await of_tokens(tokenizer, ids, prompt=asked, echo=True)
        first = len(found["tokens"]) - len(ids)
        assert text == written + LETTERS
        assert found["text_offset"][first] == len(written)
        hidden = kind != "bytes" and prompt == PROMPT
        assert found["text_offset"][0] == 0
        assert "".join(found["tokens"][hidden:]) == text
        assert in_place(text, {name: values[hidden:] for name, values in found.items()})
    if kind != "bytes":
        text, found = await of_tokens(tokenizer, ids, prompt=f"<s>{PROMPT}", echo=True, add_special_tokens=False)
        assert (found["tokens"][0], found["text_offset"][:2]) == ("<s>", [0, 3])
