"""The products and norms of a GPU, by Triton's interpreter: their numbers, and that a row's bits follow from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

pytest.importorskip("triton", reason="Triton is for Linux on x86-64 and aarch64")

from engine.attention.forward_context import Batch
from engine.gpu import layers, products
from engine.gpu.attention.paged_attention import TritonAttention
from engine.gpu.products import Tiling, linear
from engine.kernels import modules
from engine.kv.kv_cache_spec import CallFacts, FullAttentionSpec, Reach, SlidingWindowSpec
from engine.loading.model_loader import load_model
from engine.runner import traced_forward
from loadtest.harness.random_checkpoints import make_checkpoint
from tests.engine.test_gpu_recording import SMALL

CPU = torch.device("cpu")
FEW, MANY = 3, products.FEW + 2  # rows: narrow tiles, and others


def operands(n: int, k: int, dtype: torch.dtype = torch.float32, rows: int = MANY) -> tuple[torch.Tensor, ...]:
    """x, weight, bias, and what is added."""
    generator = torch.Generator().manual_seed(n)
    shapes = ((rows, k), (n, k), (n,), (rows, n))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (70, 50), (40, 192)])
@pytest.mark.parametrize("rows", [FEW, MANY])
def test_it_computes_what_torch_computes(n: int, k: int, rows: int) -> None:
    """Small tiles and large ones, tiles that are not full, with a bias and what is added after it."""
    x, weight, bias, beside = operands(n, k, rows=rows)
    expected = F.linear(x, weight, bias) + beside
    assert (linear(x, weight, bias, beside) - expected).abs().max() / expected.std(correction=0).clamp(1) < 1e-5
    assert linear(x[:0], weight, bias).shape == (0, n)


def test_a_weight_may_lie_in_any_way() -> None:
    """Transposed, as a Conv1D has it, and rows of x that lie apart."""
    x, weight, bias, _ = operands(70, 50)
    apart = torch.zeros(MANY, 2, 70)
    apart[:, 0, :50] = x
    found = linear(apart[:, 0, :50], weight.T.contiguous().T, bias)
    assert torch.equal(found, linear(x, weight, bias))


@pytest.mark.parametrize("rows", [FEW, MANY])
def test_sixteen_bits_are_rounded_once_for_each_operation(rows: int) -> None:
    """The sum with its bias, then with what is added. (float16: the interpreter does not round to bfloat16.)"""
    x, weight, bias, beside = operands(40, 200, torch.float16, rows)
    alone = linear(x, weight, bias)
    exact = F.linear(x.double(), weight.double(), bias.double())
    assert ((alone.double() - exact).abs() <= exact.abs() * 2**-11 + 1e-4).all()
    assert torch.equal(linear(x, weight, bias, beside), alone + beside)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rows_bits_follow_from_the_row(dtype: torch.dtype) -> None:
    """Alone, among few and among many, in any place: bit for bit, by narrow tiles and by others."""
    x, weight, bias, beside = operands(40, 200, dtype)
    together = linear(x, weight, bias, beside)
    assert Tiling.of(1, 40, dtype, 90) != Tiling.of(MANY, 40, dtype, 90)
    for rows in (slice(5, 6), slice(1, 4), slice(0, products.FEW), slice(1, MANY)):
        assert torch.equal(linear(x[rows], weight, bias, beside[rows]), together[rows]), rows
    assert torch.equal(linear(x.flip(0), weight, bias, beside.flip(0)), together.flip(0))


@pytest.mark.parametrize("reach", [FullAttentionSpec(), SlidingWindowSpec(128), SlidingWindowSpec(4096)], ids=str)
def test_a_recording_is_compared_in_steps_of_every_tile(reach: Reach) -> None:
    """Each tile is a kernel of its own: the first request with as many tokens would wait for the compiler. Control:
    where torch's products serve, there is one forward for all and no further step."""
    facts = (CallFacts(8, 32, 128, 128, reach, None, False, 0.1),)
    model: Any = SimpleNamespace(max_model_len=8192, facts=facts, lora=None, vocab_size=99, cuda_products=True)
    rows = [len(batch.token_ids) for batch in traced_forward._batches(model)[1:]]

    def tiles(counts: list[int]) -> set[int]:
        return {Tiling.of(count, 4096, torch.bfloat16, 90).rows for count in counts}

    assert tiles(rows) == tiles([1, 40, 200])
    model.cuda_products = False
    assert len(traced_forward._batches(model)) == len(rows) - 1


