"""What is read of a batch's input and of the form that uploads it, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.router.frontend.batches import batch_lines
from services.router.frontend.batches.multipart import MAX_FIELDS, FormField, boundary_of, fields_of
from tandem.errors import InvalidRequest
from tests.support.stopwatch import ThreadTime

URL = "/v1/chat/completions"


def line(custom_id: object = "a", **other: object) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": URL, "body": {"n": 1}, **other}).encode()


def codes(content: bytes) -> list[tuple[str, int | None]]:
    found = batch_lines.read(content, URL)
    assert not (found.errors and found.lines)
    return [(error["code"], error["line"]) for error in found.errors]


def test_lines_are_numbered_without_the_empty_ones() -> None:
    """With any line end, with or without one at the end, and the body stays what it was."""
    body = {"prompt": "Ü\u2028\\n", "n": 2, "x": [1.5, None]}
    content = b"\n" + line("a", body=body) + b"\r\n  \r\n" + line("b") + b"\n" + line("c")
    found = batch_lines.read(content, URL)
    assert [(one.number, one.custom_id) for one in found.lines] == [(0, "a"), (1, "b"), (2, "c")]
    assert json.loads(found.lines[0].body()) == body


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (b"{", "invalid_json_line"),
        (b"[1]", "invalid_json_line"),
        (b"\xff", "invalid_json_line"),
        (b'{"a":1,"a":2}', "invalid_json_line"),
        (b"[" * 1000, "invalid_json_line"),
        (line("a"), "duplicate_custom_id"),
        (line(7), "invalid_custom_id"),
        (line(""), "invalid_custom_id"),
        (line("x" * 513), "invalid_custom_id"),
        (line("\ud800"), "invalid_custom_id"),
        (line("b", method="GET"), "invalid_method"),
        (line("b", url="/v1/completions"), "url_mismatch"),
        (line("b", body="text"), "invalid_body"),
    ],
)
def test_a_wrong_line_is_named(bad: bytes, code: str) -> None:
    """By its number in the file, from 1; a batch with one has no lines to run."""
    assert codes(line("a") + b"\n\n" + bad + b"\n" + line("z")) == [(code, 3)]


def test_a_file_without_lines_or_with_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a whole."""
    assert codes(b"") == codes(b"\n \n") == [("empty_file", None)]
    monkeypatch.setattr(batch_lines, "MAX_LINES", 2)
    assert codes(line("a") + b"\n" + line("b")) == []
    assert codes(line("a") + b"\n" + line("b") + b"\n" + line("c")) == [("too_many_tasks", None)]


def test_errors_are_bounded_and_quote_nothing() -> None:
    """However many lines are wrong."""
    found = batch_lines.read(b'{"secret" oops}\n' * 5000, URL)
    assert len(found.errors) == batch_lines.MAX_ERRORS
    assert "secret" not in json.dumps(found.errors)


def test_results_have_the_shape_of_openai() -> None:
    """An answer or an error of the endpoint, with its status; or why the line was not run."""
    one = batch_lines.read(line('q"ü'), URL).lines[0]
    answered = json.loads(batch_lines.answered("batch_1", one, "r", 200, b'{"object":"x"}'))
    assert answered == {
        "id": "batch_req_batch_1-0",
        "custom_id": 'q"ü',
        "response": {"status_code": 200, "request_id": "r", "body": {"object": "x"}},
        "error": None,
    }
    skipped: dict[str, Any] = json.loads(batch_lines.not_run("batch_1", one, "batch_expired", "late"))
    assert skipped["response"] is None
    assert skipped["error"] == {"code": "batch_expired", "message": "late"}
    assert (skipped["id"], skipped["custom_id"]) == (answered["id"], answered["custom_id"])


# ---- forms


def form(*fields: tuple[str, bytes], end: bytes = b"--\r\n") -> bytes:
    parts = [b"--B\r\n" + head.encode() + b"\r\n\r\n" + content + b"\r\n" for head, content in fields]
    return b"".join(parts) + b"--B" + end


NAMED = 'Content-Disposition: form-data; name="{}"'
A_FILE = 'content-disposition: form-data; name="file"; filename="a \\"b\\" ü.jsonl"\r\ncontent-type: text/plain'


def test_a_form_is_read_byte_by_byte() -> None:
    """Contents may have line ends, dashes and nearly the boundary; names may have quotes and UTF-8."""
    data = b"\r\n--\r\n--b\r\n-B--\n\r\n"
    found = fields_of(form((NAMED.format("purpose"), b"batch"), (A_FILE, data), (NAMED.format("e"), b"")), b"B")
    assert found == {
        "purpose": FormField(b"batch"),
        "file": FormField(data, 'a "b" ü.jsonl'),
        "e": FormField(b""),
    }
    assert fields_of(b"preamble\r\n" + form((NAMED.format("a"), b"1"), end=b"--"), b"B") == {"a": FormField(b"1")}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--C--",
        b"--B\r\n" + NAMED.format("a").encode() + b"\r\n\r\nx",
        b"--B\r\n" + NAMED.format("a").encode(),
        form((NAMED.format("a"), b"1"), end=b""),
        form(("x: y", b"1")),
        form((NAMED.format("a"), b"1"), (NAMED.format("a"), b"2")),
        form((NAMED.format("a") + "\r\ncontent-transfer-encoding: base64", b"1")),
        form((NAMED.format("a") + "\r\nx: " + "y" * 9000, b"1")),
        form(*((NAMED.format(number), b"") for number in range(MAX_FIELDS + 1))),
    ],
)
def test_a_broken_form_is_refused(body: bytes) -> None:
    """Cut off, without names, with two fields of one name, or of too many parts."""
    with pytest.raises(InvalidRequest):
        fields_of(body, b"B")


def test_a_head_of_spaces_takes_no_longer_than_any_other() -> None:
    """No thread runs while a regular expression does: the square of 8,000 would hold up every stream of the router."""
    body = form((NAMED.format("a") + ";" + " " * 8000 + "x", b"1"))
    with ThreadTime() as taken:
        assert fields_of(body, b"B") == {"a": FormField(b"1")}
    assert taken.seconds < 0.02


def test_the_boundary_comes_from_the_content_type() -> None:
    """Quoted or not, in any case; other types have none."""
    assert boundary_of("multipart/form-data; boundary=abc") == b"abc"
    assert boundary_of('Multipart/Form-Data; charset=utf-8; Boundary="a b"') == b"a b"
    for kind in ("", "application/json", "multipart/form-data", "multipart/mixed; boundary=abc"):
        with pytest.raises(InvalidRequest):
            boundary_of(kind)
