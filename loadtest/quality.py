"""What rounding the weights does to a model's answers, and what it saves.

    python -m loadtest.quality FOLDER [--weights int8,fp8,int4] [--dtype bfloat16] [--tokens 4096] [--text FILE]
    python -m loadtest.quality FOLDER --checkpoints FOLDER,FOLDER ...

The same text goes through the model with the checkpoint's weights and with rounded ones. At every position the two
distributions of the next token are compared:

    same token   share of positions at which both would choose the same token, greedily
    KL           mean divergence of the rounded model's distribution from the checkpoint's, in nats
    loss         mean of -log p(the token that the text has next), in nats; and by how much it is more than before

With --checkpoints the others are folders of the same model, quantised already (GPTQ, AWQ, FP8, compressed-tensors).
Without --text it is docstrings of Python's standard library. A model with random weights has no quality to lose: its
numbers say nothing.
"""

from __future__ import annotations

import argparse
import inspect
import math
import pydoc
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from engine.formats import BITS
from engine.model import CHECKPOINT, Model
from engine.selfcheck import pack
from tandem.errors import TandemError

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


def compare(before: Model, after: Model, tokens: list[int]) -> Quality:
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


def log_probabilities(model: Model, tokens: list[int]) -> torch.Tensor:
    """Of the next token after each of these: float64 `[len(tokens), vocab]`."""
    blocks = math.ceil(len(tokens) / BLOCK_SIZE)
    batch = pack([(tokens, 0, list(range(blocks)))])
    batch.logits_at = list(range(len(tokens)))
    return model.forward(model.allocate(blocks, BLOCK_SIZE), batch).double().log_softmax(1)


def docstrings() -> str:
    """Some hundred thousand characters that do not change while the Python does not."""
    found = []
    for name in DOCUMENTED:
        module = pydoc.locate(name)
        for _, member in inspect.getmembers(module):
            found.append(inspect.getdoc(member) or "" if callable(member) else "")
    return "\n\n".join(dict.fromkeys(filter(None, found)))


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.quality", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder")
    parser.add_argument("--weights", default="int8,fp8,int4", help="formats, with commas between them")
    parser.add_argument("--checkpoints", default="", help="folders of the model, quantised already; not --weights")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--text", type=Path)
    given = parser.parse_args(arguments)
    folders = given.checkpoints.split(",") if given.checkpoints else []
    formats = [] if folders else given.weights.split(",")
    if unknown := sorted(set(formats) - BITS.keys()):
        parser.error(f"no format {', '.join(unknown)}; there are {', '.join(BITS)}")
    text = given.text.read_text() if given.text else docstrings()
    tokens = Tokenizer.from_file(str(Path(given.folder) / "tokenizer.json")).encode(text).ids[: given.tokens + 1]

    def load(weights: str, folder: str = given.folder) -> Model:
        dtype, cpu = getattr(torch, given.dtype), torch.device("cpu")
        return Model.load(folder, dtype=dtype, device=cpu, weights=weights, progress=lambda _line: None)

    try:
        before = load(CHECKPOINT)
        print(f"{'weights':<12} {'MiB':>8} {'same token':>11} {'KL':>9} {'loss':>7}")
        print(f"{CHECKPOINT:<12} {before.weight_bytes / 2**20:>8.2f}")
        for name in folders or formats:
            one = compare(before, load(CHECKPOINT, name) if folders else load(name), tokens)
            more = one.loss - one.loss_before
            print(
                f"{Path(name).name:<12} {one.weight_bytes / 2**20:>8.2f} {one.same_token:>10.2%} {one.divergence:>9.5f}"
                f" {one.loss:>7.4f}  {more:+.4f} of {one.loss_before:.4f} over {one.positions} tokens"
            )
    except TandemError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
