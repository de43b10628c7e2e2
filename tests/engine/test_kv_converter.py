"""KV goes from blocks of one layout into blocks of another without a change in what it means, or not at all."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from engine.core.kv_conversion import converters
from engine.core.kv_layout import VERSION, KvLayout, plan_calls
from engine.kv.kv_cache import KvCache
from engine.kv.kv_converter import KvConverter
from engine.kv.kv_quantization import dequantise, quantise
from tandem.errors import IncompatibleLayout

CPU = torch.device("cpu")
SHAPES = [(2, 16, 16), (3, 8, 24)]  # of two attention calls
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.int8: "int8", torch.float8_e4m3fn: "float8_e4m3fn"}


def layout(block_size: int, element: torch.dtype, model: torch.dtype = torch.bfloat16) -> KvLayout:
    scaled = element.itemsize == 1
    calls, total = plan_calls(SHAPES, block_size, element.itemsize, scaled=scaled)
    scale = "bfloat16" if scaled else ""
    return KvLayout(VERSION, "f", NAMES[element], scale, NAMES[model], block_size, total, calls)


def filled(pages: KvCache) -> None:
    generator = torch.Generator().manual_seed(0)
    for views, scales in ((pages.k, pages.k_scales), (pages.v, pages.v_scales)):
        for view, own in zip(views, scales, strict=True):
            values = torch.randn(view.shape, generator=generator).bfloat16()
            if own is None:
                view.copy_(values)
            else:
                elements, factors = quantise(values, view.dtype)
                view.view(torch.uint8).copy_(elements.view(torch.uint8))
                own.copy_(factors)


def kept(pages: KvCache, table: list[int], length: int) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Elements `[tokens, heads, d]` and scales of each K and V of a sequence."""
    found = []
    for views, scales in ((pages.k, pages.k_scales), (pages.v, pages.v_scales)):
        for view, own in zip(views, scales, strict=True):
            of_table = view.view(torch.uint8)[table].view(view.dtype) if view.itemsize == 1 else view[table]
            found.append((of_table.flatten(0, 1)[:length], None if own is None else own[table].flatten(0, 1)[:length]))
    return found


ELEMENTS = (torch.bfloat16, torch.int8, torch.float8_e4m3fn)


@pytest.mark.parametrize(("theirs", "ours"), [(8, 8), (4, 8), (8, 4), (3, 7), (16, 5)])
@pytest.mark.parametrize(("source", "target"), list(itertools.product(ELEMENTS, ELEMENTS)))
def test_every_token_arrives_and_no_other_place_is_written(
    theirs: int, ours: int, source: torch.dtype, target: torch.dtype
) -> None:
    """Whatever the sizes of blocks and the elements, in several parts, from a token in the middle of blocks of both
    sides. Elements of one type keep their bits; others are those of the values that the source has."""
    length, first = 37, 6
    before, after = layout(theirs, source), layout(ours, target)
    names = converters(before, after)
    assert (names == []) == (before == after)
    assert (f"blocks of {theirs} to {ours} tokens" in names) == (theirs != ours)
    assert (f"{NAMES[source]} to {NAMES[target]}" in names) == (source != target)
    pages = KvCache(after, 40, CPU)
    filled(pages)
    count = -(-length // theirs)
    converter = KvConverter(before, count, pages)
    filled(converter.staging)
    places = list(reversed(range(count)))  # of the blocks of the sequence in the staging
    table = [(7 * at + 3) % 40 for at in range(-(-length // ours))]
    old = pages.buffer.clone()
    expected = kept(converter.staging, places, length)
    untouched = kept(pages, table, first)
    indices = range(first // theirs, count)
    for part in (indices[:2], indices[2:]):
        converter.convert([(places[index], index) for index in part], table, range(first, length))
    for (elements, scales), (values, factors) in zip(kept(pages, table, length), expected, strict=True):
        if source == target:
            assert torch.equal(elements[first:].float(), values[first:].float())
            assert scales is None or torch.equal(scales[first:], factors[first:])  # type: ignore[index]
            continue
        exact = values if factors is None else dequantise(values, factors, torch.bfloat16)
        if scales is None:
            assert torch.equal(elements[first:], exact[first:])
        else:
            wanted, wanted_scales = quantise(exact, target)
            assert torch.equal(elements[first:].float(), wanted[first:].float())
            assert torch.equal(scales[first:], wanted_scales[first:])
    for (elements, _), (values, _) in zip(kept(pages, table, first), untouched, strict=True):
        assert torch.equal(elements.float(), values.float())
    others = [block for block in range(40) if block not in table]
    assert torch.equal(pages.buffer[others], old[others])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_fingerprint": "g"}, "model_fingerprint differs"),
        ({"model_dtype": "float32"}, "model_dtype differs"),
        ({"version": VERSION + 1}, "version differs"),
        ({"digest": "sums"}, "digest differs"),
        ({"calls": layout(4, torch.bfloat16).calls[:1]}, "the number of attention calls differs"),
        ({"block_bytes": 1 << 20}, "block_bytes differs"),
    ],
)
def test_kv_of_another_meaning_is_refused_with_what_differs(change: dict[str, object], says: str) -> None:
    """Another model, type of its numbers, shape of heads, or a block that this version does not know."""
    ours = layout(8, torch.bfloat16)
    with pytest.raises(IncompatibleLayout, match=says):
        converters(replace(ours, **change), ours)  # type: ignore[arg-type]


def test_a_layout_of_a_later_version_is_named() -> None:
    """One with fields that this version does not know is not taken for one that it knows."""
    text = layout(8, torch.int8).to_json().replace('"block_size"', '"heads_first":true,"block_size"')
    with pytest.raises(ValueError, match="a later version, with heads_first"):
        KvLayout.from_json(text)
