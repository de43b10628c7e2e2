"""The digest kernel of pages on a GPU, by Triton's interpreter: integers, so equal or wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux on x86-64 and aarch64")

from engine.core.kv_layout import HOST_DIGEST, SUMS_DIGEST, KvLayout
from engine.gpu import block_digest
from engine.gpu.block_digest import MIX, SPREAD, TILE, TILES, BlockSums, kind, sums_of, wrong
from engine.kv.kv_cache import KvCache, layout_of
from engine.kv.kv_cache_spec import CallFacts, FullAttentionSpec
from engine.runner.block_reader import block_reader
from kvtransfer.types import digest, digests
from tests.engine.stand_ins import Streams

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)  # the latter is only named
WORDS = TILE * TILES + 48  # two parts, the second nearly empty
FACTS = [CallFacts(2, 4, 16, 16, FullAttentionSpec(), None, False, 0.25)]


def buffer(blocks: int = 4, words: int = WORDS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (blocks, 4 * words), generator=generator, dtype=torch.uint8)


def by_python(block: torch.Tensor) -> bytes:
    """The formula, in Python's integers."""
    found = [0, 0]
    for index, word in enumerate(block.numpy().view(np.uint32).tolist()):
        mixed = (index + 1) * SPREAD % 2**64
        mixed = (mixed ^ mixed >> 32) * MIX % 2**64
        mixed ^= mixed >> 32
        again = mixed * MIX % 2**64
        again ^= again >> 32
        found = [found[0] + word * (mixed | 1), found[1] + word * (again | 1)]
    return b"".join((each % 2**64).to_bytes(8, "little") for each in found)


@pytest.mark.parametrize("words", [16, TILE, WORDS])
def test_the_kernels_sums_are_the_integers(words: int) -> None:
    """Of the blocks asked for, in that order, less than a tile or several parts; all bits set included."""
    blocks = buffer(words=words)
    blocks[3] = 255
    expected = [by_python(blocks[index]) for index in (2, 0, 3)]
    assert BlockSums(blocks)([2, 0, 3]) == expected
    assert [sums_of(blocks[index].numpy().view(np.uint32)) for index in (2, 0, 3)] == expected


def test_one_bit_or_two_places_change_the_sums() -> None:
    """Any bit of any kind of position; words that changed places; a word that moved by one."""
    [before] = BlockSums(buffer(1))([0])
    for byte in (0, 5, 4 * TILE, 4 * WORDS - 1):
        for bit in (0, 7):
            changed = buffer(1)
            changed[0, byte] ^= 1 << bit
            [found] = BlockSums(changed)([0])
            assert found[:8] != before[:8]
            assert found[8:] != before[8:]
    words = buffer(1).view(torch.int32)
    for order in ([1, 0, *range(2, WORDS)], [*range(TILE, 2 * TILE), *range(TILE), *range(2 * TILE, WORDS)]):
        assert BlockSums(words[:, order].contiguous().view(torch.uint8))([0]) != [before]
    assert BlockSums(words.roll(1, 1).view(torch.uint8))([0]) != [before]


def test_sums_that_no_keys_tell_apart_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a kernel whose keys do not follow from the position fails the trial at load."""
    assert wrong(CPU) is None
    launched = BlockSums.__call__
    monkeypatch.setattr(BlockSums, "__call__", lambda self, blocks: [each[::-1] for each in launched(self, blocks)])
    assert "wrong" in str(wrong(CPU))


def test_a_kernel_that_fails_its_trial_leaves_digests_on_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a line in the log; on CPU nothing is tried."""
    monkeypatch.setattr(block_digest, "wrong", lambda _: None)
    kind.cache_clear()
    assert (kind(CUDA), kind(CPU)) == (SUMS_DIGEST, HOST_DIGEST)
    monkeypatch.setattr(block_digest, "wrong", lambda _: "the kernel fails: no")
    kind.cache_clear()
    assert kind(CUDA) == HOST_DIGEST
    assert "the kernel fails: no" in caplog.text
    kind.cache_clear()


def test_workers_with_other_digests_do_not_pair_and_say_why() -> None:
    """The kind is in the layout's hash."""
    host = layout_of(FACTS, 16, torch.bfloat16, "m")
    sums = layout_of(FACTS, 16, torch.bfloat16, "m", digest=SUMS_DIGEST)
    assert host.hash() != sums.hash()
    assert host.differences(sums) == ["digest differs: xxh3 here, sums there"]
    for layout in (host, sums):
        assert KvLayout.from_json(layout.to_json()) == layout


def test_the_digest_binds_the_sums_to_their_place() -> None:
    """As it binds the bytes: right ones in the wrong place fail."""
    pages = KvCache(layout_of(FACTS, 16, torch.bfloat16, "m", digest=SUMS_DIGEST), 3, CPU)
    pages.buffer.random_(generator=torch.Generator().manual_seed(1))
    of = digests(block_reader(pages))
    [sums] = BlockSums(pages.buffer)([1])
    assert of([(1, b"a"), (1, b"b"), (2, b"a")])[:2] == [digest(sums, b"a"), digest(sums, b"b")]
    assert len(set(of([(1, b"a"), (1, b"b"), (2, b"a")]))) == 3


def test_digests_are_taken_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything from the list of blocks to the copy of the sums, so that neither a step nor a digest waits for the
    other. Streams are stand-ins."""
    streams = Streams(monkeypatch)
    sums = BlockSums(buffer(2))
    own: Any = torch.cuda.Stream(CUDA)
    sums._stream = own
    launched: list[object] = []
    numbers = block_digest.on_device
    monkeypatch.setattr(
        block_digest, "on_device", lambda *given: (launched.append(streams.current), numbers(*given))[1]
    )
    sums([0, 1])
    assert launched == [own]
    assert streams.current is None
