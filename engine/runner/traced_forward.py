"""Records a model's forward as a list of operators, and replays it without the modules' Python code.

Recording runs the forward once over a small batch (torch.jit's tracer) with all of a step's tensors as inputs: sizes
stay symbolic, so one recording serves every batch. Code that depends on the batch without being a tensor operation is
refused: the tracer warns of it, and `_Recorded` has no lists of the batch that a recording could capture. Then the
replay is compared with the modules, bit for bit, over batches of other shapes. A model that cannot be recorded runs by
its modules, a few milliseconds slower, and the log says so.
"""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.jit import TracerWarning, _get_trace_graph, optimized_execution  # type: ignore[attr-defined]

from engine.attention.forward_context import BASE, Batch, Rows, Step
from engine.kernels import REFERENCE
from engine.kv.kv_cache import KvCache
from engine.kv.kv_cache_spec import smallest_reach
from engine.runner.failures import reason
from engine.runner.graph_fusion import CPU, CUDA, fuse, place_together
from engine.runner.model_runner import ModelRunner, RecordedForward

log = logging.getLogger(__name__)

BLOCK_SIZE = 4
# On CUDA, in standard deviations of the logits: above the effect of roundings, below that of a missing operation (1 and
# more).
GAPS = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.5}
# Of a batch of a mixture in 16 bits. With another rounding of every 20th norm and activation, 3 to 11 of 100 rows of
# tiny mixtures were beyond GAPS.
TRIES = 4
PAGES_GAP = 0.1  # on CUDA, of the root mean square of what a chunk without logits writes
CHECKS = str(Path(torch.nn.__file__).parent)  # argument checks of torch's own layers, which examine only sizes
Replay = Callable[..., torch.Tensor]


class _Pages:
    """The pages as inputs of the recording, whose size may differ in the next step."""

    def __init__(self, views: Sequence[torch.Tensor], calls: int, block_size: int) -> None:
        self.block_size = block_size
        self.k, self.v = views[: 2 * calls : 2], views[1 : 2 * calls : 2]
        unscaled = [None] * calls
        self.k_scales = views[2 * calls :: 2] or unscaled  # the scales follow all K and V
        self.v_scales = views[2 * calls + 1 :: 2] or unscaled


class _Recorded:
    """A Step that has only tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor], step: Step, block_size: int, adapters: int) -> None:
        """In the order of `inputs(step)`; `adapters` of them are those of engine.runner.lora."""
        facts = step.facts
        self.compiled, self.cuda_kernel = step.compiled, step.cuda_kernel
        self.input_ids, self.position_ids, self.slot_block, self.slot_offset = tensors[:4]
        self.cu_seq_q, self.seqused_k, self.block_table = tensors[4:7]
        self.lora = Rows(tuple(tensors[7 : 7 + adapters])) if adapters else None
        after = iter(tensors[7 + adapters :])
        self.plans = {key: ((next(after), next(after)), (next(after), next(after))) for key in _tiles(step)}
        self.pages = _Pages(list(after), len(facts), block_size)
        self.facts = facts
        self.calls = 0

    def next_call(self) -> int:
        self.calls += 1
        return self.calls - 1


class Unrecordable(Exception):
    """Why."""


def inputs(step: Step) -> tuple[torch.Tensor, ...]:
    """The tensors of a `_Recorded`."""
    calls = range(len(step.facts))
    pages = [view for call in calls for view in (step.pages.k[call], step.pages.v[call])]
    scales = [view for call in calls for view in (step.pages.k_scales[call], step.pages.v_scales[call])]
    pages += [view for view in scales if view is not None]
    own = (step.input_ids, step.position_ids, step.slot_block, step.slot_offset)
    adapters = step.lora.tensors if step.lora is not None else ()
    tiles = [tensor for both in _tiles(step).values() for pair in both for tensor in pair]
    return (*own, step.cu_seq_q, step.seqused_k, step.block_table, *adapters, *tiles, *pages)


def _tiles(step: Step) -> dict[Any, Any]:
    """Of attention on CUDA, by their key in a step's plans."""
    kernel = step.cuda_kernel if not step.compiled else None
    return {} if kernel is None else kernel.tiles(step, step.facts)


def install(model: ModelRunner) -> str:
    """Replaces the modules' Python in `model.forward` where that can be proven right; returns a line that says so."""
    if model.kernels == REFERENCE and (why := model.unrecordable_on_cuda()) is not None:
        return f"by modules{why and f', because {why}'}"
    if model.mixers is not None or model.indexers is not None:
        what = "recurrent layers" if model.mixers is not None else "sparse indexers"
        return f"by modules, because {what} take the sequences of a step apart"
    try:
        model.recorded = record(model)
    except Unrecordable as error:
        return f"by modules, because it cannot be recorded: {error}"
    return "recorded"


