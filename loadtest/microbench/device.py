"""A GPU's decode steps and prefill, for a model with random weights, as shares of the floors of the same GPU.

    floor of a decode step   (weights that are read + KV of the batch) / bandwidth of a copy
    floor of a prefill       2 x parameters of the layers x tokens / rate of a matrix product

The weights are created on the device; the shapes are those of `random_checkpoints`. Takes some minutes.
`--device cpu` runs the same on a tiny model to test the command; its numbers mean nothing.
"""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
import typer
from torch.profiler import ProfilerActivity, profile

from engine.attention.forward_context import Batch
from engine.core.engine_config import EngineConfig
from engine.core.sequence import Sequence
from engine.engine import Engine
from engine.gpu import layers
from engine.kernels import REFERENCE, modules, serving, sum_order
from engine.kv.kv_cache import KvCache
from engine.loading import attention_probe, self_check
from engine.runner import captured_steps, traced_forward
from engine.runner.block_reader import block_reader
from engine.runner.model_runner import ModelRunner, RunnerConfig
from kvtransfer.types import digests
from loadtest.harness.options import names
from loadtest.harness.random_checkpoints import REAL, SHAPES, make_module
from loadtest.microbench.mixture import WHOLE
from loadtest.microbench.recurrence import REST, model_of

Say = Callable[[str], None]
NO_CUDA = "error: `loadtest device` measures a GPU, and torch finds no CUDA device here"
WARM_UP = 3
CAPTURED = 10  # calls that are timed together


@dataclass(frozen=True)
class Plan:
    """`batches` of sequences with `context` tokens decode, `prompt` tokens are prefilled; medians of `repeats`."""

    shape: str = "Qwen3-8B"
    batches: tuple[int, ...] = (1, 16, 64)
    context: int = 1024
    prompt: int = 8192
    block_size: int = 16
    copied: int = 4 * 2**30  # bytes
    gemm: int = 8192  # rows, columns and inner
    blocks: int = 512  # whose digests are taken
    repeats: int = 15
    kernels: int = 0  # to list of each kind of step

    @property
    def steps(self) -> int:
        """Whole ones of the engine."""
        return self.repeats * 4

    @property
    def longest(self) -> int:
        """Tokens of a sequence after them."""
        return self.context + WARM_UP + self.steps + 2


TINY = Plan("tiny-llama", (1, 2, 3), context=40, prompt=64, copied=2**22, gemm=128, blocks=4, repeats=3)


@dataclass(frozen=True)
class Floors:
    """Arithmetic alone. `weights` are bytes that each decode step reads: all, but for an embedding that is only looked
    up. `layers` are parameters that each token of a prompt is multiplied with. `kv` is bytes of a token's K and V."""

    weights: int
    layers: int
    kv: int

    @classmethod
    def of(cls, module: Any, kv: int) -> Floors:
        looked_up, head = module.get_input_embeddings().weight, module.get_output_embeddings().weight
        parameters = list(module.parameters())
        tied = looked_up is head
        return cls(
            weights=sum(each.nbytes for each in parameters) - (0 if tied else looked_up.nbytes),
            layers=sum(each.numel() for each in parameters) - (1 if tied else 2) * head.numel(),
            kv=kv,
        )

    def decode_s(self, batch: int, context: int, bandwidth: float) -> float:
        """`bandwidth` in bytes per second."""
        return (self.weights + batch * context * self.kv) / bandwidth

    def prefill_s(self, tokens: int, rate: float) -> float:
        """`rate` in operations per second."""
        return 2 * self.layers * tokens / rate


