"""Reads a checkpoint's files as transformers' module: whole, or one rank's part of it. What it serves is decided later
(engine/loading/model_loader.py)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging
from transformers.utils.import_utils import is_peft_available

from engine.kernels import weight_quantization
from engine.loading import checkpoint, cut_check, part_loader, quantized_checkpoint
from engine.loading.cut_check import Whole
from engine.loading.gptq_awq_fp8 import Weights
from engine.parallel.rank_group import RankGroup
from engine.parallel.weight_cut import Cut, cut
from tandem.checkpoint import ADAPTER_CONFIG
from tandem.errors import CheckpointRefused

# What transformers raises for a config that it does not take; the last one has its reason as the cause.
BAD_CONFIG = (ValueError, KeyError, TypeError, AttributeError, OSError, ArithmeticError, StrictDataclassError)


def read_config(folder: Path) -> PreTrainedConfig:
    """Raises CheckpointRefused if transformers cannot read it."""
    try:
        with _quiet():
            config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            config.return_dict = config.get_text_config().return_dict = True  # what is read of a forward has names
            return config
    except BAD_CONFIG as error:
        reason = str(error.__cause__ if isinstance(error, StrictDataclassError) else error).strip().split("\n")[0]
        raise CheckpointRefused(f"transformers cannot read {folder / 'config.json'}: {reason}") from error


@dataclass(frozen=True)
class Source:
    """A checkpoint that is to be computed with in a dtype. `packed` are its tensors where transformers does not unpack
    them (quantized_checkpoint.read)."""

    folder: Path
    files: list[Path]
    config: PreTrainedConfig
    dtype: torch.dtype
    packed: Weights | None


def load_whole(source: Source) -> PreTrainedModel:
    folder, config, dtype, packed = source.folder, source.config, source.dtype, source.packed
    with _loading(folder, config):
        options = {"dtype": dtype, "attn_implementation": "eager", "output_loading_info": True}
        if packed is None:
            _check_adapter(folder)
            auto: Any = AutoModelForCausalLM  # transformers' factories are not typed
            module, report = auto.from_pretrained(
                folder, config=config, trust_remote_code=False, use_safetensors=True, **options
            )
        else:
            shapes: Any = _shapes(config, dtype)
            module, report = type(shapes).from_pretrained(
                None, config=shapes.config, state_dict=packed.tensors, **options
            )
            _add_generation(module, folder)
    _check_report(source, module, report)
    whole: PreTrainedModel = module.eval()
    return whole


class RankPart(NamedTuple):
    """The part of one rank, which meets the others in its forward, and its cut. Rank 0 has the logits of the whole
    model, with products in the format to which the caller rounds the part, and can have the whole `again`."""

    module: PreTrainedModel
    cut: Cut
    expected: Whole | None
    again: Callable[[], AbstractContextManager[PreTrainedModel]] | None


def load_part(source: Source, group: RankGroup, format: str | None, say: Callable[[str], None]) -> RankPart:
    expected: Whole | None = None

    def rounded(model: PreTrainedModel) -> AbstractContextManager[None]:
        return weight_quantization.rounding(model, format) if format else nullcontext()

    @contextmanager
    def whole() -> Iterator[PreTrainedModel]:
        by_layers = weights.strange is None
        with part_loader.streamed(shapes, weights, module) if by_layers else nullcontext(load_whole(source)) as model:
            with rounded(model):
                yield model

    with _loading(source.folder, source.config):
        shapes = _shapes(source.config, source.dtype)
        own = cut(shapes, group)
        if format:
            own.check_groups(shapes, format)
        weights = part_loader.WeightFiles(source.files, shapes, source.packed)
        if weights.strange is None:
            module, report = part_loader.load(shapes, weights, own, source.dtype)
            _add_generation(module, source.folder)
            _check_report(source, module, report)
            if group.rank == 0:
                with whole() as model:
                    expected = cut_check.whole(model)
    if weights.strange is not None:
        say(f"{weights.strange} is made of tensors in a way that is only known of the whole model: each rank reads all")
        with group.in_turn():  # only one rank holds the whole model at a time
            module = load_whole(source)
            if group.rank == 0:
                with rounded(module):
                    expected = cut_check.whole(module)
            own.take(module)
            return_memory()
    own.attach(module)
    served: Any = module
    left, all_of_it = (sum(each.numel() for each in model.parameters()) / 1e6 for model in (module, shapes))
    say(f"rank {group.rank} of {group.size} has {left:.1f} of {all_of_it:.1f} million parameters")
    return RankPart(served.eval(), own, expected, whole if group.rank == 0 else None)


def part_shapes(
    folder: Path, config: PreTrainedConfig, files: Mapping[str, tuple[int, ...]], ranks: int
) -> dict[str, tuple[int, ...]]:
    """The shapes of what one of `ranks` has of each tensor of the files, by their shapes; no weight is read. Raises
    CheckpointRefused with the reason where the model cannot be cut."""
    group: Any = SimpleNamespace(rank=0, size=ranks)  # all ranks have parts of the same shapes
    with _loading(folder, config):
        model = _shapes(config, torch.float32)
        own = cut(model, group)
        parameters = part_loader.parameters_of(files, model)
    found = dict(files)
    for name, parameter in parameters.items():
        if (part := own.parts.get(parameter)) is not None:
            whole, size = own.shapes[parameter], list(files[name])
            at = part.dim - len(whole)  # from the end: of several experts' tensors the model makes one
            size[at] = size[at] * sum(length for _, length in part.stretches) // whole[at]
            found[name] = tuple(size)
    return found


def _shapes(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model without weights. transformers' factory accepts no tensors, but the class that it finds does."""
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        made: Any = auto.from_config(config, trust_remote_code=False, dtype=dtype, attn_implementation="eager")
    model: PreTrainedModel = made.eval()
    return model


