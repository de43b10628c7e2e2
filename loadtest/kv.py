"""What int8 and fp8 KV cost and bring: CPU time of a decode step's attention, bytes, and how far the logits go.

    python -m loadtest.kv [--model demo/model] [--shape SmolLM2-135M] [--contexts 2048,4096] [--batches 1,8]
                          [--repeats 15] [--only quality]

Speed: the attention calls of one decode step of a model's shape, one thread, bfloat16; seconds of CPU of each KV dtype
in turn, and the least of each, with the rate at which it reads. Every layer has pages of its own, so they come from
memory as in a step.

Quality: the model's logits over text of Python's standard library, windows of 512 tokens through pages, against its own
in float32 with float32 KV. bfloat16 throughout is the yardstick: that is what everybody accepts.
"""

from __future__ import annotations

import argparse
import inspect
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import thread_time
from typing import Literal

import torch
from tokenizers import Tokenizer

from engine import kernels
from engine.checkpoints import REAL
from engine.facts import CallFacts, Full
from engine.model import Model
from engine.pages import Pages, layout_of
from engine.quantised import element_dtype, quantise
from engine.selfcheck import pack
from loadtest.stats import in_turn

Kind = Literal["auto", "int8", "fp8"]
KINDS: tuple[Kind, ...] = ("auto", "int8", "fp8")
CPU = torch.device("cpu")
BLOCK_SIZE = 16
WINDOW, WINDOWS, PROMPT, NEW = 512, 24, 64, 64  # tokens; windows; tokens; tokens
MODULES = "argparse collections functools itertools json os.path pathlib random shutil statistics string textwrap"


# ---- speed


