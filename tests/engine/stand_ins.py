"""Stand-ins for CUDA on a machine without it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import engine.engine
import engine.run_ahead
from engine.attention.forward_context import Batch, Step
from engine.decoding import new_tokens
from engine.engine import Engine
from engine.kv.kv_cache import KvCache
from engine.kv.kv_cache_spec import CallFacts, SlidingWindowSpec
from engine.run_ahead import Tokens
from engine.runner.captured_steps import Call
from engine.runner.model_runner import ModelRunner
from tandem.sampling import Sampling


def checked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    cu_seq_q: torch.Tensor,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """Attention over pages in plain PyTorch, of keys from `window_size[0]` before a query to `window_size[1]` after it,
    -1: all.

    `query [total, heads, d]`, `key` and `value` `[blocks, block_size, kv_heads, d]`.
    """
    assert {query.dtype, key.dtype, value.dtype} in ({torch.bfloat16}, {torch.float16})
    assert all(each.dtype == torch.int32 and each.is_contiguous() for each in (cu_seq_q, seqused_k))
    assert block_table.dtype == torch.int32
    assert block_table.stride(-1) == query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert key.shape == value.shape
    assert query.shape[2] == key.shape[3]
    sequences, groups = len(seqused_k), query.shape[1] // key.shape[2]
    assert cu_seq_q.shape == (sequences + 1,)
    assert block_table.shape[0] == sequences
    out = torch.full_like(query, torch.nan)
    for index in range(sequences):
        start, end, used = int(cu_seq_q[index]), int(cu_seq_q[index + 1]), int(seqused_k[index])
        assert start < end
        blocks = block_table[index, : -(-used // key.shape[1])].long()
        k, v = (pages[blocks].flatten(0, 1)[:used].float().repeat_interleave(groups, 1) for pages in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[start:end].float(), k) * scale
        at = torch.arange(end - start).unsqueeze(1) + used - (end - start)  # aligned at the lower right
        behind = at - torch.arange(used)
        left, right = window_size
        seen = (behind >= -right) if right >= 0 else torch.ones_like(behind, dtype=torch.bool)
        if left >= 0:
            seen &= behind <= left
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)
    return out


class Kernel:
    """A CUDA kernel without CUDA, by default a right one. It serves neither sinks nor softcaps."""

    name, absorbed, split_keys = "stand-in", None, 64

    def __init__(self, function: Callable[..., torch.Tensor] = checked) -> None:
        self.function = function

    def refusal(self, facts: CallFacts, dtype: torch.dtype) -> str | None:
        return "sinks" if facts.sinks else "softcap" if facts.softcap is not None else None

    def attend(self, query: Any, keys: Any, values: Any, scales: Any, step: Step, facts: CallFacts, *_: Any) -> Any:
        window = facts.reach.window - 1 if isinstance(facts.reach, SlidingWindowSpec) else -1
        lens = {"cu_seq_q": step.cu_seq_q, "seqused_k": step.seqused_k, "block_table": step.block_table}
        return self.function(query, keys, values, **lens, scale=facts.scaling, window_size=(window, 0))


# Operators that read a number on the host, have a size that depends on values, or make a tensor of host numbers.
WAITING = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "lift_fresh")


class Asked(TorchDispatchMode):
    """Inside, `names` collects every such operator. (`tolist` and `numpy` are not operators; look for them by eye.)"""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func is torch.ops.aten.index.Tensor and any(
            each is not None and each.dtype == torch.bool for each in args[1]
        )
        if by_mask or any(name in str(func) for name in WAITING):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Late:
    """A device that computes nothing until it is waited for: `behind` counts the forwards it has yet to compute."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.behind = 0
        forward, choose = ModelRunner.forward, new_tokens.choose

        def queued(model: ModelRunner, pages: KvCache, batch: Batch) -> torch.Tensor:
            self.behind += 1
            return forward(model, pages, batch)

        def read_back(*args: Any, **kwargs: Any) -> Any:
            self.wait()
            return choose(*args, **kwargs)

        patch.setattr(ModelRunner, "forward", queued)
        patch.setattr(new_tokens, "choose", read_back)
        patch.setattr(engine.engine, "device_done", self.wait)

    def wait(self, _device: torch.device | None = None) -> None:
        self.behind = 0


