"""From a request to a job: what is accepted is what was asked for, and what is refused names its field and bound."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.answer.answer_format import FORMATS, AnswerFormat
from services.router.answer.harmony_reader import ENDS, MARKERS
from services.router.answer.parts import CallBegin, Reasoning, joined
from services.router.frontend.openai import openai_protocol
from services.router.preprocess.chat.chat_template import ChatTemplate
from services.router.preprocess.request import DEFAULT_MAX_TOKENS, build_request
from services.router.preprocess.sampling_defaults import Defaults
from services.router.preprocess.served_model import ModelFacts
from services.router.preprocess.tokenizer import Tokenizer
from services.router.preprocess.validation import MAX_BIASES, MAX_PROMPT_LOGPROBS
from tandem.errors import InvalidRequest
from tandem.rpc import request_builder
from tandem.v1 import common_pb2, generation_pb2, sampling_pb2
from tests.support.byte_fallback import fallback

MODEL = ModelFacts(context=64, vocab_size=100, eos_token_ids=(2,))
NUMBERS = st.floats(0, 1) | st.floats()  # mostly possible ones, and everything that a double can be
NO_TEXT = Tokenizer(None, None)  # a checkpoint without a tokenizer: token ids alone
SAID = generation_pb2.ChatMessage(role="user", content=b"x")
CALLED = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
LONE = b'[{"function": {"name": "\\ud800"}}]'  # a lone surrogate, which no tokenizer takes


def request(ids: list[int], **sampling: Any) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=ids), sampling=sampling_pb2.SamplingParams(**sampling)
    )


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 101), max_size=70),
    st.none() | st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 70),
)
def test_what_is_admitted_fits_the_model(ids: list[int], max_tokens: int | None) -> None:
    """Prompt and answer fit the context, every id is in the vocabulary, and nothing that fits is refused."""
    fits = 1 <= len(ids) < MODEL.context and all(0 <= one < MODEL.vocab_size for one in ids)
    if max_tokens is not None:
        fits = fits and 1 <= max_tokens <= MODEL.context - len(ids)
    asked = request(ids) if max_tokens is None else request(ids, max_tokens=max_tokens)
    if not fits:
        with pytest.raises(InvalidRequest) as caught:
            build_request(asked, NO_TEXT, MODEL)
        assert caught.value.field
        assert caught.value.bound
        return
    job = build_request(asked, NO_TEXT, MODEL)
    assert (job.tokens, job.prompt_len, job.generated) == (ids, len(ids), 0)
    assert job.max_tokens == (max_tokens or min(DEFAULT_MAX_TOKENS, MODEL.context - len(ids)))


HEADERS = {"<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|start|>assistant<|channel|>"}
HEADERS |= {f"{end}<|start|>" for end in ENDS}
AND_CALLS = {"<|channel|>analysis", "<|channel|>commentary", "<|channel|>final<|message|>"}


@pytest.mark.parametrize(("tools", "headers"), [([], HEADERS), ([CALLED], AND_CALLS)], ids=["answer", "calls"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_worker_learns_the_headers_of_gpt_oss(inside: bool, tools: list[Any], headers: set[str]) -> None:
    """Before an answer that must fit a grammar. Workers of an earlier version know its end alone, which is the same."""
    backend = fallback(strip=False).backend
    assert backend is not None
    backend.add_special_tokens(list(MARKERS))
    template = ChatTemplate("{{ tools }}<|start|>assistant" + "<|channel|>analysis<|message|>" * inside, {})
    tokenizer = Tokenizer(backend, template, AnswerFormat(calls="harmony", harmony=True))
    chat = generation_pb2.Chat(messages=[SAID], tools=json.dumps(tools).encode() if tools else b"")
    wanted = sampling_pb2.SamplingParams(grammar=common_pb2.Grammar(json=True))
    model = replace(MODEL, context=4096, vocab_size=1000)
    built = build_request(generation_pb2.GenerateRequest(chat=chat, sampling=wanted), tokenizer, model)
    before = built.sampling.before_grammar
    assert {tokenizer.decode(header.token_ids) for header in before.headers} == headers
    assert tokenizer.decode(before.close) == "final<|message|>"
    assert (before.open, before.HasField("open")) == (0 if inside else backend.token_to_id("<|channel|>"), not inside)


@pytest.mark.parametrize("forced", [True, False], ids=["forced", "control"])
def test_what_a_model_thinks_of_before_a_forced_call_is_no_call(forced: bool) -> None:
    """Its worker forces the call behind the marker that ends the reasoning, and permits everything before it. Control:
    where no call is forced, the model may have forgotten the marker."""
    backend = fallback(strip=False).backend
    assert backend is not None
    backend.add_special_tokens(["<think>", "</think>"])
    tokenizer = Tokenizer(backend, ChatTemplate("{{ tools }}", {}), AnswerFormat(FORMATS["think"], "hermes"))
    chat = generation_pb2.Chat(messages=[SAID], tools=json.dumps([CALLED]).encode())
    if forced:
        chat.tool_choice.name = "f"
    model = replace(MODEL, context=4096, vocab_size=1000)
    built = build_request(generation_pb2.GenerateRequest(chat=chat), tokenizer, model)
    assert built.reading is not None
    reader = built.reading.reader()
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    parts = joined([*reader.push(f"<think>As {call}</think>\n{call}"), *reader.finish()])
    calls = [part for part in parts if isinstance(part, CallBegin)]
    assert (len(calls), parts[0]) == ((1, Reasoning(f"As {call}")) if forced else (2, Reasoning("As")))


@given(NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 3))
def test_no_impossible_number_reaches_a_worker(
    temperature: float, top_p: float, min_p: float, penalty: float, bias: float, top_k: int
) -> None:
    """NaN, infinities and what is out of bounds are refused; what is admitted is within the documented bounds."""
    asked = request(
        [1],
        temperature=temperature,
        top_p=top_p,
        min_p=min_p,
        top_k=top_k,
        repetition_penalty=penalty,
        frequency_penalty=penalty,
        logit_bias={7: bias},
    )
    try:
        sampling = build_request(asked, NO_TEXT, MODEL).sampling
    except InvalidRequest:
        return
    assert 0 <= sampling.temperature <= 100
    assert 0 < sampling.top_p <= 1
    assert 0 <= sampling.min_p <= 1
    assert 0 < sampling.repetition_penalty <= 10
    assert abs(sampling.frequency_penalty) <= 2
    assert abs(sampling.logit_bias[7]) <= 100
    assert sampling.top_k == top_k


@pytest.mark.parametrize(
    ("field", "sampling"),
    [
        ("sampling.temperature", {"temperature": float("nan")}),
        ("sampling.top_p", {"top_p": 0.0}),
        ("sampling.min_p", {"min_p": float("nan")}),
        ("sampling.top_k", {"top_k": -1}),
        ("sampling.repetition_penalty", {"repetition_penalty": 0.0}),
        ("sampling.presence_penalty", {"presence_penalty": float("nan")}),
        ("sampling.min_tokens", {"min_tokens": 5, "max_tokens": 4}),
        ("sampling.logprobs", {"logprobs": 21}),
        ("sampling.logit_bias[100]", {"logit_bias": {100: 1.0}}),
        ("sampling.logit_bias", {"logit_bias": dict.fromkeys(range(MAX_BIASES + 1), 0.0)}),
        ("sampling.stop_token_ids[0]", {"stop_token_ids": [100]}),
        ("sampling.stop_token_ids", {"stop_token_ids": [1] * 17}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_field_at_fault_is_named(field: str, sampling: dict[str, Any]) -> None:
    """One wrong value among right ones, found and bounded."""
    with pytest.raises(InvalidRequest) as caught:
        build_request(request([1], **sampling), NO_TEXT, MODEL)
    assert caught.value.field == field
    assert caught.value.bound


@pytest.mark.parametrize("n", [None, 1, 16])
def test_the_scores_of_a_prompt_are_counted_for_each_completion(n: int | None) -> None:
    """Each is sent with them: 16 times 2 MB would be no message that any client takes. One token less is served."""
    most = MAX_PROMPT_LOGPROBS // 4 // (n or 1)
    model = replace(MODEL, context=MAX_PROMPT_LOGPROBS)
    sampling = {"prompt_logprobs": 3, "max_tokens": 1} | ({} if n is None else {"n": n})
    assert build_request(request([1] * most, **sampling), NO_TEXT, model).prompt_len == most
    with pytest.raises(InvalidRequest) as caught:
        build_request(request([1] * (most + 1), **sampling), NO_TEXT, model)
    assert caught.value.field == "sampling.prompt_logprobs"
    assert caught.value.bound == f"prompt tokens x (1 + prompt_logprobs) x n <= {MAX_PROMPT_LOGPROBS}"
    assert f"{most + 1} tokens" in caught.value.message


TEXT = Tokenizer.load(Path(__file__).parents[2] / "demo/model")


@pytest.mark.parametrize("prompt", [[1] * 1000, "one word after the other " * 200])
@pytest.mark.parametrize("fields", [{"echo": True, "logprobs": 3, "n": 2}, {"prompt_logprobs": 7}])
def test_the_scores_of_all_prompts_of_a_body_are_bounded_together(prompt: Any, fields: dict[str, Any]) -> None:
    """They are in one answer. As many as one prompt may have are served, and one prompt more is not, unless nothing is
    scored."""
    tokens = len(prompt) if isinstance(prompt, list) else len(TEXT.encode(prompt, special=False))
    most = MAX_PROMPT_LOGPROBS // (8 * tokens)

    def check(count: int, fields: dict[str, Any]) -> None:
        raw = json.dumps({"prompt": [prompt] * count, **fields}).encode()
        body = openai_protocol.parse(raw, openai_protocol.Completions, 10**6)
        openai_protocol.check_scores(openai_protocol.requests(body, "id", Defaults()), TEXT)

    check(most, fields)
    check(most + 1, {"echo": True})
    with pytest.raises(InvalidRequest, match=f"{most + 1} prompts of {tokens * (most + 1)} tokens") as caught:
        check(most + 1, fields)
    assert caught.value.field == "sampling.prompt_logprobs"
    assert "send fewer prompts at a time" in (caught.value.bound or "")


@pytest.mark.parametrize(
    ("field", "asked"),
    [
        ("input", generation_pb2.GenerateRequest()),
        ("text", generation_pb2.GenerateRequest(text=b"")),
        ("text", generation_pb2.GenerateRequest(text=b"\xff")),
        ("text", generation_pb2.GenerateRequest(text=b"no tokenizer here")),
        ("chat.messages", generation_pb2.GenerateRequest(chat=generation_pb2.Chat())),
        ("chat.tools", generation_pb2.GenerateRequest(chat=generation_pb2.Chat(messages=[SAID], tools=LONE))),
        ("request_id", generation_pb2.GenerateRequest(request_id="a\nb", token_ids=generation_pb2.TokenIds(ids=[1]))),
        ("cache_salt", generation_pb2.GenerateRequest(cache_salt=b"x" * 257)),
    ],
)
def test_what_is_no_input_is_named(field: str, asked: generation_pb2.GenerateRequest) -> None:
    """Empty, unreadable, impossible here, or too long."""
    with pytest.raises(InvalidRequest) as caught:
        build_request(asked, NO_TEXT, MODEL)
    assert caught.value.field == field


def test_what_one_answer_learns_of_workers_is_its_own() -> None:
    """A worker that refused one answer as too large would be taken for one that had refused the others twice."""
    first, second = build_request(request([1, 2], n=2, max_tokens=3), NO_TEXT, MODEL).fan_out()
    first.unsuited.add(("decode-0", "a"))
    assert (second.unsuited, second.notes) == (set(), [])


def test_two_clients_may_choose_the_same_id() -> None:
    """The id inside the cluster tells them apart; the one in the receipt is the client's."""
    asked = request([1])
    asked.request_id = "mine"
    one, two = build_request(asked, NO_TEXT, MODEL), build_request(asked, NO_TEXT, MODEL)
    assert one.request_id == two.request_id == "mine"
    assert one.internal_id != two.internal_id


