"""Builds a GenerateRequest from keyword options; refuses values that protobuf cannot represent."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, Unpack

from google.protobuf.descriptor import FieldDescriptor

from tandem.errors import InvalidRequest, TooLarge
from tandem.rpc.channel import MAX_MESSAGE_BYTES
from tandem.sampling import SamplingOptions
from tandem.v1 import generation_pb2, sampling_pb2

M = TypeVar("M")  # a message

Prompt = str | bytes | Iterable[int]


LONGEST_S = 1e9
"""A deadline further away is this one, some 30 years."""


class Options(SamplingOptions, total=False):
    """The options of `generate` and `stream`. Absent or None: the server's default."""

    messages: Sequence[Mapping[str, Any]] | None
    """A chat instead of a prompt, each {"role": ..., "content": ...}, rendered with the model's chat template. Of an
    assistant also "reasoning" and "tool_calls", of a tool "tool_call_id" and "name"."""
    tools: Sequence[Mapping[str, Any]] | None
    """Which the model may call, as in OpenAI's API. This and the next six options need `messages`."""
    tool_choice: str | Mapping[str, str] | None
    """"required": the answer is calls, and nothing else; {"name": NAME}: one call of that tool. Absent: as the model
    likes."""
    parallel_tool_calls: bool | None
    """False: one call at most."""
    template_variables: Mapping[str, Any] | None
    """For the chat template, for example {"enable_thinking": False} or {"reasoning_effort": "low"}."""
    continue_last_message: bool | None
    """The last message is an assistant's, and the answer goes on where it ends."""
    without_generation_prompt: bool | None
    """No generation prompt after the last message."""
    chat_template: str | bytes | None
    """Another chat template than the model's, if the server permits it, or the name of another one that it has."""
    suffix: str | bytes | None
    """The completion fills the gap between the prompt and this text, if the model's tokenizer has tokens for that."""
    add_special_tokens: bool | None
    """Whether the prompt gets the special tokens that the tokenizer puts around a text. Absent: a text does, and a chat
    has those of its template."""
    model: str | None
    """One of the models that the cluster serves; required where it serves several. `model_info` lists them."""
    adapter: str | None
    """The name of an adapter; absent: the base model. `model_info` lists them."""
    cache_salt: str | bytes | None
    """Requests with different salts never share cached KV."""
    priority: int | None
    """-1000 to 1000; the smaller, the sooner it is placed when requests wait. Absent: 0."""
    ttft_slo: float | None
    """Seconds. Busy as soon as the first token is expected later than this."""
    request_id: str | None
    """To find the request again in logs; made up by the router when absent."""


# Fields of the messages, where an option has another name.
FIELDS = {
    "ttft_slo": "ttft_slo_seconds",
    "chat_template": "template",
    "parallel_tool_calls": "parallel_calls",
}
KINDS = {
    FieldDescriptor.TYPE_DOUBLE: "a number",
    FieldDescriptor.TYPE_INT64: "an integer of 64 bits",
    FieldDescriptor.TYPE_UINT32: "an integer of 32 bits, 0 or more",
    FieldDescriptor.TYPE_UINT64: "an integer from 0 to 2^64-1",
    FieldDescriptor.TYPE_BOOL: "true or false",
    FieldDescriptor.TYPE_STRING: "Unicode text",
}


def build_request(
    prompt: Prompt | None, *, n: int | None = None, **options: Unpack[Options]
) -> generation_pb2.GenerateRequest:
    """The message for these options. Raises InvalidRequest or TooLarge for values that no message can hold."""
    request = generation_pb2.GenerateRequest()
    fields: dict[str, Any] = {**options, "n": n}
    _set_input(request, prompt, fields.pop("messages", None))
    for name, value in fields.items():
        if name not in Options.__annotations__ and name != "n":
            raise TypeError(f"build_request() got an unexpected keyword argument {name!r}")
        if value is not None:
            SETTERS.get(name, _set)(_owner(request, name), FIELDS.get(name, name), value)
    if request.chat.HasField("tool_choice") and request.chat.HasField("parallel_calls"):
        request.chat.tool_choice.several &= request.chat.parallel_calls
    if (size := request.ByteSize()) > MAX_MESSAGE_BYTES:
        bound = f"at most {MAX_MESSAGE_BYTES} bytes"
        raise TooLarge(f"the request has {size} bytes; {bound} can be sent", field="prompt", bound=bound)
    return request