def run(plan: Plan, device: torch.device, say: Say) -> None:
    """Measures and prints a line for each result."""
    dtype = torch.bfloat16
    bandwidth, rate = _bandwidth(plan, device), _gemm_rate(plan, dtype, device)
    say(f"{'copy on the device':<34} {bandwidth / 1e9:9.1f} GB/s, read and written")
    say(f"{f'product {plan.gemm} x {plan.gemm} x {plan.gemm}':<34} {rate / 1e12:9.2f} TFLOP/s")
    model = load(plan, dtype, device, say)
    floors = Floors.of(model.module, model.block_bytes(plan.block_size) // plan.block_size)
    say(
        f"{plan.shape}: {model.parameters / 1e9:.2f} x 10^9 parameters; a step reads {floors.weights / 1e9:.2f} GB of"
        f" weights and {floors.kv} bytes of KV a token"
    )
    if model.cuda_products:
        _products(model.module, plan, device, say)
    _prefill(model, plan, floors, rate, say)
    _digest(model, plan, say)
    _decode(model, plan, floors, bandwidth, say)
    _engine(model, plan, say)


def load(plan: Plan, dtype: torch.dtype, device: torch.device, say: Say) -> ModelRunner:
    """A ModelRunner as `load_model` returns it, self-check included, without a checkpoint."""
    start = perf_counter()
    module = make_module(plan.shape, dtype, device)
    served = RunnerConfig(
        max_model_len=max(plan.prompt, plan.longest),
        fingerprint="random",
        dtype=dtype,
        device=device,
        block_size=plan.block_size,
        kernels=serving(device),
        sum_order=sum_order(device, dtype),
    )
    model = ModelRunner(module, attention_probe.learn_facts(module).calls, served)
    if model.kernels != REFERENCE:
        modules.prepare(module)
    say(f"attention: {model.choose_attention()}")
    say(f"products: {model.choose_products()}")
    say(f"self-check: {self_check.check(model)}")
    say(f"step: {traced_forward.install(model)}; loaded in {perf_counter() - start:.0f} s")
    return model


def _seconds(work: Callable[[], object], plan: Plan, device: torch.device) -> float:
    """The median; the device has nothing to do before and after each."""
    samples = []
    for _ in range(WARM_UP + plan.repeats):
        _wait(device)
        start = perf_counter()
        work()
        _wait(device)
        samples.append(perf_counter() - start)
    return median(samples[WARM_UP:])


def _queued_seconds(work: Callable[[], torch.Tensor], plan: Plan, device: torch.device) -> float:
    """As `_seconds`, without the host: on CUDA the calls are captured together. What they read may stay in the
    cache."""
    if device.type != "cuda":
        return _seconds(work, plan, device)
    replay = captured_steps.cuda_graphs()(lambda: [work() for _ in range(CAPTURED)][-1])
    return _seconds(replay, plan, device) / CAPTURED


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _bandwidth(plan: Plan, device: torch.device) -> float:
    source = torch.randint(256, (plan.copied,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * plan.copied / _seconds(lambda: target.copy_(source), plan, device)


def _gemm_rate(plan: Plan, dtype: torch.dtype, device: torch.device) -> float:
    a, b = (torch.randn(plan.gemm, plan.gemm, dtype=dtype, device=device) for _ in range(2))
    out = torch.empty_like(a)
    with torch.inference_mode():
        return 2 * plan.gemm**3 / _seconds(lambda: torch.mm(a, b, out=out), plan, device)


def _row(what: str, seconds: float, floor: float) -> str:
    return f"{what:<34} {seconds * 1e3:9.3f} ms, {floor / seconds:6.1%} of the floor of {floor * 1e3:.3f} ms"


def _products(module: torch.nn.Module, plan: Plan, device: torch.device, say: Say) -> None:
    """Triton's products beside torch's, for each shape of weight."""
    kinds = {modules.oriented(each).shape: each for each in module.modules() if isinstance(each, layers.Linear)}
    for (n, k), layer in kinds.items():
        weight = modules.oriented(layer)
        for rows in (1, max(plan.batches), plan.prompt):
            x = torch.randn(rows, k, device=device).to(weight.dtype)
            with torch.inference_mode():
                ours = _queued_seconds(partial(layers.multiply, layer, x), plan, device)
                theirs = _queued_seconds(partial(F.linear, x, weight), plan, device)
            what = f"{rows} rows by {n} x {k}"
            say(f"{what:<34} {ours * 1e6:9.1f} µs, torch's {theirs * 1e6:.1f} µs, {ours / theirs:.2f} of it")


def mixtures(plan: Plan, configs: dict[str, dict[str, Any]], device: torch.device, say: Say) -> None:
    """The experts of a layer by Triton beside torch's, and the time that a copy takes for the weights of those who are
    chosen."""
    from engine.gpu.mixture import adoption  # torch for CUDA brings Triton, the one for CPU does not

    bandwidth = _bandwidth(plan, device)
    say(f"{'copy on the device':<34} {bandwidth / 1e9:9.1f} GB/s, read and written")
    for name, config in configs.items():
        model = model_of({**REST, **config, "num_hidden_layers": 1}, torch.bfloat16, device)
        say(f"{name}: {(line := adoption.adopt(model))}")
        if "by torch" in line:
            continue
        module: Any = next(adoption.found_experts(model))
        up = next(each for each in module.parameters() if each.dim() == 3)
        count, each, width = len(up), config["num_experts_per_tok"], config["hidden_size"]
        nbytes = sum(one.nbytes for one in module.parameters()) / count
        for rows in (1, *sorted({*plan.batches, plan.prompt} - {1})):
            x = torch.randn(rows, width, device=device).to(torch.bfloat16)
            chosen = torch.rand(rows, count, device=device).topk(each).indices
            given = (x, chosen, torch.rand(rows, each, device=device).to(x.dtype))
            with torch.inference_mode():
                ours = _seconds(lambda module=module, given=given: adoption.compute(module, *given), plan, device)  # type: ignore[misc]
                theirs = _seconds(lambda module=module, given=given: module(*given), plan, device)  # type: ignore[misc]
            floor = len(chosen.unique()) * nbytes / bandwidth
            beside = f"torch's {theirs * 1e3:.3f} ms, {ours / theirs:.2f} of it"
            say(f"{_row(f'experts, {rows} rows', ours, floor)}; {beside}")


def _noise(pages: KvCache, calls: int) -> None:
    """KV as random as that of a prompt: zeros are faster."""
    for call in range(calls):
        pages.k[call].normal_()
        pages.v[call].normal_()


def _decode(model: ModelRunner, plan: Plan, floors: Floors, bandwidth: float, say: Say) -> None:
    per = -(-(plan.context + 1) // plan.block_size)
    spare = per * max(plan.batches)
    pages = model.allocate(spare + 1, plan.block_size)
    captured: captured_steps.Decode | None = None
    start, held = perf_counter(), list[int]()
    try:
        how = captured_steps.capture_for(model)

        def counted(call: captured_steps.Call) -> captured_steps.Call:
            replay = how(call)
            held.append(_in_graphs(model.device))
            return replay

        captured = captured_steps.Decode(model, pages, spare=spare, max_running=max(plan.batches), capture=counted)
        took = f"in {perf_counter() - start:.1f} s; they hold {held[-1] >> 20} MiB, the largest alone {held[0] >> 20}"
        say(f"decode steps captured for {captured.sizes} sequences {took}")
    except captured_steps.Uncapturable as error:
        say(f"decode steps not captured: {error}")
    _noise(pages, len(model.facts))
    for count in plan.batches:
        batch = Batch(
            token_ids=random.choices(range(model.vocab_size), k=count),
            positions=[plan.context] * count,
            query_lens=[1] * count,
            context_lens=[plan.context + 1] * count,
            block_tables=[list(range(per * row, per * row + per)) for row in range(count)],
            logits_at=list(range(count)),
        )
        floor = floors.decode_s(count, plan.context, bandwidth)
        sides: dict[str, Callable[[Batch], torch.Tensor | None]] = {"plain": lambda batch: model.forward(pages, batch)}
        if captured is not None:
            sides["captured"] = captured.logits
        for name, forward in sides.items():
            work = partial(_greedy_after, forward, batch)
            say(_row(f"decode {count} x {plan.context}, {name}", _seconds(work, plan, model.device), floor))
        if plan.kernels:
            _kernels(work, plan, say)  # of the captured step, or of the plain one if none is


def _in_graphs(device: torch.device) -> int:
    """Bytes that captured graphs keep for their tensors, on CUDA: all private pools of torch's. Not run on a GPU."""
    if device.type != "cuda":
        return 0
    return sum(each["total_size"] for each in torch.cuda.memory_snapshot() if each["segment_pool_id"] != (0, 0))


def _engine(model: ModelRunner, plan: Plan, say: Say) -> None:
    """Whole steps: with scheduling, block tables, and tokens that the host has read."""
    most, steps, longest = max(plan.batches), plan.steps, plan.longest
    budget = max(plan.prompt, most)
    blocks = most * -(-longest // plan.block_size) + 1
    config = EngineConfig(
        num_blocks=blocks, block_size=plan.block_size, token_budget=budget, max_running=most, spare_block=True
    )
    engine = Engine(model, config)
    engine.capture()
    for count in plan.batches:
        for index in range(count):
            prompt = random.choices(range(model.vocab_size), k=plan.context)
            engine.add(Sequence(id=f"{count}-{index}", tokens=prompt, prompt_len=plan.context, max_len=longest))
        while any(sequence.num_uncomputed > 1 for sequence in engine.sequences.values()):
            engine.step()
        for _ in range(WARM_UP):
            engine.step()
        start = perf_counter()
        for _ in range(steps):
            engine.step()
        seconds = (perf_counter() - start) / steps
        say(f"{f'engine {count} x {plan.context}':<34} {seconds * 1e3:9.3f} ms a step, the mean of {steps}")
        for name in list(engine.sequences):
            engine.drop(name)


def _greedy_after(forward: Callable[[Batch], torch.Tensor | None], batch: Batch) -> list[int]:
    logits = forward(batch)
    assert logits is not None, "a step of single tokens was declined"
    tokens: list[int] = logits.argmax(-1).tolist()
    return tokens


def _prefill(model: ModelRunner, plan: Plan, floors: Floors, rate: float, say: Say) -> None:
    blocks = -(-plan.prompt // plan.block_size)
    pages = model.allocate(blocks, plan.block_size)
    ids = random.choices(range(model.vocab_size), k=plan.prompt)
    lens, table = [plan.prompt], [list(range(blocks))]
    batch = Batch(ids, list(range(plan.prompt)), lens, lens, table, logits_at=[plan.prompt - 1])
    work = partial(_greedy_after, partial(model.forward, pages), batch)
    say(_row(f"prefill {plan.prompt}", _seconds(work, plan, model.device), floors.prefill_s(plan.prompt, rate)))
    if plan.kernels:
        _kernels(work, plan, say)


def _kernels(work: Callable[[], object], plan: Plan, say: Say) -> None:
    """The kernels of one call that take most of the device's time."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        work()
        torch.cuda.synchronize()
    taken: dict[str, list[float]] = defaultdict(list)
    for event in profiled.events() or ():
        if str(event.device_type).endswith("CUDA"):
            taken[event.name].append(event.time_range.elapsed_us())
    of_all = sum(map(sum, taken.values()))
    say(f"    {of_all / 1e3:.3f} ms of the device in {sum(map(len, taken.values()))} kernels")
    for name, times in sorted(taken.items(), key=lambda item: -sum(item[1]))[: plan.kernels]:
        say(f"    {sum(times) / of_all:6.1%}  {len(times):4} x {sum(times) / len(times):9.1f} µs  {name[:60]}")


def _digest(model: ModelRunner, plan: Plan, say: Say) -> None:
    """A block's digest as a worker computes it, for many at a time, against its copy to pinned memory."""
    pages, context = model.allocate(plan.blocks, plan.block_size), bytes(16)
    cuda = model.device.type == "cuda"
    host = torch.empty(pages.block_bytes, dtype=torch.uint8, pin_memory=cuda)

    def copy() -> None:
        for block in range(plan.blocks):
            host.copy_(pages.buffer[block], non_blocking=True)

    of, every = digests(block_reader(pages)), [(block, context) for block in range(plan.blocks)]
    moved = _seconds(copy, plan, model.device) / plan.blocks
    taken = _seconds(lambda: of(every), plan, model.device) / plan.blocks
    say(
        f"{f'block of {pages.block_bytes / 2**20:.2f} MiB':<34} {moved * 1e6:9.1f} µs to pinned memory"
        f" ({pages.block_bytes / moved / 1e9:.1f} GB/s), digest ({pages.layout.digest}) {taken * 1e6:.1f} µs:"
        f" {taken / (taken + moved):.1%} of both"
    )


def main(
    shape: Annotated[str, typer.Option(metavar="SHAPE", help=f"Of the model: {', '.join(REAL)}.")] = Plan.shape,
    experts: Annotated[bool, typer.Option("--experts", help="Only the experts of mixtures, beside torch's.")] = False,
    kernels: Annotated[int, typer.Option(min=0, help="List as many kernels of each kind of step.")] = 0,
    device: Annotated[Literal["cuda", "cpu"], typer.Option(hidden=True)] = "cuda",
) -> int:
    names(shape, SHAPES)
    if device == "cuda" and not torch.cuda.is_available():
        print(NO_CUDA, file=sys.stderr)
        return 1
    plan = TINY if device == "cpu" else Plan(shape=shape, kernels=kernels)
    start = perf_counter()
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    print(f"{name}, torch {torch.__version__}", flush=True)
    where, say = torch.device(device), partial(print, flush=True)
    if experts:
        mixtures(plan, WHOLE, where, say)
    else:
        run(plan, where, say)
    print(f"measured in {perf_counter() - start:.0f} s; medians of {plan.repeats}")
    return 0
