"""The compiled operators against float64, at the edges of their vectors and tiles, and bit by bit across batches."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import random
import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import cpp_extension
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from engine import kernels
from engine.decoding.sampler import sample
from engine.kernels import build, modules, weight_quantization
from engine.kernels.replacement import Compiled
from engine.kv.kv_cache import KvCache, layout_of
from engine.kv.kv_cache_spec import (
    CallFacts,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    Reach,
    SlidingWindowSpec,
    first_visible,
)
from engine.loading.model_loader import load_model
from tandem.errors import CheckpointRefused
from tandem.sampling import Sampling

CPU = torch.device("cpu")
FULL = FullAttentionSpec()
DTYPES = [torch.float32, torch.bfloat16]
ERROR = {torch.float32: 2e-6, torch.bfloat16: 2**-8}  # rounding of float32 sums; half a unit of the result

built = pytest.mark.skipif(
    kernels.serving(CPU) == kernels.REFERENCE, reason="not built: python -m engine.kernels.build"
)


@built
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names levels of x86-64")
@pytest.mark.parametrize("level", ["x86-64", "x86-64-v3"])
def test_what_differs_by_instruction_set_compiles_for_the_others(level: str) -> None:
    """The build machine compiles one branch of each; a worker elsewhere must have operators, too. Once for each state
    of the sources, compiler and torch: a mark beside the compiled operators, which a clean clone does not have."""
    options = [option for option in build.OPTIONS if not option.startswith("-O")]
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    compiler = [*shlex.split(os.environ.get("CXX", "c++")), *options, f"-march={level}", *includes, "-fsyntax-only"]
    both = "".join(
        f'#include "{build.HERE / source}"\n' for source in ("lowbit.cpp", "rows.cpp", "sampling.cpp")
    )  # torch's headers once
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
    state = hashlib.sha256(repr((compiler, version, torch.__version__, both)).encode())
    for name in (*build.HEADERS, *build.SOURCES):
        state.update((build.HERE / name).read_bytes())
    mark = build.FOLDER / f"compiles-{level}-{state.hexdigest()[:16]}"
    if mark.exists():
        return
    done = subprocess.run([*compiler, "-xc++", "-"], input=both, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[:2000]
    mark.touch()


def ops() -> torch._ops._OpNamespace:
    return torch.ops.tandem


def close(ours: torch.Tensor, exact: torch.Tensor, scale: float = 1.0, weights: float = 0.0) -> None:
    """`scale` is the size of the summands, whose float32 rounding remains where the sum is small.

    `weights` is the size of values whose weights, which add up to 1, were rounded to the type before the sum.
    """
    assert ours.dtype in ERROR
    gap = (ours.double() - exact).abs()
    rounding = ERROR[ours.dtype] / 2 * weights if ours.dtype == torch.bfloat16 else 0.0
    assert (gap <= ERROR[ours.dtype] * exact.abs() + 4e-6 * scale + rounding).all(), gap.max()


# ---- linear


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    found: torch.Tensor = ops().linear(x, ops().pack(weight), bias, *weight.shape)
    return found


@built
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (5, 17), (64, 31), (66, 32), (7, 33), (50, 576), (130, 1000)])
def test_linear(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Every number of rows, sizes that fill no tile, with bias and without, from strided rows and weights too."""
    columns, inner = shape
    weight, bias = torch.randn(columns, inner).to(dtype), torch.randn(columns).to(dtype)
    for rows in [*range(1, 14), 64, 100]:
        x = torch.randn(1, rows, inner).to(dtype)
        exact = x.double() @ weight.double().T
        close(linear(x, weight), exact, inner**0.5)
        close(linear(x, weight, bias), exact + bias.double(), inner**0.5)
    strided, turned = torch.randn(inner, 4).T.to(dtype), torch.randn(inner, columns).T.to(dtype)
    close(linear(strided, turned), strided.double() @ turned.double().T, inner**0.5)
    assert linear(torch.randn(0, inner).to(dtype), weight).shape == (0, columns)