@dataclass(frozen=True)
class Shape:
    layers: int
    heads: int
    kv_heads: int
    dim: int

    @classmethod
    def of(cls, name: str) -> Shape:
        """Of a model in engine.checkpoints."""
        given = REAL[name]
        heads = given["num_attention_heads"]
        dim = given.get("head_dim", given["hidden_size"] // heads)
        return cls(given["num_hidden_layers"], heads, given["num_key_value_heads"], dim)


def decode_attention(shape: Shape, kind: Kind, batch: int, context: int) -> tuple[Callable[[], float], int]:
    """A function that attends once in every layer and returns its seconds of CPU; and the bytes of a token."""
    kept, dtype = element_dtype(kind), torch.bfloat16
    fact = CallFacts(shape.kv_heads, shape.heads, shape.dim, shape.dim, Full(), None, False, shape.dim**-0.5)
    blocks = batch * -(-context // BLOCK_SIZE)
    pages = Pages(layout_of([fact] * shape.layers, BLOCK_SIZE, dtype, "", kept), blocks, CPU)
    new = torch.randn(blocks, BLOCK_SIZE, shape.kv_heads, shape.dim).to(dtype)
    for call in range(shape.layers):
        for values, scales in ((pages.k, pages.k_scales), (pages.v, pages.v_scales)):
            into, factors = values(call), scales(call)
            if factors is None or kept is None:
                into.copy_(new)
            else:
                elements, own = quantise(new, kept)
                into.view(torch.uint8).copy_(elements.view(torch.uint8))
                factors.copy_(own)
    ids = random.sample(range(blocks), blocks)
    table = torch.tensor(ids, dtype=torch.int32).view(batch, -1)
    starts = torch.arange(batch + 1, dtype=torch.int32)
    lengths = torch.full((batch,), context, dtype=torch.int32)
    query = torch.randn(batch, shape.heads, shape.dim).to(dtype)
    out = torch.empty_like(query)

    def run() -> float:
        start = thread_time()
        for call in range(shape.layers):
            torch.ops.tandem.attend.default(
                *(out, query, pages.k(call), pages.v(call), starts, lengths, table, 0, 0, fact.scaling, None, None),
                *(pages.k_scales(call), pages.v_scales(call)),
            )
        return thread_time() - start

    return run, pages.block_bytes // BLOCK_SIZE


def speed(shape: Shape, batches: list[int], contexts: list[int], repeats: int) -> None:
    if kernels.serving(CPU) == kernels.REFERENCE:
        raise SystemExit("needs the compiled operators: python -m engine.kernels.build")
    print("| batch | context | bfloat16 | int8 | fp8 |\n|---|---|---|---|---|")
    size: dict[str, int] = {}
    for batch in batches:
        for context in contexts:
            sides: dict[str, Callable[[], float]] = {}
            for kind in KINDS:
                sides[kind], size[kind] = decode_attention(shape, kind, batch, context)
            least = {kind: min(found) for kind, found in in_turn(sides, repeats).items()}
            cells = [
                f"{least[kind] * 1e3:.2f} ms ({least[kind] / least['auto']:.2f},"
                f" {batch * context * size[kind] / least[kind] / 1e9:.1f} GB/s)"
                for kind in KINDS
            ]
            print(f"| {batch} | {context:,} | {' | '.join(cells)} |", flush=True)
    cells = [f"{size[kind]:,} B ({size[kind] / size['auto']:.3f})" for kind in KINDS]
    print(f"| | a token's KV | {' | '.join(cells)} |\n")


# ---- quality


@dataclass(frozen=True)
class Quality:
    """Against the reference: the root mean square of the logits' difference in their standard deviations, the mean KL
    divergence in nats, the share of positions with the same likeliest token; the mean negative log likelihood of the
    text. Of `NEW` greedy tokens: how many of the texts are the same, and after how many tokens they part."""

    distance: float
    divergence: float
    agreement: float
    nll: float
    same: float
    parted: float


def texts(folder: Path) -> list[list[int]]:
    """Windows of token ids, no two of the same text."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def docs() -> Iterator[str]:
        for name in MODULES.split():
            module = import_module(name)
            yield inspect.getdoc(module) or ""
            for _, member in sorted(inspect.getmembers(module, inspect.isroutine)):
                yield inspect.getdoc(member) or ""

    ids = tokenizer.encode("\n\n".join(dict.fromkeys(docs()))).ids
    return [ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW, WINDOW)][:WINDOWS]


def logits_of(model: Model, tokens: list[int]) -> torch.Tensor:
    """After each token, `[tokens, vocab]`."""
    blocks = -(-len(tokens) // BLOCK_SIZE)
    pages, table = model.allocate(blocks, BLOCK_SIZE), list(range(blocks))
    batch = pack([(tokens, 0, table)])
    batch.logits_at = list(range(len(tokens)))
    return model.forward(pages, batch)


def continued(model: Model, prompt: list[int]) -> list[int]:
    """`NEW` greedy tokens."""
    blocks = -(-(len(prompt) + NEW) // BLOCK_SIZE)
    pages, table, tokens, done = model.allocate(blocks, BLOCK_SIZE), list(range(blocks)), list(prompt), 0
    while len(tokens) < len(prompt) + NEW:
        chosen = int(model.forward(pages, pack([(tokens, done, table)])).argmax())
        done = len(tokens)
        tokens.append(chosen)
    return tokens[len(prompt) :]


def compare(model: Model, windows: list[list[int]], reference: list[torch.Tensor], greedy: list[list[int]]) -> Quality:
    distance, divergence, agreement, nll, same, parted = [], [], [], [], [], []
    for window, theirs, answer in zip(windows, reference, greedy, strict=True):
        ours = logits_of(model, window)
        distance.append((((ours - theirs) ** 2).mean(dim=1) / theirs.var(dim=1)).mean().item())
        mine, own = ours.log_softmax(dim=1), theirs.log_softmax(dim=1)
        divergence.append((own.exp() * (own - mine)).sum(dim=1).mean().item())
        agreement.append((ours.argmax(dim=1) == theirs.argmax(dim=1)).float().mean().item())
        nll.append(-mine[:-1].gather(1, torch.tensor(window[1:]).unsqueeze(1)).mean().item())
        text = continued(model, window[:PROMPT])
        at = next((i for i, (a, b) in enumerate(zip(text, answer, strict=True)) if a != b), NEW)
        same.append(float(at == NEW))
        parted.append(float(at))
    means = [sum(each) / len(each) for each in (distance, divergence, agreement, nll, same, parted)]
    return Quality(means[0] ** 0.5, *means[1:])


def quality(folder: Path) -> None:
    def load(dtype: torch.dtype, kind: Kind) -> Model:
        return Model.load(str(folder), dtype=dtype, device=CPU, kv_dtype=kind, progress=lambda _line: None)

    windows, plain = texts(folder), load(torch.float32, "auto")
    reference = [logits_of(plain, window) for window in windows]
    greedy = [continued(plain, window[:PROMPT]) for window in windows]
    print(f"{len(windows)} windows of {WINDOW} tokens, {NEW} greedy tokens after {PROMPT} of each")
    print("| model, KV | distance | KL | same likeliest | nats a token | same text | parted after |")
    print("|---|---|---|---|---|---|---|")
    cases: list[tuple[str, torch.dtype, Kind]] = [
        ("float32, float32", torch.float32, "auto"),
        ("bfloat16, bfloat16", torch.bfloat16, "auto"),
        ("float32, int8", torch.float32, "int8"),
        ("float32, fp8", torch.float32, "fp8"),
        ("bfloat16, int8", torch.bfloat16, "int8"),
        ("bfloat16, fp8", torch.bfloat16, "fp8"),
    ]
    for name, dtype, kind in cases:
        q = compare(load(dtype, kind), windows, reference, greedy)
        print(
            f"| {name} | {q.distance:.4f} | {q.divergence:.1e} | {q.agreement:.2%} | {q.nll:.4f} | {q.same:.0%} |"
            f" {q.parted:.0f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("demo/model"))
    parser.add_argument("--shape", choices=REAL, default="SmolLM2-135M", help="of the speed")
    parser.add_argument("--contexts", default="2048,4096")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", default="speed,quality")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if "speed" in given.only:
        batches, contexts = ([int(n) for n in one.split(",")] for one in (given.batches, given.contexts))
        speed(Shape.of(given.shape), batches, contexts, given.repeats)
    if "quality" in given.only:
        quality(given.model)


if __name__ == "__main__":
    main()
