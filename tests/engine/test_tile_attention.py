"""Attention in the order tile32: right, and a token's bits depend on its own sequence up to it and on nothing else."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import pytest
import torch

from engine import kernels
from engine.kv import kv_quantization
from engine.kv.kv_cache import KvCache, layout_of
from engine.kv.kv_cache_spec import (
    CallFacts,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    Reach,
    SlidingWindowSpec,
    first_visible,
)

CPU = torch.device("cpu")
SERVED = kernels.serving(CPU) != kernels.REFERENCE and "tile32" in torch.ops.tandem.orders()
pytestmark = pytest.mark.skipif(not SERVED, reason="the order tile32 is not served here")

KINDS = ["auto", "int8", "fp8"]
REACHES: list[Reach] = [
    FullAttentionSpec(),
    SlidingWindowSpec(19),
    SlidingWindowSpec(300),
    ChunkedLocalAttentionSpec(12),
    ChunkedLocalAttentionSpec(200),
]
MORE = [(None, False), (2.0, True)]  # softcap, sinks
SCALING = 0.3


@pytest.fixture(autouse=True)
def tile32() -> Iterator[None]:
    before = torch.ops.tandem.order()
    torch.ops.tandem.use_order("tile32")
    random.seed(0)
    torch.manual_seed(0)
    yield
    torch.ops.tandem.use_order(before)


class Case:
    """Tokens of some sequences with a query for each, in pages that are NaN everywhere else."""

    def __init__(
        self,
        lengths: list[int],
        *,
        kv: str = "auto",
        size: int = 16,
        kv_heads: int = 2,
        groups: int = 3,
        dims: tuple[int, int] = (64, 64),
        sinks: bool = False,
    ) -> None:
        heads = kv_heads * groups
        fact = CallFacts(kv_heads, heads, *dims, FullAttentionSpec(), None, False, SCALING)
        counts = [-(-length // size) for length in lengths]
        self.kept = kv_quantization.element_dtype(kv)  # type: ignore[arg-type]
        self.pages = KvCache(layout_of([fact] * 2, size, torch.bfloat16, "", self.kept), sum(counts) + 2, CPU)
        self.pages.buffer.fill_(255)
        ids = random.sample(range(sum(counts) + 2), sum(counts))
        self.tables = [[ids.pop() for _ in range(count)] for count in counts]
        self.lengths = lengths
        self.query = [torch.randn(length, heads, dims[0]).bfloat16() for length in lengths]
        self.k = [self.put(index, "k", torch.randn(length, kv_heads, dims[0])) for index, length in enumerate(lengths)]
        self.v = [self.put(index, "v", torch.randn(length, kv_heads, dims[1])) for index, length in enumerate(lengths)]
        self.sinks = torch.randn(heads) * 3 if sinks else None

    def put(self, index: int, which: str, new: torch.Tensor) -> torch.Tensor:
        """Writes K or V of a whole sequence, [length, kv_heads, dim]; returns what attention reads, in float64."""
        pages, scales = getattr(self.pages, which)[1], getattr(self.pages, f"{which}_scales")[1]
        size = pages.shape[1]
        slots = [(self.tables[index][at // size], at % size) for at in range(len(new))]
        if self.kept is None:
            elements = new.bfloat16()
            exact = elements.double()
        else:
            elements, own = kv_quantization.quantise(new, self.kept)
            exact = kv_quantization.dequantise(elements, own, torch.float64)
        raw = torch.uint8 if self.kept is not None else torch.bfloat16
        for at, slot in enumerate(slots):
            pages.view(raw)[slot] = elements[at].view(raw)
            if scales is not None:
                scales[slot] = own[at]
        return exact

    def run(
        self,
        parts: list[tuple[int, int, int]],
        reach: Reach = REACHES[0],
        softcap: float | None = None,
        scaling: float = SCALING,
    ) -> list[torch.Tensor]:
        """The results of queries [start, end) of sequences, given as (sequence, start, end), as one step: each
        [end - start, heads, v_dim]."""
        tables = [self.tables[index] for index, _, _ in parts]
        width = max(map(len, tables))
        columns = (
            [0, *accumulate(end - start for _, start, end in parts)],
            [end for _, _, end in parts],
            [table + [10**9] * (width - len(table)) for table in tables],
        )
        query = torch.cat([self.query[index][start:end] for index, start, end in parts])
        out = query.new_full((len(query), query.shape[1], self.pages.v[1].shape[3]), float("nan"))
        window = reach.window if isinstance(reach, SlidingWindowSpec) else 0
        chunk = reach.size if isinstance(reach, ChunkedLocalAttentionSpec) else 0
        torch.ops.tandem.attend(
            *(out, query, self.pages.k[1], self.pages.v[1]),
            *(torch.tensor(each, dtype=torch.int32) for each in columns),
            *(window, chunk, scaling, softcap, self.sinks, self.pages.k_scales[1], self.pages.v_scales[1]),
        )
        return list(out.split([end - start for _, start, end in parts]))

    def cut(self, index: int, sizes: list[int], reach: Reach, softcap: float | None = None) -> torch.Tensor:
        """All queries of a sequence, in chunks of `sizes` in turn."""
        rows, at = [], 0
        while at < self.lengths[index]:
            end = min(self.lengths[index], at + sizes[len(rows) % len(sizes)])
            rows += self.run([(index, at, end)], reach, softcap)
            at = end
        return torch.cat(rows)

    def exact(
        self, index: int, reach: Reach, softcap: float | None, scaling: float = SCALING, at: Sequence[int] | None = None
    ) -> torch.Tensor:
        """In float64, of the queries `at` these positions; of all if it is None."""
        length = self.lengths[index]
        rows = torch.arange(length) if at is None else torch.tensor(at)
        groups = self.query[index].shape[1] // self.k[index].shape[1]
        k, v = (each[index].repeat_interleave(groups, dim=1) for each in (self.k, self.v))
        logits = torch.einsum("qhd,thd->qht", self.query[index][rows].double(), k) * scaling
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        key, position = torch.arange(length), rows.view(-1, 1, 1)
        logits = logits.masked_fill((key > position) | (key < first_visible(reach, position)), float("-inf"))
        if self.sinks is not None:
            logits = torch.cat([logits, self.sinks.double().view(1, -1, 1).expand(len(rows), -1, 1)], dim=2)
        return torch.einsum("qht,thd->qhd", logits.softmax(dim=2)[..., :length], v)


@contextmanager
def threads_of(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bits, which distinguish -0 from 0 and make NaN comparable."""
    return x.view(torch.int16)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


