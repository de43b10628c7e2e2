"""Norms between the operators of recurrent layers, by Triton's interpreter: which modules they are, their numbers, and
that a row's bits follow from the row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

pytest.importorskip("triton", reason="Triton is for Linux on x86-64 and aarch64")

from engine.gpu import layers
from engine.gpu.recurrent import norm_kernels, norms
from engine.kernels import modules

# float16 and not bfloat16, to which the interpreter does not round.
TYPES = [(torch.float32, torch.float32), (torch.float16, torch.float16), (torch.float16, torch.float32)]
NORMS = {  # and in how many groups, and whether the gate comes first
    "Mamba-2": (lambda: MambaRMSNormGated(96, 32), 3, True),
    "Qwen3-Next": (lambda: Qwen3NextRMSNormGated(40), 1, False),
    "Falcon-H1": (lambda: FalconH1RMSNormGated(64, n_groups=4, norm_before_gate=False), 4, True),
    "Falcon-H1, normed first": (lambda: FalconH1RMSNormGated(64, n_groups=2), 2, False),
    "Kimi": (lambda: KimiLinearRMSNormGated(48), 1, False),
}


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def made(norm: Any, dtype: torch.dtype) -> nn.Module:
    module: nn.Module = norm().to(dtype)
    weight = next(module.parameters())
    weight.data.copy_(numbers(len(weight)))
    return module


def elsewhere(rows: torch.Tensor) -> torch.Tensor:
    """The same, not at the beginning of its memory, with something between the rows."""
    wider = torch.zeros(*rows.shape[:-1], rows.shape[-1] + 3, dtype=rows.dtype)[..., 1:-2]
    return wider.copy_(rows)


@pytest.mark.parametrize(("dtype", "given"), TYPES)
@pytest.mark.parametrize("name", NORMS)
@torch.inference_mode()
def test_a_norm_with_a_gate_is_replaced_by_its_equal(name: str, dtype: torch.dtype, given: torch.dtype) -> None:
    """Whatever its class is called; a row has the same bits alone, elsewhere and among others."""
    norm, groups, gate_first = NORMS[name]
    module = made(norm, dtype)
    model = nn.Sequential(module)
    x, gate = numbers(1, 9, len(next(module.parameters()))).to(given), numbers(9, 1, 1).to(dtype)
    gate = (gate * numbers(1, 1, x.shape[-1])).to(dtype).transpose(0, 1)
    expected = module(x, gate)
    assert layers.adopt(model) == "cuda (triton), 0 products and 1 norms"
    modules.switch(model, True)
    found = module(x, gate)
    kind = module.__dict__[norms.NORM]
    assert (kind.groups, kind.gate_first, kind.silu) == (groups, gate_first, name != "Kimi")
    assert type(module).__bases__[0] is norms.GatedNorm
    assert found.dtype == expected.dtype
    assert (found.float() - expected.float()).abs().max() <= (1e-5 if found.dtype == torch.float32 else 2e-3) * 8
    for row in (0, 4, 8):
        assert torch.equal(module(x[:, row : row + 1], gate[:, row : row + 1]), found[:, row : row + 1])
    assert torch.equal(module(elsewhere(x), elsewhere(gate)), found)
    assert torch.equal(module(x.flip(1), gate.flip(1)), found.flip(1))


class Gated(nn.Module):
    """A norm with a gate, or nearly."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(numbers(32) if fault != "zeros" else torch.zeros(32))
        self.eps, self.fault = 1e-6, fault

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        if self.fault == "a mean is taken off":
            x = x - x.mean(-1, keepdim=True)
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight
        if self.fault == "the gate is no gate":
            return y + gate
        return y * (gate.tanh() if self.fault == "another function" else nn.functional.silu(gate))


FAULTS = ["a mean is taken off", "the gate is no gate", "another function", "zeros"]


@pytest.mark.parametrize("fault", FAULTS)
def test_control_what_is_nearly_such_a_norm_stays(fault: str) -> None:
    """With a weight of zeros nothing can be told."""
    assert norms.gated_of(Gated("")) == norms.Gated(1e-6, 1, False, True, True)
    assert norms.gated_of(Gated(fault)) is None


def test_a_kernel_that_fails_or_mixes_rows_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's norm serves, and the worker loads."""

    class Broken:
        def __getitem__(self, grid: Any) -> Any:
            raise RuntimeError("out of resources")

    with monkeypatch.context() as patch:
        patch.setattr(norm_kernels, "gated", Broken())
        assert norms.gated_of(Gated("")) is None
    own = norms.gated_norm

    def mixed(x: torch.Tensor, *given: Any) -> torch.Tensor:
        out = own(x, *given)
        return out * (1 + 1e-6 * (x.shape[1] > 1))

    monkeypatch.setattr(norms, "gated_norm", mixed)
    assert norms.gated_of(Gated("")) is None


@pytest.mark.parametrize("size", [8, 100, 128])
def test_a_row_over_its_length(size: int) -> None:
    """As torch computes it, with bits that follow from the row."""
    x = numbers(2, 5, 3, size)
    found = torch.ops.tandem_gpu.unit.default(x, 1e-6)
    assert torch.allclose(found, x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6), rtol=1e-5, atol=1e-6)
    assert torch.equal(torch.ops.tandem_gpu.unit.default(x[1:, 3:4], 1e-6), found[1:, 3:4])
    assert torch.equal(torch.ops.tandem_gpu.unit.default(elsewhere(x), 1e-6), found)
    with pytest.raises(AssertionError, match="float32"):
        norms.unit(x.half(), 1e-6)