@built
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_rows_do_not_depend_on_each_other(dtype: torch.dtype) -> None:
    """A row has the same bits alone, in any place, among any others, and with any number of threads."""
    weight, x = torch.randn(131, 203).to(dtype), torch.randn(300, 203).to(dtype)
    alone = torch.cat([linear(row.unsqueeze(0), weight) for row in x])
    for count in [*range(1, 34), 100, 299, 300]:
        assert torch.equal(linear(x[:count], weight), alone[:count])
        assert torch.equal(linear(x[-count:], weight), alone[-count:])
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(linear(x, weight), alone)
        large = torch.randn(4099, 203).to(dtype)
        parallel = linear(x, large)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(parallel, linear(x, large))
    poisoned = x.clone()
    poisoned[5] = float("nan")
    got = linear(poisoned, weight)
    assert torch.equal(torch.cat([got[:5], got[6:]]), torch.cat([alone[:5], alone[6:]]))


@built
def test_linear_refuses_what_it_does_not_serve() -> None:
    """Other types, a row of another length, panels of another shape: an error, never a read of other memory."""
    weight = torch.randn(20, 30)
    with pytest.raises(RuntimeError, match="float32 or bfloat16"):
        ops().pack(weight.double())
    packed = ops().pack(weight)
    with pytest.raises(RuntimeError, match="rows have 30"):
        ops().linear(torch.randn(4, 29), packed, None, 20, 30)
    for x in (torch.randn(4, 31), torch.randn(4, 30).bfloat16()):
        with pytest.raises(RuntimeError, match="not packed for this size or type"):
            ops().linear(x, packed, None, 20, x.shape[1])
    with pytest.raises(RuntimeError, match="bias"):
        ops().linear(torch.randn(4, 30), packed, torch.randn(20).bfloat16(), 20, 30)


# ---- attention


