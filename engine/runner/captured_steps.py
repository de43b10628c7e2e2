"""Decode steps of fixed shapes: captured before the first request, replayed with new contents.

On CUDA a capture is a CUDA graph. On CPU it is the list of a step's operators with their tensors
(engine/kernels/capture.cpp), without the interpreter, the dispatcher and the allocations between them.

A step in which each sequence adds one token uses the smallest bucket with a row for each. The other rows are padding:
each writes to and reads from one place of the spare block, which is in no table, and its logits are dropped. Two
sequences in a bucket of four, s the spare block:

    token_ids  b6 c9  0  0      slot_block   7 12  s  s      cu_seq_q   0 1 2 3 4
    positions   6  9  0  0      slot_offset  2  1  0  0      seqused_k  7 10 1 1      block_table  7    s s ...
                                                                                                   5 12 s s ...
    every other step (a prompt's chunk, drafts) takes the model's forward as ever              s  s s s ...

Where there are recurrent layers, two more lists have the rows of the states that a sequence reads and writes
(engine/kv/state_memory.py). Only operators may touch these states, on CPU and on CUDA. A padding row begins with zeros
and ends in a row that belongs to no sequence.

The tensors of a bucket stay in place. A step fills one buffer (on CUDA pinned memory, copied to the device in one
transfer) and replays. A captured step is compared with the same step uncaptured before it serves
(engine/runner/capture_check.py).

The ranks of one worker capture together, each its own operators, and each replays them: sums over ranks are operators
like others. They serve a bucket only if all of them found it right.

Everything around `cuda_graphs` is tested on any device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.attention.forward_context import Batch, Step
from engine.kernels import REFERENCE
from engine.runner.capture_check import difference
from engine.runner.failures import reason

if TYPE_CHECKING:
    from engine.kv.kv_cache import KvCache
    from engine.runner.model_runner import ModelRunner

Call = Callable[[], torch.Tensor]
Capture = Callable[[Call], Call]  # returns a function that repeats the given one

LARGEST = {"cuda": 512, "cpu": 32}  # rows: their logits are kept, a row of them is as long as the vocabulary
CPU_BYTES = 4 << 30  # read by a step: 0.25 s at 17 GB/s, and a capture saves 2 to 4 ms but costs five steps a bucket
LONGS = 6  # lists of a bucket: ids, positions, blocks and offsets of their KV, and which states they read and write
WARM_UP = 2  # calls before a capture: libraries allocate at the first ones


class Uncapturable(Exception):
    """Why."""


def capture_for(model: ModelRunner) -> Capture:
    """How steps of this model are captured on its device. Raises Uncapturable."""
    if model.indexers is not None:
        raise Uncapturable("sparse indexers take the sequences of a step apart")
    if model.mixers is not None and not model.mixers.by_operators:
        raise Uncapturable("recurrent layers without operators take the sequences of a step apart")
    if model.device.type == "cuda":
        return cuda_graphs() if model.recorded is not None else by_modules(cuda_graphs())
    if model.kernels == REFERENCE:
        raise Uncapturable("the compiled operators do not serve")
    if model.recorded is None and model.mixers is None:  # transformers' Python, which may look at a step's values
        raise Uncapturable("the forward is not recorded")
    if model.step_bytes > CPU_BYTES:
        raise Uncapturable(f"a step reads {model.step_bytes >> 20} MiB, and a capture would save little of its time")
    return operators if model.recorded is not None else by_modules(operators)


def by_modules(capture: Capture) -> Capture:
    """As `capture`, of a forward by transformers' modules. What they make in their first step and keep is not part of
    the captured one. A later step is refused if they keep a tensor of it, because each replay would change it, or copy
    between host and device: a replay would read the host's memory again, in which something else is by then."""

    def watched(call: Call) -> Call:
        call()
        with _Watch() as watch:
            out = call()
        kept = watch.alive - {id(out), id(out._base)}  # logits may be a part of a tensor
        if kept:
            raise Uncapturable(f"the forward keeps {len(kept)} tensors of a step, which each replay would change")
        if watch.between:
            raise Uncapturable(f"the forward has tensors of the host and of the device in {watch.between[0]}")
        del out  # the capture takes as much memory
        return capture(call)

    return watched


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type its hooks
    """Notes the tensors that operators make on this thread, and operators over tensors of host and device. (A tensor
    of one number may be on the host: the device gets the number itself.)"""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.between: list[str] = []
        self._made: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        result = func(*args, **(kwargs or {}))
        out = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        known = set(map(id, given))
        self._made += [weakref.ref(each) for each in out if id(each) not in known]
        if len({each.device.type for each in (*given, *out) if each.dim()}) > 1:
            self.between.append(str(func))
        return result

    @property
    def alive(self) -> set[int]:
        """The ids of those that somebody still holds."""
        return {id(each) for made in self._made if (each := made()) is not None}