SHAPES = [
    {"size": 4, "kv_heads": 1, "groups": 1, "dims": (8, 8)},
    {"size": 16, "kv_heads": 3, "groups": 3, "dims": (64, 64)},
    {"size": 5, "kv_heads": 2, "groups": 7, "dims": (24, 20)},
    {"size": 32, "kv_heads": 2, "groups": 5, "dims": (80, 96)},
    {"size": 16, "kv_heads": 1, "groups": 2, "dims": (96, 40)},
    {"size": 1, "kv_heads": 1, "groups": 33, "dims": (33, 1)},
    {"size": 16, "kv_heads": 2, "groups": 8, "dims": (128, 128)},
]


# Of 530 queries: the borders of tiles, stretches and windows, and every eleventh. All others have the bits of these in
# another cut or batch (below), whose bits do not depend on the position.
COMPARED = sorted({*range(34), *range(0, 530, 11), *range(250, 262), *range(506, 530)})


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_attention(kv: str, shape: dict[str, int]) -> None:
    """Against float64, over several stretches of tokens, for chunks and for single queries."""
    case = Case([530, 61], kv=kv, sinks=shape["groups"] == 7, **shape)  # type: ignore[arg-type]
    for place, reach in enumerate(REACHES):
        softcap = (None, 2.0)[(place + KINDS.index(kv) + SHAPES.index(shape)) % 2]  # each reach meets both
        exact = case.exact(0, reach, softcap, at=COMPARED)
        error = 2**-8 * exact.abs() + 2**-9 * case.v[0].abs().max()  # of the result; of the weights
        for got in (case.cut(0, [530], reach, softcap), case.cut(0, [1] * 31 + [499], reach, softcap)):
            assert ((got[COMPARED].double() - exact).abs() <= error).all()
        last = case.run([(0, 529, 530)], reach, softcap)[0]
        assert ((last.double() - exact[-1:]).abs() <= error[-1:]).all()


