from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import Any

import grpc
import pytest

from tandem import AsyncClient, Client
from tandem.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotFound,
    NoWorker,
    TandemError,
    TooLarge,
    Unavailable,
    WorkerLost,
)
from tandem.results import Piece, TokenLogprob, ToolCall, receipt
from tandem.rpc import watching as watching_module
from tandem.rpc.request_builder import build_request
from tandem.rpc.stream_reader import completion
from tandem.rpc.watching import _Watching
from tandem.v1 import common_pb2, generation_pb2, jobs_pb2
from tests.support.stopwatch import ThreadTime


def leaves(cls: type[TandemError]) -> list[type[TandemError]]:
    return [cls, *(leaf for child in cls.__subclasses__() for leaf in leaves(child))]


# ---- what comes back


async def test_generate_folds_the_stream(client: Any) -> None:
    """generate() returns all text, held-back text included, all ids, the reason and the receipt."""
    answer = await client.generate("Hi", max_tokens=4)
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("Hello!", [5, 6, 7, 8], "length")
    receipt = answer.receipt
    assert (receipt.path, receipt.prefill_worker, receipt.decode_worker) == ("disaggregated", "prefill-0", "decode-0")
    assert list(receipt.phases.items()) == [("tokenize", 0.01), ("prefill_compute", 0.03)]
    assert sum(receipt.phases.values()) == pytest.approx(receipt.ttft)
    assert receipt.transfer is not None
    assert (receipt.transfer.bytes, receipt.transfer.transport) == (4096, "nixl:ucx:cma")
    assert receipt.seed == 2**64 - 1
    assert receipt.client_ttft > 0
    assert receipt.to_dict()["transfer"]["blocks"] == 2


def test_a_watcher_hears_that_the_registry_lost_tokens_that_it_has() -> None:
    """They are computed again, perhaps in other pieces, and text cannot be cut at a token: the watch ends with an error
    that names what to do. The control: what it has had in whole is left out."""
    watching = _Watching("job", 0)

    def read(index: int, *tokens: int) -> Any:
        delta = generation_pb2.Delta(index=index, token_ids=tokens)
        return watching.read(jobs_pb2.WatchJobResponse(event=generation_pb2.GenerateResponse(delta=delta)))

    assert read(0, 5, 6) is not None
    assert read(2, 7, 8) is not None
    assert read(2, 7) is None
    assert read(3, 8) is None
    with pytest.raises(Unavailable, match="from its beginning"):
        read(3, 8, 9)


def test_a_watcher_comes_again_when_the_router_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not sooner because its job's first message came again, and not at the same time as others."""
    refused = Unavailable("x", reason="WATCHERS_BEHIND", retry_after=1.0)
    monkeypatch.setattr(watching_module, "from_rpc", lambda error: refused)
    watching = _Watching("job", 0)
    pauses = set()
    for _ in range(20):
        watching.read(
            jobs_pb2.WatchJobResponse(event=generation_pb2.GenerateResponse(started=generation_pb2.Started()))
        )
        pauses.add(watching.after(grpc.RpcError()))
    assert all(0.8 <= pause <= 1.2 for pause in pauses)
    assert len(pauses) > 1


async def test_pieces_arrive_as_they_are_sent(client: Any, fake: Any, events: Any) -> None:
    """A piece reaches the caller before the server has sent the next one; the last has the receipt."""
    taken = asyncio.Event()

    async def one_by_one(_: Any) -> Any:
        yield events.started()
        for index, text in enumerate("abc"):
            yield events.delta(index, [index], text)
            await taken.wait()  # a client that waited for more would never set it
            taken.clear()
        yield events.finished(3)

    fake.script = one_by_one
    pieces = []
    async for piece in client.stream("Hi"):
        pieces.append(piece)
        taken.set()
    assert [(piece.text, piece.token_ids) for piece in pieces] == [("a", [0]), ("b", [1]), ("c", [2]), ("", [])]
    assert [piece.receipt is None for piece in pieces] == [True, True, True, False]
    assert pieces[-1].finish_reason == "length"


