"""A GPU's handoff: a prefill and a decode worker on one GPU give the tokens of a worker that does both.

Three workers share the device, without Ray: a decode worker alone, and a pair. Each prompt goes to both; every second
one is sampled, with a seed. The answers must be equal, each of the pair's with its KV moved in one attempt, and
afterwards no block may be held. Ends with 1 if something is wrong. `--device cpu` runs the same with a tiny model.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any, Literal

import torch
import typer

from loadtest.harness.options import names
from loadtest.harness.processes import Local
from loadtest.harness.random_checkpoints import REAL, SHAPES, make_checkpoint
from tandem.client import Client
from tandem.errors import TandemError
from tandem.results import Completion

NO_CUDA = "error: `loadtest device-handoff` checks a GPU, and torch finds no CUDA device here"
AT_ONCE = 4
BALANCED_S = 30.0
TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Plan:
    shape: str = "Qwen3-0.6B"
    prompt: int = 8000
    output: int = 64
    requests: int = 20
    share: float = 0.3  # of the GPU, for each worker


TINY = Plan("tiny-llama", prompt=200, output=8, requests=4, share=1.0)


def run(plan: Plan, device: str, folder: Path) -> int:
    """Prints what it finds; returns how many answers or accounts were wrong."""
    model = make_checkpoint(folder / "model", plan.shape)
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    shared: dict[str, Any] = {"model": model, "device": device, "dtype": "bfloat16", "gpu_share": plan.share}
    shared["max_model_len"] = plan.prompt + plan.output
    if device == "cpu":
        shared["kv_blocks"] = max(200, 4 * plan.prompt // 16)
    with Local(**shared) as alone, Local(**shared) as pair:
        for local, roles in ((alone, ("decode",)), (pair, ("prefill", "decode"))):
            local.launch("router", "router-0")
            for role in roles:
                local.launch(role, f"{role}-0")
        start = perf_counter()
        for local, ready in ((alone, ("decode-0",)), (pair, ("prefill-0", "decode-0"))):
            for name in ready:
                local.address(name)  # raises with its last words if it has ended
            local.wait_seen("router-0", len(ready))
            for name in ready:
                for line in local.last_words(name).splitlines():
                    if "KV pool:" in line:
                        print(f"{name}: {line}", flush=True)
        print(f"three workers ready after {perf_counter() - start:.0f} s", flush=True)
        answers = []
        for local, workers in ((alone, ("decode-0",)), (pair, ("prefill-0", "decode-0"))):
            try:
                answers.append(ask(plan, vocab, local.address("router-0")))
            except TandemError:
                for name in ("router-0", *workers):
                    print(f"---- {name}\n{local.last_words(name)}", flush=True)
                raise
        with Client(pair.address("router-0")) as client:
            held = unbalanced(client)
            for found in client.diagnose().pairs:
                print(f"probe of the link: {found.transport}, {found.bytes_per_second / 1e9:.2f} GB/s {found.error}")
    return report(answers[0], answers[1], held)


def ask(plan: Plan, vocab: int, target: str) -> list[Completion]:
    """After one that does not count, because a worker's first answers have its compilers' time in them."""
    chosen = random.Random(0)
    prompts = [chosen.choices(range(vocab), k=plan.prompt) for _ in range(plan.requests)]
    with Client(target) as client, ThreadPoolExecutor(AT_ONCE) as threads:

        def answer(number: int) -> Completion:
            sampled = number % 2
            options: dict[str, Any] = {"temperature": 1.0, "seed": number} if sampled else {"temperature": 0.0}
            whole: Completion = client.generate(prompts[number], max_tokens=plan.output, timeout=TIMEOUT_S, **options)
            return whole

        first = client.generate(chosen.choices(range(vocab), k=plan.prompt), max_tokens=2, timeout=TIMEOUT_S)
        print(f"transfer of the first: {first.receipt.transfer}", flush=True)
        start = perf_counter()
        try:
            answers = list(threads.map(answer, range(plan.requests)))
        except TandemError:
            threads.shutdown(wait=False, cancel_futures=True)  # the others would wait for as long, one after another
            raise
        print(f"{plan.requests} prompts of {plan.prompt} tokens in {perf_counter() - start:.1f} s", flush=True)
    return answers


def unbalanced(client: Client) -> list[str]:
    """Faults of the books after the requests; blocks that are held shortly after the last answer are not yet faults."""
    deadline = perf_counter() + BALANCED_S
    while True:
        audit = client.audit()
        found = [f"{worker} does not answer: {why}" for worker, why in audit.unreachable.items()]
        for ledger in audit.ledgers:
            found += [f"{ledger.worker_id}: {fault}" for fault in ledger.faults]
            found += [f"{ledger.worker_id}: {entry.owner} holds {len(entry.blocks)}" for entry in ledger.entries]
        if not found or perf_counter() > deadline:
            return found


def report(alone: list[Completion], pair: list[Completion], held: list[str]) -> int:
    wrong = list(held)
    for number, (one, two) in enumerate(zip(alone, pair, strict=True)):
        receipt = two.receipt
        if one.token_ids != two.token_ids:
            wrong.append(f"prompt {number}: {one.token_ids} alone, {two.token_ids} by the pair")
        if receipt.path != "disaggregated" or receipt.attempts != 1 or receipt.notes:
            wrong.append(f"prompt {number}: {receipt}")
    kinds = len({tuple(each.token_ids) for each in alone})
    print(f"{kinds} different answers of {len(alone)}; first: {list(alone[0].token_ids[:8])}")
    for name, answers in (("alone", alone), ("pair", pair)):
        print(
            f"{name}: time to first token {median(each.receipt.ttft for each in answers):.3f} s,"
            f" {median(each.receipt.tpot for each in answers) * 1e3:.2f} ms a token"
        )
    print(f"transfer of the last: {pair[-1].receipt.transfer}")
    for line in wrong:
        print(f"wrong: {line}")
    print(f"{len(wrong)} wrong")
    return len(wrong)


def main(
    shape: Annotated[str, typer.Option(metavar="SHAPE", help=f"Of the model: {', '.join(REAL)}.")] = Plan.shape,
    device: Annotated[Literal["cuda", "cpu"], typer.Option(hidden=True)] = "cuda",
) -> int:
    names(shape, SHAPES)
    if device == "cuda" and not torch.cuda.is_available():
        print(NO_CUDA, file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="tandem-handoff-") as folder:
        return int(run(TINY if device == "cpu" else Plan(shape=shape), device, Path(folder)) > 0)