def operators(call: Call) -> Call:
    """Captures a step on CPU. Its output is its own and is overwritten by its next replay."""
    step = torch.classes.tandem.CapturedStep()
    step.begin()
    try:
        out = call()
        step.end([out])
    finally:
        step.abandon()  # does nothing after `end`

    def replay() -> torch.Tensor:
        step.replay()
        return out

    return replay


def cuda_graphs() -> Capture:
    """Makes CUDA graphs that share their memory, so they may only run one after the other. A graph's output may lie
    where one that was captured earlier computes: the next replay of any of them overwrites it. (Graphs of one stream
    have not run on a device; those of a stream each did, without sharing.)"""
    pool = torch.cuda.graph_pool_handle()
    # One, because torch reuses memory only on the stream for which it was allocated, in a pool of graphs as well.
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(call: Call) -> Call:
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):  # which torch.cuda.graph leaves to later steps where a capture fails
            for _ in range(WARM_UP):
                call()
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                out = call()
        torch.cuda.current_stream().wait_stream(stream)

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay

    return capture


class Decode:
    """The buckets of one engine: 1, 2, 4, ... rows, up to `max_running` and at most LARGEST.

    `capture` records a step; None is `capture_for(model)`. `spare` is the id of the spare block, the last one of
    `pages`. Made before the pages have any content: the first blocks are written to and zeroed again. Raises
    Uncapturable.
    """

    def __init__(
        self, model: ModelRunner, pages: KvCache, *, spare: int, max_running: int, capture: Capture | None
    ) -> None:
        if (why := unfit(model, pages)) is not None:
            raise Uncapturable(why)
        self._model, self._pages = model, pages
        self._block_size, self._spare = pages.block_size, spare
        self._width = -(-model.max_model_len // pages.block_size)
        self._buckets: list[_Bucket] = []
        capture = capture or capture_for(model)
        sizes = buckets(min(max_running, LARGEST[model.device.type]))
        if model.ranks is not None:
            model.ranks.capture(pages, spare, max_running)
        with torch.inference_mode():
            for rows in reversed(sizes):  # the largest first: the others fit into its memory
                try:
                    self._buckets.insert(0, _Bucket(model, pages, rows, self._width, spare, capture))
                    problem = difference(self._buckets[0], model, pages, spare)
                except (RuntimeError, AttributeError) as error:  # a step that asks the device or the batch for numbers
                    if model.group is not None and model.group.broken:
                        raise
                    raise Uncapturable(reason(error)) from error
                finally:
                    if pages.states is not None:
                        pages.states.forget()
                if problem is not None:
                    raise Uncapturable(problem)
        self.sizes = tuple(sizes)

    def logits(self, batch: Batch) -> torch.Tensor | None:
        """Float32 `[sequences, vocab]` after each sequence's token, valid until the next call; writes the pages.

        None where this is not a step of single tokens that fits: then nothing was done.
        """
        rows = len(batch.query_lens)
        fits = rows <= self.sizes[-1] and max(map(len, batch.block_tables)) <= self._width
        if not fits or batch.adapters or len(batch.token_ids) != rows or batch.logits_at != list(range(rows)):
            return None
        if self._pages.states is not None and min(batch.positions) == 0:  # a first token has no state to go on from
            return None
        batch.check(self._block_size, self._spare)  # so no table contains the spare block
        bucket = next(candidate for candidate in self._buckets if candidate.rows >= rows)
        with torch.inference_mode(), self._model.on_all_ranks(self._pages, batch, captured=True):
            bucket.fill(batch.token_ids, batch.positions, batch.block_tables, batch.slots, batch.fed)
            return bucket.replay()[:rows]


def buckets(most: int) -> list[int]:
    """Powers of two below `most`, and `most`."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]


def unfit(model: ModelRunner, pages: KvCache) -> str | None:
    """Why a step of this model takes more than a bucket's tensors; None if it does not."""
    if model.lora is not None:
        return "adapters"
    if model.kernels != REFERENCE and model.dtype in (torch.float32, torch.bfloat16):
        return "latent pages" if model.latent else None
    kernel = model.cuda_kernel
    if kernel is None:
        return "attention by the reference plans each step on the host" if model.facts else None
    reasons = [kernel.refusal(fact, pages.dtype) for fact in model.facts]
    refused = sorted({reason for reason in reasons if reason is not None})
    return f"attention by the reference ({'; '.join(refused)}) plans each step on the host" if refused else None


class _Static(Step):
    """A Step of single tokens whose tensors belong to a bucket."""

    def __init__(self, model: ModelRunner, pages: KvCache, rows: int, spare: int) -> None:
        ones, zeros = [1] * rows, [0] * rows
        padding = Batch(zeros, zeros, ones, ones, [[spare]] * rows, logits_at=[], slots=list(range(rows)))
        compiled = model.kernels != REFERENCE
        super().__init__(padding, pages, model.facts, model.device, compiled=compiled, cuda_kernel=model.cuda_kernel)
        del self.batch, self.cu_seq_q_host  # use of this batch's lists must fail: the next batch has others

    def begin(self) -> None:
        """Before each forward."""
        self.calls = 0
        self.plans.clear()


class _Bucket:
    def __init__(self, model: ModelRunner, pages: KvCache, rows: int, width: int, spare: int, capture: Capture) -> None:
        self.rows, self._spare, self._size = rows, spare, pages.block_size
        cuda = model.device.type == "cuda"
        longs, ints = LONGS * rows, rows * (1 + width)
        self._host = torch.zeros(8 * longs + 4 * ints, dtype=torch.uint8, pin_memory=cuda)
        self._device = torch.zeros(self._host.shape, dtype=torch.uint8, device=model.device)
        self._copied: Any = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]  # see `fill`
        lists, used, table = _views(self._host, rows, width)
        self._lists, self._used, self._table = lists.numpy(), used.numpy(), table.numpy()
        self._tables: list[list[int]] = [[] for _ in range(rows)]  # what `_table` holds; beyond it the spare block
        self._table.fill(spare)

        self._step = _Static(model, pages, rows, spare)
        lists, self._step.seqused_k, self._step.block_table = _views(self._device, rows, width)
        self._step.input_ids, self._step.position_ids = lists[0:1], lists[1:2]
        self._step.slot_block, self._step.slot_offset = lists[2], lists[3]
        if pages.states is not None:
            self._step.state_rows = lists[4:]
        self._wanted = torch.arange(rows, device=model.device)
        self._model, self._pages = model, pages
        self.fill()
        self.replay = capture(self.call)

    def fill(
        self,
        token_ids: Sequence[int] = (),
        positions: Sequence[int] = (),
        tables: Sequence[list[int]] = (),
        slots: Sequence[int] = (),
        fed: torch.Tensor | None = None,
    ) -> None:
        """Puts one token of each sequence where the recorded step reads it; all other rows are padding. The next step
        writes the states of these slots, which must have some."""
        if self._copied is not None:
            self._copied.synchronize()  # until then the buffer belongs to the last copy
        count, size = len(tables), self._size
        self._lists[:2, count:] = 0
        self._lists[2, count:], self._lists[3, count:] = self._spare, 0
        self._used[count:] = 1
        if count:
            self._lists[0, :count], self._lists[1, :count] = token_ids, positions
            self._lists[2, :count] = [table[p // size] for table, p in zip(tables, positions, strict=True)]
            self._lists[3, :count] = self._lists[1, :count] % size
            self._used[:count] = self._lists[1, :count] + 1
        for row in range(self.rows):
            new, old = tables[row] if row < count else [], self._tables[row]
            if new != old:  # a table grows by a block now and then
                self._table[row, : len(new)] = new
                self._table[row, len(new) : len(old)] = self._spare
                self._tables[row] = list(new)  # a copy: the pool's own list grows
        if self._pages.states is not None:
            self._lists[4:] = self._pages.states.step_rows(slots, self.rows - count)
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        if fed is not None:
            self._step.input_ids[0, :count] = fed

    def call(self) -> torch.Tensor:
        """The step itself, over what `fill` has put there: float32 logits of all rows."""
        self._step.begin()
        logits = self._model.run(self._step, self._wanted).float()
        self._step.plans.clear()  # tensors of this step, which each replay makes again
        return logits


def _views(buffer: torch.Tensor, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Parts of a bucket's bytes: int64 `[LONGS, rows]`, int32 `[rows]` and int32 `[rows, width]`."""
    end = 8 * LONGS * rows
    longs, ints = buffer[:end].view(torch.int64), buffer[end:].view(torch.int32)
    return longs.view(LONGS, rows), ints[:rows], ints[rows:].view(rows, width)
