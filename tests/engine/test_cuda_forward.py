"""Steps on a GPU that torch only pretends to have: tensors with shapes and devices and without data.

They show where the host would wait for the device and where tensors of two devices meet; numbers are in other tests.
They need torch for CUDA, as PyPI has it, and no driver. torch for CPU skips them; `make test-cuda` installs the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="Triton is for Linux on x86-64 and aarch64")

from engine.attention import mla
from engine.attention.forward_context import BASE, Batch, Step
from engine.gpu import codes, layers, products, sampling_kernel
from engine.gpu.attention import page_kernel, paged_attention
from engine.gpu.attention.paged_attention import TritonAttention
from engine.kernels import modules
from engine.kv.kv_cache import KvCache
from engine.kv.kv_converter import KvConverter
from engine.loading import gptq_awq_fp8
from engine.loading.lora_attachment import Wanted, attach
from engine.loading.model_loader import load_model
from engine.runner import lora as lora_module
from engine.runner.lora import Adapter, LowRank
from engine.runner.model_runner import KvDtype, ModelRunner, RunnerConfig
from loadtest.harness.random_checkpoints import TINY, make_module
from tests.engine.conftest import two_layers
from tests.engine.test_kv_converter import layout

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="this torch is for CPU")

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
BLOCK_SIZE, BLOCKS, LONGEST = 16, 16, 512
EXPANDED = mla.Expanded(16, 20)  # of the tiny models with latents
STEPS = {  # (done, new) of each sequence
    "a prompt": [(0, 21)],
    "single tokens": [(17, 1), (300, 1), (0, 1)],
    "both": [(0, 7), (40, 9), (33, 1), (35, 1), (5, 1)],
}


class Waits(TorchDispatchMode):
    """Notes copies between device and host for which the host waits: all to the host, and to the device those that are
    not put in the queue, such as indices of the host into a tensor of the device, or that are not from pinned memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self._lists = Lists(self.seen)

    def __enter__(self) -> Waits:
        super().__enter__()
        self._lists.__enter__()
        return self

    def __exit__(self, *given: Any) -> None:
        self._lists.__exit__(*given)
        super().__exit__(*given)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operator(*args, **(kwargs or {}))
        names = (one.name for one in operator._schema.arguments)
        given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        into, source = (given["self"], given["src"]) if "src" in given else (out, given.get("self"))
        copies = isinstance(into, torch.Tensor) and isinstance(source, torch.Tensor) and into.device != source.device
        if copies and (into.device.type == "cpu" or not given.get("non_blocking")):
            self.seen.append(f"{operator} from {source.device} to {into.device}")
        elif copies and source.device.type == "cpu" and not getattr(source, "pinned", False):
            self.seen.append(f"{operator} from memory that is not pinned")
        listed = given.get("indices")  # of `tensor[...]`; an embedding's are one tensor
        indices = [one for one in listed if isinstance(one, torch.Tensor)] if isinstance(listed, list | tuple) else []
        if indices and given["self"].device.type != "cpu" and any(one.device.type == "cpu" for one in indices):
            self.seen.append(f"{operator} of {given['self'].device} by indices of the host")
        return out


