"""What both doors say about a chat reaches its template: from an OpenAI body or a gRPC message to the rendered text."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from services.router.answer.answer_format import AnswerFormat
from services.router.frontend.openai import openai_protocol
from services.router.frontend.openai.openai_protocol import Chat
from services.router.preprocess import json_limits
from services.router.preprocess.chat import prompt
from services.router.preprocess.chat.chat_template import ChatTemplate
from services.router.preprocess.chat.prompt import END_CHARACTERS, MAX_TEMPLATE_BYTES, prompt_tokens
from services.router.preprocess.offload import MEDIUM_BYTES, SHORT_BYTES, Offload
from services.router.preprocess.preprocessor import Preprocessor
from services.router.preprocess.request import build_request
from services.router.preprocess.sampling_defaults import Defaults
from services.router.preprocess.served_model import ModelFacts
from services.router.preprocess.tokenizer import Tokenizer
from tandem.errors import InvalidRequest, NoWorker
from tandem.v1 import common_pb2, generation_pb2, sampling_pb2

MODEL = ModelFacts(context=2**17, vocab_size=100_000, eos_token_ids=(2,))
BACKEND = Tokenizer.load(Path(__file__).parents[2] / "demo/model").backend
# All that a template can see, as JSON.
ALL = (
    '{{ {"messages": messages, "tools": tools, "prompt": add_generation_prompt, "thinking": enable_thinking | '
    'default(none), "effort": reasoning_effort | default(none), "documents": documents} | tojson }}'
)
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
USER = {"role": "user", "content": "x"}


def text_of(chat: generation_pb2.Chat, source: str = ALL, **options: Any) -> str:
    """The rendered text, read back from the prompt's tokens."""
    tokenizer = Tokenizer(BACKEND, ChatTemplate(source, {}, **options))
    tokens, end = prompt_tokens(generation_pb2.GenerateRequest(chat=chat), tokenizer, MODEL)
    text = tokenizer.decode(tokens)
    assert end == text[-END_CHARACTERS:]
    return text


def chat_of(**fields: Any) -> generation_pb2.Chat:
    """The chat of a body of /v1/chat/completions."""
    body = openai_protocol.parse(json.dumps({"messages": [USER], **fields}).encode(), Chat)
    return openai_protocol.requests(body, "r", Defaults())[0].chat


def refused(**fields: Any) -> InvalidRequest:
    """The error for such a body, as its client gets it."""
    with pytest.raises(InvalidRequest) as caught:
        body = openai_protocol.parse(json.dumps({"messages": [USER], **fields}).encode(), Chat)
        try:
            text_of(openai_protocol.requests(body, "r", Defaults())[0].chat, PLAIN)
        except InvalidRequest as error:
            raise body.named(error) from error
    assert caught.value.bound
    return caught.value


def test_a_body_says_what_the_template_gets() -> None:
    """Variables, effort, documents, and whether there is a generation prompt."""
    documents = [{"title": "Eiger", "text": "3967"}]
    shown = json.loads(
        text_of(
            chat_of(
                chat_template_kwargs={"enable_thinking": False},
                reasoning_effort="low",
                documents=documents,
                add_generation_prompt=False,
            )
        )
    )
    assert (shown["thinking"], shown["effort"], shown["documents"]) == (False, "low", documents)
    assert (shown["prompt"], shown["tools"]) == (False, None)
    usual = json.loads(text_of(chat_of()))
    assert (usual["thinking"], usual["effort"], usual["documents"], usual["prompt"]) == (None, None, None, True)


def test_the_effort_none_turns_reasoning_off() -> None:
    """As with vLLM; chat_template_kwargs prevail over the field."""
    assert json.loads(text_of(chat_of(reasoning_effort="none")))["thinking"] is False
    assert json.loads(text_of(chat_of(reasoning_effort="high")))["thinking"] is True
    both = chat_of(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True, "reasoning_effort": "low"})
    assert json.loads(text_of(both))["effort"] == "low"
    assert json.loads(text_of(both))["thinking"] is True


