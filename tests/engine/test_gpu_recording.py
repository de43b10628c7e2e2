"""A forward recorded with the kernels of a GPU, by Triton's interpreter on CPU: what is fused, what it computes, and
how many kernels a layer has."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="Triton is for Linux on x86-64 and aarch64")

from engine.attention import paged
from engine.attention.forward_context import Batch, Step
from engine.gpu import codes, layers, product_kernels, products
from engine.gpu.attention import page_kernel, paged_attention
from engine.gpu.attention.paged_attention import TritonAttention
from engine.kernels import weight_quantization
from engine.loading.model_loader import load_model
from engine.runner import captured_steps, traced_forward
from engine.runner.model_runner import KvDtype, ModelRunner
from loadtest.harness.random_checkpoints import make_checkpoint

CPU = torch.device("cpu")
# The interpreter takes its time for each tile: most products are of one.
SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,  # torch's own silu has other bits at the end of a row that fills no vectors
    "vocab_size": 40,
    "max_position_embeddings": 256,
}
MOST_KERNELS = 15  # of a layer, in a decode step
SINGLE = Batch([3, 4], [20, 5], [1, 1], [21, 6], [[4, 1], [0]], [0, 1])
MIXED = Batch([3, *range(9), 4], [20, *range(9), 5], [1, 9, 1], [21, 9, 6], [[4, 1], [2], [0]], [0, 9, 10])


class Kernels(TorchDispatchMode):
    """Notes what would be a kernel of its own: operators that make no view and no empty tensor, and launches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.seen: list[str] = []
        for module, names in (
            (product_kernels, ("linear", "rms_norm", "rotate", "gated", "place_heads")),
            (paged_attention, ("attend", "merge")),
            (page_kernel, ("write_heads",)),
        ):
            for name in names:
                monkeypatch.setattr(module, name, Noted(name, getattr(module, name), self.seen))

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = any(one.alias_info is not None and not one.alias_info.is_write for one in operator._schema.returns)
        own = str(operator).startswith(("tandem_gpu", "aten.size")) or "empty" in str(operator)
        if not views and not own:
            self.seen.append(str(operator))
        return operator(*args, **(kwargs or {}))


class Noted:
    def __init__(self, name: str, kernel: Any, seen: list[str]) -> None:
        self.name, self.kernel, self.seen = name, kernel, seen

    def __getitem__(self, grid: Any) -> Any:
        self.seen.append(self.name)
        return self.kernel[grid]


@pytest.fixture(autouse=True, scope="module")
def short() -> Iterator[None]:
    """Trials of few rows and few batches, for the interpreter takes its time."""
    batches = traced_forward._batches
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "ROWS", (1, 5))
        patch.setattr(traced_forward, "_batches", lambda model: [batches(model)[0], batches(model)[3]])
        yield


def on_gpu(family: str, folder: Path, weights: str = "", kv_dtype: KvDtype = "auto") -> ModelRunner:
    """A model of two narrow layers with attention and products as on CUDA, by modules; with `weights` over codes."""
    made = make_checkpoint(folder / family, f"tiny-{family}", dtype="float32", **SMALL)
    model = load_model(str(made), dtype=torch.float32, device=CPU, kernels="reference", kv_dtype=kv_dtype)
    model.cuda_kernel = TritonAttention(model.max_model_len)
    if weights:
        assert weight_quantization.apply(model.module, weights, codes.packer(CPU)) == 15
    assert layers.adopt(model.module).startswith(layers.NAME)
    model.cuda_products = True
    model.use_paged_attention()
    return model


def with_context(model: ModelRunner) -> Any:
    pages = model.allocate(6)
    generator = torch.Generator().manual_seed(1)
    for view in (*pages.k, *pages.v):
        view.normal_(generator=generator)
    return pages


