"""Products over quantised weights on a GPU, by Triton's interpreter: the weights are what the codes stand for, in their
own size, and a row's bits follow from the row."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("triton", reason="Triton is for Linux on x86-64 and aarch64")

from engine import kernels
from engine.gpu import codes as gpu
from engine.gpu import products
from engine.gpu.mixture import adoption
from engine.kernels import experts, weight_quantization
from engine.loading import model_loader, self_check
from engine.loading.model_loader import load_model
from engine.loading.self_check import pack
from tandem.errors import CheckpointRefused, SettingsError
from tests.engine.test_gptq_awq_fp8 import ALL, make

CPU = torch.device("cpu")
ON_CPU = gpu.packer(CPU)  # as for CUDA
MANY = products.FEW + 2
ORDERED = "gptq with desc_act and zeros"
OF_A_GPU: dict[str, dict[str, Any]] = {
    ORDERED: {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True}
}


def random_codes(n: int, k: int, group: int, format: str, zeros: bool = False, seed: int = 0) -> gpu.RowCodes:
    generator = torch.Generator().manual_seed(n + k + seed)
    groups = -(-k // group)
    scales = torch.rand(n, groups, generator=generator) + 0.1
    if zeros:
        integers = torch.randint(0, 16, (n, k), generator=generator).to(torch.int16)
        own = torch.randint(0, 17, (n, groups), generator=generator)
        return gpu.packed(integers, scales, group, "int4", CPU, zeros=own)
    largest = {"int4": 7, "int8": 127, "fp8": 448}[format]
    units = largest * (2 * torch.rand(n, k, generator=generator) - 1)
    return gpu.packed(weight_quantization.codes_of(units, format), scales, group, format, CPU)


@pytest.mark.parametrize(
    ("k", "group", "format", "zeros"),
    [
        *((100, 100, "int8", False), (128, 32, "int8", False), (75, 76, "fp8", False), (100, 64, "fp8", False)),
        *((100, 100, "int4", False), (96, 32, "int4", False), (160, 64, "int4", True), (75, 76, "int4", True)),
    ],
)
def test_products_are_those_of_the_weights_that_codes_stand_for(k: int, group: int, format: str, zeros: bool) -> None:
    """With one scale for a row or one for each group, zeros or none, tiles that are not full; alone and among many,
    bit for bit; in as few bytes as the format has. (Packing compares the codes themselves with plain PyTorch.)"""
    codes = random_codes(40, k, group, format, zeros)
    assert codes.codes.nbytes == 40 * (-(-k // codes.depth) * codes.depth // 2 if format == "int4" else k)
    x = torch.randn(MANY, k, generator=torch.Generator().manual_seed(1))
    bias = torch.linspace(-1, 1, 40)
    found, expected = codes.multiply(x, bias), F.linear(x, codes.weight(), bias)
    assert (found - expected).abs().max() / expected.std() < 1e-5
    for rows in (slice(3, 4), slice(1, products.FEW + 1)):
        assert torch.equal(codes.multiply(x[rows], bias), found[rows])


def test_columns_may_be_in_another_order() -> None:
    """Those of GPTQ with desc_act, whose groups are not neighbours."""
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    codes = replace(random_codes(40, 64, 32, "int4"), order=order)
    x = torch.randn(3, 64)
    assert torch.allclose(codes.multiply(x, None), F.linear(x, codes.weight()), atol=1e-4)


def test_codes_that_the_kernel_reads_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By every weight when it is packed. Control: another zero than the kernel's; other bits in other company."""
    with monkeypatch.context() as patch, pytest.raises(CheckpointRefused, match="40 x 64 packed as int4 differs"):
        patch.setattr(gpu, "ZERO", 7)
        random_codes(40, 64, 64, "int4")
    linear = products.linear
    monkeypatch.setattr(
        products, "linear", lambda x, *more, **named: linear(x, *more, **named) * (1 + 1e-7 * (len(x) < 2))
    )
    with pytest.raises(CheckpointRefused, match="41 x 64 packed as int8 differs"):
        random_codes(41, 64, 64, "int8")