async def test_early_close_cancels_the_server(client: Any, fake: Any, events: Any) -> None:
    """Closing a stream after its first piece ends the request in the server."""

    async def endless(_: Any) -> Any:
        yield events.delta(0, [1], "a")
        await asyncio.Event().wait()

    fake.script = endless
    async with aclosing(client.stream("Hi")) as pieces:
        assert (await anext(pieces)).text == "a"
    await asyncio.wait_for(fake.cancelled.wait(), 5)


async def test_dropping_a_stream_cancels_the_server(fake: Any, events: Any) -> None:
    """So does a `break` out of the loop, without a close."""

    async def endless(_: Any) -> Any:
        yield events.delta(0, [1], "a")
        await asyncio.Event().wait()

    def take_one(client: Client) -> None:
        for _ in client.stream("Hi"):
            break

    fake.script = endless
    async with AsyncClient(fake.target) as client:
        async for _ in client.stream("Hi"):
            break
        await asyncio.wait_for(fake.cancelled.wait(), 5)
    fake.cancelled.clear()
    with Client(fake.target) as blocking:
        await asyncio.to_thread(take_one, blocking)
        await asyncio.wait_for(fake.cancelled.wait(), 5)


async def test_a_cancelled_task_cancels_the_server(fake: Any, events: Any) -> None:
    """Cancelling the task that awaits generate() ends the request in the server."""
    sent = asyncio.Event()

    async def endless(_: Any) -> Any:
        yield events.delta(0, [1], "a")
        sent.set()
        await asyncio.Event().wait()

    fake.script = endless
    async with AsyncClient(fake.target) as client:
        task = asyncio.create_task(client.generate("Hi"))
        await sent.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(fake.cancelled.wait(), 5)


@pytest.mark.parametrize("call", ["generate", "workers"])
async def test_a_closed_client_ends_its_calls_with_an_error(client: Any, fake: Any, events: Any, call: str) -> None:
    """Not with a CancelledError, which would end a task that nobody cancelled in silence."""
    begun = asyncio.Event()

    async def endless(_: Any) -> Any:
        yield events.delta(0, [1], "a")
        begun.set()
        await asyncio.Event().wait()

    async def never() -> None:
        begun.set()
        await asyncio.Event().wait()

    fake.script, fake.before_workers = endless, never
    task = asyncio.create_task(client.generate("Hi") if call == "generate" else client.workers())
    await begun.wait()
    await client.close()
    with pytest.raises(Cancelled):
        await asyncio.wait_for(task, 60)


async def test_many_streams_share_one_connection(client: Any, fake: Any) -> None:
    """Streams at the same time on one client do not mix."""
    answers = await asyncio.gather(*(client.generate(f"prompt {number}") for number in range(20)))
    assert {answer.text for answer in answers} == {"Hello!"}
    assert len(fake.peers) == 1


async def test_each_client_has_a_connection_of_its_own(fake: Any) -> None:
    """Of several routers behind one address another client may get another one."""
    async with AsyncClient(fake.target) as one, AsyncClient(fake.target) as other:
        await asyncio.gather(one.generate("a"), other.generate("b"))
    assert len(fake.peers) == 2


# ---- what is refused


@pytest.mark.parametrize("cls", leaves(TandemError)[1:], ids=lambda cls: cls.__name__)
async def test_every_error_keeps_its_class(client: Any, fake: Any, cls: type[TandemError]) -> None:
    """What the server raises is what the caller catches: class, message, reason, field, bound, retry_after."""

    async def refuse(_: Any) -> Any:
        raise cls("no because", reason="WORD", field="max_tokens", bound="1 to 8", retry_after=0.02)
        yield

    fake.script = refuse
    with pytest.raises(cls) as caught:
        await client.generate("Hi")
    error = caught.value
    assert type(error) is cls
    assert (error.message, error.reason, error.field) == ("no because", "WORD", "max_tokens")
    assert (error.bound, error.retry_after) == ("1 to 8", 0.02)


