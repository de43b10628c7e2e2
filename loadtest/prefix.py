"""Placing by cached prefix against taking turns, on conversations of a trace.

    python -m loadtest.prefix TRACE.jsonl[.gz] [--conversations 100] [--rate 1.2] [--kv-blocks 1000] [--rounds 1]
                              [--shape SmolLM2-135M] [--seed 1] [--json FILE]

TRACE is Mooncake's conversation trace: timestamp, input_length, output_length, and hash_ids of blocks of 512 tokens,
the same for the same beginnings. Whole conversations of it are taken by chance: all requests with the same second
block, two at least (the first block is common to nearly all). Lengths are divided by 32, so that its blocks are ours of
16 tokens and what is shared stays the same; each id becomes 16 pseudo-random token ids. Requests that come in the same
three seconds are spread over them, and all gaps are shortened until `--rate` of them come in a second. They are sent
whether earlier ones have ended or not.

Two prefill and two decode workers on this machine, first with the setting `place_by_prefix` on and then off, or the
other way round in the next round; each time a new cluster with empty caches of `--kv-blocks` each. `infinite` is what
one cache that loses nothing would have had when each request came.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from engine.checkpoints import REAL, make_checkpoint
from loadtest.local import Local, precedence
from loadtest.stats import percentile
from tandem.client import AsyncClient

FACTOR, BLOCK = 32, 16
SIDES = {"by prefix": True, "in turns": False}
LONGEST = 2048  # tokens of prompt and answer


@dataclass(frozen=True)
class Asked:
    """One request of the trace, scaled: when to send it, and what."""

    at: float
    tokens: list[int]
    new: int
    ids: list[int]


@dataclass
class Result:
    """Of one side: for each request the prompt's tokens, those that were cached, and the time to first token."""

    prompts: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    late: float = 0.0  # the longest time by which a request was sent too late

    @property
    def hits(self) -> float:
        return sum(self.cached) / sum(self.prompts)