def test_what_is_not_served_is_refused_by_name() -> None:
    """Groups that do not hold a tile, and bfloat16 as a format."""
    with pytest.raises(CheckpointRefused, match="groups of 16 inputs; on CUDA groups of a multiple of 32 are served"):
        random_codes(40, 64, 16, "int4")
    with pytest.raises(CheckpointRefused, match="bf16 weights are not served on CUDA"):
        gpu.packed(torch.zeros(4, 64, dtype=torch.int16), torch.ones(4, 1), 64, "bf16", CPU)


@pytest.mark.skipif(kernels.serving(CPU) == kernels.REFERENCE, reason="not built: python -m engine.kernels.build")
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *(("awq", "tiny-qwen2"), ("fp8", "tiny-qwen2"), ("gptq-4", "tiny-qwen2"), (ORDERED, "tiny-qwen2")),
        *(("awq", "tiny-mixtral"), ("fp8", "tiny-qwen3-moe")),
    ],
)
def test_a_checkpoint_is_served_in_its_own_size(
    name: str, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a byte for each weight of AWQ and GPTQ, whose zeros stay beside them; a byte of fp8; experts included;
    columns in another order. It loads, checks itself, and computes what the plain checkpoint of the same weights does.
    """
    small = {"num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 64}
    more = {"num_local_experts": 3} if shape == "tiny-mixtral" else {}
    quantised, plain = make(tmp_path, (ALL | OF_A_GPU)[name], shape, **small, **more)
    monkeypatch.setattr(adoption, "MEANS", ())
    monkeypatch.setattr(adoption, "SOME", (1, 5))
    monkeypatch.setattr(model_loader, "_packer", lambda *_: ON_CPU)
    monkeypatch.setattr(model_loader.traced_forward, "install", lambda _: "by modules")
    monkeypatch.setattr(self_check, "PROMPT_LENGTHS", (7,))  # the interpreter takes its time
    monkeypatch.setattr(self_check, "LONGEST", 5)
    lines: list[str] = []
    model = load_model(str(quantised), dtype=torch.float32, device=CPU, progress=lines.append)
    of: list[gpu.RowCodes | gpu.RowStack] = [*weight_quantization.codes_in(model.module)]  # type: ignore[list-item]
    stacks: Any = list(experts.stacks(model.module))
    assert bool(stacks) == (shape != "tiny-qwen2")
    count = len(of) + sum(stack.count * (2 if at % 2 == 0 else 1) for at, stack in enumerate(stacks))
    of += stacks
    assert any(f"{count} of them over its own codes" in line for line in lines)
    assert all(
        isinstance(each, gpu.RowCodes | gpu.RowStack) and each.format == ("fp8" if name == "fp8" else "int4")
        for each in of
    )
    assert all((each.zeros is not None) == (name in ("awq", ORDERED)) for each in of)
    assert all((each.order is not None) == (name == ORDERED) for each in of if isinstance(each, gpu.RowCodes))
    expected = load_model(str(plain), dtype=torch.float32, device=CPU, kernels="reference")
    tokens = [index * 7 % 64 for index in range(5)]
    logits = [each.forward(each.allocate(3), pack([(tokens, 0, [2, 0, 1])])) for each in (model, expected)]
    assert (logits[0] - logits[1]).abs().max() / logits[1].std() < 1e-3


def test_weights_are_rounded_at_load_where_a_device_multiplies_with_codes() -> None:
    """`weights` = int8, int4, fp8: the head in int8; plain PyTorch has none of it."""
    layer = nn.Linear(64, 40)
    codes = weight_quantization.quantise(layer.weight.detach(), "int4", ON_CPU)
    assert isinstance(codes, gpu.RowCodes)
    assert (codes.weight() - layer.weight).abs().max() < 0.02
    with pytest.raises(SettingsError, match="weights = bf16 is not served on CUDA"):
        model_loader._format("bf16", torch.float32, torch.device("cuda"), ON_CPU)
    with pytest.raises(SettingsError, match="or Triton on CUDA"):
        model_loader._format("int8", torch.float32, torch.device("cuda"), None)
