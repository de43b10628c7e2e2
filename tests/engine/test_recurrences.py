"""Recurrences by compiled operators: those of transformers within rounding, and the same bits in every company."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba import modeling_mamba as mamba
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from engine import kernels
from engine.kv.kv_cache import layout_of
from engine.kv.kv_cache_spec import RecurrentState, StateFacts
from engine.kv.state_memory import StateMemory
from engine.loading.model_loader import load_model
from engine.runner import recurrences
from engine.runner.recurrences import SlotRows

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    kernels.serving(CPU) == kernels.REFERENCE, reason="not built: python -m engine.kernels.build"
)
EXACT = 5e-5  # standard deviations
Tensors = dict[str, torch.Tensor]
Run = Callable[[Any, Tensors, Any], tuple[torch.Tensor, Any]]  # functions, tokens `[n, tokens, ...]`, a state


@dataclass(frozen=True)
class Rule:
    """One recurrence: transformers' functions for chunks and for single tokens, ours, and how they are called."""

    theirs: Any
    ours: Any
    inputs: Callable[[Callable[..., torch.Tensor], int, int], Tensors]
    constants: Callable[[Callable[..., torch.Tensor]], Tensors]
    state: tuple[int, ...]
    run: Callable[[Any, Tensors, Tensors, Any], tuple[torch.Tensor, Any]]
    in_pieces: bool = True  # theirs goes on with several tokens from a state


def delta(k_heads: int, heads: int, dk: int, dv: int, channels: bool, theirs: Any) -> Rule:
    def inputs(normal: Callable[..., torch.Tensor], n: int, tokens: int) -> Tensors:
        decays = (n, tokens, heads, dk) if channels else (n, tokens, heads)
        return {
            "query": normal(n, tokens, k_heads, dk),
            "key": normal(n, tokens, k_heads, dk),
            "value": normal(n, tokens, heads, dv),
            "g": -normal(*decays).abs(),
            "beta": normal(n, tokens, heads).sigmoid(),
        }

    def run(functions: Any, given: Tensors, constants: Tensors, state: Any) -> tuple[torch.Tensor, Any]:
        function = functions[1] if given["query"].shape[1] == 1 else functions[0]
        more = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        return function(**given, initial_state=state, **more)  # type: ignore[no-any-return]

    ours = (recurrences.gated_delta_rule,) * 2
    return Rule(theirs, ours, inputs, lambda normal: {}, (heads, dk, dv), run)


def convolution(channels: int, width: int, kept: int, bias: bool) -> Rule:
    def constants(normal: Callable[..., torch.Tensor]) -> Tensors:
        return {"weight": normal(channels, width), **({"bias": normal(channels)} if bias else {})}

    def run(functions: Any, given: Tensors, constants: Tensors, state: Any) -> tuple[torch.Tensor, Any]:
        x = given["x"].transpose(1, 2)
        if x.shape[-1] == 1 and state is not None:
            if isinstance(state, torch.Tensor):
                state = state.clone()
            return functions[1](x, state, **constants, activation="silu").transpose(1, 2), state
        past = torch.zeros(len(x), channels, kept) if state is None else state
        longer = torch.cat([past, x], dim=-1)
        out = functions[0](longer, **constants, activation="silu")[..., kept:]
        return out.transpose(1, 2), longer[..., -kept:].contiguous()

    def inputs(normal: Callable[..., torch.Tensor], n: int, tokens: int) -> Tensors:
        return {"x": normal(n, tokens, channels)}

    theirs = (qwen3_next.causal_conv1d_fn, qwen3_next.causal_conv1d_update)
    ours = (recurrences.causal_conv1d_fn, recurrences.causal_conv1d_update)
    return Rule(theirs, ours, inputs, constants, (channels, kept), run)


def scan_1(channels: int, size: int) -> Rule:
    def inputs(normal: Callable[..., torch.Tensor], n: int, tokens: int) -> Tensors:
        x, dt, z = (normal(n, tokens, channels) for _ in range(3))
        return {"x": x, "dt": dt, "z": z, "B": normal(n, tokens, size), "C": normal(n, tokens, size)}

    def constants(normal: Callable[..., torch.Tensor]) -> Tensors:
        return {"A": -normal(channels, size).exp(), "D": normal(channels), "bias": normal(channels)}

    def run(functions: Any, given: Tensors, constants: Tensors, state: Any) -> tuple[torch.Tensor, Any]:
        x, dt, z, b, c = (each.transpose(1, 2) for each in given.values())
        a, d, bias = constants.values()
        if x.shape[-1] == 1 and state is not None:
            if isinstance(state, torch.Tensor):
                state = state.clone()
            now = (each[..., 0] for each in (x, dt))
            out = functions[1](state, *now, a, b[..., 0], c[..., 0], d, z=z[..., 0], dt_bias=bias, dt_softplus=True)
            return out[:, None], state
        out, after = functions[0](
            x, dt, a, b, c, D=d, z=z, delta_bias=bias, delta_softplus=True, return_last_state=True
        )
        return out.transpose(1, 2), after

    theirs = (mamba.mamba_selective_scan, mamba.mamba_selective_state_update)
    ours = (recurrences.mamba_selective_scan, recurrences.mamba_selective_state_update)
    return Rule(theirs, ours, inputs, constants, (channels, size), run, in_pieces=False)


