"""Mixtures of experts on a GPU that torch only pretends to have, as in test_cuda_forward.py: nothing waits to hear who
was chosen."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux on x86-64 and aarch64")

from engine.gpu.mixture import adoption, operators
from engine.kernels import experts, modules
from loadtest.harness.random_checkpoints import make_module
from tests.engine.test_cuda_forward import GPU, Launch, Waits, pretended

__all__ = ["pretended"]  # a fixture
pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="this torch is for CPU")


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", "deepseek-v3", "nemotron-h"])
def test_a_mixture_never_waits_for_the_device(
    family: str, pretended: dict[str, Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers and experts, for a token and for many; all their kernels are launched."""
    launches = {name: Launch() for name in ("plan", "experts", "clamped_gate", "mix")}
    for name, launch in launches.items():
        monkeypatch.setattr(operators.kernels, name, launch)
    module = make_module(f"tiny-{family}", torch.bfloat16, GPU)
    mixtures, routers = list(adoption.found_experts(module)), list(adoption.found_routers(module))
    gated = len(mixtures) * (family == "gpt-oss")
    for mixture in mixtures:  # as `adoption.adopt`, whose trial needs numbers
        sizes = tuple(tuple(each.shape) for each in experts.weights(mixture))
        mixture.__dict__.update({adoption._SIZES: sizes, modules.REPLACEMENT: adoption.Experts})
        if gated:
            mixture.__dict__[adoption._GATE] = (7.0, 1.702, True)
    for router in routers:
        router.__dict__.update({adoption._SIZES: (tuple(router.weight.shape),), modules.REPLACEMENT: adoption.Router})  # type: ignore[arg-type, union-attr]
    modules.switch(module, True)
    assert mixtures
    for mixture, router in zip(mixtures, routers, strict=True):
        for tokens in (1, 70):
            x = torch.empty(tokens, router.weight.shape[1], dtype=torch.bfloat16, device=GPU)  # type: ignore[arg-type, union-attr]
            with Waits() as waits:
                _, shares, chosen = router(x)
                out = mixture(x, chosen, shares)
            assert not waits.seen
            assert (out.shape, out.dtype, out.device) == (x.shape, x.dtype, GPU)
    assert {name: launch.launched for name, launch in launches.items()} == {
        "plan": 2 * len(mixtures),
        "experts": 4 * len(mixtures),
        "clamped_gate": 2 * gated,
        "mix": 2 * len(mixtures),
    }
    assert pretended["linear"].launched == 2 * len(routers)
