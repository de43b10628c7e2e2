"""The first hour with a GPU: every kernel of Tandem on it, against what it must equal. Measures nothing.

Attention is compared with the reference in float32 over all kinds of calls, model dtypes and types of pages; products,
and experts and routers of mixtures, with torch's, and a row's bits alone, among few and among many; digests with numpy;
tokens with plain PyTorch; log probabilities with a CPU's; what grammars forbid with xgrammar on CPU; quantised pages
with the bytes that a CPU writes. A token's bits in attention are compared alone and in a chunk. Then a tiny model of
each family is loaded on the GPU, which proves its paged forward and its recurrent layers against transformers', and its
decode steps are captured; those of some with recurrent layers run for many tokens. A line for each; ends with 1 if one
is wrong.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Annotated, Any, Literal
from unittest.mock import patch

import torch
import typer
from torch import nn

from engine.attention.forward_context import Batch, Step
from engine.attention.mla import Expanded
from engine.core.engine_config import EngineConfig
from engine.core.sequence import Sequence
from engine.decoding import logprobs, sampler, structured_output
from engine.engine import Engine
from engine.gpu import block_digest, layers
from engine.gpu import sampling as gpu_sampling
from engine.gpu.attention import kernel_choice
from engine.kernels import experts as experts_of
from engine.kernels import modules, weight_quantization
from engine.kv.kv_cache_spec import CallFacts, ChunkedLocalAttentionSpec, FullAttentionSpec, Reach, SlidingWindowSpec
from engine.loading import state_probe
from engine.loading.gptq_awq_fp8 import Product
from engine.loading.model_loader import load_model
from engine.runner import recurrences
from engine.runner.mixers import Mixers
from engine.runner.model_runner import KvDtype, ModelRunner
from loadtest.harness.random_checkpoints import HYBRID, TINY, make_checkpoint
from loadtest.microbench.mixture import WHOLE
from loadtest.microbench.recurrence import LAYERS, REST, model_of
from tandem.sampling import Sampling

Check = Callable[[], str]  # a line about what was found; "wrong: ..." if it is not right
NO_CUDA = "error: `loadtest device-kernels` checks a GPU, and torch finds no CUDA device here"
BLOCK_SIZE, LONGEST = 16, 8192
PAGES = {None: "", torch.int8: ", int8 pages", torch.float8_e4m3fn: ", fp8 pages"}
SHAPES = [  # query heads, KV heads, elements of a head
    *((32, 8, 64), (32, 8, 80), (16, 16, 96), (32, 8, 128), (8, 1, 256), (8, 2, 512))
]
PRODUCTS = [(4096, 4096), (12288, 4096), (777, 1000)]  # [n, k]
CODES = [("int8", 4096), ("fp8", 4096), ("fp8", 128), ("int4", 32), ("int4", 128), ("int4", 4096)]  # format, group
ORDERED = [("int8", 128), ("int4", 128)]  # likewise, of GPTQ with desc_act
MOES = ["qwen3-moe", "mixtral", "qwen2-moe", "gpt-oss", "deepseek-v3"]  # families that are checked in 16 bits, too
IN_16_BITS = ("qwen3-next", "nemotron-h")  # both kinds of recurrence, with experts
# Families whose captured steps are compared over many tokens. On CUDA those of the first are queued, too.
STREAMS = ("llama", "qwen3-5", "falcon-h1", "lfm2", "kimi-linear")
LATENT = [(16, 512, 64), (128, 512, 64), (40, 256, 32)]  # heads, elements of a latent, and of a rotated key
EXPANDED = Expanded(128, 128)
# Mamba-2 whose time steps have no limits, which transformers would apply to chunks alone.
UNCLAMPED: dict[str, dict[str, Any]] = {
    "Mamba-2 without limits, heads of 64, state of 128": {
        **{**REST, "model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"], "num_local_experts": 2},
        **{"shared_intermediate_size": 16, "hidden_size": 2048, "mamba_n_heads": 64, "mamba_d_head": 64},
        **{"mamba_d_state": 128, "mamba_n_groups": 1},
    },
    "Mamba-2 without limits, heads of 64, state of 256": {
        **{**REST, "model_type": "falcon_h1", "num_hidden_layers": 1, "hidden_size": 2048, "mamba_d_ssm": 4096},
        **{"mamba_n_heads": 64, "mamba_d_head": 64, "mamba_d_state": 256, "mamba_n_groups": 1},
    },
}
# Of a recurrent layer in bfloat16: three times the most of all layers (0.9 %, Jamba) by the operators of a CPU.
ROUNDED = 0.03
REACHES: list[Reach] = [FullAttentionSpec(), SlidingWindowSpec(128), ChunkedLocalAttentionSpec(256)]


def calls() -> Iterator[CallFacts]:
    """Every head size with every reach; softcaps and sinks with one size."""
    for heads, kv_heads, dim in SHAPES:
        for reach in REACHES:
            yield CallFacts(kv_heads, heads, dim, dim, reach, None, False, dim**-0.5)
    for reach in REACHES:
        yield CallFacts(8, 64, 64, 64, reach, None, True, 0.125)
        yield CallFacts(4, 8, 256, 256, reach, 50.0, False, 0.0625)
    for heads, rank, rope in LATENT:
        yield CallFacts(1, heads, rank, rope, FullAttentionSpec(), None, False, (128 + rope) ** -0.5, latent=True)


def attention(device: torch.device, fact: CallFacts, dtype: torch.dtype, kept: torch.dtype | None) -> str:
    from engine.gpu.attention.paged_attention import (
        TritonAttention,  # torch for CUDA brings Triton, the one for CPU does not
    )

    kernel = TritonAttention(LONGEST, EXPANDED)
    if refused := kernel.refusal(fact, kept or dtype):
        return f"wrong: refused because of {refused}"
    problem = kernel_choice.differs(kernel, [fact], dtype, BLOCK_SIZE, device, kept)
    return _line(problem, "equal within roundings")


def attention_bits(device: torch.device, fact: CallFacts, dtype: torch.dtype, kept: torch.dtype | None) -> str:
    """Tokens alone and in a chunk: tiles of two shapes, whose tensor-core instructions differ from Hopper on. Another
    order of sums changes few results in bfloat16, so all are compared; `machine_code.other_order` sees
    some such orders for certain."""
    from engine.gpu.attention import latent  # as above
    from engine.gpu.attention.paged_attention import TritonAttention  # as above

    done, new, generator = 690, 10, torch.Generator(device).manual_seed(0)
    table = list(range(-(-(done + new) // BLOCK_SIZE)))
    whole = Batch()
    whole.add([0] * new, done, table)
    pages, _ = kernel_choice.random_pages(fact, len(table), (dtype, kept), BLOCK_SIZE, generator, whole)
    width, weight = fact.k_dim, None
    if fact.latent:
        width, weight = EXPANDED.plain + fact.v_dim, latent.random_weight(fact, EXPANDED, dtype, generator)
    query = torch.randn(new, fact.heads, width, generator=generator, device=device).to(dtype)
    sinks = torch.randn(fact.heads, generator=generator, device=device) if fact.sinks else None
    kernel = TritonAttention(LONGEST, EXPANDED)

    def attended(first: int, count: int) -> torch.Tensor:
        batch = Batch()
        batch.add([0] * count, done + first, table)
        step, scales = Step(batch, pages, (fact,), device), (pages.k_scales[0], pages.v_scales[0])
        own = query[first : first + count]
        return kernel.attend(own, pages.k[0], pages.v[0], scales, step, fact, sinks, weight)

    chunk = attended(0, new)
    same = all(torch.equal(attended(number, 1)[0], chunk[number]) for number in range(new))
    return _line(None if same else "other bits alone than in a chunk", "each token has the same bits in both")


def sampling(device: torch.device, rows: int = 100, vocab: int = 152_064) -> str:
    """A large batch over a real vocabulary, in two parts that share the memory of their weights. A grammar has masked
    most tokens of some rows, and all of one. Not run on a GPU."""
    logits = 4.0 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))
    logits[::3, 90:] = -torch.inf
    logits[-1] = -torch.inf
    logits, how = logits.to(device), [gpu_sampling.TRIED[row % len(gpu_sampling.TRIED)] for row in range(rows)]
    found = gpu_sampling.sample(logits, how, [sampler.uniform(each.seed, row) for row, each in enumerate(how)])
    wrong = not torch.equal(found, sampler.draw(logits, how, range(rows), compiled=False))
    return _line("other tokens" if wrong else None, "the tokens of plain PyTorch")


def grammars(device: torch.device) -> str:
    """What they forbid, against xgrammar's operator for CPU."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (3, 4001), generator=generator, dtype=torch.int32)
    logits = torch.randn(3, 128_001, generator=generator)
    ours = logits.to(device)
    masks: Any = SimpleNamespace(bits=bits, rows=[0, 2])
    for each in (logits, ours):
        structured_output.apply(each, masks)
    return _line(None if torch.equal(ours.cpu(), logits) else "other tokens are forbidden", "the same tokens forbidden")