@given(st.lists(st.integers(0, 99), max_size=12), st.booleans())
def test_a_journal_is_complete_at_a_stop_token_or_at_its_length(sent: list[int], ignore_eos: bool) -> None:
    """A resumed request knows from its tokens alone whether it is finished, and why."""
    job = build_request(request([1, 2], max_tokens=8, stop_token_ids=[9], ignore_eos=ignore_eos), NO_TEXT, MODEL)
    stops = {9} if ignore_eos else {9, 2}
    assert job.finish() is None  # a stop token in the prompt ends nothing
    for token in sent:
        if job.finish() is not None:
            break
        job.tokens.append(token)
    generated = job.tokens[2:]
    if generated and generated[-1] in stops:
        assert job.finish() == common_pb2.FINISH_REASON_STOP
    elif len(generated) == 8:
        assert job.finish() == common_pb2.FINISH_REASON_LENGTH
    else:
        assert job.finish() is None


@pytest.mark.parametrize(
    "given",
    [b"{", b"{}", b"[]", b'[{"function": {"name": "\\ud800"}}]', b'[{"function": {"name": "f", "x": ["\\udfff"]}}]'],
)
def test_tools_that_are_no_text_are_refused_by_their_field(given: bytes) -> None:
    """Also half a character, which JSON can spell and no tokenizer takes."""
    chat = {"messages": [{"role": "user", "content": b"x"}]}
    for field, asked in (
        ("chat.tools", {**chat, "tools": given}),
        ("chat.messages[0].tool_calls", {"messages": [{"role": "assistant", "tool_calls": given}]}),
    ):
        with pytest.raises(InvalidRequest) as caught:
            build_request(generation_pb2.GenerateRequest(chat=asked), NO_TEXT, MODEL)
        assert caught.value.field == field


