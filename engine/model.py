"""One model on one device: loads it, refuses it if it would be wrong, and runs packed forwards over KV pages.

    Model.load(path) ─▶ folder complete? ─▶ load, eager ─▶ latent pages ─▶ probe ─▶ self-check ─▶ `paged_kv`, for good
    model.forward(pages, batch) ─▶ logits of the packed tokens that were asked for

One forward runs at a time in a thread, and the model is switched once, at load.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from engine import attention, flat, foreign, lora, mla, probe, selfcheck, varlen
from engine import weights as files_on_disk
from engine.facts import CallFacts, describe
from engine.kernels import PLAIN, REFERENCE, described, exact, lowbit, modules, serving, sum_order
from engine.packed import Weights
from engine.pages import Pages, block_bytes, layout_of
from engine.quantised import element_dtype
from engine.rope import check_positions, max_length
from engine.step import Batch, Step, running
from engine.weight_cache import WeightCache
from tandem.errors import CheckpointRefused, SettingsError

GENERATION = "generation_config.json"
CHECKPOINT = "checkpoint"  # weights as the checkpoint has them, in the model's dtype

log = logging.getLogger(__name__)

KvDtype = Literal["auto", "int8", "fp8"]


class Model:
    """A loaded and checked model. Make one with `Model.load`.

    `facts` has one record per attention call; `fingerprint` is equal in two processes that serve the same weights.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        facts: tuple[CallFacts, ...],
        *,
        max_model_len: int,
        fingerprint: str,
        dtype: torch.dtype,
        device: torch.device,
        block_size: int = 16,
        kernels: str = REFERENCE,
        sum_order: str = PLAIN,
        kv_dtype: KvDtype = "auto",
    ) -> None:
        config = module.config.get_text_config()
        parameters = list(module.parameters())
        accepted = inspect.signature(module.forward).parameters
        self.module = module
        self.facts = facts
        self.config: PreTrainedConfig = module.config
        self.vocab_size: int = config.vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = _eos_token_ids(module)
        self.dtype = dtype
        self.device = device
        self.fingerprint = fingerprint
        self.block_size = block_size
        self.kv_dtype = kv_dtype
        self.kernels = kernels  # the level of the compiled operators that serve it, or "reference"
        self.sum_order = sum_order  # where it is equal in two processes, bits are (engine.kernels)
        self.parameters = sum(parameter.numel() for parameter in parameters)
        self.weights = CHECKPOINT  # or the format that their products have
        self.varlen: varlen.Kernel | None = None  # set by `choose_attention`: attends on CUDA
        self.recorded: flat.Replay | None = None  # set by `record`
        self.check: selfcheck.Report | None = None  # set by load: what the self-check measured
        self.lora: lora.Lora | None = None  # set by load, if there are adapters
        self._keeps_logits = "logits_to_keep" in accepted
        # A forward without **kwargs cannot carry `step=`; the attention function then asks for the thread's step.
        self._passes_step = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())

    @classmethod
    def load(
        cls,
        path: str,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int | None = None,
        block_size: int = 16,
        kernels: Literal["auto", "reference"] = "auto",
        adapters: Mapping[str, str | Path] | None = None,
        adapter_slots: int = 8,
        weights: str = CHECKPOINT,
        kv_dtype: KvDtype = "auto",
        cache: WeightCache | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> Model:
        """Loads a checkpoint folder (or hub id) and proves that it can be served from pages.

        `max_model_len` limits a sequence, in tokens; the config's own limit if None. `block_size` is the default of
        `allocate`. `kernels` "reference" leaves the compiled operators out. `adapters` are LoRA folders by name,
        of which `adapter_slots` are in the model at a time (engine.lora). `weights` is the format that products are
        rounded to (engine/formats.py). `kv_dtype` is what pages keep K and V in, "auto" for `dtype`
        (engine/quantised.py has the others). `cache` keeps packed weights for other workers and the next start; without
        one they are in memory of this process. `progress` receives a line for each stage that is over.
        Raises CheckpointRefused with one sentence that says what is wrong, SettingsError for a `max_model_len` beyond
        the config's and for `weights` that cannot be here.
        """
        say = progress if progress is not None else log.info
        folder = files_on_disk.resolve(path)
        files = files_on_disk.check_folder(folder)
        config = _read_config(folder)
        limit = max_length(config, max_model_len)
        check_positions(config, limit)
        method = foreign.check(config)
        if method is not None and weights != CHECKPOINT:
            raise SettingsError(f"the checkpoint is quantised already, by {method}", field="weights", bound=CHECKPOINT)
        fingerprint = files_on_disk.fingerprint(folder, files)
        say(f"fingerprint of {len(files)} weight files")
        packed = foreign.read(files, config)
        module = _load_module(folder, config, packed, dtype, device)
        say(f"{config.model_type} loaded from {folder}")
        served_by = serving(device) if kernels == "auto" else REFERENCE
        if method is not None:
            say(foreign.adopt(module, served_by != REFERENCE, packed))
        del packed
        latent = mla.use_latent_pages(module)
        facts = probe.learn_facts(module)
        say(f"{len(facts)} attention calls{f', {latent} with latent pages' if latent else ''}")
        model = cls(
            module,
            facts,
            max_model_len=limit,
            fingerprint=fingerprint,
            dtype=dtype,
            device=device,
            block_size=block_size,
            kernels=served_by,
            sum_order=PLAIN if served_by == REFERENCE else sum_order(device, dtype),
            kv_dtype=kv_dtype,
        )
        say(f"operators: {described(model.kernels, model.sum_order)}")
        if method is not None:
            model.weights = method
        if weights != CHECKPOINT:
            say(model.quantise(weights))
        if model.kernels != REFERENCE:
            say(modules.prepare(module, cache))
        if device.type == "cuda" and kernels == "auto":
            say(f"attention: {model.choose_attention()}")
        model.check = model.self_check()
        say(f"self-check passed: {model.check}")
        if adapters:
            model.lora = lora.attach(model, adapters, adapter_slots)
            say(f"{len(adapters)} adapters in {len(model.lora.slots)} slots: self-check passed: {model.lora.check()}")
        say(f"step: {model.record()}")
        if model.lora:
            model.lora.clear()
        return model

    def quantise(self, format: str) -> str:
        """Rounds the products' weights to a format, and drops what they were; says what that saved.

        The fingerprint changes with it: KV of other weights is other KV.
        """
        if format == "bf16" and self.dtype == torch.bfloat16:
            return "weights: bf16, as they are"
        if self.kernels == REFERENCE:
            raise SettingsError(
                f"weights = {format} needs the compiled operators, which serve on CPU when they have been built"
                " (`python -m engine.kernels.build`)",
                field="weights",
                bound=CHECKPOINT,
            )
        before = self.weight_bytes
        count = lowbit.apply(self.module, format)
        self.weights, self.fingerprint = format, f"{self.fingerprint}-{format}"
        return (
            f"weights: {count} products in {format}, {before / 2**20:.0f} MiB are now {self.weight_bytes / 2**20:.0f}"
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as they are served; what is packed a second time for speed is not counted."""
        own = sum(each.nbytes for each in self.module.parameters() if not lowbit.is_nothing(each))
        return own + sum(codes.nbytes for codes in lowbit.codes_in(self.module))

    @property
    def step_bytes(self) -> int:
        """Which of them every step reads: not an embedding that is only looked up."""
        module: Any = self.module  # transformers' accessors are not typed
        table: torch.Tensor = module.get_input_embeddings().weight
        head = getattr(module.get_output_embeddings(), "weight", None)
        return self.weight_bytes - (0 if head is table else table.nbytes)

    @property
    def mapped_bytes(self) -> int:
        """Bytes that steps read from mapped files, which the host counts as free memory."""
        return modules.mapped_bytes(self.module) if self.device.type == "cpu" else 0

    def self_check(self) -> selfcheck.Report:
        """Compares the paged path with plain eager attention on random prompts; leaves the model on the paged path.

        Raises CheckpointRefused with the gap and the facts if they differ (engine.selfcheck says how it is measured).
        """
        recorded, self.recorded = self.recorded, None  # it holds the weights fast that the check may put away
        try:
            report = selfcheck.run(self)
        finally:
            self.recorded = recorded
        if not report.passed:
            raise CheckpointRefused(
                f"the self-check of {type(self.module).__name__} failed: paged logits differ from eager ones "
                f"({report}); its attention calls are\n{describe(self.facts)}"
            )
        return report

    def allocate(self, num_blocks: int, block_size: int | None = None) -> Pages:
        """Zeroed pages for `num_blocks` blocks of `block_size` tokens (the model's default if None)."""
        kept = element_dtype(self.kv_dtype)
        layout = layout_of(self.facts, block_size or self.block_size, self.dtype, self.fingerprint, kept)
        return Pages(layout, num_blocks, self.device)

    def block_bytes(self, block_size: int | None = None) -> int:
        """Bytes of one block of `block_size` tokens."""
        return block_bytes(self.facts, block_size or self.block_size, self.dtype, element_dtype(self.kv_dtype))

    def forward(self, pages: Pages, batch: Batch) -> torch.Tensor:
        """One packed forward: writes the new tokens' KV into `pages`, returns the logits asked for.

        Returns float32 `[len(batch.logits_at), vocab_size]`, in the order of `logits_at`.
        """
        step = self.step(pages, batch)
        return self.run(step, step.tensor(batch.logits_at)).float()

    def run(self, step: Step, wanted: torch.Tensor) -> torch.Tensor:
        """Logits `[len(wanted), vocab_size]` after the packed tokens `wanted`, by the recording if there is one."""
        if self.recorded is not None and step.compiled and step.facts is self.facts:
            return flat.run(self.recorded, step, wanted, self)
        with torch.inference_mode(), self.exact():
            return self.by_modules(step, wanted)

    def step(self, pages: Pages, batch: Batch) -> Step:
        """The tensors of one forward."""
        step = Step(batch, pages, self.facts, self.device, compiled=self.kernels != REFERENCE, varlen=self.varlen)
        if self.lora is not None:
            step.lora = self.lora.rows(batch)
        assert self.lora is not None or all(slot == lora.BASE for slot in batch.adapters), "a model without adapters"
        return step

    def by_modules(self, step: Step, wanted: torch.Tensor) -> torch.Tensor:
        """The forward as transformers has it: logits `[len(wanted), vocab_size]` after the packed tokens `wanted`."""
        extra: dict[str, Any] = {"step": step} if self._passes_step else {}
        if self._keeps_logits:
            extra["logits_to_keep"] = wanted
        with running(step):
            out = self.module(input_ids=step.input_ids, position_ids=step.position_ids, use_cache=False, **extra)
        assert step.calls == len(self.facts), f"{step.calls} attention calls where the probe saw {len(self.facts)}"
        logits: torch.Tensor = out.logits[0]
        return logits if self._keeps_logits else logits[wanted]

    def record(self) -> str:
        """Replaces the modules' Python in `forward` where that can be proven right; says what serves."""
        if self.kernels == REFERENCE:
            return "by modules"
        try:
            self.recorded = flat.record(self)
        except flat.Unrecordable as error:
            return f"by modules, because it cannot be recorded: {error}"
        return "recorded"

    def choose_attention(self) -> str:
        """Tries what CUDA has for attention over pages; says what serves."""
        if self.kv_dtype != "auto":
            return f"{REFERENCE}, because K and V are kept in {self.kv_dtype}"
        self.varlen, line = varlen.choose(self.facts, self.dtype, self.block_size, self.device)
        return line

    def exact(self) -> AbstractContextManager[None]:
        return exact(self.device) if self.kernels != REFERENCE else nullcontext()

    def use_paged_attention(self) -> None:
        """Switches to the paged path; the state in which the model serves."""
        self._without_adapters()
        probe.switch(self.module, attention.NAME)
        modules.switch(self.module, self.kernels != REFERENCE)
        lowbit.switch(self.module, on=True)
        if self.lora is not None:
            self.lora.switch(True)

    def use_eager_attention(self, name: str = "eager") -> None:
        """Switches to transformers' own forward with nothing of ours in it: what the self-check compares with.

        `name` is that of `engine.stored`, whose K and V are those that pages keep.
        """
        self._without_adapters()
        probe.switch(self.module, name)
        modules.switch(self.module, False)
        lowbit.switch(self.module, on=False)

    def _without_adapters(self) -> None:
        if self.lora is not None:
            self.lora.switch(False)


def _read_config(folder: Path) -> PreTrainedConfig:
    try:
        with _quiet():
            config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            return config
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise CheckpointRefused(f"transformers cannot read {folder / 'config.json'}: {reason}") from error


def _load_module(
    folder: Path, config: PreTrainedConfig, packed: Weights | None, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    if config.is_encoder_decoder:
        raise CheckpointRefused(f"{config.model_type} is an encoder-decoder model; only decoders can be served")
    auto: Any = AutoModelForCausalLM  # transformers' factories are not typed
    try:
        with _quiet():
            options = {"dtype": dtype, "attn_implementation": "eager", "output_loading_info": True}
            if packed is None:
                module, report = auto.from_pretrained(
                    folder, config=config, trust_remote_code=False, use_safetensors=True, **options
                )
            else:
                with torch.device("meta"):  # transformers' factory takes no tensors, and the class that it finds does
                    found = auto.from_config(config, trust_remote_code=False)
                module, report = type(found).from_pretrained(
                    None, config=found.config, state_dict=packed.tensors, **options
                )
                if (folder / GENERATION).is_file():
                    module.generation_config = GenerationConfig.from_pretrained(folder)
    except (ValueError, KeyError, TypeError, OSError, ImportError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0]
        raise CheckpointRefused(f"transformers cannot load {folder} as a causal language model: {reason}") from error
    for problem in ("missing_keys", "mismatched_keys"):
        names = sorted(map(str, report.get(problem) or ()))
        if names:  # transformers would fill these with random numbers and go on
            raise CheckpointRefused(
                f"{folder} does not fit its config: {len(names)} {problem.replace('_', ' ')}, such as {names[0]}"
            )
    foreign.check_keys(sorted(map(str, report.get("unexpected_keys") or ())), packed)
    ready: PreTrainedModel = module.to(device).eval()
    return ready


def _eos_token_ids(module: PreTrainedModel) -> tuple[int, ...]:
    found = getattr(module.generation_config, "eos_token_id", None)
    if found is None:
        found = module.config.get_text_config().eos_token_id
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list | tuple) else (int(found),)


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