async def test_questions_raise_typed_errors_too(client: Any) -> None:
    """Admin calls map errors like Generate does."""
    with pytest.raises(NotFound, match="no worker x") as caught:
        await client.drain("x")
    assert caught.value.field == "worker_id"


async def test_deadline(client: Any, fake: Any) -> None:
    """`timeout` seconds are the deadline of the whole request, and the server hears of it."""

    async def silent(_: Any) -> Any:
        await asyncio.Event().wait()
        yield

    fake.script = silent
    with pytest.raises(DeadlineExceeded, match=r"^the deadline of 0\.2 s passed; no token had come$"):
        await client.generate("Hi", timeout=0.2)
    await asyncio.wait_for(fake.cancelled.wait(), 5)


async def test_a_deadline_says_what_had_come(client: Any, fake: Any, events: Any) -> None:
    """The error names the limit and how far the answer had got; a server's own words on its limit stay."""

    async def stuck(_: Any) -> Any:
        yield events.delta(0, [1, 2], "ab")
        await asyncio.Event().wait()

    async def impatient(_: Any) -> Any:
        yield events.delta(0, [1], "a")
        raise DeadlineExceeded("took too long")

    fake.script = stuck
    with pytest.raises(DeadlineExceeded, match=r"^the deadline of 0\.2 s passed; 2 tokens had come$"):
        await client.generate("Hi", timeout=0.2)
    fake.script = impatient
    with pytest.raises(DeadlineExceeded, match=r"^took too long$"):
        await client.generate("Hi", timeout=30)


async def test_nobody_there() -> None:
    """A target where nothing listens is WorkerLost (UNAVAILABLE), which is safe to retry."""
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(WorkerLost):
            await client.generate("Hi")


async def test_unavailable_is_tried_again_before_the_first_message(client: Any, fake: Any) -> None:
    """UNAVAILABLE before any answer is tried at most four times in all."""

    async def gone(_: Any) -> Any:
        raise NoWorker("none", retry_after=0.01)
        yield

    fake.script = gone
    with pytest.raises(NoWorker):
        await client.generate("Hi")
    assert len(fake.requests) == 4


async def test_nothing_is_tried_again_after_the_first_message(client: Any, fake: Any, events: Any) -> None:
    """A stream that breaks is not sent again: the caller has seen its beginning."""

    async def breaks(_: Any) -> Any:
        yield events.started()
        raise NoWorker("gone", retry_after=0.01)

    fake.script = breaks
    with pytest.raises(NoWorker):
        await client.generate("Hi")
    assert len(fake.requests) == 1


@pytest.mark.parametrize("indices", [(0, 2), (0, 0), (1, 2)], ids=["lost", "repeated", "late"])
async def test_a_gap_is_an_error(client: Any, fake: Any, events: Any, indices: tuple[int, int]) -> None:
    """A lost or repeated message is never passed off as the answer."""

    async def gap(_: Any) -> Any:
        for index in indices:
            yield events.delta(index, [index], "x")
        yield events.finished(2)

    fake.script = gap
    with pytest.raises(InternalError, match="gap"):
        await client.generate("Hi")