@pytest.mark.parametrize("scaling", [30.0, 1000.0])
@pytest.mark.parametrize("rising", [1, -1])
def test_the_largest_logit_may_come_late(scaling: float, rising: int) -> None:
    """Logits of thousands that rise or fall along the context: what came before is scaled down, nothing overflows."""
    case = Case([700], kv_heads=1)
    direction = torch.ones(64)
    case.query[0] = (direction + torch.randn(700, 3, 64) * 0.01).bfloat16()
    slope = torch.linspace(-1, 1, 700).view(-1, 1, 1) * rising
    case.k[0] = case.put(0, "k", direction * slope)
    exact = case.exact(0, FullAttentionSpec(), None, scaling)
    got = case.run([(0, 0, 700)], scaling=scaling)[0]
    # logit times scaling is rounded to float: for logits this large, that is the error of their weights
    assert ((got.double() - exact).abs() <= 2**-8 * exact.abs() + (2**-8 + scaling * 64 * 2**-23) * 5).all()


@pytest.mark.parametrize("groups", [1, 3, 16])
def test_rows_alone_and_together(groups: int) -> None:
    """Up to 33 queries in one step have the bits of each alone."""
    case = Case([300], kv_heads=2, groups=groups)
    alone = torch.cat([case.run([(0, at, at + 1)])[0] for at in range(267, 300)])
    for count in range(1, 34):
        assert same(case.run([(0, 300 - count, 300)])[0], alone[-count:])
        assert same(case.run([(0, 267, 267 + count)])[0], alone[:count])


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("more", MORE, ids=str)
@pytest.mark.parametrize("reach", REACHES, ids=str)
def test_cuts_do_not_change_bits(kv: str, more: tuple[float | None, bool], reach: Reach) -> None:
    """Chunks of any size, single queries, and other sequences in the step: the same bits as in one chunk."""
    softcap, sinks = more
    case = Case([570, 40, 301], kv=kv, sinks=sinks, dims=(64, 80))
    whole = case.run([(0, 0, 570)], reach, softcap)[0]
    for sizes in ([1], [7], [64], [5, 1, 130, 16, 33, 2]):
        assert same(case.cut(0, sizes, reach, softcap), whole)
    beside = case.run([(1, 39, 40), (0, 200, 569), (2, 0, 301), (1, 2, 20)], reach, softcap)
    assert same(beside[1], whole[200:569])
    assert same(beside[3], case.run([(1, 0, 40)], reach, softcap)[0][2:20])
    assert same(case.run([(1, 39, 40), (0, 569, 570)], reach, softcap)[1], whole[569:])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cuts_of_other_shapes(shape: dict[str, int]) -> None:
    """Heads that are not a multiple of 32, and blocks that are not a multiple of 16 tokens."""
    case = Case([331], **shape)  # type: ignore[arg-type]
    whole = case.run([(0, 0, 331)])[0]
    for sizes in ([1], [6, 45, 100]):
        assert same(case.cut(0, sizes, FullAttentionSpec()), whole)


def test_sums_of_denormals_do_not_depend_on_the_cut() -> None:
    """A sum that is flushed to -0 becomes +0 when zeros are added, as for a row in a tile with longer ones."""
    case = Case([300], kv_heads=2, groups=1)
    case.v[0] = case.put(0, "v", torch.randn(300, 2, 64) * 2.0**-124)
    alone = case.cut(0, [1], FullAttentionSpec())
    assert alone.any()
    for sizes in ([300], [7, 50, 20]):
        assert same(case.cut(0, sizes, FullAttentionSpec()), alone)


