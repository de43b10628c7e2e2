"""Attention over pages on CUDA, in Triton (tests/engine/test_gpu_attention.py, tests/engine/test_gpu_machine_code.py).

A program attends a tile of rows over the keys of one KV head. A row is one query of one of the query heads that share
the KV head. The keys of a sequence are cut at fixed positions:

    position   0 ........ split_keys ........ 2 * split_keys ...        a part: keys between two cuts
    tiles      |  |  |  |  |  |  |  |  |  |  |  |  |  |  |              of `tile_keys` keys

Each part has its own running maximum, sum and weighted values, and the parts of a row are merged in their order. So a
row's bits follow from its own sequence alone: not from the rest of the step, and not from the number of its queries in
this step. Sequences with one query run their parts in parallel, and a second kernel merges them; the others run and
merge them in one program. Both do the same arithmetic. The kernels are in kernels.py.

Pages of latents are read as they are: engine/gpu/attention/latent.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.forward_context import Scales, Step
from engine.attention.mla import Expanded
from engine.gpu.attention import quantised_pages as _registered  # noqa: F401
from engine.gpu.attention.kernels import CHUNK, FULL, WINDOW, attend, merge
from engine.gpu.attention.latent import absorbed, expanded
from engine.gpu.operators import BLACKWELL, HOPPER, capability_of, operator, ops, power_of_two
from engine.gpu.products import exact
from engine.kv.kv_cache_spec import CallFacts, ChunkedLocalAttentionSpec, FullAttentionSpec, Reach, SlidingWindowSpec

NAME = "triton"
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn)  # of pages
LEAST_SPLIT = 512  # keys of a part
MOST_SPLITS = 16  # parts of the longest sequence: their results are kept in memory until they are merged
LARGEST_HEAD = 512
MOST_REGISTERS = 255  # of a thread: ptxas stops earlier to fit more programs, and then spills some
WARPS = 8  # of a program with a tile of several queries
MERGE = {"num_warps": 4}  # of the kernel `merge`
LEAST_WGMMA = 64  # rows of a product by the instruction of Hopper
LEAST_DOT = 16  # rows, and elements of a head, that a product of Triton takes

Tiles = tuple[torch.Tensor, torch.Tensor]  # of each tile: its sequence, and its first query in that; int32


@dataclass(frozen=True)
class Tiling:
    """The shapes of one attention call's tiles. They follow from the model and never from a step."""

    rows_of_one: int  # of a tile of a sequence with a single query
    rows: int  # of a tile of the other sequences
    keys: int
    warps_of_one: int
    stages_of_one: int
    stages: int

    @staticmethod
    def of(facts: CallFacts, pages: torch.Tensor, dtype: torch.dtype) -> Tiling:
        """`pages`: those of the keys; `dtype`: of the queries. A tile must not spill registers: int8 and fp8 take some
        while they are widened, as do 64-bit addresses of a tile of keys, and float32 does without tensor cores."""
        wide, large = dtype == torch.float32, largest_dim(facts)
        quantised, hopper = pages.dtype.itemsize == 1, capability_of(pages.device) >= HOPPER
        if (large > 256 and (wide or not facts.latent)) or (large > 64 and wide):
            keys = 16  # a latent is loaded once, as key and value
        elif large > 128 or wide or (not hopper and (large > 64 or quantised)):
            keys = 32
        else:
            keys = 64
        several = 3 if large <= (64 if wide or quantised else 128) else 2
        if large > 256 and (wide or (quantised and facts.latent)):
            several = 1
        rows, alone = rows_of(facts, pages), max(LEAST_DOT, padded_group(facts, pages))
        warps = 2 if keys == 64 and not quantised else 4 if large <= (128 if wide else 256) else 8
        if quantised and hopper and rows >= LEAST_WGMMA:
            # For fewer rows Triton permutes widened bytes along k, which is another order of the sum.
            alone, warps = LEAST_WGMMA, WARPS
        return Tiling(
            rows_of_one=alone,
            rows=rows,
            keys=keys,
            warps_of_one=8 if facts.latent else warps,  # latents fill the rows of a tile
            stages_of_one=min(several, 2),
            stages=several,
        )

    def launch(self, *, single: bool) -> dict[str, int]:
        """Of the kernel `attend`, for sequences with a single query or for the others."""
        if single:
            own = {"ROWS": self.rows_of_one, "num_warps": self.warps_of_one, "num_stages": self.stages_of_one}
        else:
            own = {"ROWS": self.rows, "num_warps": WARPS, "num_stages": self.stages}
        return own | {"maxnreg": MOST_REGISTERS}


