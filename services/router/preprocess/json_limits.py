"""Bounds on a client's JSON, checked on its bytes before Python objects are created.

Objects take up to 50 times the bytes of their text, and json.loads holds the GIL while it creates them. `check`
therefore bounds their number from the text alone, piece by piece, with operations on bytes that take under a
millisecond each. Integers are counted separately: a prompt may have hundreds of thousands of token ids, and no other
part of a request is as large.
"""

from __future__ import annotations

import re

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


def check(body: bytes, most_numbers: int = MAX_NUMBERS, name: str = "body") -> None:
    """Raises InvalidRequest for the field `name` if the JSON has too many parts. The count is right up to the first
    invalid place, and json.loads reads no further."""
    at = numbers = structure = depth = 0
    inside = False  # of a string
    while at < len(body):
        piece_end = _END_OF_PIECE.search(body, at + PIECE_BYTES - 1)
        piece = body[at : piece_end.end() if piece_end else len(body)]
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
            raise out_of_bounds(
                name, "of too many parts", f"at most {MAX_STRUCTURE} characters that are not text or integers"
            )
        if numbers > most_numbers:
            raise out_of_bounds(name, "of too many values", f"at most {most_numbers} values")
        for bracket in other.translate(None, _NO_BRACKET):
            depth += 1 if bracket in b"[{" else -1
            if depth > MAX_DEPTH:
                raise out_of_bounds(name, "nested too deep", f"at most {MAX_DEPTH} levels")


def out_of_bounds(name: str, value: str, bound: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is {value}; it must be {bound}", field=name, bound=bound)