class Streams:
    """CUDA's streams without CUDA: `current` is the one that `torch.cuda.stream` has entered, None outside."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.current: object | None = None
        patch.setattr(torch.cuda, "Stream", _Stream)
        patch.setattr(torch.cuda, "stream", lambda stream: _Inside(self, stream))
        patch.setattr(torch.cuda, "current_stream", lambda: self.current or _Stream())


class _Inside:
    def __init__(self, streams: Streams, stream: object) -> None:
        self._streams, self._stream = streams, stream

    def __enter__(self) -> None:
        self._before, self._streams.current = self._streams.current, self._stream

    def __exit__(self, *_: object) -> None:
        self._streams.current = self._before


class _Stream:
    def __init__(self, _device: torch.device | None = None) -> None: ...

    def wait_stream(self, other: object) -> None: ...


GARBAGE = 7  # a token that a flight's memory holds before the device has written it


class LateTokens:
    """The tokens of a flight on a Lagging device."""

    def __init__(self, device: Lagging, rows: int) -> None:
        self.device, self.host = device, [GARBAGE] * rows
        self.on_device = torch.full([rows], GARBAGE)

    def read(self) -> list[int]:
        self.device.wait_for(self)
        return self.host


class Lagging:
    """A device that computes an engine's flights when the host waits for them, or runs another step, and before that
    only where `early` says so. Block tables are those of the time at which a flight was queued."""

    def __init__(self, patch: pytest.MonkeyPatch, built: Engine, early: Callable[[], bool] = lambda: False) -> None:
        built.ahead.on = True
        self.queued: deque[tuple[LateTokens, Batch, Callable[[], None]]] = deque()
        self.behind_another = 0  # flights whose tokens nobody had seen when the next one was queued
        self._compute, self._forward, self._early = built.ahead._queue, built.forward, early
        patch.setattr(built.ahead, "_queue", self._later)
        patch.setattr(built, "forward", self._now)
        for module in (engine.engine, engine.run_ahead):
            patch.setattr(module, "device_done", self.wait)

    def wait(self, _device: torch.device | None = None) -> None:
        while self.queued:
            self.queued.popleft()[2]()

    def wait_for(self, tokens: LateTokens) -> None:
        while any(each is tokens for each, _, _ in self.queued):
            self.queued.popleft()[2]()

    def writes(self, block_size: int) -> set[int]:
        """The blocks that queued flights write to."""
        return {
            table[position // block_size]
            for _, batch, _ in self.queued
            for position, table in zip(batch.positions, batch.block_tables, strict=True)
        }

    def _now(self, batch: Batch) -> torch.Tensor:
        self.wait()
        return self._forward(batch)

    def _later(self, batch: Batch, sampling: list[Sampling], fed: tuple[Tokens, list[int]] | None) -> LateTokens:
        given = replace(batch, block_tables=[list(table) for table in batch.block_tables])
        late = LateTokens(self, len(sampling))

        def compute() -> None:
            tokens = self._compute(given, sampling, fed)
            late.on_device.copy_(tokens.on_device)
            late.host = tokens.read()

        self.behind_another += fed is not None
        self.queued.append((late, given, compute))
        if self._early():
            self.wait()
        return late


def recorded(call: Call) -> Call:
    """Stands for a CUDA graph: a replay runs what operators did again, over the same tensors, and no Python between
    them. Numbers that the host has put into a tensor are those of the captured step."""
    with _Record() as record:
        out = call()

    def replay() -> torch.Tensor:
        record.again()
        return out

    return replay


class _Record(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._done: list[tuple[Callable[[], Any], Any]] = []  # what to run, and the tensors that it has to fill

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = partial(func, *args, **(kwargs or {}))
        out = run()
        if "empty" not in str(func):
            self._done.append((run, out))
        return out

    def again(self) -> None:
        for run, out in self._done:
            for into, made in zip(tree_leaves(out), tree_leaves(run()), strict=True):
                if isinstance(into, torch.Tensor) and into.data_ptr() != made.data_ptr():  # else a view, or in place
                    into.copy_(made)