@pytest.mark.parametrize("count", [1, 3, 4, 5])
def test_layers_of_the_same_rows_are_few_products(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to three of those that lie one after another in memory are one, with the same bits."""
    x, weight, bias, _ = operands(70, 50)
    widths = [10 + at for at in range(count)]
    weights, biases = (list(torch.split(each[: sum(widths)], widths)) for each in (weight, bias))
    apart = [linear(x, *each) for each in zip(weights, biases, strict=True)]
    launched: list[int] = []

    def noted(x: torch.Tensor, weight: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        launched.append(len(weight))
        return linear(x, weight, *given, **named)

    monkeypatch.setattr(products, "linear", noted)
    found = products.siblings(x, weights, biases, widths, 50)
    assert all(torch.equal(*pair) for pair in zip(found, apart, strict=True))
    assert launched == [sum(part) for part in (widths[:3], widths[3:]) if part]


def test_control_with_sums_that_follow_from_the_step_the_bits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one order is for: the same row among few others is summed in another one. The trial at load sees it."""
    x, weight, _, _ = operands(40, 100, rows=4)
    together = linear(x, weight, None)
    model = nn.Sequential(module_of(weight))
    assert layers.adopt(model).startswith(layers.NAME)
    of = Tiling.of
    monkeypatch.setattr(Tiling, "of", lambda rows, *more: replace(of(rows, *more), depth=16 if rows < 5 else 32))
    assert not torch.equal(linear(x[:1], weight, None), together[:1])
    why = "torch, because Triton's product with a weight of 40 x 100 in float32 gives a row other bits among 1"
    assert layers.adopt(model) == why


def module_of(weight: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(*reversed(weight.shape), bias=False, dtype=weight.dtype)
    layer.weight.data = weight
    return layer


def test_a_product_that_is_wrong_does_not_serve(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All of the model's are torch's then, and the log says so; the same for one that fails."""
    model = nn.Sequential(nn.Linear(40, 48), nn.Linear(48, 16))
    assert layers.adopt(model) == "cuda (triton), 2 products and 0 norms"
    for wrong, why in (
        (lambda *given: linear(*given) * 1.01, "differs from torch's by"),
        (lambda *given: linear(*given).float().log(), "differs from torch's by nan"),
        (None, "fails: 'NoneType' object is not callable"),
    ):
        monkeypatch.setattr(products, "linear", wrong)
        model = nn.Sequential(nn.Linear(40, 48), nn.Linear(48, 16))
        assert why in layers.adopt(model)
        assert "bits that may follow from a token's batch" in caplog.text
        assert not any(modules.REPLACEMENT in module.__dict__ for module in model)
    assert layers.prepare(model, CPU) == "torch, because the device is cpu"


@pytest.mark.parametrize("size", [16, 100, 2048])
def test_a_norms_bits_follow_from_the_row(size: int) -> None:
    """And its numbers are those of its formula, with rows that lie apart in memory."""
    generator = torch.Generator().manual_seed(size)
    x, weight = torch.randn(9, 3, size, generator=generator)[:, 1:], torch.randn(size, generator=generator)
    found = products.rms_norm(x, weight, 1e-6, 1.0, False)
    expected = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (weight + 1)
    assert (found - expected).abs().max() < 1e-5
    assert torch.equal(products.rms_norm(x[7:8], weight, 1e-6, 1.0, False), found[7:8])
    assert torch.equal(products.rms_norm(x.flip(0), weight, 1e-6, 1.0, False), found.flip(0))


@pytest.fixture(autouse=True, scope="module")
def short_trials() -> Iterator[None]:
    """With fewer rows, for the interpreter takes its time; both kinds of tiles are among them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "ROWS", (1, 5, MANY))
        yield


def test_a_models_logits_have_the_same_bits_in_any_step(tmp_path: Path) -> None:
    """With Triton's attention, products and norms: as a single token among others, alone, and at the end of a prompt
    that is computed at once. They are those of the plain model within rounding."""
    made = make_checkpoint(tmp_path / "m", "tiny-qwen3", dtype="float32", **SMALL)
    model = load_model(str(made), dtype=torch.float32, device=CPU, kernels="reference")
    tokens = [index * 7 % SMALL["vocab_size"] for index in range(21)]
    prompt = Batch(tokens, [*range(21)], [21], [21], [[4, 1]], [20])
    expected = model.forward(model.allocate(6), prompt)
    model.cuda_kernel = TritonAttention(model.max_model_len)
    line = layers.adopt(model.module)
    assert line.startswith("cuda (triton)")
    assert " 0 norms" not in line
    model.use_paged_attention()
    found = model.forward(model.allocate(6), prompt)
    assert ((found - expected).abs().max() / expected.std()).item() < 1e-4
    pages = model.allocate(6)
    model.forward(pages, Batch(tokens[:20], [*range(20)], [20], [20], [[4, 1]], []))
    before = pages.buffer.clone()
    alone = model.forward(pages, Batch(tokens[20:], [20], [1], [21], [[4, 1]], [0]))
    pages.buffer.copy_(before)
    prompt = [at % 40 for at in range(70)]  # so that tiles of many rows serve
    others = Batch(
        [1, *tokens[20:], *prompt], [0, 20, *range(70)], [1, 1, 70], [1, 21, 70], [[0], [4, 1], [2, 3, 5, 2, 3]], [1]
    )
    assert torch.equal(model.forward(pages, others), alone)
    assert torch.equal(alone, found)


def test_transposed_weights_are_served() -> None:
    """Those of GPT-2."""
    model = nn.Sequential(Conv1D(24, 40))
    assert layers.adopt(model) == "cuda (triton), 1 products and 0 norms"
    x = torch.randn(5, 40)
    expected = model(x)
    modules.switch(model, True)
    assert isinstance(model[0], layers.Linear)
    assert torch.allclose(model(x), expected, atol=1e-5)