def log_probabilities(device: torch.device, vocab: int = 152_064) -> str:
    """Of logits of which many are equal, as in 16 bits, against those of the CPU."""
    logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    logits[0, ::2] = -0.0
    theirs, ours = (logprobs.logprobs(each, range(8), [20] * 8) for each in (logits, logits.to(device)))
    if [each.top_ids for each in ours] != [each.top_ids for each in theirs]:
        return "wrong: other tokens are the likeliest"
    numbers = [torch.tensor([[each.chosen, *each.top] for each in found]) for found in (ours, theirs)]
    gap = (numbers[0] - numbers[1]).abs().max().item()
    return _line(None if gap < 1e-3 else f"off by {gap:.2g}", "those of the CPU, of equal ones the lowest tokens")


def product(device: torch.device, n: int, k: int, dtype: torch.dtype) -> str:
    """In plain elements."""
    line = layers.adopt(nn.Sequential(nn.Linear(k, n, dtype=dtype, device=device)))
    return _line(None if line.startswith(layers.NAME) else line, "equal within roundings, and a row to itself")


def experts(device: torch.device, config: dict[str, Any], dtype: torch.dtype, format: str = "", group: int = 0) -> str:
    """Checks the experts of one layer of a mixture, of their full size and number, and its router. With a `format` the
    experts are over codes: random ones with a scale for each `group` inputs (int4 with zeros, as AWQ has them), or,
    without a group, those to which their weights are rounded."""
    from engine.gpu import codes  # as above
    from engine.gpu.mixture import adoption

    model, packer = model_of({**REST, **config, "num_hidden_layers": 1}, dtype, device), codes.packer(device)
    for mixture in adoption.found_experts(model):
        for each in mixture.parameters():
            nn.init.normal_(each, std=0.05)
        if format:
            named = zip(experts_of.weights(mixture), experts_of.names(mixture), strict=True)
            both = [
                random_stack(weight, format, group, name, packer)
                if group
                else weight_quantization.round_experts(weight, format, name, packer)
                for weight, name in named
            ]
            packer.adopter().adopt(mixture, both)
    line = adoption.adopt(model)
    if line != ("1 mixtures over codes, 1 routers" if format else "1 mixtures, 1 routers"):
        return f"wrong: {line}"
    return "equal within roundings, and a row to itself"


