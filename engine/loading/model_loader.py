"""Loads a checkpoint as a ModelRunner, or refuses it if it would be served wrongly.

load_model(path) ─▶ folder complete? ─▶ load, eager ─▶ latent pages ─▶ probe ─▶ self-check ─▶ paged, for good
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
import xxhash
from transformers import PreTrainedConfig, PreTrainedModel

from engine.attention import mla
from engine.core import packing_scheme
from engine.kernels import PLAIN, REFERENCE, described, experts, modules, serving, sum_order, weight_quantization
from engine.kernels.weight_cache import WeightCache
from engine.kernels.weight_quantization import Packer
from engine.kv.kv_cache_spec import reaches
from engine.loading import (
    attention_probe,
    checkpoint,
    cut_check,
    lora_attachment,
    module_loader,
    quantized_checkpoint,
    self_check,
)
from engine.loading.attention_probe import Learnt
from engine.loading.cut_check import Whole
from engine.loading.lora_attachment import Wanted
from engine.loading.module_loader import RankPart, Source
from engine.loading.position_limits import check_positions, check_windows, max_length
from engine.parallel.rank_group import RankGroup
from engine.parallel.tp_plan import check_plan
from engine.parallel.weight_cut import Cut
from engine.runner import recurrences, traced_forward
from engine.runner.model_runner import CHECKPOINT, KvDtype, ModelRunner, RunnerConfig
from tandem.errors import CheckpointRefused, SettingsError

log = logging.getLogger(__name__)


def load_model(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None = None,
    block_size: int = 16,
    kernels: Literal["auto", "reference"] = "auto",
    adapters: Mapping[str, str | Path] | None = None,
    adapter_slots: int = 8,
    later_rank: int = 0,
    weights: str = CHECKPOINT,
    kv_dtype: KvDtype = "auto",
    cache: WeightCache | None = None,
    group: RankGroup | None = None,
    progress: Callable[[str], None] | None = None,
) -> ModelRunner:
    """Loads a checkpoint folder (or hub id) and proves that it can be served from pages.

    `max_model_len` limits a sequence, in tokens; the config's own limit if None. `kernels` "reference" leaves the
    compiled operators out. `adapters` are LoRA folders by name, of which `adapter_slots` are in the model at a time
    (engine.runner.lora); others of up to `later_rank` may be loaded later. `weights` is the format of rounded products
    (engine/core/weight_formats.py), `kv_dtype` the type of K and V in pages (engine/kv/kv_quantization.py). `cache`
    keeps packed weights for other workers and the next start. `group`: loads this rank's part. `progress` receives a
    line for each stage. Raises CheckpointRefused and SettingsError, each with the reason."""
    say = progress if progress is not None else log.info
    folder = checkpoint.resolve(path)
    files = checkpoint.check_folder(folder)
    config, max_len, method = _checked_config(folder, max_model_len, weights, group)
    fingerprint = checkpoint.fingerprint(folder, files)
    say(f"fingerprint of {len(files)} weight files")
    served_by = serving(device) if kernels == "auto" else REFERENCE
    packer = _packer(device, served_by) if kernels == "auto" else None
    format = _format(weights, dtype, device, packer)
    source = Source(folder, files, config, dtype, quantized_checkpoint.read(files, config, method))
    wanted = Wanted(adapters or {}, adapter_slots, later_rank)
    module, part = _loaded(source, device, method, format, packer, group, say)
    del source
    whole, part = part and part.expected, part if wanted else None  # it keeps the files open
    learnt = _learn(module, max_len, group, whole, say, bool(wanted), kernels == "auto", kv_dtype)
    served = RunnerConfig(
        max_model_len=max_len,
        fingerprint=_of_rounded(fingerprint, format, with_experts=_rounds_experts(module, format, group)),
        dtype=dtype,
        device=device,
        block_size=block_size,
        kernels=served_by,
        sum_order=_order(device, dtype, served_by, learnt, group),
        kv_dtype=kv_dtype,
        weights=format or method or CHECKPOINT,
        group=group,
    )
    model = ModelRunner(module, learnt.calls, served)
    model.mixers, model.indexers = learnt.mixers, learnt.indexers
    if format is not None and group is None:
        say(_quantise(module, format, packer))
    _prepare(model, cache, say, cuda=device.type == "cuda" and kernels == "auto")
    with_adapter = lora_attachment.attach_checked(model, wanted, part, say) if wanted else None
    del part
    return _finished(model, whole, with_adapter, say)


def _loaded(
    source: Source,
    device: torch.device,
    method: str | None,
    format: str | None,
    packer: Packer | None,
    group: RankGroup | None,
    say: Callable[[str], None],
) -> tuple[PreTrainedModel, RankPart | None]:
    """The module on its device, quantised weights over their codes where exact; of several ranks this one's part, with
    products rounded to `format`."""
    part = None if group is None else module_loader.load_part(source, group, format, say)
    module = part.module if part else module_loader.load_whole(source)
    own = part.cut if part else None
    say(f"{source.config.model_type} loaded from {source.folder}")
    if method is not None:
        say(quantized_checkpoint.adopt(module, packer, source.packed, own.parts if own else None))
    torch.nn.Module.to(module, device)  # codes are there already, and the weights that they stand for never are
    if own is not None and format is not None:  # the whole has rounded weights, too
        say(_quantise(module, format, packer, own))
    return module, part


def _order(device: torch.device, dtype: torch.dtype, served_by: str, learnt: Learnt, group: RankGroup | None) -> str:
    """The worker's order of sums; PLAIN, which promises nothing, if a recurrent layer or a sparse indexer may give a
    token other bits in another step."""
    inexact = learnt.indexers is not None or (learnt.mixers is not None and not learnt.mixers.exact)
    if served_by == REFERENCE or inexact:
        return PLAIN
    return sum_order(device, dtype, group.size if group else 1)


def _finished(
    model: ModelRunner, whole: Whole | None, with_adapter: Whole | None, say: Callable[[str], None]
) -> ModelRunner:
    """Makes the model ready to serve: empties the adapter slots, and checks that all ranks have parts of one model that
    differ only in heads and columns. `with_adapter`: what the whole model computes with the adapter in slot 0."""
    if model.group is not None:  # a rank cannot hold its part twice, so weights are packed after the checks of them
        if model.lora:
            model.lora.switch(False)
        model.only_panels = weight_quantization.pack_in_place(model.module)
        model.use_paged_attention()
    say(f"step: {traced_forward.install(model)}")
    if model.group is not None:
        say(f"as served, {cut_check.check_served(model, whole)}")
        if model.lora:
            say(f"as served with an adapter, {cut_check.check_served(model, with_adapter, slot=0)}")
    if model.lora:
        model.lora.clear()
    module_loader.return_memory()
    if model.group is None:
        return model
    facts = [replace(fact, held=fact.held and replace(fact.held, first=0)) for fact in model.facts]
    same = (model.fingerprint, model.kernels, model.sum_order, model.parameters, model.recorded is None, facts)
    model.group.agree(xxhash.xxh3_128(repr(same).encode()).digest(), "model")
    return model


def _learn(
    module: PreTrainedModel,
    max_model_len: int,
    group: RankGroup | None,
    whole: Whole | None,
    say: Callable[[str], None],
    adapters: bool,
    operators: bool,
    kv_dtype: KvDtype,
) -> Learnt:
    """Learns the required content of pages and slots, for this rank's part if there are several; `operators`: with
    Tandem's operators for recurrences on this device. Raises SettingsError for settings that are not served with
    recurrent layers or sparse indexers."""
    if group is not None:
        say(cut_check.check(module, whole, group))
    latent = mla.use_latent_pages(module)
    learnt = attention_probe.learn_facts(module, operators and recurrences.available(module.device))
    say(f"{len(learnt.calls)} attention calls{f', {latent} with latent pages' if latent else ''}")
    check_windows(module.config, reaches(learnt.calls), max_model_len)
    for layers, indexed in ((learnt.mixers, False), (learnt.indexers, True)):
        if layers:
            say(str(layers))
            _check_settings(module, indexed, module.device, kv_dtype, group, adapters)
    return learnt


def _check_settings(
    module: PreTrainedModel,
    indexed: bool,
    device: torch.device,
    kv_dtype: KvDtype,
    group: RankGroup | None,
    adapters: bool,
) -> None:
    """Raises SettingsError for settings that are not served with sparse indexers or, if not `indexed`, with recurrent
    layers."""
    has = "sparse indexers" if indexed else "recurrent layers"
    for asked, field, value, bound in (
        (device.type != "cpu" and indexed, "device", f"a device of type {device.type}", "cpu"),
        (kv_dtype != "auto" and indexed, "kv_dtype", f"KV in {kv_dtype}", "auto"),
        (group is not None, "tp", "several ranks", "1"),
        (adapters, "adapters", "adapters", "none"),
    ):
        if asked:
            what = f"{type(module).__name__} has {has}, with which {value} cannot be served yet"
            raise SettingsError(what, field=field, bound=f"{bound} for this model")


def _prepare(model: ModelRunner, cache: WeightCache | None, say: Callable[[str], None], *, cuda: bool) -> None:
    """Prepares operators (those of a GPU with `cuda`), and proves that they serve exactly."""
    say(f"operators: {described(model.kernels, model.sum_order)}")
    if model.group is not None:
        modules.find_norms(model.module)
        say(f"self-check passed: {self_check.check(model)}")
        return
    if model.kernels != REFERENCE:
        say(modules.prepare(model.module, cache))
    if cuda:
        say(f"attention: {model.choose_attention()}")
        say(f"products: {model.choose_products()}")
    say(f"self-check passed: {self_check.check(model)}")


def _checked_config(
    folder: Path, max_model_len: int | None, weights: str, group: RankGroup | None
) -> tuple[PreTrainedConfig, int, str | None]:
    """The checkpoint's config, the longest sequence, and the quantisation method, if any."""
    config = module_loader.read_config(folder)
    max_len = max_length(config, max_model_len)
    check_positions(config, max_len)
    method = quantized_checkpoint.check(config)
    if method is not None and weights != CHECKPOINT:
        raise SettingsError(f"the checkpoint is quantised already, by {method}", field="weights", bound=CHECKPOINT)
    if group is not None:
        check_plan(config, group.size)
        if method == quantized_checkpoint.METHOD:
            raise CheckpointRefused(
                f"a checkpoint that is quantised by {method} is read whole by its library: serve it by one rank, or one"
                f" of {', '.join(packing_scheme.METHODS)}, or the original one with weights = int8, int4 or fp8"
            )
    return config, max_len, method


