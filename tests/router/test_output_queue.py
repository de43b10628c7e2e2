"""The outbox of a request: what its completions said, to a client that may be behind."""

from __future__ import annotations

import asyncio

import pytest

from services.router.answer.part_messages import parts_of, put_parts
from services.router.answer.parts import CallArguments, CallBegin, Part, Reasoning, Text, joined
from services.router.execution import output_queue
from services.router.execution.output_queue import OutputQueue
from tandem.errors import WorkerLost
from tandem.v1 import common_pb2, generation_pb2


def said(index: int, *ids: int, choice: int = 0, last: bool = False) -> generation_pb2.GenerateResponse:
    delta = generation_pb2.Delta(
        index=index,
        token_ids=ids,
        text="".join(f"<{token}>" for token in ids),
        logprobs=common_pb2.Logprobs(chosen=[-1.0 * token for token in ids]),
        choice=choice,
        last=last,
    )
    return generation_pb2.GenerateResponse(delta=delta)


FINISHED = generation_pb2.GenerateResponse(finished=generation_pb2.Finished(reason=common_pb2.FINISH_REASON_LENGTH))


async def test_a_client_that_is_behind_gets_several_steps_at_once() -> None:
    """Each token once, with its text and its log probability, and what was said last."""
    outbox = OutputQueue()
    for index in range(4):
        outbox.put(said(index, 10 + index, last=index == 3))
    outbox.put(FINISHED)
    delta = (await outbox.take()).delta
    assert (delta.index, list(delta.token_ids), delta.text) == (0, [10, 11, 12, 13], "<10><11><12><13>")
    assert list(delta.logprobs.chosen) == [-10.0, -11.0, -12.0, -13.0]
    assert delta.last
    assert await outbox.take() == FINISHED


async def test_what_belongs_to_several_completions_is_not_joined() -> None:
    """Each delta is of one."""
    outbox = OutputQueue()
    outbox.put(said(0, 1))
    outbox.put(said(0, 2, choice=1))
    outbox.put(said(1, 3, choice=1))
    assert list((await outbox.take()).delta.token_ids) == [1]
    delta = (await outbox.take()).delta
    assert (delta.choice, delta.index, list(delta.token_ids)) == (1, 0, [2, 3])


async def test_what_ends_a_completion_is_told_after_what_it_had_said() -> None:
    """And at once, while another one still works."""
    outbox = OutputQueue()

    async def broken() -> None:
        outbox.put(said(0, 1))
        raise WorkerLost("gone")

    async def endless() -> None:
        await asyncio.Event().wait()

    for work in (broken(), endless()):
        task = asyncio.create_task(work)
        task.add_done_callback(outbox.over)
    waiting = asyncio.create_task(outbox.take())
    assert list((await waiting).delta.token_ids) == [1]
    with pytest.raises(WorkerLost, match="gone"):
        await outbox.take()
    task.cancel()


async def test_the_parts_of_an_answer_are_joined_once_however_far_behind_its_client_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In their order. The work grows with the deltas and not with their square: an answer that alternates between
    calls and text kept the event loop for half a second."""
    looked_at = []

    def counted(message: generation_pb2.Delta) -> list[Part]:
        looked_at.append(len(parts_of(message)))
        return parts_of(message)

    monkeypatch.setattr(output_queue, "parts_of", counted)
    outbox, expected = OutputQueue(), list[Part]()
    for index in range(300):
        parts = [Text("a"), CallBegin(f"id{index}", "f"), CallArguments("{}"), Reasoning("b")]
        event = said(index, index)
        put_parts(event.delta, parts)
        outbox.put(event)
        expected += parts
    delta = (await outbox.take()).delta
    assert parts_of(delta) == joined(expected)
    assert (delta.index, len(delta.token_ids), delta.text) == (0, 300, "a" * 300)
    assert sum(looked_at) == 4 * 300
