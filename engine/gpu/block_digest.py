"""The content of a block's digest: in host memory its bytes; on a GPU two sums over all its words, by one kernel for
many blocks (tests/engine/test_gpu_digest.py).

    sums[n] = sum over i of word[i] * key_n(i)  modulo 2^64        word: 32 bits, n: 0 and 1

The keys are odd, so any one changed word changes both sums; they differ by position, so swapped words change them, too.
Integer sums do not depend on order, so the number of programs does not matter. The sums find faults as well as
xxh3_128, which would have to read a block sequentially; neither stops a malicious worker.

The host binds the 16 bytes to the block's place (`kvtransfer.types.digest`). Both sides of a transfer must compute the
same kind, so it is in the layout (`engine.core.kv_layout`).
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from engine.attention.forward_context import on_device
from engine.core.kv_layout import HOST_DIGEST, SUMS_DIGEST

log = logging.getLogger(__name__)

TILE, TILES = 1024, 8  # words that a program reads at a time, and how often
SPREAD, MIX = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93  # of the 64-bit finaliser that makes keys of positions


class BlockSums:
    """Computes sums of blocks of `buffer [blocks, bytes] uint8` on a separate stream, which does not wait for steps,
    nor they for it. The caller ensures that the device has written the blocks (`device_done`, or a transfer that has
    ended)."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._words = buffer.view(torch.int32)  # [blocks, words]
        cuda = buffer.device.type == "cuda"
        self._stream = torch.cuda.Stream(buffer.device) if cuda else None  # type: ignore[no-untyped-call]

    def __call__(self, blocks: Sequence[int]) -> list[bytes]:
        """16 bytes for each block, in this order; on any thread."""
        from engine.gpu.digest_kernel import sum_words  # torch for CUDA brings Triton, the one for CPU does not

        device, words = self._words.device, self._words.shape[1]
        parts = -(-words // (TILE * TILES))
        with torch.inference_mode(), self._own_stream():
            ids = on_device(list(blocks), torch.int64, device)
            sums = torch.empty(len(ids), parts, 2, dtype=torch.int64, device=device)
            sum_words[(len(ids), parts)](
                self._words, ids, sums, words, SPREAD=SPREAD, MIX=MIX, TILE=TILE, TILES=TILES, num_warps=4
            )
            host = sums.sum(1).cpu().numpy()  # [blocks, 2]; waits for this stream alone
        return [row.tobytes() for row in host]

    def _own_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()


def sums_of(words: np.ndarray) -> bytes:
    """The same by numpy, for `words [n] uint32`."""
    mixed = np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(SPREAD)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(MIX)
    mixed ^= mixed >> np.uint64(32)
    again = mixed * np.uint64(MIX)
    again ^= again >> np.uint64(32)
    wide = words.astype(np.uint64)
    keys = (mixed | np.uint64(1), again | np.uint64(1))
    return np.array([(wide * key).sum(dtype=np.uint64) for key in keys]).tobytes()


@functools.cache
def kind(device: torch.device) -> str:
    """Of digests of pages on this device. The kernel is tried once; one that is wrong serves nothing."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return HOST_DIGEST
    problem = wrong(device)
    if problem:
        log.warning("digests of blocks are computed on the host, which costs a copy of each: %s", problem)
    return HOST_DIGEST if problem else SUMS_DIGEST


def wrong(device: torch.device) -> str | None:
    """What is wrong with the kernel's sums on this device, or None."""
    generator = torch.Generator().manual_seed(0)
    words = 3 * TILE * TILES + 16  # the last part is not full
    host = torch.randint(0, 256, (3, 4 * words), generator=generator, dtype=torch.uint8)
    try:
        found = BlockSums(host.to(device))([2, 0])
    except (RuntimeError, TypeError, ValueError) as error:
        return f"the kernel fails: {str(error).strip().partition(chr(10))[0]}"
    expected = [sums_of(host[block].numpy().view(np.uint32)) for block in (2, 0)]
    return None if found == expected else "the kernel's sums are wrong"
