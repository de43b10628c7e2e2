"""From settings to a running engine: device, dtype, threads, and a KV pool sized by measurement."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from engine import calibration, kernels
from engine.attention.forward_context import Batch
from engine.core.engine_config import EngineConfig
from engine.core.kv_layout import slot_bytes
from engine.core.scheduler import EXTRA_LOGITS
from engine.decoding import sampler
from engine.decoding.grammars import Grammars
from engine.decoding.speculative import Drafter, ModelDrafter, Ngram, Speculation
from engine.engine import Engine
from engine.kernels import speed_check
from engine.kernels.weight_cache import cache_of
from engine.loading import checkpoint
from engine.loading.model_loader import load_model
from engine.loading.module_loader import read_config, return_memory
from engine.loading.position_limits import longest_served
from engine.parallel.leader import Ranks
from engine.parallel.rank_memory import Loading, described
from engine.parallel.tp_plan import check_plan, check_settings
from engine.runner.model_runner import ModelRunner
from tandem.checkpoint import read_json
from tandem.errors import CheckpointRefused, SettingsError, TooLarge
from tandem.settings import Settings

log = logging.getLogger(__name__)

CPU_SHARE, CUDA_SHARE = 0.15, 0.9
# Tokens of a step where the settings name none. On a GPU a smaller step would spend its time launching kernels.
BUDGETS = {"cpu": 512, "cuda": 8192}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch's, today's name and the former one
NO_DRAFTS = "a model with recurrent layers neither guesses nor verifies drafts, which would change its states"
KEYS = ("dtype", "torch_dtype")  # in config.json, today and in older checkpoints


def build_engine(settings: Settings, say: Callable[[str], None], *, generates: bool = True, ranks: int = 1) -> Engine:
    """Load the model, measure, allocate. An engine that only prefills (`generates` false) has no use for drafts. With
    `ranks`, this process becomes rank 0 of as many.

    Raises CheckpointRefused when the model would be served wrongly, SettingsError when the settings ask for what this
    machine does not have, TooLarge when the memory does not hold one sequence of the longest length.
    """
    device = _device(settings)
    torch.set_num_threads(max(1, _threads(settings) // ranks))
    dtype = _dtype(settings, device)
    kernels.use(settings.sum_order, device, dtype)
    model = _load(settings, device, dtype, say) if ranks == 1 else _load_ranks(settings, device, dtype, ranks, say)
    try:
        return _engine_of(model, settings, say, generates=generates)
    except BaseException:
        model.close()
        raise


def _engine_of(model: ModelRunner, settings: Settings, say: Callable[[str], None], *, generates: bool) -> Engine:
    device, folder = model.device, checkpoint.resolve(settings.model)
    vocabulary = checkpoint.vocabulary_of(folder)  # before memory is measured, of which it takes some for a moment
    _check_order(settings, model)
    draft = _draft_model(settings, model, say) if generates and settings.speculation != "off" else None
    blocks = settings.kv_blocks or _measured_blocks(model, draft, settings, say)
    longest = min(model.max_model_len - 1, token_budget(settings, device))
    pace = calibration.pace(model, longest, settings.max_num_seqs, settings.block_size)
    say(
        f"measured: {pace.prompt_rate:.0f} prompt tokens/s, {pace.step_s * 1e3:.1f} ms a step of one stream,"
        f" which reads {model.step_bytes / 2**20:.0f} MiB of weights"
    )
    modules = [runner.module for runner in (model, draft) if runner]
    products = (
        speed_check.run(modules, model.dtype, cache_of(settings.weight_cache, settings.weight_cache_gib))
        if device.type == "cpu"
        else None
    )
    say(f"products: {products or 'none that is timed'}")
    if products is not None and products.warning:
        log.warning("%s", products.warning)
    decodes = generates or (settings.speculation == "off" and device.type != "cuda")
    config = EngineConfig(
        num_blocks=blocks,
        block_size=settings.block_size,
        token_budget=token_budget(settings, device),
        max_running=settings.max_num_seqs,
        stretch=settings.stretch,
        beside_s=settings.beside_s,
        spare_block=decodes,
        generates=decodes,
    )
    grammars = Grammars(folder, model.vocab_size, model.eos_token_ids)
    speculation = _speculation(settings, draft, blocks) if generates else None
    engine = Engine(model, config, pace=pace, speculation=speculation, grammars=grammars)
    engine.products, engine.vocabulary = products, vocabulary
    say(f"{blocks} blocks of KV allocated{engine.states or ''}")
    if device.type == "cuda":
        problem = sampler.kernel_problem(device)
        say(f"sampling: {f'plain PyTorch, because the kernel {problem}' if problem else 'cuda (triton)'}")
    if decodes:
        say(f"decode steps: {engine.capture()}")
        if engine.decode is not None and device.type == "cuda":
            pace.captured(calibration.captured_seconds(engine))
    return engine


def _load(settings: Settings, device: torch.device, dtype: torch.dtype, say: Callable[[str], None]) -> ModelRunner:
    cache = cache_of(settings.weight_cache, settings.weight_cache_gib)
    return load_model(settings.model, **_options(settings), dtype=dtype, device=device, cache=cache, progress=say)


def _options(settings: Settings) -> dict[str, Any]:
    """What load_model is given on any rank, as JSON."""
    return {
        "max_model_len": settings.max_model_len,
        "block_size": settings.block_size,
        "adapters": settings.adapters,
        "adapter_slots": settings.adapter_slots,
        "later_rank": _later_rank(settings),
        "weights": settings.weights,
        "kv_dtype": settings.kv_dtype,
    }


def _load_ranks(
    settings: Settings, device: torch.device, dtype: torch.dtype, size: int, say: Callable[[str], None]
) -> ModelRunner:
    """Rank 0's part of a model, with the other ranks ready to follow. Raises what load_model raises, on any rank."""
    check_settings(settings, size, device.type)  # before anything is started
    folder = checkpoint.resolve(settings.model)
    check_plan(read_config(folder), size)
    if settings.weight_cache != "off":
        say("weight_cache: without effect on weights, because its files have whole ones and each rank packs its part")
    options = {"path": str(folder), **_options(settings)}
    name, threads = str(dtype).removeprefix("torch."), torch.get_num_threads()
    ranks = Ranks(size, {**options, "dtype": name, "threads": threads, "sum_order": settings.sum_order})
    loading = Loading()
    try:
        try:
            with loading:
                model = load_model(**options, dtype=dtype, device=device, group=ranks.group, progress=say)
        except (RuntimeError, CheckpointRefused) as error:
            if ranks.group.broken:  # another rank was first
                raise ranks.why_not_loaded() from error
            raise
        ranks.wait_joined()
    except BaseException:
        ranks.close()
        raise
    model.ranks = ranks
    say(f"{size} ranks have loaded their parts; {described([loading.memory(), *ranks.memory])}")
    return model


