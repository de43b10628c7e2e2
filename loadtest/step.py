"""The engine's packed step against a plain transformers forward of the same tokens, and against what the machine could
do at most."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, DynamicCache

from engine.engine import Engine
from engine.model import Model
from engine.sequence import Sequence
from loadtest.stats import Row, Section, Spread, Tick, in_turn, ratios, taken

ATTENTION = ("sdpa", "eager")
BLOCK_SIZE = 16
GEMM = (512, 2048, 2048)  # rows, inner, columns
STREAM_BYTES = 256 * 2**20  # far more than any cache


@dataclass(frozen=True)
class Plan:
    """`prompt` tokens are prefilled at once; `batch` sequences of `context` tokens decode. `repeats` of each side."""

    prompt: int = 512
    batch: int = 8
    context: int = 256
    repeats: int = 7
    dtypes: tuple[str, ...] = ("float32", "bfloat16")

    @property
    def ticks(self) -> int:
        return 2 * len(self.dtypes)


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
        f"floor of prefill: 2 x parameters of the layers x tokens / GEMM rate ({GEMM[0]}x{GEMM[1]}x{GEMM[2]});"
        f" floor of decode: (weights + KV read) / read bandwidth ({STREAM_BYTES >> 20} MiB summed)",
    ]
    return Section("Packed engine step against a plain transformers forward", read, rows, notes)


def _of_dtype(folder: Path, name: str, plan: Plan, tick: Tick) -> list[Row]:
    dtype: torch.dtype = getattr(torch, name)
    longest = max(plan.prompt, plan.context + plan.repeats + 8)
    model = Model.load(str(folder), dtype=dtype, device=torch.device("cpu"), max_model_len=longest + 1)
    blocks = (plan.batch + 2) * -(-(longest + 1) // BLOCK_SIZE)
    budget = max(plan.prompt, plan.batch)
    engine = Engine(model, num_blocks=blocks, block_size=BLOCK_SIZE, token_budget=budget, max_running=plan.batch)
    auto: Any = AutoModelForCausalLM  # transformers' factories are not typed
    plain = auto.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()
    tick(f"prefill of {plan.prompt} tokens, {name}")
    prefill = _prefill(engine, plain, plan, dtype)
    tick(f"decode of {plan.batch} sequences, {name}")
    decode = _decode(engine, plain, plan)

    inner = model.parameters - model.vocab_size * model.config.hidden_size  # looked up, or for one position
    flop = 2 * inner * plan.prompt
    kv = plan.batch * plan.context * model.block_bytes(BLOCK_SIZE) // BLOCK_SIZE
    gemm, read = [_gemm_flop() / one for one in prefill["floor"]], [STREAM_BYTES / one for one in decode["floor"]]
    moved = model.step_bytes + kv
    rows = _rows(f"prefill {plan.prompt} tokens, {name}", prefill, [flop / one for one in gemm])
    rows[-1].beside["GEMM"] = (Spread.of(gemm), "FLOP/s")
    rows += _rows(f"decode {plan.batch} x context {plan.context}, {name}", decode, [moved / one for one in read])
    rows[-1].beside["read"] = (Spread.of(read), "B/s")
    return rows


def _rows(what: str, found: dict[str, list[float]], floor: list[float]) -> list[Row]:
    packed = found["packed"]
    rows = [
        Row(
            f"{what}: packed / {one}",
            ratios(packed, found[one]),
            {"packed": (Spread.of(packed), "s"), one: (Spread.of(found[one]), "s")},
        )
        for one in ATTENTION
    ]
    beside = {"floor": (Spread.of(floor), "s")}
    return [*rows, Row(f"{what}: floor / packed", ratios(floor, packed), beside)]


def _prefill(engine: Engine, plain: Any, plan: Plan, dtype: torch.dtype) -> dict[str, list[float]]:
    vocab = engine.model.vocab_size
    a, b = torch.randn(GEMM[0], GEMM[1]).to(dtype), torch.randn(GEMM[2], GEMM[1]).to(dtype)

    def packed() -> float:
        tokens = _random_ids(vocab, plan.prompt)  # fresh, so that the prefix cache has none of it
        sequence = Sequence(id="prompt", tokens=tokens, prompt_len=plan.prompt, limit=plan.prompt + 1)
        engine.add(sequence)
        seconds = taken(engine.step)
        assert len(sequence.tokens) == plan.prompt + 1, "the prompt did not fit into one step"
        return seconds

    def forward(attention: str) -> Callable[[], float]:
        def once() -> float:
            plain.set_attn_implementation(attention)
            ids = torch.tensor([_random_ids(vocab, plan.prompt)])
            with torch.inference_mode():
                return taken(lambda: plain(input_ids=ids, use_cache=False, logits_to_keep=1).logits.argmax(-1))

        return once

    plains = {one: forward(one) for one in ATTENTION}
    return in_turn({"packed": packed, **plains, "floor": lambda: taken(lambda: F.linear(a, b))}, plan.repeats)


def _decode(engine: Engine, plain: Any, plan: Plan) -> dict[str, list[float]]:
    vocab = engine.model.vocab_size
    prompts = [_random_ids(vocab, plan.context) for _ in range(plan.batch)]
    limit = plan.context + plan.repeats + 8
    for index, prompt in enumerate(prompts):
        engine.add(Sequence(id=f"stream-{index}", tokens=prompt, prompt_len=plan.context, limit=limit))
    while any(sequence.todo > 1 for sequence in engine.sequences.values()):
        engine.step()
    with torch.inference_mode():
        cache, ids = DynamicCache(), torch.tensor([prompt[: plan.context] for prompt in prompts])
        out = plain(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    start = out.logits.argmax(-1)  # [batch, 1]
    stream = torch.ones(STREAM_BYTES // 4)

    def packed() -> float:
        assert all(sequence.todo == 1 for sequence in engine.sequences.values())
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

    plains = {one: forward(one) for one in ATTENTION}
    found = in_turn({"packed": packed, **plains, "floor": lambda: taken(stream.sum)}, plan.repeats)
    for name in list(engine.sequences):
        engine.drop(name)
    return found


def _gemm_flop() -> int:
    return 2 * GEMM[0] * GEMM[1] * GEMM[2]


def _random_ids(vocab: int, count: int) -> list[int]:
    return random.choices(range(vocab), k=count)