def random_stack(
    weight: torch.Tensor, format: str, group: int, name: str, packer: weight_quantization.Packer
) -> experts_of.CodedStack:
    """Codes as a checkpoint has them, of the size of the weights `[experts, n, k]`."""
    (count, n, k), generator = weight.shape, torch.Generator().manual_seed(0)

    def each() -> Iterator[experts_of.ExpertCodes]:
        for _ in range(count):
            scales = (torch.rand(n, -(-k // group), generator=generator) + 0.1) / 100
            if format == "int4":
                integers = torch.randint(0, 16, (n, k), generator=generator).to(torch.int16)
                zeros = torch.randint(6, 10, scales.shape, generator=generator)
                yield experts_of.ExpertCodes(integers, scales, group, zeros)
            else:
                units = torch.randn(n, k, generator=generator) * {"int8": 40.0, "fp8": 4.0}[format]
                yield experts_of.ExpertCodes(weight_quantization.codes_of(units, format), scales, group)

    stack = packer.pack_experts(each(), count, format, name)
    assert stack is not None
    return stack


def codes(
    device: torch.device, format: str, group: int, zeros: bool = False, sizes: tuple[int, int] = (512, 4096)
) -> str:
    """Packing reads each weight back, and tries the product. `zeros`: of int4, as AWQ has them. Raises
    CheckpointRefused."""
    from engine.gpu import codes  # torch for CUDA brings Triton, the one for CPU does not

    (n, k), generator = sizes, torch.Generator().manual_seed(0)
    scales = torch.rand(n, k // group, generator=generator) + 0.1
    if zeros:
        integers = torch.randint(0, 16, (n, k), generator=generator).to(torch.int16)
        own = torch.randint(0, 17, scales.shape, generator=generator)  # GPTQ's are one more than they are stored
        codes.packed(integers, scales, group, format, device, own)
    else:
        units = torch.randn(n, k, generator=generator) * {"int8": 40.0, "fp8": 100.0, "int4": 3.0}[format]
        codes.packed(weight_quantization.codes_of(units, format), scales, group, format, device)
    return "equal within roundings, and a row to itself"


def ordered(device: torch.device, format: str, group: int, sizes: tuple[int, int] = (512, 4096)) -> str:
    """A product of GPTQ with desc_act, whose columns are not beside those of their group, as it is loaded."""
    from engine.gpu import codes  # as above

    (n, k), generator = sizes, torch.Generator().manual_seed(0)
    units = torch.randint(-8, 8, (n, k), generator=generator).float() * {"int8": 16, "int4": 1}[format]
    scales = torch.rand(n, k // group, generator=generator) + 0.1
    of = torch.arange(k)[torch.randperm(k, generator=generator)] // group
    loaded = Product("", lambda rows, columns: units[rows, columns], None, scales, of, group).codes(
        codes.packer(device)
    )
    if not isinstance(loaded, codes.RowCodes) or (loaded.format, loaded.order is None) != (format, False):
        return f"wrong: loaded as {type(loaded).__name__}"
    wrong = codes.differs(loaded, (units * scales[:, of]).to(device))
    return _line("other products" if wrong else None, "equal within roundings, and a row to itself")


def family(device: torch.device, name: str, dtype: torch.dtype, kv_dtype: KvDtype = "auto") -> str:
    """Loads, checks itself, captures."""
    lines: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        own = make_checkpoint(Path(folder) / name, f"tiny-{name}", dtype=str(dtype).removeprefix("torch."))
        model = load_model(str(own), dtype=dtype, device=device, kv_dtype=kv_dtype, progress=lines.append)
    engine = Engine(
        model, EngineConfig(num_blocks=256, block_size=16, token_budget=64, max_running=8, spare_block=True)
    )
    chosen = [line for line in lines if line.startswith(("attention: ", "products: "))]
    if refused := [line for line in chosen if "because Triton's" in line]:
        return f"wrong: {'; '.join(refused)}"
    if model.mixers:
        chosen.append(_by_operators(model.mixers, device))
    captured = engine.capture()
    chosen.append(f"{'' if captured.startswith('captured') else 'wrong: '}decode steps {captured}")
    wrong = next((line for line in chosen if line.startswith("wrong")), None)
    return wrong or "; ".join(chosen)


def streams(device: torch.device, name: str) -> str:
    """Tokens of sequences that come and go and are preempted, half of them sampled: with captured steps and compiled
    sampling, and without both."""
    with tempfile.TemporaryDirectory() as folder:
        own = make_checkpoint(Path(folder) / name, f"tiny-{name}", dtype="float32")
        model = load_model(str(own), dtype=torch.float32, device=device, progress=lambda _: None)
    config = EngineConfig(
        num_blocks=12 + model.layout(16).state_blocks, block_size=16, token_budget=64, max_running=4, spare_block=True
    )
    lines, tokens = [], []
    for both in (True, False):
        engine = Engine(model, config)
        lines.append(engine.capture() if both else "")
        added = [
            Sequence(
                f"{n}",
                [(7 * n + place) % model.vocab_size for place in range(length)],
                *(length, length + 48),
                sampling=Sampling(temperature=float(n % 2), top_p=0.9, seed=n),
            )
            for n, length in enumerate((5, 70, 21, 33, 9, 48))
        ]
        for sequence in added:
            engine.add(sequence)
        with patch.object(ModelRunner, "draws_compiled", ModelRunner.draws_compiled if both else False):
            while engine.scheduler.has_work:
                engine.step()
        tokens.append([sequence.tokens for sequence in added])
    if not lines[0].startswith("captured"):
        return f"wrong: {lines[0]}"
    same = f"the same tokens with and without, {engine.scheduler.preemptions} preemptions"
    return _line(None if tokens[0] == tokens[1] else "other tokens by captured steps and compiled sampling", same)


def recurrence(device: torch.device, config: dict[str, Any]) -> str:
    """A model's recurrent layers of their full size, each against transformers' own code, in pieces from a state, with
    Tandem's products and norms as they serve. With these a layer must have the same bits in any step; not Mamba, whose
    product of time steps stays torch's."""
    model = model_of(config, torch.bfloat16, device)
    line = layers.prepare(model, device)
    modules.switch(model, True)
    with recurrences.slow_lines_held():
        mixers = state_probe.learn(model, recurrences.available(device))
        assert mixers is not None
        error = state_probe.error_in_own_type(model, mixers)
    said = f"{_by_operators(mixers, device)}; {_bits(mixers)}, with products by {line}; off by {error:.1%} in bfloat16"
    promised = line.startswith(layers.NAME) and config["model_type"] != "jamba"
    bits = _same_bits(mixers) or not promised
    right = bits and error <= ROUNDED and "because Triton's" not in line  # NaN is not right
    return said if right or said.startswith("wrong") else f"wrong: {said}"


def _same_bits(mixers: Mixers) -> bool:
    """Of what the kernels do, apart from what transformers does with the time steps of Mamba-2."""
    return all(mixer.same_bits for mixer in mixers.each)


def _bits(mixers: Mixers) -> str:
    if not _same_bits(mixers):
        return "not the same bits in any step"
    return f"the same bits in any step{'' if mixers.exact else '; transformers clamps time steps of chunks alone'}"


def _by_operators(mixers: Mixers, device: torch.device) -> str:
    right = mixers.by_operators or not recurrences.available(device)
    return str(mixers) if right else f"wrong: {mixers}, not all by operators"


def checks(device: torch.device, families: list[str]) -> Iterator[tuple[str, Check]]:
    """Each with its name."""
    yield "digests", lambda: _line(block_digest.wrong(device), "equal to numpy's")
    for n, k in PRODUCTS:
        for dtype in (torch.bfloat16, torch.float32):
            yield f"product {n} x {k}, {dtype}", partial(product, device, n, k, dtype)
    for format, group in CODES:
        yield f"product over {format} in groups of {group}", partial(codes, device, format, group)
    yield "product over int4 in groups of 128, with zeros", partial(codes, device, "int4", 128, zeros=True)
    for format, group in ORDERED:
        yield (
            f"product over {format} in groups of {group}, columns in another order",
            partial(ordered, device, format, group),
        )
    for name, config in WHOLE.items():
        for dtype in (torch.bfloat16, torch.float32):
            yield f"experts {name}, {dtype}", partial(experts, device, config, dtype)
        for format, group in [("int8", 0), ("fp8", 0), ("int4", 0), ("int8", 32), ("fp8", 128), ("int4", 128)]:
            what = f"experts {name} over {format}{f' in groups of {group}' if group else ''}"
            yield what, partial(experts, device, config, torch.bfloat16, format, group)
    yield "sampling", lambda: _line(sampler.kernel_trial(device), "the tokens of plain PyTorch")
    yield "sampling of 100 rows of 152,064 tokens", partial(sampling, device)
    yield "grammars", partial(grammars, device)
    yield "log probabilities", partial(log_probabilities, device)
    for fact in calls():
        for kept, pages in PAGES.items():
            name = f"bits of attention {_shape(fact)}, {fact.reach}{pages}"
            yield name, partial(attention_bits, device, fact, torch.bfloat16, kept)
        for dtype in (torch.bfloat16, torch.float32):
            for kept, pages in PAGES.items():
                more = f"{', sinks' if fact.sinks else ''}{', softcap' if fact.softcap else ''}, {dtype}{pages}"
                name = f"attention {_shape(fact)}, {fact.reach}{more}"
                yield name, partial(attention, device, fact, dtype, kept)
    for name, config in (LAYERS | UNCLAMPED).items():
        yield f"recurrence {name}", partial(recurrence, device, config)
    for name in families:
        yield f"family {name}", partial(family, device, name, torch.float32)
        if name in MOES:
            yield f"family {name}, {torch.bfloat16}", partial(family, device, name, torch.bfloat16)
    for name in (each for each in IN_16_BITS if each in families):
        yield f"family {name}, bfloat16", partial(family, device, name, torch.bfloat16)
    for name in (each for each in STREAMS if each in families):
        yield f"streams {name}", partial(streams, device, name)
    yield "family llama, int8 pages", partial(family, device, "llama", torch.bfloat16, "int8")


def _shape(fact: CallFacts) -> str:
    if fact.latent:
        return f"latent {fact.heads} x {fact.k_dim + fact.v_dim}/{fact.k_dim}"
    return f"{fact.heads}/{fact.kv_heads} x {fact.k_dim}"


def _line(problem: str | None, right: str) -> str:
    return f"wrong: {problem}" if problem else right


def main(
    only: Annotated[str, typer.Option(metavar="TEXT", help="Checks whose name begins with it.")] = "",
    at_once: Annotated[int, typer.Option(min=1, max=64, help="Processes; most of the time is that of compilers.")] = 1,
    device: Annotated[Literal["cuda", "cpu"], typer.Option(hidden=True)] = "cuda",
) -> int:
    if device == "cuda" and not torch.cuda.is_available():
        print(NO_CUDA, file=sys.stderr)
        return 1
    where = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
    print(f"{torch.cuda.get_device_name() if device == 'cuda' else 'cpu'}, torch {torch.__version__}", flush=True)
    wanted = [each for each in checks(where, list(TINY | HYBRID)) if each[0].startswith(only)]
    if not wanted:
        print(f"error: no check begins with {only!r}", file=sys.stderr)
        return 1
    wrong = run(wanted) if at_once == 1 else run_at_once([name for name, _ in wanted], where, at_once)
    print(f"{wrong} wrong")
    return int(wrong > 0)


def run(wanted: list[tuple[str, Check]]) -> int:
    """Prints a line for each check; how many were wrong. An error ends its own check only."""
    wrong = 0
    for name, check in wanted:
        line = found(check)
        wrong += line.startswith("wrong")
        print(f"{name}: {line}", flush=True)
    return wrong


def run_at_once(names: list[str], device: torch.device, processes: int) -> int:
    """As `run`, in several processes, because most of the time is that of compilers. A process whose device has failed
    is of no more use and is replaced, like one that has ended."""
    waiting, busy, wrong = iter(names), dict[Any, str](), 0
    for name in islice(waiting, processes):
        busy[_process(name, device)] = name
    while busy:
        ready: list[Any] = wait(list(busy))
        for connection in ready:
            name = busy.pop(connection)
            try:
                line, usable = connection.recv()
            except EOFError:
                line, usable = "wrong: its process ended", False
            wrong += line.startswith("wrong")
            print(f"{name}: {line}", flush=True)
            if (following := next(waiting, None)) is None:
                continue
            if usable:
                connection.send(following)
                busy[connection] = following
            else:
                busy[_process(following, device)] = following
    return wrong


def _process(first: str, device: torch.device) -> Any:
    """The connection to a new one, which ends with this one and has its first name."""
    ours, theirs = get_context("spawn").Pipe()
    get_context("spawn").Process(target=_serve, args=(theirs, device), daemon=True).start()
    theirs.close()  # so that its end is the end of the connection
    ours.send(first)
    return ours


def _serve(connection: Any, device: torch.device) -> None:
    torch.set_num_threads(1)
    every = dict(checks(device, list(TINY | HYBRID)))
    usable = True
    while usable:
        try:
            name = connection.recv()
        except EOFError:  # nothing is left to do
            return
        start = perf_counter()
        line = found(every[name])
        try:
            if device.type == "cuda":
                torch.cuda.synchronize()  # raises where a kernel has failed: then every later call does
        except RuntimeError as error:
            line, usable = f"wrong: {line}; {error}".partition("\n")[0], False
        connection.send((f"{line} ({perf_counter() - start:.0f} s)", usable))


def found(check: Check) -> str:
    try:
        return check()
    except Exception as error:  # noqa: BLE001, printed; the others go on: an hour with a device is short
        traceback.print_exc()
        return f"wrong: {type(error).__name__}: {error}".partition("\n")[0]
