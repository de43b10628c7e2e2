"""Recurrences by compiled operators: those of transformers within rounding, and the same bits in every company."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from engine import kernels
from engine.loading.model_loader import load_model
from engine.runner import recurrences
from engine.runner.recurrences import gated_delta_rule

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    kernels.serving(CPU) == kernels.REFERENCE, reason="not built: python -m engine.kernels.build"
)
EXACT = 5e-5  # standard deviations
SIZES = {"of Qwen3-Next": (16, 32, 128, 128), "no multiple of a vector": (1, 3, 5, 70), "tiny": (2, 4, 8, 8)}


def inputs(size: tuple[int, int, int, int], sequences: int, tokens: int, seed: int = 0) -> dict[str, torch.Tensor]:
    k_heads, heads, dk, dv = size
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "query": normal(sequences, tokens, k_heads, dk),
        "key": normal(sequences, tokens, k_heads, dk),
        "value": normal(sequences, tokens, heads, dv),
        "g": -torch.rand(sequences, tokens, heads, generator=generator),
        "beta": torch.rand(sequences, tokens, heads, generator=generator),
        "initial_state": 0.1 * normal(sequences, heads, dk, dv),
    }


def run(function: Callable[..., Any], given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    out, state = function(**given, output_final_state=True, use_qk_l2norm_in_kernel=True)
    return out, state.view_as(given["initial_state"])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tokens", [1, 70])
def test_the_gated_delta_rule_is_that_of_transformers(size: str, tokens: int) -> None:
    """Output and state, in one token and in chunks, of two sequences; the state that was given stays as it was."""
    given = inputs(SIZES[size], 2, tokens)
    before = given["initial_state"].clone()
    theirs = run(torch_recurrent_gated_delta_rule if tokens == 1 else torch_chunk_gated_delta_rule, given)
    given["initial_state"] = before.clone()
    for ours, wanted in zip(run(gated_delta_rule, given), theirs, strict=True):
        assert ((ours - wanted).abs().max() / wanted.std()).item() < EXACT
    assert torch.equal(given["initial_state"], before)


def test_without_a_state_it_begins_with_zeros_and_gives_none() -> None:
    """As theirs."""
    given = inputs(SIZES["tiny"], 1, 5)
    del given["initial_state"]
    out, state = gated_delta_rule(**given)
    assert state is None
    given["initial_state"] = torch.zeros(1, 4, 8, 8)
    assert torch.equal(out, gated_delta_rule(**given)[0])


@pytest.mark.parametrize("cut", [1, 7, 39])
def test_a_token_has_the_same_bits_however_it_is_computed(cut: int) -> None:
    """In chunks of any length, alone or beside another sequence, with one thread or two."""
    given = inputs(SIZES["of Qwen3-Next"], 2, 40)
    whole, last = run(gated_delta_rule, given)
    alone = {name: value[1:] for name, value in given.items()}
    state, parts = alone.pop("initial_state"), []
    threads = torch.get_num_threads()
    torch.set_num_threads(3 - threads if threads in (1, 2) else 1)
    try:
        for start in range(0, 40, cut):
            part = {name: value[:, start : start + cut] for name, value in alone.items()}
            out, state = run(gated_delta_rule, {**part, "initial_state": state})
            parts.append(out)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.cat(parts, dim=1), whole[1:])
    assert torch.equal(state, last[1:])


def test_an_operator_that_does_something_else_is_not_used(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof at load compares each layer with transformers' own, which serves then."""

    def served() -> list[bool]:
        model = load_model(str(checkpoint("tiny-qwen3-next")), dtype=torch.float32, device=CPU, max_model_len=64)
        assert model.mixers is not None
        return [each.forward is not type(each.module).forward for each in model.mixers.each]

    def wrong(*given: Any, **options: Any) -> Any:
        out, state = gated_delta_rule(*given, **options)
        return out, state if state is None else state * 0.999

    assert served() == [True, True]
    monkeypatch.setattr(recurrences, "OPERATORS", dict.fromkeys(recurrences.OPERATORS, wrong))
    assert served() == [False, False]
