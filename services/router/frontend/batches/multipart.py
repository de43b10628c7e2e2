"""Forms with a file, as clients upload them: multipart/form-data (RFC 7578, whose framing is that of RFC 2046)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.router.preprocess.json_limits import out_of_bounds

MAX_FIELDS = 16
MAX_HEAD_BYTES = 8 * 1024  # of the headers of one field
MAX_FRAMING_BYTES = 64 * 1024  # of a form beside the file in it

# A boundary has at most 70 characters (RFC 2046, 5.1.1).
_BOUNDARY = re.compile(r';\s*boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_DISPOSITION = re.compile(rb"^content-disposition:\s*form-data\s*;(.*)$", re.IGNORECASE | re.MULTILINE)
_ENCODING = re.compile(rb"^content-transfer-encoding:\s*(\S+)", re.IGNORECASE | re.MULTILINE)
# Without leading white space, because matching it took quadratic time for 8 KiB of spaces.
_PARAMETER = re.compile(rb'(name|filename)="((?:[^"\\]|\\.)*)"', re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class FormField:
    """`filename` is None for a field that is no file."""

    content: bytes
    filename: str | None = None


def boundary_of(content_type: str) -> bytes:
    """Raises InvalidRequest for a content type other than a form's."""
    kind, _, _ = content_type.partition(";")
    found = _BOUNDARY.search(content_type)
    if kind.strip().lower() != "multipart/form-data" or found is None:
        raise out_of_bounds("content-type", "not that of a form", "multipart/form-data with its boundary")
    return (found[1] or found[2]).encode("latin-1", "replace")


def fields_of(body: bytes, boundary: bytes) -> dict[str, FormField]:
    """The fields by name. Long forms belong on a thread. Raises InvalidRequest."""
    delimiter = b"\r\n--" + boundary
    fields: dict[str, FormField] = {}
    at = 0 if body.startswith(delimiter[2:]) else body.find(delimiter)
    if at < 0:
        raise out_of_bounds("body", "without its boundary", "multipart/form-data")
    at += len(delimiter) - (2 if at == 0 and not body.startswith(delimiter) else 0)
    while not body.startswith(b"--", at):
        if len(fields) == MAX_FIELDS:
            raise out_of_bounds("body", "of too many fields", f"at most {MAX_FIELDS} fields")
        head_end = body.find(b"\r\n\r\n", at, at + MAX_HEAD_BYTES)
        end = body.find(delimiter, head_end + 2)
        if head_end < 0 or end < 0:
            raise out_of_bounds("body", "incomplete", "multipart/form-data")
        name, filename = _names(body[at:head_end].replace(b"\r\n", b"\n"))
        if name in fields:
            raise out_of_bounds("body", "of two fields of one name", "each field once")
        fields[name] = FormField(body[head_end + 4 : end], filename)
        at = end + len(delimiter)
    return fields


def _names(head: bytes) -> tuple[str, str | None]:
    """The names of a field and of its file."""
    disposition = _DISPOSITION.search(head)
    encoding = _ENCODING.search(head)
    if encoding and encoding[1].lower() not in (b"binary", b"8bit", b"7bit"):
        raise out_of_bounds("content-transfer-encoding", "not supported", "absent or binary")
    found = dict[str, str]()
    for name, value in _PARAMETER.findall(disposition[1] if disposition else b""):
        found.setdefault(name.decode().lower(), re.sub(rb"\\(.)", rb"\1", value).decode("utf-8", "replace"))
    if "name" not in found:
        raise out_of_bounds("content-disposition", "without a name", 'form-data; name="..."')
    return found["name"], found.get("filename")
