"""One model on one device: runs packed forwards over KV pages.

    forward(pages, batch) ─▶ logits of the packed tokens in batch.logits_at

engine/loading/model_loader.py makes it. One forward runs at a time in a thread, and the model is switched between
attention implementations only while it is loaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from engine.attention import implementation, mla, paged
from engine.attention.forward_context import BASE, Batch, CudaKernel, Step, running
from engine.core.kv_layout import KvLayout
from engine.gpu import block_digest, layers
from engine.gpu.attention import kernel_choice
from engine.kernels import PLAIN, REFERENCE, exact, modules, weight_quantization
from engine.kernels.experts import stacks
from engine.kv.kv_cache import KvCache, layout_of
from engine.kv.kv_cache_spec import CallFacts
from engine.kv.kv_quantization import element_dtype
from engine.parallel.leader import Ranks
from engine.parallel.rank_group import RankGroup
from engine.runner.indexers import Indexers, given_mask
from engine.runner.lora import Adapter, Lora, sent
from engine.runner.mixers import Mixers
from tandem.errors import Unavailable

CHECKPOINT = "checkpoint"  # weights as the checkpoint has them, in the model's dtype

KvDtype = Literal["auto", "int8", "fp8"]

# (step, indices of the packed tokens whose logits are wanted) -> logits; writes the pages
RecordedForward = Callable[[Step, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """How a module is served. `fingerprint` is equal in two processes that serve the same weights."""

    max_model_len: int
    fingerprint: str
    dtype: torch.dtype
    device: torch.device
    block_size: int = 16
    kernels: str = REFERENCE  # the level of the compiled operators that serve it, or "reference"
    sum_order: str = PLAIN  # processes with equal values compute equal bits (engine.kernels)
    kv_dtype: KvDtype = "auto"
    weights: str = CHECKPOINT  # or the format that their products have
    group: RankGroup | None = None  # if this is one rank of several


class ModelRunner:
    """A model on its device. engine.loading.model_loader.load_model makes one that has been checked.

    `facts` has one record per attention call.
    """

    def __init__(self, module: PreTrainedModel, facts: tuple[CallFacts, ...], served: RunnerConfig) -> None:
        config = module.config.get_text_config()
        parameters = list(module.parameters())
        accepted = inspect.signature(module.forward).parameters
        self.module = module
        self.facts = facts
        self.config: PreTrainedConfig = module.config
        self.vocab_size: int = config.vocab_size
        self.max_model_len = served.max_model_len
        self.eos_token_ids = _eos_token_ids(module)
        self.dtype, self.device = served.dtype, served.device
        self.fingerprint = served.fingerprint
        self.block_size, self.kv_dtype = served.block_size, served.kv_dtype
        self.kernels, self.sum_order = served.kernels, served.sum_order
        self.parameters = sum(parameter.numel() for parameter in parameters)
        self.only_panels = 0  # bytes of this rank's weights that exist only as packed copies
        self.weights = served.weights
        self.cuda_kernel: CudaKernel | None = None  # set by `choose_attention`: attends on CUDA
        self.cuda_products = False  # Triton's products serve, on CUDA
        self.recorded: RecordedForward | None = None  # set by engine.runner.traced_forward.install
        self.lora: Lora | None = None  # set by engine.loading.lora_attachment, if there are adapters
        self.mixers: Mixers | None = None  # set by engine.loading.model_loader, if there are recurrent layers
        self.indexers: Indexers | None = None  # likewise, if there are sparse indexers
        self.group = served.group
        self.ranks: Ranks | None = None  # set by engine.builder on rank 0: the others, which follow
        self.latent = any(
            call.latent for call in facts
        )  # where no kernel absorbs that, each step expands the whole context
        self._keeps_logits = "logits_to_keep" in accepted
        # A forward without **kwargs cannot carry `step=`; the attention function then asks for the thread's step.
        self._passes_step = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights as served, of all ranks, without second copies that are packed for speed."""
        return (weight_quantization.bytes_in(self.module) + self.only_panels) * self.size

    @property
    def step_bytes(self) -> int:
        """The weight bytes that a step of one sequence reads: without an embedding that is only looked up, and without
        the experts that are not chosen."""
        module: Any = self.module  # transformers' accessors are not typed
        table: torch.Tensor = module.get_input_embeddings().weight
        head = getattr(module.get_output_embeddings(), "weight", None)
        chosen = getattr(self.config.get_text_config(), "num_experts_per_tok", None)
        idle = sum(each.nbytes - each.nbytes * (chosen or each.count) // each.count for each in stacks(self.module))
        return self.weight_bytes - (idle + (0 if head is table else table.nbytes)) * self.size

    @property
    def is_mixture(self) -> bool:
        """Whether a token chooses experts: a rounding may make it choose others."""
        return getattr(self.config.get_text_config(), "num_experts_per_tok", None) is not None

    @property
    def draws_compiled(self) -> bool:
        """Whether the compiled operator chooses tokens (`compiled` of engine/decoding/sampler.py): on CPU where the
        other operators serve; on CUDA the kernel's own trial decides, since no level of operators serves there."""
        return self.device.type == "cuda" or self.kernels != REFERENCE

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.group.size if self.group else 1

    @property
    def mapped_bytes(self) -> int:
        """Bytes that steps read from mapped files, which the host counts as free memory."""
        return modules.mapped_bytes(self.module) if self.device.type == "cpu" else 0

    def allocate(self, num_blocks: int, block_size: int | None = None, slots: int = 1) -> KvCache:
        """Zeroed pages for `num_blocks` blocks of `block_size` tokens (the model's default if None), with so many slots
        for the states of recurrent layers, if the model has some."""
        layout = self.layout(block_size)
        memory = self.ranks.share_pages(num_blocks, layout) if self.ranks else None
        pages = KvCache(layout, num_blocks, self.device, slots, self.facts, memory)
        if self.ranks:
            self.ranks.know(pages)
        return pages

    def block_bytes(self, block_size: int | None = None) -> int:
        """Bytes of one block of `block_size` tokens, padding included."""
        return self.layout(block_size).block_bytes

    def layout(self, block_size: int | None = None) -> KvLayout:
        """The layout of its blocks of `block_size` tokens, with the KV heads of the whole model."""
        kept, digest = element_dtype(self.kv_dtype), block_digest.kind(self.device)
        states = self.mixers.facts if self.mixers else None
        size, keys = block_size or self.block_size, self.indexers.dims if self.indexers else ()
        return layout_of(self.facts, size, self.dtype, self.fingerprint, kept, digest, states, keys)

    def forward(self, pages: KvCache, batch: Batch) -> torch.Tensor:
        """One packed forward: writes the new tokens' KV into `pages`, returns the logits asked for. New states of
        recurrent layers wait for `pages.states.commit`.

        Returns float32 `[len(batch.logits_at), vocab_size]`, in the order of `logits_at`. With several ranks, rank 0
        makes the others run it, too, and returns when all have; it raises Unavailable if one is lost.
        """
        with self.on_all_ranks(pages, batch):
            step = self.step(pages, batch)
            return self.run(step, step.tensor(batch.logits_at)).float()

    @contextmanager
    def on_all_ranks(self, pages: KvCache, batch: Batch, captured: bool = False) -> Iterator[None]:
        """Runs a step inside; rank 0 makes the others run it, too, `captured` or not. Ends when all have written their
        KV."""
        marks = self.lora.marks(batch) if self.ranks and self.lora else []
        with self.ranks.together(pages, batch, captured, marks) if self.ranks else nullcontext():
            yield
            if self.group is not None:
                self.group.end_step()

    def put_adapter(self, slot: int, adapter: Adapter) -> None:
        """Puts an adapter into a slot that no sequence uses, between two steps. Rank 0 makes other ranks do it too.
        If one cannot, the slot is empty on all of them, and this raises Unavailable."""
        assert self.lora is not None, "a model without adapters"
        if self.group is None:
            self.lora.put(slot, adapter)
            return
        why: Exception | None = None
        with self.ranks.fill(slot, *sent(adapter)) if self.ranks else nullcontext():
            try:
                self.lora.put(slot, adapter)
            except Exception as error:  # noqa: BLE001 - the other ranks wait to hear of it
                why = error
            everywhere = self.group.all_say(why is None)
        if not everywhere:
            self.lora.empty(slot)
            what = f"adapter {adapter.name} was put into no slot: {why or 'another rank of this worker could not'}"
            raise Unavailable(what, reason="RANK_WITHOUT_ADAPTER") from why

    def run(self, step: Step, wanted: torch.Tensor) -> torch.Tensor:
        """Logits `[len(wanted), vocab_size]` after the packed tokens `wanted`, by the recording if there is one."""
        with torch.inference_mode(), self.exact():
            if self.recorded is not None and step.facts is self.facts:
                return self.recorded(step, wanted)
            return self.by_modules(step, wanted)

    def step(self, pages: KvCache, batch: Batch) -> Step:
        """The tensors of one forward."""
        step = Step(
            batch, pages, self.facts, self.device, compiled=self.kernels != REFERENCE, cuda_kernel=self.cuda_kernel
        )
        if self.lora is not None:
            step.lora = self.lora.rows(batch)
        assert self.lora is not None or all(slot == BASE for slot in batch.adapters), "a model without adapters"
        return step

    def by_modules(self, step: Step, wanted: torch.Tensor) -> torch.Tensor:
        """The forward as transformers has it: logits `[len(wanted), vocab_size]` after the packed tokens `wanted`."""
        extra: dict[str, Any] = {"step": step} if self._passes_step else {}
        if self.indexers is not None:
            extra["attention_mask"] = given_mask(self.device)
        if self._keeps_logits:
            extra["logits_to_keep"] = wanted
        if self.mixers is not None:
            assert step.pages.states is not None, "pages without slots for the states of recurrent layers"
            step.pages.states.begin()
        with running(step):
            out = self.module(input_ids=step.input_ids, position_ids=step.position_ids, use_cache=False, **extra)
        assert step.calls == len(self.facts), f"{step.calls} attention calls where the probe saw {len(self.facts)}"
        logits: torch.Tensor = out.logits[0]
        return logits if self._keeps_logits else logits[wanted]

    def close(self) -> None:
        """Ends the other ranks, if there are any. Nothing may be forwarded afterwards."""
        if self.ranks is not None:
            self.ranks.close()

    def choose_attention(self) -> str:
        """Tries the CUDA kernel for attention over pages; returns a line about it."""
        kept, absorbed = element_dtype(self.kv_dtype), mla.find_products(self.module, self.facts)
        self.cuda_kernel, line = kernel_choice.choose(
            self.facts, self.dtype, self.block_size, self.device, self.max_model_len, kept, absorbed
        )
        return line

    def choose_products(self) -> str:
        """Uses Triton's products and norms if they pass the trial on the device; returns a line about it."""
        line = layers.prepare(self.module, self.device)
        self.cuda_products = line.startswith(layers.NAME)
        return line

    def unrecordable_on_cuda(self) -> str | None:
        """Why the forward runs by modules there; None if it can be recorded, empty on other devices."""
        attends = self.cuda_kernel is not None or not self.facts
        if not attends or not self.cuda_products:
            return "Triton's attention and products do not both serve" if self.device.type == "cuda" else ""
        kept = element_dtype(self.kv_dtype) or self.dtype
        kernel: Any = self.cuda_kernel  # there is one where there are calls
        refused = {kernel.refusal(fact, kept) for fact in self.facts} - {None}
        if refused:
            return f"attention by the reference plans each step on the host ({'; '.join(sorted(map(str, refused)))})"
        return "adapters take the rows of a step apart" if self.lora is not None else None

    def exact(self) -> AbstractContextManager[None]:
        return exact(self.device) if self.kernels != REFERENCE else nullcontext()

    def use_paged_attention(self) -> None:
        """Switches to the paged path; the state in which the model serves."""
        self._switch(paged.NAME, True)

    def use_eager_attention(self, name: str = "eager") -> None:
        """Switches to transformers' unmodified forward, the reference of the self-check.

        `name` may be that of `engine.attention.stored_kv`, which uses the K and V of the pages.
        """
        self._switch(name, False)

    def _switch(self, attention: str, on: bool) -> None:
        """`on`: with Tandem's own modules."""
        if self.lora is not None:  # while the modules change
            self.lora.switch(False)
        implementation.switch(self.module, attention)
        modules.switch(self.module, on)
        weight_quantization.switch(self.module, on=on)
        if self.mixers is not None:
            self.mixers.switch(on)
        if self.indexers is not None:
            self.indexers.switch(on)
        if self.lora is not None:
            self.lora.switch(on)


def _eos_token_ids(module: PreTrainedModel) -> tuple[int, ...]:
    """Without what is no token: some configs say -1 for none."""
    config = module.config.get_text_config()
    ids = getattr(module.generation_config, "eos_token_id", None)
    if ids is None:
        ids = getattr(config, "eos_token_id", None)
    each = ids if isinstance(ids, list | tuple) else () if ids is None else (ids,)
    return tuple(token for token in map(int, each) if 0 <= token < config.vocab_size)
