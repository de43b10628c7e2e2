"""int8 and fp8 KV: CPU time of a decode step's attention, bytes, and distance of the logits.

Speed: the attention calls of one decode step of a model's shape, one thread, bfloat16; CPU seconds of each KV dtype in
turn, the least of each, and the rate of reading. Every layer has pages of its own, so they come from memory as in a
step.

Quality: the model's logits for text of Python's standard library, in windows of 512 tokens through pages, compared with
its own in float32 with float32 KV. bfloat16 for everything is the yardstick.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import thread_time
from typing import Annotated, Literal

import torch
import typer
from tokenizers import Tokenizer

from engine import kernels
from engine.kv.kv_cache import KvCache, layout_of
from engine.kv.kv_cache_spec import CallFacts, FullAttentionSpec
from engine.kv.kv_quantization import element_dtype, quantise
from engine.loading.model_loader import load_model
from engine.loading.self_check import pack
from engine.runner.model_runner import ModelRunner
from loadtest.harness.options import Repeats, Shape, names, numbers
from loadtest.harness.random_checkpoints import REAL
from loadtest.harness.stats import in_turn

Kind = Literal["auto", "int8", "fp8"]
KINDS: tuple[Kind, ...] = ("auto", "int8", "fp8")
CPU = torch.device("cpu")
BLOCK_SIZE = 16
WINDOW, WINDOWS, PROMPT, NEW = 512, 24, 64, 64  # tokens; windows; tokens; tokens
MODULES = "argparse collections functools itertools json os.path pathlib random shutil statistics string textwrap"


# ---- speed


@dataclass(frozen=True)
class AttentionShape:
    layers: int
    heads: int
    kv_heads: int
    dim: int

    @classmethod
    def of(cls, name: str) -> AttentionShape:
        """Of a model in loadtest.harness.random_checkpoints."""
        config = REAL[name]
        heads = config["num_attention_heads"]
        dim = config.get("head_dim", config["hidden_size"] // heads)
        return cls(config["num_hidden_layers"], heads, config["num_key_value_heads"], dim)


def decode_attention(shape: AttentionShape, kind: Kind, batch: int, context: int) -> tuple[Callable[[], float], int]:
    """A function that attends once in every layer and returns its seconds of CPU; and the bytes of a token."""
    kept, dtype = element_dtype(kind), torch.bfloat16
    fact = CallFacts(
        shape.kv_heads, shape.heads, shape.dim, shape.dim, FullAttentionSpec(), None, False, shape.dim**-0.5
    )
    blocks = batch * -(-context // BLOCK_SIZE)
    pages = KvCache(layout_of([fact] * shape.layers, BLOCK_SIZE, dtype, "", kept), blocks, CPU)
    new = torch.randn(blocks, BLOCK_SIZE, shape.kv_heads, shape.dim).to(dtype)
    for call in range(shape.layers):
        for values, scales in ((pages.k, pages.k_scales), (pages.v, pages.v_scales)):
            into, factors = values[call], scales[call]
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
                *(out, query, pages.k[call], pages.v[call], starts, lengths, table, 0, 0, fact.scaling, None, None),
                *(pages.k_scales[call], pages.v_scales[call]),
            )
        return thread_time() - start

    return run, pages.block_bytes // BLOCK_SIZE


def speed(shape: AttentionShape, batches: list[int], contexts: list[int], repeats: int) -> None:
    if kernels.serving(CPU) == kernels.REFERENCE:
        raise SystemExit("needs the compiled operators: python -m engine.kernels.build")
    print("| batch | context | bfloat16 | int8 | fp8 |\n|---|---|---|---|---|")
    size: dict[str, int] = {}
    for batch in batches:
        for context in contexts:
            sides: dict[str, Callable[[], float]] = {}
            for kind in KINDS:
                sides[kind], size[kind] = decode_attention(shape, kind, batch, context)
            least = {kind: min(seconds) for kind, seconds in in_turn(sides, repeats).items()}
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


def logits_of(model: ModelRunner, tokens: list[int]) -> torch.Tensor:
    """After each token, `[tokens, vocab]`."""
    blocks = -(-len(tokens) // BLOCK_SIZE)
    pages, table = model.allocate(blocks, BLOCK_SIZE), list(range(blocks))
    batch = pack([(tokens, 0, table)])
    batch.logits_at = list(range(len(tokens)))
    return model.forward(pages, batch)


def continued(model: ModelRunner, prompt: list[int]) -> list[int]:
    """`NEW` greedy tokens."""
    blocks = -(-(len(prompt) + NEW) // BLOCK_SIZE)
    pages, table, tokens, done = model.allocate(blocks, BLOCK_SIZE), list(range(blocks)), list(prompt), 0
    while len(tokens) < len(prompt) + NEW:
        chosen = int(model.forward(pages, pack([(tokens, done, table)])).argmax())
        done = len(tokens)
        tokens.append(chosen)
    return tokens[len(prompt) :]


def compare(
    model: ModelRunner, windows: list[list[int]], reference: list[torch.Tensor], greedy: list[list[int]]
) -> Quality:
    distance, divergence, agreement, nll, same, parted = [], [], [], [], [], []
    for window, theirs, answer in zip(windows, reference, greedy, strict=True):
        ours = logits_of(model, window)
        distance.append((((ours - theirs) ** 2).mean(dim=1) / theirs.var(dim=1)).mean().item())
        our_logprobs, their_logprobs = ours.log_softmax(dim=1), theirs.log_softmax(dim=1)
        divergence.append((their_logprobs.exp() * (their_logprobs - our_logprobs)).sum(dim=1).mean().item())
        agreement.append((ours.argmax(dim=1) == theirs.argmax(dim=1)).float().mean().item())
        nll.append(-our_logprobs[:-1].gather(1, torch.tensor(window[1:]).unsqueeze(1)).mean().item())
        text = continued(model, window[:PROMPT])
        at = next((i for i, (a, b) in enumerate(zip(text, answer, strict=True)) if a != b), NEW)
        same.append(float(at == NEW))
        parted.append(float(at))
    means = [sum(each) / len(each) for each in (distance, divergence, agreement, nll, same, parted)]
    return Quality(means[0] ** 0.5, *means[1:])


def quality(folder: Path) -> None:
    def load(dtype: torch.dtype, kind: Kind) -> ModelRunner:
        return load_model(str(folder), dtype=dtype, device=CPU, kv_dtype=kind, progress=lambda _line: None)

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


def main(
    model: Annotated[Path, typer.Option(metavar="FOLDER", help="Of the quality.")] = Path("demo/model"),
    shape: Shape = "SmolLM2-135M",
    contexts: Annotated[str, typer.Option(metavar="N,N", help="Tokens of a sequence, for the speed.")] = "2048,4096",
    batches: Annotated[str, typer.Option(metavar="N,N", help="Sequences, for the speed.")] = "1,8",
    repeats: Repeats = 15,
    only: Annotated[str, typer.Option(metavar="PART,...", help="Parts to measure.")] = "speed,quality",
) -> None:
    parts = names(only, ("speed", "quality"))
    torch.set_num_threads(1)
    if "speed" in parts:
        speed(AttentionShape.of(shape), list(numbers(batches)), list(numbers(contexts)), repeats)
    if "quality" in parts:
        quality(model)
