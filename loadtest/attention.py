"""What attention of one layer computes in a second, beside torch's own.

    python -m loadtest.attention [--heads 9/3] [--dim 64] [--before 0,2560] [--queries 512] [--batch 1]
                                 [--threads 1] [--kv auto] [--orders tile32,pairs] [--repeats 15]

bfloat16, queries behind so many tokens of each sequence, in pages of 16. Counted are the products that the answer
needs: 4 operations for an element of a head and a pair of a query and a token that it sees. The least time of a call,
all sides in turn: of CPU with one thread, which other processes disturb less. The bytes are those of K and V, each
once; there are so many copies of these that single queries read them from memory. `sdpa` is torch's
scaled_dot_product_attention with K and V gathered before; quantised KV has no such side.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter, thread_time

import torch
import torch.nn.functional as F

from engine import kernels
from engine.facts import CallFacts, Full
from engine.pages import Pages, layout_of
from engine.quantised import element_dtype, quantise
from loadtest.kv import BLOCK_SIZE, CPU, KINDS, Kind
from loadtest.stats import in_turn

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
        seen = self.queries * self.before + self.queries * (self.queries + 1) // 2
        return 4 * self.batch * self.heads * self.dim * seen


def compiled(case: Case, kind: Kind, copies: int) -> tuple[Callable[[int], None], int]:
    """A function of a number, which says whose pages are attended over, and the bytes of K and V of one of these."""
    dtype, length = torch.bfloat16, case.before + case.queries
    fact = CallFacts(case.kv_heads, case.heads, case.dim, case.dim, Full(), None, False, case.dim**-0.5)
    each = -(-length // BLOCK_SIZE)
    kept = element_dtype(kind)
    pages = Pages(layout_of([fact] * copies, BLOCK_SIZE, dtype, "", kept), case.batch * each, CPU)
    for call in range(copies):
        for into, scales in ((pages.k(call), pages.k_scales(call)), (pages.v(call), pages.v_scales(call))):
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
            *(out, query, pages.k(call), pages.v(call), starts, lengths, table, 0, 0, fact.scaling, None, None),
            *(pages.k_scales(call), pages.v_scales(call)),
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


def measure(case: Case, kind: Kind, orders: list[str], repeats: int) -> None:
    token = 4 * case.kv_heads * case.dim * case.batch * (case.before + case.queries)
    copies = max(1, ENOUGH_BYTES // token)
    own, size = compiled(case, kind, copies)

    def ours(order: str, call: int) -> None:
        torch.ops.tandem.use_order(order)
        own(call)

    runs: dict[str, Callable[[int], None]] = {order: partial(ours, order) for order in orders}
    if kind == "auto":
        runs["sdpa"] = by_torch(case, copies)

    clock = thread_time if torch.get_num_threads() == 1 else perf_counter

    def seconds(run: Callable[[int], None]) -> float:
        taken = []
        for call in range(copies):
            start = clock()
            run(call)
            taken.append(clock() - start)
        return min(taken)

    for name, taken in in_turn({name: partial(seconds, run) for name, run in runs.items()}, repeats).items():
        least = min(taken)
        print(
            f"| {case.before:,} | {case.queries} | {name} | {least * 1e6:,.0f} | {case.operations / least / 1e9:.0f} |"
            f" {size / least / 1e9:.1f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--heads", default="9/3", help="of queries / of K and V")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--before", default="0,2560", help="tokens before the queries")
    parser.add_argument("--queries", type=int, default=512, help="of each sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kv", choices=KINDS, default="auto")
    parser.add_argument("--orders", help="all that can be served here")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    if kernels.serving(CPU) == kernels.REFERENCE:
        raise SystemExit("needs the compiled operators: python -m engine.kernels.build")
    torch.set_num_threads(args.threads)
    heads, kv_heads = (int(n) for n in args.heads.split("/"))
    orders = args.orders.split(",") if args.orders else torch.ops.tandem.orders()
    print(f"{heads}/{kv_heads} heads of {args.dim}, {args.batch} sequences, KV {args.kv}, {args.threads} threads")
    print("| tokens before | queries | order | us | GFLOP/s | GB/s |\n|---|---|---|---|---|---|")
    for before in map(int, args.before.split(",")):
        case = Case(heads, kv_heads, args.dim, args.batch, before, args.queries)
        measure(case, args.kv, orders, args.repeats)


if __name__ == "__main__":
    main()