def _check_order(settings: Settings, model: ModelRunner) -> None:
    """Raises SettingsError for a model whose products could have the order that is asked for, and other layers not."""
    unordered = "sparse indexers" if model.indexers is not None else None
    if model.mixers is not None and not model.mixers.exact:
        unordered = "recurrent layers"
    if settings.sum_order != kernels.FASTEST and unordered is not None:
        raise SettingsError(
            f"sum_order is {settings.sum_order}, and {settings.model} has {unordered}, whose sums no setting orders:"
            " leave sum_order out for this model, whose streams may then continue with other, equally valid tokens"
            " where they move to another worker",
            field="sum_order",
            bound=kernels.FASTEST,
        )


def _draft_model(settings: Settings, target: ModelRunner, say: Callable[[str], None]) -> ModelRunner | None:
    """The smaller model that guesses, if there is one; it must speak of the same tokens."""
    if target.mixers is not None:
        raise SettingsError(f"{settings.model}: {NO_DRAFTS}", field="speculation", bound="off for this model")
    if settings.draft_model is None:
        return None
    # No longer than the target's sequences, nor than what the draft takes: beyond its length it makes no drafts.
    longest = longest_served(read_config(checkpoint.resolve(settings.draft_model)))
    draft = load_model(
        settings.draft_model,
        dtype=target.dtype,
        device=target.device,
        max_model_len=min(target.max_model_len, longest or target.max_model_len),
        block_size=settings.block_size,
        weights=settings.weights,
        cache=cache_of(settings.weight_cache, settings.weight_cache_gib),
        progress=lambda line: say(f"draft model: {line}"),
    )
    if draft.mixers is not None:
        raise SettingsError(f"{settings.draft_model}: {NO_DRAFTS}", field="draft_model", bound="a model without them")
    if draft.vocab_size != target.vocab_size:
        raise SettingsError(
            f"draft_model has a vocabulary of {draft.vocab_size} tokens, the model one of {target.vocab_size};"
            " a draft is a token id, so both must be the same",
            field="draft_model",
            bound=f"a checkpoint with vocab_size {target.vocab_size}",
        )
    return draft