def build_requests(
    prompts: Iterable[Prompt], *, n: int | None, **options: Unpack[Options]
) -> list[generation_pb2.GenerateRequest]:
    """One for each prompt, all with these options."""
    if isinstance(prompts, str | bytes):  # whose characters are not the prompts
        raise _unencodable("prompts", prompts, "a list of prompts")
    return [build_request(prompt, n=n, **options) for prompt in prompts]


def _owner(request: generation_pb2.GenerateRequest, name: str) -> Any:
    """The message that has the option's field."""
    if name in OF_CHATS:
        if not request.HasField("chat"):  # setting it would replace the prompt
            raise InvalidRequest(f"{name} belongs to a chat", field=name, bound="absent, or with messages")
        return request.chat
    return request.sampling if name in request.sampling.DESCRIPTOR.fields_by_name else request


def _set_input(request: generation_pb2.GenerateRequest, prompt: Prompt | None, messages: Any) -> None:
    if (prompt is None) == (messages is None):
        raise InvalidRequest("give either a prompt or messages", field="prompt", bound="exactly one of the two")
    if messages is not None:
        request.chat.SetInParent()
        for place, message in enumerate(messages):
            _add_message(f"chat.messages[{place}]", message, request.chat)
    elif isinstance(prompt, str | bytes):
        _set_bytes(request, "text", prompt)
    else:
        request.token_ids.SetInParent()
        _add_ids("token_ids", prompt, request.token_ids.ids)


def _unencodable(field: str, value: object, bound: str) -> InvalidRequest:
    return InvalidRequest(f"{field} must be {bound}, not {reprlib.repr(value)}", field=field, bound=bound)


def _set(message: Any, field: str, value: object) -> None:
    """Protobuf raises for another type, a number out of range, bad Unicode."""
    try:
        setattr(message, field, value)
    except (TypeError, ValueError) as error:
        kind = KINDS[message.DESCRIPTOR.fields_by_name[field].type]
        raise _unencodable(field, value, f"{kind} of seconds" if field.endswith("_seconds") else kind) from error


def _filled(message: M, **fields: object) -> M:
    """The message, with these fields set."""
    for field, value in fields.items():
        _set(message, field, value)
    return message


def _set_bytes(message: Any, field: str, text: str | bytes) -> None:
    setattr(message, field, _bytes(field, text))


def _bytes(field: str, text: str | bytes) -> bytes:
    try:
        return text if isinstance(text, bytes) else text.encode()
    except (AttributeError, UnicodeEncodeError) as error:
        raise _unencodable(field, text, "bytes or Unicode text") from error


def _texts(field: str, texts: Any, bound: str = "a list of strings") -> list[bytes]:
    if isinstance(texts, str | bytes):  # whose characters are not the texts
        raise _unencodable(field, texts, bound)
    try:
        return [_bytes(field, text) for text in texts]
    except TypeError as error:
        raise _unencodable(field, texts, bound) from error


def _set_ids(message: Any, field: str, ids: Any) -> None:
    _add_ids(field, ids, getattr(message, field))


def _add_ids(field: str, ids: Any, into: Any) -> None:
    try:
        values = list(ids)
        into.extend(values)
    except (TypeError, ValueError) as error:
        raise _unencodable(field, ids, "a list of integers of 64 bits") from error


def _add_bad_words(sampling: sampling_pb2.SamplingParams, field: str, words: Any) -> None:
    sampling.bad_words.extend(_texts(field, words))


