"""A client's JSON, bounded before it becomes Python objects.

Objects take up to 50 times the bytes of their text, and json.loads holds the interpreter's lock while it makes them, so
no other thread runs meanwhile. `check` therefore bounds their number from the text alone, piece by piece, with
operations on bytes that take under a millisecond each. Integers are counted apart from everything else: a prompt may be
hundreds of thousands of token ids, and no other part of a request is as large.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tandem.errors import InvalidRequest

PIECE_BYTES = 256 * 1024
MAX_NUMBERS = 2**16
# Characters of structure, names and literals outside of strings, and quotes. A message with one part of text has some
# 30 of them, a property of a tool's schema some 15.
MAX_STRUCTURE = 2**16
MAX_DEPTH = 128

_NUMBERS = b"0123456789, \t\r\n"
_NO_BRACKET = bytes(byte for byte in range(256) if byte not in b"[]{}")
_END_OF_PIECE = re.compile(rb"[^\\]")  # not between a backslash and what it escapes


def read(body: bytes, most_numbers: int = MAX_NUMBERS) -> dict[str, Any]:
    """The JSON object that the body is. Raises InvalidRequest, with nothing of the body's content in the message."""
    check(body, most_numbers)
    try:
        found = json.loads(
            body.decode("utf-8"), object_pairs_hook=_object, parse_constant=_constant, parse_int=_integer
        )
    except UnicodeDecodeError as error:
        raise wrong("body", f"not UTF-8 at byte {error.start}", "JSON in UTF-8") from error
    except (ValueError, RecursionError) as error:
        what = error.msg if isinstance(error, json.JSONDecodeError) else "a value is too long or nested too deep"
        raise wrong("body", f"not readable JSON ({what})", "a JSON object") from error
    if not isinstance(found, dict):
        raise wrong("body", f"a JSON {type(found).__name__}", "a JSON object")
    return found


def check(body: bytes, most_numbers: int = MAX_NUMBERS, name: str = "body") -> None:
    """Raises InvalidRequest of the field `name` where JSON has too many parts. What is valid JSON up to some place is
    counted right up to there, and json.loads reads no further."""
    at = numbers = structure = depth = 0
    inside = False  # of a string
    while at < len(body):
        found = _END_OF_PIECE.search(body, at + PIECE_BYTES - 1)
        piece = body[at : found.end() if found else len(body)]
        at += len(piece)
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        quotes = piece.count(b'"')
        if structure + quotes <= MAX_STRUCTURE:
            piece, inside = b"".join(piece.split(b'"')[inside::2]), inside ^ bool(quotes % 2)
        numbers += piece.count(b",")
        other = piece.translate(None, _NUMBERS)
        structure += quotes + len(other)
        if structure > MAX_STRUCTURE:
            raise wrong(name, "of too many parts", f"at most {MAX_STRUCTURE} characters that are no text or integers")
        if numbers > most_numbers:
            raise wrong(name, "of too many values", f"at most {most_numbers} values")
        for bracket in other.translate(None, _NO_BRACKET):
            depth += 1 if bracket in b"[{" else -1
            if depth > MAX_DEPTH:
                raise wrong(name, "nested too deep", f"at most {MAX_DEPTH} levels")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise wrong("body", "an object that has a key twice", "unambiguous")
    return fields


def _integer(digits: str) -> int:
    """A function of Python's, unlike int: json.loads lets other threads run between two calls of it."""
    return int(digits)


def _constant(name: str) -> None:
    raise wrong("body", f"a number {name}", "JSON, which has no such number")


def wrong(name: str, value: str, bound: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is {value}; it must be {bound}", field=name, bound=bound)