def test_an_id_that_no_text_has_is_none() -> None:
    """The embedding may have rows that pad it: they are in the model's vocabulary and in no tokenizer's."""
    text = Tokenizer.load(Path(__file__).parents[2] / "demo/model")
    padded = replace(MODEL, vocab_size=text.known_ids + 64)
    assert build_request(request([text.known_ids - 1]), text, padded).tokens == [text.known_ids - 1]
    with pytest.raises(InvalidRequest) as caught:
        build_request(request([1, text.known_ids]), text, padded)
    assert caught.value.field == "token_ids[1]"
    assert build_request(request([text.known_ids]), NO_TEXT, padded).tokens, "without a tokenizer nobody knows"


@pytest.mark.parametrize(
    ("asked", "text", "default"),
    [
        ({"prompt": "ab"}, "ab", True),
        ({"prompt": [4, 5]}, None, False),
        ({"messages": [{"role": "user", "content": "ab"}]}, "<s>user ab", False),
    ],
    ids=["text", "ids", "chat"],
)
def test_special_tokens_are_added_to_a_prompt_as_the_request_says(
    asked: dict[str, Any], text: str | None, default: bool
) -> None:
    """By default to a text and not to a chat, whose template writes them; token ids stay as they are."""
    source = "{% for message in messages %}<s>{{ message.role }} {{ message.content }}{% endfor %}"
    tokenizer = Tokenizer(fallback(strip=False, begins=True).backend, ChatTemplate(source, {}))
    model = replace(MODEL, vocab_size=tokenizer.known_ids)
    begin = tokenizer.encode("")
    assert len(begin) == 1
    kind = openai_protocol.Chat if "messages" in asked else openai_protocol.Completions
    ids = [4, 5] if text is None else tokenizer.encode(text, special=False)
    for add, added in ((None, default), (True, True), (False, False)):
        body = openai_protocol.parse(json.dumps({**asked, "add_special_tokens": add}).encode(), kind)
        (message,) = openai_protocol.requests(body, "id", Defaults())
        expected = [*begin, *ids] if added and text is not None else ids
        assert build_request(message, tokenizer, model).tokens == expected
        from_client = request_builder.build_request(
            asked.get("prompt"), messages=asked.get("messages"), add_special_tokens=add
        )
        assert build_request(from_client, tokenizer, model).tokens == expected
