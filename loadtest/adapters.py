"""What LoRA adapters cost: seconds of a step with them over seconds of the same step without.

    python -m loadtest.adapters CHECKPOINT [--rank 16] [--dtype float32] [--repeats 40]

Eight random adapters on every linear layer but the head, in eight slots. Decode: 8 sequences of 256. Prefill: 256
tokens of one. One thread; the sides in turn.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from engine.checkpoints import make_adapter
from engine.model import Model
from engine.selfcheck import pack
from loadtest.stats import Spread, in_turn, ratios, taken

COUNT, CONTEXT, BLOCK_SIZE = 8, 256, 16
BLOCKS = CONTEXT // BLOCK_SIZE
CPU = torch.device("cpu")


def step(model: Model, adapters: list[int], new: int) -> Callable[[], float]:
    """A function that runs a step of `new` tokens for each adapter, which ends at CONTEXT, and returns its seconds."""
    rng, pages = random.Random(0), model.allocate(len(adapters) * BLOCKS, BLOCK_SIZE)
    sequences = [
        ([rng.randrange(model.vocab_size) for _ in range(CONTEXT)], CONTEXT - new, list(range(at, at + BLOCKS)))
        for at in range(0, len(adapters) * BLOCKS, BLOCKS)
    ]
    batch = pack(sequences)
    batch.adapters = adapters
    return lambda: taken(lambda: model.forward(pages, batch))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=40)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, given.dtype)
    with tempfile.TemporaryDirectory() as folder:
        made = {
            str(seed): make_adapter(f"{folder}/{seed}", given.checkpoint, seed=seed, rank=given.rank)
            for seed in range(COUNT)
        }
        plain = Model.load(str(given.checkpoint), dtype=dtype, device=CPU, max_model_len=CONTEXT + 1)
        model = Model.load(str(given.checkpoint), dtype=dtype, device=CPU, max_model_len=CONTEXT + 1, adapters=made)
        assert model.lora is not None
        for slot, name in enumerate(made):
            model.lora.put(slot, model.lora.load(name))
    print(f"an adapter has {model.lora.pool[0].nbytes / 2**20:.1f} MiB, the model {model.weight_bytes / 2**20:.0f}")
    for what, new, count, repeats in (("decode", 1, COUNT, given.repeats), ("prefill", CONTEXT, 1, given.repeats // 4)):
        sides = {
            "no adapters known": step(plain, [-1] * count, new),
            "known, none used": step(model, [-1] * count, new),
            "one for all": step(model, [0] * count, new),
        }
        if count > 1:
            sides[f"{count} different"] = step(model, list(range(count)), new)
        found = in_turn(sides, repeats)
        first = next(iter(found.values()))
        for name, seconds in found.items():
            ratio, own = ratios(seconds, first), Spread.of(seconds)
            print(
                f"{what}, {name}: {ratio.median:.2f} ({ratio.low:.2f}-{ratio.high:.2f});"
                f" least {min(seconds) / min(first):.2f}, {min(seconds) * 1e3:.1f} ms, median {own.median * 1e3:.1f} ms"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
