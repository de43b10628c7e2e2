"""The self-check at every load: the paged path against plain eager attention, with the model that will serve.

A few random prompts run through pages in chunks, packed together, over scrambled block ids, and end in single-token
steps; each step's last logits are compared with those of an eager forward over the whole prompt. The tokens are given
(teacher-forced), so one early difference does not hide the rest.

    gap = max |paged - eager| / std(eager), per compared position

In float32 every correct family stays below 5e-5 and every wrong one above 2e-1, so 1e-3 decides, for the largest gap.

A model in bfloat16 or float16 whose float32 copy fits into `COPY_LIMIT` bytes is checked on that copy, by the same
rule; its own weights are put back untouched. One rank of several has no memory for such a copy, so each module has
float32 weights only while it runs. A larger model is checked in its own dtype. There the roundings of two correct paths
differ, and in a mixture of experts a rounding may choose another expert at a few positions; so the gap of a prompt is
the median over its positions, and it is held against twice what rounding alone does to this model: the gap between the
eager forward and itself with its input embeddings perturbed by half a unit in the last place. (Tiny models of each
family in bfloat16: correct paths have 0.1 to 0.7 of that noise; ignored windows and lost contexts give gaps above 1.7.)

Quantised weights are compared with torch's products over the weights that the codes represent, in float32. This checks
the path, not the effect of rounding on answers (`python -m loadtest quality`).

Quantised pages are compared with an eager forward over the stored K and V, and these with the forward's own K and V:
the difference beyond one rounding must be below the same threshold (engine/attention/stored_kv.py).

Sparse indexers choose at most CHOSEN tokens during the check, on both paths: with their served number no prompt would
be long enough to exclude a token, and sparse attention would be dense.

The check covers only what its prompts reach. One prompt is longer than the smallest window or chunk if that is
affordable; `Report.window_reached` says whether it was.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from engine import kernels
from engine.attention import stored_kv
from engine.attention.forward_context import Batch
from engine.attention.stored_kv import Stored
from engine.kv.kv_cache import KvCache, dtype_name
from engine.kv.kv_cache_spec import describe, smallest_reach
from engine.runner.model_runner import ModelRunner
from tandem.errors import CheckpointRefused

FP32_THRESHOLD = 1e-3
COPY_LIMIT = 4 << 30  # bytes of a temporary float32 copy of the weights
NOISE_FACTOR, NOISE_FLOOR, NOISE_CEILING = 2.0, 0.05, 0.8  # thresholds in 16 bits
SLICE = 4 << 20  # weights of a product that are in float32 at a time, on one rank of several
BLOCK_SIZE, CHUNK, SINGLE_STEPS = 4, 13, 3  # tokens, tokens, steps
PROMPT_LENGTHS = (5, 21, 1)
LONGEST, LONGEST_WINDOWED = 40, 1536  # tokens of the fourth prompt, without a window and at most with one
CHOSEN = 8  # tokens that a sparse indexer chooses here
WORK_CPU, WORK_DEVICE = 4e10, 4e13  # maximum parameters x tokens to reach a window; about a second


@dataclass(frozen=True)
class Report:
    """The results of the self-check. `gap` and `threshold` are in standard deviations of the logits.

    `kept_gap` is for quantised KV only: the largest error of an element beyond its rounding, relative to the largest
    element of its head.
    """

    gap: float
    threshold: float
    positions: int
    window_reached: bool
    dtype: str  # in which both paths were computed
    kept_gap: float = 0.0

    @property
    def passed(self) -> bool:
        return self.gap <= self.threshold and self.kept_gap <= self.threshold  # false for NaN

    def __str__(self) -> str:
        reach = "" if self.window_reached else ", no prompt longer than the smallest window"
        kept = f", KV {self.kept_gap:.1e} beyond its rounding" if self.kept_gap else ""
        return (
            f"gap {self.gap:.1e} at {self.positions} positions in {self.dtype}{kept}, "
            f"threshold {self.threshold:.1g}{reach}"
        )


def check(model: ModelRunner) -> Report:
    """Compares the paged path with plain eager attention on random prompts; leaves the model on the paged path. Raises
    CheckpointRefused with the gap and the facts if they differ."""
    recorded, model.recorded = model.recorded, None  # it holds the weights that the check may replace
    try:
        report = run(model)
    finally:
        model.recorded = recorded
    if not report.passed:
        equal = (
            ". Its sparse indexers may give several tokens the same score, of which transformers itself chooses others"
            " with a cache than without"
        )
        raise CheckpointRefused(
            f"the self-check of {type(model.module).__name__} failed: paged logits differ from eager ones "
            f"({report}); its attention calls are\n{describe(model.facts)}"
            f"{equal if model.indexers else ''}"
        )
    return report


def run(model: ModelRunner, adapters: Sequence[int] = ()) -> Report:
    """Measures the gap and leaves the model switched to the paged path. `adapters` has a slot for each of the four
    prompts (engine.runner.lora)."""
    wide: AbstractContextManager[None] = nullcontext()
    if not _exact(model) and 4 * model.parameters <= COPY_LIMIT:
        wide = _float32_copy(model) if model.group is None else _float32_in_turn(model)
    with model.indexers.choosing(CHOSEN) if model.indexers else nullcontext(), wide:
        return _run(model, adapters)


def _run(model: ModelRunner, adapters: Sequence[int]) -> Report:
    prompts = _prompts(model)
    ends = [_compared(len(prompt)) for prompt in prompts]
    model.use_paged_attention()
    pages, tables = scrambled_pages(model, [len(prompt) for prompt in prompts], BLOCK_SIZE)
    paged = _paged(model, prompts, ends, pages, tables, adapters)
    kept: list[Stored | None] = [
        Stored(pages, len(model.facts), table, len(prompt)) if pages.quantised else None
        for table, prompt in zip(tables, prompts, strict=True)
    ]
    model.use_eager_attention(stored_kv.NAME if pages.quantised else "eager")
    eager = _all_eager(model, prompts, ends, kept, adapters)
    kept_gap = _kept_gap(model, [each for each in kept if each is not None])
    threshold = FP32_THRESHOLD
    if not _exact(model):
        with perturbed(model.module, model.dtype):
            noisy = _all_eager(model, prompts, ends, kept, adapters)
        threshold = min(max(NOISE_FACTOR * _gap(model, noisy, eager), NOISE_FLOOR), NOISE_CEILING)
    model.use_paged_attention()
    smallest = smallest_reach(model.facts)
    return Report(
        gap=_gap(model, paged, eager),
        threshold=threshold,
        positions=sum(map(len, ends)),
        window_reached=smallest is None or max(map(len, prompts)) > smallest,
        dtype=dtype_name(model.dtype),
        kept_gap=kept_gap,
    )


def _exact(model: ModelRunner) -> bool:
    return model.dtype in (torch.float32, torch.float64)


def _prompts(model: ModelRunner) -> list[list[int]]:
    rng = random.Random(0)
    smallest, longest = smallest_reach(model.facts), LONGEST
    if smallest is not None:
        work = WORK_CPU if model.device.type == "cpu" else WORK_DEVICE
        beyond = smallest + min(smallest, 64) + 5
        if beyond <= min(LONGEST_WINDOWED, work / model.parameters):
            longest = max(longest, beyond)
    lengths = [min(length, model.max_model_len) for length in (*PROMPT_LENGTHS, longest)]
    return [[rng.randrange(model.vocab_size) for _ in range(length)] for length in lengths]


def _compared(length: int) -> list[int]:
    """The number of a prompt's tokens at each comparison: the ends of its steps."""
    body = max(length - SINGLE_STEPS, 1)
    return [*range(CHUNK - 1, body, CHUNK - 1), *range(body, length + 1)]


