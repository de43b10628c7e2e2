"""A bound on the parts of a client's protobuf message, checked on its bytes before objects are made of it.

An empty message inside of another takes two bytes on the wire, and parsing one holds the interpreter's lock: 4 MiB of
them block an event loop for 90 ms. Texts and packed numbers, of which large requests consist, are one part each.
"""

from __future__ import annotations

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor

from tandem.errors import InvalidRequest

LARGE_BYTES = 64 * 1024  # with fewer, there is nothing to check
MOST_PARTS = 2**15
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types
Message = tuple[int, int, Descriptor]  # where it begins and ends in the bytes


class _Malformed(Exception):
    """Parsing fails here, too."""


def check_parts(data: bytes, method: str, most: int = MOST_PARTS) -> None:
    """Raises InvalidRequest if the request of a method (its path in gRPC) has more fields than `most`, including those
    of nested messages. Stops at bytes that cannot be parsed, where the parser stops as well."""
    rpc = descriptor_pool.Default().FindMethodByName(method.lstrip("/").replace("/", "."))
    waiting: list[Message] = [(0, len(data), rpc.input_type)]
    left = most
    while waiting:
        left = _count(data, waiting.pop(), waiting, left)
        if left < 0:
            raise InvalidRequest(
                "the message has too many parts", field="message", bound=f"at most {most} fields and values"
            )


def _count(data: bytes, message: Message, inside: list[Message], left: int) -> int:
    """Returns `left` less the fields of one message; adds its nested messages to `inside`."""
    at, end, kind = message
    fields = kind.fields_by_number
    try:
        while at < end and left >= 0:
            left -= 1
            tag = data[at]
            if tag < 128:
                at += 1
            else:
                tag, at = _varint(data, at, end)
            wire = tag & 7
            if wire == _BYTES:
                size, at = _varint(data, at, end)
                field = fields.get(tag >> 3)
                if field is not None and field.message_type is not None:
                    inside.append((at, min(at + size, end), field.message_type))
                at += size
            elif wire == _VARINT:
                _, at = _varint(data, at, end)
            elif wire == _FIXED64:
                at += 8
            elif wire == _FIXED32:
                at += 4
    except _Malformed:
        pass
    return left


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """The number at this place, and the place after it."""
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise _Malformed
