"""A mixture's experts over panels: the results of transformers' experts, row by row, without a second copy of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from engine.kernels import REFERENCE, exact, experts, is_nothing, modules, serving, weight_cache, weight_quantization
from engine.loading.model_loader import load_model
from engine.runner.model_runner import ModelRunner
from loadtest.harness.random_checkpoints import make_module
from tandem.errors import CheckpointRefused

CPU = torch.device("cpu")
# With biases, columns side by side and a gate of their own; beside a shared expert; as most are.
FAMILIES = ["gpt-oss", "qwen2-moe", "mixtral"]
ROWS, CHOSEN, EXPERTS, N, K = 37, 3, 5, 70, 50

pytestmark = pytest.mark.skipif(
    serving(CPU) == REFERENCE, reason="the compiled operators are not built: python -m engine.kernels.build"
)


def random_model(family: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = make_module(f"tiny-{family}", dtype, CPU).eval()
    for mixture in experts.found(model):
        for each in mixture.parameters():
            torch.nn.init.normal_(each, std=0.2)
    return model


def given(width: int, count: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, their experts and the shares of these."""
    chosen = torch.stack([torch.randperm(count)[:2] for _ in range(ROWS)])
    return torch.randn(ROWS, width, dtype=dtype), chosen, torch.rand(ROWS, 2, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_is_multiplied_by_the_weight_of_its_expert(dtype: torch.dtype) -> None:
    """The bits of a plain product with that expert's weight alone, with and without biases, for any number of rows."""
    torch.manual_seed(0)
    weight, bias = torch.randn(EXPERTS, N, K).to(dtype), torch.randn(EXPERTS, N).to(dtype)
    panels = experts.pack(weight)
    for rows in (0, 1, ROWS):
        x, chosen = torch.randn(rows, K).to(dtype), torch.randint(EXPERTS, (rows * CHOSEN,))
        for own in (None, bias):
            y = torch.ops.tandem.experts(x, chosen, panels, own, N, K)
            assert y.shape == (rows * CHOSEN, N)
            for at, expert in enumerate(chosen.tolist()):
                alone = torch.ops.tandem.linear(
                    x[at // CHOSEN, None], panels[expert], None if own is None else own[expert], N, K
                )
                assert torch.equal(y[at], alone[0])
    assert torch.equal(experts.Stack(panels, N, K, "").weight(2), weight[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", ["int8", "fp8", "int4", "bf16"])
def test_each_row_is_multiplied_by_the_codes_of_its_expert(format: str, dtype: torch.dtype) -> None:
    """The bits of a plain product with the codes of that expert's weight alone."""
    torch.manual_seed(0)
    weight, bias = torch.randn(EXPERTS, N, K).to(dtype), torch.randn(EXPERTS, N).to(dtype)
    stack = weight_quantization.round_experts(weight, format, "")
    alone = [weight_quantization.quantise(each, format) for each in weight]
    x, chosen = torch.randn(ROWS, K).to(dtype), torch.randint(EXPERTS, (ROWS * CHOSEN,))
    for own in (None, bias):
        y = stack.multiply(x, chosen, own)
        for at, expert in enumerate(chosen.tolist()):
            expected = alone[expert].multiply(x[at // CHOSEN, None], None if own is None else own[expert])
            assert torch.equal(y[at], expected[0])
    assert all(torch.equal(stack.weight(expert), each.weight()) for expert, each in enumerate(alone))
    assert stack.nbytes == sum(each.nbytes for each in alone)


def test_codes_that_are_wrong_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any expert, also of one whose products are not tried."""
    right = experts.CodedStack.weight
    monkeypatch.setattr(
        experts.CodedStack, "weight", lambda stack, expert: right(stack, expert) + (expert == EXPERTS - 1)
    )
    with pytest.raises(CheckpointRefused, match="serve it with weights = checkpoint"):
        weight_quantization.round_experts(torch.randn(EXPERTS, N, K), "int8", "")


@pytest.mark.parametrize("wrong", [-1, EXPERTS])
def test_an_expert_that_does_not_exist_is_an_error(wrong: int) -> None:
    """Nothing beyond the weights is read."""
    with pytest.raises(IndexError, match=f"there is no expert {wrong}"):
        torch.ops.tandem.experts(
            torch.randn(1, K), torch.tensor([wrong]), experts.pack(torch.randn(EXPERTS, N, K)), None, N, K
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_over_panels_equal_those_of_transformers(family: str, dtype: torch.dtype) -> None:
    """Compiled and unpacked; a row has the same bits alone; the original weights are dropped."""
    model = random_model(family, dtype)
    own = list(experts.found(model))
    before = [(given_to, mixture(*given_to)) for mixture in own if (given_to := given(_width(mixture), 4, dtype))]
    modules.pack_experts(model)
    assert own
    assert not list(experts.found(model))
    for mixture, (given_to, expected) in zip(own, before, strict=True):
        x, chosen, shares = given_to
        size = expected.float().square().mean().sqrt()
        for on in (True, False):
            modules.switch(model, on)
            with torch.inference_mode(), exact(CPU):
                found, alone = mixture(*given_to), mixture(x[-1:], chosen[-1:], shares[-1:])
            assert (found.float() - expected.float()).abs().max() <= experts.GAP[dtype] * size
            assert not on or torch.equal(found[-1], alone[0])
        assert all(is_nothing(each) for name, each in mixture.named_parameters() if not name.endswith("_bias"))


def _width(mixture: nn.Module) -> int:
    return experts.weights(mixture)[0].shape[2]


@pytest.mark.parametrize("what", ["another expert's", "another value", "in the wrong order"])
def test_panels_that_are_wrong_are_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the originals are dropped, with the shape and the way out."""
    right = experts.pack

    def wrong(weight: torch.Tensor) -> torch.Tensor:
        panels = right(weight)
        if what == "another expert's":
            return panels[torch.tensor([1, 0, *range(2, len(panels))])]
        if what == "another value":
            panels[-1, 0] += 1
            return panels
        return right(weight.flip(1))

    monkeypatch.setattr(experts, "pack", wrong)
    model = random_model("mixtral", torch.float32)
    with pytest.raises(CheckpointRefused, match='differ from torch\'s; load it with kernels="reference"'):
        modules.pack_experts(model)
    assert not any(is_nothing(each) for each in model.parameters())


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[[str], Path]) -> list[ModelRunner]:
    """A mixture loaded without and twice with a cache of weights."""
    cache = weight_cache.WeightCache(tmp_path_factory.mktemp("cache"), 1 << 30)
    path = str(checkpoint("tiny-qwen3-moe"))
    return [load_model(path, dtype=torch.bfloat16, device=CPU, cache=kept) for kept in (None, cache, cache)]


def test_a_mixture_is_in_memory_once(loaded: list[ModelRunner]) -> None:
    """Its weights count as before, its experts are panels alone, and workers of a host share these."""
    alone, *shared = loaded
    for model in loaded:
        stacks = list(experts.stacks(model.module))
        dropped = [each for each in model.module.parameters() if is_nothing(each)]
        assert sum(stack.nbytes for stack in stacks) == sum(each.numel() * 2 for each in dropped) > 0
        assert model.weight_bytes == sum(each.numel() * 2 for each in model.module.parameters())
        half = sum(stack.nbytes for stack in stacks) // 2  # a token takes two of four experts
        table: Any = model.module.get_input_embeddings()  # transformers' accessors are not typed
        assert model.step_bytes == model.weight_bytes - half - table.weight.nbytes
        on_disk = weight_cache.file_backed([_panels(stack) for stack in stacks])
        assert on_disk == [model is not alone] * len(stacks)
    for ours, theirs in zip(*(experts.stacks(model.module) for model in shared), strict=True):
        assert torch.equal(_panels(ours), _panels(theirs))


def _panels(stack: experts.AnyStack) -> torch.Tensor:
    assert isinstance(stack, experts.Stack)
    return stack.panels


def test_rounded_experts_are_other_weights(checkpoint: Callable[[str], Path]) -> None:
    """They take a quarter, and their KV is not taken for that of a worker that does not round them, such as an older
    one."""
    path = str(checkpoint("tiny-qwen3-moe"))
    plain, rounded = (load_model(path, dtype=torch.float32, device=CPU, weights=own) for own in ("checkpoint", "int8"))
    own = [sum(stack.nbytes for stack in experts.stacks(model.module)) for model in (plain, rounded)]
    assert own[1] < 0.35 * own[0]
    assert all(isinstance(stack, experts.CodedStack) for stack in experts.stacks(rounded.module))
    assert rounded.fingerprint == f"{plain.fingerprint}-int8-experts"
