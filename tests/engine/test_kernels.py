"""The compiled operators against float64, at the edges of their vectors and tiles, and bit by bit across batches."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from engine import kernels
from engine.facts import CallFacts, Full
from engine.kernels import modules
from engine.model import Model
from engine.pages import Pages, layout_of
from engine.selfcheck import pack
from tandem.errors import CheckpointRefused

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
ERROR = {torch.float32: 2e-6, torch.bfloat16: 2**-8}  # rounding of float32 sums; half a unit of the result

built = pytest.mark.skipif(
    kernels.serving(CPU) == kernels.REFERENCE, reason="not built: python -m engine.kernels.build"
)


def ops() -> torch._ops._OpNamespace:
    return torch.ops.tandem


def close(ours: torch.Tensor, exact: torch.Tensor, scale: float = 1.0) -> None:
    """`scale` is the size of what was summed, whose float32 rounding stays where the sum itself is small."""
    assert ours.dtype in ERROR
    gap = (ours.double() - exact).abs()
    assert (gap <= ERROR[ours.dtype] * exact.abs() + 2e-6 * scale).all(), gap.max()


# ---- linear


@built
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (5, 17), (64, 31), (66, 32), (7, 33), (50, 576), (9, 1000)])
def test_linear(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Every number of rows, sizes off every tile, with bias and without."""
    columns, inner = shape
    weight, bias = torch.randn(columns, inner).to(dtype), torch.randn(columns).to(dtype)
    for rows in [*range(1, 34), 64]:
        x = torch.randn(1, rows, inner).to(dtype)
        exact = x.double() @ weight.double().T
        close(ops().linear(x, weight, None, 64), exact, inner**0.5)
        close(ops().linear(x, weight, bias, 64), exact + bias.double(), inner**0.5)


@built
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_rows_do_not_depend_on_each_other(dtype: torch.dtype) -> None:
    """A row has the same bits alone, in any place, among any others, and with any number of threads."""
    weight, x = torch.randn(131, 203).to(dtype), torch.randn(33, 203).to(dtype)
    alone = torch.cat([ops().linear(row.unsqueeze(0), weight, None, 64) for row in x])
    for count in range(1, 34):
        assert torch.equal(ops().linear(x[:count], weight, None, 64), alone[:count])
        assert torch.equal(ops().linear(x[-count:], weight, None, 64), alone[-count:])
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        large = torch.randn(4099, 203).to(dtype)
        parallel = ops().linear(x, large, None, 64)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(parallel, ops().linear(x, large, None, 64))
    poisoned = x.clone()
    poisoned[5] = float("nan")
    got = ops().linear(poisoned, weight, None, 64)
    assert torch.equal(torch.cat([got[:5], got[6:]]), torch.cat([alone[:5], alone[6:]]))


@built
def test_linear_leaves_the_rest_to_torch() -> None:
    """Many rows, other types and strided weights give what torch gives; shapes that do not fit raise."""
    weight = torch.randn(20, 30)
    for x, w in [
        (torch.randn(65, 30), weight),
        (torch.randn(4, 30).half(), weight.half()),
        (torch.randn(4, 30).double(), weight.double()),
        (torch.randn(4, 20), weight.T),
        (torch.randn(0, 30), weight),
    ]:
        assert torch.equal(ops().linear(x, w, None, 64), torch.nn.functional.linear(x, w))
    strided = torch.randn(30, 4).T
    close(ops().linear(strided, weight, None, 64), strided.double() @ weight.double().T, 6)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        ops().linear(torch.randn(4, 15), weight, None, 64)


# ---- attention


