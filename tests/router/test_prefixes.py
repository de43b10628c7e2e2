"""The router's index of cached prefixes: what workers told, and nothing else."""

from __future__ import annotations

import pytest

from engine import hashing
from services.router.prefixes import Known, Prompt
from tandem.errors import InternalError
from tandem.v1 import worker_pb2

SIZE = 4
TOKENS = list(range(100, 118))  # four blocks and a rest
CHAIN = hashing.chain(TOKENS, SIZE, b"")


def told(*messages: tuple[list[bytes], list[bytes]], adapters: dict[str, bytes] | None = None) -> Known:
    known = Known(SIZE)
    for sequence, (added, removed) in enumerate(messages):
        message = worker_pb2.WatchCacheResponse(sequence=sequence, added=b"".join(added), removed=b"".join(removed))
        message.adapters.update(adapters or {})
        known.take(message)
    return known


def test_the_leading_blocks_that_are_there_count() -> None:
    """Up to the first that is not; one token is always to be computed."""
    prompt = Prompt(TOKENS, b"", "")
    assert told(([], [])).cached(prompt) == 0
    assert told((CHAIN[:2], [])).cached(prompt) == 8
    assert told((CHAIN[1:], [])).cached(prompt) == 0
    assert told((CHAIN, [])).cached(prompt) == 16
    assert told((CHAIN, [])).cached(Prompt(TOKENS[:16], b"", "")) == 15
    assert told((CHAIN, []), ([], CHAIN[2:])).cached(prompt) == 8


def test_tenants_and_adapters_are_apart() -> None:
    """Another salt finds nothing; an adapter only what the same content has computed, by its fingerprint there."""
    assert told((CHAIN, [])).cached(Prompt(TOKENS, b"tenant", "")) == 0
    chain = hashing.chain(TOKENS, SIZE, b"", adapter=b"content")
    assert told((chain, []), adapters={"red": b"content"}).cached(Prompt(TOKENS, b"", "red")) == 16
    assert told((chain, []), adapters={"red": b"other"}).cached(Prompt(TOKENS, b"", "red")) == 0
    assert told((chain, [])).cached(Prompt(TOKENS, b"", "red")) == 0
    assert told((chain, []), adapters={"red": b"content"}).cached(Prompt(TOKENS, b"", "")) == 0


def test_a_message_that_is_missing_is_seen() -> None:
    """Then everything is asked for anew."""
    known = told((CHAIN, []))
    for sequence in (0, 2):
        with pytest.raises(InternalError, match="came after 0"):
            known.take(worker_pb2.WatchCacheResponse(sequence=sequence))
