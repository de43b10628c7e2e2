"""The inputs of one forward: `Batch`, plain lists that the engine fills, and `Step`, the tensors made from them.

A packed forward concatenates the new tokens of several sequences. With two sequences, one of which adds three tokens to
two computed ones, and one that adds its seventh:

    token_ids   a2 a3 a4 b6         query_lens    3  1        cu_seq_q    0 3 4
    positions    2  3  4  6         context_lens  5  7        seqused_k   5 7
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any, NamedTuple, Protocol

import torch

from engine.kv.kv_cache import KvCache
from engine.kv.kv_cache_spec import CallFacts

BASE = -1  # the slot of a sequence without an adapter


Scales = tuple[torch.Tensor | None, torch.Tensor | None]  # of K and V, [blocks, block_size, kv_heads] each


class CudaKernel(Protocol):
    """Attends over pages on CUDA (engine/gpu/attention/paged_attention.py)."""

    @property
    def name(self) -> str: ...

    @property
    def split_keys(self) -> int:
        """Keys of a sequence that are summed at a time; the sums of several parts are merged."""

    @property
    def absorbed(self) -> Any:
        """What a product makes of latents, if the model has pages of them: engine.attention.mla.Expanded, or None."""

    def refusal(self, facts: CallFacts, dtype: torch.dtype) -> str | None:
        """Why it cannot serve this attention call over pages of `dtype`; None if it can."""

    def attend(
        self,
        query: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        scales: Scales,
        step: Step,
        facts: CallFacts,
        sinks: torch.Tensor | None,
        weight: torch.Tensor | None,
    ) -> torch.Tensor:
        """As `engine.attention.paged.attend`."""

    def write_quantised(self, pages: torch.Tensor, scales: torch.Tensor, new: torch.Tensor, step: Step) -> None:
        """As `engine.attention.paged.write` into quantised pages."""

    def tiles(self, step: Step, facts: tuple[CallFacts, ...]) -> dict[Any, Any]:
        """Tensors of a step by their key in its `plans`: what a recording takes besides a step's own."""


Terms = dict[int, tuple[int, float]]  # of an adapter in a slot: number of a layer -> rank, scale


class Rows(NamedTuple):
    """One step's rows by LoRA slot. `groups` is for plain PyTorch; a recording has only the tensors."""

    # rows [total], starts [slots + 1], pool, ranks, scales: the arguments of tandem::lora_
    tensors: tuple[torch.Tensor, ...]
    groups: tuple[tuple[int, Terms, torch.Tensor], ...] = ()  # (slot, its terms, its rows)


def on_device(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host numbers as a tensor, without waiting for the device: on CUDA a copy from pinned memory is put in the queue.

    torch does not reuse the pinned memory before the copy has ended.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def done_behind(device: torch.device) -> Callable[[], object]:
    """Returns a function that waits until the device has done everything that this thread has queued so far; on CPU it
    returns at once."""
    if device.type != "cuda":
        return lambda: None
    done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(device))
    return done.synchronize  # type: ignore[no-any-return]


def device_done(device: torch.device) -> None:
    """Waits until the device has done everything that this thread has queued so far."""
    done_behind(device)()


