"""All streams of a decode worker share one message per step, and losing any part of it never gives a wrong token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from time import monotonic
from typing import Any

import grpc
import pytest

import services.decode.stream_mux
import services.router.execution.completion
import services.router.execution.stream_mux
from services.grpc_server import Channels
from services.router.routing import request_scheduler
from tandem.errors import InternalError, InvalidRequest, Unavailable
from tandem.grpc_errors import from_rpc
from tandem.v1 import decode_pb2, decode_pb2_grpc
from tests.support import oracle
from tests.support.faults import slow_down, together

NEW = 64


def dropping(monkeypatch: pytest.MonkeyPatch, which: Callable[[decode_pb2.DecodeResponse], bool]) -> list[Any]:
    """Loses each event for which the condition is true once, on its way into a shared stream. Returns the lost
    events."""
    lost: list[Any] = []
    put = services.decode.stream_mux.StreamMux.put

    def lossy(self: Any, event: decode_pb2.DecodeResponse) -> None:
        if not lost and which(event):
            lost.append(event)
        else:
            put(self, event)

    monkeypatch.setattr(services.decode.stream_mux.StreamMux, "put", lossy)
    return lost


def said(lane: int, position: int, *ids: int) -> decode_pb2.DecodeResponse:
    tokens = decode_pb2.Tokens(position=position, token_ids=ids, preemptions=position)
    tokens.logprobs.chosen.extend(-1.0 * token for token in ids)
    return decode_pb2.DecodeResponse(lane=lane, tokens=tokens)


async def test_a_router_that_is_behind_gets_several_steps_of_a_stream_at_once() -> None:
    """They are merged with the position of the first token, all log probabilities, and the last report; never across a
    gap."""
    feed = services.decode.stream_mux.StreamMux(0.0)
    for position in (10, 11, 12):
        feed.put(said(1, position, position))
        feed.put(said(2, 2 * position, 7))
    ended = decode_pb2.DecodeResponse(lane=1, ended=decode_pb2.Ended())
    feed.put(ended)
    messages = feed.messages()
    one, first, third, fourth, last = (await anext(messages)).events
    assert (one.tokens.position, list(one.tokens.token_ids), one.tokens.preemptions) == (10, [10, 11, 12], 12)
    assert list(one.tokens.logprobs.chosen) == [-10.0, -11.0, -12.0]
    assert [event.tokens.position for event in (first, third, fourth)] == [20, 22, 24]
    assert last == ended
    feed.put(said(2, 25, 8))  # what has been sent stays sent
    assert list((await anext(messages)).events[0].tokens.token_ids) == [8]


async def test_steps_that_follow_one_another_fast_are_told_together() -> None:
    """The first step is sent at once, the others when the interval is over, and the end of any stream at once, together
    with all that is pending. Without an interval each is sent at once."""
    feed = services.decode.stream_mux.StreamMux(1.0)
    messages = feed.messages()
    told_at = monotonic()
    feed.put(said(1, 10, 5))
    assert [event.tokens.position for event in (await anext(messages)).events] == [10]
    telling = asyncio.create_task(anext(messages))
    for position in (11, 12, 13):
        feed.put(said(1, position, 5))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not telling.done()
    (told,) = (await telling).events
    assert (told.tokens.position, len(told.tokens.token_ids)) == (11, 3)
    assert monotonic() - told_at > 0.9
    feed.close()
    with pytest.raises(Unavailable):
        feed.put(said(1, 14, 5))
    feed = services.decode.stream_mux.StreamMux(3600.0)
    messages = feed.messages()
    feed.put(said(1, 10, 5))
    await anext(messages)
    telling = asyncio.create_task(anext(messages))
    feed.put(said(1, 11, 5))
    feed.put(decode_pb2.DecodeResponse(lane=2, ended=decode_pb2.Ended()))
    assert [event.lane for event in (await telling).events] == [1, 2]  # otherwise the test would take an hour
    at_once = services.decode.stream_mux.StreamMux(0.0)
    messages = at_once.messages()
    for position in (10, 11, 12):
        at_once.put(said(1, position, 5))
        assert [event.tokens.position for event in (await anext(messages)).events] == [position]


@pytest.mark.parametrize("interval_s", [-0.1, 1.5, float("nan"), float("inf")])
def test_an_interval_that_nobody_would_want_is_refused(interval_s: float) -> None:
    """A router of this version never sends such an interval."""
    feeds = services.decode.stream_mux.StreamMuxes()
    with pytest.raises(InvalidRequest, match="s between messages"), feeds.opened("one", interval_s):
        pass
    with feeds.opened("one", 1.0):  # the name is free
        pass


@pytest.mark.parametrize("interval_s", [1.0, 0.0])
async def test_a_router_asks_for_its_interval(inside: Any, tiny: Path, interval_s: float) -> None:
    """`stream_interval_s`: 64 tokens, one every 10 ms or more, arrive in few pieces or in many."""
    prompt = oracle.prompts(tiny, [30])[0]
    async with inside(stream_interval_s=interval_s) as cluster:
        slow_down(cluster.workers["decode-0"])
        began = monotonic()
        pieces = [piece async for piece in cluster.client.stream(prompt, max_tokens=NEW, ignore_eos=True)]
        took = monotonic() - began
    assert [token for piece in pieces for token in piece.token_ids] == oracle.greedy(tiny, prompt, NEW)
    told = sum(bool(piece.token_ids) for piece in pieces)
    assert 2 <= told <= 3 + took / interval_s if interval_s else told >= 20


async def test_the_streams_of_a_step_share_a_message(inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With four concurrent streams, a step that moves all of them is one message, and each gets its own tokens."""
    sizes: list[int] = []
    original = services.decode.stream_mux.StreamMux.messages

    async def messages(self: Any) -> AsyncGenerator[decode_pb2.FeedResponse, None]:
        async for message in original(self):
            sizes.append(len({event.lane for event in message.events}))
            yield message

    monkeypatch.setattr(services.decode.stream_mux.StreamMux, "messages", messages)
    prompts = oracle.prompts(tiny, [20, 30, 40, 50])
    async with inside() as cluster:
        together(cluster.workers["decode-0"], 4)
        done = await asyncio.gather(
            *(cluster.client.generate(prompt, max_tokens=64, ignore_eos=True) for prompt in prompts)
        )
        for prompt, one in zip(prompts, done, strict=True):
            assert one.token_ids == oracle.greedy(tiny, prompt, 64)
        assert max(sizes) == 4
        assert len(sizes) < 4 * 64 / 2