def scan_2(heads: int, groups: int, dim: int, size: int) -> Rule:
    def inputs(normal: Callable[..., torch.Tensor], n: int, tokens: int) -> Tensors:
        b, c = (normal(n, tokens, groups, size) for _ in range(2))
        return {"x": normal(n, tokens, heads, dim), "dt": normal(n, tokens, heads), "B": b, "C": c}

    def constants(normal: Callable[..., torch.Tensor]) -> Tensors:
        return {"A": -normal(heads).exp(), "D": normal(heads), "bias": normal(heads)}

    def run(functions: Any, given: Tensors, constants: Tensors, state: Any) -> tuple[torch.Tensor, Any]:
        x, dt, b, c = given.values()
        a, d, bias = constants.values()
        if x.shape[1] == 1 and state is not None:
            if isinstance(state, torch.Tensor):
                state = state.clone()
            wide = [each[:, None].expand(-1, dim) for each in (d, bias)]
            steps = dt.transpose(1, 2).expand(-1, -1, dim)
            decays = a[:, None, None].expand(-1, dim, size)
            out = functions[1](
                state, x[:, 0], steps, decays, b[:, 0], c[:, 0], wide[0], dt_bias=wide[1], dt_softplus=True
            )
            return out[:, None], state
        return functions[0](  # type: ignore[no-any-return]
            x, dt, a, b, c, 16, D=d, dt_bias=bias, dt_softplus=True, initial_states=state, return_final_states=True
        )

    theirs = (mamba2.mamba2_chunk_scan, mamba2.mamba2_selective_state_update)
    ours = (recurrences.mamba2_chunk_scan, recurrences.mamba_selective_state_update)
    return Rule(theirs, ours, inputs, constants, (heads, dim, size), run)


GATED = (qwen3_next.torch_chunk_gated_delta_rule, qwen3_next.torch_recurrent_gated_delta_rule)
KIMI = (kimi.chunk_kimi_delta_attention, kimi.recurrent_kimi_delta_attention)
RULES = {
    "gated delta, of Qwen3-Next": delta(16, 32, 128, 128, False, GATED),
    "gated delta, no multiple of a vector": delta(1, 3, 5, 70, False, GATED),
    "Kimi delta": delta(4, 4, 32, 128, True, KIMI),
    "Kimi delta, no multiple of a vector": delta(3, 3, 5, 7, True, KIMI),
    "convolution": convolution(1030, 4, 4, bias=False),
    "convolution, biased, of 3 taps": convolution(7, 3, 2, bias=True),
    "Mamba": scan_1(70, 16),
    "Mamba, no multiple of a vector": scan_1(5, 11),
    "Mamba-2": scan_2(8, 2, 64, 128),
    "Mamba-2, no multiple of a vector": scan_2(3, 1, 5, 37),
    "Mamba-2, of a large state": scan_2(2, 2, 4, 256),
}


