"""From settings to a running engine: device, dtype, threads, and a KV pool sized by measurement."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable

import psutil
import torch

from engine import weights
from engine.engine import Engine
from engine.grammar import Grammars
from engine.model import Model
from engine.step import Batch
from tandem.errors import SettingsError, TooLarge
from tandem.settings import Settings

CPU_SHARE, CUDA_SHARE = 0.15, 0.9


def build_engine(settings: Settings, say: Callable[[str], None]) -> Engine:
    """Load the model, measure, allocate.

    Raises CheckpointRefused when the model would be served wrongly, SettingsError when the settings ask for what this
    machine does not have, TooLarge when the memory does not hold one sequence of the longest length.
    """
    device = _device(settings)
    torch.set_num_threads(_threads(settings))
    model = Model.load(
        settings.model,
        dtype=_dtype(settings, device),
        device=device,
        max_model_len=settings.max_model_len,
        block_size=settings.block_size,
        progress=say,
    )
    blocks = settings.kv_blocks or _measured_blocks(model, settings, say)
    return Engine(
        model,
        num_blocks=blocks,
        block_size=settings.block_size,
        token_budget=settings.max_num_batched_tokens,
        max_running=settings.max_num_seqs,
        grammars=Grammars(weights.resolve(settings.model), model.vocab_size, model.eos_token_ids),
    )


def _device(settings: Settings) -> torch.device:
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise SettingsError("device is cuda, but torch finds no CUDA device here", field="device", bound="auto or cpu")
    if settings.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _dtype(settings: Settings, device: torch.device) -> torch.dtype:
    if settings.dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[settings.dtype]
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _threads(settings: Settings) -> int:
    cores = len(os.sched_getaffinity(0))
    return settings.threads or max(1, cores // max(1, settings.prefill + settings.decode))


def _measured_blocks(model: Model, settings: Settings, say: Callable[[str], None]) -> int:
    """Blocks that fit into a share of what is free after loading and after the largest step has run once.

    Never more than all places filled to the longest length could use.
    """
    working = _profile(model, settings)
    free = _free_bytes(model.device)
    share = settings.memory_utilization or (CPU_SHARE if model.device.type == "cpu" else CUDA_SHARE)
    block = model.block_bytes(settings.block_size)
    per_sequence = -(-model.max_model_len // settings.block_size)
    fits = int((free - working) * share) // block
    if fits < per_sequence:
        raise TooLarge(
            f"one sequence of {model.max_model_len} tokens needs {per_sequence * block / 2**20:.0f} MiB of KV,"
            f" {max(0, fits) * block / 2**20:.0f} MiB may be used; lower max_model_len or raise memory_utilization",
            field="max_model_len",
            bound=f"<= {max(0, fits) * settings.block_size}",
        )
    blocks = min(fits, per_sequence * settings.max_num_seqs)
    say(
        f"KV pool: {blocks} blocks of {block / 1024:.0f} KiB ({blocks * block / 2**20:.0f} MiB;"
        f" {free / 2**20:.0f} MiB free, largest step takes {working / 2**20:.0f} MiB)"
    )
    return blocks


def _profile(model: Model, settings: Settings) -> int:
    """Run the largest step once; bytes by which it raised the peak."""
    length = min(model.max_model_len, settings.max_num_batched_tokens)
    per_sequence = -(-length // settings.block_size)
    pages = model.allocate(per_sequence, settings.block_size)
    batch = Batch(
        token_ids=[index % model.vocab_size for index in range(length)],
        positions=list(range(length)),
        query_lens=[length],
        context_lens=[length],
        block_tables=[list(range(per_sequence))],
        logits_at=list(range(min(length, settings.max_num_seqs))),
    )
    if model.device.type == "cuda":  # not yet run on a GPU
        torch.cuda.reset_peak_memory_stats(model.device)
        before = torch.cuda.memory_allocated(model.device)
        model.forward(pages, batch)
        torch.cuda.synchronize(model.device)
        return torch.cuda.max_memory_allocated(model.device) - before
    before = psutil.Process().memory_info().rss
    model.forward(pages, batch)
    return max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)


def _free_bytes(device: torch.device) -> int:
    """What is free now: of the device, or of the host and of this process's cgroup, whichever is less."""
    if device.type == "cuda":  # not yet run on a GPU
        return int(torch.cuda.mem_get_info(device)[0])
    return min(psutil.virtual_memory().available, _cgroup_free())


def _cgroup_free() -> int:
    """Bytes that the container may still take; unlimited (a very large number) without a limit. cgroup v2."""
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            text = limit.read().strip()
            return 2**62 if text == "max" else int(text) - int(used.read())
    except OSError:
        return 2**62  # no cgroup v2 here: the host's number decides


__all__ = ["build_engine"]