async def test_logprobs_come_with_their_tokens(client: Any, fake: Any, events: Any) -> None:
    """Each token has its log probability and alternatives, in pieces and in the completion; None if not asked for."""

    async def script(_: Any) -> Any:
        first = events.delta(0, [5, 6], "x")
        first.delta.logprobs.MergeFrom(
            common_pb2.Logprobs(chosen=[-0.5, -1.0], top_ids=[5, 9, 7, 6], top=[-0.5, -2.0, -0.25, -1.0])
        )
        yield first
        last = events.delta(2, [8], "x")
        last.delta.logprobs.chosen.append(-3.0)
        yield last
        yield events.finished(3)

    assert (await client.generate("Hi")).logprobs is None
    fake.script = script
    pieces = [piece async for piece in client.stream("Hi", logprobs=2)]
    assert pieces[0].logprobs == [TokenLogprob(5, -0.5, {5: -0.5, 9: -2.0}), TokenLogprob(6, -1.0, {7: -0.25, 6: -1.0})]
    assert pieces[-1].logprobs is None
    answer = await client.generate("Hi", logprobs=2)
    assert answer.logprobs == [*pieces[0].logprobs, TokenLogprob(8, -3.0, {})]


async def test_prompt_logprobs_come_once_and_fit_the_prompt(client: Any, fake: Any, events: Any) -> None:
    """One for each prompt token but the first; too few or too many are an error."""
    said = generation_pb2.PromptLogprobs(
        token_ids=[3, 4, 5], logprobs=common_pb2.Logprobs(chosen=[-1.0, -2.0], top_ids=[9, 5], top=[-0.5, -2.0])
    )

    async def script(_: Any) -> Any:
        first = events.delta(0, [5], "x")
        first.delta.prompt_logprobs.CopyFrom(said)
        yield first
        yield events.delta(1, [6], "y")
        yield events.finished(2)

    assert (await client.generate("Hi")).prompt_logprobs is None
    fake.script = script
    answer = await client.generate("Hi", prompt_logprobs=1)
    assert answer.prompt_logprobs == [TokenLogprob(4, -1.0, {9: -0.5}), TokenLogprob(5, -2.0, {5: -2.0})]
    assert answer.logprobs is None
    said.token_ids.append(6)
    with pytest.raises(InternalError, match="log probabilities"):
        await client.generate("Hi", prompt_logprobs=1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"chosen": [-1.0]},
        {"chosen": [-1.0, -2.0], "top_ids": [1], "top": [-1.0]},
        {"chosen": [-1.0, -2.0], "top_ids": [1, 2], "top": [-1.0]},
        {"top_ids": [1, 2], "top": [-1.0, -2.0]},
    ],
)
async def test_logprobs_that_do_not_fit_their_tokens_are_an_error(
    client: Any, fake: Any, events: Any, wrong: dict[str, Any]
) -> None:
    """Numbers are never given to another token."""

    async def script(_: Any) -> Any:
        event = events.delta(0, [5, 6], "x")
        event.delta.logprobs.MergeFrom(common_pb2.Logprobs(**wrong))
        yield event
        yield events.finished(2)

    fake.script = script
    with pytest.raises(InternalError, match="log probabilities"):
        await client.generate("Hi", logprobs=1)


async def test_several_answers_come_mixed_and_are_told_apart(client: Any, fake: Any, events: Any) -> None:
    """Each has its own text, ids, end and receipt, in the order of their numbers."""

    async def script(_: Any) -> Any:
        yield events.started(choices=3)
        for event in (
            events.delta(0, [5], "a", 0),
            events.delta(0, [7, 8], "b", 2),
            events.delta(1, [6], "A", 0),
            events.finished(2, "!", 0),
            events.delta(0, [9], "c", 1),
            events.finished(2, "", 2),
            events.finished(1, "?", 1),
        ):
            yield event

    fake.script = script
    done = await client.generate("Hi", n=3)
    assert [(one.text, one.token_ids) for one in done] == [("aA!", [5, 6]), ("c?", [9]), ("b", [7, 8])]
    assert [one.receipt.choice for one in done] == [0, 1, 2]
    assert fake.requests[0].sampling.n == 3
    assert [piece.choice async for piece in client.stream("Hi", n=3)] == [0, 2, 0, 0, 1, 2, 1]


