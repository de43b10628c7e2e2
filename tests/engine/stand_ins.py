"""Stand-ins for CUDA on a machine without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import engine.engine
from engine.attention.forward_context import Batch
from engine.decoding import new_tokens
from engine.kv.kv_cache import KvCache
from engine.runner.model_runner import ModelRunner


def checked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    num_splits: int,
) -> torch.Tensor:
    """`varlen_attn` over pages: refuses what the kernels refuse, and computes the rest in plain PyTorch, by the
    conventions of torch's documentation.

    `query [total, heads, d]`, `key` and `value` `[blocks, block_size, kv_heads, d]`.
    """
    assert {query.dtype, key.dtype, value.dtype} in ({torch.bfloat16}, {torch.float16})
    assert all(each.dtype == torch.int32 and each.is_contiguous() for each in (cu_seq_q, seqused_k))
    assert block_table.dtype == torch.int32
    assert block_table.stride(-1) == query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert key.shape == value.shape
    assert query.shape[2] == key.shape[3] <= 256
    assert query.shape[2] % 8 == 0
    assert all(stride * 2 % 16 == 0 for stride in (*key.stride()[:-1], *value.stride()[:-1])), "16 bytes at a time"
    sequences, groups = len(seqused_k), query.shape[1] // key.shape[2]
    assert cu_seq_q.shape == (sequences + 1,)
    assert block_table.shape[0] == sequences
    assert enable_gqa or groups == 1
    assert isinstance(window_size, tuple)
    assert num_splits == 1
    if cu_seq_k is not None:
        assert cu_seq_k.dtype == torch.int32
        assert cu_seq_k.tolist() == [0, *seqused_k.cumsum(0).tolist()]
        assert key.shape[1] % 256 == 0
    out = torch.full_like(query, torch.nan)
    for index in range(sequences):
        start, end, used = int(cu_seq_q[index]), int(cu_seq_q[index + 1]), int(seqused_k[index])
        assert 0 < end - start <= max_q
        assert used <= max_k
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
