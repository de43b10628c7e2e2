"""The machine code of the GPU kernels, without a GPU: registers, spills, shared memory and tensor-core instructions.

Compiles each kernel for each architecture with the ptxas of Triton's package, and reads the result with its cuobjdump.
Ends with 1 if a kernel spills registers, needs more shared memory than the architecture has, does not use tensor cores
(on Hopper those that read shared memory, for tiles of 64 rows and more), copies no tiles ahead, adds in an order that
follows from the shape of its tile though it has several, or would be compiled again while requests run. A GPU's own
check hardly sees such an order: it changes few results of 16 bits.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from rich.console import Console
from rich.table import Table

from engine.kv.kv_cache_spec import CallFacts, FullAttentionSpec, SlidingWindowSpec
from loadtest.harness.options import numbers

SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # of one thread block; CUDA's programming guide
SUM = r'"tt.reduce"[^\n]*\n(?:\s*\^bb0[^\n]*\n)?\s*%\S+ = arith\.add'
NATURAL = 2  # of operands of 16 bits, also where they are read from shared memory
TENSOR_CORES = r"HGMMA|HMMA|UTC\w*MMA|IMMA"
COPIES = {"a thread": r"\bLDGSTS\b", "the copy engine": r"\bUTMALDG\b"}  # to shared memory, while others are used
CHANGING = (
    "rows",
    "tokens",
    "pairs",
    "tiles",
    "apart",
    "x_sequence",
    "table_row",
    "t_part",
)  # parameters that differ from step to step
GROUP = 4  # query heads of a KV head
SPLIT_KEYS = 4096

POINTERS = {
    **dict.fromkeys(("query", "turned", "k_pages", "v_pages", "k_scales", "v_scales", "out", "sinks"), "*bf16"),
    **dict.fromkeys(("tops", "sums", "kept"), "*fp32"),
    **dict.fromkeys(("starts", "contexts", "table", "tile_sequence", "tile_query"), "*i32"),
    **dict.fromkeys(("k_block", "v_block"), "i64"),
    **dict.fromkeys(("scaling", "softcap"), "fp32"),
}
NAMES = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
KEPT = {"": (None, ""), "int8": (torch.int8, "*i8"), "fp8": (torch.float8_e4m3fn, "*u8")}  # elements of pages
LATENTS = ((512, 64), (256, 32))  # elements of a latent, and of a rotated key
PRODUCTS = ((4096, 4096), (12288, 4096))  # [n, k]: narrow tiles of both widths
ROWS = (1, 64, MANY := 65)  # of a product: each has another tile
# dk, dv, and whether each of dk has its decay; state size, channels, and whether each element has its decay
DELTAS = ((128, 128, False), (128, 128, True), (64, 128, False), (192, 256, False), (256, 256, True))
SCANS = ((16, 8192, True), (64, 64, False), (128, 64, False), (128, 80, False), (256, 64, False))
UNIT = {"x": "*fp32", "out": "*fp32", "eps": "fp32"}
WITH_GATE = dict.fromkeys(("x", "out"), "*fp32") | dict.fromkeys(("gate", "weight"), "*bf16") | {"eps": "fp32"}
ONE_GROUP = {"share": 1}  # Triton takes a number that is 1 for a constant
ALIGNED = (  # multiples of 16 in every launch: pages and heads begin at multiples of 64 bytes
    *("query", "turned", "k_pages", "v_pages", "out", "q_token", "q_head", "r_token", "r_head"),
    *("k_block", "k_slot", "k_head", "v_block", "v_slot", "v_head", "o_token", "o_head", "o_part"),
    *("x", "weight", "bias", "beside", "columns", "ends", "ends_second", "depth", "group", "x_row", "s_col", "w_col"),
    *("values", "p_part", "p_tile", "p_head", "new", "pages", "n_token", "n_head", "p_block", "p_slot"),
    *("b_row", "o_row", "size", "w_expert", "w_depth", "b_expert", "plan", "chosen", "x_head", "w_head"),
)


@dataclass(frozen=True)
class Code:
    """One kernel for one architecture."""

    kernel: str
    architecture: int
    registers: int
    stack: int  # bytes of a thread: spilled registers
    shared: int  # bytes of a thread block
    tensor_cores: int  # instructions
    products: bool = True  # it has matrix products, in tiles of several shapes, so it must use tensor cores
    sums: int = 0  # along a dimension of a tile, in an order that follows from the tile's shape
    barriers: int | None = None  # of its longest loop after what that stores; None: it stores nothing
    widths: frozenset[int] = frozenset()  # neighbours along k of a product that one register of an operand holds
    rows: int = 0  # of a tile
    of_hopper: int = 0  # of the tensor-core instructions: those that read shared memory for 64 rows at a time
    copies: int | None = None  # instructions that copy tiles ahead, by what should copy; None: nothing is asked for

    @property
    def problem(self) -> str:
        """Empty: there is none."""
        if self.stack:
            return f"{self.stack} bytes of a thread are spilled"
        if self.shared > SHARED_KIB[self.architecture] * 1024:
            return f"more shared memory than {SHARED_KIB[self.architecture]} KiB"
        if self.products and self.sums:
            return "sums whose order follows from the shape of a tile"
        if self.kernel.startswith("attend") and self.barriers == 0:  # other threads load what the loop stores
            return "no barrier after what its loop stores"
        if self.products and not self.tensor_cores:
            return "no tensor cores"
        if self.products and self.architecture == 90 and self.rows >= 64 and not self.of_hopper:
            return "tensor cores as Ampere has them"
        return "no copies ahead" if self.products and self.copies == 0 else ""


def attention(
    architecture: int,
    head_dim: int,
    *,
    single: bool,
    kept: str = "",
    window: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> Code:
    """The attention kernel for sequences with a single query, or for the others; `kept`: the type of quantised KV."""
    reach = SlidingWindowSpec(window) if window else FullAttentionSpec()
    facts = CallFacts(8, 8 * GROUP, head_dim, head_dim, reach, None, False, head_dim**-0.5)
    return attending(f"{head_dim}", architecture, facts, single, kept, dtype)


def latents(
    architecture: int, rank: int, rope: int, *, single: bool, kept: str = "", dtype: torch.dtype = torch.bfloat16
) -> Code:
    """As `attention`, over latents; their heads take several tiles."""
    facts = CallFacts(1, 128, rank, rope, FullAttentionSpec(), None, False, 0.1, latent=True)
    return attending(f"latents {rank} + {rope}", architecture, facts, single, kept, dtype)


def attending(what: str, architecture: int, facts: CallFacts, single: bool, kept: str, dtype: torch.dtype) -> Code:
    """The kernel of one attention call."""
    from engine.gpu.attention import kernels as attention_kernels
    from engine.gpu.attention import paged_attention

    elements, pointer = KEPT[kept]
    pages = torch.empty(1, 16, 1, 1, dtype=elements or dtype)
    with mock.patch.object(paged_attention, "capability_of", return_value=architecture):
        tiling = paged_attention.Tiling.of(facts, pages, dtype)
        fixed = paged_attention.constants(facts, tiling, pages, SPLIT_KEYS, dtype)
    options = tiling.launch(single=single)
    own = {"ROWS": options.pop("ROWS"), "SINKS": False, "PARALLEL": single}
    types = POINTERS | dict.fromkeys(("query", "turned", "k_pages", "v_pages", "out", "sinks"), NAMES[dtype])
    types |= {"out": "*fp32"} if single else {}
    types |= dict.fromkeys(("k_pages", "v_pages"), pointer) if kept else {}
    more = [f", {kept} KV" if kept else "", ", window" if fixed["REACH"] else ""]
    name = f"attend {what}{''.join(more)}{', float32' if dtype == torch.float32 else ''}"
    code = compiled(
        f"{name}, {'one query' if single else 'prompts'}",
        attention_kernels.attend,
        fixed | own,
        types,
        architecture,
        options,
    )
    return replace(code, products=dtype != torch.float32)


def each_head(architecture: int, n: int, k: int, *, few: bool, dtype: torch.dtype = torch.bfloat16) -> Code:
    """The product of queries or of attention's results with what expands latents."""
    from engine.gpu import product_kernels
    from engine.gpu.attention import latent

    tiling = latent.tiling_of(1 if few else MANY, n, dtype, architecture)
    launch = tiling.launch
    options = {name: launch.pop(name) for name in ("num_warps", "num_stages")}
    if (most := latent.most_registers(dtype)) is not None:
        options |= {"maxnreg": most}
    fixed = {"WHOLE": k % tiling.depth == 0, "EXACT": dtype == torch.float32, "w_col" if n > k else "w_depth": 1}
    types = dict.fromkeys(("x", "weight", "out"), NAMES[dtype])
    name = f"each head {n} x {k}{', float32' if dtype == torch.float32 else ''}, {'few rows' if few else 'many'}"
    code = compiled(name, product_kernels.each_head, launch | fixed, types, architecture, options)
    return replace(code, products=dtype != torch.float32)


