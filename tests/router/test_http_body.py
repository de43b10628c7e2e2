"""The bodies of one tenant take a bounded share of the event loop; those of others do not wait for them."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.requests import Request

from services.router.frontend.http_api import Api
from services.router.frontend.http_body import BURST_S, Bodies, BodyReader, BoundedAnswer, BoundedStream
from services.router.preprocess.offload import Offload
from services.router.tenancy import tenant_rate
from services.router.tenancy.api_keys import ApiKey
from tandem.errors import Busy

RATE = 1000.0  # bytes per second


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which passes only in sleep."""
    now = [100.0]

    async def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(tenant_rate, "monotonic", lambda: now[0])
    monkeypatch.setattr(tenant_rate.asyncio, "sleep", sleep)
    return now


async def received(bodies: Bodies, tenant: str, count: int, chunk: int = 50) -> None:
    for _ in range(count // chunk):
        await bodies.keep_rate(tenant, chunk)


async def test_the_bodies_of_a_tenant_keep_to_the_rate(clock: list[float]) -> None:
    """One after another or not: ten bodies take as long as one of ten times the size."""
    bodies = Bodies(10**6, RATE)
    for _ in range(10):
        with bodies.of("greedy"):
            await received(bodies, "greedy", 1000)
    assert clock[0] - 100.0 == pytest.approx(10_000 / RATE - BURST_S, abs=2 * BURST_S)


async def test_a_short_body_does_not_wait(clock: list[float]) -> None:
    """Nor does another tenant's, nor one after a while without any."""
    bodies = Bodies(10**6, RATE)
    await received(bodies, "a", 20, chunk=10)
    assert clock[0] == 100.0
    await received(bodies, "a", 1000)
    clock[0] += 1
    then = clock[0]
    await received(bodies, "b", 20, chunk=10)
    await received(bodies, "a", 20, chunk=10)
    assert clock[0] == then


async def test_nothing_is_kept_of_tenants_that_keep_to_the_rate(clock: list[float]) -> None:
    """However many come."""
    bodies = Bodies(10**6, RATE)
    for index in range(100):
        with bodies.of(str(index)) as more:
            more(1000)
            await received(bodies, str(index), 1000)
        clock[0] += 1
    assert len(bodies._rate._paid_at) <= 1
    assert bodies.total() == 0


def test_bodies_of_which_nothing_comes_are_counted() -> None:
    """A tenant could else hold every connection of the router with heads alone. Another tenant's body is received, and
    one more of the same when one has ended."""
    bodies = Bodies(10**6, RATE, most_bodies=3)
    held = [bodies.of("greedy") for _ in range(3)]
    for body in held:
        body.__enter__()
    for _ in range(2):
        with pytest.raises(Busy, match="3 bodies are in progress, and 3 is the limit"), bodies.of("greedy"):
            pass
    with bodies.of("other") as more:
        more(1)
    held[0].__exit__(None, None, None)
    with bodies.of("greedy") as more:
        more(1)
    for body in held[1:]:
        body.__exit__(None, None, None)
    assert not bodies._bodies
    assert not bodies._held


def test_without_keys_one_client_shuts_nobody_out() -> None:
    """All clients are one tenant there: idle connections of one, or a burst of short bodies that wait for a thread,
    would have the bodies of all others refused. Their bytes are bounded."""
    bodies = Bodies(100, RATE, most_bodies=3)
    with ExitStack() as held:
        more = [held.enter_context(bodies.of("")) for _ in range(10)]
        more[-1](60)
        with pytest.raises(Busy, match="60 bytes"):
            more[0](60)
    assert not bodies._bodies
    assert bodies.total() == 0


def test_a_tenant_may_hold_a_quarter_of_the_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the system lets the router open few files."""
    for files, most in ((2**20, 1024), (1024, 128), (6, 1)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        assert Bodies(10**6)._most_bodies == most


async def test_an_answer_that_its_client_does_not_read_counts_as_a_body_of_the_tenant() -> None:
    """Until it has been written: as many connections as one likes hold no more than that. Another tenant's come."""
    bodies, sent = Bodies(1000, 10**9), list[Any]()
    written, read = asyncio.Event(), asyncio.Event()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body"):
            written.set()
            await read.wait()  # as uvicorn does while what it has written before waits for the client
        sent.append(message)

    async def answer(tenant: str) -> None:
        await BoundedAnswer(b"x" * 600, bodies, tenant)({"type": "http"}, None, send)  # type: ignore[arg-type]

    unread = asyncio.create_task(answer("greedy"))
    await asyncio.wait_for(written.wait(), 5)
    assert (sent[0]["status"], sent[1]["body"]) == (200, b"x" * 600)
    assert dict(sent[0]["headers"])[b"content-length"] == b"600"
    with pytest.raises(Busy, match="600 bytes"):
        await asyncio.wait_for(answer("greedy"), 5)
    read.set()
    await answer("other")
    await unread
    assert bodies.total() == 0
    await answer("greedy")


async def test_the_text_of_tokens_counts_until_it_is_read() -> None:
    """It may be many times as long as the body: a token can have 128 characters. So may the tokens of a text."""
    tokenizer = SimpleNamespace(decode=lambda ids: "x" * 600, encode=lambda *_, **__: [5] * 600, at_least=lambda *_: 0)
    models: Any = SimpleNamespace(
        context=8, resolve=lambda name: (SimpleNamespace(context=8, tokenizer=tokenizer),) * 3
    )
    limits: Any = SimpleNamespace(who=lambda _: ApiKey("a"))
    reader, nothing = BodyReader(limits, Offload(1.0), 10**6), cast(Any, None)
    api = Api(nothing, models, reader, nothing)

    def asked(body: bytes) -> Request:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        return Request({"type": "http", "headers": [(b"content-type", b"application/json")]}, receive)

    for answer in await api.detokenize(asked(b'{"tokens": [5]}')), await api.tokenize(asked(b'{"prompt": "x"}')):
        assert isinstance(answer, BoundedAnswer)
        assert len(answer.body) > 600


class Download:
    """Of a file of ten pages of 100 bytes, whose client reads when it is told to."""

    def __init__(self, bodies: Bodies, tenant: str) -> None:
        self.sent: list[Any] = []
        self.began, self.reads = asyncio.Event(), asyncio.Event()
        self._answer = BoundedStream(self._pages(), 100, {"content-length": "1000"}, bodies, tenant)

    async def _pages(self) -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b"x" * 100

    async def run(self) -> None:
        async with asyncio.timeout(5):
            await self._answer({"type": "http"}, self._receive, self._send)

    async def _receive(self) -> Any:
        await asyncio.Event().wait()

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        self.began.set()
        await self.reads.wait()


async def test_the_files_that_a_tenant_reads_keep_to_its_rate(clock: list[float]) -> None:
    """As the bodies that it sends: one that read its file again and again took two thirds of the event loop."""
    bodies = Bodies(10**6, RATE)
    for _ in range(10):
        download = Download(bodies, "greedy")
        download.reads.set()
        await download.run()
        assert b"".join(message.get("body", b"") for message in download.sent) == b"x" * 1000
    assert clock[0] - 100.0 == pytest.approx(10_000 / RATE - BURST_S, abs=4 * BURST_S)


async def test_as_many_files_as_are_read_at_a_time_hold_no_more_than_bodies() -> None:
    """One page each, until it has been read; the next one is refused before anything of it is sent."""
    bodies = Bodies(250, 10**9)
    unread = [Download(bodies, "greedy") for _ in range(2)]
    running = [asyncio.create_task(download.run()) for download in unread]
    for download in unread:
        await asyncio.wait_for(download.began.wait(), 5)
    third, other = Download(bodies, "greedy"), Download(bodies, "other")
    with pytest.raises(Busy, match="200 bytes"):
        await third.run()
    assert not third.sent
    for download in (*unread, other):
        download.reads.set()
    await other.run()
    await asyncio.gather(*running)
    assert bodies.total() == 0