def rows_of(facts: CallFacts, pages: torch.Tensor) -> int:
    """Of a tile of a sequence with several queries. Tensor cores of Hopper read operands from shared memory, which
    leaves registers for twice as many rows; those of Blackwell do, too, but with as many rows a tile spills."""
    large, size, capability = largest_dim(facts), pages.dtype.itemsize, capability_of(pages.device)
    rows = {256: 32, 512: 16}.get(large, 64)
    if large <= 128 and size == 2 and HOPPER <= capability < BLACKWELL:
        rows = 128
    if large == 128 and (size == 4 or (size == 1 and capability >= BLACKWELL)):
        rows = 32
    return rows


def padded_group(facts: CallFacts, pages: torch.Tensor) -> int:
    """Query heads of one KV head in a tile: all of them, if they fit."""
    return min(power_of_two(facts.heads // facts.kv_heads), rows_of(facts, pages))


def largest_dim(facts: CallFacts) -> int:
    return max(padded_dim(facts.k_dim), padded_dim(facts.v_dim))


def padded_dim(dim: int) -> int:
    return max(LEAST_DOT, power_of_two(dim))


@dataclass(frozen=True)
class TritonAttention:
    """The kernels for a model of sequences of at most `max_model_len` tokens."""

    max_model_len: int
    absorbed: Expanded | None = None  # what a product makes of the model's latents
    name: str = NAME

    @property
    def split_keys(self) -> int:
        return max(LEAST_SPLIT, power_of_two(-(-self.max_model_len // MOST_SPLITS)))

    def refusal(self, facts: CallFacts, dtype: torch.dtype) -> str | None:
        """Why this attention call cannot be served over pages of `dtype`; None if it can."""
        if dtype not in DTYPES:
            return f"{str(dtype).removeprefix('torch.')} is not one of its types"
        if facts.latent and self.absorbed is None:
            return "latent pages that no single product expands"
        if facts.heads % facts.kv_heads:
            return f"{facts.heads} heads for {facts.kv_heads} KV heads"
        if facts.scaling <= 0:  # the kernels take the maximum before they scale
            return f"a scaling of {facts.scaling}"
        if max(facts.k_dim, facts.v_dim) > LARGEST_HEAD:
            return f"heads of {facts.k_dim} and {facts.v_dim} elements"
        return None

    def attend(
        self,
        query: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        scales: Scales,
        step: Step,
        facts: CallFacts,
        sinks: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `engine.attention.paged.attend`: `query [total, heads, k_dim]`, pages `[blocks, block_size, kv_heads, d]`
        of any strides with d innermost, `scales [blocks, block_size, kv_heads]` of quantised ones, `sinks [heads]`,
        `weight [heads * (plain + values), rank]` of latents' expansion. Returns `[total, heads, values]`."""
        assert facts.latent == (weight is not None), "latents are read with the weight that expands them"
        (ones, ones_at), (others, others_at) = tiles_of(step, queries_of(facts, k_pages))
        reach, span = kind(facts.reach)
        out: torch.Tensor = ops.attend.default(
            query, k_pages, v_pages, *scales, sinks, weight, step.cu_seq_q, step.seqused_k, step.block_table,
            ones, ones_at, others, others_at, reach, span, facts.scaling, facts.softcap, self.split_keys,
        )  # fmt: skip
        return out

    def write_quantised(self, pages: torch.Tensor, scales: torch.Tensor, new: torch.Tensor, step: Step) -> None:
        """`new [total, kv_heads, d]` into the step's slots of pages, and their scales."""
        ops.write_quantised.default(pages, scales, new, step.slot_block, step.slot_offset)

    def tiles(self, step: Step, facts: tuple[CallFacts, ...]) -> dict[Any, tuple[Tiles, Tiles]]:
        """Those of a step by their key in its `plans`: what a recording takes besides a step's tensors."""
        sizes = {queries_of(fact, step.pages.k[call]) for call, fact in enumerate(facts)}
        return {(NAME, queries): tiles_of(step, queries) for queries in sorted(sizes)}


@operator(
    "attend(Tensor query, Tensor k_pages, Tensor v_pages, Tensor? k_scales, Tensor? v_scales, Tensor? sinks,"
    " Tensor? weight, Tensor cu_seq_q, Tensor seqused_k, Tensor block_table, Tensor ones, Tensor ones_at,"
    " Tensor others, Tensor others_at, int reach, int span, float scaling, float? softcap, int split_keys) -> Tensor"
)
def attend_tiles(
    query: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
    sinks: torch.Tensor | None,
    weight: torch.Tensor | None,
    cu_seq_q: torch.Tensor,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    ones: torch.Tensor,
    ones_at: torch.Tensor,
    others: torch.Tensor,
    others_at: torch.Tensor,
    reach: int,
    span: int,
    scaling: float,
    softcap: float | None,
    split_keys: int,
) -> torch.Tensor:
    """`TritonAttention.attend` of tensors and numbers alone: the tiles of single queries, and of the others."""
    own, heads = {FULL: FullAttentionSpec()}, query.shape[1]
    spec = own.get(reach) or (SlidingWindowSpec(span) if reach == WINDOW else ChunkedLocalAttentionSpec(span))
    latent, dims = weight is not None, (k_pages.shape[3], v_pages.shape[3])
    facts = CallFacts(k_pages.shape[2], heads, *dims, spec, softcap, sinks is not None, scaling, latent)
    turned = query  # not read, like the scales and sinks that are not there
    plain = query.shape[2] - dims[1]
    if weight is not None:
        query, turned = absorbed(query[..., :plain], weight), query[..., plain:]
    pages, scales = (k_pages, v_pages), (k_scales, v_scales)
    tiling = Tiling.of(facts, k_pages, query.dtype)
    fixed = constants(facts, tiling, k_pages, split_keys, query.dtype)
    out = query.new_empty(query.shape[0], heads, fixed["V_DIM"])
    given = [scale if scale is not None else query for scale in scales]
    tensors = (query, turned, *(each.view(torch.uint8) if fixed["FP8"] else each for each in pages), *given)
    strides = (
        *(stride for each in (query, turned) for stride in each.stride()[:2]),
        *(stride for each in pages for stride in each.stride()[:3]),
        *(stride for scale in scales for stride in (scale.stride() if scale is not None else (0, 0, 0))),
        block_table.stride(0),
    )
    context = (sinks if sinks is not None else query, cu_seq_q, seqused_k, block_table)
    run = _Launch(facts, tiling, fixed, tensors, strides, context, (scaling, softcap or 1.0, span))
    if len(ones):
        run.parts(out, ones, ones_at)
    if len(others):
        run.whole(out, others, others_at)
    return out if weight is None else expanded(out, weight, plain)


@dataclass(frozen=True)
class _Launch:
    """The arguments of `attend`, in its order, for one attention call."""

    facts: CallFacts
    tiling: Tiling
    fixed: dict[str, Any]
    tensors: tuple[torch.Tensor, ...]
    strides: tuple[int, ...]
    context: tuple[torch.Tensor, ...]  # sinks, cu_seq_q, seqused_k, block_table
    numbers: tuple[float, ...]  # scaling, softcap, span

    def parts(self, out: torch.Tensor, tiles: torch.Tensor, queries: torch.Tensor) -> None:
        """Of sequences with a single query: their parts in parallel, and then what merges them."""
        count, (_, heads, dim), table = len(tiles), out.shape, self.context[3]
        parts = -(-table.shape[1] * self.fixed["BLOCK"] // self.fixed["SPLIT"])  # of the longest possible context
        values = out.new_empty(parts, count, heads, dim, dtype=torch.float32)
        tops, sums = (out.new_empty(parts, count, heads, dtype=torch.float32) for _ in range(2))
        kept, places = (values, tops, sums), (*values.stride()[:3], *tops.stride()[:2])
        attend[(count, self.groups, parts)](
            *self.tensors, *kept, values, *self.context, tiles, queries, *self.strides, *places, *self.numbers,
            **self.fixed, **self.tiling.launch(single=True), PARALLEL=True, SINKS=False,
        )  # fmt: skip
        same = {name: self.fixed[name] for name in ("V_DIM", "V_PAD", "SPLIT", "REACH")}
        sinks, starts, contexts, _ = self.context
        merge[(count, heads)](
            *kept, sinks, out, starts, contexts, tiles, *places, *out.stride()[:2], self.numbers[2],
            **same, SINKS=self.facts.sinks, **MERGE,
        )  # fmt: skip

    def whole(self, out: torch.Tensor, tiles: torch.Tensor, queries: torch.Tensor) -> None:
        """Of the others: each tile with all its parts."""
        whole = len(tiles) * self.groups * self.tiling.rows * self.fixed["V_PAD"]
        so_far = out.new_empty(whole, dtype=torch.float32)
        attend[(len(tiles), self.groups, 1)](
            *self.tensors, out, out, out, so_far, *self.context, tiles, queries, *self.strides, 0, *out.stride()[:2],
            0, 0, *self.numbers, **self.fixed, **self.tiling.launch(single=False), PARALLEL=False,
            SINKS=self.facts.sinks,
        )  # fmt: skip

    @property
    def groups(self) -> int:
        """Programs of a tile's queries: the heads of each KV head are in one tile, or in several."""
        of_a_head: int = -(-self.fixed["HEADS"] // self.fixed["GROUP"])
        return self.facts.kv_heads * of_a_head


def queries_of(facts: CallFacts, pages: torch.Tensor) -> int:
    """Of a tile of a sequence with several."""
    return rows_of(facts, pages) // padded_group(facts, pages)


def constants(
    facts: CallFacts, tiling: Tiling, pages: torch.Tensor, split_keys: int, dtype: torch.dtype
) -> dict[str, Any]:
    """What the kernel `attend` is compiled for; `pages`: those of the keys, `dtype`: of the queries."""
    values = facts.k_dim if facts.latent else facts.v_dim  # elements of one
    return {
        "HEADS": facts.heads // facts.kv_heads,
        "GROUP": padded_group(facts, pages),
        "BLOCK": pages.shape[1],
        "K_DIM": facts.k_dim,
        "K_PAD": padded_dim(facts.k_dim),
        "V_DIM": values,
        "V_PAD": padded_dim(values),
        "R_DIM": facts.v_dim,
        "R_PAD": padded_dim(facts.v_dim),
        "TILE": tiling.keys,
        "SPLIT": split_keys,
        "REACH": kind(facts.reach)[0],
        "SOFTCAP": facts.softcap is not None,
        "SCALED": pages.dtype.itemsize == 1,
        "FP8": pages.dtype == torch.float8_e4m3fn,
        "EXACT": exact(dtype),
        "LATENT": facts.latent,
    }


def kind(reach: Reach) -> tuple[int, int]:
    """Of the kernels: which reach, and its size in tokens."""
    if isinstance(reach, SlidingWindowSpec):
        return WINDOW, reach.window
    if isinstance(reach, ChunkedLocalAttentionSpec):
        return CHUNK, reach.size
    return FULL, 0


def tiles_of(step: Step, queries: int) -> tuple[Tiles, Tiles]:
    """The tiles of the sequences with one query, and of the others, of `queries` queries each; made once for a step."""
    key = (NAME, queries)
    if key not in step.plans and step.max_q == 1:  # also in a captured step, which has no lists
        every = torch.arange(len(step.seqused_k), dtype=torch.int32, device=step.device)
        step.plans[key] = ((every, torch.zeros_like(every)), (every[:0], every[:0]))
    elif key not in step.plans:
        lens = step.batch.query_lens
        ones = [(index, 0) for index, count in enumerate(lens) if count == 1]
        others = [(index, at) for index, count in enumerate(lens) if count > 1 for at in range(0, count, queries)]
        last = [context - count for context, count in zip(step.batch.context_lens, lens, strict=True)]
        others.sort(key=lambda tile: -last[tile[0]] - tile[1])  # the longest first, so that none begins at the end
        step.plans[key] = tuple(
            tuple(step.int_tensor([tile[part] for tile in tiles]) for part in (0, 1)) for tiles in (ones, others)
        )
    made: tuple[Tiles, Tiles] = step.plans[key]
    return made
