"""Parts of an answer as messages, in Delta and Finished; a message that has only text has no parts."""

from __future__ import annotations

from collections.abc import Iterable

from services.router.answer.parts import CallArguments, CallBegin, Part, Reasoning, Text, joined
from tandem.v1 import generation_pb2

Message = generation_pb2.Delta | generation_pb2.Finished


def put_parts(message: Message, parts: Iterable[Part]) -> None:
    """Replaces the text and the parts of a message."""
    parts = joined(parts)
    message.text = "".join(part.text for part in parts if isinstance(part, Text))
    del message.parts[:]
    if any(not isinstance(part, Text) for part in parts):
        message.parts.extend(map(_to_message, parts))


def parts_of(message: Message) -> list[Part]:
    if message.parts:
        return list(map(_from_message, message.parts))
    return [Text(message.text)] if message.text else []


def _to_message(part: Part) -> generation_pb2.Part:
    match part:
        case Text(text):
            return generation_pb2.Part(text=text)
        case Reasoning(text):
            return generation_pb2.Part(reasoning=text)
        case CallBegin(id, name):
            return generation_pb2.Part(call=generation_pb2.ToolCall(id=id, name=name))
        case CallArguments(text):
            return generation_pb2.Part(arguments=text)


def _from_message(message: generation_pb2.Part) -> Part:
    match message.WhichOneof("part"):
        case "text":
            return Text(message.text)
        case "reasoning":
            return Reasoning(message.reasoning)
        case "call":
            return CallBegin(message.call.id, message.call.name)
    return CallArguments(message.arguments)