def _add_generation(module: PreTrainedModel, folder: Path) -> None:
    if (folder / "generation_config.json").is_file():
        module.generation_config = GenerationConfig.from_pretrained(folder)


def return_memory() -> None:
    """Returns freed memory to the system. Memory that loading and checking freed, as much as the model's size, stays in
    glibc's heap until glibc is asked; likewise torch's reserved GPU memory, which the KV pool would lack."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def _loading(folder: Path, config: PreTrainedConfig) -> Iterator[None]:
    """Turns errors of transformers into CheckpointRefused."""
    if config.is_encoder_decoder:
        raise CheckpointRefused(f"{config.model_type} is an encoder-decoder model; only decoders can be served")
    try:
        with _quiet():
            yield
    except (*BAD_CONFIG, ImportError, RuntimeError, AssertionError) as error:
        reason = str(error).strip().split("\n")[0]
        raise CheckpointRefused(f"transformers cannot load {folder} as a causal language model: {reason}") from error


def _check_adapter(folder: Path) -> None:
    """Raises CheckpointRefused if transformers would add an adapter in the checkpoint's folder to the weights: it does
    where peft is installed, and the fingerprint covers no adapter."""
    if (folder / ADAPTER_CONFIG).is_file() and is_peft_available():
        raise CheckpointRefused(
            f"{folder} has {ADAPTER_CONFIG} beside the model's own weights, and where peft is installed, as here,"
            " transformers adds that adapter to them; uninstall peft to serve the weights alone, or move the adapter"
            " to a folder of its own, which the setting adapters can name"
        )


def _check_report(source: Source, module: PreTrainedModel, report: dict[str, Any]) -> None:
    """Raises CheckpointRefused for what transformers would fill with random numbers, and for what is left over."""
    for problem in ("missing_keys", "mismatched_keys"):
        names = sorted(map(str, report.get(problem) or ()))
        if names:
            raise CheckpointRefused(
                f"{source.folder} does not fit its config: {len(names)} {problem.replace('_', ' ')}, such as {names[0]}"
            )
    unexpected = sorted(map(str, report.get("unexpected_keys") or ()))
    quantized_checkpoint.check_keys(unexpected, source.packed)
    if source.packed is None:
        checkpoint.check_unused(source.files, module, unexpected)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps transformers' progress bars and warnings off the terminal while loading; errors still appear."""
    noise: Any = transformers_logging  # not typed
    verbosity, bars = noise.get_verbosity(), noise.is_progress_bar_enabled()
    noise.set_verbosity_error()
    noise.disable_progress_bar()
    try:
        yield
    finally:
        noise.set_verbosity(verbosity)
        if bars:
            noise.enable_progress_bar()
