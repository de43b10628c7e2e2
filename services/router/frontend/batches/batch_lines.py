"""The lines of a batch's input, output and error files, in the format of OpenAI's Batch API.

input           {"custom_id", "method": "POST", "url", "body"}
output, error   {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error": null}
error           likewise with "response": null, "error": {"code", "message"}: the line was not run
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from services.router.frontend import json_body
from services.router.frontend.json_body import encode, is_utf8, to_json
from services.router.preprocess.json_limits import out_of_bounds
from tandem.errors import InvalidRequest

MAX_LINES = 10_000  # of one batch
MAX_ERRORS = 100  # reported for one input
MAX_CUSTOM_ID = 512  # characters
MAX_VALUES = 2**20  # in one line; the endpoint's own bound applies to the body
_NEWLINE = re.compile(rb"\r?\n")


@dataclass(frozen=True, slots=True)
class Line:
    """`number` counts from 0, without empty lines; `raw` is the whole line; `model` is the name in its body, or
    empty."""

    number: int
    custom_id: str
    raw: bytes
    model: str = ""

    def body(self) -> bytes:
        """The request as JSON. Raises InvalidRequest for text that is not valid Unicode."""
        try:
            return to_json(json_body.read(self.raw, MAX_VALUES)["body"])
        except UnicodeEncodeError as error:
            raise out_of_bounds("body", "not valid Unicode", "valid Unicode") from error


@dataclass(frozen=True, slots=True)
class Input:
    """The lines of an input, or its errors."""

    lines: list[Line]
    errors: list[dict[str, Any]]


def read(content: bytes, endpoint: str) -> Input:
    """Reads a whole input file; a long one belongs on a thread. No message contains anything of the input."""
    lines: list[Line] = []
    errors: list[dict[str, Any]] = []
    known: set[str] = set()
    for place, raw in _split(content):
        if len(lines) + len(errors) == MAX_LINES:
            return Input([], [_wrong("too_many_tasks", f"The file has over {MAX_LINES} lines, the maximum.")])
        try:
            fields = json_body.read(raw, MAX_VALUES)
        except InvalidRequest as error:
            errors.append(_wrong("invalid_json_line", f"This line is not a JSON object: {error.message}", place))
        else:
            if problem := _problem(fields, endpoint, known, place):
                errors.append(problem)
            else:
                known.add(fields["custom_id"])
                model = fields["body"].get("model")
                lines.append(Line(len(lines), fields["custom_id"], raw, model if isinstance(model, str) else ""))
        if len(errors) == MAX_ERRORS:
            break
    if not lines and not errors:
        errors.append(_wrong("empty_file", "The file has no line."))
    return Input([] if errors else lines, errors)


def _split(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Each line that is not empty, with its number in the file from 1, without a copy of the rest."""
    start = place = 0
    while start < len(content):
        place += 1
        found = _NEWLINE.search(content, start)
        end, following = found.span() if found else (len(content), len(content))
        if (raw := content[start:end]).strip():
            yield place, raw
        start = following


def _problem(fields: dict[str, Any], endpoint: str, known: set[str], place: int) -> dict[str, Any] | None:
    """The error of a line itself; its body is checked when it runs."""
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID or not is_utf8(custom_id):
        bound = f"custom_id must be a string of 1 to {MAX_CUSTOM_ID} characters."
        return _wrong("invalid_custom_id", bound, place, "custom_id")
    if custom_id in known:
        return _wrong("duplicate_custom_id", "An earlier line has the same custom_id.", place, "custom_id")
    if fields.get("method") != "POST":
        return _wrong("invalid_method", "method must be POST.", place, "method")
    if fields.get("url") != endpoint:
        return _wrong("url_mismatch", f"url must be the endpoint of the batch, {endpoint}.", place, "url")
    if not isinstance(fields.get("body"), dict):
        return _wrong("invalid_body", "body must be an object: the body of the request.", place, "body")
    return None


def _wrong(code: str, message: str, line: int | None = None, param: str | None = None) -> dict[str, Any]:
    return {"code": code, "line": line, "message": message, "param": param}


# ---- results


def answered(batch_id: str, line: Line, request_id: str, status: int, body: bytes) -> bytes:
    """The endpoint's answer: the body of an answer or of an error, as JSON."""
    about = encode({"status_code": status, "request_id": request_id})
    return b'%s,"response":%s,"body":%s},"error":null}\n' % (_head(batch_id, line), about[:-1].encode(), body)


def not_run(batch_id: str, line: Line, code: str, message: str) -> bytes:
    """A line without an answer of the endpoint."""
    return b'%s,"response":null,"error":%s}\n' % (_head(batch_id, line), to_json({"code": code, "message": message}))


def _head(batch_id: str, line: Line) -> bytes:
    return to_json({"id": f"batch_req_{batch_id}-{line.number}", "custom_id": line.custom_id})[:-1]