def test_a_message_keeps_its_reasoning_its_calls_and_its_parts() -> None:
    """Under either name of the reasoning; what an assistant refused is its text."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
    messages = [
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "reasoning": "ha"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    first, second, third = json.loads(text_of(chat_of(messages=messages)))["messages"]
    assert (first["reasoning_content"], second["reasoning_content"]) == ("hm", "ha")
    assert first["tool_calls"][0]["function"]["arguments"] == {"a": "é"}
    assert (second["content"], third["content"]) == ("No.", "ab")
    assert "reasoning_content" not in third


BROKEN = ['{"a":', "[1]", "null", "5", "é", '{"a": "\\ud800"}', "[" * 5000, '{"a": ' + "[1," * 200]


@pytest.mark.parametrize("arguments", BROKEN, ids=lambda text: text[:12])
def test_arguments_that_a_model_got_wrong_do_not_end_the_conversation(arguments: str) -> None:
    """No object, no JSON, half a character, or nested too deep: they are shown as text, and the agent goes on."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    (message,) = json.loads(text_of(chat_of(messages=messages)))["messages"]
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize("arguments", ['""', "null", '"  "', "{}"])
def test_absent_arguments_are_an_empty_object(arguments: str) -> None:
    """Which every template can show."""
    calls = f'[{{"function": {{"name": "f", "arguments": {arguments}}}}}]'.encode()
    chat = generation_pb2.Chat(messages=[{"role": "assistant", "tool_calls": calls}])
    (message,) = json.loads(text_of(chat))["messages"]
    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_arguments_are_bounded_before_they_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text of more values than a request may have stays text."""
    monkeypatch.setattr(json_limits, "MAX_STRUCTURE", 200)
    function = {"name": "f", "arguments": json.dumps(dict.fromkeys(map(str, range(100)), "x"))}
    parsed = prompt._with_object({"function": function})
    assert parsed["function"]["arguments"] == function["arguments"]


def test_an_answer_goes_on_where_the_last_message_ends() -> None:
    """With the SDK's field names; no generation prompt follows."""
    messages = [USER, {"role": "assistant", "content": "So it"}]
    for more in ({}, {"add_generation_prompt": False}):
        chat = chat_of(messages=messages, continue_final_message=True, **more)
        assert text_of(chat, PLAIN) == "<user>x<assistant>So it"
    assert text_of(chat_of(messages=messages), PLAIN).endswith("<assistant>So it<a>")


THOUGHTS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% endfor %}"
)
HM, SO = "Hm, " * 100, "So " * 100


@pytest.mark.parametrize(
    ("last", "inside"),
    [
        ({"reasoning_content": "Hm, "}, True),
        ({"reasoning_content": HM}, True),
        ({"content": f"<think>{HM}"}, True),
        ({"content": f"<think>{HM}</think>{SO}"}, False),
        ({"reasoning_content": HM, "content": SO}, False),
        ({"content": SO}, False),
    ],
    ids=["short", "long", "as content", "after it", "content after it", "no reasoning"],
)
def test_reasoning_that_goes_on_is_reasoning_however_long_it_is(last: dict[str, str], inside: bool) -> None:
    """Its beginning is not among the last characters of the prompt."""
    tokenizer = Tokenizer(BACKEND, ChatTemplate(THOUGHTS, {}), AnswerFormat.of_template(THOUGHTS, knows_tools=False))
    chat = chat_of(messages=[USER, {"role": "assistant", **last}], continue_final_message=True)
    reading = build_request(generation_pb2.GenerateRequest(chat=chat), tokenizer, MODEL).reading
    assert reading is not None
    assert reading.begins_inside is inside


def test_what_a_user_wrote_before_a_continued_message_is_no_reasoning() -> None:
    """However many bytes the characters of that message take."""
    tokenizer = Tokenizer(BACKEND, ChatTemplate(THOUGHTS, {}), AnswerFormat.of_template(THOUGHTS, knows_tools=False))
    asks = {"role": "user", "content": "What is <think>?" + "x" * 300}
    chat = chat_of(messages=[asks, {"role": "assistant", "content": "それで" * 100}], continue_final_message=True)
    reading = build_request(generation_pb2.GenerateRequest(chat=chat), tokenizer, MODEL).reading
    assert reading is not None
    assert not reading.begins_inside


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"a": float("nan")}}, "body"),
        ({"chat_template_kwargs": {"a": "\ud800"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"chat_template": "\ud800"}, "chat_template"),
        ({"documents": [{"text": "x"}]}, "documents"),
        ({"documents": [{}] * 1025}, "documents"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"messages": [{"role": "assistant", "content": "x", "reasoning": "\ud800"}]}, "chat.messages[0].reasoning"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_the_template_cannot_get_is_refused_by_the_bodys_name(fields: dict[str, Any], param: str) -> None:
    """Not by that of the gRPC message (`chat.` alone is removed where the error is written)."""
    error = refused(**fields)
    assert error.field == param
    assert "template_variables" not in error.message


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_what_is_not_text_is_refused_with_the_reason(kind: str) -> None:
    """By its place: a model of text would answer without having seen it."""
    parts = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "x"}}]
    error = refused(messages=[{"role": "user", "content": parts}])
    assert error.field == "messages[0].content[1]"
    assert kind in error.message
    assert "text only" in error.message


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"template_variables": b"{"}, "chat.template_variables"),
        ({"template_variables": b"[1]"}, "chat.template_variables"),
        ({"template_variables": b'{"a": "\\udfff"}'}, "chat.template_variables"),
        ({"template_variables": b'{"bos_token": ""}'}, "chat.template_variables.bos_token"),
        ({"template_variables": b"[" * 200}, "chat.template_variables"),
        ({"template": b"\xff"}, "chat.template"),
        ({"continue_last_message": True}, "chat.continue_last_message"),
    ],
)
def test_a_grpc_clients_fields_are_refused_by_their_names(fields: dict[str, Any], field: str) -> None:
    """Unreadable, of the wrong kind, or reserved."""
    with pytest.raises(InvalidRequest) as caught:
        text_of(generation_pb2.Chat(messages=[{"role": "user", "content": b"x"}], **fields))
    assert caught.value.field == field


