"""Content hashes of blocks: what makes two blocks interchangeable.

A block's KV depends on every token up to its end, so its hash is chained: H(i) = blake2b(H(i-1) + tokens of block i),
and H(-1) is keyed by the tenant's salt and by the adapter that computes it. Two sequences share a hash exactly when
they share salt, adapter and every token up to there. blake2b is cryptographic (RFC 7693), so that no client can aim a
collision at another tenant's cache.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

DIGEST_BYTES = 16


def root(salt: bytes, adapter: bytes = b"") -> bytes:
    """The hash before the first block. Salts of any length are accepted; `adapter` is a fingerprint of up to 64 bytes.
    It is the hash's key and not part of the salt, which a client chooses."""
    return hashlib.blake2b(salt, digest_size=DIGEST_BYTES, person=b"tandem.kv", key=adapter).digest()


def extend(previous: bytes, tokens: Sequence[int]) -> bytes:
    """The hash of a block that holds `tokens` after the block with hash `previous`."""
    return hashlib.blake2b(previous + array("I", tokens).tobytes(), digest_size=DIGEST_BYTES).digest()


def of_state(last: bytes, tokens: int, parts: int) -> list[bytes]:
    """The hashes of the `parts` blocks that hold a copy of a recurrent state after `tokens` tokens, whose last block,
    full or partial, has the hash `last`."""
    return [of_state_part(last, tokens, part) for part in range(parts)]


def of_state_part(last: bytes, tokens: int, part: int) -> bytes:
    """One of these."""
    numbers = array("I", [tokens, part]).tobytes()
    return hashlib.blake2b(last + numbers, digest_size=DIGEST_BYTES, person=b"tandem.state").digest()


def chain(
    tokens: Sequence[int], block_size: int, salt: bytes, *, adapter: bytes = b"", partial: bool = False
) -> list[bytes]:
    """Hashes of the full blocks of `tokens`, in order; with `partial`, of a last unfilled block too."""
    hashes: list[bytes] = []
    previous = root(salt, adapter)
    end = len(tokens) if partial else len(tokens) - len(tokens) % block_size
    for start in range(0, end, block_size):
        previous = extend(previous, tokens[start : start + block_size])
        hashes.append(previous)
    return hashes