def test_a_nan_in_k_stays_with_those_who_see_it() -> None:
    """Earlier tokens keep their bits."""
    case = Case([100], kv_heads=1)
    before = case.run([(0, 0, 100)])[0]
    poisoned = case.k[0].clone()
    poisoned[50] = float("nan")
    case.put(0, "k", poisoned)
    for got in (case.run([(0, 0, 100)])[0], case.cut(0, [1], FullAttentionSpec())):
        assert same(got[:50], before[:50])
        assert got[50:].isnan().all()


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.skipif(SERVED and torch.ops.tandem.orders()[0] != "tile32", reason="AMX does not serve here")
def test_amx_and_fma_have_the_same_bits(kv: str) -> None:
    """For every reach, with heads whose elements do not fill whole steps."""
    case = Case([570, 40], kv=kv, dims=(80, 96))
    parts = [(0, 100, 570), (1, 39, 40)]
    for reach in REACHES:
        by_amx = case.run(parts, reach)
        before = torch.ops.tandem.emulate(True)
        try:
            assert torch.ops.tandem.tiles() == "fma"
            by_fma = case.run(parts, reach)
        finally:
            torch.ops.tandem.emulate(before)
        assert all(map(same, by_amx, by_fma))


HEADS = [(1, 1), (9, 1), (8, 2), (3, 6), (5, 7), (2, 16), (1, 17)]  # of K and V, and queries of each: 16 fit a tile
EDGES = [1, 2, 15, 16, 17, 31, 33, 255, 256, 257, 300, 511, 512, 513]


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_single_queries_of_many_lengths_in_one_step(heads: tuple[int, int], kv: str) -> None:
    """Each has the bits of the last of its chunk, by one thread and by two, in any order, for blocks of any size, each
    of which meets all heads and kinds."""
    size = (16, 48, 5)[(HEADS.index(heads) + KINDS.index(kv)) % 3]
    case = Case(EDGES, kv=kv, size=size, kv_heads=heads[0], groups=heads[1], sinks=heads[0] == 3)
    for reach in (REACHES[0], REACHES[1], REACHES[4]):
        chunks = case.run([(index, 0, length) for index, length in enumerate(EDGES)], reach)
        singles = [(index, length - 1, length) for index, length in enumerate(EDGES)]
        for threads in (1, 2):
            with threads_of(threads):
                forward, backward = case.run(singles, reach), case.run(singles[::-1], reach)[::-1]
            assert all(same(one, chunk[-1:]) for one, chunk in zip(forward, chunks, strict=True))
            assert all(same(one, chunk[-1:]) for one, chunk in zip(backward, chunks, strict=True))


def test_few_rows_and_chunks_in_turn() -> None:
    """In one step, alternating: what was prepared for the next unit is used for that unit only."""
    case = Case([530, 270, 40, 300], kv_heads=3, groups=3)
    wholes = [case.run([(index, 0, length)])[0] for index, length in enumerate(case.lengths)]
    parts = [(0, 529, 530), (1, 0, 270), (2, 37, 40), (2, 38, 40), (3, 100, 300), (0, 300, 301), (0, 255, 256)]
    parts += [(1, 2, 9), (0, 255, 257)]
    for got, (index, start, end) in zip(case.run(parts), parts, strict=True):
        assert same(got, wholes[index][start:end])


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.skipif(SERVED and torch.ops.tandem.orders()[0] != "tile32", reason="AMX does not serve here")
def test_amx_and_fma_have_the_same_bits_for_single_queries(kv: str) -> None:
    """By the processor's tiles and by their emulation."""
    for size, dims in ((16, (64, 64)), (5, (80, 96)), (32, (128, 40))):
        case = Case(EDGES, kv=kv, size=size, dims=dims)
        singles = [(index, length - 1, length) for index, length in enumerate(EDGES)]
        for reach in REACHES:
            by_amx = case.run(singles, reach)
            before = torch.ops.tandem.emulate(True)
            try:
                by_fma = case.run(singles, reach)
            finally:
                torch.ops.tandem.emulate(before)
            assert all(map(same, by_amx, by_fma))


def test_threads_do_not_change_bits() -> None:
    """One thread and two threads split a chunk's tasks differently."""
    case = Case([570, 40, 301])
    parts = [(0, 100, 570), (1, 39, 40), (2, 300, 301)]
    with threads_of(1):
        single = case.run(parts)
    with threads_of(2):
        assert all(map(same, case.run(parts), single))


def test_the_comparison_catches_another_order() -> None:
    """The same sums in the order `pairs` are as accurate and have other bits."""
    case = Case([300])
    ours = case.run([(0, 0, 300)])[0]
    torch.ops.tandem.use_order("pairs")
    theirs = case.run([(0, 0, 300)])[0]
    assert (ours.float() - theirs.float()).abs().max() < 0.05
    assert not same(ours, theirs)