def out_of_memory(error: Exception) -> bool:
    """Whether memory of the device or of the host is exhausted; the host's allocator raises a plain RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


@dataclass
class Batch:
    """The inputs of one packed forward.

    `token_ids` and `positions` are packed, one entry for each new token. The other lists have one entry for each
    sequence: `context_lens` counts the tokens whose KV is in pages AFTER this step (done + query_len), and
    `block_tables` holds the block ids that cover them in order (longer is fine). `logits_at` are indices of the packed
    tokens whose logits are wanted, in that order: none in the middle of a prompt, the last token of a decoding
    sequence, several for drafts or a scored prompt.
    """

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    query_lens: list[int] = field(default_factory=list)
    context_lens: list[int] = field(default_factory=list)
    block_tables: list[list[int]] = field(default_factory=list)
    logits_at: list[int] = field(default_factory=list)
    adapters: list[int] = field(default_factory=list)  # slot of each sequence, -1 for none; empty: none has one
    slots: list[int] = field(default_factory=list)  # of each sequence's recurrent states; unused without such layers
    fed: torch.Tensor | None = None  # int64 [tokens] on the device, used instead of `token_ids`: the host lacks them

    def add(self, tokens: Sequence[int], done: int, table: list[int], wanted: Iterable[int] = ()) -> None:
        """Appends a sequence's new tokens, which follow `done` earlier ones; `wanted` are those of them, counted from
        0, whose logits are wanted."""
        start, count = len(self.token_ids), len(tokens)
        self.token_ids += tokens
        self.positions += range(done, done + count)
        self.query_lens.append(count)
        self.context_lens.append(done + count)
        self.block_tables.append(table)
        self.logits_at += [start + place for place in wanted]

    def check(self, block_size: int, num_blocks: int) -> None:
        """Checks invariants of the engine; raises AssertionError with the numbers."""
        total, sequences = sum(self.query_lens), len(self.query_lens)
        assert total > 0, "an empty batch has nothing to forward"
        assert len(self.token_ids) == len(self.positions) == total, (
            f"{total} tokens by query_lens, {len(self.token_ids)} token ids, {len(self.positions)} positions"
        )
        assert len(self.context_lens) == len(self.block_tables) == sequences, "one entry for each sequence"
        starts = [context - query for query, context in zip(self.query_lens, self.context_lens, strict=True)]
        expected = list(chain.from_iterable(map(range, starts, self.context_lens)))
        assert self.positions == expected, "positions must continue where each sequence's context ends"
        for query, context, table in zip(self.query_lens, self.context_lens, self.block_tables, strict=True):
            assert 0 < query <= context <= len(table) * block_size, (
                f"{len(table)} blocks of {block_size} do not hold a context of {context} (query {query})"
            )
            assert 0 <= min(table) <= max(table) < num_blocks, f"block ids {table} outside 0..{num_blocks - 1}"
        assert len(self.adapters) in (0, sequences), f"{len(self.adapters)} adapters of {sequences} sequences"
        assert all(0 <= index < total for index in self.logits_at), f"logits_at {self.logits_at} outside the batch"

    def check_slots(self, slots: int) -> None:
        """As `check`, for a model with recurrent states and `slots` slots."""
        assert len(self.slots) == len(self.query_lens), f"{len(self.slots)} slots of {len(self.query_lens)} sequences"
        assert len(set(self.slots)) == len(self.slots), f"two sequences have one state slot: {self.slots}"
        assert all(0 <= slot < slots for slot in self.slots), f"state slots {self.slots} outside 0..{slots - 1}"


class Step:
    """One forward's tensors on the device, and the counter of attention calls; passed to the model as `step=`.

    `cu_seq_q`, `seqused_k`, `block_table` and `max_q` are the arguments of a variable-length paged kernel; the host
    lists in `batch` are for the reference path. `pages` and `facts` say where each attention call keeps its K and
    V: call number `c` of the forward owns `pages.k[c]`, whatever the module's `layer_idx` says, because a module may
    attend twice. A Step serves one forward.
    """

    def __init__(
        self,
        batch: Batch,
        pages: KvCache,
        facts: tuple[CallFacts, ...],
        device: torch.device,
        compiled: bool = False,
        cuda_kernel: CudaKernel | None = None,
    ) -> None:
        batch.check(pages.block_size, pages.num_blocks)
        if pages.states is not None:
            batch.check_slots(pages.states.slots)
        self.batch = batch
        self.pages = pages
        self.facts = facts
        self.device = device
        self.compiled = compiled  # whether to use the compiled operators
        self.cuda_kernel = cuda_kernel  # serves the attention calls that it can
        self.calls = 0  # attention calls begun in this forward
        self.plans: dict[Any, Any] = {}  # computed once by the attention function, for all its calls
        self.lora: Rows | None = None  # set by the model, if it has adapters
        self.state_rows: torch.Tensor | None = None  # of a captured step, int64 [2, n]: StateMemory.step_rows

        width = max(map(len, batch.block_tables))
        rows = [
            table + [0] * (width - len(table)) for table in batch.block_tables
        ]  # 0 is never read: seqused_k ends it
        slots = [
            (table[position // pages.block_size], position % pages.block_size)
            for query, context, table in zip(batch.query_lens, batch.context_lens, batch.block_tables, strict=True)
            for position in range(context - query, context)
        ]
        ids = self.tensor(batch.token_ids) if batch.fed is None else batch.fed
        self.input_ids = ids.unsqueeze(0)  # [1, total]
        self.position_ids = self.tensor(batch.positions).unsqueeze(0)  # [1, total]
        self.slot_block = self.tensor([block for block, _ in slots])  # [total]
        self.slot_offset = self.tensor([offset for _, offset in slots])  # [total]
        self.cu_seq_q_host = [0, *accumulate(batch.query_lens)]
        self.cu_seq_q = self.int_tensor(self.cu_seq_q_host)  # [sequences + 1]
        self.seqused_k = self.int_tensor(batch.context_lens)  # [sequences]
        self.block_table = self.int_tensor(rows)  # [sequences, max_blocks]
        self.max_q = max(batch.query_lens)

    def next_call(self) -> int:
        """The number of the attention call that begins now, from 0."""
        self.calls += 1
        return self.calls - 1

    def tensor(self, values: Any) -> torch.Tensor:
        """An int64 tensor on the step's device."""
        return on_device(values, torch.int64, self.device)

    def int_tensor(self, values: list[Any]) -> torch.Tensor:
        """An int32 tensor on the step's device."""
        return on_device(values, torch.int32, self.device)


_running = threading.local()


@contextmanager
def running(step: Step) -> Iterator[None]:
    """Makes `step` this thread's current step, for attention modules that drop the `step=` keyword on the way."""
    _running.step = step
    try:
        yield
    finally:
        _running.step = None


def current_step() -> Step:
    """The step of the forward that runs on this thread. AssertionError outside of `running`."""
    step: Step | None = getattr(_running, "step", None)
    assert step is not None, "the paged attention function was called outside of Model.forward"
    return step