class Case:
    """Pages full of NaN but for the tokens of some sequences, and queries for the last of these."""

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        size: int,
        kv_heads: int,
        groups: int,
        k_dim: int,
        v_dim: int,
        lengths: list[int],
        queries: list[int] | None = None,
    ) -> None:
        facts = CallFacts(kv_heads, kv_heads * groups, k_dim, v_dim, FullAttentionSpec(), None, False, 1.0)
        counts = [-(-length // size) for length in lengths]
        pages = KvCache(layout_of([facts] * 2, size, dtype, ""), sum(counts) + 2, CPU)
        pages.buffer.fill_(255)
        self.k, self.v = pages.k[1], pages.v[1]
        ids = random.sample(range(sum(counts) + 2), sum(counts))
        self.tables = [[ids.pop() for _ in range(count)] for count in counts]
        self.lengths = lengths
        self.queries = queries or [1] * len(lengths)
        self.query = [torch.randn(count, kv_heads * groups, k_dim).to(dtype) for count in self.queries]
        for index, (table, length) in enumerate(zip(self.tables, lengths, strict=True)):
            for at in range(length):
                self.k[table[at // size], at % size] = torch.randn(kv_heads, k_dim).to(dtype) + index
                self.v[table[at // size], at % size] = torch.randn(kv_heads, v_dim).to(dtype)

    def run(self, which: list[int], reach: Reach = FULL, **options: object) -> list[torch.Tensor]:
        """The results of these sequences as one batch, `[queries, heads, v_dim]` each."""
        width = max(len(self.tables[index]) for index in which)
        tables = [self.tables[index] + [10**9] * (width - len(self.tables[index])) for index in which]
        counts = [self.queries[index] for index in which]
        columns = ([0, *accumulate(counts)], [self.lengths[i] for i in which], tables)
        query = torch.cat([self.query[index] for index in which])
        out = query.new_full((len(query), query.shape[1], self.v.shape[3]), float("nan"))
        arguments = {"scaling": 0.3, "softcap": None, "sinks": None, **options}
        window = reach.window if isinstance(reach, SlidingWindowSpec) else 0
        chunk = reach.size if isinstance(reach, ChunkedLocalAttentionSpec) else 0
        tensors = (torch.tensor(list(each), dtype=torch.int32) for each in columns)
        ops().attend(out, query, self.k, self.v, *tensors, window=window, chunk=chunk, **arguments)
        return list(out.split(counts))

    def exact(
        self, index: int, scaling: float, softcap: float | None, sinks: torch.Tensor | None, reach: Reach = FULL
    ) -> torch.Tensor:
        length, count = self.lengths[index], self.queries[index]
        groups = self.query[index].shape[1] // self.k.shape[2]
        k = self.k[self.tables[index]].flatten(0, 1)[:length].double().repeat_interleave(groups, dim=1)
        v = self.v[self.tables[index]].flatten(0, 1)[:length].double().repeat_interleave(groups, dim=1)
        logits = torch.einsum("qhd,thd->qht", self.query[index].double(), k) * scaling
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        key, position = torch.arange(length), torch.arange(length - count, length).view(-1, 1, 1)
        logits = logits.masked_fill((key > position) | (key < first_visible(reach, position)), float("-inf"))
        if sinks is not None:
            logits = torch.cat([logits, sinks.double().view(1, -1, 1).expand(count, -1, 1)], dim=2)
        weights = logits.softmax(dim=2)[..., :length]
        return torch.einsum("qht,thd->qhd", weights, v)


SHAPES = [
    {"size": 4, "kv_heads": 1, "groups": 1, "k_dim": 8, "v_dim": 8},
    {"size": 16, "kv_heads": 3, "groups": 3, "k_dim": 64, "v_dim": 64},
    {"size": 5, "kv_heads": 2, "groups": 7, "k_dim": 24, "v_dim": 20},
    {"size": 16, "kv_heads": 2, "groups": 5, "k_dim": 80, "v_dim": 96},
    {"size": 1, "kv_heads": 1, "groups": 16, "k_dim": 33, "v_dim": 1},
]
LENGTHS = [1, 2, 3, 4, 15, 16, 17, 33, 64, 70]
QUERIES = [1, 2, 1, 3, 15, 1, 5, 33, 1, 41]


@built
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("reach", [FULL, SlidingWindowSpec(19), ChunkedLocalAttentionSpec(12)], ids=str)
def test_attend(dtype: torch.dtype, shape: dict[str, int], softcap: float | None, sink: bool, reach: Reach) -> None:
    """Any heads, dims, block size, start and length; slots outside of a context are NaN here and never read."""
    torch.manual_seed(0)  # the bound is for typical numbers: unseeded, one run in about a hundred exceeded it
    case = Case(dtype, **shape, lengths=LENGTHS, queries=QUERIES)  # type: ignore[arg-type]
    sinks = torch.randn(case.query[0].shape[1]) * 3 if sink else None
    got = case.run(list(range(10)), reach, softcap=softcap, sinks=sinks)
    for index in range(10):
        close(got[index], case.exact(index, 0.3, softcap, sinks, reach), scale=10.0, weights=5.0)


@built
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reach", [FULL, SlidingWindowSpec(19), ChunkedLocalAttentionSpec(12)], ids=str)
def test_attend_does_not_depend_on_the_batch(dtype: torch.dtype, reach: Reach) -> None:
    """A token has the same bits alone and in any batch, over other block ids, and as the last of any chunk."""
    lengths = [9, 30, 1, 157, 16]
    case = Case(dtype, size=4, kv_heads=2, groups=3, k_dim=40, v_dim=40, lengths=lengths, queries=[9, 4, 1, 157, 1])
    together = case.run([0, 1, 2, 3, 4], reach)
    for which in ([0], [1], [4, 2], [3, 0, 1]):
        assert all(map(torch.equal, case.run(which, reach), [together[index] for index in which]))
    order = torch.randperm(case.k.shape[0])
    case.k, case.v = case.k[order], case.v[order]
    where = {int(old): new for new, old in enumerate(order)}
    case.tables = [[where[block] for block in table] for table in case.tables]
    assert all(map(torch.equal, case.run([0, 1, 2, 3, 4], reach), together))
    query = case.query[3]
    for length, count in [(157, 1), (157, 2), (100, 7), (70, 1), (21, 21), (1, 1), (64, 40)]:
        case.lengths[3], case.queries[3], case.query[3] = length, count, query[length - count : length]
        assert torch.equal(case.run([3], reach)[0], together[3][length - count : length])


@built
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_logits(dtype: torch.dtype) -> None:
    """Logits of thousands neither overflow nor vanish: the highest takes all the weight."""
    case = Case(dtype, size=4, kv_heads=1, groups=2, k_dim=16, v_dim=16, lengths=[37])
    close(case.run([0], scaling=1000.0)[0], case.exact(0, 1000.0, None, None), scale=100.0)


@built
@pytest.mark.parametrize("nbytes", [0, 1, 4097, (2 << 20) + 1])
def test_fresh_memory_begins_at_a_page(nbytes: int) -> None:
    """And at offset 0 of its storage, from which views of KV count. From a huge page's size on, at a huge page."""
    memory = kernels.fresh_memory(nbytes)
    assert memory.shape == (nbytes,)
    assert memory.storage_offset() == 0
    assert memory.data_ptr() % (4096 if nbytes < 2 << 20 else 2 << 20) == 0


@built
@pytest.mark.parametrize("dtype", DTYPES)
def test_write(dtype: torch.dtype) -> None:
    """New tokens land in their slots and nowhere else, from any strides."""
    facts = CallFacts(3, 3, 10, 6, FullAttentionSpec(), None, False, 1.0)
    pages = KvCache(layout_of([facts] * 2, 4, dtype, ""), 7, CPU)
    expected = pages.k[1].clone()
    for fresh in (torch.randn(5, 3, 10), torch.randn(3, 5, 10).transpose(0, 1), torch.randn(5, 10, 3).transpose(1, 2)):
        fresh = fresh.to(dtype)
        block, offset = torch.tensor([6, 0, 3, 3, 2]), torch.tensor([0, 3, 1, 2, 3])
        ops().write(pages.k[1], fresh, block, offset)
        expected[block, offset] = fresh
        assert torch.equal(pages.k[1], expected)
        assert not pages.v[1].any()
        assert not pages.k[0].any()


# ---- torch's own operators in a step

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{name: getattr(torch, name) for name in ("cos", "erf", "exp", "sigmoid", "sin", "tanh")},
    "silu": F.silu,
    "silu in place": lambda x: F.silu(x.clone(), inplace=True),
    "gelu": F.gelu,
    "gelu by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
}


@built
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_elementwise_functions_in_a_step(dtype: torch.dtype, name: str) -> None:
    """Right, also if strided; an element has the same bits at any place. Outside of a step torch's own serve."""
    f, x = FUNCTIONS[name], torch.cat([torch.randn(333) * 3, torch.tensor([300.0, -300.0, 0.0])]).to(dtype)
    if name in ("exp", "softplus"):
        x = x.clamp(-20, 20)
    own = f(x)
    with kernels.exact(CPU):
        got, strided = f(x), f(x.view(2, -1).T).T.reshape(-1)
        pieces = torch.cat([f(piece) for piece in x.split([1, 2, 30, 5, 64, 17, 200, 17])])
    assert torch.equal(got, strided)
    assert torch.equal(got, pieces)
    exact = f(x.double())
    assert ((got.double() - exact).abs() <= (ERROR[dtype] * exact.abs()).clamp(min=1e-6)).all()
    assert torch.equal(f(x), own)


@built
def test_torchs_own_elementwise_functions_do_depend() -> None:
    """The comparison above catches torch's own in some cases."""
    x = torch.randn(4111) * 50
    assert any(not torch.equal(torch.cat([f(each) for each in x.split(7)]), f(x)) for f in FUNCTIONS.values())


@built
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [1, 7, 100])
def test_products_in_a_step(dtype: torch.dtype, inner: int) -> None:
    """mm, addmm and bmm are right with weights of any strides, and their rows do not depend on each other."""
    x, w, bias = torch.randn(77, inner).to(dtype), torch.randn(inner, 39).to(dtype), torch.randn(39).to(dtype)
    for weight in (w, w.T.contiguous().T, torch.stack([w, w], 2)[..., 0]):
        stacked = weight.unsqueeze(0).expand(3, -1, -1)
        with kernels.exact(CPU):
            got = x @ weight
            assert torch.equal(got, torch.cat([row @ weight for row in x.split(1)]))
            added = torch.addmm(bias, x, weight)
            batched = torch.bmm(torch.stack([x, -x, x]), stacked)
            into = torch.mm(x, weight, out=x.new_empty(0))
        exact = x.double() @ w.double()
        close(got, exact, inner**0.5)
        close(added, exact.to(dtype).double() + bias.double(), inner**0.5 * (1 if dtype == torch.float32 else 2000))
        assert torch.equal(batched, torch.stack([got, -got, got]))
        assert torch.equal(into, got)


# ---- norms


class Scaled(nn.Module):
    """An RMS norm in one of its forms."""

    def __init__(self, dtype: torch.dtype, offset: float, round_first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(77) - offset).to(dtype))
        self.some_name, self.offset, self.round_first = 1e-5, offset, round_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.some_name)
        weight = self.weight.float() + self.offset
        return (weight * (normed.to(x.dtype).float() if self.round_first else normed)).to(x.dtype)


class Centred(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class OtherEps(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.some_name = 1e-6
        try:
            return super().forward(x)
        finally:
            self.some_name = 1e-5


@built
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("round_first", [False, True])
def test_rms_norms_are_found_by_what_they_do(dtype: torch.dtype, offset: float, round_first: bool) -> None:
    """Each form is recognised with its own constants; what is nearly one is not."""
    norm = Scaled(dtype, offset, round_first)
    found = modules.rms_norm_of(norm)
    assert found is not None
    assert found[:2] == (1e-5, offset)
    if dtype != torch.float32:
        assert found[2] == round_first
    assert modules.rms_norm_of(Centred(dtype, offset, round_first)) is None
    assert modules.rms_norm_of(OtherEps(dtype, offset, round_first)) is None
    assert modules.rms_norm_of(nn.LayerNorm(77, dtype=dtype)) is None
    assert modules.rms_norm_of(nn.Linear(77, 77, bias=False, dtype=dtype)) is None
    assert modules.rms_norm_of(nn.Embedding(77, 77, dtype=dtype)) is None


@built
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 16, 100, 576])
def test_rms_norm(dtype: torch.dtype, width: int) -> None:
    """Right at every width, and a row has the same bits in any batch."""
    x, weight = torch.randn(2, 9, width).to(dtype), torch.randn(width).to(dtype)
    got = ops().rms_norm(x, weight, 1e-5, 1.0, False)
    wide = x.double()
    close(got, wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * (weight.double() + 1))
    assert torch.equal(ops().rms_norm(x[1, 3], weight, 1e-5, 1.0, False), got[1, 3])


# ---- in a model


@built
def test_switching_keeps_the_modules() -> None:
    """The compiled forward is switched on and off; a module is still an instance of its own type."""
    model = nn.Sequential(nn.Linear(8, 8), Scaled(torch.float32, 0.0, False), nn.LayerNorm(8))
    types = [type(module) for module in model]
    modules.prepare(model)
    for _ in range(2):
        modules.switch(model, True)
        assert [isinstance(module, Compiled) for module in model] == [True, True, False]
    assert all(isinstance(module, kind) for module, kind in zip(model, types, strict=True))
    modules.switch(model, False)
    assert [type(module) for module in model] == types


@built
def test_packing_leaves_the_weights_alone() -> None:
    """A weight reads as before; tied weights are packed once; other layers are not packed."""
    model = nn.ModuleList([nn.Linear(5, 7), nn.Linear(5, 7), nn.Embedding(7, 5), nn.Linear(5, 7, dtype=torch.float64)])
    model[1].weight = model[0].weight
    before = [parameter.detach().clone() for parameter in model.parameters()]
    modules.pack(model)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert modules._PACKED not in model[2].__dict__ | model[3].__dict__
    assert model[0].__dict__[modules._PACKED][0] is model[1].__dict__[modules._PACKED][0]
    layer = Conv1D(7, 5)
    modules.pack(layer)
    x = torch.randn(3, 5)
    torch.testing.assert_close(modules.multiply(layer, x), layer(x))


@built
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (64, 31), (50, 576), (130, 1000)])
def test_a_row_of_panels_is_the_row_of_the_weight(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Bit for bit; an id that has none is refused."""
    weight = torch.randn(shape).to(dtype)
    packed = ops().pack(weight)
    ids = torch.randint(0, shape[0], (2, 9))
    assert torch.equal(ops().look_up(ids, packed, *shape), weight[ids])
    for wrong in (-1, shape[0]):
        with pytest.raises(IndexError):
            ops().look_up(torch.tensor([wrong]), packed, *shape)


@built
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_in_place_only_what_others_read_is_left(dtype: torch.dtype) -> None:
    """A product and an embedding that is tied to one keep the panels alone; an embedding that does more than look up
    keeps its table."""

    class Scaled(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return 3 * super().forward(ids)

    model = nn.ModuleList(
        [nn.Linear(5, 7), nn.Embedding(7, 5), nn.Linear(5, 7, bias=False), Scaled(7, 5), nn.Linear(5, 6)]
    ).to(dtype)
    model[1].weight, model[3].weight = model[0].weight, model[2].weight
    ids, x = torch.randint(0, 7, (4,)), torch.randn(3, 5).to(dtype)
    with torch.inference_mode():
        before = [model[at](ids if at in (1, 3) else x) for at in range(5)]
        dropped = weight_quantization.pack_in_place(model)
        modules.switch(model, True)
        for at, expected in enumerate(before):
            torch.testing.assert_close(model[at](ids if at in (1, 3) else x), expected)
    left = [not kernels.is_nothing(model[at].weight) for at in range(5)]
    assert left == [False, False, True, True, False]
    assert dropped == (7 + 6) * 5 * x.element_size()


@built
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_product_is_refused(
    dtype: torch.dtype, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product that is wrong in one column does not serve, nor in 16 bits."""
    folder, real = str(checkpoint("tiny-qwen2")), torch.ops.tandem.linear.default

    class Broken:
        @staticmethod
        def default(x: torch.Tensor, weight: torch.Tensor, *rest: object) -> torch.Tensor:
            out = real(x, weight, *rest)
            out[..., -1] += 10 * out.std()
            return out

    monkeypatch.setattr(torch.ops.tandem, "linear", Broken)
    with pytest.raises(CheckpointRefused, match="compiled product"):
        load_model(folder, dtype=dtype, device=CPU)
    assert load_model(folder, dtype=dtype, device=CPU, kernels="reference").kernels == kernels.REFERENCE


@built
def test_the_oracle_is_free_of_our_operators(checkpoint: Callable[[str], Path]) -> None:
    """The self-check's reference is transformers' forward, bit for bit."""
    folder = checkpoint("tiny-llama")
    model = load_model(str(folder), dtype=torch.float32, device=CPU)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ids = torch.tensor([[5, 9, 2, 77, 31]])
    model.use_eager_attention()
    with torch.inference_mode():
        assert torch.equal(model.module(ids).logits, plain(ids).logits)
        model.use_paged_attention()
        assert any(isinstance(module, Compiled) for module in model.module.modules())


def test_without_a_library_the_reference_serves_and_says_so(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Nothing built: one warning, and the model reports the reference."""
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.delenv(kernels.ONLY, raising=False)
    monkeypatch.setattr(kernels, "_loaded", None)
    with caplog.at_level(logging.WARNING):
        models = [
            load_model(str(checkpoint("tiny-llama")), dtype=torch.float32, device=CPU, kernels=which)
            for which in ("auto", "auto", "reference")
        ]
    assert [(model.kernels, model.sum_order) for model in models] == [(kernels.REFERENCE, kernels.PLAIN)] * 3
    assert len([record for record in caplog.records if "engine.kernels.build" in record.message]) == 1
    assert not any(isinstance(module, Compiled) for module in models[0].module.modules())


# ---- choosing tokens

VALUES: dict[str, list[Any]] = {
    "temperature": [0.0, 0.05, 0.7, 1.0, 2.0],
    "top_k": [0, 1, 2, 40, 3000, 10**9],
    "top_p": [1.0, 0.999999, 0.95, 0.5, 1e-9],
    "min_p": [0.0, 1e-6, 0.1, 1.0],
}


@built
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 4.0, 30.0])
@pytest.mark.parametrize("vocab", [1, 7, 256, 257, 5003, 40_000])
def test_tokens_are_chosen_as_plain_pytorch_chooses_them(vocab: int, spread: float) -> None:
    """Any filters, flat rows and steep ones, ties, masked tokens, and any number of threads."""
    chance = random.Random(f"{vocab} {spread}")
    logits = torch.randn(24, vocab, generator=torch.Generator().manual_seed(vocab)) * spread
    logits[::3] = logits[::3].round()  # ties
    logits[1::3, 1 : vocab // 2] = -torch.inf  # masked by a grammar
    how = [Sampling(seed=row, **{name: chance.choice(values) for name, values in VALUES.items()}) for row in range(24)]
    found = []
    for threads in (1, 2, 3):
        with threads_of(threads):
            found.append(sample(logits, how, [9] * 24))
    assert found == [sample(logits, how, [9] * 24, compiled=False)] * 3
    assert found[0] == [sample(logits[row : row + 1], how[row : row + 1], [9])[0] for row in range(24)]


@contextmanager
def threads_of(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@built
@pytest.mark.parametrize("count", [0, 1, 63, 64, 100_000, 1 << 20])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_streaming_read_reads_every_element_once(count: int, threads: int) -> None:
    """Its sum of small integers is exact, for any length and number of threads."""
    t = torch.arange(count, dtype=torch.float32) % 7
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.ops.tandem.stream_read.default(t) == t.double().sum().item()
    finally:
        torch.set_num_threads(before)


@built
def test_a_streaming_read_refuses_what_is_not_one_piece() -> None:
    """A strided tensor, or one that is not float32."""
    for t in (torch.ones(4, 4).T, torch.ones(4, dtype=torch.bfloat16)):
        with pytest.raises(RuntimeError, match="contiguous float32"):
            torch.ops.tandem.stream_read.default(t)
