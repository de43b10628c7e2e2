"""Effect of quantised weights, or of quantised KV, on a model's answers, and the memory that the weights save.

The same text goes through the model as the checkpoint has it and with quantised weights or KV. At every position the
two distributions of the next token are compared:

    same token   share of positions at which both have the same most likely token
    KL           mean divergence of the quantised model's distribution from the checkpoint's, in nats
    loss         mean of -log p(next token of the text), in nats, and its increase

With --checkpoints the others are folders of the same model that are quantised already (GPTQ, AWQ, FP8,
compressed-tensors); with --kv the KV alone is quantised. Without --text, the text is docstrings of Python's standard
library. The numbers of a model with random weights mean nothing.
"""

from __future__ import annotations

import inspect
import math
import pydoc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from tokenizers import Tokenizer

from engine.core.weight_formats import BITS
from engine.loading.model_loader import load_model
from engine.loading.self_check import pack
from engine.runner.model_runner import CHECKPOINT, ModelRunner
from loadtest.harness.options import names

WINDOW = 256  # tokens that are read at once, and then forgotten
BLOCK_SIZE = 16
DOCUMENTED = (
    *("argparse", "asyncio.tasks", "collections", "csv", "datetime", "email.message", "heapq", "http.client", "json"),
    *("logging", "pathlib", "random", "re", "shutil", "socket", "sqlite3", "subprocess", "threading", "zipfile"),
)


@dataclass(frozen=True)
class Quality:
    """Of `positions` positions; `loss` in nats a token."""

    positions: int
    same_token: float
    divergence: float
    loss: float
    loss_before: float
    weight_bytes: int


def compare(before: ModelRunner, after: ModelRunner, tokens: list[int]) -> Quality:
    """Holds one model against another of the same vocabulary over a text."""
    same = divergence = loss = loss_before = 0.0
    positions = 0
    for start in range(0, len(tokens) - 1, WINDOW):
        window = tokens[start : start + WINDOW + 1]
        following = torch.tensor(window[1:]).unsqueeze(1)
        ours, theirs = (log_probabilities(model, window[:-1]) for model in (after, before))
        positions += len(following)
        same += (ours.argmax(1) == theirs.argmax(1)).sum().item()
        divergence += (theirs.exp() * (theirs - ours)).sum().item()
        loss -= ours.gather(1, following).sum().item()
        loss_before -= theirs.gather(1, following).sum().item()
    return Quality(
        positions,
        same / positions,
        divergence / positions,
        loss / positions,
        loss_before / positions,
        after.weight_bytes,
    )


def log_probabilities(model: ModelRunner, tokens: list[int]) -> torch.Tensor:
    """Of the next token after each of these: float64 `[len(tokens), vocab]`."""
    blocks = math.ceil(len(tokens) / BLOCK_SIZE)
    batch = pack([(tokens, 0, list(range(blocks)))])
    batch.logits_at = list(range(len(tokens)))
    return model.forward(model.allocate(blocks, BLOCK_SIZE), batch).double().log_softmax(1)


def docstrings() -> str:
    """Some hundred thousand characters that do not change while the Python does not."""
    texts = []
    for name in DOCUMENTED:
        module = pydoc.locate(name)
        for _, member in inspect.getmembers(module):
            texts.append(inspect.getdoc(member) or "" if callable(member) else "")
    return "\n\n".join(dict.fromkeys(filter(None, texts)))


def main(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="The checkpoint.")],
    weights: Annotated[str, typer.Option(metavar="FORMAT,...", help="Formats to round to.")] = "int8,fp8,int4",
    checkpoints: Annotated[
        str, typer.Option(metavar="FOLDER,...", help="The same model, quantised already; instead of --weights.")
    ] = "",
    kv: Annotated[str, typer.Option(metavar="TYPE,...", help="int8, fp8: types of the KV; instead of --weights.")] = "",
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Of the activations.")] = "bfloat16",
    tokens: Annotated[int, typer.Option(metavar="N", help="Of the text.")] = 4096,
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="The text; docstrings by default.")] = None,
) -> None:
    folders = checkpoints.split(",") if checkpoints else []
    kinds = names(kv, ("int8", "fp8")) if kv else ()
    formats = () if folders or kinds else names(weights, BITS)
    read = text.read_text() if text else docstrings()
    ids = Tokenizer.from_file(str(Path(folder) / "tokenizer.json")).encode(read).ids[: tokens + 1]

    def load(folder: str = folder, **options: Any) -> ModelRunner:
        cpu = torch.device("cpu")
        return load_model(folder, dtype=getattr(torch, dtype), device=cpu, progress=lambda _line: None, **options)

    others: dict[str, Callable[[], ModelRunner]] = {
        **{Path(other).name: partial(load, other) for other in folders},
        **{f"KV {kind}": partial(load, kv_dtype=kind) for kind in kinds},
        **{name: partial(load, weights=name) for name in formats},
    }
    before = load()
    print(f"{'weights':<12} {'MiB':>8} {'same token':>11} {'KL':>9} {'loss':>7}")
    print(f"{CHECKPOINT:<12} {before.weight_bytes / 2**20:>8.2f}")
    for name, other in others.items():
        row = compare(before, other(), ids)
        more = row.loss - row.loss_before
        print(
            f"{name:<12} {row.weight_bytes / 2**20:>8.2f} {row.same_token:>10.2%} {row.divergence:>9.5f}"
            f" {row.loss:>7.4f}  {more:+.4f} of {row.loss_before:.4f} over {row.positions} tokens"
        )
