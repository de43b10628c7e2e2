"""Converts Python literals to JSON, piece by piece. Words that are not literals become strings.

f(a='x', b=[1, None], c={"d": True})  ─▶  "x"  [1, null]  {"d": true}
"""

from __future__ import annotations

import json
import math
import re
from itertools import islice

from services.router.answer.call_formats.scanner import Emit, Scanner, Steps

MAX_DEPTH = 64
MAX_WORD = 4096  # characters of a number or another word without quotes
# Bounds a literal that is converted at once, which blocks other work for some 10 ms. Counts characters that may
# separate parts.
MAX_PARTS = 2048
WORD = re.compile(r"[\w.+-]+")
_BETWEEN = re.compile(r"""[,:\\'"\[({]""")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_PLAIN = {quote: re.compile(rf"[^\\{quote}]+") for quote in "'\""}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_ESCAPES |= {character: character for character in "\\'\""}
_HEX = {"x": 2, "u": 4, "U": 8}
_PAIRS = {"[": "]", "(": "]", "{": "}"}
_CLOSERS = {"]": "]", ")": "]", "}": "}"}


def json_of_python(text: str) -> str:
    """The JSON of a complete literal; invalid JSON if the text is not a literal, or too long."""
    if next(islice(_BETWEEN.finditer(text), MAX_PARTS, None), None):
        return ""
    scanner, pieces = Scanner(), list[str]()
    scanner.feed(text)
    scanner.ended = True
    for _ in read_value(scanner, pieces.append):
        pass
    return "" if scanner.rest() else "".join(pieces)


def read_value(scanner: Scanner, emit: Emit) -> Steps[bool]:
    """Reads one value, up to a comma or a bracket outside of it, and passes it on as JSON. False: the next text is not
    part of a literal."""
    open: list[str] = []  # open brackets, by their closing ones
    comma = complete = False  # a comma must come before the next value; the last value is complete
    while True:
        space = yield from scanner.space()
        character = yield from scanner.peek()
        if not open and (complete or character in ("", ",", ")")):
            if character not in ("", ",", ")"):
                emit(space)
                return False
            return complete
        if complete and character == ",":
            scanner.take()
            comma, complete = True, False
        elif open and _CLOSERS.get(character) == open[-1]:
            scanner.take()
            emit(open.pop())
            comma, complete = False, True  # Python allows a comma after the last item
        elif complete and character == ":":
            emit(scanner.take() + " ")
            complete = False
        elif complete:
            emit(space)
            return False
        else:
            if comma:
                emit(", ")
            comma = False
            if character in _PAIRS and len(open) < MAX_DEPTH:
                emit({"(": "["}.get(scanner.take(), character))
                open.append(_PAIRS[character])
            elif not (yield from _scalar(scanner, emit)):
                return False
            else:
                complete = True


def _scalar(scanner: Scanner, emit: Emit) -> Steps[bool]:
    character = yield from scanner.peek()
    if character in ("'", '"'):
        return (yield from _string(scanner, emit))
    word = yield from scanner.run(WORD, MAX_WORD)
    emit(json_of_word(word))
    return 0 < len(word) <= MAX_WORD


def json_of_word(word: str) -> str:
    if word in _WORDS or _NUMBER.fullmatch(word):
        return _WORDS.get(word, word)
    if re.match(r"[+-]?(\d|\.\d)", word) and not re.match(r"[+-]?0\d", word):
        for convert in (lambda: int(word, 0), lambda: float(word)):
            try:
                number = convert()
                if math.isfinite(number):
                    return str(number)
            except (ValueError, OverflowError):
                continue
    return json.dumps(word, ensure_ascii=False) if word else ""


def _string(scanner: Scanner, emit: Emit) -> Steps[bool]:
    """Passes on a string as it arrives. False: it does not end."""
    quote = scanner.take()
    emit('"')
    triple = False
    if (yield from scanner.peek()) == quote:
        scanner.take()
        if (yield from scanner.peek()) != quote:
            emit('"')
            return True
        triple = bool(scanner.take())
    while (character := (yield from scanner.peek())) != "":
        if character == "\\":
            scanner.take()
            yield from _escape(scanner, emit)
        elif character == quote:
            scanner.hold()
            if (yield from scanner.literal((quote * 3 if triple else quote,))):
                scanner.drop()
                emit('"')
                return True
            emit(json.dumps(scanner.release())[1:-1])
        else:
            emit(json.dumps(scanner.all_of(_PLAIN[quote]), ensure_ascii=False)[1:-1])
    return False


def _escape(scanner: Scanner, emit: Emit) -> Steps[None]:
    """Reads an escape after its backslash. A backslash that escapes nothing stays, as in Python."""
    character = yield from scanner.peek()
    if character == "":
        return
    scanner.take()
    text = _ESCAPES.get(character, f"\\{character}")
    if character in _HEX:
        digits = ""
        while len(digits) < _HEX[character] and (yield from scanner.peek()) in tuple("0123456789abcdefABCDEF"):
            digits += scanner.take()
        text += digits
        if len(digits) == _HEX[character]:
            if character == "u":
                emit(text)  # JSON has the same escapes, surrogates included
                return
            code = int(digits, 16)
            text = chr(code) if code < 0xD800 or 0xDFFF < code < 0x110000 else text
    emit(json.dumps(text, ensure_ascii=False)[1:-1])
