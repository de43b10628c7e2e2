"""Cost of LoRA adapters: seconds of a step with adapters over seconds of the same step without.

Eight random adapters on every linear layer except the head, in eight slots. Decode: 8 sequences of 256 tokens. Prefill:
256 tokens of one sequence. One thread; the sides take turns.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer

from engine.loading import lora_loader
from engine.loading.model_loader import load_model
from engine.loading.self_check import pack
from engine.runner.model_runner import ModelRunner
from loadtest.harness.options import Repeats
from loadtest.harness.random_checkpoints import make_adapter
from loadtest.harness.stats import Spread, in_turn, ratios, taken

COUNT, CONTEXT, BLOCK_SIZE = 8, 256, 16
BLOCKS = CONTEXT // BLOCK_SIZE
CPU = torch.device("cpu")


def step(model: ModelRunner, adapters: list[int], new: int) -> Callable[[], float]:
    """A function that runs a step of `new` tokens for each adapter, which ends at CONTEXT, and returns its seconds."""
    rng, pages = random.Random(0), model.allocate(len(adapters) * BLOCKS, BLOCK_SIZE)
    sequences = [
        ([rng.randrange(model.vocab_size) for _ in range(CONTEXT)], CONTEXT - new, list(range(at, at + BLOCKS)))
        for at in range(0, len(adapters) * BLOCKS, BLOCKS)
    ]
    batch = pack(sequences)
    batch.adapters = adapters
    return lambda: taken(lambda: model.forward(pages, batch))


def main(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Folder of the model.")],
    rank: Annotated[int, typer.Option(metavar="N", help="Of the adapters.")] = 16,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of weights and activations.")] = "float32",
    repeats: Repeats = 40,
) -> None:
    torch.set_num_threads(1)
    plain, model = _models(checkpoint, rank, getattr(torch, dtype))
    assert model.lora is not None
    print(f"an adapter has {model.lora.pool[0].nbytes / 2**20:.1f} MiB, the model {model.weight_bytes / 2**20:.0f}")
    for what, new, count, often in (("decode", 1, COUNT, repeats), ("prefill", CONTEXT, 1, max(1, repeats // 4))):
        sides = {
            "no adapters known": step(plain, [-1] * count, new),
            "known, none used": step(model, [-1] * count, new),
            "one for all": step(model, [0] * count, new),
        }
        if count > 1:
            sides[f"{count} different"] = step(model, list(range(count)), new)
        timings = in_turn(sides, often)
        first = next(iter(timings.values()))
        for name, seconds in timings.items():
            ratio, own = ratios(seconds, first), Spread.of(seconds)
            print(
                f"{what}, {name}: {ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f});"
                f" least {min(seconds) / min(first):.2f}, {min(seconds) * 1e3:.1f} ms, median {own.median * 1e3:.1f} ms"
            )


def _models(checkpoint: Path, rank: int, dtype: torch.dtype) -> tuple[ModelRunner, ModelRunner]:
    """Without adapters, and with all of them loaded."""
    with tempfile.TemporaryDirectory() as folder:
        made = {str(seed): make_adapter(f"{folder}/{seed}", checkpoint, seed=seed, rank=rank) for seed in range(COUNT)}
        plain = load_model(str(checkpoint), dtype=dtype, device=CPU, max_model_len=CONTEXT + 1)
        model = load_model(str(checkpoint), dtype=dtype, device=CPU, max_model_len=CONTEXT + 1, adapters=made)
        assert model.lora is not None
        for slot, name in enumerate(made):
            model.lora.put(slot, lora_loader.read_again(model.lora.known[name]))
    return plain, model
