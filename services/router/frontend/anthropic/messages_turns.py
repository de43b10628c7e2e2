"""The conversation in a body of Anthropic's Messages API, as messages for a chat template.

    `system`, and system messages before the first turn    system
    user       tool_result                                 tool, one message for each
               text                                        user, after the tools' answers
    assistant  thinking, text, tool_use                    assistant with reasoning, content, tool_calls
    a system message after the first turn                  in the user's turn, within <system-reminder> tags

Adjacent messages of one side are one turn, as in Anthropic's API and as strict templates require. A later system
message stays in its place as text: most templates refuse or drop it there, and at the front it would change the
beginning of the prompt, so that no KV could be reused. Claude Code marks such text with the same tags.
"""

from __future__ import annotations

from typing import Any

from services.router.frontend.json_body import encode, text_of
from services.router.frontend.openai.openai_sampling import to_bytes
from services.router.preprocess.json_limits import out_of_bounds
from tandem.errors import InvalidRequest
from tandem.v1 import generation_pb2

BILLING = "x-anthropic-billing-header:"  # Claude Code's first line of `system`; it differs in every request
TEXT_ONLY = "this server's models read text only"
CONTENT = "a string, or a list of blocks"


class Turns:
    """Collects the messages in their order."""

    def __init__(self) -> None:
        self._system: list[str] = []
        self._messages: list[generation_pb2.ChatMessage] = []
        self._user: list[str] | None = None  # the texts of the user's turn, if it is open
        self._answered = False  # the open user's turn has a tool's answer
        self._assistant: _Assistant | None = None
        self._tools: dict[str, str] = {}  # names of the tools that were called, by the id of the call

    def system(self, content: Any, where: str) -> None:
        texts = list(filter(None, map(_without_billing, _texts(content, where))))
        if not self._messages and self._user is None and self._assistant is None:
            self._system += texts
        elif texts:
            self._open_user().append(f"<system-reminder>\n{_joined(texts)}\n</system-reminder>")

    def user(self, content: Any, where: str) -> None:
        """Raises InvalidRequest for a block that is not text or a tool's answer."""
        said = self._open_user()
        for block, place in _blocks(content, where):
            match block.get("type"):
                case "text":
                    said.append(text_of(block, "text", place))
                case "tool_result":
                    self._answered = True
                    self._messages.append(self._tool_result(block, place))
                case kind:
                    raise _not_served(kind, place, "text and tool_result")

    def assistant(self, content: Any, where: str) -> None:
        """Raises InvalidRequest for a block of an unknown type. Redacted thinking is ignored: only Anthropic can read
        it."""
        self._close_user()
        if self._assistant is None:
            self._assistant = _Assistant()
        turn = self._assistant
        for block, place in _blocks(content, where):
            match block.get("type"):
                case "text":
                    turn.content.append(text_of(block, "text", place))
                case "thinking":
                    turn.reasoning.append(text_of(block, "thinking", place))
                case "tool_use":
                    turn.calls.append(call := _call(block, place))
                    self._tools[call["id"]] = call["function"]["name"]
                case "redacted_thinking":
                    pass
                case kind:
                    raise _not_served(kind, place, "text, thinking, redacted_thinking and tool_use")

    def finish(self) -> tuple[list[generation_pb2.ChatMessage], bool]:
        """All messages, and whether the last one is an assistant's, which the answer continues. Raises InvalidRequest
        if that one calls a tool."""
        prefilled = self._assistant is not None
        if self._assistant is not None and self._assistant.calls:
            raise out_of_bounds("messages", "ended by a tool_use", "continued by its tool_result")
        self._close_assistant()
        self._close_user()
        system = [_message("system", _joined(self._system))] if self._system else []
        return [*system, *self._messages], prefilled

    def _tool_result(self, block: dict[str, Any], where: str) -> generation_pb2.ChatMessage:
        call = text_of(block, "tool_use_id", where)
        text = _joined(_result_texts(block.get("content"), f"{where}.content"))
        message = _message("tool", f"Error: {text}" if block.get("is_error") is True else text)
        message.tool_call_id, message.name = call, self._tools.get(call, "")
        return message

    def _open_user(self) -> list[str]:
        self._close_assistant()
        if self._user is None:
            self._user = []
        return self._user

    def _close_user(self) -> None:
        if self._user is not None and (self._user or not self._answered):
            self._messages.append(_message("user", _joined(self._user)))
        self._user, self._answered = None, False

    def _close_assistant(self) -> None:
        if self._assistant is not None:
            self._messages.append(self._assistant.message())
            self._assistant = None