class Lists(TorchFunctionMode):
    """Notes lists as indices into a tensor of the device: torch copies them there before any operator is called."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and args[0].device.type != "cpu":
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(one, list | range | np.ndarray) for one in parts):
                self.seen.append(f"{function.__name__} of {args[0].device} by indices of the host")
        return function(*args, **(kwargs or {}))


class Launch:
    """Stands for a kernel: `kernel[grid](tensors, ...)`. All its tensors must be on the device."""

    def __init__(self) -> None:
        self.launched = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(size > 0 for size in grid)
        return self._launch

    def _launch(self, *given: Any, **fixed: Any) -> None:
        self.launched += 1
        assert {one.device for one in given if isinstance(one, torch.Tensor)} == {GPU}


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Launch]]:
    """Everything made inside is without data; `cuda` is a device. What only a driver can do is left out."""
    names = ("attend", "merge", "write_heads", "choose_tokens", "linear", "each_head", "rms_norm")
    launches = {name: Launch() for name in names}
    tensor = torch.tensor
    inference_mode = torch.inference_mode

    def of_list(*given: Any, pin_memory: bool = False, **more: Any) -> Any:
        made: Any = tensor(*given, **more)
        made.pinned = pin_memory
        return made

    monkeypatch.setattr(paged_attention, "attend", launches["attend"])
    monkeypatch.setattr(paged_attention, "merge", launches["merge"])
    monkeypatch.setattr(page_kernel, "write_heads", launches["write_heads"])
    monkeypatch.setattr(sampling_kernel, "choose_tokens", launches["choose_tokens"])
    monkeypatch.setattr(products.kernels, "linear", launches["linear"])
    monkeypatch.setattr(products.kernels, "each_head", launches["each_head"])
    monkeypatch.setattr(products.kernels, "rms_norm", launches["rms_norm"])
    monkeypatch.setattr(torch, "tensor", of_list)
    monkeypatch.setattr(torch, "inference_mode", lambda *given: inference_mode(*given) if given else torch.no_grad())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    with FakeTensorMode():
        yield launches


def pretend(family: str, facts: Any, kv_dtype: KvDtype = "auto") -> ModelRunner:
    """The family's model on the device, with the layers of the tests' checkpoint."""
    module = make_module(f"tiny-{family}", torch.bfloat16, GPU, **two_layers(f"tiny-{family}"))
    mla.use_latent_pages(module)
    for each in module.modules():  # as `mla.find_products`, which needs numbers
        if mla.expander(each) is not None:
            each.__dict__[mla._PRODUCT] = each.kv_b_proj
    runner = ModelRunner(
        module,
        facts,
        RunnerConfig(
            max_model_len=LONGEST,
            fingerprint="",
            dtype=torch.bfloat16,
            device=GPU,
            block_size=BLOCK_SIZE,
            kv_dtype=kv_dtype,
        ),
    )
    runner.cuda_kernel = TritonAttention(LONGEST, EXPANDED)
    for each in module.modules():  # as `layers.adopt`, whose trial needs numbers
        if layers.weight_of(each) is not None:
            each.__dict__[modules.REPLACEMENT] = layers.Linear
        elif "RMSNorm" in type(each).__name__ and len(each._parameters) == 1 and not each._buffers:
            each.__dict__.update({modules.REPLACEMENT: layers.RmsNorm, modules.NORM: (1e-6, 0.0, True)})
    runner.use_paged_attention()
    return runner


def batch_of(sequences: list[tuple[int, int]]) -> Batch:
    batch, free = Batch(), iter(range(BLOCKS * 4))
    for done, new in sequences:
        table = [next(free) for _ in range(-(-(done + new) // BLOCK_SIZE))]
        batch.add([1] * new, done, table, [new - 1])
    return batch


@pytest.fixture(scope="module", params=sorted(TINY))
def family(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> tuple[str, Any]:
    """Its name, and the facts that its probe learns."""
    name: str = request.param
    return name, load_model(str(checkpoint(f"tiny-{name}")), dtype=torch.float32, device=CPU).facts


def test_a_forward_never_waits_for_the_device(family: tuple[str, Any], pretended: dict[str, Launch]) -> None:
    """Nothing in it depends on the data of a tensor, and no operator gets tensors of two devices."""
    runner = pretend(*family)
    pages = runner.allocate(BLOCKS * 4)
    for name, sequences in STEPS.items():
        with Waits() as waits:
            logits = runner.forward(pages, batch_of(sequences))
        assert not waits.seen, name
        assert logits.device == GPU
        assert logits.shape == (len(sequences), runner.vocab_size)
    assert pretended["attend"].launched > 0
    assert (pretended["each_head"].launched > 0) == runner.latent
    assert pretended["linear"].launched > 0


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (lambda logits: logits.argmax(-1).tolist(), DataDependentOutputException),
        (lambda logits: logits[logits[:, 0] > 0], DynamicOutputShapeException),
        (lambda logits: logits + torch.ones(logits.shape), RuntimeError),
        (lambda logits: logits.cpu(), AssertionError),
    ],
    ids=["it asks for a number", "a shape depends on data", "two devices", "a copy to the host"],
)
def test_a_forward_that_waits_is_noticed(
    fault: Callable[[torch.Tensor], Any],
    error: type[Exception],
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    pretended: dict[str, Launch],
) -> None:
    """The control."""
    with unset_fake_temporarily():
        facts = load_model(str(checkpoint("tiny-llama")), dtype=torch.float32, device=CPU).facts
    by_modules = ModelRunner.by_modules

    def waits(self: ModelRunner, step: Step, wanted: torch.Tensor) -> torch.Tensor:
        logits = by_modules(self, step, wanted)
        fault(logits)
        return logits

    monkeypatch.setattr(ModelRunner, "by_modules", waits)
    with pytest.raises(error):
        test_a_forward_never_waits_for_the_device(("llama", facts), pretended)


def test_quantised_pages_are_written_and_read_without_a_wait(
    checkpoint: Callable[[str], Path], pretended: dict[str, Launch]
) -> None:
    """By the kernel, also where pages have latents."""
    for name in ("llama", "deepseek-v3"):
        with unset_fake_temporarily():
            facts = load_model(str(checkpoint(f"tiny-{name}")), dtype=torch.float32, device=CPU).facts
        runner = pretend(name, facts, "int8")
        pages = runner.allocate(BLOCKS * 4)
        assert pages.k[0].dtype == torch.int8
        with Waits() as waits:
            runner.forward(pages, batch_of(STEPS["both"]))
        assert not waits.seen, name
        assert pretended["write_heads"].launched > 0


def test_adapters_are_added_without_a_wait(checkpoint: Callable[[str], Path], pretended: dict[str, Launch]) -> None:
    """Which rows have which adapter, of which rank, the host knows."""
    with unset_fake_temporarily():
        facts = load_model(str(checkpoint("tiny-llama")), dtype=torch.float32, device=CPU).facts
    runner = pretend("llama", facts)
    lora = attach(runner, Wanted({}, slots=2, later_rank=8))
    terms = {
        name: LowRank(torch.ones(8, place.width), torch.ones(place.height, 8), 2.0)
        for name, place in lora.places.items()
    }
    lora.put(1, Adapter("red", Path(), b"red", terms))
    batch = batch_of(STEPS["both"])
    batch.adapters = [1, BASE, 1, BASE, BASE]
    added: list[int] = []
    product = lora_module._product
    with Waits() as waits, pytest.MonkeyPatch.context() as patch:
        patch.setattr(lora_module, "_product", lambda x, *more: (added.append(len(x)), product(x, *more))[1])
        runner.forward(runner.allocate(BLOCKS * 4), batch)
    assert not waits.seen
    assert added == [8] * len(terms)


def test_columns_in_another_order_are_multiplied_on_the_device(
    pretended: dict[str, Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of GPTQ with desc_act: their order is where the codes are, as the weight is read back and as it serves."""
    n, k, group = 40, 128, 32
    found = gptq_awq_fp8.Coded(
        torch.empty(n, k, dtype=torch.int16), torch.empty(n, k // group), group, "int4",
        torch.empty(k, dtype=torch.int64), torch.empty(k // group, dtype=torch.int64),
    )  # fmt: skip
    monkeypatch.setattr(gptq_awq_fp8.Product, "coded", lambda product: found)
    monkeypatch.setattr(gptq_awq_fp8.Product, "weight", lambda product: torch.empty(n, k))
    monkeypatch.setattr(torch, "equal", lambda one, other: one.dim() == 2)  # a weight read back; the order is another
    monkeypatch.setattr(codes, "differs", lambda *_: False)
    product = gptq_awq_fp8.Product("", lambda *_: torch.empty(n, k), None, found.scales, found.order, group)
    own = product.codes(codes.packer(GPU))
    assert own is not None
    assert own.order is not None
    with Waits() as waits:
        out = own.multiply(torch.empty(3, k, dtype=torch.bfloat16, device=GPU), None)
    assert out.device == GPU
    assert not waits.seen
    assert pretended["linear"].launched == 1


@pytest.mark.parametrize(("theirs", "ours"), [(torch.int8, torch.int8), (torch.bfloat16, torch.int8)], ids=str)
def test_kv_is_converted_with_one_wait(theirs: torch.dtype, ours: torch.dtype, pretended: dict[str, Launch]) -> None:
    """For the places, whatever the number of attention calls. Control: indices of the host wait each time."""
    source, target = layout(8, theirs), layout(16, ours)
    converter = KvConverter(source, 4, KvCache(target, 4, GPU))
    with Waits() as waits:
        converter.convert([(0, 0), (3, 1), (2, 2)], [1, 0], range(3, 24))
    assert len(waits.seen) == 1, waits.seen
    view = converter.staging.k[0]
    with Waits() as waits:
        view[torch.tensor([0, 1])] = view[torch.tensor([1, 2])]
    assert len(waits.seen) == 2
