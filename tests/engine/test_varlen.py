"""Attention on CUDA as far as a machine without one can tell: which calls are served, and with which arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen as torch_varlen

from engine.attention import paged
from engine.attention.forward_context import Batch
from engine.gpu.attention import kernel_choice, varlen
from engine.gpu.attention.varlen import FA2, FA3, Varlen, refusal
from engine.kv.kv_cache_spec import CallFacts, ChunkedLocalAttentionSpec, FullAttentionSpec, Reach, SlidingWindowSpec
from engine.loading.model_loader import load_model
from tests.engine.stand_ins import checked

CPU = torch.device("cpu")
PLAIN = CallFacts(
    kv_heads=2, heads=4, k_dim=16, v_dim=16, reach=FullAttentionSpec(), softcap=None, sinks=False, scaling=0.25
)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes this machine look like one with a kernel, by default the checker."""

    def install(kernel: Varlen, function: Any = checked) -> None:
        monkeypatch.setattr(torch_varlen, "varlen_attn", function)
        monkeypatch.setattr(kernel_choice, "candidates", lambda *_: iter([kernel]))
        monkeypatch.setattr(varlen, "restore_flash_attention_impl", lambda: None)

    return install


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"reach": SlidingWindowSpec(8)}, None),
        ({"heads": 2}, None),
        ({"reach": ChunkedLocalAttentionSpec(8)}, "chunked"),
        ({"softcap": 30.0}, "softcap"),
        ({"sinks": True}, "sinks"),
        ({"latent": True}, "latent"),
        ({"v_dim": 24}, "heads of"),
        ({"k_dim": 264, "v_dim": 264}, "heads of"),
        ({"k_dim": 20, "v_dim": 20}, "heads of"),
        ({"heads": 3}, "3 heads"),
    ],
)
def test_what_a_kernel_does_not_know_goes_to_the_reference(change: dict[str, Any], reason: str | None) -> None:
    """Each fact that the kernel has no argument for is a reason; shared heads and windows are not."""
    found = refusal(FA3, replace(PLAIN, **change), torch.bfloat16, 16)
    assert found is None if reason is None else reason in (found or "")


def test_types_and_block_sizes_decide() -> None:
    """16 bits only; torch's own kernel takes blocks of multiples of 256 tokens, FA3 takes any."""
    assert refusal(FA3, PLAIN, torch.float16, 3) is None
    assert "float32" in (refusal(FA3, PLAIN, torch.float32, 16) or "")
    assert "multiples of 256" in (refusal(FA2, PLAIN, torch.bfloat16, 16) or "")
    assert refusal(FA2, PLAIN, torch.bfloat16, 512) is None


@pytest.mark.parametrize(
    "reach", [FullAttentionSpec(), SlidingWindowSpec(1), SlidingWindowSpec(8), SlidingWindowSpec(257)], ids=str
)
@pytest.mark.parametrize(("kernel", "block_size"), [(FA3, 16), (FA3, 5), (FA2, 256)])
def test_the_arguments_mean_what_the_reference_computes(
    reach: Reach, kernel: Varlen, block_size: int, on_cpu: Callable[..., None]
) -> None:
    """Chunks, fresh prompts and single tokens over scattered blocks, windows and shared heads."""
    on_cpu(kernel)
    for fact in (replace(PLAIN, reach=reach), replace(PLAIN, reach=reach, heads=2, scaling=1.0)):
        assert kernel_choice.choose((fact,), torch.bfloat16, block_size, CPU, paged.attend, 4096) == (
            kernel,
            f"cuda ({kernel.name})",
        )


def twisted(**twist: Callable[[Any], Any]) -> Callable[..., torch.Tensor]:
    """The checker with some of its arguments changed."""

    def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *lens: Any, **others: Any) -> torch.Tensor:
        return checked(query, key, value, *lens, **{**others, **{n: f(others[n]) for n, f in twist.items()}})

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
def test_a_kernel_that_is_wrong_serves_nothing(wrong: Any, window: int, on_cpu: Callable[..., None]) -> None:
    """One key too many or too few, another scale, another sequence's blocks, a NaN: found at load, and reported."""
    on_cpu(FA3, wrong)
    kernel, line = kernel_choice.choose(
        (replace(PLAIN, reach=SlidingWindowSpec(window)),), torch.bfloat16, 16, CPU, paged.attend, 4096
    )
    assert kernel is None
    assert line.startswith("reference, because FA3 differs from it by")


def test_a_kernel_that_fails_serves_nothing(on_cpu: Callable[..., None]) -> None:
    """A torch without paged attention says so in an exception: the reference serves, the load goes on."""

    def old(*given: Any, **named: Any) -> torch.Tensor:
        raise TypeError("varlen_attn() got an unexpected keyword argument 'block_table'")

    on_cpu(FA3, old)
    kernel, line = kernel_choice.choose((PLAIN,), torch.bfloat16, 16, CPU, paged.attend, 4096)
    assert kernel is None
    assert line == "reference, because FA3 fails: varlen_attn() got an unexpected keyword argument 'block_table'"


def test_the_line_says_who_serves_which_calls(on_cpu: Callable[..., None]) -> None:
    """A mixed model is reported in numbers; one that cannot be served at all, with the reason."""
    on_cpu(FA3)
    mixed = (PLAIN, replace(PLAIN, sinks=True), replace(PLAIN, softcap=5.0))
    line = "cuda (FA3), reference for 2 of 3 calls because of sinks; softcap"
    assert kernel_choice.choose(mixed, torch.bfloat16, 16, CPU, paged.attend, 4096) == (FA3, line)
    assert kernel_choice.choose(mixed[1:2], torch.bfloat16, 16, CPU, paged.attend, 4096) == (
        None,
        "reference, because of sinks",
    )


def test_without_cuda_the_reference_serves() -> None:
    """Nothing is tried, and the line says why."""
    assert kernel_choice.choose((PLAIN,), torch.bfloat16, 16, CPU, paged.attend, 4096) == (
        None,
        "reference, because the device is cpu",
    )


@pytest.mark.parametrize("family", ["llama", "qwen3-sliding", "gemma2", "gpt-oss"])
def test_a_model_attends_by_it_where_it_can(
    family: str, checkpoint: Callable[[str], Path], on_cpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch
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
    on_cpu(FA3, counted)
    line = model.choose_attention()
    calls = 0
    found = model.forward(model.allocate(6), batch)
    served = family in ("llama", "qwen3-sliding")
    assert line.startswith("cuda (FA3)" if served else "reference")
    assert calls == (len(model.facts) if served else 0)
    assert ((found - expected).abs().amax(-1) / expected.std(-1)).max() < 0.5

    def never(*_given: Any, **_named: Any) -> None:
        pytest.fail("the reference was asked")

    if served:
        monkeypatch.setattr(paged, "attend_plan", never)
        model.forward(model.allocate(6), batch)


def test_a_model_without_attention_needs_no_kernel() -> None:
    """Its steps are captured nevertheless, and the log says why there is none."""
    device = torch.device("cuda")
    chosen = kernel_choice.choose((), torch.bfloat16, 16, device, paged.attend, 4096)
    assert chosen == (None, "reference, because the model has no attention")
