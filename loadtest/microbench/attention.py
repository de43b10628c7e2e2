"""Throughput of the attention of one layer, compared with torch's own, and with int8 and fp8 KV.

bfloat16; the queries follow --before tokens of each sequence, in pages of 16. Operations are those that the answer
needs: 4 for an element of a head and a pair of a query and a token that it sees. Times are the least of a call, all
sides in turn; with one thread it is CPU time, which other processes disturb less. Bytes are those of K and V, each
once. K and V have enough copies that single queries read them from memory. `sdpa` is torch's
scaled_dot_product_attention with K and V gathered before; there is none for quantised KV.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter, thread_time
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
import typer

from engine import kernels
from engine.kv.kv_cache import KvCache, layout_of
from engine.kv.kv_cache_spec import CallFacts, FullAttentionSpec
from engine.kv.kv_quantization import element_dtype, quantise
from loadtest.harness.options import Repeats, Threads, names
from loadtest.harness.stats import in_turn

Kind = Literal["auto", "int8", "fp8"]
KINDS: tuple[Kind, ...] = ("auto", "int8", "fp8")
CPU = torch.device("cpu")
BLOCK_SIZE = 16
ENOUGH_BYTES = 1 << 26  # of K and V in all copies: more than the second cache holds


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    dim: int
    batch: int
    before: int
    queries: int

    @property
    def operations(self) -> int:
        visible = self.queries * self.before + self.queries * (self.queries + 1) // 2
        return 4 * self.batch * self.heads * self.dim * visible


def compiled(case: Case, kind: Kind, copies: int) -> tuple[Callable[[int], None], int]:
    """A function of the index of the pages to attend over, and the bytes of K and V of one index."""
    dtype, length = torch.bfloat16, case.before + case.queries
    fact = CallFacts(case.kv_heads, case.heads, case.dim, case.dim, FullAttentionSpec(), None, False, case.dim**-0.5)
    each = -(-length // BLOCK_SIZE)
    kept = element_dtype(kind)
    pages = KvCache(layout_of([fact] * copies, BLOCK_SIZE, dtype, "", kept), case.batch * each, CPU)
    for call in range(copies):
        for into, scales in ((pages.k[call], pages.k_scales[call]), (pages.v[call], pages.v_scales[call])):
            new = torch.randn(into.shape).to(dtype)
            if scales is None or kept is None:
                into.copy_(new)
            else:
                elements, own = quantise(new, kept)
                into.view(torch.uint8).copy_(elements.view(torch.uint8))
                scales.copy_(own)
    blocks = random.sample(range(case.batch * each), case.batch * each)
    table = torch.tensor(blocks, dtype=torch.int32).view(case.batch, -1)
    starts = torch.arange(case.batch + 1, dtype=torch.int32) * case.queries
    lengths = torch.full((case.batch,), length, dtype=torch.int32)
    query = torch.randn(case.batch * case.queries, case.heads, case.dim).to(dtype)
    out = torch.empty_like(query)

    def run(call: int) -> None:
        torch.ops.tandem.attend.default(
            *(out, query, pages.k[call], pages.v[call], starts, lengths, table, 0, 0, fact.scaling, None, None),
            *(pages.k_scales[call], pages.v_scales[call]),
        )

    return run, case.batch * length * pages.block_bytes // (BLOCK_SIZE * copies)


def by_torch(case: Case, copies: int) -> Callable[[int], None]:
    def some(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(case.batch, tokens, heads, case.dim).bfloat16().transpose(1, 2)

    length = case.before + case.queries
    query = some(case.heads, case.queries)
    context = [(some(case.kv_heads, length), some(case.kv_heads, length)) for _ in range(copies)]
    mask = None
    if case.queries > 1 and case.before > 0:
        mask = torch.ones(case.queries, length, dtype=torch.bool).tril(case.before)

    def run(call: int) -> None:
        causal = case.queries > 1 and mask is None
        F.scaled_dot_product_attention(query, *context[call], attn_mask=mask, is_causal=causal, enable_gqa=True)

    return run


def measure(case: Case, kinds: list[Kind], orders: list[str], repeats: int) -> None:
    token = 4 * case.kv_heads * case.dim * case.batch * (case.before + case.queries)
    copies = max(1, ENOUGH_BYTES // token)
    runs: dict[tuple[str, str], Callable[[int], None]] = {}
    size: dict[str, int] = {}

    def ours(own: Callable[[int], None], order: str, call: int) -> None:
        torch.ops.tandem.use_order(order)
        own(call)

    for kind in kinds:
        own, size[kind] = compiled(case, kind, copies)
        runs |= {(kind, order): partial(ours, own, order) for order in orders}
        if kind == "auto":
            runs[kind, "sdpa"] = by_torch(case, copies)

    clock = thread_time if torch.get_num_threads() == 1 else perf_counter

    def seconds(run: Callable[[int], None]) -> float:
        taken = []
        for call in range(copies):
            start = clock()
            run(call)
            taken.append(clock() - start)
        return min(taken)

    sides: dict[str, Callable[[], float]] = {
        f"{kind} | {name}": partial(seconds, run) for (kind, name), run in runs.items()
    }
    least = {name: min(taken) for name, taken in in_turn(sides, repeats).items()}
    for (each, order), (name, best) in zip(runs, least.items(), strict=True):
        of_first = f"{best / least[f'{kinds[0]} | {order}']:.2f}, {size[each] / size[kinds[0]]:.3f}"
        print(
            f"| {case.before:,} | {case.queries} | {name} | {best * 1e6:,.0f} |"
            f" {case.operations / best / 1e9:.0f} | {size[each] / best / 1e9:.1f} | {of_first} |",
            flush=True,
        )


def main(
    heads: Annotated[str, typer.Option(metavar="Q/KV", help="Heads of queries / of K and V.")] = "9/3",
    dim: Annotated[int, typer.Option(metavar="N", help="Of a head.")] = 64,
    before: Annotated[str, typer.Option(metavar="N,N", help="Tokens before the queries.")] = "0,2560",
    queries: Annotated[int, typer.Option(metavar="N", help="Of each sequence.")] = 512,
    batch: Annotated[int, typer.Option(metavar="N", help="Sequences.")] = 1,
    threads: Threads = 1,
    kv: Annotated[str, typer.Option(metavar="TYPE,...", help=f"KV dtypes, of {', '.join(KINDS)}.")] = "auto",
    orders: Annotated[str, typer.Option(metavar="NAME,...", help="Sum orders; all that work here.")] = "",
    repeats: Repeats = 15,
) -> None:
    if kernels.serving(CPU) == kernels.REFERENCE:
        raise SystemExit("needs the compiled operators: python -m engine.kernels.build")
    chosen = names(kv, KINDS)
    kinds: list[Kind] = [kind for kind in KINDS if kind in chosen]
    torch.set_num_threads(threads)
    query_heads, kv_heads = (int(n) for n in heads.split("/"))
    tried = orders.split(",") if orders else torch.ops.tandem.orders()
    print(f"{query_heads}/{kv_heads} heads of {dim}, {batch} sequences, {threads} threads")
    print("| tokens before | queries | KV | order | us | GFLOP/s | GB/s | time and bytes over the first KV's |")
    print(f"|{'---|' * 8}")
    for tokens in map(int, before.split(",")):
        measure(Case(query_heads, kv_heads, dim, batch, tokens, queries), kinds, tried, repeats)
