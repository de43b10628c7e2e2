"""A prompt of 512 tokens in bfloat16, by format of the weights, as a share of its floor: 2 x parameters of the layers x
tokens at the best rate of a large product.

The sides and the products take turns, and each is compared at the same rank of its times: the least, the first tenth,
and the median. Where neighbours share the processor, whole seconds are half as fast as others, and the median of one
side compared with the least of another says nothing.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

from engine.core.engine_config import EngineConfig
from engine.core.sequence import Sequence
from engine.engine import Engine
from engine.loading.model_loader import load_model
from loadtest.harness import machine
from loadtest.harness.machine import Sizes, describe
from loadtest.harness.options import Repeats, Shape, Threads
from loadtest.harness.random_checkpoints import REAL, make_checkpoint
from loadtest.harness.stats import in_turn, percentile, taken

PROMPT = 512  # tokens
BLOCK = 16
RANKS = {"least": 0.0, "tenth": 0.1, "median": 0.5}
CPU = torch.device("cpu")


def new_prompt(engine: Engine, length: int) -> Callable[[], float]:
    """A function that computes a new prompt of this many tokens in one step and returns its seconds."""

    def once() -> float:
        tokens = random.choices(range(engine.model.vocab_size), k=length)  # so that the prefix cache has none of it
        sequence = Sequence(id="prompt", tokens=tokens, prompt_len=length, max_len=length + 1)
        engine.add(sequence)
        seconds = taken(engine.step)
        assert len(sequence.tokens) == length + 1, "the prompt did not fit into one step"
        return seconds

    return once


def _engine(folder: Path, weights: str) -> Engine:
    model = load_model(str(folder), dtype=torch.bfloat16, device=CPU, max_model_len=PROMPT + 1, weights=weights)
    blocks = 3 * (PROMPT // BLOCK + 1)
    config = EngineConfig(num_blocks=blocks, block_size=BLOCK, token_budget=PROMPT, max_running=1, spare_block=True)
    return Engine(model, config)


def main(
    shape: Shape = "SmolLM2-135M",
    threads: Threads = 1,
    repeats: Repeats = 40,
    weights: Annotated[str, typer.Option(metavar="FORMAT,...", help="As in the settings.")] = "checkpoint,int8",
) -> None:
    torch.set_num_threads(threads)
    flop: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="tandem-prefill-") as folder:
        checkpoint = make_checkpoint(Path(folder) / "model", shape)
        sides = {each: new_prompt(_engine(checkpoint, each), PROMPT) for each in weights.split(",")}
    formats = list(sides)
    for size in machine.Plan().shapes:
        for whose, product in machine.products(torch.bfloat16, size).items():
            name = f"{whose}, {'x'.join(map(str, size))}"
            sides[name], flop[name] = product, 2.0 * size[0] * size[1] * size[2]
    times = in_turn(sides, repeats)
    needed = 2 * Sizes.of(REAL[shape]).layers * PROMPT
    about = describe()
    print(f"{about['processor']} ({', '.join(about['instructions'])}), {about['operators']}")
    print(f"{shape}, {PROMPT} tokens, {threads} thread{'s' * (threads > 1)}, {repeats} times\n")
    print(f"| | weights | ms | of the floor | over {formats[0]} | product, GFLOP/s |\n|{'---|' * 6}")
    for rank, part in RANKS.items():
        rate = max(flop[name] / percentile(times[name], part) for name in flop)
        for each in formats:
            seconds = percentile(times[each], part)
            ratio = seconds / percentile(times[formats[0]], part)
            share = needed / rate / seconds
            print(f"| {rank} | {each} | {seconds * 1e3:.0f} | {share:.0%} | {ratio:.2f} | {rate / 1e9:.0f} |")
