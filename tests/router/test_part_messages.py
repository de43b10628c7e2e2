"""Parts of an answer survive the way through messages, also when messages are merged."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.answer.part_messages import parts_of, put_parts
from services.router.answer.parts import CallArguments, CallBegin, Part, Reasoning, Text, joined
from services.router.execution.output_queue import next_merged
from tandem.v1 import generation_pb2

CALL = CallBegin("call_1", "height")
PIECES = st.text("ab ", min_size=1, max_size=3)
PARTS = st.one_of(
    PIECES.map(Text), PIECES.map(Reasoning), PIECES.map(CallArguments), st.just(CALL), st.just(CallBegin("2", "f"))
)
MESSAGES = st.lists(st.lists(PARTS, max_size=5), min_size=1, max_size=6)


def delta(parts: list[Part], index: int) -> generation_pb2.GenerateResponse:
    event = generation_pb2.GenerateResponse()
    put_parts(event.delta, parts)
    event.delta.index, event.delta.token_ids[:] = index, [index]
    return event


@given(MESSAGES)
def test_merged_messages_have_the_parts_of_all_in_their_order(messages: list[list[Part]]) -> None:
    """And the text is that of the text parts, whether a message has other parts or not."""
    events = deque(delta(parts, index) for index, parts in enumerate(messages))
    merged = next_merged(events).delta
    everything = joined(part for parts in messages for part in parts)
    assert parts_of(merged) == everything
    assert merged.text == "".join(part.text for part in everything if isinstance(part, Text))
    assert list(merged.token_ids) == list(range(len(messages)))
    assert not events


def test_log_probabilities_of_text_are_not_merged_with_others() -> None:
    """It would be unknown which tokens are text. Without log probabilities they are one message."""
    pieces: list[list[Part]] = [[Text("a")], [], [CALL], [CallArguments("{")], [Text("b")]]
    for scored, expected in ((True, [[0], [1], [2, 3], [4]]), (False, [[0, 1, 2, 3, 4]])):
        events = deque(delta(parts, index) for index, parts in enumerate(pieces))
        for event in events:
            event.delta.logprobs.chosen.extend([-1.0] * scored)
            if not scored:
                event.delta.ClearField("logprobs")
        merged = []
        while events:
            merged.append(list(next_merged(events).delta.token_ids))
        assert merged == expected


@pytest.mark.parametrize("message", [generation_pb2.Delta(), generation_pb2.Finished()])
def test_a_message_with_nothing_but_text_has_no_parts(message: generation_pb2.Delta | generation_pb2.Finished) -> None:
    """Most tokens are text; a client that knows no parts reads them as before."""
    put_parts(message, [Text("a"), Text(""), Text("b")])
    assert (message.text, len(message.parts)) == ("ab", 0)
    assert parts_of(message) == [Text("ab")]
    put_parts(message, [Reasoning("hm"), Text("a"), CALL, CallArguments("{"), CallArguments("}")])
    assert (message.text, len(message.parts)) == ("a", 4)
    assert parts_of(message) == [Reasoning("hm"), Text("a"), CALL, CallArguments("{}")]
    put_parts(message, [])
    assert (message.text, len(message.parts)) == ("", 0)