async def test_a_token_that_is_lost_on_the_way_stops_the_stream(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next token has an unexpected position: the client gets an error, and only tokens that are right."""
    prompt = oracle.prompts(tiny, [30])[0]
    lost = dropping(monkeypatch, lambda event: event.tokens.position > 32)
    seen: list[int] = []
    async with inside() as cluster:
        slow_down(cluster.workers["decode-0"])  # one event per step: losing all the rest would only cost an attempt
        with pytest.raises(InternalError, match=r"sent position \d+, expected \d+"):
            async for piece in cluster.client.stream(prompt, max_tokens=NEW, ignore_eos=True):
                seen += piece.token_ids
        assert lost
        assert seen == oracle.greedy(tiny, prompt, NEW)[: len(seen)]
        await cluster.freed()


async def test_control_without_the_look_at_positions_the_answer_is_wrong(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: the same loss with the check off gives another answer, with status OK."""
    prompt = oracle.prompts(tiny, [30])[0]
    dropping(monkeypatch, lambda event: event.tokens.position > 32)
    monkeypatch.setattr(request_scheduler, "SUSPECT_S", 0.1)
    monkeypatch.setattr(services.router.execution.completion, "_check_position", lambda *_: None)
    async with inside() as cluster:
        slow_down(cluster.workers["decode-0"])
        done = await cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True)
        assert done.token_ids != oracle.greedy(tiny, prompt, NEW)


async def test_a_feed_that_breaks_is_a_lost_attempt(inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a shared stream with two streams ends, both continue elsewhere with the same tokens, and nothing stays
    held."""
    monkeypatch.setattr(request_scheduler, "SUSPECT_S", 0.1)  # the only worker is used again
    prompts = oracle.prompts(tiny, [30, 40])
    ids: list[list[int]] = [[], []]
    attempts = [0, 0]
    async with inside() as cluster:
        together(cluster.workers["decode-0"], 2)
        quick = slow_down(cluster.workers["decode-0"], 0.03)  # neither is over before the feed breaks
        feeds = cluster.router.models.first.pools.muxes

        async def read(number: int) -> None:
            async for piece in cluster.client.stream(prompts[number], max_tokens=200, ignore_eos=True):
                ids[number] += piece.token_ids
                if all(len(one) > 3 for one in ids) and len(broken) == 0:
                    broken.append(next(iter(feeds._muxes.values())))
                    broken[0]._call.cancel()
                    quick()
                if piece.receipt:
                    attempts[number] = piece.receipt.attempts

        broken: list[Any] = []
        await asyncio.gather(read(0), read(1))
        assert broken[0].over
        assert attempts == [2, 2]
        assert ids == [oracle.greedy(tiny, prompt, 200) for prompt in prompts]
        await cluster.freed()
        assert await cluster.ledgers_balance()


async def test_an_end_that_is_lost_does_not_keep_the_client_waiting(
    inside: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call has ended with OK and the shared stream has no end: after a moment the journal is checked, and the
    answer is complete."""
    prompt = oracle.prompts(tiny, [30])[0]
    monkeypatch.setattr(services.router.execution.stream_mux, "END_WAIT_S", 0.2)
    lost = dropping(monkeypatch, lambda event: event.HasField("ended"))
    async with inside() as cluster:
        async with asyncio.timeout(60):
            done = await cluster.client.generate(prompt, max_tokens=NEW, ignore_eos=True)
        assert lost
        assert done.token_ids == oracle.greedy(tiny, prompt, NEW)
        assert done.finish_reason == "length"


async def test_a_request_that_names_no_open_feed_is_refused_before_anything_is_held(inside: Any, tiny: Path) -> None:
    """Otherwise its tokens could not be delivered. Each shared stream has its own id."""
    async with inside() as cluster:
        channels = Channels()
        stub = decode_pb2_grpc.DecodeServiceStub(channels.to(cluster.workers["decode-0"].address))
        request = decode_pb2.DecodeRequest(
            request_id="r", attempt=1, token_ids=[1, 2], prompt_tokens=2, max_tokens=4, feed_id="nobody's", lane=1
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Decode(request):
                pass
        error = from_rpc(caught.value)
        assert isinstance(error, Unavailable)
        assert error.reason == "FEED_LOST"
        assert not any(cluster.held().values())
        first = stub.Feed(decode_pb2.FeedRequest(feed_id="mine"))
        assert (await first.read()).incarnation == cluster.workers["decode-0"].incarnation
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Feed(decode_pb2.FeedRequest(feed_id="mine")):
                pass
        assert isinstance(from_rpc(caught.value), InvalidRequest)
        first.cancel()
        await channels.close()