def product(
    architecture: int,
    n: int,
    k: int,
    *,
    rows: int,
    dtype: torch.dtype = torch.bfloat16,
    format: str = "",
    several: bool = False,
) -> Code:
    """A layer's product in a step of `rows` rows, with a residual; or `several` layers' without one.
    `format` of quantised weights, int4 in groups."""
    from engine.gpu import product_kernels, products

    depth = {"": None, "int4": 32}.get(format, 64)
    tiling = products.Tiling.of(rows, n, dtype, architecture, depth)
    launch, described = tiling.launch, architecture >= 90 and rows == MANY and not format and dtype != torch.float32
    options = {name: launch.pop(name) for name in ("num_warps", "num_stages")}
    fixed = {"WHOLE": k % tiling.depth == 0, "w_depth": 1, "BIAS": True, "BESIDE": not several}
    fixed |= {"EXACT": dtype == torch.float32, "FORMAT": products.FORMATS.get(format, 0)}
    fixed |= {"GROUPED": format == "int4", "ZEROS": format == "int4", "SEVERAL": several}
    fixed |= {"DESCRIBED": described, "BAND": products.BAND}
    own = NAMES[dtype]
    types = dict.fromkeys(("x", "weight", "bias", "beside", "out", "second", "third"), own)
    types |= {"scales": "*fp32", "zeros": "*u8"}
    types |= {"weight": "*i8" if format == "int8" else "*u8"} if format else {}
    if described:
        for name, high in (("x", tiling.rows), ("weight", tiling.columns)):
            types[name] = f"tensordesc<bf16[{high}, {tiling.depth}]>"
    what = f", {format or 'float32'}" if format or dtype == torch.float32 else ", of several" if several else ""
    name = f"product {n} x {k}{what}, {'many rows' if rows == MANY else f'{rows} rows'}"
    code = compiled(name, product_kernels.linear, launch | fixed, types, architecture, options)
    return replace(code, products=dtype != torch.float32)


