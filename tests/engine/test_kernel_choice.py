"""The trial of a CUDA kernel for attention at load: a right one serves, a wrong one does not, and a line says which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention import paged
from engine.attention.forward_context import Batch
from engine.gpu.attention import kernel_choice
from engine.kv.kv_cache_spec import CallFacts, FullAttentionSpec, Reach, SlidingWindowSpec
from engine.loading.model_loader import load_model
from tests.engine.stand_ins import Kernel, checked

CPU = torch.device("cpu")
PLAIN = CallFacts(
    kv_heads=2, heads=4, k_dim=16, v_dim=16, reach=FullAttentionSpec(), softcap=None, sinks=False, scaling=0.25
)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Kernel]:
    """Makes this machine look like one with a kernel, by default a right one."""

    def install(function: Any = checked) -> Kernel:
        kernel = Kernel(function)
        monkeypatch.setattr(kernel_choice, "candidate", lambda *_: kernel)
        return kernel

    return install


def choose(*facts: CallFacts, block_size: int = 16) -> tuple[Any, str]:
    return kernel_choice.choose(facts, torch.bfloat16, block_size, CPU, 4096)


@pytest.mark.parametrize(
    "reach", [FullAttentionSpec(), SlidingWindowSpec(1), SlidingWindowSpec(8), SlidingWindowSpec(257)], ids=str
)
@pytest.mark.parametrize("block_size", [16, 5])
def test_a_kernel_that_is_right_serves(reach: Reach, block_size: int, on_cpu: Callable[..., Kernel]) -> None:
    """Chunks, fresh prompts and single tokens over scattered blocks, windows and shared heads."""
    kernel = on_cpu()
    for fact in (replace(PLAIN, reach=reach), replace(PLAIN, reach=reach, heads=2, scaling=1.0)):
        assert choose(fact, block_size=block_size) == (kernel, "cuda (stand-in)")


def twisted(**twist: Callable[[Any], Any]) -> Callable[..., torch.Tensor]:
    """The checker with some of its arguments changed."""

    def call(*given: torch.Tensor, **others: Any) -> torch.Tensor:
        return checked(*given, **{**others, **{name: change(others[name]) for name, change in twist.items()}})

    return call


@pytest.mark.parametrize(
    "wrong",
    [
        twisted(window_size=lambda window: (window[0] + 1, 0)),
        twisted(window_size=lambda window: (window[0] - 1, 0)),
        twisted(window_size=lambda window: (window[0], 1)),
        twisted(window_size=lambda window: (-1, -1)),
        twisted(seqused_k=lambda used: (used - 1).clamp(min=1)),
        twisted(scale=lambda scale: scale * 1.3),
        twisted(block_table=lambda table: table.roll(1, 0)),
        lambda *given, **named: checked(*given, **named) * 1.1,
        lambda *given, **named: checked(*given, **named).index_fill(0, torch.tensor([3]), torch.nan),
    ],
)
@pytest.mark.parametrize("window", [8, 4096])
def test_a_kernel_that_is_wrong_serves_nothing(wrong: Any, window: int, on_cpu: Callable[..., Kernel]) -> None:
    """One key too many or too few, another scale, another sequence's blocks, a NaN: found at load, and reported."""
    on_cpu(wrong)
    kernel, line = choose(replace(PLAIN, reach=SlidingWindowSpec(window)))
    assert kernel is None
    assert line.startswith("reference, because stand-in differs from it by")


@pytest.mark.parametrize("reach", [FullAttentionSpec(), SlidingWindowSpec(8)], ids=str)
def test_a_kernel_that_merges_parts_wrongly_serves_nothing(reach: Reach, on_cpu: Callable[..., Kernel]) -> None:
    """The longer the sequences of a model may be, the longer are the parts of which a kernel merges the sums; the trial
    has a sequence of more than one. The control is a trial of one part, which notices nothing."""

    def wrong_beyond(*given: torch.Tensor, **named: Any) -> torch.Tensor:
        found = checked(*given, **named)
        return found + 1.0 if int(named["seqused_k"].max()) > 1000 else found

    kernel = on_cpu(wrong_beyond)
    assert choose(replace(PLAIN, reach=reach)) == (kernel, "cuda (stand-in)")
    kernel.split_keys = 1000
    chosen, line = choose(replace(PLAIN, reach=reach))
    assert chosen is None
    assert "stand-in differs from it" in line


def test_a_kernel_that_fails_serves_nothing(on_cpu: Callable[..., Kernel]) -> None:
    """A compiler that does not know the device says so in an exception: the reference serves, the load goes on."""

    def failing(*given: Any, **named: Any) -> torch.Tensor:
        raise RuntimeError("no kernel image\nmore")

    on_cpu(failing)
    assert choose(PLAIN) == (None, "reference, because stand-in fails: no kernel image")


def test_the_line_says_who_serves_which_calls(on_cpu: Callable[..., Kernel]) -> None:
    """A mixed model is reported in numbers; one that cannot be served at all, with the reason."""
    kernel = on_cpu()
    mixed = (PLAIN, replace(PLAIN, sinks=True), replace(PLAIN, softcap=5.0))
    assert choose(*mixed) == (kernel, "cuda (stand-in), reference for 2 of 3 calls because of sinks; softcap")
    assert choose(mixed[1]) == (None, "reference, because of sinks")


def test_without_cuda_the_reference_serves() -> None:
    """Nothing is tried, and the line says why."""
    assert choose(PLAIN) == (None, "reference, because the device is cpu")


@pytest.mark.parametrize("family", ["llama", "qwen3-sliding", "gemma2", "gpt-oss"])
def test_a_model_attends_by_it_where_it_can(
    family: str, checkpoint: Callable[[str], Path], on_cpu: Callable[..., Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a whole model it serves exactly the calls that it can, and the logits are the reference's."""
    calls = 0

    def counted(*given: Any, **named: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return checked(*given, **named)

    model = load_model(str(checkpoint(f"tiny-{family}")), dtype=torch.bfloat16, device=CPU, kernels="reference")
    tokens = [index * 7 % 384 for index in range(40)]
    batch = Batch(tokens, [*range(30), *range(10)], [30, 10], [30, 10], [[4, 1], [0]], [29, 39])
    expected = model.forward(model.allocate(6), batch)
    on_cpu(counted)
    line = model.choose_attention()
    calls = 0
    found = model.forward(model.allocate(6), batch)
    served = family in ("llama", "qwen3-sliding")
    assert line.startswith("cuda (stand-in)" if served else "reference")
    assert calls == (len(model.facts) if served else 0)
    assert ((found - expected).abs().amax(-1) / expected.std(-1)).max() < 0.5

    def never(*_given: Any, **_named: Any) -> None:
        pytest.fail("the reference was asked")

    if served:
        monkeypatch.setattr(paged, "attend_plan", never)
        model.forward(model.allocate(6), batch)


def test_without_triton_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CUDA device, too, and the line in the log says why."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    chosen = kernel_choice.choose((PLAIN,), torch.bfloat16, 16, torch.device("cuda"), 4096)
    assert chosen == (None, "reference, because Triton is not installed")