@pytest.mark.parametrize(("family", "weights"), [("llama", ""), ("qwen3", "int4")])
def test_a_layer_is_few_kernels(family: str, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three projections are one, gate and up are one, a sum is part of its product, and a rotation or a gate is one.
    The recording is used, and computes what the modules do. Control: by modules there are twice as many."""
    model = on_gpu(family, tmp_path, weights)
    assert model.unrecordable_on_cuda() is None
    assert traced_forward.install(model) == "recorded"
    pages = with_context(model)
    recorded, model.recorded = model.recorded, None
    counts, logits, kept = [], [], []
    for model.recorded in (recorded, None):
        with monkeypatch.context() as patch, Kernels(patch) as kernels:
            logits.append(model.forward(pages, SINGLE))
        kept.append(torch.cat([view.flatten() for view in (*pages.k, *pages.v)]))
        places = [at for at, name in enumerate(kernels.seen) if name == "attend"]
        counts.append(places[1] - places[0])
        if model.recorded is not None:
            layer = kernels.seen[places[0] : places[1]]
    assert counts[0] <= MOST_KERNELS
    assert layer.count("linear") == 4, layer
    assert counts == [10, {"llama": 27, "qwen3": 29}[family]], layer
    assert (logits[0] - logits[1]).abs().max() / logits[1].std() < 1e-4
    assert torch.allclose(*kept, atol=1e-5)
    model.recorded = recorded
    assert captured_steps.unfit(model, pages) is None
    before = pages.buffer.clone()
    alone = model.forward(pages, Batch([3], [20], [1], [21], [[4, 1]], [0]))
    pages.buffer.copy_(before)
    assert torch.equal(model.forward(pages, MIXED)[:1], alone)


def test_quantised_pages_are_written_by_one_kernel_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer stays few kernels, and the pages' bytes are those that plain PyTorch writes. Control: its operators alone
    would be more."""
    model = on_gpu("qwen3", tmp_path, kv_dtype="int8")
    assert traced_forward.install(model) == "recorded"
    recorded, counts, kept = model.recorded, [], []
    for model.recorded in (recorded, None):
        pages = model.allocate(6)
        pages.buffer.zero_()
        with monkeypatch.context() as patch, Kernels(patch) as kernels:
            if model.recorded is None:
                patch.setattr(TritonAttention, "write_quantised", written_by_torch)
            model.forward(pages, SINGLE)
        kept.append(pages.buffer.clone())
        places = [at for at, name in enumerate(kernels.seen) if name == "attend"]
        counts.append(places[1] - places[0])
        written = [name for name in kernels.seen if name == "write_heads"]
        assert len(written) == (4 if model.recorded is not None else 0)
    assert counts[0] == MOST_KERNELS
    assert counts[1] > 3 * MOST_KERNELS  # 59 with torch 2.13
    assert kept[0].any()
    assert torch.equal(*kept)


def written_by_torch(
    kernel: TritonAttention, pages: torch.Tensor, scales: torch.Tensor, new: torch.Tensor, step: Step
) -> None:
    where: Any = SimpleNamespace(
        compiled=False, cuda_kernel=None, slot_block=step.slot_block, slot_offset=step.slot_offset
    )
    paged.write(pages, scales, new, where)


def test_a_fusion_that_computes_otherwise_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The recording without it is, and the log says so."""
    model = on_gpu("llama", tmp_path)
    linear = products.linear
    monkeypatch.setattr(
        products, "linear", lambda x, w, bias, beside=None, *more, **named: linear(x, w, bias, None, *more, **named)
    )
    with caplog.at_level(logging.WARNING):
        assert traced_forward.install(model) == "recorded"
    assert "the fused recording cannot be used" in caplog.text


@pytest.mark.parametrize(
    ("mixture", "dtype", "wrong_calls", "serves"),
    [
        (True, torch.bfloat16, {0: [1], 1: [0]}, True),
        (True, torch.bfloat16, {number: [1] for number in range(traced_forward.TRIES)}, False),
        (False, torch.bfloat16, {0: [1]}, False),
        (True, torch.float32, {0: [1]}, False),
    ],
    ids=["now and then", "control: always", "control: without experts", "control: without roundings"],
)
def test_a_rounding_may_choose_other_experts(
    mixture: bool, dtype: torch.dtype, wrong_calls: dict[int, list[int]], serves: bool
) -> None:
    """A row of a mixture in 16 bits must agree for one of a few choices of tokens; every other row always."""
    expected = torch.randn(2, 40)
    calls: list[list[int]] = []
    pages: Any = SimpleNamespace(buffer=torch.zeros(1), k=[], v=[], k_scales=[], v_scales=[])
    batch = Batch([3, 4], [20, 5], [1, 1], [21, 6], [[4, 1], [0]], [0, 1])
    model: Any = SimpleNamespace(
        dtype=dtype, is_mixture=mixture, kernels="reference", vocab_size=40, exact=nullcontext,
        step=lambda pages, batch: SimpleNamespace(tensor=torch.tensor, tokens=batch.token_ids),
        by_modules=lambda step, wanted: expected,
    )  # fmt: skip

    def recorded(step: Any, wanted: torch.Tensor) -> torch.Tensor:
        logits = expected.clone()
        logits[wrong_calls.get(len(calls), [])] += 9
        calls.append(step.tokens)
        return logits

    found = traced_forward._differs(recorded, model, pages, [batch])
    assert found == (None if serves else "[1, 1] new tokens")
    assert calls[0] == batch.token_ids
    assert len(set(map(tuple, calls))) == len(calls)


def test_a_chunk_without_logits_is_compared_by_what_it_writes(tmp_path: Path) -> None:
    """There is no spread of logits to compare with, and torch would warn of it. Control: a recording that writes
    nothing."""
    model = on_gpu("llama", tmp_path)
    pages, chunk = model.allocate(2, 4), Batch([3, 4, 5], [0, 1, 2], [3], [3], [[1]], [])

    def again(step: Step, wanted: torch.Tensor) -> torch.Tensor:
        step.calls = 0
        return model.by_modules(step, wanted)

    def writes_nothing(step: Step, wanted: torch.Tensor) -> torch.Tensor:
        logits = again(step, wanted)
        pages.buffer.zero_()
        return logits

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert traced_forward._differs(again, model, pages, [chunk]) is None
        assert traced_forward._differs(writes_nothing, model, pages, [chunk]) == "[3] new tokens"


def test_what_cannot_be_recorded_says_why(checkpoint: Callable[[str], Path]) -> None:
    """Attention by the reference has lists of the host, and adapters take the rows of a step apart."""
    model = load_model(str(checkpoint("tiny-llama")), dtype=torch.float32, device=CPU, kernels="reference")
    assert model.unrecordable_on_cuda() == ""
    model.device = torch.device("cuda")
    assert "do not both serve" in str(model.unrecordable_on_cuda())
    model.cuda_kernel, model.cuda_products = TritonAttention(64), True
    assert model.unrecordable_on_cuda() is None
    model.lora = object()  # type: ignore[assignment]
    assert "adapters" in str(model.unrecordable_on_cuda())
