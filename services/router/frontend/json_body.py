"""JSON in the bodies of HTTP requests and answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isinf
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from services.router.preprocess import json_limits
from services.router.preprocess.json_limits import MAX_NUMBERS, out_of_bounds
from tandem.errors import InvalidRequest

Kind = TypeVar("Kind", bound=BaseModel)
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512  # entries, and characters of each; OpenAI's bounds
NotServed = dict[str, tuple[object, ...]]  # fields that are not supported, each with the values that have no effect


def read(body: bytes, most_numbers: int = MAX_NUMBERS) -> dict[str, Any]:
    """Parses the body, a JSON object. Raises InvalidRequest; the message contains none of the body's content."""
    json_limits.check(body, most_numbers)
    try:
        value = json.loads(
            body.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_constant,
            parse_int=_integer,
            parse_float=_float,
        )
    except UnicodeDecodeError as error:
        raise out_of_bounds("body", f"not UTF-8 at byte {error.start}", "JSON in UTF-8") from error
    except (ValueError, RecursionError) as error:
        problem = error.msg if isinstance(error, json.JSONDecodeError) else "a value is too long or nested too deep"
        raise out_of_bounds("body", f"not readable JSON ({problem})", "a JSON object") from error
    if not isinstance(value, dict):
        raise out_of_bounds("body", f"a JSON {type(value).__name__}", "a JSON object")
    return value


def validated(fields: dict[str, Any], kind: type[Kind]) -> Kind:
    """Raises InvalidRequest for the first error; the message contains none of the body's content."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(f"{name}: {first['msg']}", field=name, bound=first["msg"]) from error


def check_served(fields: dict[str, Any], not_served: NotServed, by: str = "") -> None:
    """Refuses unsupported fields."""
    for name, harmless in not_served.items():
        if (value := fields.get(name)) is not None and value not in harmless:
            bound = " or ".join(["absent", *map(encode, harmless)])
            raise InvalidRequest(f"this value of {name} is not served{by}; it must be {bound}", field=name, bound=bound)


def check_lengths(fields: dict[str, Any], most_items: Mapping[str, int]) -> None:
    """Refuses lists that are too long before their items are parsed."""
    for name, most in most_items.items():
        if isinstance(value := fields.get(name), list | dict) and len(value) > most:
            raise out_of_bounds(name, f"{len(value)} long", f"at most {most}")


def check_metadata(metadata: dict[str, str]) -> None:
    """Raises InvalidRequest."""
    if len(metadata) > MAX_METADATA:
        raise out_of_bounds("metadata", f"{len(metadata)} entries", f"at most {MAX_METADATA}")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            bound = f"keys of at most {MAX_METADATA_KEY} characters and values of at most {MAX_METADATA_VALUE}"
            raise out_of_bounds("metadata", "too long in one entry", bound)
        clean(key + value, "metadata")


def clean(text: str, where: str) -> str:
    """The text for a string field of the proto. Raises InvalidRequest for lone surrogates, which JSON permits."""
    if not is_utf8(text):
        raise out_of_bounds(where, "not valid Unicode", "valid Unicode")
    return text


def text_of(fields: Mapping[str, Any], name: str, where: str) -> str:
    """The string `name` of the JSON object at `where`. Raises InvalidRequest, also for lone surrogates."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise out_of_bounds(f"{where}.{name}", "absent or not a string", "a string")
    return clean(value, f"{where}.{name}")


def is_utf8(text: str) -> bool:
    """Whether the text has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise out_of_bounds("body", "an object that has a key twice", "unambiguous")
    return fields


def _integer(digits: str) -> int:
    """A Python function instead of int, because json.loads lets other threads run between two calls."""
    return int(digits)


def _float(digits: str) -> float:
    """Refuses infinite values, because a response repeats its request and JSON has no infinity."""
    value = float(digits)
    if isinf(value):
        raise out_of_bounds("body", "a number that is too large", "of numbers that a double holds")
    return value


def _constant(name: str) -> None:
    raise out_of_bounds("body", f"a number {name}", "JSON, which has no such number")


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
# Characters that JSON permits in strings and Python's str.splitlines takes for line ends. Clients read streams and the
# files of batches with it, httpx's iter_lines for one, and would find half an object in each line.
_LINE_ENDS = {character: f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}


def encode(value: object) -> str:
    """JSON without any character that a client may take for the end of a line."""
    text = _encode(value)
    if not text.isascii():
        for character, escape in _LINE_ENDS.items():
            if character in text:
                text = text.replace(character, escape)
    return text


def to_json(value: object) -> bytes:
    return encode(value).encode()


# Blank lines are no event (WHATWG HTML, 9.2.6). A comment is none either, but `vllm bench serve` strips what arrives
# alone, joins a comment to the event after it, and counts the whole stream as failed.
SSE_BLANK = b"\n\n"


def to_sse(value: object) -> bytes:
    return f"data: {encode(value)}\n\n".encode()