@pytest.mark.parametrize("fault", ["gap", "unknown", "missing", "twice"])
async def test_a_fault_in_one_of_several_answers_is_an_error(client: Any, fake: Any, events: Any, fault: str) -> None:
    """A lost or foreign message is never a shorter answer."""

    async def script(_: Any) -> Any:
        yield events.started(choices=2)
        yield events.delta(0, [5], "a", 0)
        yield events.delta(1 if fault == "gap" else 0, [6], "b", 2 if fault == "unknown" else 1)
        yield events.finished(1, "", 0)
        if fault != "missing":
            yield events.finished(1, "", 0 if fault == "twice" else 1)

    fake.script = script
    with pytest.raises(InternalError):
        await client.generate("Hi", n=2)


def test_a_call_of_very_many_pieces_is_joined_once() -> None:
    """As one that writes a file: to copy what had come at each of 100,000 tokens took seconds of an event loop."""
    beginnings = [ToolCall("1", "f", '{"x": "'), ToolCall("2", "g", "")]
    pieces = [
        [Piece("", [1], calls=(one,)) for one in (call, *[ToolCall("", "", "ab" * 8)] * 50_000)] for call in beginnings
    ]
    end = Piece("", [], "stop", receipt(generation_pb2.Receipt()))
    with ThreadTime() as taken:
        whole = completion([*pieces[0], *pieces[1], end])
    assert taken.seconds < 1.0
    assert [(call.id, call.name) for call in whole.calls] == [("1", "f"), ("2", "g")]
    assert [call.arguments for call in whole.calls] == ['{"x": "' + "ab" * 400_000, "ab" * 400_000]


async def test_a_stream_without_an_end_is_an_error(client: Any, fake: Any, events: Any) -> None:
    """OK without `finished` could be a cut text, so it is not an answer."""

    async def cut(_: Any) -> Any:
        yield events.delta(0, [1], "x")

    fake.script = cut
    with pytest.raises(InternalError, match="without a receipt"):
        await client.generate("Hi")


async def test_a_huge_prompt_gets_the_servers_answer(client: Any) -> None:
    """50 MB leave the client; what the user sees is the server's RESOURCE_EXHAUSTED, quickly."""
    with pytest.raises(TandemError) as caught:
        await client.generate(b"x" * 50_000_000)
    assert caught.value.status == "RESOURCE_EXHAUSTED"


# ---- what is sent


def test_options_reach_the_wire() -> None:
    """Each option has its field, and an option that is not given stays absent."""
    request = build_request(
        "Hi",
        max_tokens=-1,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        seed=2**64 - 1,
        ignore_eos=True,
        stop_token_ids=(7, 8),
        repetition_penalty=1.5,
        frequency_penalty=-2,
        presence_penalty=0.5,
        logit_bias={4: -100, 5: 2.5},
        min_tokens=6,
        logprobs=0,
        prompt_logprobs=3,
        grammar={"json_schema": {"type": "null"}},
        stop=["\n", "é"],
        include_stop=True,
        n=3,
        cache_salt="salt",
        request_id="mine",
    )
    sampling = request.sampling
    assert (request.text, request.cache_salt, request.request_id) == (b"Hi", b"salt", "mine")
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (-1, 0.5, 2**64 - 1)
    assert (sampling.top_p, sampling.top_k, sampling.min_p) == (0.9, 3, 0.1)
    assert (sampling.ignore_eos, list(sampling.stop_token_ids)) == (True, [7, 8])
    penalties = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
    assert penalties == (1.5, -2.0, 0.5)
    assert dict(sampling.logit_bias) == {4: -100.0, 5: 2.5}
    assert (sampling.min_tokens, sampling.logprobs, sampling.HasField("logprobs")) == (6, 0, True)
    assert sampling.prompt_logprobs == 3
    assert sampling.grammar.json_schema == b'{"type": "null"}'
    assert (list(sampling.stop), sampling.include_stop, sampling.n) == ([b"\n", "é".encode()], True, 3)
    assert list(build_request("Hi", stop="one").sampling.stop) == [b"one"]
    assert list(build_request("Hi", grammar={"choice": ["a", "b"]}).sampling.grammar.choice.texts) == [b"a", b"b"]
    assert build_request("Hi", grammar={"json": True}).sampling.grammar.json
    assert not build_request("Hi").sampling.ListFields()


