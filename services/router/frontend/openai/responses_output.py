"""The output items of a response, as JSON text: their events while they grow, and their final form."""

from __future__ import annotations

from abc import ABC, abstractmethod

from services.router.answer.parts import CallBegin
from services.router.frontend.json_body import encode
from services.router.frontend.openai.responses_items import sealed
from services.router.frontend.openai.responses_tools import Tool, custom_input

Event = tuple[str, str]  # its type without `response.`, and its own fields as JSON text without braces


class OutputItem(ABC):
    """One item. `json(status)` is the whole item; the events around it have no item id and no index yet."""

    prefix = ""

    def __init__(self, item_id: str) -> None:
        self.id = item_id
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def add(self, text: str) -> None:
        self._pieces.append(text)

    def begun(self) -> list[Event]:
        """The events after the empty item was added."""
        return []

    @abstractmethod
    def grown(self, text: str) -> list[Event]:
        """The events after `add(text)`."""

    @abstractmethod
    def done(self) -> list[Event]:
        """The events before the item is done."""

    @abstractmethod
    def json(self, status: str) -> str: ...


class MessageItem(OutputItem):
    """The text. `scores`: pieces of JSON, the log probabilities of its tokens."""

    prefix = "msg"

    def __init__(self, item_id: str) -> None:
        super().__init__(item_id)
        self._scores: list[str] = []
        self._told = 0  # number of these that an event has sent

    def score(self, scores: list[str]) -> None:
        """The log probabilities of tokens that the next text, or the end, belongs to."""
        self._scores += scores

    def begun(self) -> list[Event]:
        return [("content_part.added", f'"content_index":0,"part":{_output_text("", "")}')]

    def grown(self, text: str) -> list[Event]:
        scores, self._told = ",".join(self._scores[self._told :]), len(self._scores)
        return [("output_text.delta", f'"content_index":0,"delta":{encode(text)},"logprobs":[{scores}]')]

    def done(self) -> list[Event]:
        text, scores = self.text, ",".join(self._scores)
        return [
            ("output_text.done", f'"content_index":0,"text":{encode(text)},"logprobs":[{scores}]'),
            ("content_part.done", f'"content_index":0,"part":{_output_text(text, scores)}'),
        ]

    def json(self, status: str) -> str:
        text = self.text
        content = _output_text(text, ",".join(self._scores)) if self._pieces or status != "in_progress" else ""
        about = encode({"id": self.id, "type": "message", "role": "assistant", "status": status})
        return f'{about[:-1]},"content":[{content}]}}'


class ReasoningItem(OutputItem):
    """With `seals`, it has encrypted_content too."""

    prefix = "rs"

    def __init__(self, item_id: str, *, seals: bool) -> None:
        super().__init__(item_id)
        self._seals = seals

    def begun(self) -> list[Event]:
        return [("content_part.added", f'"content_index":0,"part":{_reasoning_text("")}')]

    def grown(self, text: str) -> list[Event]:
        return [("reasoning_text.delta", f'"content_index":0,"delta":{encode(text)}')]

    def done(self) -> list[Event]:
        text = self.text
        return [
            ("reasoning_text.done", f'"content_index":0,"text":{encode(text)}'),
            ("content_part.done", f'"content_index":0,"part":{_reasoning_text(text)}'),
        ]

    def json(self, status: str) -> str:
        text = self.text
        return encode(
            {
                "id": self.id,
                "type": "reasoning",
                "status": status,
                "summary": [],
                "content": [{"type": "reasoning_text", "text": text}] if text else [],
                "encrypted_content": sealed(text) if self._seals and text else None,
            }
        )


class CallItem(OutputItem):
    """A call of a function."""

    prefix = "fc"

    def __init__(self, item_id: str, call: CallBegin, tool: Tool) -> None:
        super().__init__(item_id)
        self._call = call
        self._tool = tool

    def grown(self, text: str) -> list[Event]:
        return [("function_call_arguments.delta", f'"delta":{encode(text)}')]

    def done(self) -> list[Event]:
        fields = f'"name":{encode(self._tool.name)},"arguments":{encode(self.text)}'
        return [("function_call_arguments.done", fields)]

    def json(self, status: str) -> str:
        return self._json("function_call", status, "arguments", self.text)

    def _json(self, kind: str, status: str, name: str, text: str) -> str:
        about = {"call_id": self._call.id, "name": self._tool.name, name: text}
        if self._tool.namespace is not None:
            about["namespace"] = self._tool.namespace
        return encode({"id": self.id, "type": kind, "status": status, **about})


class CustomCallItem(CallItem):
    """A call of a custom tool. Its input arrives within JSON, so it is passed on when it is complete."""

    prefix = "ctc"

    def grown(self, text: str) -> list[Event]:
        return []

    def done(self) -> list[Event]:
        text = encode(self._input)
        return [("custom_tool_call_input.delta", f'"delta":{text}'), ("custom_tool_call_input.done", f'"input":{text}')]

    def json(self, status: str) -> str:
        return self._json("custom_tool_call", status, "input", self._input)

    @property
    def _input(self) -> str:
        return custom_input(self.text) if self._pieces else ""


def _output_text(text: str, scores: str) -> str:
    return f'{{"type":"output_text","text":{encode(text)},"annotations":[],"logprobs":[{scores}]}}'


def _reasoning_text(text: str) -> str:
    return encode({"type": "reasoning_text", "text": text})
