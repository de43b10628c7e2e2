"""What the steps of a loaded model take, before the first request."""

from __future__ import annotations

from time import perf_counter

from engine.attention.forward_context import Batch
from engine.core.step_time import MANY, StepTime
from engine.engine import Engine
from engine.runner.model_runner import ModelRunner

TOKENS = 256


def pace(model: ModelRunner, longest: int, max_running: int, block_size: int) -> StepTime:
    """Times a prompt of at most `longest` tokens and steps of one stream and of several, each the second time: the
    first warms up."""
    length, several = min(longest, TOKENS), min(1 + MANY, max_running)
    blocks = -(-(length + 1) // block_size)
    pages = model.allocate(blocks, block_size, several)
    table = list(range(blocks))

    def seconds(first: int, count: int, sequences: int = 1) -> float:
        batch = Batch()
        for _ in range(sequences):
            batch.add([at % model.vocab_size for at in range(first, first + count)], first, table, [count - 1])
        batch.slots = list(range(sequences))
        model.forward(pages, batch).cpu()  # on a GPU waits for it; the next one's time would include it
        start = perf_counter()
        model.forward(pages, batch).cpu()
        return perf_counter() - start

    prompt = seconds(0, length)
    single, batched = seconds(length, 1), seconds(length, 1, several)
    own = max(prompt - single, prompt / 2)  # what its tokens add to a step; a short prompt hides in one
    return StepTime(single, max(0.0, batched - single) / max(1, several - 1), length / own)


def captured_seconds(engine: Engine) -> float:
    """Of a step of one stream, the second time; in a block and with states that no sequence has yet."""
    batch = Batch([0], [1], [1], [2], [[0]], [0], slots=[engine.config.max_running])
    engine.forward(batch).cpu()  # as in `pace`
    start = perf_counter()
    engine.forward(batch).cpu()
    return perf_counter() - start