def random_of(rule: Rule, n: int, tokens: int) -> tuple[Tensors, Tensors, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return rule.inputs(normal, n, tokens), rule.constants(normal), 0.3 * normal(n, *rule.state)


def off(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.std())


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("begun", [True, False])
def test_a_recurrence_is_that_of_transformers(name: str, tokens: int, begun: bool) -> None:
    """Output and state of two sequences, of one token and of many, from none and from a state, which is not changed."""
    rule = RULES[name]
    given, constants, state = random_of(rule, 2, tokens)
    before = state.clone()
    if begun and tokens > 1 and not rule.in_pieces:
        pytest.skip("transformers' does not go on with several tokens")
    ours = rule.run(rule.ours, given, constants, state if begun else None)
    theirs = rule.run(rule.theirs, given, constants, before.clone() if begun else None)
    assert off(ours[0], theirs[0]) < EXACT
    assert off(ours[1], theirs[1]) < EXACT
    assert torch.equal(state, before)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("cut", [1, 7, 39])
def test_a_token_has_the_same_bits_however_it_is_computed(name: str, cut: int) -> None:
    """In pieces of any length from the rows of a slot, alone or beside another sequence, with one thread or two. The
    state is read and written where it is, and is that of the slot when the step has succeeded, not before."""
    rule = RULES[name]
    given, constants, _ = random_of(rule, 2, 40)
    with threads(2), kernels.exact(CPU):
        whole, last = rule.run(rule.ours, given, constants, None)
    kind = "conv" if "convolution" in name else "recurrent"
    key = (0, kind, 0)
    facts = StateFacts((RecurrentState(key, rule.state, torch.float32),), "transformers")
    memory = StateMemory(layout_of([], 1, torch.float32, "", states=facts), 3, CPU)
    parts = []
    with threads(1), kernels.exact(CPU):
        for start in range(0, 40, cut):
            memory.begin()
            rows = SlotRows(memory, key, [2]) if start else None
            recurrences.asked_for.set(rows)
            part = {of: value[1:, start : start + cut] for of, value in given.items()}
            direct = kind == "recurrent" or part["x"].shape[1] == 1  # a convolution of several tokens has them as input
            state = rows if direct or rows is None else memory.get(key, [2])
            kept = memory.row(2).clone()
            out, after = rule.run(rule.ours, part, constants, state)
            if isinstance(after, torch.Tensor):
                memory.put(key, [2], after)
            parts.append(out)
            if start:  # a step that fails: the same again gives the same
                memory.begin()
                assert torch.equal(memory.row(2), kept)
                again = rows if direct else memory.get(key, [2])
                assert torch.equal(rule.run(rule.ours, part, constants, again)[0], out)
                if isinstance(after, torch.Tensor):
                    memory.put(key, [2], after)
            memory.commit()
    recurrences.asked_for.set(None)
    assert torch.equal(torch.cat(parts, dim=1), whole[1:])
    assert torch.equal(memory.get(key, [2]), last[1:])


@pytest.mark.parametrize("activation", [None, "silu", "gelu"])
def test_a_convolution_in_bfloat16_rounds_as_transformers_does(activation: str | None) -> None:
    """Its sums are in float32; what leaves it, and what the activation gets, is rounded."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 64, 9, generator=generator), torch.randn(64, 4, generator=generator)
    x, weight = x.bfloat16(), weight.bfloat16()
    ours = recurrences.causal_conv1d_fn(x, weight, activation=activation)
    theirs = qwen3_next.causal_conv1d_fn(x, weight, activation=activation)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert (ours != theirs).float().mean() < 0.02  # sums near the border of two numbers
    assert off(ours.float(), theirs.float()) < 0.02


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3-next", "torch_chunk_gated_delta_rule"),
        ("kimi-linear", "recurrent_kimi_delta_attention"),
        ("lfm2", "causal_conv1d_fn"),
        ("jamba", "mamba_selective_state_update"),
        ("falcon-h1", "mamba2_chunk_scan"),
    ],
)
@pytest.mark.parametrize("wrong", [None, "its numbers", "its arguments"])
def test_an_operator_that_does_something_else_is_not_used(
    family: str, name: str, wrong: str | None, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof at load compares each layer with transformers' own, which serves then."""
    right = recurrences.OPERATORS[name]

    def scaled(*given: Any, **options: Any) -> Any:
        if wrong == "its arguments":
            raise TypeError("unexpected keyword argument")
        out = right(*given, **options)
        return (out[0] * 0.999, *out[1:]) if isinstance(out, tuple) else out * 0.999

    if wrong:
        monkeypatch.setattr(recurrences, "OPERATORS", recurrences.OPERATORS | {name: scaled})
    model = load_model(str(checkpoint(f"tiny-{family}")), dtype=torch.float32, device=CPU, max_model_len=64)
    assert model.mixers is not None
    ours = [each.forward is not type(each.module).forward for each in model.mixers.each]
    assert ours == [wrong is None] * len(ours)


def test_lines_about_slow_functions_are_written_only_where_these_serve(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers writes them as soon as operators are compared with its own code. Others stay."""
    lines: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: lines.append(record.getMessage()))
    logger: Any = logging.getLogger(recurrences.SLOW_LOGGER)
    logger.addHandler(handler)
    try:
        for level, slow in (("auto", 0), ("reference", 1)):
            lines.clear()
            logger.warning_once.cache_clear()  # as in a new process
            load_model(str(checkpoint("tiny-lfm2")), dtype=torch.float32, device=CPU, kernels=level)  # type: ignore[arg-type]
            logger.warning("another")
            assert sum(recurrences.SLOW_LINE in line for line in lines) >= slow
            assert lines[-1] == "another"
            assert slow or len(lines) == 1
    finally:
        logger.removeHandler(handler)
    with recurrences.slow_lines_held():
        logger.warning("another")
    assert not logger.filters