def _packer(device: torch.device, served_by: str) -> Packer | None:
    """The packer of codes for this device; None if the device has no products over codes."""
    if served_by != REFERENCE:
        return weight_quantization.PANELS
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from engine.gpu import codes  # torch for CUDA brings Triton, the one for CPU does not

    return codes.packer(device)


def _format(weights: str, dtype: torch.dtype, device: torch.device, packer: Packer | None) -> str | None:
    """The format to which products are rounded, None if they stay as they are. Raises SettingsError for one that is not
    served here."""
    if weights == CHECKPOINT or (weights == "bf16" and dtype == torch.bfloat16):
        return None
    if packer is None:
        raise SettingsError(
            f"weights = {weights} needs the compiled operators, which serve on CPU when they have been built"
            " (`python -m engine.kernels.build`), or Triton on CUDA",
            field="weights",
            bound=CHECKPOINT,
        )
    if weights == "bf16" and device.type == "cuda":
        raise SettingsError(
            "weights = bf16 is not served on CUDA; set dtype", field="weights", bound="dtype = bfloat16"
        )
    return weights


def _of_rounded(fingerprint: str, format: str | None, *, with_experts: bool) -> str:
    """The fingerprint of the weights as served."""
    return "-".join((fingerprint, *([format] if format else []), *(["experts"] if with_experts else [])))


def _rounds_experts(module: PreTrainedModel, format: str | None, part: RankGroup | Cut | None) -> bool:
    """Whether a mixture's experts are among the rounded products: with one rank."""
    return format is not None and part is None and any(True for _ in experts.found(module))


def _quantise(module: PreTrainedModel, format: str, packer: Packer | None, own: Cut | None = None) -> str:
    """Rounds the products' weights to a format, and drops the originals; returns a line about the saved memory. `own`:
    of a rank's part, whose codes become those of the whole model."""
    before = weight_quantization.bytes_in(module)
    count = weight_quantization.apply(
        module,
        format,
        packer,
        own.largest_of if own else lambda _: None,
        with_experts=_rounds_experts(module, format, own),
    )
    after = weight_quantization.bytes_in(module)
    return f"weights: {count} products in {format}, {before / 2**20:.0f} MiB are now {after / 2**20:.0f}"
