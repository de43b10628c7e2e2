"""The types of a transfer refuse values that could be misread."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtransfer.types import Peer, Region, check_compatible, digest
from tandem.errors import IncompatibleLayout

REGION = Region(address=4096, num_blocks=2, block_bytes=8)
PEER = Peer("prefill-0", "life", "prefill-0@life", b"secret", "layout", 4096, 2, 8, 0, "dram", "nixl")


def test_regions_are_the_same_whatever_keeps_their_memory_alive() -> None:
    """The owner of the memory is not compared, because comparing tensors gives a tensor."""
    assert replace(REGION, keepalive=[1]) == replace(REGION, keepalive=[2])


@pytest.mark.parametrize("name", ["address", "num_blocks"])
@pytest.mark.parametrize("number", [0, -1])
def test_a_peer_that_describes_no_region_is_refused(name: str, number: int) -> None:
    """The refusal comes before anything is read."""
    check_compatible(REGION, "layout", PEER, "nixl")
    check_compatible(REGION, "layout", replace(PEER, address=1, num_blocks=1), "nixl")
    with pytest.raises(IncompatibleLayout) as failed:
        check_compatible(REGION, "layout", replace(PEER, **{name: number}), "nixl")
    assert failed.value.field == "peer"


def test_a_peer_in_memory_of_another_kind_is_refused() -> None:
    """A peer in a kind of memory that this version does not know is refused."""
    check_compatible(REGION, "layout", replace(PEER, memory="vram"), "nixl")
    with pytest.raises(IncompatibleLayout):
        check_compatible(REGION, "layout", replace(PEER, memory="file"), "nixl")


def test_what_a_peer_says_to_nixl_is_not_in_its_repr() -> None:
    """The metadata has kilobytes, and reprs are written to the log."""
    assert "secret" not in repr(PEER)


def test_a_digest_tells_the_context_from_the_block() -> None:
    """Context and block give different digests for different splits of the same bytes."""
    assert digest(b"cd", b"ab") != digest(b"bcd", b"a") != digest(b"abcd", b"")
    assert digest(b"cd", b"ab") == digest(bytearray(b"cd"), b"ab")