def record(model: ModelRunner) -> RecordedForward:
    """Records and proves. Raises Unrecordable.

    Only the graph, which the function owns: torch.jit.trace would keep it, weights included, until the process ends.
    """
    for parameter in model.module.parameters():
        parameter.requires_grad_(False)  # nothing here learns, and the tracer takes no constant that could

    def forward(wanted: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        step: Any = _Recorded(tensors, first, BLOCK_SIZE, adapters)
        return model.by_modules(step, wanted)

    batches = _batches(model)
    pages = model.allocate(max(sum(map(len, batch.block_tables)) for batch in batches), BLOCK_SIZE)
    first = model.step(pages, batches[0])
    adapters = len(first.lora.tensors) if first.lora is not None else 0
    with warnings.catch_warnings(record=True) as warned, torch.inference_mode(), model.exact():
        warnings.simplefilter("always")
        wanted = first.tensor(batches[0].logits_at)
        try:
            graph, _ = _get_trace_graph(forward, (wanted, *inputs(first)))  # type: ignore[no-untyped-call]
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise Unrecordable(reason(error)) from error
    for each in warned:
        if issubclass(each.category, TracerWarning) and CHECKS not in each.filename:
            where = f"{Path(each.filename).name}:{each.lineno}"
            raise Unrecordable(f"{where}: {str(each.message).partition('. ')[0]}")
    shorter = graph.copy()
    fuse(shorter, CPU if model.kernels != REFERENCE else CUDA)
    place_together(shorter)
    for chosen, what in ((shorter, "fused"), (graph, "plain")):
        candidate: Replay = torch._C._create_function_from_graph("step", chosen)
        try:
            forward_again = partial(run, candidate)
            differs = _differs(forward_again, model, pages, batches[1:])
        except RuntimeError as error:
            differs = reason(error)
        if differs is None:
            return forward_again
        log.warning("the %s recording cannot be used: %s", what, differs)
    raise Unrecordable(f"the recording differs for {differs}")


def _differs(recorded: RecordedForward, model: ModelRunner, pages: KvCache, batches: list[Batch]) -> str | None:
    """The batch for which the replay differs from the modules; None if there is none."""
    for batch in batches:
        if not _agrees(recorded, model, pages, batch):
            return f"{batch.query_lens} new tokens"
    return None


def _agrees(recorded: RecordedForward, model: ModelRunner, pages: KvCache, batch: Batch) -> bool:
    """Whether each row does, with the batch's tokens or, where a rounding may choose other experts, with others."""
    tries = TRIES if model.dtype != torch.float32 and model.is_mixture and model.kernels == REFERENCE else 1
    agreed: torch.Tensor | None = None  # each row, once
    for number in range(tries):
        rng = random.Random(number)
        tokens = [rng.randrange(model.vocab_size) for _ in batch.token_ids] if number else batch.token_ids
        step = model.step(pages, replace(batch, token_ids=tokens))
        wanted = step.tensor(batch.logits_at)
        pages.buffer.zero_()
        with torch.inference_mode(), model.exact():
            expected = model.by_modules(step, wanted)
        written, kept = pages.buffer.clone(), [view.clone() for view in _views(pages)]
        pages.buffer.zero_()
        with torch.inference_mode(), model.exact():
            logits = recorded(step, wanted)
        if model.kernels != REFERENCE:
            return torch.equal(logits, expected) and torch.equal(pages.buffer, written)
        if batch.logits_at:
            gap = (logits.float() - expected.float()).abs().amax(-1) / expected.float().std(-1)
            close = gap <= GAPS[model.dtype]  # false for NaN
        else:
            close = torch.tensor([_close(view, before) for view, before in zip(_views(pages), kept, strict=True)])
        agreed = close if agreed is None else agreed | close
        if agreed.all():
            return True
    return False


def _views(pages: KvCache) -> list[torch.Tensor]:
    """K, V and scales of all calls."""
    every = (*pages.k, *pages.v, *pages.k_scales, *pages.v_scales)
    return [view for view in every if view is not None]


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    apart = found.float() - expected.float()
    return bool(apart.norm() <= PAGES_GAP * expected.float().norm())  # false for NaN


def run(replay: Replay, step: Step, wanted: torch.Tensor) -> torch.Tensor:
    """Logits [len(wanted), vocab]; writes the pages. The caller is in inference mode and has made torch exact."""
    with optimized_execution(False):
        return replay(wanted, *inputs(step))


def _batches(model: ModelRunner) -> list[Batch]:
    """The one to record, which is none of the shapes that code likes to treat apart, and others to compare."""
    longest = model.max_model_len
    reach = smallest_reach(model.facts)
    beyond = min(longest, 40 if reach is None else min(reach, 256) + 9)
    shapes: list[list[tuple[int, int]]] = [  # (done, new) for each sequence
        [(7, 3), (0, 5), (2, 2)],
        [(9, 1)],
        [(0, 1)],
        [(5, 1), (13, 1), (0, 1), (beyond - 1, 1)],
        [(0, beyond)],
        [(beyond // 2, beyond - beyond // 2), (3, 1), (0, 19)],
        [(0, 3)],  # a chunk in the middle of a prompt, without logits
    ]
    if model.cuda_products:  # steps of up to 16, up to 64 and more rows have kernels of their own, compiled here
        shapes[-1:-1] = [[(0, 40)], [(0, 100)]]
    rng = random.Random(0)
    batches: list[Batch] = []
    for number, shape in enumerate(shapes, 1):
        shape = [(min(done, longest - min(new, longest)), min(new, longest)) for done, new in shape]
        batch, used = Batch(adapters=_slots(model, len(batches), len(shape))), 0
        for done, new in shape:
            table = list(range(used, used - (-(done + new) // BLOCK_SIZE)))
            tokens = [rng.randrange(model.vocab_size) for _ in range(new)]
            batch.add(tokens, done, table, [] if number == len(shapes) else [new - 1])
            used += len(table)
        batches.append(batch)
    return batches


def _slots(model: ModelRunner, number: int, sequences: int) -> list[int]:
    """Adapters in turn with the base, other ones in every batch; none if the model has none."""
    if model.lora is None:
        return []
    each = [*range(len(model.lora.slots)), BASE]
    return [each[(number + sequence) % len(each)] for sequence in range(sequences)]