def test_a_prompt_is_text_bytes_ids_or_messages() -> None:
    """Also when it is empty: whether that is allowed is the server's to say."""
    assert build_request("é").text == "é".encode()
    assert build_request(b"\xff").text == b"\xff"
    assert list(build_request(range(3)).token_ids.ids) == [0, 1, 2]
    assert list(build_request([-1]).token_ids.ids) == [-1]
    assert build_request("").WhichOneof("input") == "text"
    assert build_request([]).WhichOneof("input") == "token_ids"
    assert build_request(None, messages=[]).WhichOneof("input") == "chat"
    chat = build_request(None, messages=[{"role": "user", "content": "Hi"}]).chat
    assert [(message.role, message.content) for message in chat.messages] == [("user", b"Hi")]


def test_what_belongs_to_a_chat_reaches_the_wire() -> None:
    """Its template's variables and the rest, and of each message all that a template may read."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    request = build_request(
        None,
        messages=[
            {"role": "assistant", "reasoning": "hm", "tool_calls": [call]},
            {"role": "tool", "content": "5", "tool_call_id": "c", "name": "f"},
        ],
        tools=[{"type": "function", "function": {"name": "f"}}],
        template_variables={"enable_thinking": False},
        continue_last_message=True,
        without_generation_prompt=True,
        chat_template="{{ messages }}",
    )
    chat = request.chat
    assert json.loads(chat.tools) == [{"type": "function", "function": {"name": "f"}}]
    assert json.loads(chat.template_variables) == {"enable_thinking": False}
    assert (chat.continue_last_message, chat.without_generation_prompt) == (True, True)
    assert chat.template == b"{{ messages }}"
    first, second = chat.messages
    assert (first.reasoning, first.content, json.loads(first.tool_calls)) == (b"hm", b"", [call])
    assert (second.content, second.tool_call_id, second.name) == (b"5", "c", "f")


@pytest.mark.parametrize(
    ("options", "name", "several"),
    [
        ({"tool_choice": "required"}, "", True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, "", False),
        ({"parallel_tool_calls": False, "tool_choice": "required"}, "", False),
        ({"tool_choice": {"name": "f"}, "parallel_tool_calls": True}, "f", False),
    ],
)
def test_calls_are_forced_as_over_http(options: dict[str, Any], name: str, several: bool) -> None:
    """In any order of the options; what is not said of calls side by side is left to the server."""
    chat = build_request(None, messages=[], tools=[{"type": "function", "function": {"name": "f"}}], **options).chat
    assert (chat.tool_choice.name, chat.tool_choice.several) == (name, several)
    assert chat.HasField("parallel_calls") == ("parallel_tool_calls" in options)
    assert not build_request(None, messages=[]).chat.HasField("tool_choice")


@pytest.mark.parametrize(
    ("prompt", "options", "field"),
    [
        ("x", {"seed": -1}, "seed"),
        ("x", {"seed": 2**64}, "seed"),
        ("x", {"max_tokens": 2**63}, "max_tokens"),
        ("x", {"max_tokens": 1.5}, "max_tokens"),
        ("x", {"temperature": "hot"}, "temperature"),
        ("x", {"stop_token_ids": [2**63]}, "stop_token_ids"),
        ("x", {"logit_bias": {2**63: 1.0}}, "logit_bias"),
        ("x", {"logit_bias": {"a": 1.0}}, "logit_bias"),
        ("x", {"logit_bias": [5]}, "logit_bias"),
        ("x", {"repetition_penalty": "a"}, "repetition_penalty"),
        ("x", {"logprobs": 1.5}, "logprobs"),
        ("x", {"grammar": {}}, "grammar"),
        ("x", {"grammar": "regex"}, "grammar"),
        ("x", {"grammar": {"regex": "a", "json": True}}, "grammar"),
        ("x", {"grammar": {"frob": "a"}}, "grammar"),
        ("x", {"grammar": {"regex": 5}}, "grammar.regex"),
        ("x", {"grammar": {"choice": 5}}, "grammar.choice"),
        ("x", {"grammar": {"choice": "yes"}}, "grammar.choice"),
        ("x", {"bad_words": "yes"}, "bad_words"),
        ("x", {"grammar": {"json_schema": {"a": {1}}}}, "grammar.json_schema"),
        ("x", {"stop": 5}, "stop"),
        ("x", {"stop": [5]}, "stop"),
        ("x", {"n": "a"}, "n"),
        ([2**63], {}, "token_ids"),
        (["a"], {}, "token_ids"),
        (5, {}, "token_ids"),
        ("\ud800", {}, "text"),
        ("x", {"request_id": "\ud800"}, "request_id"),
        (None, {"messages": [{"role": "user"}]}, "chat.messages[0]"),
        (None, {"messages": [{"role": "user", "content": 5}]}, "chat.messages[0].content"),
        (None, {"messages": [5]}, "chat.messages[0]"),
        (None, {"messages": [{"role": "user", "content": "x", "reasoning": 5}]}, "chat.messages[0].reasoning"),
        (None, {"messages": [], "template_variables": {"a": {1}}}, "template_variables"),
        (None, {"messages": [], "continue_last_message": "yes"}, "continue_last_message"),
        ("x", {"template_variables": {"enable_thinking": False}}, "template_variables"),
        ([1], {"tools": []}, "tools"),
        ([1], {"tool_choice": "required"}, "tool_choice"),
        (None, {"messages": [], "tool_choice": "some"}, "tool_choice"),
        (None, {"messages": [], "tool_choice": {"name": 5}}, "tool_choice"),
        (None, {"messages": [], "parallel_tool_calls": "no"}, "parallel_calls"),
        (None, {}, "prompt"),
        ("x", {"messages": []}, "prompt"),
    ],
)
def test_what_cannot_be_sent_is_refused(prompt: Any, options: dict[str, Any], field: str) -> None:
    """A value that no message can hold is InvalidRequest with field and bound, before anything is sent."""
    with pytest.raises(InvalidRequest) as caught:
        build_request(prompt, **options)
    assert caught.value.field == field
    assert caught.value.bound


async def test_one_prompt_is_no_list_of_prompts(client: Any) -> None:
    """Its letters are not the prompts of jobs."""
    with pytest.raises(InvalidRequest) as caught:
        await client.submit_many("Hello")
    assert caught.value.field == "prompts"


def test_too_large_to_send() -> None:
    """More than one message can carry is TooLarge with the bound."""
    with pytest.raises(TooLarge, match="67108864"):
        build_request(b"x" * (64 * 1024 * 1024))


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "1"])
def test_a_timeout_is_more_than_nothing(timeout: Any) -> None:
    """gRPC would take 0 for "no deadline"; here it is refused."""
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequest) as caught:
        client.stream("x", timeout=timeout)
    assert caught.value.field == "timeout"


async def test_a_long_timeout_is_long(client: Any) -> None:
    """A deadline beyond what gRPC can count does not wrap into the past."""
    for timeout in (1e12, 1e300, float("inf")):
        assert (await client.generate("Hi", timeout=timeout)).text == "Hello!"


def test_unknown_options_are_refused() -> None:
    """A misspelt option is a TypeError, not silence."""
    with Client("127.0.0.1:1") as client, pytest.raises(TypeError, match="temprature"):
        client.stream("x", temprature=1.0)  # type: ignore[call-arg]


# ---- the cluster


async def test_cluster_questions(client: Any, fake: Any) -> None:
    """Workers, sizes, drains, ledgers, diagnosis and the model come back as values."""
    pools = await client.workers()
    assert [worker.worker_id for worker in pools] == ["prefill-0", "decode-0"]
    assert (len(pools), pools.wanted, pools.workers[0].blocks_held) == (2, {"prefill": 1, "decode": 1}, 2)
    assert await client.scale(prefill=3) == {"prefill": 3, "decode": 1}
    assert dict(fake.requests[-1].wanted) == {"prefill": 3}
    await client.scale(pools={"small/prefill": 2, "large/decode": 3})
    assert dict(fake.requests[-1].wanted) == {"small/prefill": 2, "large/decode": 3}
    assert [(one.role, one.wanted) for one in (await client.autoscaling()).pools] == [("prefill", 1), ("decode", 2)]
    assert (await client.drain("decode-0", grace=1.5)).to_dict() == {"finished": 3, "cut": 1}
    assert (fake.requests[-1].worker_id, fake.requests[-1].grace_seconds) == ("decode-0", 1.5)
    audit = await client.audit()
    assert audit.balanced
    assert audit.ledgers[0].entries[0].blocks == [3, 4]
    assert (await client.diagnose()).pairs[0].bytes_per_second == 2.5e9
    assert (await client.model_info()).eos_token_ids == [2]
    with pytest.raises(InvalidRequest, match="decode"):
        await client.scale(decode=-1)
    with pytest.raises(InvalidRequest, match="grace"):
        await client.drain("decode-0", grace=float("nan"))


async def test_the_client_adds_up_the_ledger_itself(client: Any, fake: Any, events: Any) -> None:
    """A ledger that claims to be well but does not add up is not balanced, nor is one with blocks that nobody owns."""
    fake.audit.ledgers[0].CopyFrom(events.ledger("prefill-0", free=4))
    fake.audit.ledgers[1].CopyFrom(events.ledger("decode-0", held=3, free=4))
    audit = await client.audit()
    assert not audit.balanced
    assert "= 7, not total 8" in audit.ledgers[0].faults[0]
    assert "3 blocks are held and 2 have an owner" in audit.ledgers[1].faults[0]


async def test_slots_of_recurrent_states_are_added_up_again(client: Any, fake: Any) -> None:
    """As blocks: whatever the worker says of itself, one that is lost or has two owners is a fault."""
    states = fake.audit.ledgers[1].states
    for total, owners, fault in (
        (3, ["a", "b"], ""),
        (4, ["a", "b"], "1 + held 2 are not"),
        (3, ["a", "a"], "two"),
    ):
        states.Clear()
        states.MergeFrom(common_pb2.StateLedger(total=total, free=1, owners=owners, snapshots=5))
        audit = await client.audit()
        assert audit.ledgers[0].states is None
        assert (audit.ledgers[1].states.owners, audit.ledgers[1].states.snapshots) == (owners, 5)
        assert (audit.balanced, fault in "".join(audit.ledgers[1].faults)) == (not fault, True)


@pytest.mark.parametrize("call", ["generate", "workers", "watch"])
async def test_a_closed_client_refuses_calls(fake: Any, call: str) -> None:
    """With an error of this package, not grpcio's. A watch begins calls of its own, between which another task may
    close the client."""
    for client in (AsyncClient(fake.target), Client(fake.target)):
        closed = client.close()
        if closed is not None:
            await closed
        with pytest.raises(Cancelled):
            if isinstance(client, AsyncClient):
                if call == "watch":
                    _ = [piece async for piece in client.watch("x")]
                await (client.generate("Hi") if call == "generate" else client.workers())
            elif call == "watch":
                _ = list(client.watch("x"))
            else:
                client.generate("Hi") if call == "generate" else client.workers()
