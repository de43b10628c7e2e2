"""The types of a transfer refuse values that could be misread."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvtransfer.types import Peer, Region, check_compatible, digest
from tandem.errors import IncompatibleLayout, InvalidRequest

REGION = Region(address=4096, num_blocks=2, block_bytes=8)
PEER = Peer("prefill-0", "life", "prefill-0@life", b"secret", "layout", 4096, 2, 8, 0, "dram", "nixl")


@pytest.mark.parametrize("name", ["address", "num_blocks", "block_bytes"])
@pytest.mark.parametrize("number", [0, -1])
def test_a_region_without_an_address_or_blocks_is_refused(name: str, number: int) -> None:
    """A region without an address, without blocks, or with empty blocks is refused."""
    with pytest.raises(InvalidRequest) as failed:
        replace(REGION, **{name: number})
    assert failed.value.field == "region"


def test_the_smallest_region_is_one_block_of_one_byte() -> None:
    """Control: the regions above are not refused for another reason."""
    assert Region(address=1, num_blocks=1, block_bytes=1, spare_block=0).nbytes == 1


@pytest.mark.parametrize(
    ("change", "field"),
    [({"spare_block": -1}, "spare_block"), ({"spare_block": 2}, "spare_block"), ({"memory": "disk"}, "memory")],
)
def test_a_spare_block_is_one_of_the_region(change: dict[str, Any], field: str) -> None:
    """A spare block must be in the region, and memory is one of two kinds."""
    assert replace(REGION, spare_block=1).spare_block == 1
    with pytest.raises(InvalidRequest) as failed:
        replace(REGION, **change)
    assert failed.value.field == field


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
