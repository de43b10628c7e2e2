"""The engine's packed step, compared with a plain transformers forward of the same tokens and with the floor."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from engine.core.engine_config import EngineConfig
from engine.core.sequence import Sequence
from engine.engine import Engine
from engine.kernels.modules import panels
from engine.loading.model_loader import load_model
from loadtest.harness import machine
from loadtest.harness.stats import Row, Section, Spread, Tick, in_turn, ratios, taken
from loadtest.microbench.prefill import new_prompt

ATTENTION = ("sdpa", "eager")
BLOCK_SIZE = 16
WANTED = {1: 0.85, 8: 0.75, 16: 0.65}  # of the floor, by sequences that decode: promised in bfloat16


@dataclass(frozen=True)
class Plan:
    """`prompt` tokens are prefilled at once; each of `batches` sequences of `context` tokens decodes. `repeats` of each
    side."""

    prompt: int = 512
    batches: tuple[int, ...] = (1, 8, 16)
    context: int = 256
    repeats: int = 7
    dtypes: tuple[str, ...] = ("float32", "bfloat16")

    @property
    def ticks(self) -> int:
        return (2 + len(self.batches)) * len(self.dtypes)


def run(folder: Path, plan: Plan, threads: int, tick: Tick) -> Section:
    """Measures in this process, with so many torch threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows = [row for name in plan.dtypes for row in _of_dtype(folder, name, plan, tick)]
    finally:
        torch.set_num_threads(before)
    read = (
        "a / b is seconds of a over seconds of b: below 1, a is faster. The floor is the least that this machine needs"
    )
    notes = [
        "both sides compute the logits of the last position only, and take the argmax",
        f"floor of prefill: 2 x parameters of the layers x tokens / GEMM rate ({'x'.join(map(str, machine.GEMM))},"
        " ours or torch's, whichever is faster);"
        " floor of decode: the longer of (weights + KV read) / read bandwidth (the model's own weights, read once), and"
        " of 2 x parameters x sequences / GEMM rate",
    ]
    return Section("Packed engine step against a plain transformers forward", read, rows, notes)


def _of_dtype(folder: Path, name: str, plan: Plan, tick: Tick) -> list[Row]:
    dtype: torch.dtype = getattr(torch, name)
    longest = max(plan.prompt, plan.context + plan.repeats + 8)
    model = load_model(str(folder), dtype=dtype, device=torch.device("cpu"), max_model_len=longest + 1)
    most = max(plan.batches)
    blocks = (most + 2) * -(-(longest + 1) // BLOCK_SIZE)
    budget = max(plan.prompt, most)
    engine = Engine(
        model,
        EngineConfig(num_blocks=blocks, block_size=BLOCK_SIZE, token_budget=budget, max_running=most, spare_block=True),
    )
    tick(f"decode steps {engine.capture()}, {name}")
    auto: Any = AutoModelForCausalLM  # transformers' factories are not typed
    plain = auto.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()
    tick(f"prefill of {plan.prompt} tokens, {name}")
    prefill = _prefill(engine, plain, plan, dtype)
    gemm = [_gemm_flop() / second for second in prefill["floor"]]
    inner = model.parameters - model.vocab_size * model.config.hidden_size  # looked up, or for one position
    rows = _rows(f"prefill {plan.prompt} tokens, {name}", prefill, [2 * inner * plan.prompt / rate for rate in gemm])
    rows[-1].beside["GEMM"] = (Spread.of(gemm), "FLOP/s")
    weights = panels(model.module) or [each.detach() for each in model.module.parameters()]
    for batch in plan.batches:
        tick(f"decode of {batch} sequences, {name}")
        decode = _decode(engine, plain, plan, batch, machine.reader_of(weights))
        read = [sum(each.nbytes for each in weights) / second for second in decode["floor"]]
        kv = batch * plan.context * model.block_bytes(BLOCK_SIZE) // BLOCK_SIZE
        computed = 2 * batch * model.step_bytes / dtype.itemsize / max(gemm)
        floor = [max(computed, (model.step_bytes + kv) / rate) for rate in read]
        wanted = WANTED.get(batch) if name == "bfloat16" else None
        rows += _rows(f"decode {batch} x context {plan.context}, {name}", decode, floor, wanted)
        rows[-1].beside["read"] = (Spread.of(read), "B/s")
    return rows


def _rows(what: str, seconds: dict[str, list[float]], floor: list[float], wanted: float | None = None) -> list[Row]:
    packed = seconds["packed"]
    rows = [
        Row.of(f"{what}: packed / {name}", packed, seconds[name], {"packed": packed, name: seconds[name]})
        for name in ATTENTION
    ]
    share, mark = ratios(floor, packed), ""
    if wanted is not None:
        mark = f" (≥ {wanted:g}: {'kept' if share.median >= wanted else 'NOT KEPT'})"
    return [*rows, Row(f"{what}: floor / packed{mark}", share, {"floor": (Spread.of(floor), "s")})]


def _prefill(engine: Engine, plain: Any, plan: Plan, dtype: torch.dtype) -> dict[str, list[float]]:
    vocab = engine.model.vocab_size
    products = machine.products(dtype).values()

    def forward(attention: str) -> Callable[[], float]:
        def once() -> float:
            plain.set_attn_implementation(attention)
            ids = torch.tensor([random.choices(range(vocab), k=plan.prompt)])
            with torch.inference_mode():
                return taken(lambda: plain(input_ids=ids, use_cache=False, logits_to_keep=1).logits.argmax(-1))

        return once

    plains = {implementation: forward(implementation) for implementation in ATTENTION}
    sides = {"packed": new_prompt(engine, plan.prompt), **plains}
    return in_turn({**sides, "floor": lambda: min(product() for product in products)}, plan.repeats)


def _decode(engine: Engine, plain: Any, plan: Plan, batch: int, read: Callable[[], float]) -> dict[str, list[float]]:
    vocab = engine.model.vocab_size
    prompts = [random.choices(range(vocab), k=plan.context) for _ in range(batch)]
    max_len = plan.context + plan.repeats + 8
    for index, prompt in enumerate(prompts):
        engine.add(Sequence(id=f"stream-{index}", tokens=prompt, prompt_len=plan.context, max_len=max_len))
    while any(sequence.num_uncomputed > 1 for sequence in engine.sequences.values()):
        engine.step()
    with torch.inference_mode():
        cache, ids = DynamicCache(), torch.tensor([prompt[: plan.context] for prompt in prompts])
        out = plain(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    start = out.logits.argmax(-1)  # [batch, 1]

    def packed() -> float:
        assert all(sequence.num_uncomputed == 1 for sequence in engine.sequences.values())
        return taken(engine.step)

    def forward(attention: str) -> Callable[[], float]:
        own, ids = copy.deepcopy(cache), start

        def once() -> float:
            nonlocal ids
            plain.set_attn_implementation(attention)
            with torch.inference_mode():

                def step() -> None:
                    nonlocal ids
                    ids = plain(input_ids=ids, past_key_values=own, logits_to_keep=1).logits.argmax(-1)

                return taken(step)

        return once

    plains = {implementation: forward(implementation) for implementation in ATTENTION}
    seconds = in_turn({"packed": packed, **plains, "floor": read}, plan.repeats)
    for name in list(engine.sequences):
        engine.drop(name)
    return seconds


def _gemm_flop() -> int:
    rows, inner, columns = machine.GEMM
    return 2 * rows * inner * columns