def _add_bias(sampling: sampling_pb2.SamplingParams, field: str, bias: Any) -> None:
    try:
        sampling.logit_bias.update(bias)
    except (TypeError, ValueError) as error:
        raise _unencodable(field, bias, "a mapping of token ids to numbers") from error


def _add_stops(sampling: sampling_pb2.SamplingParams, field: str, stop: Any) -> None:
    texts = [stop] if isinstance(stop, str | bytes) else stop
    sampling.stop.extend(_texts(field, texts, "a string or a list of strings"))


def _add_grammar(sampling: sampling_pb2.SamplingParams, field: str, grammar: Any) -> None:
    into = sampling.grammar
    kinds = "exactly one of json_schema, json, regex, ebnf and choice"
    if (
        not isinstance(grammar, Mapping)
        or len(grammar) != 1
        or not {*grammar} <= {"json_schema", "json", "regex", "ebnf", "choice"}
    ):
        raise _unencodable(field, grammar, kinds)
    [(kind, value)] = grammar.items()
    if kind == "json":
        _set(into, kind, value)
    elif kind == "choice":
        into.choice.texts.extend(_texts("grammar.choice", value))
    else:
        if kind == "json_schema" and not isinstance(value, str | bytes):
            try:
                value = json.dumps(value)
            except (TypeError, ValueError) as error:
                raise _unencodable("grammar.json_schema", value, "a JSON schema") from error
        setattr(into, kind, _bytes(f"grammar.{kind}", value))


def _add_message(field: str, message: Mapping[str, Any], chat: generation_pb2.Chat) -> None:
    try:
        role, calls = message["role"], message.get("tool_calls")
        content = (message.get("content") or "") if calls else message["content"]
    except (KeyError, TypeError, AttributeError) as error:
        raise _unencodable(field, message, "an object with role and content") from error
    into = chat.messages.add(content=_bytes(f"{field}.content", content))
    _set(into, "role", role)
    for name in ("tool_call_id", "name"):
        if message.get(name) is not None:
            _set(into, name, message[name])
    if message.get("reasoning") is not None:
        into.reasoning = _bytes(f"{field}.reasoning", message["reasoning"])
    if calls:
        into.tool_calls = _json(f"{field}.tool_calls", calls)


def _json(field: str, value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise _unencodable(field, value, "what JSON can hold") from error


def _set_json(message: Any, field: str, value: Any) -> None:
    if value:  # without entries it is absent
        setattr(message, field, _json(field, value))


def _set_tool_choice(message: Any, field: str, value: Any) -> None:
    if value == "required":
        message.tool_choice.several = True
    elif isinstance(value, Mapping) and isinstance(value.get("name"), str):
        _set(message.tool_choice, "name", value["name"])
    else:
        raise _unencodable(field, value, '"required" or {"name": NAME}')


SETTERS: dict[str, Callable[[Any, str, Any], None]] = {
    "stop_token_ids": _set_ids,
    "logit_bias": _add_bias,
    "grammar": _add_grammar,
    "stop": _add_stops,
    "allowed_token_ids": _set_ids,
    "bad_words": _add_bad_words,
    "cache_salt": _set_bytes,
    "tools": _set_json,
    "tool_choice": _set_tool_choice,
    "template_variables": _set_json,
    "chat_template": _set_bytes,
    "suffix": _set_bytes,
}
OF_CHATS = (
    *("tools", "parallel_tool_calls", "tool_choice"),
    *("template_variables", "continue_last_message", "without_generation_prompt", "chat_template"),
)


def _seconds(timeout: float | None) -> float | None:
    """A deadline that gRPC can keep: it would take 0 for "none" and overflow into the past at some 1e12."""
    if timeout is None:
        return None
    if not isinstance(timeout, int | float) or math.isnan(timeout) or timeout <= 0:
        raise _unencodable("timeout", timeout, "more than 0 seconds")
    return min(float(timeout), LONGEST_S)