class Case:
    """Pages full of NaN but for the tokens that are seen, and queries over them."""

    def __init__(
        self, dtype: torch.dtype, *, size: int, kv_heads: int, groups: int, k_dim: int, v_dim: int, lengths: list[int]
    ) -> None:
        facts = CallFacts(kv_heads, kv_heads * groups, k_dim, v_dim, Full(), None, False, 1.0)
        self.skip = [random.randrange(size) for _ in lengths]
        counts = [-(-(skip + length) // size) for skip, length in zip(self.skip, lengths, strict=True)]
        pages = Pages(layout_of([facts] * 2, size, dtype, ""), sum(counts) + 2, CPU)
        pages.buffer.fill_(255)
        self.k, self.v = pages.k(1), pages.v(1)
        ids = random.sample(range(sum(counts) + 2), sum(counts))
        self.tables = [[ids.pop() for _ in range(count)] for count in counts]
        self.lengths = lengths
        self.query = torch.randn(len(lengths), kv_heads * groups, k_dim).to(dtype)
        for index, (table, skip, length) in enumerate(zip(self.tables, self.skip, lengths, strict=True)):
            for at in range(skip, skip + length):
                self.k[table[at // size], at % size] = torch.randn(kv_heads, k_dim).to(dtype) + index
                self.v[table[at // size], at % size] = torch.randn(kv_heads, v_dim).to(dtype)

    def run(self, which: list[int], **options: object) -> torch.Tensor:
        """The result of these sequences as one batch."""
        width = max(len(self.tables[index]) for index in which)
        tables = [self.tables[index] + [10**9] * (width - len(self.tables[index])) for index in which]
        columns = (range(len(which)), tables, [self.skip[i] for i in which], [self.lengths[i] for i in which])
        query = self.query[which]
        out = query.new_full((len(which), query.shape[1], self.v.shape[3]), float("nan"))
        arguments = {"scaling": 0.3, "softcap": None, "sinks": None, **options}
        ops().attend(out, query, self.k, self.v, *(torch.tensor(list(each)) for each in columns), **arguments)
        return out

    def exact(self, index: int, scaling: float, softcap: float | None, sinks: torch.Tensor | None) -> torch.Tensor:
        first, end = self.skip[index], self.skip[index] + self.lengths[index]
        groups = self.query.shape[1] // self.k.shape[2]
        k = self.k[self.tables[index]].flatten(0, 1)[first:end].double().repeat_interleave(groups, dim=1)
        v = self.v[self.tables[index]].flatten(0, 1)[first:end].double().repeat_interleave(groups, dim=1)
        logits = torch.einsum("hd,thd->ht", self.query[index].double(), k) * scaling
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        if sinks is not None:
            logits = torch.cat([logits, sinks.double().unsqueeze(1)], dim=1)
        weights = logits.softmax(dim=1)[:, : v.shape[0]]
        return torch.einsum("ht,thd->hd", weights, v)


SHAPES = [
    {"size": 4, "kv_heads": 1, "groups": 1, "k_dim": 8, "v_dim": 8},
    {"size": 16, "kv_heads": 3, "groups": 3, "k_dim": 64, "v_dim": 64},
    {"size": 5, "kv_heads": 2, "groups": 7, "k_dim": 24, "v_dim": 20},
    {"size": 16, "kv_heads": 2, "groups": 5, "k_dim": 80, "v_dim": 96},
    {"size": 1, "kv_heads": 1, "groups": 16, "k_dim": 33, "v_dim": 1},
]


@built
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sink", [False, True])
def test_attend(dtype: torch.dtype, shape: dict[str, int], softcap: float | None, sink: bool) -> None:
    """Any heads, dims, block size, start and length; what lies outside of a context is NaN here and never seen."""
    case = Case(dtype, **shape, lengths=[1, 2, 3, 4, 15, 16, 17, 33, 64, 70])  # type: ignore[arg-type]
    sinks = torch.randn(case.query.shape[1]) * 3 if sink else None
    got = case.run(list(range(10)), softcap=softcap, sinks=sinks)
    exact = torch.stack([case.exact(index, 0.3, softcap, sinks) for index in range(10)])
    close(got, exact, scale=10.0)


@built
@pytest.mark.parametrize("dtype", DTYPES)
def test_attend_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    """A sequence has the same bits alone and in any company, and over other block ids and another start."""
    case = Case(dtype, size=4, kv_heads=2, groups=3, k_dim=40, v_dim=40, lengths=[9, 30, 1, 57, 16])
    together = case.run([0, 1, 2, 3, 4])
    for which in ([0], [1], [4, 2], [3, 0, 1]):
        assert torch.equal(case.run(which), together[which])
    order = torch.randperm(case.k.shape[0])
    case.k, case.v = case.k[order], case.v[order]
    where = {int(old): new for new, old in enumerate(order)}
    case.tables = [[where[block] for block in table] for table in case.tables]
    assert torch.equal(case.run([0, 1, 2, 3, 4]), together)


@built
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_logits(dtype: torch.dtype) -> None:
    """Logits of thousands neither overflow nor vanish: the highest takes all."""
    case = Case(dtype, size=4, kv_heads=1, groups=2, k_dim=16, v_dim=16, lengths=[37])
    got = case.run([0], scaling=1000.0)
    close(got, case.exact(0, 1000.0, None, None).unsqueeze(0), scale=100.0)


@built
@pytest.mark.parametrize("dtype", DTYPES)
def test_write(dtype: torch.dtype) -> None:
    """New tokens land in their slots and nowhere else, from any strides."""
    facts = CallFacts(3, 3, 10, 6, Full(), None, False, 1.0)
    pages = Pages(layout_of([facts] * 2, 4, dtype, ""), 7, CPU)
    expected = pages.k(1).clone()
    for fresh in (torch.randn(5, 3, 10), torch.randn(3, 5, 10).transpose(0, 1), torch.randn(5, 10, 3).transpose(1, 2)):
        fresh = fresh.to(dtype)
        block, offset = torch.tensor([6, 0, 3, 3, 2]), torch.tensor([0, 3, 1, 2, 3])
        ops().write(pages.k(1), fresh, block, offset)
        expected[block, offset] = fresh
        assert torch.equal(pages.k(1), expected)
        assert not pages.v(1).any()
        assert not pages.k(0).any()


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
    """The compiled forward comes and goes; a module's type still passes for its own."""
    model = nn.Sequential(nn.Linear(8, 8), Scaled(torch.float32, 0.0, False), nn.LayerNorm(8))
    types = [type(module) for module in model]
    modules.prepare(model)
    for _ in range(2):
        modules.switch(model, True)
        assert [isinstance(module, modules.Compiled) for module in model] == [True, True, False]
    assert all(isinstance(module, kind) for module, kind in zip(model, types, strict=True))
    modules.switch(model, False)
    assert [type(module) for module in model] == types


@built
def test_packing_keeps_every_weight() -> None:
    """Packed parameters hold the same bits, tied ones stay tied, strided ones stay where they are."""
    model = nn.ModuleList([nn.Linear(5, 7), nn.Embedding(7, 5), nn.LayerNorm(5), nn.Linear(5, 7, dtype=torch.bfloat16)])
    model[1].weight.data = model[0].weight.data
    model[2].weight.data = torch.randn(5, 2)[:, 0]
    before = [parameter.detach().clone() for parameter in model.parameters()]
    strided = model[2].weight.data_ptr()
    modules.pack(model)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert model[0].weight.data_ptr() == model[1].weight.data_ptr()
    assert model[2].weight.data_ptr() == strided
    assert all(parameter.data_ptr() % 64 == 0 for parameter in model.parameters() if parameter.is_contiguous())


@built
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_product_is_refused(
    dtype: torch.dtype, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product that is wrong in one column does not serve, in 16 bits either."""
    folder, real = str(checkpoint("tiny-qwen2")), torch.ops.tandem.linear.default

    class Broken:
        @staticmethod
        def default(x: torch.Tensor, weight: torch.Tensor, *rest: object) -> torch.Tensor:
            out = real(x, weight, *rest)
            out[..., -1] += weight.std() * weight.shape[1] ** 0.5
            return out

    monkeypatch.setattr(torch.ops.tandem, "linear", Broken)
    with pytest.raises(CheckpointRefused, match="compiled product"):
        Model.load(folder, dtype=dtype, device=CPU)
    assert Model.load(folder, dtype=dtype, device=CPU, kernels="reference").kernels == kernels.REFERENCE


@built
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ["tiny-llama", "tiny-qwen3-sliding", "tiny-gemma2", "tiny-phi3"])
def test_decode_does_not_depend_on_the_batch(shape: str, dtype: torch.dtype, checkpoint: Callable[[str], Path]) -> None:
    """A sequence's decode logits have the same bits alone and beside others, of other lengths, in any place."""
    model = Model.load(str(checkpoint(shape)), dtype=dtype, device=CPU)
    assert model.kernels == kernels.serving(CPU)
    pages = model.allocate(60, 4)
    sequences = []
    for length in (5, 23, 1, 40, 9):
        blocks = [len(sequences) * 12 + index for index in range(11)]
        tokens = [random.randrange(model.vocab_size) for _ in range(length + 1)]
        if length > 1:
            model.forward(pages, pack([(tokens[:length], 0, blocks)]))
        sequences.append((tokens[: max(length, 1) + (length > 1)], length if length > 1 else 0, blocks))
    together = model.forward(pages, pack(sequences))
    for which in ([0], [1], [2], [3], [4, 0], [3, 2, 1]):
        assert torch.equal(model.forward(pages, pack([sequences[index] for index in which])), together[which])


@built
def test_the_oracle_is_free_of_our_operators(checkpoint: Callable[[str], Path]) -> None:
    """What the self-check compares with is transformers' forward, bit for bit."""
    folder = checkpoint("tiny-llama")
    model = Model.load(str(folder), dtype=torch.float32, device=CPU)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ids = torch.tensor([[5, 9, 2, 77, 31]])
    model.use_eager_attention()
    with torch.inference_mode():
        assert torch.equal(model.module(ids).logits, plain(ids).logits)
        model.use_paged_attention()
        assert any(isinstance(module, modules.Compiled) for module in model.module.modules())


def test_without_a_library_the_reference_serves_and_says_so(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Nothing built: one warning, and the model reports the reference."""
    monkeypatch.setattr("engine.kernels.build.library", lambda: tmp_path / "none.so")
    kernels._load.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            models = [
                Model.load(str(checkpoint("tiny-llama")), dtype=torch.float32, device=CPU, kernels=which)
                for which in ("auto", "auto", "reference")
            ]
    finally:
        kernels._load.cache_clear()
    assert [model.kernels for model in models] == [kernels.REFERENCE] * 3
    assert len([record for record in caplog.records if "engine.kernels.build" in record.message]) == 1
    assert not any(isinstance(module, modules.Compiled) for module in models[0].module.modules())
