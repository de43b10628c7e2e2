"""A stream over HTTP in which nothing comes: it says that it goes on, once it has begun."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
from openai._streaming import SSEDecoder

from services.router.frontend.anthropic.messages_answer import MessagesAnswer
from services.router.frontend.http_answers import LARGE_BYTES, PIECE_BYTES, Collected, Generating, Kept, Streaming
from services.router.frontend.json_body import SSE_BLANK
from services.router.frontend.openai.openai_answers import Answer
from services.router.frontend.openai.openai_errors import error_fields, error_headers
from services.router.frontend.openai.responses_answer import ResponsesAnswer
from tandem.errors import Busy, InvalidRequest, NoWorker, ResumeFailed, TandemError, TooLarge
from tandem.v1 import generation_pb2

STARTED = generation_pb2.GenerateResponse(started=generation_pb2.Started(prompt_tokens=3))
TOKEN = generation_pb2.GenerateResponse(delta=generation_pb2.Delta(token_ids=[1], text="x"))
PING = b"(ping)"


class Words:
    """An encoder whose format is the text."""

    keep_alive = PING

    async def stream(self, index: int, event: generation_pb2.GenerateResponse) -> bytes:
        return event.delta.text.encode()

    async def collect(self, events: Any) -> bytes:
        return b"".join([event.delta.text.encode() async for _, event in events])

    def named(self, error: TandemError) -> TandemError:
        return error

    def error_body(self, error: TandemError) -> bytes:
        return b"refused"

    def error_event(self, error: TandemError) -> bytes:
        return b"(error)"


class Exchange:
    """One answer, streamed or not: what was sent, and events that come when they are given."""

    def __init__(self, streams: bool = True, kept: Kept | None = None, size: int = 0) -> None:
        self.sent: list[dict[str, Any]] = []
        self.news = asyncio.Condition()
        self._events: asyncio.Queue[generation_pb2.GenerateResponse | TandemError | None] = asyncio.Queue()
        encoder: Any = Words()
        kind: type[Generating] = Streaming if streams else Collected
        answer = kind(encoder, self._read(), "7", kept or (lambda _: nullcontext()), size)
        self.task = asyncio.create_task(self._answer(answer))

    def give(self, *events: generation_pb2.GenerateResponse | TandemError | None) -> None:
        for event in events:
            self._events.put_nowait(event)

    async def bodies(self, count: int) -> list[bytes]:
        """The first `count` bodies, as soon as that many have been sent."""
        async with self.news, asyncio.timeout(30.0):
            await self.news.wait_for(lambda: len(self._bodies()) >= count)
        return self._bodies()[:count]

    def _bodies(self) -> list[bytes]:
        return [one["body"] for one in self.sent if "body" in one]

    async def _read(self) -> AsyncGenerator[tuple[int, generation_pb2.GenerateResponse], None]:
        while event := await self._events.get():
            if isinstance(event, TandemError):
                raise event
            yield 0, event

    async def _answer(self, response: Generating) -> None:
        await response({}, asyncio.Event().wait, self._send)  # type: ignore[arg-type]

    async def _send(self, message: Any) -> None:
        async with self.news:
            self.sent.append(message)
            self.news.notify_all()


async def test_a_stream_in_which_nothing_comes_says_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first token, as of a long prompt, and between two: clients give up on a silent connection. The end of
    the stream is its last message."""
    monkeypatch.setattr("services.router.frontend.http_answers.KEEP_ALIVE_S", 0.01)
    exchange = Exchange()
    exchange.give(STARTED)
    assert await exchange.bodies(2) == [PING, PING]
    exchange.give(TOKEN)
    async with exchange.news, asyncio.timeout(30.0):
        await exchange.news.wait_for(lambda: exchange.sent[-1].get("body") == PING and b"x" in exchange._bodies())
    exchange.give(None)
    await asyncio.wait_for(exchange.task, 30.0)
    assert [one["type"] for one in exchange.sent[:2]] == ["http.response.start", "http.response.body"]
    assert exchange.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    assert sum(one["type"] == "http.response.start" for one in exchange.sent) == 1


async def test_control_a_stream_in_time_has_nothing_but_its_tokens() -> None:
    """The silence that is permitted is half a minute."""
    exchange = Exchange()
    exchange.give(STARTED, TOKEN, TOKEN, None)
    await asyncio.wait_for(exchange.task, 30.0)
    assert exchange._bodies() == [b"x", b"x", b""]


