"""What the services make of each other's messages."""

from __future__ import annotations

import pytest

from services.proto_convert import client_request_id


@pytest.mark.parametrize(
    ("internal", "client"),
    [
        ("a.0123abcd", "a"),
        ("a.0123abcd-3", "a"),
        ("a.0123abcd-3/2", "a"),
        ("a.0123abcd/2", "a"),
        ("a.b-1/2.0123abcd/2", "a.b-1/2"),
        ("a.0123abcd.89abcdef", "a.0123abcd"),
        ("a", "a"),
        ("a.0123abc", "a.0123abc"),
        ("a\n.0123abcd", "a\n.0123abcd"),
        ("", ""),
    ],
)
def test_a_log_line_names_a_request_as_its_client_does(internal: str, client: str) -> None:
    """Also an id that looks like an internal one; what is no internal id stays as it is."""
    assert client_request_id(internal) == client