def experts(
    architecture: int,
    *,
    rows: int,
    dtype: torch.dtype = torch.bfloat16,
    transposed: bool = False,
    bias: bool = False,
    format: str = "",
    group: int = 0,
) -> Code:
    """The products of a mixture's experts of 1536 x 2048, each with `rows` rows. `format`: over codes, with a scale for
    each `group` inputs or, without a group, for each column; int4 has zeros."""
    from engine.gpu import products
    from engine.gpu.mixture import kernels, operators

    count, n, k = 128, 1536, 2048
    depth = None if not format else 32 if group == 32 else 64
    tiling = operators.tiling(count * rows, count, n, dtype, architecture, depth)
    launch = tiling.launch
    options = {name: launch.pop(name) for name in ("num_warps", "num_stages")}
    fixed: dict[str, Any] = {"WHOLE": k % tiling.depth == 0, "BIAS": bias, "EXACT": dtype == torch.float32}
    fixed |= {"FORMAT": products.FORMATS.get(format, 0), "GROUPED": group > 0, "ZEROS": format == "int4"}
    fixed["w_col" if transposed else "w_depth"] = 1
    types = dict.fromkeys(("x", "weight", "bias", "out"), NAMES[dtype]) | {"plan": "*i32"}
    types |= {"scales": "*fp32", "zeros": "*u8"}
    types |= {"weight": "*i8" if format == "int8" else "*u8"} if format else {}
    what = f"{', transposed' if transposed else ''}{f', {format}' if format else ''}{f' by {group}' if group else ''}"
    what += ", float32" if dtype == torch.float32 else ""
    name = f"experts {n} x {k}{what}, {'many rows' if rows == MANY else f'{rows} rows'}"
    code = compiled(name, kernels.experts, launch | fixed, types, architecture, options)
    return replace(code, products=dtype != torch.float32)


