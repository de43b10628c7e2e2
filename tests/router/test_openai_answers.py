"""Answers as JSON: however much a client asks to be told, other streams are relayed while it is written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from time import thread_time
from typing import Any

import pytest

from services.router.frontend.openai import logprobs_json, openai_answers, openai_protocol
from services.router.preprocess.sampling_defaults import Defaults
from services.router.preprocess.tokenizer import Tokenizer
from tandem.v1 import common_pb2, generation_pb2

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
        began = thread_time()
        await asyncio.sleep(0)
        worst = max(worst, thread_time() - began)
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