def test_a_template_of_a_request_is_bounded_where_one_is_permitted() -> None:
    """Before it is compiled."""
    said = [{"role": "user", "content": b"x"}]
    chat = generation_pb2.Chat(messages=said, template=b"{{ messages[0].content }}".ljust(MAX_TEMPLATE_BYTES, b"#"))
    assert text_of(chat, from_requests=True).startswith("x#")
    chat.template += b"#"
    with pytest.raises(InvalidRequest, match="bytes") as caught:
        text_of(chat, from_requests=True)
    assert caught.value.field == "chat.template"


def test_text_and_ids_have_no_rendered_end() -> None:
    """Only a template can begin the answer's reasoning."""
    tokenizer = Tokenizer(BACKEND, ChatTemplate(PLAIN, {}))
    for asked in ({"text": b"x" * 20}, {"token_ids": generation_pb2.TokenIds(ids=[5, 6])}):
        assert prompt_tokens(generation_pb2.GenerateRequest(**asked), tokenizer, MODEL).rendered_end == ""


SAID = generation_pb2.Chat(messages=[{"role": "user", "content": b"x"}])
TEMPLATE = generation_pb2.Chat(messages=SAID.messages, template=b"{{ 1 }}")
FORCED = generation_pb2.Chat(messages=SAID.messages, tool_choice=generation_pb2.ToolChoice())
GUIDED = sampling_pb2.SamplingParams(grammar=common_pb2.Grammar(json_schema=b"{}"))


@pytest.mark.parametrize(
    ("message", "at_least"),
    [
        (generation_pb2.GenerateRequest(chat=SAID), 0),
        (generation_pb2.GenerateRequest(chat=TEMPLATE), MEDIUM_BYTES + 1),
        (generation_pb2.GenerateRequest(chat=FORCED), SHORT_BYTES + 1),
        (generation_pb2.GenerateRequest(text=b"x", sampling=GUIDED), SHORT_BYTES + 1),
    ],
    ids=["plain", "template", "tool_choice", "grammar"],
)
async def test_a_program_or_a_schema_of_a_request_is_never_read_on_the_event_loop(
    message: generation_pb2.GenerateRequest, at_least: int
) -> None:
    """However short it is: it may take long. A short chat without one does not wait for a thread."""
    sizes: list[int] = []

    class Spy:
        async def run(self, tenant: str, size: int, work: Any, *args: Any) -> None:
            sizes.append(size)

    class Facts:
        def facts(self) -> ModelFacts:
            return MODEL

    spied: Any = Spy()
    model: Any = Facts()
    await Preprocessor(Tokenizer(BACKEND, ChatTemplate(PLAIN, {})), model, spied).build(message, "")
    assert sizes == [max(at_least, message.ByteSize())]


@pytest.mark.parametrize("there", [True, False], ids=["a worker", "control"])
async def test_the_registry_is_asked_before_a_router_says_that_no_worker_has_started(there: bool) -> None:
    """`tandem up` says that the cluster is ready a moment before the router's view has the first worker."""

    class Late:
        known = False

        def facts(self) -> ModelFacts:
            if not self.known:
                raise NoWorker("no decode worker has started yet")
            return MODEL

        async def refresh(self) -> None:
            self.known = there

    model: Any = Late()
    message = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[5, 6]))
    offload = Offload(1.0)
    with nullcontext() if there else pytest.raises(NoWorker):
        request = await Preprocessor(Tokenizer(BACKEND, None), model, offload).build(message, "")
        assert request.tokens == [5, 6]