@pytest.mark.parametrize("late", [False, True])
async def test_a_refusal_before_anything_was_written_has_its_status_and_headers(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a full queue. The control: of a stream that has said that it goes on, the error is an event."""
    if late:
        monkeypatch.setattr("services.router.frontend.http_answers.KEEP_ALIVE_S", 0.01)
    exchange = Exchange()
    exchange.give(STARTED)
    if late:
        await exchange.bodies(1)
    exchange.give(Busy("no room", retry_after=1.0))
    await asyncio.wait_for(exchange.task, 30.0)
    assert exchange.sent[0]["status"] == (200 if late else 429)
    assert ((b"retry-after", b"1") in exchange.sent[0]["headers"]) is not late
    assert exchange._bodies()[-1] == (b"(error)" if late else b"refused")


@pytest.mark.parametrize(
    ("streams", "before", "status"),
    [(False, [STARTED, TOKEN], 503), (True, [STARTED], 503), (True, [STARTED, TOKEN], 200)],
    ids=["whole", "stream without text", "control"],
)
async def test_an_answer_of_which_nothing_was_written_may_be_asked_for_again(
    streams: bool, before: list[generation_pb2.GenerateResponse], status: int
) -> None:
    """Its workers were lost after its first tokens, and its client has received none of them. The control: a stream
    that has begun ends with the error itself, which clients do not retry."""
    exchange = Exchange(streams)
    exchange.give(*before, ResumeFailed("no place became free; 1 tokens had been generated"))
    await asyncio.wait_for(exchange.task, 30.0)
    assert exchange.sent[0]["status"] == status
    assert exchange._bodies()[-1] == (b"refused" if status == 503 else b"(error)")


def test_what_says_so_is_ignored_by_each_kind_of_client() -> None:
    """Anthropic's has an event for it; blank lines are no event at all, also for a client that strips each read."""
    assert MessagesAnswer.keep_alive == b'event: ping\ndata: {"type": "ping"}\n\n'
    assert Answer.keep_alive == ResponsesAnswer.keep_alive == SSE_BLANK
    assert not SSE_BLANK.strip()
    reads = [SSE_BLANK, b'data: {"a": 1}\n\n', SSE_BLANK, SSE_BLANK, b"data: [DONE]\n\n"]
    assert [event.data for event in SSEDecoder().iter_bytes(iter(reads))] == ['{"a": 1}', "[DONE]"]


@pytest.mark.parametrize(
    ("error", "after"),
    [
        (Busy("no room", retry_after=2.4), "2"),
        (NoWorker("none is ready"), "1"),
        (Busy("its prompt takes longer than its objective"), None),
        (TooLarge("it never fits"), None),
    ],
)
def test_only_who_may_be_served_later_is_told_to_retry(error: TandemError, after: str | None) -> None:
    """A refusal without a time is one that no later attempt changes; OpenAI's clients would try it twice more."""
    headers = error_headers(error)
    assert (headers["x-should-retry"], headers.get("retry-after")) == ("true" if after else "false", after)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ResumeFailed("its workers were lost"), "server_error"),
        (NoWorker("none is ready"), "server_error"),
        (Busy("no room"), "rate_limit_error"),
        (InvalidRequest("it is empty"), "invalid_request_error"),
    ],
)
def test_a_lost_answer_is_no_fault_of_its_client(error: TandemError, kind: str) -> None:
    """Clients decide on the type, also where the status is not one of the server's errors."""
    assert error_fields(error)["type"] == kind


@pytest.mark.parametrize("streams", [False, True])
async def test_a_request_and_what_its_client_has_not_read_count_until_it_has(streams: bool) -> None:
    """A large message is written in pieces, so that other streams go on meanwhile, and counts while it is written."""
    counted: list[int] = []
    counts: list[tuple[int, ...]] = []

    @contextmanager
    def kept(size: int) -> Iterator[None]:
        counted.append(size)
        yield
        counted.remove(size)

    exchange = Exchange(streams, kept, size=70_000)
    send = exchange._send

    async def noted(message: Any) -> None:
        if "body" in message:
            counts.append(tuple(counted))
        await send(message)

    exchange._send = noted  # type: ignore[method-assign]
    large = generation_pb2.GenerateResponse(delta=generation_pb2.Delta(text="x" * (2 * PIECE_BYTES + 1)))
    exchange.give(STARTED, large, None)
    await asyncio.wait_for(exchange.task, 30.0)
    assert [len(one) for one in exchange._bodies() if one and one != PING] == [PIECE_BYTES, PIECE_BYTES, 1]
    whole = (70_000, 2 * PIECE_BYTES + 1)
    assert counts[:4] == [whole] * 4  # the fourth waits until the client has read the third
    assert exchange._bodies()[3] == b""
    assert counted == []


@pytest.mark.parametrize("begun", [False, True])
async def test_what_would_be_kept_beyond_the_bound_is_refused(begun: bool) -> None:
    """The request, or later a message of its stream, which then ends with an error. Small ones do not count."""

    def kept(size: int) -> Any:
        if size > LARGE_BYTES + begun:
            raise Busy("too much", reason="BODIES", retry_after=1.0)
        return nullcontext()

    exchange = Exchange(True, kept, size=LARGE_BYTES + 1)
    if begun:
        exchange.give(STARTED, TOKEN)
        assert await exchange.bodies(1) == [b"x"]
        exchange.give(generation_pb2.GenerateResponse(delta=generation_pb2.Delta(text="x" * (LARGE_BYTES + 2))))
    await asyncio.wait_for(exchange.task, 30.0)
    assert exchange._bodies()[-1] == (b"(error)" if begun else b"refused")
    assert exchange.sent[0]["status"] == (200 if begun else 429)