def _all_eager(
    model: ModelRunner,
    prompts: list[list[int]],
    ends: list[list[int]],
    kept: list[Stored | None],
    adapters: Sequence[int],
) -> list[torch.Tensor]:
    logits = []
    for index, each in enumerate(zip(prompts, ends, kept, strict=True)):
        with model.lora.eagerly(adapters[index]) if model.lora and adapters else nullcontext():
            logits.append(_eager(model, *each))
    return logits


def _eager(model: ModelRunner, prompt: list[int], ends: list[int], kept: Stored | None) -> torch.Tensor:
    """Logits after each of `ends`, `[len(ends), vocab]`, by a plain forward over the whole prompt."""
    ids = torch.tensor([prompt], device=model.device)
    with torch.inference_mode(), stored_kv.running(model.module, kept) if kept else nullcontext():
        positions = torch.arange(len(prompt), device=model.device).unsqueeze(0)
        logits: torch.Tensor = model.module(input_ids=ids, position_ids=positions, use_cache=False).logits
    return logits[0, [end - 1 for end in ends]].float()


def _paged(
    model: ModelRunner,
    prompts: list[list[int]],
    ends: list[list[int]],
    pages: KvCache,
    tables: list[list[int]],
    adapters: Sequence[int],
) -> list[torch.Tensor]:
    """The same logits from pages. Every step takes the next tokens of each unfinished prompt."""
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    for step in range(max(map(len, ends))):
        active = [index for index, at in enumerate(ends) if step < len(at)]
        spans = [(ends[index][step - 1] if step else 0, ends[index][step]) for index in active]
        batch = pack(
            [(prompts[index][:end], start, tables[index]) for index, (start, end) in zip(active, spans, strict=True)]
        )
        batch.adapters = [adapters[index] for index in active] if adapters else []
        batch.slots = [len(prompts) - index for index in active]  # no slot equals the sequence's place in the batch
        for index, row in zip(active, model.forward(pages, batch), strict=True):
            logits[index].append(row)
        if pages.states is not None:
            pages.states.commit()
    return [torch.stack(rows) for rows in logits]