def mixture(architecture: int) -> Iterator[Code]:
    """Which pairs are computed together, and their sums."""
    from engine.gpu.mixture import kernels, operators

    options = {"num_warps": 4}
    types = {"chosen": "*i64", "out": "*i32"}
    yield compiled("plan of pairs", kernels.plan, {"ROWS": 64, "CHUNK": operators.CHUNK}, types, architecture, options)
    types = dict.fromkeys(("y", "shares", "out"), "*bf16")
    gate = {"INTERLEAVED": True, "TILE": operators.TILE}
    numbers = {"both": "*bf16", "out": "*bf16", "limit": "fp32", "alpha": "fp32"}
    yield compiled("clamped gate", kernels.clamped_gate, gate, numbers, architecture, options)
    yield compiled("mix", kernels.mix, {"TILE": operators.TILE, "ROUNDED": True}, types, architecture, options)


def norm(architecture: int, size: int) -> Code:
    """RMS norm of rows of `size` elements."""
    from engine.gpu import product_kernels, products

    types = dict.fromkeys(("x", "weight", "out"), "*bf16") | {"eps": "fp32", "offset": "fp32"}
    tile = max(1, products.NORM_ELEMENTS // size)
    fixed, options = {"ROWS": tile, "SIZE": size, "ROUND_FIRST": True}, {"num_warps": 8 if size > 4096 else 4}
    code = compiled(f"RMS norm of {size}", product_kernels.rms_norm, fixed, types, architecture, options)
    return replace(code, products=False)


def of_rows(architecture: int) -> Iterator[Code]:
    """Gates, and what is done to heads of 128, at once and by rotary embedding alone."""
    from engine.gpu import product_kernels, products

    pointers = ("x", "q", "k", "v", "q_weight", "k_weight", "cos", "sin", "out", "k_pages", "v_pages", "gate", "up")
    types = dict.fromkeys(pointers, "*bf16") | dict.fromkeys(("eps", "offset"), "fp32")
    types |= {"blocks": "*i64", "slots": "*i64", "kp_block": "i64", "vp_block": "i64"}
    options = {"num_warps": 4}
    for kernel, fixed in (
        (product_kernels.place_heads, {"HEADS": 8, "HALF": 64, "V_SIZE": 128, "NORMED": True, "ROUND_FIRST": True}),
        (product_kernels.rotate, {"HEADS": 16, "HALF": 64}),
        (product_kernels.gated, {"ACT": 0, "TILE": products.NORM_ELEMENTS}),
    ):
        fused = {} if kernel is product_kernels.gated else {"enable_fp_fusion": False}
        code = compiled(kernel.__name__, kernel, fixed, types, architecture, options | fused)
        yield replace(code, products=False)


def of_pages(architecture: int) -> Iterator[Code]:
    """What merges the parts of a single query, and what writes quantised pages."""
    from engine.gpu.attention import kernels, page_kernel, paged_attention
    from engine.kv.kv_quantization import LARGEST

    types = dict.fromkeys(("values", "tops", "sums"), "*fp32") | dict.fromkeys(("sinks", "out"), "*bf16")
    types |= dict.fromkeys(("starts", "contexts", "tile_sequence"), "*i32")
    for dim, reach in ((128, kernels.FULL), (512, kernels.WINDOW)):
        fixed: dict[str, Any] = {
            "V_DIM": dim,
            "V_PAD": dim,
            "SPLIT": SPLIT_KEYS,
            "REACH": reach,
            "SINKS": reach == kernels.WINDOW,
        }
        code = compiled(f"merge parts, {dim}", kernels.merge, fixed, types, architecture, paged_attention.MERGE)
        yield replace(code, products=False)
    types = {"new": "*bf16", "blocks": "*i64", "slots": "*i64", "scales": "*i16", "p_block": "i64", "s_block": "i64"}
    for elements, pointer in ((torch.int8, "*i8"), (torch.float8_e4m3fn, "*u8")):
        fixed = {"MOST": LARGEST[elements], "FP8": pointer == "*u8", "HEADS": 8, "SIZE": 128}
        options, name = {"num_warps": 4, "enable_fp_fusion": False}, f"write {pointer[1:]} pages"
        code = compiled(name, page_kernel.write_heads, fixed, types | {"pages": pointer}, architecture, options)
        yield replace(code, products=False)


def digest(architecture: int) -> Code:
    """The sums of blocks' words."""
    from engine.gpu import block_digest, digest_kernel

    fixed = {name: getattr(block_digest, name) for name in ("SPREAD", "MIX", "TILE", "TILES")}
    types = {"words": "*i32", "ids": "*i64", "sums": "*i64"}
    code = compiled("digest", digest_kernel.sum_words, fixed, types, architecture, {"num_warps": 4})
    return replace(code, products=False)


def sampling(architecture: int) -> Code:
    """From logits to tokens."""
    from engine.gpu import sampling, sampling_kernel

    types = {"logits": "*fp32", "numbers": "*fp64", "weights": "*fp64", "chosen": "*i64"}
    fixed, options = {"TILE": sampling.TILE}, {"num_warps": sampling.WARPS}
    code = compiled("sampling", sampling_kernel.choose_tokens, fixed, types, architecture, options)
    return replace(code, products=False)


def recurrences(architecture: int, variants: bool) -> Iterator[Code]:
    """Recurrent layers: of the most common sizes, with `variants` of others, too."""
    from engine.gpu.recurrent import kernels, operators

    names = ("q", "k", "v", "decay", "beta", "x", "dt", "a", "b", "c", "d", "states", "out", "y")
    types = dict.fromkeys(names, "*fp32") | {"rows": "*i64"}
    for dk, dv, channels in DELTAS if variants else DELTAS[:2]:
        keys, columns = operators.tile(dk, dv)
        fixed = {"KEYS": keys, "COLS": columns, "CHANNELS": channels, **(ONE_GROUP if channels else {})}
        name, warps = f"{'Kimi' if channels else 'gated'} delta {dk} x {dv}", operators.warps(keys, columns)
        yield recurrent(name, kernels.gated_delta, fixed, types, architecture, warps)
    for size, dim, own in SCANS if variants else SCANS[:3:2]:
        of_state, columns = operators.tile(size, dim)
        fixed = {"COLS": columns, "SIZE": of_state, "OWN": own, "SKIP": True, **(ONE_GROUP if own else {})}
        name, warps = f"{'Mamba' if own else 'Mamba-2'} scan {dim} x {size}", operators.warps(of_state, columns)
        yield recurrent(name, kernels.state_space_scan, fixed, types, architecture, warps)
    yield from norms(architecture)
    taps = {"WIDTH": 4, "BIAS": True, "SILU": True, "CHANNELS": operators.CHANNELS}
    types = dict.fromkeys(("x", "weight", "bias", "y", "states"), "*bf16") | {"rows": "*i64"}
    for kernel, more in (
        (kernels.short_convolution, {"TOKENS": operators.TOKENS}),
        (kernels.short_convolution_step, {"KEPT": 4}),
    ):
        yield recurrent(kernel.__name__.replace("_", " "), kernel, taps | more, types, architecture, 4)


def norms(architecture: int) -> Iterator[Code]:
    """Between the operators of recurrent layers."""
    from engine.gpu.recurrent import norm_kernels

    unit = {"ROWS": 8, "SIZE": 128}
    yield recurrent("rows of 128 over their length", norm_kernels.unit, unit, UNIT, architecture, 4)
    for size, options in ((128, {"ROWS": 8}), (8192, {"ROWS": 1})):
        fixed = {**options, "SIZE": size, "GATE_FIRST": size > 128, "SILU": True, "ROUND_FIRST": True}
        name, warps = f"norm of {size} with a gate", 8 if size > 4096 else 4
        yield recurrent(name, norm_kernels.gated, fixed, WITH_GATE, architecture, warps)


def recurrent(
    name: str, kernel: Any, fixed: dict[str, Any], types: dict[str, str], architecture: int, warps: int
) -> Code:
    """Such a kernel sums in one order wherever its inputs begin, so no pointer may be specialised."""
    pointers = [one for one in kernel.params if types.get(one.name, "").startswith("*")]
    if elsewhere := [one.name for one in pointers if not one.do_not_specialize]:
        raise SystemExit(f"{name} would be compiled again if inputs begin elsewhere: {elsewhere[0]} is specialised")
    return replace(compiled(name, kernel, fixed, types, architecture, {"num_warps": warps}), products=False)


def compiled(
    name: str, kernel: Any, constants: dict[str, Any], types: dict[str, str], architecture: int, options: dict[str, int]
) -> Code:
    """Compiles a Triton kernel; `types` of its parameters, int32 for those that are not named."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    again = [one.name for one in kernel.params if one.name in CHANGING and not one.do_not_specialize]
    if again:
        raise SystemExit(f"{name} would be compiled again in a step of another size: {', '.join(again)} is specialised")
    names = kernel.arg_names
    signature = {one: "constexpr" if one in constants else types.get(one, "i32") for one in names}
    fixed = {(names.index(one),): value for one, value in constants.items()}
    anyhow = {one.name for one in kernel.params if one.do_not_specialize}
    aligned = [one for one in ALIGNED if one in names and one not in anyhow and one not in constants]
    attributes = {(names.index(one),): [["tt.divisibility", 16]] for one in aligned}
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed, attrs=attributes)
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    code = disassembled(made.asm["cubin"])
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", code)
    if found is None:
        raise SystemExit(f"cuobjdump of this version reports resources in another form: {code[:200]!r}")
    registers, stack, local = map(int, found.groups())
    tensor_cores = len(re.findall(TENSOR_CORES, code))
    layouts = made.asm["ttgir"]
    widths = {int(width) for width in re.findall(r"tt\.dot .*?opIdx = 1[^>]*?kWidth = (\d)", layouts)}
    widths |= {NATURAL} if re.search(r"warp_group_dot|tc_gen5_mma", layouts) else set()
    sums = len(re.findall(SUM, layouts))
    own = Code(name, architecture, registers, stack + local, made.metadata.shared, tensor_cores)
    by = "the copy engine" if any("tensordesc" in one for one in signature.values()) else "a thread"
    copies = len(re.findall(COPIES[by], code)) if options.get("num_stages", 1) > 1 else None
    own = replace(own, rows=constants.get("ROWS", 0), copies=copies, of_hopper=len(re.findall("HGMMA", code)))
    return replace(own, sums=sums, widths=frozenset(widths), barriers=barriers(made.asm["ptx"]))


def disassembled(cubin: bytes) -> str:
    """What cuobjdump says of a compiled kernel. Triton keeps that between runs, and this beside it."""
    import triton
    from triton.runtime.cache import get_cache_manager

    flags = ("--dump-resource-usage", "--dump-sass")
    kept = get_cache_manager(hashlib.sha256(cubin + repr((triton.__version__, flags)).encode()).hexdigest())
    if path := kept.get_file("cuobjdump"):
        return Path(path).read_text()
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), *flags, file.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    kept.put(code, "cuobjdump")
    return code


def barriers(ptx: str) -> int | None:
    """Those in the longest loop after the last store to memory there; None without a loop that stores."""
    lines = [line.strip() for line in ptx.splitlines()]
    labels = {found[1]: at for at, line in enumerate(lines) if (found := re.match(r"(\$L\w+):", line))}
    jumps = [
        (at, found[1]) for at, line in enumerate(lines) if (found := re.search(r"\bbra(?:\.uni)?\s+(\$L\w+);", line))
    ]
    loops = [lines[labels[label] : at] for at, label in jumps if labels.get(label, at) < at]
    loop = max(loops, key=len, default=[])
    stores = [at for at, line in enumerate(loop) if "st.global" in line]
    return sum("bar.sync" in line for line in loop[stores[-1] :]) if stores else None


def other_order(codes: list[Code]) -> list[Code]:
    """Kernels whose products add in another order than those of the same work in tiles of another shape."""
    orders: dict[tuple[str, int], frozenset[int]] = {}
    return [
        code
        for code in codes
        if code.widths != orders.setdefault((code.kernel.rpartition(", ")[0], code.architecture), code.widths)
    ]


def main(
    architectures: Annotated[str, typer.Option(metavar="N,N", help="Compute capabilities times 10.")] = "80,89,90,100",
    dims: Annotated[str, typer.Option(metavar="N,N", help="Head sizes.")] = "64,80,128,256,512",
    variants: Annotated[bool, typer.Option(help="Also quantised KV and windows.")] = True,
) -> None:
    if os.environ.get("TRITON_INTERPRET"):
        raise SystemExit("TRITON_INTERPRET is set: nothing is compiled")
    table = Table("kernel", "sm", "registers", "spilled, B", "shared, KiB", "tensor-core instructions", "problem")
    problems, codes = 0, list(_codes(numbers(architectures), numbers(dims), variants))
    differing = other_order(codes)
    for code in codes:
        problem = code.problem or ("another order of sums than in another tile" if code in differing else "")
        problems += bool(problem)
        shared, cores = f"{code.shared / 1024:.0f}", str(code.tensor_cores)
        figures = (code.architecture, code.registers, code.stack, shared, cores)
        table.add_row(code.kernel, *map(str, figures), problem)
    Console(width=120).print(table)
    if problems:
        raise SystemExit(1)


def _codes(architectures: Iterable[int], dims: Iterable[int], variants: bool) -> Iterator[Code]:
    for architecture in architectures:
        for dim in dims:
            for single in (True, False):
                yield attention(architecture, dim, single=single)
                if variants:
                    yield attention(architecture, dim, single=single, kept="int8")
                    yield attention(architecture, dim, single=single, kept="fp8")
                    yield attention(architecture, dim, single=single, dtype=torch.float32)
                    yield attention(architecture, dim, single=single, window=4096)
        for rank, rope in LATENTS if variants else LATENTS[:1]:
            for single in (True, False):
                yield latents(architecture, rank, rope, single=single)
                if variants:
                    yield latents(architecture, rank, rope, single=single, kept="int8")
                    yield latents(architecture, rank, rope, single=single, kept="fp8")
                    yield latents(architecture, rank, rope, single=single, dtype=torch.float32)
            for dtype in (torch.bfloat16, torch.float32) if variants else (torch.bfloat16,):
                for few in (True, False):
                    yield each_head(architecture, rank, 128, few=few, dtype=dtype)
                    yield each_head(architecture, 128, rank, few=few, dtype=dtype)
        for n, k in PRODUCTS if variants else PRODUCTS[:1]:
            for rows in ROWS:
                yield product(architecture, n, k, rows=rows)
                yield product(architecture, n, k, rows=rows, several=True)
        if variants:
            for rows in ROWS:
                yield product(architecture, 4096, 4096, rows=rows, dtype=torch.float32)
                for format in ("int8", "fp8", "int4"):
                    yield product(architecture, 4096, 4096, rows=rows, format=format)
            yield norm(architecture, 16384)
        for rows in ROWS:
            yield experts(architecture, rows=rows)
            if variants:
                yield experts(architecture, rows=rows, transposed=True, bias=True)
                yield experts(architecture, rows=rows, dtype=torch.float32)
                for format, group in (("int8", 0), ("int8", 32), ("fp8", 0), ("fp8", 128), ("int4", 32), ("int4", 128)):
                    yield experts(architecture, rows=rows, format=format, group=group)
        yield from (replace(code, products=False) for code in mixture(architecture))
        yield norm(architecture, 4096)
        yield from of_rows(architecture)
        yield from of_pages(architecture)
        yield digest(architecture)
        yield sampling(architecture)
        yield from recurrences(architecture, variants)