def _speculation(settings: Settings, draft: ModelRunner | None, blocks: int) -> Speculation | None:
    drafter: Drafter | None = None
    if draft is not None:
        budget = token_budget(settings, draft.device)
        drafter = ModelDrafter(draft, num_blocks=blocks, block_size=settings.block_size, token_budget=budget)
    elif settings.speculation == "ngram":
        drafter = Ngram()
    return Speculation(drafter, settings.speculation_tokens) if drafter else None


def _later_rank(settings: Settings) -> int:
    """Of adapters that are loaded at run time; 0: none is. Raises SettingsError."""
    if settings.adapter_root is None:
        return 0
    if not settings.adapter_root.expanduser().is_dir():
        what = f"{settings.adapter_root} is not a folder on this worker"
        raise SettingsError(what, field="adapter_root", bound="a folder on every worker")
    return settings.adapter_max_rank


def _device(settings: Settings) -> torch.device:
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise SettingsError("device is cuda, but torch finds no CUDA device here", field="device", bound="auto or cpu")
    if settings.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", torch.cuda.current_device())
    for name in ALLOCATOR_SETTINGS:
        if "expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", ""):
            raise SettingsError(
                f"{name} has expandable_segments: memory of that kind cannot be opened by another process, so no block"
                " could be handed over on this host; unset it",
                field="device",
                bound="cuda without expandable_segments",
            )
    if settings.gpu_share < 1:
        torch.cuda.set_per_process_memory_fraction(settings.gpu_share, device)
    return device


def token_budget(settings: Settings, device: torch.device) -> int:
    """Tokens of one step: `max_num_batched_tokens`, or the device's own, with room for every stream."""
    return settings.max_num_batched_tokens or max(BUDGETS[device.type], settings.max_num_seqs)


def device_name(device: torch.device) -> str:
    """For operators: a GPU by its number or name on this host, where CUDA_VISIBLE_DEVICES leaves only some of them."""
    if device.type != "cuda":
        return device.type
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    index = device.index or 0
    return f"cuda:{visible[index] if index < len(visible) else index}"


def _dtype(settings: Settings, device: torch.device) -> torch.dtype:
    """auto on CUDA: the dtype of config.json, with float16 as bfloat16 (of the same size, and without overflows)."""
    if settings.dtype != "auto":
        return DTYPES[settings.dtype]
    if device.type == "cpu":
        return torch.float32
    config = read_json(checkpoint.resolve(settings.model) / "config.json")
    own = next(
        (section[key] for section in (config, config.get("text_config") or {}) for key in KEYS if section.get(key)),
        None,
    )
    return torch.bfloat16 if own == "float16" else DTYPES.get(str(own), torch.float32)