def read(path: Path, conversations: int, rate: float, vocab: int, seed: int) -> list[Asked]:
    """So many conversations that fit into the context, in the order of their requests."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        rows = [json.loads(line) for line in lines]
    turns: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        if len(row["hash_ids"]) > 1:
            turns.setdefault(row["hash_ids"][1], []).append(row)
    whole = [those for those in turns.values() if len(those) > 1 and all(map(_fits, those))]
    chosen = random.Random(seed).sample(whole, conversations)
    rows = sorted((row for those in chosen for row in those), key=lambda row: row["timestamp"])
    times = _spread([row["timestamp"] / 1000 for row in rows])
    shorter = (times[-1] - times[0]) * rate / len(rows)
    asked = []
    for at, row in zip(times, rows, strict=True):
        length = max(1, row["input_length"] // FACTOR)
        tokens = [token for one in row["hash_ids"] for token in _block(one, vocab)][:length]
        asked.append(Asked((at - times[0]) / shorter, tokens, max(1, row["output_length"] // FACTOR), row["hash_ids"]))
    return asked


def _fits(row: dict[str, Any]) -> bool:
    return bool(row["input_length"] / FACTOR + row["output_length"] / FACTOR + 2 <= LONGEST)


def _spread(times: Sequence[float]) -> list[float]:
    """Requests with the same time spread evenly until the next one."""
    spread: list[float] = []
    for at in sorted(set(times)):
        same = times.count(at)
        gap = min((other for other in times if other > at), default=at + 3.0) - at
        spread += [at + gap * place / same for place in range(same)]
    return spread


def _block(number: int, vocab: int) -> list[int]:
    source = random.Random(number)
    return [source.randrange(100, vocab) for _ in range(BLOCK)]


def infinite(asked: Sequence[Asked]) -> float:
    """The share of prompt tokens in one cache that keeps every full block of every prompt before."""
    seen: set[int] = set()
    hits = total = 0
    for one in asked:
        full = one.ids[: len(one.tokens) // BLOCK]
        blocks = next((place for place, number in enumerate(full) if number not in seen), len(full))
        hits += min(blocks * BLOCK, len(one.tokens) - 1)
        total += len(one.tokens)
        seen.update(full)
    return hits / total


async def send(target: str, asked: Sequence[Asked], say: str) -> Result:
    result = Result()
    done = 0

    async def one(client: AsyncClient, request: Asked, began: float) -> None:
        nonlocal done
        await asyncio.sleep(began + request.at - perf_counter())
        sent = perf_counter()
        result.late = max(result.late, sent - began - request.at)
        first = 0.0
        async for piece in client.stream(request.tokens, max_tokens=request.new, ignore_eos=True, temperature=0.0):
            if piece.token_ids and not first:
                first = perf_counter()
            if piece.receipt:
                result.prompts.append(piece.receipt.prompt_tokens)
                result.cached.append(piece.receipt.cached_tokens)
                result.paths.append(piece.receipt.path)
        result.ttft.append(first - sent)
        done += 1
        if done % 20 == 0:
            print(f"  {perf_counter() - began:6.1f} s  {say}: {done} of {len(asked)}", flush=True)

    async with AsyncClient(target) as client:
        began = perf_counter() + 0.5
        await asyncio.gather(*(one(client, request, began) for request in asked))
    return result


def measure(model: Path, side: str, asked: Sequence[Asked], kv_blocks: int) -> Result:
    settings = {"dtype": "bfloat16", "block_size": BLOCK, "kv_blocks": kv_blocks, "max_model_len": LONGEST}
    with Local(model=model, local_prefill="measured", place_by_prefix=SIDES[side], **settings) as local:
        local.launch("router", "router-0")
        for number in range(2):
            local.launch("prefill", f"prefill-{number}", core=0)
            local.launch("decode", f"decode-{number}", core=1)
        local.wait_seen("router-0", 4, timeout_s=240.0)
        with precedence():
            return asyncio.run(send(local.address("router-0"), asked, side))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--conversations", type=int, default=100)
    parser.add_argument("--rate", type=float, default=1.2)
    parser.add_argument("--kv-blocks", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--shape", default="SmolLM2-135M", choices=sorted(REAL))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[str, list[Result]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory(prefix="tandem-prefix-", dir=Path.home()) as folder:  # /tmp may be in memory
        model = make_checkpoint(Path(folder) / "model", given.shape)
        vocab = json.loads((model / "config.json").read_text())["vocab_size"]
        asked = read(given.trace, given.conversations, given.rate, vocab, given.seed)
        best = infinite(asked)
        for number in range(given.rounds):
            for side in list(SIDES)[:: -1 if number % 2 else 1]:
                found[side].append(measure(model, side, asked, given.kv_blocks))
    tokens = sum(len(one.tokens) for one in asked)
    print(
        f"\n{len(asked)} requests of {given.conversations} conversations, {tokens / len(asked):.0f} tokens each (mean),"
    )
    print(f"{given.rate:g} a second, {given.kv_blocks} blocks a worker; infinite: {best:.1%}")
    for side, results in found.items():
        for result in results:
            local = result.paths.count("local") / len(result.paths)
            print(
                f"  {side:10} hits {result.hits:6.1%} ({result.hits / best:.2f} of infinite)  TTFT p50"
                f" {percentile(result.ttft, 0.5):.2f} s, p90 {percentile(result.ttft, 0.9):.2f} s  local"
                f" {local:.0%}  sent late by {result.late * 1e3:.0f} ms at most"
            )
    pairs = list(zip(found["by prefix"], found["in turns"], strict=True))
    for here, there in pairs:
        print(
            f"  by prefix / in turns: hits {here.hits / there.hits:.2f},"
            f" TTFT p90 {percentile(here.ttft, 0.9) / percentile(there.ttft, 0.9):.2f}"
        )
    if given.json:
        details = {side: [vars(result) for result in results] for side, results in found.items()}
        given.json.write_text(json.dumps({"infinite": best, **details}))


if __name__ == "__main__":
    main()