def scrambled_pages(model: ModelRunner, lengths: list[int], block_size: int) -> tuple[KvCache, list[list[int]]]:
    """Pages with room for sequences of these lengths, and their block tables over shuffled block ids."""
    counts = [-(-length // block_size) for length in lengths]
    ids = list(range(sum(counts) + 3))
    random.Random(1).shuffle(ids)
    tables = [[ids.pop() for _ in range(count)] for count in counts]
    return model.allocate(sum(counts) + 3, block_size, slots=len(lengths) + 1), tables


def pack(sequences: list[tuple[list[int], int, list[int]]]) -> Batch:
    """A batch of (tokens so far, number of computed ones, block table), with the logits of each last token."""
    batch = Batch()
    for tokens, done, table in sequences:
        batch.add(tokens[done:], done, table, [len(tokens) - done - 1])
    return batch


def _gap(model: ModelRunner, ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest gap in float32; in 16 bits the largest of the prompts' medians (see the module's docstring)."""
    return _worst(model, [(a - b).abs().amax(dim=-1) / b.std(dim=-1) for a, b in zip(ours, theirs, strict=True)])


def _kept_gap(model: ModelRunner, kept: list[Stored]) -> float:
    """The gap of K and V beyond their rounding, over the tokens of each call; 0 without quantisation."""
    return _worst(model, [share for each in kept for share in each.beyond])


def _worst(model: ModelRunner, gaps: list[torch.Tensor]) -> float:
    if not gaps:
        return 0.0
    return torch.stack([each.max() if _exact(model) else each.median() for each in gaps]).max().item()  # NaN stays


@contextmanager
def perturbed(module: Any, dtype: torch.dtype) -> Iterator[None]:
    """Multiplies the input embeddings by 1 ± half a unit in the last place of `dtype`, at random."""
    generator = torch.Generator(device="cpu").manual_seed(2)
    half_unit = torch.finfo(dtype).eps / 2

    def perturb(_module: Any, _inputs: Any, embedded: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, embedded.shape, generator=generator).to(embedded.device) * 2 - 1
        return (embedded.float() * (1 + half_unit * signs)).to(embedded.dtype)

    handle = module.get_input_embeddings().register_forward_hook(perturb)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _float32_copy(model: ModelRunner) -> Iterator[None]:
    """Computes in float32 inside; afterwards every parameter and buffer has its own storage again, bit for bit."""
    parameters = [each for each in model.module.parameters() if each.dtype == model.dtype]
    own, dtype = [each.data for each in parameters], model.dtype
    try:
        for each in parameters:
            data = each.data
            each.data = (
                kernels.nothing(data.shape, torch.float32, data.device) if kernels.is_nothing(data) else data.float()
            )
        with _float32_buffers(model.module, dtype):
            model.dtype = torch.float32
            yield
    finally:
        model.dtype = dtype
        for each, data in zip(parameters, own, strict=True):
            each.data = data


@contextmanager
def _float32_buffers(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Other tensors in the buffers' places, since some models (CTRL) put a tensor of inference mode into one, whose
    data cannot be exchanged."""
    own = [(each, dict(each._buffers)) for each in module.modules()]
    try:
        for each, buffers in own:
            each._buffers.update({n: b.float() for n, b in buffers.items() if b is not None and b.dtype == dtype})
        yield
    finally:
        for each, buffers in own:
            each._buffers.update(buffers)


@contextmanager
def _float32_in_turn(model: ModelRunner) -> Iterator[None]:
    """As `_float32_copy`, but with one module's weights in float32 at a time, converted whenever it runs: for a
    product, which may be as large as the vocabulary, one slice at a time; for an embedding, the rows that it looks
    up."""
    dtype = model.dtype
    forwards: dict[nn.Module, Any] = {}  # methods of a module may call its forward as a function, which runs no hooks
    handles = []
    for module in model.module.modules():
        if isinstance(module, nn.Embedding):
            handles.append(module.register_forward_hook(lambda *call: call[-1].float(), prepend=True))
        elif type(module) is nn.Linear:
            forwards[module] = partial(_by_slices, module)
        elif module._parameters and "forward" not in module.__dict__:
            forwards[module] = partial(_widened, module, dtype)
    try:
        for module, forward in forwards.items():
            module.__dict__["forward"] = forward
        with _float32_buffers(model.module, dtype):
            model.dtype = torch.float32
            yield
    finally:
        model.dtype = dtype
        for module in forwards:
            module.__dict__.pop("forward", None)
        for handle in handles:
            handle.remove()


def _widened(module: nn.Module, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module with its weights of `dtype` in float32."""
    narrow = dict(module._parameters)
    for name, each in narrow.items():
        if each is not None and each.dtype == dtype and not kernels.is_nothing(each):
            module._parameters[name] = nn.Parameter(each.float(), requires_grad=False)
    try:
        return type(module).forward(module, *args, **kwargs)
    finally:
        module._parameters.update(narrow)


def _by_slices(product: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    bias = None if product.bias is None else product.bias.float()
    rows = max(1, SLICE // product.in_features)
    out = torch.cat([F.linear(x, part.float()) for part in torch.split(product.weight, rows)], -1)
    return out if bias is None else out + bias