def _threads(settings: Settings) -> int:
    cores = len(os.sched_getaffinity(0))
    return settings.threads or max(1, cores // max(1, settings.host_workers or settings.prefill + settings.decode))


def _measured_blocks(
    model: ModelRunner, draft: ModelRunner | None, settings: Settings, say: Callable[[str], None]
) -> int:
    """Blocks that fit into a share of the memory that is free after loading and after the largest step has run once.

    Never more than `max_num_seqs` sequences of the longest length could use.
    """
    layout = model.layout(settings.block_size)
    working = _profile(model, settings) * (model.group.size if model.group else 1)  # each rank takes as much
    return_memory()  # torch keeps what the step has freed, its pages too, which would be missing beside `working`
    slots = (settings.max_num_seqs + 1) * slot_bytes(layout.state_bytes)
    kept = sum(runner.mapped_bytes for runner in (model, draft) if runner)
    free = _free_bytes(model.device, kept, settings.gpu_share) - slots
    share = settings.memory_utilization or (CPU_SHARE if model.device.type == "cpu" else CUDA_SHARE)
    block = sum(runner.block_bytes(settings.block_size) for runner in (model, draft) if runner)
    per_sequence = -(-model.max_model_len // settings.block_size) + layout.state_blocks
    fits = int((free - working) * share) // block
    if fits < per_sequence:
        raise TooLarge(
            f"one sequence of {model.max_model_len} tokens needs {per_sequence * block / 2**20:.0f} MiB of KV,"
            f" {max(0, fits) * block / 2**20:.0f} MiB may be used; lower max_model_len or raise memory_utilization",
            field="max_model_len",
            bound=f"<= {max(0, fits - layout.state_blocks) * settings.block_size}",
        )
    blocks = min(fits, per_sequence * settings.max_num_seqs)
    say(
        f"KV pool: {blocks} blocks of {block / 1024:.0f} KiB ({blocks * block / 2**20:.0f} MiB;"
        f" {free / 2**20:.0f} MiB free, largest step takes {working / 2**20:.0f} MiB)"
    )
    return blocks


def _profile(model: ModelRunner, settings: Settings) -> int:
    """Run the largest step once; bytes by which it raised the peak."""
    batch, blocks = _largest_step(model, settings)
    pages = model.allocate(blocks, settings.block_size)
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.device)
        before = torch.cuda.memory_allocated(model.device)
        model.forward(pages, batch)
        torch.cuda.synchronize(model.device)
        return torch.cuda.max_memory_allocated(model.device) - before
    before = psutil.Process().memory_info().rss
    peak = _peak_from_now()
    model.forward(pages, batch)
    return max(0, peak() - before)


def _largest_step(model: ModelRunner, settings: Settings) -> tuple[Batch, int]:
    """The step that takes most memory, and the blocks that it needs: a prompt's last chunk on a GPU, where attention by
    the reference and expanded latents grow with the context. On CPU its first: the last of a long prompt takes minutes.

    The context takes turns with the blocks of a chunk: what it reads and overwrites there does not matter.
    """
    length = min(model.max_model_len, token_budget(settings, model.device))
    done = model.max_model_len - length if model.device.type == "cuda" else 0
    blocks = -(-length // settings.block_size)
    table = [index % blocks for index in range(-(-(done + length) // settings.block_size))]
    wanted = range(min(length, settings.max_num_seqs + EXTRA_LOGITS))
    batch = Batch(slots=[0])
    batch.add([index % model.vocab_size for index in range(length)], done, table, wanted)
    return batch, blocks


def _peak_from_now() -> Callable[[], int]:
    """Returns a function for the peak resident bytes of this process since now; since its start where Linux cannot
    reset the peak."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak of loading
    return lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _free_bytes(device: torch.device, kept: int, gpu_share: float = 1.0) -> int:
    """The free bytes of this worker's share of the device, or of the host or this process's cgroup, whichever is less.

    `kept` bytes of mapped files must stay resident, though the kernel counts them as available. Each worker that maps
    the same file subtracts them from the number that contains them once.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return min(free, int(gpu_share * total) - torch.cuda.memory_reserved(device))
    return min(psutil.virtual_memory().available, _cgroup_free()) - kept


def _cgroup_free(folder: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that the container may still take, those that hold files included; a very large number without a limit.

    cgroup v2.
    """
    try:
        max_bytes = (folder / "memory.max").read_text().strip()
        if max_bytes == "max":
            return 2**62
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        files = int(stat["active_file"]) + int(stat["inactive_file"])
        return int(max_bytes) - int((folder / "memory.current").read_text()) + files
    except OSError:
        return 2**62  # no cgroup v2 here: the host's number decides