class _Assistant:
    """An assistant's turn. Its pieces are joined unchanged, so that the template renders the generated tokens, whose KV
    may be cached."""

    def __init__(self) -> None:
        self.content, self.reasoning = list[str](), list[str]()
        self.calls: list[dict[str, Any]] = []

    def message(self) -> generation_pb2.ChatMessage:
        message = _message("assistant", "".join(self.content))
        message.reasoning = "".join(self.reasoning).encode()
        if self.calls:
            message.tool_calls = to_bytes(encode(self.calls))
        return message


def referenced_tools(messages: list[Any]) -> set[str]:
    """The names in all tool_reference blocks, with which a client's tool search announces deferred tools."""
    names = set()
    for message in messages:
        for block in message.content if isinstance(message.content, list) else ():
            content = block.get("content") if isinstance(block, dict) else None
            for inner in content if isinstance(content, list) else ():
                if isinstance(inner, dict) and inner.get("type") == "tool_reference":
                    names.add(str(inner.get("tool_name")))
    return names


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(arguments := block.get("input"), dict):
        raise out_of_bounds(f"{where}.input", f"a {type(arguments).__name__}", "an object")
    function = {"name": text_of(block, "name", where), "arguments": arguments}
    return {"id": text_of(block, "id", where), "type": "function", "function": function}


def _result_texts(content: Any, where: str) -> list[str]:
    """The texts of a tool's answer. A block that is not text is replaced by a sentence to the model, because the client
    cannot remove it, and refusal would end its conversation."""
    texts = []
    for block, place in _blocks([] if content is None else content, where):
        match block.get("type"):
            case "text":
                texts.append(text_of(block, "text", place))
            case "tool_reference":
                texts.append(f"The tool {text_of(block, 'tool_name', place)} is available now.")
            case kind:
                texts.append(f"[left out: a block of type {str(kind)[:40]!a}; {TEXT_ONLY}]")
    return texts


def _texts(content: Any, where: str) -> list[str]:
    texts = []
    for block, place in _blocks(content, where):
        if (kind := block.get("type")) != "text":
            raise _not_served(kind, place, "text")
        texts.append(text_of(block, "text", place))
    return texts


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING) else text


def _blocks(content: Any, where: str) -> list[tuple[dict[str, Any], str]]:
    """Each block with its position. A string is one block of text."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, where)]
    if not isinstance(content, list):
        raise out_of_bounds(where, f"a {type(content).__name__}", CONTENT)
    places = [(block, f"{where}.{index}") for index, block in enumerate(content)]
    for block, place in places:
        if not isinstance(block, dict):
            raise out_of_bounds(place, f"a {type(block).__name__}", "a block")
    return places


def _not_served(kind: Any, where: str, served: str) -> InvalidRequest:
    shown = kind[:40] if isinstance(kind, str) else type(kind).__name__
    why = f"; {TEXT_ONLY}" if shown in ("image", "document") else ""
    return InvalidRequest(
        f"{where} is a block of type {shown!a}, which is not served here{why}. Served here: {served}",
        field=f"{where}.type",
        bound=served,
    )


def _message(role: str, text: str) -> generation_pb2.ChatMessage:
    return generation_pb2.ChatMessage(role=role, content=text.encode())


def _joined(texts: list[str]) -> str:
    return "\n".join(texts)
