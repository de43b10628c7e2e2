"""Reads blocks for their digests: the bytes of pages in host memory, the sums of pages on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.core.kv_layout import SUMS_DIGEST
from engine.gpu.block_digest import BlockSums
from engine.kv.kv_cache import KvCache


def block_reader(pages: KvCache) -> Callable[[Sequence[int]], Sequence[memoryview | bytes]]:
    """Returns a function from block ids to what the digest of each covers, which the layout names. Where a GPU's kernel
    does not serve, bytes are copied to the host first."""
    if pages.layout.digest == SUMS_DIGEST:
        return BlockSums(pages.buffer)
    if pages.buffer.device.type == "cpu":
        return lambda blocks: [pages.block_view(block) for block in blocks]

    def copies(blocks: Sequence[int]) -> list[memoryview]:
        return [memoryview(pages.buffer[block].cpu().numpy().data) for block in blocks]

    return copies
