"""Access to the bytes of a transport's region, for tests that write and corrupt them."""

from __future__ import annotations

import ctypes

from kvtransfer.types import Region


def block_view(region: Region, block: int) -> memoryview:
    """The bytes of one block of host memory, writable, without a copy."""
    assert region.memory == "dram"
    assert 0 <= block < region.num_blocks
    raw = (ctypes.c_ubyte * region.block_bytes).from_address(region.address + block * region.block_bytes)
    return memoryview(raw).cast("B")
