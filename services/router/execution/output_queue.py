"""Events of a request's completions that its client has not received yet."""

from __future__ import annotations

import asyncio
from collections import deque

from services.router.answer.part_messages import parts_of, put_parts
from tandem.errors import Cancelled
from tandem.v1 import generation_pb2

MAX_MERGED_TOKENS = 512  # with all their log probabilities they are a message of 1 MB at most


class OutputQueue:
    """Bounded by the max_tokens of the completions."""

    def __init__(self) -> None:
        self._events: deque[generation_pb2.GenerateResponse] = deque()
        self._wake = asyncio.Event()
        self._error: BaseException | None = None

    def put(self, event: generation_pb2.GenerateResponse) -> None:
        self._events.append(event)
        self._wake.set()

    def over(self, task: asyncio.Task[None]) -> None:
        """The task of a completion has ended. Its error, if any, is raised after all queued events."""
        self._error = self._error or (Cancelled("a completion was ended") if task.cancelled() else task.exception())
        if self._error:
            self._wake.set()

    async def take(self) -> generation_pb2.GenerateResponse:
        """The next event. Consecutive deltas of one completion are merged when the client is slow."""
        while not self._events:
            if self._error:
                raise self._error
            self._wake.clear()
            await self._wake.wait()
        return next_merged(self._events)


def next_merged(events: deque[generation_pb2.GenerateResponse]) -> generation_pb2.GenerateResponse:
    """Takes the first event, with the deltas of the same completion that follow it, up to MAX_MERGED_TOKENS."""
    event = events.popleft()
    if event.HasField("delta"):
        later, tokens = [], len(event.delta.token_ids)
        while events and _follows(events[0], event.delta, tokens):
            later.append(events.popleft().delta)
            tokens += len(later[-1].token_ids)
        if later:
            _merge(event.delta, later)
    return event


def _follows(event: generation_pb2.GenerateResponse, before: generation_pb2.Delta, tokens: int) -> bool:
    """Whether the event can be merged: log probabilities of text are not mixed with those of reasoning, calls and
    markers."""
    delta = event.delta
    same = event.HasField("delta") and delta.choice == before.choice
    kinds = not delta.HasField("logprobs") or _kind(delta) == _kind(before)
    return same and kinds and tokens + len(delta.token_ids) <= MAX_MERGED_TOKENS


def _kind(delta: generation_pb2.Delta) -> int:
    """2: other parts than text; 1: text; 0: nothing, as of markers."""
    return 2 if delta.parts else int(bool(delta.text))


def _merge(delta: generation_pb2.Delta, later: list[generation_pb2.Delta]) -> None:
    """Merges all at once; one by one, an answer of many parts would be joined once per delta."""
    index, parts = delta.index, [part for one in (delta, *later) for part in parts_of(one)]
    for one in later:
        delta.MergeFrom(one)  # appends lists; other fields take the later value
    delta.index = index
    put_parts(delta, parts)
